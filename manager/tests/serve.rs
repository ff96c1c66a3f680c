//! The daemon's API without a guest: who may ask, and how errors look.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "serve/daemon.rs"]
mod daemon;
#[path = "serve/limits.rs"]
mod limits;
#[path = "serve/paths.rs"]
mod paths;
#[path = "serve/smuggling.rs"]
mod smuggling;

use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::time::Duration;

use daemon::{Daemon, coppice};
use serde_json::json;

#[test]
fn every_route_of_the_document_asks_for_a_key() {
    let daemon = Daemon::start(&[]);
    let (status, document) = daemon.ask("GET", "/openapi.json", None, b"");
    assert_eq!(status, 200);
    let mut seen = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys() {
            let path = path.replace("{id}", "0123456789ab");
            for key in [None, Some("e2b_0000000000000000000000000000000000000000")] {
                let (status, body) = daemon.ask(&method.to_uppercase(), &path, key, b"{}");
                assert_eq!((status, &body["code"]), (401, &json!(401)), "{method} {path}");
                assert!(body["message"].is_string(), "{method} {path}");
            }
            seen += 1;
        }
    }
    assert!(seen >= 18, "{seen} routes");
}

#[test]
fn a_removed_key_is_refused_at_once() {
    let daemon = Daemon::start(&[]);
    let made = daemon.key(&[]);
    let key = made["key"].as_str().unwrap();
    assert_eq!(daemon.ask("GET", "/v2/sandboxes", Some(key), b""), (200, json!([])));
    let removed = coppice(&daemon.home, &["key", "rm", made["id"].as_str().unwrap()]).status();
    assert!(removed.unwrap().success());
    assert_eq!(daemon.ask("GET", "/v2/sandboxes", Some(key), b"").0, 401);
}

