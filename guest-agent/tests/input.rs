//! Input to processes, terminals, and watching from several or no places.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::time::Duration;

use common::{Agent, Events, run, shell, shell_with_stdin};
use coppice_agent_protocol::Code;
use coppice_agent_protocol::envelope;
use coppice_agent_protocol::json::Blob;
use coppice_agent_protocol::process::{
    ProcessEvent, ProcessInput, ProcessSelector, Pty, PtySize, SelectRequest, SendInputRequest,
    StartRequest, UpdateRequest,
};
use http::StatusCode;
use serde_json::json;

fn stdin(pid: u32, data: &[u8]) -> SendInputRequest {
    let input = ProcessInput::Stdin(Blob(data.to_vec()));
    SendInputRequest { process: ProcessSelector::Pid(pid), input }
}

fn keys(pid: u32, data: &[u8]) -> SendInputRequest {
    let input = ProcessInput::Pty(Blob(data.to_vec()));
    SendInputRequest { process: ProcessSelector::Pid(pid), input }
}

fn select(pid: u32) -> SelectRequest {
    SelectRequest { process: ProcessSelector::Pid(pid) }
}

fn on_terminal(script: &str) -> StartRequest {
    let size = Some(PtySize { cols: 91, rows: 17 });
    StartRequest { pty: Some(Pty { size }), ..shell(script) }
}

async fn close_stdin(agent: &Agent, pid: u32) {
    assert_eq!(agent.call("CloseStdin", &select(pid)).await.0, StatusCode::OK);
}

#[test]
fn input_reaches_the_process_until_it_is_closed() {
    run(async {
        let agent = Agent::start().await;
        let mut events = agent.start_with(&shell_with_stdin("cat; echo end"), &[]).await;
        let pid = events.pid().await;
        for piece in ["one ", "two"] {
            let (status, body) = agent.call("SendInput", &stdin(pid, piece.as_bytes())).await;
            assert_eq!((status, body), (StatusCode::OK, json!({})));
        }
        close_stdin(&agent, pid).await;
        assert_eq!(events.rest().await.text(), "one twoend\n");
    });
}

#[test]
fn input_larger_than_a_pipe_arrives_whole() {
    run(async {
        let agent = Agent::start().await;
        let mut events = agent.start_with(&shell_with_stdin("wc -c"), &[]).await;
        let pid = events.pid().await;
        let data = vec![b'x'; 3_000_000];
        assert_eq!(agent.call("SendInput", &stdin(pid, &data)).await.0, StatusCode::OK);
        close_stdin(&agent, pid).await;
        assert_eq!(events.rest().await.text(), "3000000\n");
    });
}

#[test]
fn without_stdin_a_process_reads_nothing() {
    run(async {
        let agent = Agent::start().await;
        let mut events = agent.shell("cat; echo end").await;
        assert_eq!(events.all().await.text(), "end\n");
    });
}

#[test]
fn input_after_closing_is_refused() {
    run(async {
        let agent = Agent::start().await;
        let mut events = agent.start_with(&shell_with_stdin("cat; exec sleep 1000"), &[]).await;
        let pid = events.pid().await;
        close_stdin(&agent, pid).await;
        close_stdin(&agent, pid).await;
        let (status, body) = agent.call("SendInput", &stdin(pid, b"x")).await;
        assert_eq!(
            (status, &body["code"]),
            (StatusCode::BAD_REQUEST, &json!("failed_precondition"))
        );
    });
}

#[test]
fn input_for_an_ended_process_is_refused() {
    run(async {
        let agent = Agent::start().await;
        let mut events = agent.start_with(&shell_with_stdin("true"), &[]).await;
        let pid = events.pid().await;
        events.rest().await;
        let (status, body) = agent.call("SendInput", &stdin(pid, b"x")).await;
        assert_eq!((status, &body["code"]), (StatusCode::NOT_FOUND, &json!("not_found")));
    });
}

