//! Names that would be paths: nothing outside its place is read or made by them.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};

use crate::daemon::Daemon;

const HOSTILE: [&str; 10] = [
    "..",
    "../x",
    "../../../../tmp/x",
    "/etc/passwd",
    "a/b",
    "a/../b",
    "x\0y",
    "..\\x",
    "~root",
    ".",
];

fn encoded(name: &str) -> String {
    name.bytes().map(|byte| format!("%{byte:02x}")).collect()
}

/// All that is below a directory.
fn found(directory: &Path, all: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        all.insert(path.to_string_lossy().into_owned());
        if path.is_dir() {
            found(&path, all);
        }
    }
}

#[test]
fn hostile_names_are_refused_everywhere_and_make_nothing() {
    let daemon = Daemon::start(&[]);
    let made = daemon.key(&[]);
    let key = made["key"].as_str();
    let (status, new) = daemon.ask("POST", "/v3/templates", key, br#"{"name":"own"}"#);
    assert_eq!(status, 202, "{new}");
    let template = new["templateID"].as_str().unwrap();
    let mut before = BTreeSet::new();
    found(daemon.home.path(), &mut before);
    for name in HOSTILE {
        let path = encoded(name);
        let json = |value: Value| value.to_string().into_bytes();
        let start = json!({"fromTemplate": name, "steps": []});
        let build = new["buildID"].as_str().unwrap();
        let cases = [
            ("POST", "/v3/templates".into(), json(json!({"name": name}))),
            ("POST", "/v3/templates".into(), json(json!({"name": format!("x:{name}")}))),
            ("POST", "/v3/templates".into(), json(json!({"name": "x", "tags": [name]}))),
            ("POST", "/v2/sandboxes".into(), json(json!({"templateID": name}))),
            ("POST", format!("/v2/templates/{template}/builds/{build}"), json(start)),
            ("POST", format!("/v2/templates/{path}/builds/{build}"), json(json!({}))),
            ("GET", format!("/templates/{template}/files/{path}"), Vec::new()),
            ("GET", format!("/templates/{path}/files/ab"), Vec::new()),
            ("GET", format!("/templates/aliases/{path}"), Vec::new()),
            ("GET", format!("/templates/{template}/builds/{path}/status"), Vec::new()),
            ("DELETE", format!("/templates/{path}"), Vec::new()),
            ("GET", format!("/sandboxes/{path}"), Vec::new()),
            ("DELETE", format!("/sandboxes/{path}"), Vec::new()),
            ("POST", format!("/sandboxes/{path}/snapshots"), json(json!({"name": name}))),
            ("PUT", format!("/uploads/{path}"), b"x".to_vec()),
        ];
        for (method, route, body) in cases {
            let (status, answer) = daemon.ask(method, &route, key, &body);
            assert!(
                (400..500).contains(&status),
                "{method} {route} {}: {status} {answer}",
                String::from_utf8_lossy(&body)
            );
            assert_eq!(answer["code"], status, "{method} {route}: {answer}");
        }
    }
    let mut after = BTreeSet::new();
    found(daemon.home.path(), &mut after);
    let more: Vec<_> =
        after.difference(&before).filter(|path| !path.contains("/uploads")).collect();
    assert_eq!(more, Vec::<&String>::new());
}
