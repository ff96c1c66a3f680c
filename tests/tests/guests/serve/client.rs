//! A daemon with a store of its own, and a client of its API.

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use coppice_manager::registry::{Registry, Wanted};
use serde_json::{Value, json};

use crate::common::{coppice, home, stdout};
use crate::cycles::vmm_processes;

/// A home with the kernels and images of this checkout, and a daemon in it.
pub(super) struct Daemon {
    dir: tempfile::TempDir,
    child: Option<Child>,
    pub(super) client: Client,
}

impl Daemon {
    pub(super) fn start() -> Self {
        Self::start_with(&[])
    }

    /// One with more options.
    pub(super) fn start_with(options: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), options)
    }

    /// One whose home is this directory; if there is a file `log` in it, it logs there.
    pub(super) fn start_in(dir: tempfile::TempDir, options: &[&str]) -> Self {
        for part in ["kernels", "images", "coppice-agent"] {
            symlink(home().path().join(part), dir.path().join(part)).unwrap();
        }
        let key = stdout(&mut command(dir.path(), &["key", "create"])).trim().to_owned();
        let (child, url) = serve(dir.path(), options);
        Self { dir, child: Some(child), client: Client { url, key } }
    }

    /// Where its files are.
    pub(super) fn home(&self) -> &Path {
        self.dir.path()
    }

    /// A meter's value, as Prometheus reads it.
    pub(super) fn meter(&self, name: &str) -> f64 {
        let (_, text) = self.client.try_ask("GET", "/metrics", &[], b"").unwrap();
        let text = String::from_utf8(text).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
    }

    /// Memory of the daemon's process that is its own or its share of what others have, in KiB.
    pub(super) fn pss_kib(&self) -> u64 {
        let pid = self.child.as_ref().unwrap().id();
        let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
        let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse().unwrap()
    }

    /// Why a sandbox is gone, as it was written down.
    pub(super) fn why_gone(&self, sandbox: &str) -> Option<String> {
        let registry = Registry::open(self.dir.path()).unwrap();
        let events = registry.events(&Wanted::default(), 10_000).unwrap().events;
        let gone =
            events.into_iter().find(|event| event.sandbox == sandbox && event.kind == "gone");
        gone.map(|event| event.text)
    }

    /// `coppice` with this home.
    pub(super) fn command(&self, args: &[&str]) -> Command {
        command(self.dir.path(), args)
    }

    /// How many images of its own the store has.
    pub(super) fn images(&self) -> usize {
        let files = std::fs::read_dir(self.dir.path().join("layers")).unwrap();
        let is_image = |path: &Path| path.extension().is_some_and(|ending| ending == "base");
        files.filter(|file| is_image(&file.as_ref().unwrap().path())).count()
    }

    /// Kills the daemon without a warning.
    pub(super) fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Has the daemon end in order.
    fn stop(&mut self) {
        let mut child = self.child.take().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert!(child.wait().unwrap().success());
    }

    /// Starts the daemon again; it listens when this returns.
    pub(super) fn start_again(&mut self) {
        let (child, url) = serve(self.dir.path(), &[]);
        self.child = Some(child);
        self.client.url = url;
    }

    /// A key of another tenant.
    pub(super) fn other_tenant(&self, name: &str) -> Client {
        let key = stdout(&mut self.command(&["key", "create", "--tenant", name]));
        Client { url: self.client.url.clone(), key: key.trim().to_owned() }
    }

    /// Removes all sandboxes and snapshots, and sees that nothing is left of them.
    pub(super) fn end(mut self) {
        for sandbox in self.client.list() {
            assert_eq!(self.client.delete(&sandbox).0, 204);
        }
        let snapshots = self.client.get("/snapshots").1;
        for snapshot in snapshots.as_array().unwrap() {
            let id = snapshot["snapshotID"].as_str().unwrap();
            assert_eq!(self.client.ask("DELETE", &format!("/templates/{id}"), None).0, 204);
        }
        self.stop();
        let found = stdout(&mut self.command(&["fsck"]));
        assert!(!found.contains("belongs to nothing"), "{found}");
        assert_eq!(stdout(&mut self.command(&["ls", "--json"])).trim(), "[]");
        let tree: Value =
            serde_json::from_str(&stdout(&mut self.command(&["tree", "--json"]))).unwrap();
        // The built-in template's checkpoint stays.
        assert!(tree["checkpoints"].as_array().unwrap().len() <= 1, "{tree}");
        assert_eq!(vmm_processes(), Vec::<u32>::new());
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn command(home: &Path, args: &[&str]) -> Command {
    let mut command = coppice(args);
    command.env("COPPICE_HOME", home);
    command
}

fn serve(home: &Path, more: &[&str]) -> (Child, String) {
    let options = [["serve", "--listen", "127.0.0.1:0"].as_slice(), more].concat();
    let mut command = command(home, &options);
    if let Ok(log) = std::fs::OpenOptions::new().append(true).open(home.join("log")) {
        command.stderr(log);
    }
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut url = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).unwrap();
    assert!(url.starts_with("http://"), "the daemon does not listen: {url:?}");
    (child, url.trim().to_owned())
}

/// One tenant's way to a daemon.
#[derive(Clone)]
pub(super) struct Client {
    pub(super) url: String,
    pub(super) key: String,
}

