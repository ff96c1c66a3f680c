//! The control service on a host, where the agent is not init.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{Agent, run};
use coppice_agent_protocol::control::{Info, Log};
use http::{Method, StatusCode};

#[test]
fn info_tells_of_the_agent_and_its_guest() {
    run(async {
        let agent = Agent::start().await;
        let mut events = agent.shell("exec sleep 1000").await;
        events.pid().await;
        let (status, body) = agent.control(Method::GET, "/info", "").await;
        assert_eq!(status, StatusCode::OK);
        let info: Info = serde_json::from_value(body).unwrap();
        assert_eq!(info.version, agent.ready.version);
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        assert_eq!(info.kernel, kernel.trim_end());
        assert_eq!((info.init, info.processes), (false, 1));
        assert_eq!(info.started_us, agent.ready.uptime_us);
        let times = [info.started_us, info.listening_us, info.serving_us, info.uptime_us];
        assert!(times.is_sorted() && info.started_us > 0, "{times:?}");
    });
}

#[test]
fn requests_with_an_id_are_in_the_log() {
    run(async {
        let agent = Agent::start().await;
        for id in ["one-1", "not%20one", ""] {
            let request = http::Request::builder().uri("/health").header("x-request-id", id);
            agent.send("envd", request.body(Default::default()).unwrap()).await;
        }
        let (status, log) = agent.control(Method::POST, "/log", "{}").await;
        assert_eq!(status, StatusCode::OK);
        let log: Log = serde_json::from_value(log).unwrap();
        let found: Vec<_> = log.lines.iter().filter(|line| line.text.contains("/health")).collect();
        assert_eq!(found.len(), 1, "{log:?}");
        assert!(found[0].text.starts_with("request one-1: GET /health: 204 after "), "{log:?}");

        // Who waits gets the next one when it comes.
        let last = log.lines.last().unwrap().number;
        let waiting =
            agent.control(Method::POST, "/log", format!(r#"{{"after":{last},"wait_ms":20000}}"#));
        let later = async {
            let request = http::Request::builder().uri("/envs").header("x-request-id", "two");
            agent.send("envd", request.body(Default::default()).unwrap()).await;
        };
        let ((_, log), ()) = tokio::join!(waiting, later);
        assert!(log["lines"][0]["text"].as_str().unwrap().starts_with("request two: "), "{log}");
    });
}

#[test]
fn an_agent_that_is_not_init_does_not_end_the_machine() {
    run(async {
        let agent = Agent::start().await;
        let (status, body) =
            agent.control(Method::POST, "/shutdown", r#"{"mode":"poweroff"}"#).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert_eq!(body["code"], "failed_precondition");
    });
}

#[test]
fn bodies_out_of_form_are_refused() {
    run(async {
        let agent = Agent::start().await;
        let cases = [
            ("/shutdown", r#"{"mode":"explode"}"#),
            ("/time", r#"{"unix_ns":-1}"#),
            ("/time", "{}"),
            ("/time", r#"{"unix_ns":1,"uptime_us":18446744073709551615}"#),
            ("/identity", r#"{"hostname":""}"#),
            ("/identity", r#"{"unknown":1}"#),
            ("/identity", "["),
        ];
        for (path, body) in cases {
            let (status, answer) = agent.control(Method::POST, path, body).await;
            assert_eq!(status, StatusCode::BAD_REQUEST, "{path} {body}");
            assert_eq!(answer["code"], "invalid_argument");
        }
    });
}

#[test]
fn the_services_do_not_mix() {
    run(async {
        let agent = Agent::start().await;
        let (status, ..) = agent.http(Method::GET, "/info", &[], "").await;
        assert_eq!(status, StatusCode::NOT_FOUND);
        let (status, _) = agent.control(Method::GET, "/health", "").await;
        assert_eq!(status, StatusCode::NOT_FOUND);
    });
}
