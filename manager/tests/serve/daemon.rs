//! A daemon in a home of its own, and its client.

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

/// A daemon in a home of its own that has no images.
pub(crate) struct Daemon {
    pub(crate) home: tempfile::TempDir,
    pub(crate) child: Child,
    pub(crate) url: String,
}

impl Daemon {
    /// One with more options.
    pub(crate) fn start(more: &[&str]) -> Self {
        let home = tempfile::tempdir().unwrap();
        let args = [["serve", "--listen", "127.0.0.1:0"].as_slice(), more].concat();
        let mut command = coppice(&home, &args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut url = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).unwrap();
        Self { home, child, url: url.trim().to_owned() }
    }

    /// A connection to it.
    pub(crate) fn connect(&self) -> TcpStream {
        TcpStream::connect(self.url.strip_prefix("http://").unwrap()).unwrap()
    }

    /// What Prometheus reads.
    pub(crate) fn meters(&self) -> String {
        let mut text = String::new();
        let mut response = ureq::get(format!("{}/metrics", self.url)).call().unwrap();
        response.body_mut().as_reader().read_to_string(&mut text).unwrap();
        text
    }

    /// A new key, as it is told.
    pub(crate) fn key(&self, more: &[&str]) -> Value {
        let args = [["key", "create", "--json"].as_slice(), more].concat();
        let output = coppice(&self.home, &args).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// One request; its status and body.
    pub(crate) fn ask(
        &self,
        method: &str,
        path: &str,
        key: Option<&str>,
        body: &[u8],
    ) -> (u16, Value) {
        let mut request =
            ureq::http::Request::builder().method(method).uri(format!("{}{path}", self.url));
        if let Some(key) = key {
            request = request.header("X-API-KEY", key);
        }
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .allow_non_standard_methods(true)
            .build();
        let agent = ureq::Agent::new_with_config(config);
        let mut response = agent.run(request.body(body).unwrap()).unwrap();
        let mut text = Vec::new();
        response.body_mut().as_reader().read_to_end(&mut text).unwrap();
        (response.status().as_u16(), serde_json::from_slice(&text).unwrap_or(Value::Null))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// `coppice` with this home.
pub(crate) fn coppice(home: &tempfile::TempDir, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_coppice"));
    command.args(args).env("COPPICE_HOME", home.path()).stdin(Stdio::null());
    command
}