#[test]
fn input_that_is_not_taken_ends_with_its_deadline() {
    run(async {
        let agent = Agent::start().await;
        let mut events = agent.start_with(&shell_with_stdin("exec sleep 1000"), &[]).await;
        let pid = events.pid().await;
        let message = serde_json::to_vec(&stdin(pid, &vec![0; 200_000])).unwrap();
        let headers = [("connect-timeout-ms", "200")];
        let (status, body) = agent.call_raw("SendInput", &headers, message).await;
        let expected = (StatusCode::GATEWAY_TIMEOUT, &json!("deadline_exceeded"));
        assert_eq!((status, &body["code"]), expected);
    });
}

#[test]
fn input_can_be_streamed() {
    run(async {
        let agent = Agent::start().await;
        let mut events = agent.start_with(&shell_with_stdin("cat"), &[]).await;
        let pid = events.pid().await;
        let messages = [
            json!({ "start": { "process": { "pid": pid } } }),
            json!({ "data": { "input": { "stdin": "YSA=" } } }),
            json!({ "keepalive": {} }),
            json!({ "data": { "input": { "stdin": "Yg==" } } }),
        ];
        let body = messages.iter().flat_map(|message| envelope::encode_message(message).unwrap());
        let request = http::Request::post("/process.Process/StreamInput")
            .header("content-type", "application/connect+json")
            .body(http_body_util::Full::new(body.collect::<Vec<u8>>().into()))
            .unwrap();
        let response = agent.send("envd", request).await;
        let reply = http_body_util::BodyExt::collect(response.into_body()).await.unwrap();
        assert_eq!(&reply.to_bytes()[..], b"\0\0\0\0\x02{}\x02\0\0\0\x02{}");
        close_stdin(&agent, pid).await;
        assert_eq!(events.rest().await.text(), "a b");
    });
}

#[test]
fn streamed_input_begins_with_a_process() {
    run(async {
        let agent = Agent::start().await;
        let message = json!({ "data": { "input": { "stdin": "YQ==" } } });
        let body = envelope::encode_message(&message).unwrap();
        let error = agent.stream("StreamInput", &[], body).await.rest().await.error.unwrap();
        assert_eq!(error.code, Code::InvalidArgument);
    });
}

#[test]
fn a_terminal_has_the_size_asked_for_and_resizes() {
    run(async {
        let agent = Agent::start().await;
        let script = "stty size; trap 'stty size' WINCH; echo up; while :; do read line; done";
        let mut events = agent.start_with(&on_terminal(script), &[]).await;
        let pid = events.pid().await;
        let first = events.until("up").await;
        assert_eq!(String::from_utf8(first.pty).unwrap(), "17 91\r\nup\r\n");
        let size = Some(PtySize { cols: 120, rows: 40 });
        let update = UpdateRequest { process: ProcessSelector::Pid(pid), pty: Some(Pty { size }) };
        assert_eq!(agent.call("Update", &update).await.0, StatusCode::OK);
        // The shell may have been on its way into `read`, which a signal does not interrupt then.
        agent.call("SendInput", &keys(pid, b"\n")).await;
        events.until("40 120").await;
    });
}

#[test]
fn a_terminal_takes_keys_and_control_characters() {
    run(async {
        let agent = Agent::start().await;
        let script =
            "trap 'echo stopped; exit 6' INT; echo up; while read line; do echo \"<$line>\"; done";
        let mut events = agent.start_with(&on_terminal(script), &[]).await;
        let pid = events.pid().await;
        events.until("up").await;
        assert_eq!(agent.call("SendInput", &keys(pid, b"hey\n")).await.0, StatusCode::OK);
        events.until("<hey>").await;
        // Ctrl-C: the terminal is the process' controlling one.
        assert_eq!(agent.call("SendInput", &keys(pid, b"\x03")).await.0, StatusCode::OK);
        // The shell may have been on its way into `read`, which a signal does not interrupt then.
        agent.call("SendInput", &keys(pid, b"\n")).await;
        let rest = events.rest().await;
        assert!(String::from_utf8(rest.pty).unwrap().contains("stopped"));
        assert_eq!(rest.end.unwrap().exit_code, 6);
    });
}

