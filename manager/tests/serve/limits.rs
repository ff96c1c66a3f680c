//! The daemon's limits, at raw sockets: what nobody is known for is not kept, and who asks too
//! fast is told when to ask again.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::daemon::Daemon;
use coppice_manager::registry::{Quota, Registry, Tenant};
use serde_json::json;

/// Sends bytes and reads all until the daemon closes the connection.
fn exchange(daemon: &Daemon, bytes: &[u8]) -> String {
    let mut stream = daemon.connect();
    stream.write_all(bytes).unwrap();
    all(&mut stream)
}

fn all(stream: &mut TcpStream) -> String {
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    String::from_utf8(answer).unwrap()
}

#[test]
fn a_stranger_who_sends_no_body_is_not_waited_for() {
    let daemon = Daemon::start(&[]);
    let began = Instant::now();
    let head = "POST /v2/sandboxes HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n";
    let answer = exchange(&daemon, head.as_bytes());
    assert!(answer.starts_with("HTTP/1.1 401 "), "{answer}");
    assert!(answer.contains("connection: close"), "{answer}");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

/// It is not even looked at to its end: only so much of it is read.
#[test]
fn a_strangers_long_body_ends_the_connection() {
    let daemon = Daemon::start(&[]);
    let mut stream = daemon.connect();
    let head = "POST /v2/sandboxes HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    let chunk = format!("8000\r\n{}\r\n", "x".repeat(0x8000));
    let mut sent = 0;
    // Until nobody reads it any more.
    while sent < 64 << 20 && stream.write_all(chunk.as_bytes()).is_ok() {
        sent += chunk.len();
    }
    assert!(sent < 64 << 20, "{sent} bytes were taken of a stranger");
}

#[test]
fn a_key_that_is_there_twice_is_nobodys() {
    let daemon = Daemon::start(&[]);
    let made = daemon.key(&[]);
    let key = made["key"].as_str().unwrap();
    for (first, second) in [(key, "x"), ("x", key), (key, key)] {
        let answer = exchange(
            &daemon,
            format!(
                "GET /v2/sandboxes HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
                 x-api-key: {first}\r\nx-api-key: {second}\r\n\r\n"
            )
            .as_bytes(),
        );
        assert!(answer.starts_with("HTTP/1.1 401 "), "{answer}");
    }
}

#[test]
fn who_asks_too_fast_is_told_when_to_ask_again_and_others_are_not_hindered() {
    let daemon = Daemon::start(&["--max-requests", "3"]);
    let keys = ["first", "second"].map(|tenant| daemon.key(&["--tenant", tenant]));
    let [key, other] = keys.each_ref().map(|key| key["key"].as_str());
    let refused = (0..100).map(|_| daemon.ask("GET", "/v2/sandboxes", key, b""));
    let (_, body) = refused.into_iter().find(|(status, _)| *status == 429).unwrap();
    assert_eq!(body["code"], json!(429));
    assert!(body["message"].as_str().unwrap().contains("wait 1 s"), "{body}");
    let head = format!(
        "GET /v2/sandboxes HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-api-key: {}\r\n\r\n",
        key.unwrap()
    );
    let answers = (0..100).map(|_| exchange(&daemon, head.as_bytes()));
    let answer = answers.into_iter().find(|answer| answer.starts_with("HTTP/1.1 429 ")).unwrap();
    assert!(answer.contains("\r\nretry-after: 1\r\n"), "{answer}");
    assert_eq!(daemon.ask("GET", "/v2/sandboxes", other, b"").0, 200);
    assert!(daemon.meters().contains("coppice_refused_total{limit=\"requests\"} "));
}

#[test]
fn sandboxes_are_made_only_so_fast() {
    let daemon = Daemon::start(&["--max-creates", "1"]);
    let made = daemon.key(&[]);
    let key = made["key"].as_str();
    // There is no such template; whether there is, is looked at after the limit.
    let create = || daemon.ask("POST", "/v2/sandboxes", key, br#"{"templateID":"none"}"#).0;
    let statuses: Vec<u16> = (0..40).map(|_| create()).collect();
    assert_eq!(statuses[..10], [404; 10]);
    assert!(statuses.contains(&429), "{statuses:?}");
    assert_eq!(daemon.ask("GET", "/v2/sandboxes", key, b"").0, 200);
}

#[test]
fn who_tries_keys_is_slowed_down_and_who_has_one_is_not() {
    let daemon = Daemon::start(&[]);
    let made = daemon.key(&[]);
    let wrong = Some("e2b_0000000000000000000000000000000000000000");
    let mut tries = 0;
    while daemon.ask("GET", "/v2/sandboxes", wrong, b"").0 == 401 {
        tries += 1;
        assert!(tries < 5000, "{tries} wrong keys were tried");
    }
    assert!(tries >= 100, "{tries}");
    assert_eq!(daemon.ask("GET", "/v2/sandboxes", made["key"].as_str(), b"").0, 200);
}

#[test]
fn there_are_so_many_connections_and_then_one_is_told_so() {
    let daemon = Daemon::start(&["--max-connections", "3"]);
    let held: Vec<TcpStream> = (0..3).map(|_| daemon.connect()).collect();
    let answer = all(&mut daemon.connect());
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("\"code\":503"), "{answer}");
    drop(held);
    // They are found to be closed when they are next looked at.
    let began = Instant::now();
    loop {
        let mut stream = daemon.connect();
        let asked = stream.write_all(b"GET /health HTTP/1.0\r\n\r\n");
        let mut answer = Vec::new();
        if asked.is_ok()
            && stream.read_to_end(&mut answer).is_ok()
            && answer.starts_with(b"HTTP/1.0 204")
        {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(30));
    }
}

#[test]
fn a_keys_limits_are_its_tenants() {
    let daemon = Daemon::start(&[]);
    daemon.key(&["--tenant", "a", "--max-sandboxes", "2", "--max-memory", "512"]);
    daemon.key(&["--tenant", "a", "--max-sandboxes", "3", "--max-vcpus", "4"]);
    let registry = Registry::open(daemon.home.path()).unwrap();
    let quota = registry.quota_of(&Tenant::new("a").unwrap()).unwrap();
    let wanted = Quota { sandboxes: Some(3), memory_mib: Some(512), vcpus: Some(4) };
    assert_eq!(quota, Some(wanted));
}
