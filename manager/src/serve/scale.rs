//! What the daemon itself adds to a request, and that it does not get slower with the number of
//! sandboxes it knows. The client is a thread with a socket on loopback, the guest a stub.
//!
//! Figures: `cargo test --release -p coppice --lib serve::scale -- --nocapture`. In the other
//! profile the limits are wide: they find what grows with the number, not what is slow.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use prometheus::{IntCounter, IntGauge};
use tokio::net::TcpListener;

use super::app;
use crate::api::{Api, Limits};
use crate::fleet::stub;
use crate::listen::{Door, Meters};

/// Sandboxes that the daemon knows.
const KNOWN: usize = 1000;
/// Requests of each kind.
const ROUNDS: usize = if cfg!(debug_assertions) { 50 } else { 200 };
/// How much slower anything may be with as many, and by how much the daemon may delay a request.
const SLOWER: Duration = Duration::from_millis(if cfg!(debug_assertions) { 30 } else { 1 });
const ADDED: Duration = Duration::from_millis(if cfg!(debug_assertions) { 30 } else { 1 });

/// Time of the middle one of all rounds, and of the slowest but one in a hundred.
#[derive(Debug, Clone, Copy)]
struct Times {
    p50: Duration,
    p99: Duration,
}

fn measure(mut round: impl FnMut()) -> Times {
    let mut times: Vec<Duration> = (0..ROUNDS)
        .map(|_| {
            let began = Instant::now();
            round();
            began.elapsed()
        })
        .collect();
    times.sort();
    Times { p50: times[ROUNDS / 2], p99: times[ROUNDS * 99 / 100] }
}

/// One request on a connection that is kept; the length of the answer's body.
fn ask(stream: &mut (impl Read + Write), head: &str) -> usize {
    stream.write_all(head.as_bytes()).unwrap();
    let mut seen = Vec::new();
    let mut piece = [0; 16384];
    loop {
        let got = stream.read(&mut piece).unwrap();
        assert!(got > 0, "{}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&piece[..got]);
        let Some(end) = seen.windows(4).position(|four| four == b"\r\n\r\n") else { continue };
        let head = String::from_utf8_lossy(&seen[..end]).to_lowercase();
        assert!(head.starts_with("http/1.1 200"), "{head}");
        let (_, length) = head.split_once("content-length: ").unwrap();
        let length: usize = length.split("\r\n").next().unwrap().parse().unwrap();
        if seen.len() >= end + 4 + length {
            return length;
        }
    }
}

struct Client {
    address: SocketAddr,
    key: String,
}

impl Client {
    fn api(&self, path: &str) -> Times {
        let head =
            format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {}\r\n\r\n", self.key);
        self.times(&head)
    }

    fn times(&self, head: &str) -> Times {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_nodelay(true).unwrap();
        measure(|| {
            ask(&mut stream, head);
        })
    }

    /// The same, asked at the stub's own socket, one connection for each request as the gateway has.
    fn direct(vsock: &PathBuf) -> Times {
        measure(|| {
            let mut stream = UnixStream::connect(vsock).unwrap();
            stream.write_all(b"CONNECT 49983\n").unwrap();
            let mut line = [0; 5];
            stream.read_exact(&mut line).unwrap();
            ask(&mut stream, "GET /health HTTP/1.1\r\nhost: x\r\n\r\n");
        })
    }
}

fn say(what: &str, times: Times) {
    eprintln!("{what:<44} p50 {:>9.1?}  p99 {:>9.1?}", times.p50, times.p99);
}

/// Runs what waits in a thread, and the daemon here.
async fn on_thread<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(job).await.unwrap()
}

#[tokio::test]
async fn a_thousand_sandboxes_slow_nothing_down_and_the_daemon_adds_little() {
    let (_dir, fleet) = stub::fleet(10 * KNOWN);
    let tenant = stub::tenant("a");
    let key = fleet.registry().create_key(tenant.clone()).unwrap().key;
    let (member, vsock) = fleet.add_stub(&tenant);
    let id = member.id().to_string();
    let limits = Limits { requests: u32::MAX, creates: u32::MAX };
    let meters = Meters {
        open: IntGauge::new("open", "open").unwrap(),
        refused: IntCounter::new("refused", "refused").unwrap(),
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = Client { address: listener.local_addr().unwrap(), key };
    let app = app(Api::new(fleet.clone(), "localhost".into(), limits));
    tokio::spawn(async move {
        Door::new(100, meters).serve(listener, app, std::future::pending()).await;
    });

    let guest = format!("GET /health HTTP/1.1\r\nhost: localhost\r\ne2b-sandbox-id: {id}\r\n\r\n");
    let show = format!("/sandboxes/{id}");
    let asked = move |client: &Client| {
        [client.api("/v2/sandboxes?limit=100"), client.api(&show), client.times(&guest)]
    };
    // A full page, before and after.
    fleet.add_paused(&tenant, 100);
    let (few, client, asked) = on_thread(move || (asked(&client), client, asked)).await;
    let made = |known| {
        let times = measure(|| drop(fleet.made(&tenant).unwrap()));
        say(&format!("create without a machine, {known} known"), times);
        times
    };
    let made_few = made(100);
    fleet.add_paused(&tenant, KNOWN);
    let made_many = made(KNOWN);
    let (many, direct) = on_thread(move || (asked(&client), Client::direct(&vsock))).await;

    for (what, few, many) in [
        ("list", few[0], many[0]),
        ("show", few[1], many[1]),
        ("to a guest", few[2], many[2]),
        ("create", made_few, made_many),
    ] {
        say(&format!("{what}, 100 known"), few);
        say(&format!("{what}, {KNOWN} known"), many);
        assert!(many.p50 <= few.p50 * 2 + SLOWER, "{what}: {few:?} is now {many:?}");
    }
    say("the guest without the daemon", direct);
    let added = many[2].p50.saturating_sub(direct.p50);
    eprintln!("the daemon adds {added:?} to a guest's answer");
    assert!(added < ADDED, "{added:?}");
    assert!(many[1].p50 < ADDED, "{:?}", many[1]);
}
