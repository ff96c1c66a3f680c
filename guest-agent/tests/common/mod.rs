//! Runs the real agent on this host and talks to it over Unix sockets.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use bytes::Bytes;
use coppice_agent_protocol::envelope::{self, EndStream, FrameDecoder};
use coppice_agent_protocol::process::{
    DataEvent, EndEvent, ProcessConfig, ProcessEvent, StartRequest, StreamResponse,
};
use coppice_agent_protocol::{ConnectError, ReadyLine, STREAM_CONTENT_TYPE, UNARY_CONTENT_TYPE};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::AsyncReadExt as _;
use tokio::net::{UnixListener, UnixStream};

/// Longer than anything here takes; what takes longer hangs.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// Runs a test on a runtime of its own, for at most [`LIMIT`].
pub(crate) fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async { tokio::time::timeout(LIMIT, test).await.expect("the test hangs") })
}

/// Path of the agent's binary.
pub(crate) fn binary() -> &'static str {
    env!("CARGO_BIN_EXE_coppice-agent")
}

/// A running agent; killed when dropped.
pub(crate) struct Agent {
    pub(crate) child: Child,
    pub(crate) dir: TempDir,
    pub(crate) ready: ReadyLine,
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Agent {
    /// Starts the agent and waits for its ready line.
    pub(crate) async fn start() -> Self {
        Self::launch(|dir| {
            let mut command = Command::new(binary());
            for (option, name) in [
                ("--listen", "envd"),
                ("--control", "control"),
                ("--proxy", "proxy"),
                ("--ready", "ready"),
            ] {
                command.arg(option).arg(format!("unix:{}", dir.join(name).display()));
            }
            command
        })
        .await
    }

    /// Starts the agent with a command that makes it listen on `envd` and `control` in the
    /// directory, and report to `ready` there.
    pub(crate) async fn launch(command: impl FnOnce(&Path) -> Command) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(dir.path().join("ready")).expect("a socket");
        let child = command(dir.path()).spawn().expect("the agent starts");
        let (mut stream, _) = listener.accept().await.expect("the agent connects");
        let mut line = Vec::new();
        stream.read_to_end(&mut line).await.expect("a ready line");
        let ready = ReadyLine::decode(&line).expect("a ready line in form");
        Self { child, dir, ready }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Sends one request on a connection of its own.
    pub(crate) async fn send(
        &self,
        socket: &str,
        request: Request<Full<Bytes>>,
    ) -> Response<Incoming> {
        let stream = UnixStream::connect(self.path(socket)).await.expect("a connection");
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.expect("HTTP");
        tokio::spawn(connection);
        sender.send_request(request).await.expect("a response")
    }

    /// A unary call of the envd service: its status and JSON.
    pub(crate) async fn call(
        &self,
        procedure: &str,
        message: &impl Serialize,
    ) -> (StatusCode, Value) {
        let text = serde_json::to_vec(message).unwrap();
        self.call_raw(procedure, &[], text).await
    }

    /// A unary call of any service: its status and JSON.
    pub(crate) async fn call_service(
        &self,
        service: &str,
        procedure: &str,
        message: &Value,
    ) -> (StatusCode, Value) {
        let request = Request::post(format!("/{service}/{procedure}"))
            .header("content-type", UNARY_CONTENT_TYPE)
            .body(Full::new(Bytes::from(message.to_string())))
            .unwrap();
        json_of(self.send("envd", request).await).await
    }

    pub(crate) async fn call_raw(
        &self,
        procedure: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> (StatusCode, Value) {
        let mut request = Request::post(format!("/process.Process/{procedure}"))
            .header("content-type", UNARY_CONTENT_TYPE);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        json_of(self.send("envd", request.body(Full::new(body.into())).unwrap()).await).await
    }

    /// A call whose reply streams.
    pub(crate) async fn stream(
        &self,
        procedure: &str,
        headers: &[(&str, &str)],
        body: Vec<u8>,
    ) -> Events {
        self.stream_at(&format!("/process.Process/{procedure}"), headers, body).await
    }

    /// The same of any service.
    pub(crate) async fn stream_at(
        &self,
        target: &str,
        headers: &[(&str, &str)],
        body: Vec<u8>,
    ) -> Events {
        let mut request = Request::post(target).header("content-type", STREAM_CONTENT_TYPE);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = self.send("envd", request.body(Full::new(body.into())).unwrap()).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], STREAM_CONTENT_TYPE);
        Events { body: response.into_body(), decoder: FrameDecoder::new(1 << 20) }
    }

    /// Starts a process with headers.
    pub(crate) async fn start_with(
        &self,
        request: &StartRequest,
        headers: &[(&str, &str)],
    ) -> Events {
        self.stream("Start", headers, envelope::encode_message(request).unwrap()).await
    }

    /// Starts a shell command without standard input.
    pub(crate) async fn shell(&self, script: &str) -> Events {
        self.start_with(&shell(script), &[]).await
    }

    /// Streams the events of a process.
    pub(crate) async fn connect(&self, pid: u32) -> Events {
        let message = serde_json::json!({ "process": { "pid": pid } });
        self.stream("Connect", &[], envelope::encode_message(&message).unwrap()).await
    }

