//! The agent's client against the real agent, which listens on Unix sockets instead of vsock.

#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used, reason = "helpers of tests")]

mod common;

use std::collections::BTreeMap;
use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Duration;

use coppice_agent_protocol::ReadyLine;
use coppice_agent_protocol::process::{
    DataEvent, ProcessConfig, ProcessEvent, ProcessSelector, PtySize, Signal,
};
use coppice_manager::agent::{Agent, Endpoint, Error, Outcome, ProcessStream, Start};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// A running agent and a client of it.
struct Running {
    agent: Agent,
    process: Child,
    dir: tempfile::TempDir,
}

impl Running {
    fn start() -> Self {
        let program = common::program("coppice-agent");
        let dir = tempfile::tempdir().unwrap();
        let (envd, control) = (dir.path().join("envd"), dir.path().join("control"));
        let ready = dir.path().join("ready");
        let report = UnixListener::bind(&ready).unwrap();
        let mut command = Command::new(program);
        for (option, path) in [("--listen", &envd), ("--control", &control), ("--ready", &ready)] {
            command.arg(option).arg(format!("unix:{}", path.display()));
        }
        let process = command.spawn().unwrap();
        let (mut stream, _) = report.accept().unwrap();
        let mut line = Vec::new();
        stream.read_to_end(&mut line).unwrap();
        ReadyLine::decode(&line).unwrap();
        let agent = Agent::new(
            Endpoint::Unix(envd),
            Endpoint::Unix(control.clone()),
            // Nothing here asks for it.
            Endpoint::Unix(control),
        );
        Self { agent, process, dir }
    }