#[test]
fn all_output_of_a_terminal_comes_before_the_end() {
    run(async {
        let agent = Agent::start().await;
        let mut events = agent.start_with(&on_terminal("seq 1 20000"), &[]).await;
        let transcript = events.all().await;
        let expected: String = (1..=20_000).map(|number| format!("{number}\r\n")).collect();
        assert!(String::from_utf8(transcript.pty).unwrap() == expected);
        assert_eq!(transcript.end.unwrap().exit_code, 0);
    });
}

#[test]
fn a_terminal_ends_though_others_hold_it() {
    run(async {
        let agent = Agent::start().await;
        let script = "trap '' HUP; sleep 1000 & echo left; exit 5";
        let mut events = agent.start_with(&on_terminal(script), &[]).await;
        let transcript = events.all().await;
        assert_eq!(transcript.pty, b"left\r\n");
        assert_eq!(transcript.end.unwrap().exit_code, 5);
    });
}

#[test]
fn input_of_the_wrong_kind_is_refused() {
    run(async {
        let agent = Agent::start().await;
        let mut terminal = agent.start_with(&on_terminal("exec sleep 1000"), &[]).await;
        let terminal = terminal.pid().await;
        let mut plain = agent.start_with(&shell_with_stdin("exec sleep 1000"), &[]).await;
        let plain = plain.pid().await;
        let size = Some(PtySize { cols: 1, rows: 1 });
        let update =
            UpdateRequest { process: ProcessSelector::Pid(plain), pty: Some(Pty { size }) };
        let answers = [
            agent.call("SendInput", &stdin(terminal, b"x")).await,
            agent.call("SendInput", &keys(plain, b"x")).await,
            agent.call("CloseStdin", &select(terminal)).await,
            agent.call("Update", &update).await,
        ];
        for (status, body) in answers {
            let expected = (StatusCode::BAD_REQUEST, &json!("failed_precondition"));
            assert_eq!((status, &body["code"]), expected);
        }
    });
}

#[test]
fn several_clients_see_the_same_output() {
    run(async {
        let agent = Agent::start().await;
        let mut request = shell_with_stdin("cat");
        request.tag = Some("shared".into());
        let mut first = agent.start_with(&request, &[]).await;
        let pid = first.pid().await;
        let mut second = agent.connect(pid).await;
        let message = json!({ "process": { "tag": "shared" } });
        let message = envelope::encode_message(&message).unwrap();
        let mut third = agent.stream("Connect", &[], message).await;
        assert_eq!((second.pid().await, third.pid().await), (pid, pid));
        agent.call("SendInput", &stdin(pid, b"hello")).await;
        close_stdin(&agent, pid).await;
        let transcripts = [first.rest().await, second.rest().await, third.rest().await];
        for transcript in transcripts {
            assert_eq!(transcript.text(), "hello");
            assert_eq!(transcript.end.unwrap().exit_code, 0);
        }
    });
}

#[test]
fn a_client_that_leaves_does_not_end_the_process() {
    run(async {
        let agent = Agent::start().await;
        let mut events = agent.start_with(&shell_with_stdin("read line; echo $line"), &[]).await;
        let pid = events.pid().await;
        drop(events);
        let mut events = agent.connect(pid).await;
        assert_eq!(events.pid().await, pid);
        agent.call("SendInput", &stdin(pid, b"still here\n")).await;
        assert_eq!(events.rest().await.text(), "still here\n");
    });
}

#[test]
fn a_process_is_found_by_its_pid_after_long_silence() {
    run(async {
        let agent = Agent::start().await;
        let headers = [("keepalive-ping-interval", "1")];
        let request = shell_with_stdin("read line; echo $line");
        let mut events = agent.start_with(&request, &headers).await;
        let pid = events.pid().await;
        for _ in 0..3 {
            assert_eq!(events.next().await, Ok(ProcessEvent::Keepalive));
        }
        drop(events);
        let mut events = agent.connect(pid).await;
        assert_eq!(events.pid().await, pid);
        agent.call("SendInput", &stdin(pid, b"found\n")).await;
        assert_eq!(events.rest().await.text(), "found\n");
    });
}