    /// A plain HTTP request: its status and body.
    pub(crate) async fn http(
        &self,
        method: Method,
        target: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> (StatusCode, HeaderMap, Bytes) {
        let mut request = Request::builder().method(method).uri(target).header("host", "guest");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = self.send("envd", request.body(Full::new(body.into())).unwrap()).await;
        let (parts, body) = response.into_parts();
        let body = body.collect().await.expect("a whole body").to_bytes();
        (parts.status, parts.headers, body)
    }

    /// A control call: its status and JSON.
    pub(crate) async fn control(
        &self,
        method: Method,
        target: &str,
        body: impl Into<Bytes>,
    ) -> (StatusCode, Value) {
        let request = Request::builder().method(method).uri(target);
        json_of(self.send("control", request.body(Full::new(body.into())).unwrap()).await).await
    }

    /// Memory of the agent that no other process shares, in KiB.
    pub(crate) fn private_kib(&self) -> u64 {
        let path = format!("/proc/{}/smaps_rollup", self.child.id());
        let text = std::fs::read_to_string(path).unwrap();
        let fields = text.lines().filter(|line| line.starts_with("Private_"));
        fields.map(|line| line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()).sum()
    }
}

async fn json_of(response: Response<Incoming>) -> (StatusCode, Value) {
    let status = response.status();
    let body = response.into_body().collect().await.expect("a whole body").to_bytes();
    (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

/// A request for a shell command without standard input.
pub(crate) fn shell(script: &str) -> StartRequest {
    let process = ProcessConfig {
        cmd: "/bin/sh".into(),
        args: vec!["-c".into(), script.into()],
        cwd: Some("/".into()),
        ..ProcessConfig::default()
    };
    StartRequest { process, stdin: Some(false), ..StartRequest::default() }
}

/// The same with standard input open.
pub(crate) fn shell_with_stdin(script: &str) -> StartRequest {
    StartRequest { stdin: None, ..shell(script) }
}

/// The event stream of a process.
pub(crate) struct Events {
    body: Incoming,
    decoder: FrameDecoder,
}

/// Everything a stream had.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Transcript {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) pty: Vec<u8>,
    pub(crate) end: Option<EndEvent>,
    pub(crate) error: Option<ConnectError>,
}

impl Transcript {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).expect("UTF-8")
    }

    fn add(&mut self, data: DataEvent) {
        self.stdout.extend(data.stdout.map(|blob| blob.0).unwrap_or_default());
        self.stderr.extend(data.stderr.map(|blob| blob.0).unwrap_or_default());
        self.pty.extend(data.pty.map(|blob| blob.0).unwrap_or_default());
    }
}

impl Events {
    /// The next event of a process, or how the stream ended.
    pub(crate) async fn next(&mut self) -> Result<ProcessEvent, Option<ConnectError>> {
        self.message::<StreamResponse>().await.map(|response| response.event)
    }

    /// The next message, or how the stream ended.
    pub(crate) async fn message<T: DeserializeOwned>(&mut self) -> Result<T, Option<ConnectError>> {
        loop {
            if let Some(frame) = self.decoder.next_frame().expect("frames in form") {
                if frame.is_end() {
                    let end: EndStream = serde_json::from_slice(&frame.payload).unwrap();
                    assert!(self.body.frame().await.is_none(), "bytes after the last frame");
                    return Err(end.error);
                }
                return Ok(serde_json::from_slice(&frame.payload).unwrap());
            }
            let piece = self.body.frame().await.expect("no last frame").expect("a whole body");
            self.decoder.push(piece.data_ref().expect("data"));
        }
    }

    /// The process ID in the start event, which has to come first.
    pub(crate) async fn pid(&mut self) -> u32 {
        match self.next().await {
            Ok(ProcessEvent::Start(start)) => start.pid,
            other => panic!("the stream begins with {other:?}"),
        }
    }

    /// The rest of the stream.
    pub(crate) async fn rest(&mut self) -> Transcript {
        let mut transcript = Transcript::default();
        loop {
            match self.next().await {
                Ok(ProcessEvent::Data(data)) => transcript.add(data),
                Ok(ProcessEvent::End(end)) => transcript.end = Some(end),
                Ok(ProcessEvent::Keepalive) => {}
                Ok(other) => panic!("an event out of place: {other:?}"),
                Err(error) => {
                    transcript.error = error;
                    return transcript;
                }
            }
        }
    }

    /// The whole stream, its start event checked.
    pub(crate) async fn all(&mut self) -> Transcript {
        self.pid().await;
        self.rest().await
    }

    /// Output until it contains `text`.
    pub(crate) async fn until(&mut self, text: &str) -> Transcript {
        let mut transcript = Transcript::default();
        loop {
            match self.next().await {
                Ok(ProcessEvent::Data(data)) => transcript.add(data),
                Ok(ProcessEvent::Keepalive) => {}
                other => panic!("waiting for {text:?}, got {other:?} after {transcript:?}"),
            }
            let output = [&transcript.stdout[..], &transcript.stderr, &transcript.pty].concat();
            if String::from_utf8_lossy(&output).contains(text) {
                return transcript;
            }
        }
    }
}
