//! A guest that sends as fast as it can, wherever it can: the daemon answers others, and keeps
//! nothing of it.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::json;

use super::client::{Client, Daemon, Sandbox};
use crate::common::on_lane;

/// Connects to the host over vsock again and again and sends what it takes, on every port that the
/// host listens on or might; and serves an endless body, and an endless head.
const FLOOD: &str = r#"
import socket, threading
def out(port):
    while True:
        try:
            s = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
            s.settimeout(1)
            s.connect((2, port))
            while True:
                s.send(b"x" * 65536)
        except OSError:
            s.close()
def serve(port, head, piece):
    listener = socket.create_server(("127.0.0.1", port), backlog=64)
    while True:
        s, _ = listener.accept()
        def flood(s=s):
            try:
                # An answer that comes before its request is none.
                s.recv(65536)
                s.send(head)
                while True:
                    s.send(piece)
            except OSError:
                s.close()
        threading.Thread(target=flood, daemon=True).start()
for port in (49981, 49982, 49983, 1, 1024):
    threading.Thread(target=out, args=(port,), daemon=True).start()
body = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n"
threading.Thread(target=serve, args=(8000, body, b"y" * 65536), daemon=True).start()
serve(8001, b"HTTP/1.1 200 OK\r\n", b"a: " + b"b" * 60 + b"\r\n")
"#;

/// Asks a port of a guest for something and reads nothing of the answer.
fn ask(client: &Client, sandbox: &Sandbox, port: u16) -> TcpStream {
    let mut stream = TcpStream::connect(client.url.strip_prefix("http://").unwrap()).unwrap();
    let head = format!("GET / HTTP/1.1\r\nhost: {port}-{}.localhost\r\n\r\n", sandbox.id);
    stream.write_all(head.as_bytes()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    stream
}

/// The first words of an answer.
fn begun(stream: &mut TcpStream) -> String {
    let mut words = [0; 12];
    stream.read_exact(&mut words).unwrap();
    String::from_utf8_lossy(&words).into_owned()
}

#[test]
fn a_guest_that_floods_hinders_nobody_else_and_is_not_kept() {
    on_lane!({
        let daemon = Daemon::start();
        let client = &daemon.client;
        let (calm, flooding) = (client.create(json!({})), client.create(json!({})));
        assert_eq!(client.write(&flooding, "/root/flood.py", FLOOD), Some(200));
        let before = daemon.pss_kib();
        client.run(&flooding, "nohup python3 /root/flood.py >/dev/null 2>&1 & sleep 1");
        // An endless answer flows, and a client that does not read it holds it up.
        // Until it listens, the port is closed.
        while begun(&mut ask(client, &flooding, 8000)) != "HTTP/1.1 200" {}
        let mut held: Vec<TcpStream> = (0..8).map(|_| ask(client, &flooding, 8000)).collect();
        for stream in &mut held {
            assert_eq!(begun(stream), "HTTP/1.1 200");
            stream.read_exact(&mut vec![0; 65536]).unwrap();
        }
        // A head without an end is no answer.
        for _ in 0..4 {
            let mut stream = ask(client, &flooding, 8001);
            assert_eq!(begun(&mut stream), "HTTP/1.1 502");
            let mut answer = [0; 400];
            let got = stream.read(&mut answer).unwrap();
            let answer = String::from_utf8_lossy(&answer[..got]);
            assert!(!answer.contains("port is not open"), "{answer}");
        }
        let began = Instant::now();
        for round in 0..5 {
            assert_eq!(client.get(&format!("/sandboxes/{}", flooding.id)).0, 200);
            assert_eq!(client.write(&calm, "/root/state", &round.to_string()), Some(200));
            assert_eq!(client.read(&calm, "/root/state"), round.to_string());
        }
        let took = began.elapsed();
        assert!(took < Duration::from_secs(30), "{took:?}");
        let grown = daemon.pss_kib().saturating_sub(before);
        assert!(grown < 16 * 1024, "the daemon has grown by {grown} KiB");
        eprintln!("under flood: 15 requests in {took:?}; the daemon grew by {grown} KiB");
        // It is paused and removed like another.
        assert_eq!(client.post(&format!("/sandboxes/{}/pause", flooding.id), json!({})).0, 204);
        assert_eq!(client.delete(&flooding.id).0, 204);
        drop(held);
        daemon.end();
    });
}
