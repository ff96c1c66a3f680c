//! The daemon as a service manager runs it: sockets that are passed, word of its state, and units
//! that the service manager understands.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Starts the daemon with descriptors from 3 on, as a service manager does: a shell puts them
/// there and becomes the daemon, so that its number is known to be the daemon's.
fn start(home: &Path, sockets: &[&OwnedFd], notify: &str, more: &[&str]) -> Child {
    let mut script = String::new();
    for (at, socket) in sockets.iter().enumerate() {
        // From where nothing else can be in between.
        script.push_str(&format!("exec {}<&{}; ", 3 + at, socket.as_raw_fd()));
        rustix::io::fcntl_setfd(socket, rustix::io::FdFlags::empty()).unwrap();
    }
    script.push_str("export LISTEN_PID=$$; exec \"$0\" \"$@\"");
    let coppice = env!("CARGO_BIN_EXE_coppice");
    let mut command = Command::new("bash");
    command
        .args(["-c", &script, coppice, "serve", "--listen", "127.0.0.1:0"])
        .args(more)
        .env("COPPICE_HOME", home)
        .env("LISTEN_FDS", sockets.len().to_string())
        .env("NOTIFY_SOCKET", notify)
        .env("WATCHDOG_USEC", "100000")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Descriptors far from those that the daemon gets.
fn moved(socket: impl Into<OwnedFd>) -> OwnedFd {
    rustix::io::fcntl_dupfd_cloexec(socket.into(), 100).unwrap()
}

fn ask(mut stream: impl std::io::Read + std::io::Write, path: &str) -> String {
    let head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn passed_sockets_are_served_and_the_state_is_told() {
    let home = tempfile::tempdir().unwrap();
    let place = tempfile::tempdir().unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tcp.local_addr().unwrap();
    let (local, notify) = (place.path().join("local"), place.path().join("notify"));
    let unix = UnixListener::bind(&local).unwrap();
    let states = UnixDatagram::bind(&notify).unwrap();
    states.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let (tcp, unix) = (moved(tcp), moved(unix));
    // Who connects before there is a daemon waits for it.
    let early = TcpStream::connect(address).unwrap();
    let mut daemon = start(home.path(), &[&unix, &tcp], notify.to_str().unwrap(), &[]);
    let word = || {
        let mut text = [0; 64];
        let count = states.recv(&mut text).unwrap();
        String::from_utf8(text[..count].to_vec()).unwrap()
    };
    let first = [word(), word()];
    assert!(first.contains(&"READY=1".to_owned()), "{first:?}");
    assert!(first.contains(&"WATCHDOG=1".to_owned()), "{first:?}");
    let mut url = String::new();
    BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut url).unwrap();
    assert_eq!(url.trim(), format!("http://{address}"));
    assert!(ask(early, "/health").starts_with("HTTP/1.1 204"));
    // The administrator's interface is on the other one.
    let answer = ask(UnixStream::connect(&local).unwrap(), "/health");
    assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
    assert!(!home.path().join("daemon.sock").exists());
    let pid = rustix::process::Pid::from_child(&daemon);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    while word() != "STOPPING=1" {}
    assert!(daemon.wait().unwrap().success());
}

#[test]
fn what_is_no_listening_socket_is_refused() {
    let home = tempfile::tempdir().unwrap();
    let (one, _other) = UnixStream::pair().unwrap();
    let daemon = start(home.path(), &[&moved(one)], "", &[]);
    let output = daemon.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(64), "{said}");
    assert!(said.contains("descriptor 3 that was passed is no listening stream socket"), "{said}");
}

#[test]
fn the_log_has_the_request_that_the_answer_names() {
    let home = tempfile::tempdir().unwrap();
    let mut daemon = start(home.path(), &[], "", &["--log-format", "json"]);
    let mut url = String::new();
    BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut url).unwrap();
    let address = url.trim().strip_prefix("http://").unwrap();
    let mut ids = Vec::new();
    for sent in ["x-request-id: mine-1\r\n", "x-request-id: not \"mine\"\r\n", ""] {
        let mut stream = TcpStream::connect(address).unwrap();
        let head = format!(
            "POST /v2/sandboxes?secret HTTP/1.1\r\nhost: localhost\r\n{sent}\
             connection: close\r\ncontent-length: 0\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let id = answer.lines().find_map(|line| line.strip_prefix("x-request-id: ")).unwrap();
        ids.push(id.to_owned());
    }
    assert_eq!(ids[0], "mine-1");
    assert!(ids[1..].iter().all(|id| id.len() == 16), "{ids:?}");
    daemon.kill().unwrap();
    let output = daemon.wait_with_output().unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(!log.contains("secret"), "{log}");
    for id in ids {
        let mut lines = log.lines().map(|line| serde_json::from_str(line).unwrap());
        let answered = lines.find(|line: &serde_json::Value| line["span"]["id"] == id.as_str());
        let answered = answered.unwrap_or_else(|| panic!("{id}: {log}"));
        assert_eq!(answered["span"]["path"], "/v2/sandboxes");
        assert_eq!(answered["fields"]["status"], 401);
    }
}

#[test]
fn the_units_are_understood() {
    let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/systemd");
    let place = tempfile::tempdir().unwrap();
    let copy = |name: &str| {
        let text = std::fs::read_to_string(units.join(name)).unwrap();
        // The program need not be installed here.
        let text = text.replace("/usr/bin/coppice", env!("CARGO_BIN_EXE_coppice"));
        let path = place.path().join(name);
        std::fs::write(&path, &text).unwrap();
        (path, text)
    };
    let (service, text) = copy("coppice.service");
    let (socket, _) = copy("coppice.socket");
    // A restart must not end the machines.
    assert!(text.contains("\nKillMode=process\n"));
    let mut verify = Command::new("systemd-analyze");
    verify.args(["verify", "--man=no"]).args([&service, &socket]);
    let Ok(output) = verify.output() else { return };
    let said = String::from_utf8(output.stderr).unwrap();
    let ours: Vec<&str> = said.lines().filter(|line| line.contains("coppice")).collect();
    assert!(output.status.success() && ours.is_empty(), "{said}");
}
