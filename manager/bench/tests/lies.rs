//! Peers that lie. A service with E2B's API says that its sandbox runs; what counts is what a
//! command in it answers, and only with this round's token.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use coppice_agent_protocol::envelope::{FrameDecoder, encode, encode_end};
use coppice_bench::cache::Cache;
use coppice_bench::contender::e2b::E2b;
use coppice_bench::contender::{Contender, Guest};
use coppice_bench::scenario::{Kind, Workload};
use coppice_bench::schedule::{self, Journal, Plan, Results, Step};
use serde_json::{Value, json};

/// What a service does with a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Conduct {
    /// Prints what it was asked to.
    Honest,
    /// Says that the command runs, and nothing more.
    Silent,
    /// Says that the command runs, again and again.
    Busy,
    /// Says that the command ended, which printed nothing.
    Mute,
    /// Prints what it was asked for the first time.
    Stale,
    /// Answers before it could know the question.
    Early,
}

/// A service, with the sandboxes that it made and that were killed.
#[derive(Debug, Default)]
struct Service {
    made: AtomicU32,
    killed: AtomicU32,
    first: Mutex<Option<String>>,
}

impl Service {
    /// Serves connections, each with one request, for as long as the test runs.
    fn start(conduct: Conduct) -> (Arc<Self>, String) {
        let service = Arc::new(Self::default());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let shared = service.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let service = shared.clone();
                // A client that hangs up in the middle is its own affair.
                thread::spawn(move || service.serve(stream, conduct).ok());
            }
        });
        (service, url)
    }

    fn serve(&self, stream: TcpStream, conduct: Conduct) -> std::io::Result<()> {
        let mut stream = BufReader::new(stream);
        let mut request = String::new();
        stream.read_line(&mut request)?;
        let (mut length, mut line) = (0, String::from("x"));
        while line.trim_end() != "" {
            line.clear();
            stream.read_line(&mut line)?;
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body)?;
        let stream = stream.get_mut();
        if request.starts_with("POST /v2/sandboxes ") {
            let number = self.made.fetch_add(1, Ordering::SeqCst);
            let answer = json!({ "sandboxID": format!("s{number}"), "templateID": "base" });
            let text = answer.to_string();
            return write!(
                stream,
                "HTTP/1.1 201 Created\r\nContent-Length: {}\r\n\r\n{text}",
                text.len()
            );
        }
        if request.starts_with("DELETE /sandboxes/") {
            self.killed.fetch_add(1, Ordering::SeqCst);
            return write!(stream, "HTTP/1.1 204 No Content\r\n\r\n");
        }
        assert!(request.starts_with("POST /process.Process/Start "), "{request}");
        self.run(stream, &body, conduct)
    }

    /// Answers a command.
    fn run(&self, stream: &mut TcpStream, body: &[u8], conduct: Conduct) -> std::io::Result<()> {
        write!(stream, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")?;
        event(stream, &json!({ "start": { "pid": 1 } }))?;
        match conduct {
            Conduct::Silent => {
                // Until the client hangs up.
                stream.read_to_end(&mut Vec::new())?;
                return Ok(());
            }
            Conduct::Busy => loop {
                event(stream, &json!({ "keepalive": {} }))?;
            },
            Conduct::Mute => {}
            Conduct::Honest => event(stream, &data(&wanted(body)))?,
            Conduct::Stale => {
                let text = self.first.lock().unwrap().get_or_insert_with(|| wanted(body)).clone();
                event(stream, &data(&text))?;
            }
            Conduct::Early => event(stream, &data("0123456789abcdef0123456789abcdef\n"))?,
        }
        event(
            stream,
            &json!({ "end": { "exitCode": 0, "exited": true, "status": "exit status 0" } }),
        )?;
        chunk(stream, &encode_end(None))?;
        stream.write_all(b"0\r\n\r\n")
    }
}

/// What the command would print.
fn wanted(body: &[u8]) -> String {
    let mut decoder = FrameDecoder::new(1 << 20);
    decoder.push(body);
    let start: Value =
        serde_json::from_slice(&decoder.next_frame().unwrap().unwrap().payload).unwrap();
    assert_eq!(start["process"]["cmd"], "/bin/echo");
    format!("{}\n", start["process"]["args"][0].as_str().unwrap())
}