/// Ends when the process does, however that is learnt.
async fn end_of(agent: &Agent, pid: u32) -> i32 {
    agent.connect(pid).await.all().await.end.unwrap().exit_code
}

#[test]
fn nobody_watching_does_not_stop_a_process() {
    run(async {
        let agent = Agent::start().await;
        let fifo = agent.path("written");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let script = format!("read line; head -c 10000000 /dev/zero; echo yes >{}", fifo.display());
        let mut events = agent.start_with(&shell_with_stdin(&script), &[]).await;
        let pid = events.pid().await;
        drop(events);
        agent.call("SendInput", &stdin(pid, b"go\n")).await;
        let read = tokio::task::spawn_blocking(move || std::fs::read_to_string(fifo).unwrap());
        assert_eq!(read.await.unwrap(), "yes\n");
        assert_eq!(end_of(&agent, pid).await, 0);
    });
}

#[test]
fn a_late_client_learns_the_end() {
    run(async {
        let agent = Agent::start().await;
        let mut events = agent.shell("exit 9").await;
        let pid = events.pid().await;
        events.rest().await;
        let mut late = agent.connect(pid).await;
        assert_eq!(late.pid().await, pid);
        let transcript = late.rest().await;
        assert_eq!((transcript.end.unwrap().exit_code, transcript.error), (9, None));
    });
}

#[test]
fn ended_processes_are_forgotten_in_the_end() {
    run(async {
        let agent = Agent::start().await;
        let mut events = agent.shell("exit 9").await;
        let pid = events.pid().await;
        events.rest().await;
        for _ in 0..256 {
            agent.shell("true").await.all().await;
        }
        let error = agent.connect(pid).await.rest().await.error.unwrap();
        assert_eq!(error.code, Code::NotFound);
    });
}

#[test]
fn a_watchers_deadline_leaves_the_process_alone() {
    run(async {
        let agent = Agent::start().await;
        let mut events = agent.start_with(&shell_with_stdin("read line; exit 3"), &[]).await;
        let pid = events.pid().await;
        let message = envelope::encode_message(&select(pid)).unwrap();
        let headers = [("connect-timeout-ms", "100")];
        let error = agent.stream("Connect", &headers, message).await.all().await.error.unwrap();
        assert_eq!(error.code, Code::DeadlineExceeded);
        close_stdin(&agent, pid).await;
        assert_eq!(events.rest().await.end.unwrap().exit_code, 3);
    });
}

/// Reads events until the agent has nothing more to give at once.
async fn drain(events: &mut Events, bytes: usize) {
    let mut seen = 0;
    while seen < bytes {
        let Ok(ProcessEvent::Data(data)) = events.next().await else { panic!("not data") };
        seen += data.stdout.unwrap().0.len();
    }
}

#[test]
fn a_client_that_stops_reading_stops_the_process_and_costs_no_memory() {
    run(async {
        let agent = Agent::start().await;
        let mut events = agent.shell("exec yes").await;
        let pid = events.pid().await;
        drain(&mut events, 1_000_000).await;
        let before = agent.private_kib();
        // The client now reads nothing. `yes` stands still once it waits for its pipe: its
        // state tells, without guessing a time.
        let wchan = format!("/proc/{pid}/stat");
        let mut quiet = 0;
        while quiet < 20 {
            let state = std::fs::read_to_string(&wchan).unwrap();
            quiet = if state.contains(") S ") { quiet + 1 } else { 0 };
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let after = agent.private_kib();
        assert!(after < before + 512, "the agent grew from {before} to {after} KiB");
        assert!(after < 8 * 1024, "the agent holds {after} KiB");
        // And it goes on when the client does.
        drain(&mut events, 1_000_000).await;
    });
}