#[test]
fn every_error_has_a_code_and_a_message() {
    let daemon = Daemon::start(&[]);
    let made = daemon.key(&[]);
    let key = made["key"].as_str();
    let cases: [(&str, &str, &[u8], u16); 26] = [
        ("GET", "/sandboxes/0123456789ab", b"", 404),
        ("GET", "/sandboxes/..%2f..%2fetc", b"", 404),
        ("DELETE", "/sandboxes/0123456789ab", b"", 404),
        ("GET", "/no/such/route", b"", 404),
        ("PATCH", "/sandboxes", b"", 405),
        ("POST", "/v2/sandboxes", b"{", 400),
        ("POST", "/v2/sandboxes", b"{}", 400),
        ("POST", "/v2/sandboxes", br#"{"templateID":"none"}"#, 404),
        ("POST", "/v2/sandboxes", br#"{"templateID":"none","timeout":1e9}"#, 400),
        ("POST", "/v2/sandboxes", br#"{"templateID":"none","mcp":{"a":{}}}"#, 400),
        ("GET", "/v2/sandboxes?limit=0", b"", 400),
        ("GET", "/v2/sandboxes?limit=x", b"", 400),
        ("GET", "/v2/sandboxes?nextToken=x", b"", 400),
        ("POST", "/v3/templates", b"{}", 400),
        ("POST", "/v3/templates", br#"{"name":"../x"}"#, 400),
        ("POST", "/v3/templates", br#"{"name":"x:a/b"}"#, 400),
        ("POST", "/v3/templates", br#"{"name":"x","memoryMB":1}"#, 400),
        ("GET", "/templates/0123456789ab/files/..", b"", 400),
        ("GET", "/templates/0123456789ab/files/ab", b"", 404),
        ("GET", "/templates/aliases/none", b"", 404),
        ("GET", "/templates/none/tags", b"", 404),
        ("POST", "/templates/tags", br#"{"target":"none:v1","tags":["x"]}"#, 404),
        ("POST", "/templates/tags", br#"{"target":"none:v1","tags":["a/b"]}"#, 400),
        ("DELETE", "/templates/tags", br#"{"name":"none","tags":["x"]}"#, 404),
        ("GET", "/templates/0123456789ab/builds/x/status", b"", 404),
        ("PUT", "/uploads/none", b"x", 401),
    ];
    for (method, path, body, wanted) in cases {
        let (status, answer) = daemon.ask(method, path, key, body);
        assert_eq!(
            (status, &answer["code"]),
            (wanted, &json!(wanted)),
            "{method} {path}: {answer}"
        );
        assert!(answer["message"].as_str().is_some_and(|text| !text.is_empty()), "{method} {path}");
    }
}

#[test]
fn a_body_that_is_too_long_is_refused_before_it_is_read() {
    let daemon = Daemon::start(&[]);
    let made = daemon.key(&[]);
    let key = made["key"].as_str().unwrap();
    let mut stream = daemon.connect();
    let head = format!(
        "POST /v2/sandboxes HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\n\
         content-length: 2000000\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut answer = Vec::new();
    BufReader::new(&stream).read_until(b'}', &mut answer).unwrap();
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    assert!(answer.contains(r#"{"code":413,"message":""#), "{answer}");
}

/// A client's pool keeps the connection after such an answer, and uses it again.
#[test]
fn a_connection_can_be_used_after_an_answer_that_does_not_need_the_body() {
    let daemon = Daemon::start(&[]);
    let cases =
        [("x-nothing: 1", "HTTP/1.1 401 "), ("e2b-sandbox-id: 0123456789ab", "HTTP/1.1 502 ")];
    for (header, wanted) in cases {
        let stream = daemon.connect();
        let mut reader = BufReader::new(&stream);
        for round in 0..2 {
            let head = format!(
                "POST /v2/sandboxes HTTP/1.1\r\nhost: localhost\r\n{header}\r\n\
                 content-length: 5\r\n\r\n"
            );
            (&stream).write_all(head.as_bytes()).unwrap();
            // Nothing is said before the body is there.
            stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            let early = stream.peek(&mut [0]).map_err(|error| error.kind());
            assert_eq!(early, Err(ErrorKind::WouldBlock), "round {round}, {header}");
            stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            (&stream).write_all(b"hello").unwrap();
            let mut answer = Vec::new();
            reader.read_until(b'}', &mut answer).unwrap();
            let answer = String::from_utf8(answer).unwrap();
            assert!(answer.starts_with(wanted), "round {round}: {answer}");
            assert!(!answer.contains("connection: close"), "{answer}");
        }
    }
}

#[test]
fn a_template_that_cannot_be_made_is_told_of_and_nothing_stays() {
    let daemon = Daemon::start(&[]);
    let made = daemon.key(&[]);
    let key = made["key"].as_str();
    let (status, answer) = daemon.ask("POST", "/v2/sandboxes", key, br#"{"templateID":"base"}"#);
    assert_eq!(status, 500);
    assert!(answer["message"].as_str().unwrap().contains("there is no kernel 'agent'"), "{answer}");
    assert_eq!(daemon.ask("GET", "/v2/sandboxes", key, b""), (200, json!([])));
}

#[test]
fn a_second_daemon_on_the_address_does_not_start() {
    let daemon = Daemon::start(&[]);
    let address = daemon.url.strip_prefix("http://").unwrap();
    let other = tempfile::tempdir().unwrap();
    let second = coppice(&other, &["serve", "--listen", address]).output().unwrap();
    assert_eq!(second.status.code(), Some(71));
    let said = String::from_utf8(second.stderr).unwrap();
    assert!(said.contains("cannot listen on"), "{said}");
}

#[test]
fn a_signal_ends_it_in_order() {
    let mut daemon = Daemon::start(&[]);
    let pid = i32::try_from(daemon.child.id()).unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(daemon.child.wait().unwrap().success());
}

#[test]
fn prometheus_reads_the_meters() {
    let daemon = Daemon::start(&[]);
    let made = daemon.key(&[]);
    daemon.ask("POST", "/v2/sandboxes", made["key"].as_str(), br#"{"templateID":"base"}"#);
    let text = daemon.meters();
    assert!(text.contains("coppice_stage_seconds_count{stage=\"create\"} 1"), "{text}");
    assert!(text.contains("coppice_sandboxes{state=\"running\"} 0"), "{text}");
}

/// A build of a template, asked for with this key: its path, and that of its start.
fn ask_for_build(daemon: &Daemon, key: &str) -> (String, String) {
    let (status, new) = daemon.ask("POST", "/v3/templates", Some(key), br#"{"name":"web"}"#);
    assert_eq!(status, 202, "{new}");
    let (template, build) = (new["templateID"].as_str().unwrap(), new["buildID"].as_str().unwrap());
    (format!("/templates/{template}"), format!("/templates/{template}/builds/{build}"))
}

#[test]
fn what_cannot_be_built_is_refused_and_the_build_waits_on() {
    let daemon = Daemon::start(&[]);
    let made = daemon.key(&[]);
    let key = made["key"].as_str().unwrap();
    let (_, build) = ask_for_build(&daemon, key);
    let cases: [(&[u8], u16, &str); 6] = [
        (b"{}", 400, "either from a template or from an image"),
        (br#"{"fromImage":"debian:12"}"#, 400, "OCI images such as 'debian:12'"),
        (br#"{"fromTemplate":"none"}"#, 404, "template 'none' was not found"),
        (br#"{"fromImage":"e2bdev/base","steps":[{"type":"ADD"}]}"#, 400, "step 1 (ADD)"),
        (br#"{"fromImage":"e2bdev/base","steps":[{"type":"RUN","args":[]}]}"#, 400, "step 1 (RUN)"),
        (
            br#"{"fromImage":"e2bdev/base","steps":[{"type":"COPY","args":["a","b"],"filesHash":"ab"}]}"#,
            400,
            "the files of 'a' were not uploaded",
        ),
    ];
    for (body, wanted, text) in cases {
        let (status, answer) = daemon.ask("POST", &format!("/v2{build}"), Some(key), body);
        assert_eq!(status, wanted, "{answer}");
        assert!(answer["message"].as_str().unwrap().contains(text), "{answer}");
    }
    let (status, answer) = daemon.ask("GET", &format!("{build}/status"), Some(key), b"");
    assert_eq!((status, &answer["status"]), (200, &json!("waiting")), "{answer}");
}

#[test]
fn an_upload_is_as_long_as_it_likes_and_its_tenants_alone() {
    let daemon = Daemon::start(&[]);
    let keys = ["first", "second"].map(|tenant| daemon.key(&["--tenant", tenant]));
    let [key, other] = keys.each_ref().map(|key| key["key"].as_str().unwrap());
    let (template, build) = ask_for_build(&daemon, key);
    let place = |key: &str, template: &str| {
        daemon.ask("GET", &format!("{template}/files/ab12"), Some(key), b"")
    };
    let (status, answer) = place(key, &template);
    assert_eq!((status, &answer["present"]), (201, &json!(false)), "{answer}");
    let url = answer["url"].as_str().unwrap();
    let path = url.strip_prefix(&daemon.url).unwrap();
    // Far more than any other body may have.
    assert_eq!(daemon.ask("PUT", path, None, &vec![1; 3 << 20]).0, 200);
    assert_eq!(place(key, &template).1["present"], json!(true));

    assert_eq!(place(other, &template).0, 404);
    let (own, _) = ask_for_build(&daemon, other);
    assert_eq!(place(other, &own).1["present"], json!(false));
    for (method, path) in [("GET", format!("{build}/status")), ("POST", format!("/v2{build}"))] {
        let body = br#"{"fromImage":"e2bdev/base"}"#;
        assert_eq!(daemon.ask(method, &path, Some(other), body).0, 404, "{method} {path}");
    }
}