    /// Starts a shell command.
    async fn shell(&self, script: &str, more: impl FnOnce(&mut Start)) -> ProcessStream {
        let process = ProcessConfig {
            cmd: "/bin/sh".into(),
            args: vec!["-c".into(), script.into()],
            ..ProcessConfig::default()
        };
        let mut start = Start { process, user: Some(me()), ..Start::default() };
        more(&mut start);
        self.agent.start(start).await.unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

/// The user that runs the tests; the agent looks users up by name.
fn me() -> String {
    let output = Command::new("id").arg("-un").output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// What a process wrote, and how it ended.
#[derive(Debug, Default)]
struct Seen {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    pty: Vec<u8>,
    outcome: Option<Outcome>,
}

impl Seen {
    fn take(&mut self, event: ProcessEvent) {
        match event {
            ProcessEvent::Data(DataEvent { stdout, stderr, pty }) => {
                self.stdout.extend(stdout.into_iter().flat_map(|blob| blob.0));
                self.stderr.extend(stderr.into_iter().flat_map(|blob| blob.0));
                self.pty.extend(pty.into_iter().flat_map(|blob| blob.0));
            }
            ProcessEvent::End(end) => self.outcome = Some(Outcome::of(&end)),
            _ => {}
        }
    }

    /// Reads a stream to its end.
    async fn all(mut stream: ProcessStream) -> Self {
        let mut seen = Self::default();
        while let Some(event) = stream.next().await.unwrap() {
            seen.take(event);
        }
        seen
    }

    /// Reads a stream until the terminal showed `text`.
    async fn until(stream: &mut ProcessStream, text: &str) {
        let mut seen = Self::default();
        while !String::from_utf8_lossy(&seen.pty).contains(text) {
            seen.take(stream.next().await.unwrap().expect("the terminal closed early"));
        }
    }
}

#[tokio::test]
async fn it_answers_on_both_services() {
    let running = Running::start();
    running.agent.health().await.unwrap();
    let info = running.agent.info().await.unwrap();
    assert!(!info.init);
    assert!(!info.kernel.is_empty());
    // The second call travels on the connection of the first.
    running.agent.info().await.unwrap();
}

#[tokio::test]
async fn outputs_and_the_exit_code_arrive() {
    let running = Running::start();
    let stream = running.shell("echo out; echo err >&2; exit 7", |_| {}).await;
    let seen = Seen::all(stream).await;
    assert_eq!((&seen.stdout[..], &seen.stderr[..]), (&b"out\n"[..], &b"err\n"[..]));
    assert_eq!(seen.outcome, Some(Outcome::Exited(7)));
}

#[tokio::test]
async fn environment_and_directory_are_the_ones_asked_for() {
    let running = Running::start();
    let dir = running.dir.path().canonicalize().unwrap();
    let stream = running
        .shell("echo $GREETING; pwd", |start| {
            start.process.envs = BTreeMap::from([("GREETING".into(), "hello".into())]);
            start.process.cwd = Some(dir.to_str().unwrap().into());
        })
        .await;
    let expected = format!("hello\n{}\n", dir.display());
    assert_eq!(String::from_utf8(Seen::all(stream).await.stdout).unwrap(), expected);
}

#[tokio::test]
async fn input_goes_in_and_its_end_is_seen() {
    let running = Running::start();
    let stream = running.shell("cat; echo end", |start| start.stdin = true).await;
    let pid = stream.pid();
    running.agent.send_input(pid, b"one ", false).await.unwrap();
    running.agent.send_input(pid, b"two\n", false).await.unwrap();
    running.agent.close_stdin(pid).await.unwrap();
    assert_eq!(Seen::all(stream).await.stdout, b"one two\nend\n");
}

#[tokio::test]
async fn without_input_the_process_reads_its_end() {
    let running = Running::start();
    let stream = running.shell("cat; echo end", |_| {}).await;
    assert_eq!(Seen::all(stream).await.stdout, b"end\n");
}

#[tokio::test]
async fn a_signal_ends_a_process_and_is_told() {
    let running = Running::start();
    let stream = running.shell("exec sleep 1000", |_| {}).await;
    running.agent.send_signal(stream.pid(), Signal::Term).await.unwrap();
    assert_eq!(Seen::all(stream).await.outcome, Some(Outcome::Signaled(15)));
}

#[tokio::test]
async fn a_terminal_has_the_size_given_and_then_the_new_one() {
    let running = Running::start();
    let script = "stty size; read line; stty size; exit 3";
    let size = PtySize { cols: 90, rows: 30 };
    let mut stream = running.shell(script, |start| start.pty = Some(size)).await;
    Seen::until(&mut stream, "30 90").await;
    running.agent.resize(stream.pid(), PtySize { cols: 100, rows: 40 }).await.unwrap();
    running.agent.send_input(stream.pid(), b"go\n", true).await.unwrap();
    Seen::until(&mut stream, "40 100").await;
    assert_eq!(Seen::all(stream).await.outcome, Some(Outcome::Exited(3)));
}

#[tokio::test]
async fn the_agents_time_limit_ends_a_process() {
    let running = Running::start();
    let limit = Some(Duration::from_millis(50));
    let mut stream = running.shell("exec sleep 1000", |start| start.timeout = limit).await;
    let error = loop {
        match stream.next().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the stream ended without an error"),
            Err(error) => break error,
        }
    };
    let Error::Refused(error) = error else { panic!("{error}") };
    assert_eq!(error.code, coppice_agent_protocol::Code::DeadlineExceeded);
}

#[tokio::test]
async fn a_process_outlives_its_stream_and_can_be_followed_again() {
    let running = Running::start();
    let stream = running.shell("read line; echo got $line", |start| start.stdin = true).await;
    let pid = stream.pid();
    drop(stream);
    let stream = running.agent.follow(ProcessSelector::Pid(pid)).await.unwrap();
    running.agent.send_input(pid, b"it\n", false).await.unwrap();
    assert_eq!(Seen::all(stream).await.stdout, b"got it\n");
}

#[tokio::test]
async fn a_program_that_is_not_there_is_refused() {
    let running = Running::start();
    let process = ProcessConfig { cmd: "/nonexistent".into(), ..ProcessConfig::default() };
    let start = Start { process, user: Some(me()), ..Start::default() };
    let error = running.agent.start(start).await.unwrap_err();
    let Error::Refused(error) = error else { panic!("{error}") };
    assert_eq!(error.message, "error starting process '/nonexistent': no such file or directory");
}

#[tokio::test]
async fn a_file_comes_back_as_it_went_in() {
    let running = Running::start();
    let path = running.dir.path().join("new dir/a file & more");
    let path = path.to_str().unwrap();
    // Larger than every buffer on the way, and no multiple of any.
    let data: Vec<u8> = (0..3_000_001u32).map(|n| n.wrapping_mul(n).to_le_bytes()[1]).collect();
    let user = me();
    running.agent.upload(path, Some(&user), std::io::Cursor::new(data.clone())).await.unwrap();
    let mut download = running.agent.download(path, Some(&user)).await.unwrap();
    assert_eq!(download.size(), Some(3_000_001));
    let mut back = Vec::new();
    while let Some(piece) = download.next().await.unwrap() {
        back.extend_from_slice(&piece);
    }
    assert!(back == data);
}

#[tokio::test]
async fn a_file_that_is_not_there_is_refused() {
    let running = Running::start();
    let path = running.dir.path().join("missing");
    let error = running.agent.download(path.to_str().unwrap(), Some(&me())).await.unwrap_err();
    let Error::Refused(error) = error else { panic!("{error}") };
    assert_eq!(error.code, coppice_agent_protocol::Code::NotFound);
}

/// The host's side of a vsock as `coppice-vmm` has it, for one connection: reads the line with
/// the port, answers with `reply`, and passes bytes on to `target` if there is one.
async fn vsock(path: PathBuf, reply: &'static [u8], target: Option<PathBuf>) -> String {
    let (mut client, _) = tokio::net::UnixListener::bind(path).unwrap().accept().await.unwrap();
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        line.push(client.read_u8().await.unwrap());
    }
    client.write_all(reply).await.unwrap();
    if let Some(target) = target {
        let mut target = tokio::net::UnixStream::connect(target).await.unwrap();
        // The client may close first.
        tokio::io::copy_bidirectional(&mut client, &mut target).await.ok();
    }
    String::from_utf8(line).unwrap()
}

#[tokio::test]
async fn a_vsock_socket_is_told_the_port_first() {
    let running = Running::start();
    let socket = running.dir.path().join("vsock");
    let target = Some(running.dir.path().join("control"));
    let server = tokio::spawn(vsock(socket.clone(), b"OK 1073741824\n", target));
    tokio::task::yield_now().await;
    let agent = Agent::over_vsock(&socket);
    agent.info().await.unwrap();
    drop(agent);
    assert_eq!(server.await.unwrap(), "CONNECT 49982\n");
}

#[tokio::test]
async fn a_port_nobody_listens_on_is_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("vsock");
    let server = tokio::spawn(vsock(socket.clone(), b"", None));
    tokio::task::yield_now().await;
    let error = Agent::over_vsock(&socket).health().await.unwrap_err();
    assert!(matches!(error, Error::PortClosed(49983)), "{error}");
    server.await.unwrap();
}

#[tokio::test]
async fn a_socket_that_confirms_nothing_is_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("vsock");
    let server = tokio::spawn(vsock(socket.clone(), b"HTTP/1.1 200 OK\r\n\r\n", None));
    tokio::task::yield_now().await;
    let error = Agent::over_vsock(&socket).health().await.unwrap_err();
    assert!(matches!(error, Error::Protocol(_)), "{error}");
    server.await.unwrap();
}