fn data(text: &str) -> Value {
    let blob = coppice_agent_protocol::json::Blob(text.as_bytes().to_vec());
    json!({ "data": { "stdout": blob } })
}

fn event(stream: &mut TcpStream, event: &Value) -> std::io::Result<()> {
    chunk(stream, &encode(0, json!({ "event": event }).to_string().as_bytes()))
}

fn chunk(stream: &mut TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    write!(stream, "{:x}\r\n", bytes.len())?;
    stream.write_all(bytes)?;
    stream.write_all(b"\r\n")
}

struct Nobody;

impl Journal for Nobody {
    fn step(&mut self, _step: &Step<'_>) {}
    fn done(&mut self, _results: &Results) {}
}

/// Two rounds of creates and commands against a service; it is told, too, whether any sandbox of
/// it was left.
fn measured(conduct: Conduct) -> Results {
    let (service, url) = Service::start(conduct);
    let peer = E2b::new("e2b".into(), &url, None, "key".into(), "base".into()).unwrap();
    let contenders: Vec<Box<dyn Contender>> = vec![Box::new(peer)];
    let guest = Guest {
        kernel: "/dev/null".into(),
        image: "/dev/null".into(),
        memory_mib: 128,
        vcpus: 1,
        limit: Duration::from_secs(1),
    };
    let plan = Plan {
        scenarios: vec![Kind::Restore],
        rounds: 2,
        warm_up: 0,
        caches: vec![Cache::Warm],
        guests: vec![guest],
        workload: Workload {
            concurrency: 1,
            age: Duration::ZERO,
            dirty_mib: 1,
            io_mib: 1,
            most_vms: 1,
            reserve_mib: 1,
            pause: Duration::ZERO,
        },
        noise: false,
    };
    let results = schedule::run(&plan, &contenders, &mut Nobody);
    let (made, killed) =
        (service.made.load(Ordering::SeqCst), service.killed.load(Ordering::SeqCst));
    assert!(made > 0, "{results:?}");
    assert_eq!(made, killed, "sandboxes were left");
    results
}

/// Asserts that nothing a service says counts, and that every round failed for this reason.
fn caught(conduct: Conduct, why: &str) {
    let results = measured(conduct);
    assert!(results.series.is_empty(), "{conduct:?} counts: {:?}", results.series);
    assert_eq!(results.failures.len(), 2, "{:?}", results.failures);
    for failure in &results.failures {
        assert!(failure.message.contains(why), "{conduct:?}: {}", failure.message);
    }
}

#[test]
fn an_honest_peer_is_measured() {
    let results = measured(Conduct::Honest);
    assert_eq!(results.failures, []);
    let series = &results.series[0];
    assert_eq!((&*series.metric, series.samples.len()), ("restore_first_output_ms", 2));
    for sample in &series.samples {
        let names: Vec<_> = sample.stages.iter().map(|stage| &*stage.name).collect();
        assert_eq!(names, ["running", "first_output"]);
        assert!(sample.value >= sample.stages[0].ms);
    }
}

#[test]
fn a_peer_that_says_it_runs_and_never_does_is_caught() {
    caught(Conduct::Silent, "took longer than the limit");
}

#[test]
fn a_peer_that_keeps_saying_it_runs_is_caught() {
    caught(Conduct::Busy, "the command ran for over 1 s");
}

#[test]
fn a_command_that_printed_nothing_is_no_answer() {
    caught(Conduct::Mute, "printed nothing");
}

#[test]
fn an_answer_made_up_before_the_question_is_caught() {
    caught(Conduct::Early, "not this round's token");
}

#[test]
fn an_answer_of_an_earlier_round_is_caught() {
    let results = measured(Conduct::Stale);
    // The first answer of all, to the preparation, was right; every later one repeats it.
    assert!(results.series.is_empty(), "{:?}", results.series);
    assert_eq!(results.failures.len(), 2, "{:?}", results.failures);
    for failure in &results.failures {
        assert!(failure.message.contains("not this round's token"), "{}", failure.message);
    }
}