impl Client {
    /// Asks something; nothing when the daemon goes away meanwhile.
    pub(super) fn try_ask(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Option<(u16, Vec<u8>)> {
        let mut request =
            ureq::http::Request::builder().method(method).uri(format!("{}{path}", self.url));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .allow_non_standard_methods(true)
            .build();
        let mut response =
            ureq::Agent::new_with_config(config).run(request.body(body).unwrap()).ok()?;
        let mut bytes = Vec::new();
        response.body_mut().as_reader().read_to_end(&mut bytes).ok()?;
        Some((response.status().as_u16(), bytes))
    }

    /// Asks the API something; nothing when the daemon goes away meanwhile.
    pub(super) fn try_api(
        &self,
        method: &str,
        path: &str,
        body: Option<Value>,
    ) -> Option<(u16, Value)> {
        let body = body.map_or_else(Vec::new, |body| body.to_string().into_bytes());
        let (status, bytes) = self.try_ask(method, path, &[("x-api-key", &self.key)], &body)?;
        Some((status, serde_json::from_slice(&bytes).unwrap_or(Value::Null)))
    }

    pub(super) fn ask(&self, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
        self.try_api(method, path, body).unwrap()
    }

    pub(super) fn get(&self, path: &str) -> (u16, Value) {
        self.ask("GET", path, None)
    }

    pub(super) fn post(&self, path: &str, body: Value) -> (u16, Value) {
        self.ask("POST", path, Some(body))
    }

    /// Makes a sandbox of the built-in template.
    pub(super) fn create(&self, more: Value) -> Sandbox {
        let mut body = json!({"templateID": "base", "timeout": 900});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, made) = self.post("/v2/sandboxes", body);
        assert_eq!(status, 201, "{made}");
        Sandbox::of(&made)
    }

    pub(super) fn delete(&self, id: &str) -> (u16, Value) {
        self.ask("DELETE", &format!("/sandboxes/{id}"), None)
    }

    /// IDs of all sandboxes, running and paused.
    pub(super) fn list(&self) -> Vec<String> {
        let (status, list) = self.get("/v2/sandboxes?limit=100");
        assert_eq!(status, 200, "{list}");
        let ids = list.as_array().unwrap().iter();
        ids.map(|listed| listed["sandboxID"].as_str().unwrap().to_owned()).collect()
    }

    /// Asks a guest something through the gateway.
    pub(super) fn guest(
        &self,
        sandbox: &Sandbox,
        method: &str,
        path: &str,
        body: &[u8],
    ) -> Option<(u16, Vec<u8>)> {
        let headers = [
            ("e2b-sandbox-id", sandbox.id.as_str()),
            ("x-access-token", sandbox.token.as_str()),
            ("authorization", "Basic cm9vdDo="),
            ("content-type", "multipart/form-data; boundary=cut"),
        ];
        self.try_ask(method, path, &headers, body)
    }

    /// Writes a file in a guest; the status, or nothing when the daemon goes away meanwhile.
    pub(super) fn write(&self, sandbox: &Sandbox, path: &str, text: &str) -> Option<u16> {
        let body = format!(
            "--cut\r\ncontent-disposition: form-data; name=\"file\"; filename=\"x\"\r\n\r\n\
             {text}\r\n--cut--\r\n"
        );
        let written = self.guest(sandbox, "POST", &format!("/files?path={path}"), body.as_bytes());
        written.map(|(status, _)| status)
    }

    /// Runs a shell command in a guest as root, to its end; its exit code. Nothing when there is
    /// no answer.
    pub(super) fn try_run(&self, sandbox: &Sandbox, command: &str) -> Option<i64> {
        let start = json!({"process": {"cmd": "/bin/sh", "args": ["-c", command]}}).to_string();
        let mut body = vec![0];
        body.extend(u32::try_from(start.len()).unwrap().to_be_bytes());
        body.extend(start.as_bytes());
        let headers = [
            ("e2b-sandbox-id", sandbox.id.as_str()),
            ("x-access-token", sandbox.token.as_str()),
            ("authorization", "Basic cm9vdDo="),
            ("content-type", "application/connect+json"),
            ("connect-protocol-version", "1"),
        ];
        let (status, said) = self.try_ask("POST", "/process.Process/Start", &headers, &body)?;
        let said = String::from_utf8_lossy(&said);
        assert_eq!(status, 200, "{said}");
        let (_, end) = said.split_once("\"end\":")?;
        let code = end.split_once("\"exitCode\":").map_or("0", |(_, code)| code);
        let digits: String = code.chars().take_while(|c| c.is_ascii_digit() || *c == '-').collect();
        digits.parse().ok()
    }

    /// Runs a shell command in a guest as root; it must succeed.
    pub(super) fn run(&self, sandbox: &Sandbox, command: &str) {
        assert_eq!(self.try_run(sandbox, command), Some(0), "{command}");
    }

    /// Reads a file in a guest.
    pub(super) fn read(&self, sandbox: &Sandbox, path: &str) -> String {
        let (status, bytes) =
            self.guest(sandbox, "GET", &format!("/files?path={path}"), b"").unwrap();
        let text = String::from_utf8(bytes).unwrap();
        assert_eq!(status, 200, "{text}");
        text
    }
}

/// A sandbox as its maker knows it.
#[derive(Debug, Clone)]
pub(super) struct Sandbox {
    pub(super) id: String,
    pub(super) token: String,
}

impl Sandbox {
    pub(super) fn of(made: &Value) -> Self {
        let text = |key: &str| made[key].as_str().unwrap_or_default().to_owned();
        Self { id: text("sandboxID"), token: text("envdAccessToken") }
    }
}
