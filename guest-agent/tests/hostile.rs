//! Requests nobody should send.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test may fail")]

mod common;

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use common::{Agent, run};
use coppice_agent_protocol::{Code, STREAM_CONTENT_TYPE};
use http::{Method, StatusCode};
use http_body_util::Full;
use serde_json::json;

/// The error in the only frame of a `Start` with this body.
async fn start_error(agent: &Agent, body: Vec<u8>) -> Code {
    agent.stream("Start", &[], body).await.rest().await.error.unwrap().code
}

#[test]
fn malformed_streams_are_refused() {
    run(async {
        let agent = Agent::start().await;
        let cases: [(&[u8], Code); 7] = [
            (b"", Code::InvalidArgument),
            (b"\0\0\0", Code::InvalidArgument),
            (b"\0\0\0\0\x09{}", Code::InvalidArgument),
            (b"\0\0\0\0\x02]{", Code::InvalidArgument),
            (b"\0\0\0\0\x02{}\0\0\0\0\x02{}", Code::InvalidArgument),
            (b"\0\xff\xff\xff\xff{}", Code::ResourceExhausted),
            (b"\x01\0\0\0\x02{}", Code::Unimplemented),
        ];
        for (body, code) in cases {
            assert_eq!(start_error(&agent, body.to_vec()).await, code, "{body:?}");
        }
    });
}

#[test]
fn a_start_without_a_program_is_refused() {
    run(async {
        let agent = Agent::start().await;
        assert_eq!(start_error(&agent, b"\0\0\0\0\x02{}".to_vec()).await, Code::InvalidArgument);
    });
}

#[test]
fn texts_no_program_can_get_are_refused() {
    run(async {
        let agent = Agent::start().await;
        let cases = [
            json!({ "process": { "cmd": "a\0b" } }),
            json!({ "process": { "cmd": "/bin/true", "args": ["\0"] } }),
            json!({ "process": { "cmd": "/bin/true", "envs": { "a=b": "c" } } }),
            json!({ "process": { "cmd": "/bin/true", "envs": { "": "c" } } }),
            json!({ "process": { "cmd": "/bin/true", "cwd": "/\0" } }),
            json!({ "process": { "cmd": "/bin/true" }, "pty": { "size": { "cols": 70000 } } }),
        ];
        for message in cases {
            let body = coppice_agent_protocol::envelope::encode_message(&message).unwrap();
            assert_eq!(start_error(&agent, body).await, Code::InvalidArgument, "{message}");
        }
    });
}

#[test]
fn malformed_messages_are_refused() {
    run(async {
        let agent = Agent::start().await;
        for body in ["[", "[]", "{}", r#"{"process":{"pid":-1},"signal":"SIGNAL_SIGKILL"}"#] {
            let (status, answer) = agent.call_raw("SendSignal", &[], body).await;
            assert_eq!(status, StatusCode::BAD_REQUEST, "{body}");
            assert_eq!(answer["code"], "invalid_argument");
        }
    });
}

#[test]
fn a_message_over_the_limit_is_refused() {
    run(async {
        let agent = Agent::start().await;
        let (status, answer) = agent.call_raw("SendInput", &[], vec![b' '; 17 << 20]).await;
        assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(answer["code"], "resource_exhausted");
    });
}

#[test]
fn unknown_procedures_are_not_implemented() {
    run(async {
        let agent = Agent::start().await;
        let (status, answer) = agent.call_raw("Explode", &[], "{}").await;
        assert_eq!((status, &answer["code"]), (StatusCode::NOT_FOUND, &json!("unimplemented")));
    });
}

#[test]
fn wrong_methods_and_types_are_refused() {
    run(async {
        let agent = Agent::start().await;
        let list = "/process.Process/List";
        let (status, ..) = agent.http(Method::GET, list, &[], "").await;
        assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED);
        let stream = [("content-type", STREAM_CONTENT_TYPE)];
        let (status, headers, _) = agent.http(Method::POST, list, &stream, "{}").await;
        assert_eq!(status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
        assert_eq!(headers["accept-post"], "application/json");
        let (status, ..) = agent.http(Method::PUT, "/files", &[], "").await;
        assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED);
    });
}

#[test]
fn a_head_without_end_is_cut_off() {
    run(async {
        let agent = Agent::start().await;
        let mut stream = UnixStream::connect(agent.path("envd")).unwrap();
        let answer = tokio::task::spawn_blocking(move || {
            stream.write_all(b"GET /health HTTP/1.1\r\nx: ").unwrap();
            // The agent stops reading and closes, so at some point this fails.
            while stream.write_all(&[b'a'; 4096]).is_ok() {}
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            answer
        });
        let answer = answer.await.unwrap();
        assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 431"), "{answer:?}");
        assert!(agent.private_kib() < 8 * 1024);
    });
}

#[test]
fn noise_does_not_disturb_the_next_client() {
    run(async {
        let agent = Agent::start().await;
        for noise in [b"\0\0\0\0".as_slice(), b"GET\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] {
            let mut stream = UnixStream::connect(agent.path("envd")).unwrap();
            stream.write_all(noise).unwrap();
        }
        let (status, ..) = agent.http(Method::GET, "/health", &[], "").await;
        assert_eq!(status, StatusCode::NO_CONTENT);
    });
}

#[test]
fn two_hundred_connections_are_served_side_by_side() {
    run(async {
        let agent = Agent::start().await;
        let idle: Vec<_> =
            (0..200).map(|_| UnixStream::connect(agent.path("envd")).unwrap()).collect();
        let request = http::Request::get("/health").body(Full::default()).unwrap();
        assert_eq!(agent.send("envd", request).await.status(), StatusCode::NO_CONTENT);
        assert_eq!(idle.len(), 200);
    });
}

#[test]
fn a_client_that_stops_sending_gets_its_answer() {
    run(async {
        let agent = Agent::start().await;
        let mut stream = UnixStream::connect(agent.path("envd")).unwrap();
        stream.write_all(b"GET /files?path=/proc/version HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let answer = tokio::task::spawn_blocking(move || {
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).unwrap();
            answer
        });
        assert!(answer.await.unwrap().starts_with(b"HTTP/1.1 200"));
    });
}
