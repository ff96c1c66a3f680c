//! Templates that the daemon builds, as clients ask for them: steps in a sandbox, then its state.

use std::io::Read as _;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use serde_json::{Value, json};

use super::client::{Client, Daemon, Sandbox};
use crate::common::on_lane;

/// Asks for a build of a template and starts it; the path of its status.
fn start(
    client: &Client,
    new: Value,
    what: Value,
    files: Option<(&str, &[u8])>,
) -> (Value, String) {
    let (status, new) = client.post("/v3/templates", new);
    assert_eq!(status, 202, "{new}");
    let (template, build) = (new["templateID"].as_str().unwrap(), new["buildID"].as_str().unwrap());
    if let Some((hash, archive)) = files {
        let (_, place) = client.get(&format!("/templates/{template}/files/{hash}"));
        let path = place["url"].as_str().unwrap().strip_prefix(&client.url).unwrap().to_owned();
        assert_eq!(client.try_ask("PUT", &path, &[], archive).unwrap().0, 200);
    }
    let path = format!("/templates/{template}/builds/{build}");
    let (status, answer) = client.post(&format!("/v2{path}"), what);
    assert_eq!(status, 202, "{answer}");
    (new.clone(), format!("{path}/status"))
}

/// Asks for a build's status until it is over, as clients do.
fn finish(client: &Client, path: &str) -> Value {
    loop {
        let (_, status) = client.get(path);
        match status["status"].as_str() {
            // There is no event for it in the API: clients ask again.
            Some("waiting" | "building") => sleep(Duration::from_millis(200)),
            _ => return status,
        }
    }
}

fn archive() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("app/in ner")).unwrap();
    std::fs::write(dir.path().join("app/in ner/note"), "copied\n").unwrap();
    std::fs::write(dir.path().join("app/tool"), "#!/bin/sh\necho tool\n").unwrap();
    let mut tar = Command::new("tar");
    let mut child = tar
        .args(["-czf", "-", "-C"])
        .arg(dir.path())
        .arg("app")
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut bytes = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut bytes).unwrap();
    assert!(child.wait().unwrap().success());
    bytes
}

fn step(kind: &str, args: &[&str]) -> Value {
    json!({"type": kind, "args": args, "filesHash": (kind == "COPY").then_some("ab12")})
}

/// What a process of a sandbox says that was started when its template was built.
fn said(client: &Client, sandbox: &Sandbox) -> String {
    client.read(sandbox, "/var/tmp/said")
}

#[test]
fn a_build_does_its_steps_and_sandboxes_begin_with_them() {
    on_lane!({
        let daemon = Daemon::start();
        let client = &daemon.client;
        let files = archive();
        let report = "(id -un; pwd; echo $A-$B; stat -c '%U %a' /srv/app/tool /srv/app; \
                      cat '/srv/app/in ner/note'; cat one) > /var/tmp/said; chmod 666 /var/tmp/said";
        let what = json!({
            "fromImage": "e2bdev/base:latest",
            "steps": [
                step("ENV", &["A", "1", "B", "x"]),
                step("ENV", &["B", "${A}2$"]),
                step("COPY", &["app", "/srv/app", "user", "0750"]),
                step("COPY", &["./app/in ner/note", "one"]),
                step("WORKDIR", &["/srv/work"]),
                step("COPY", &["app/*/note", "one"]),
                step("USER", &["root"]),
                step("RUN", &["test $(id -un) = root && rm -f /var/tmp/said"]),
                step("RUN", &["test $(id -un) = user && pwd > pwd", "user"]),
                step("USER", &["user"]),
                step("RUN", &["test $A$B$(cat pwd) = 112$/srv/work"]),
            ],
            "startCmd": format!("{report}; exec sleep 1000"),
            "readyCmd": "test -s /var/tmp/said && pgrep -x sleep",
        });
        let new = json!({"name": "web:v1", "tags": ["stable"]});
        let (new, path) = start(client, new, what, Some(("ab12", &files)));
        let status = finish(client, &path);
        assert_eq!(status["status"], "ready", "{status}");
        let wanted = "user\n/srv/work\n1-12$\nuser 750\nuser 750\ncopied\ncopied\n";
        for reference in ["web", "web:v1", "web:stable", new["templateID"].as_str().unwrap()] {
            let made = client.create(json!({"templateID": reference}));
            assert_eq!(said(client, &made), wanted, "{reference}");
            assert_eq!(client.delete(&made.id).0, 204);
        }

        // What is built from it has what it has, and what its maker sets goes before that.
        let steps = [step("RUN", &["echo $A $(pwd) >> /var/tmp/said"])];
        let what = json!({"fromTemplate": "web:v1", "steps": steps});
        let (_, path) = start(client, json!({"name": "more"}), what, None);
        assert_eq!(finish(client, &path)["status"], "ready");
        let made = client.create(json!({"templateID": "more", "envVars": {"A": "own"}}));
        assert_eq!(said(client, &made), format!("{wanted}1 /srv/work\n"));
        let (status, envs) = client.guest(&made, "GET", "/envs", b"").unwrap();
        let envs: Value = serde_json::from_slice(&envs).unwrap();
        assert_eq!((status, &envs["A"], &envs["B"]), (200, &json!("own"), &json!("12$")));

        let other = daemon.other_tenant("other");
        let foreign = json!({"templateID": "more"});
        assert_eq!(other.post("/v2/sandboxes", foreign).0, 404);
        for name in ["web", "more"] {
            assert_eq!(client.ask("DELETE", &format!("/templates/{name}"), None).0, 204);
        }
        daemon.end();
    });
}

#[test]
fn a_build_that_fails_says_why_and_nothing_stays() {
    on_lane!({
        let daemon = Daemon::start();
        let client = &daemon.client;
        let cases = [
            (
                json!([step("RUN", &["true"]), step("RUN", &["echo no luck; exit 3"])]),
                "2",
                "no luck",
            ),
            (json!([step("USER", &["nobody-at-all"])]), "1", "nobody-at-all"),
            (json!([]), "finalize", "no start"),
        ];
        for (steps, step, reason) in cases {
            let mut what = json!({"fromTemplate": "base", "steps": steps});
            if step == "finalize" {
                what["startCmd"] = json!("echo no start; exit 1");
                what["readyCmd"] = json!("sleep 600");
            }
            let (_, path) = start(client, json!({"name": "web"}), what, None);
            let status = finish(client, &path);
            assert_eq!(status["status"], "error", "{status}");
            assert_eq!(status["reason"]["step"], step, "{status}");
            assert!(status["reason"]["message"].as_str().unwrap().contains(reason), "{status}");
        }
        assert_eq!(client.post("/v2/sandboxes", json!({"templateID": "web"})).0, 404);
        assert_eq!(client.get("/templates").1.as_array().unwrap().len(), 1);
        daemon.end();
    });
}

#[test]
fn a_shape_is_had_from_the_built_in_template_and_no_other() {
    on_lane!({
        let daemon = Daemon::start();
        let client = &daemon.client;
        let new = json!({"name": "big", "cpuCount": 1, "memoryMB": 768});
        let (_, path) = start(client, new, json!({"fromTemplate": "base"}), None);
        let status = finish(client, &path);
        assert_eq!(status["status"], "ready", "{status}");
        let made = client.create(json!({"templateID": "big"}));
        let (_, shown) = client.get(&format!("/sandboxes/{}", made.id));
        assert_eq!((&shown["cpuCount"], &shown["memoryMB"]), (&json!(1), &json!(768)));

        let (_, new) = client.post("/v3/templates", json!({"name": "bigger", "memoryMB": 1024}));
        let (template, build) = (&new["templateID"], &new["buildID"]);
        let (template, build) = (template.as_str().unwrap(), build.as_str().unwrap());
        let path = format!("/v2/templates/{template}/builds/{build}");
        let (status, answer) = client.post(&path, json!({"fromTemplate": "big"}));
        assert_eq!(status, 400, "{answer}");
        assert!(answer["message"].as_str().unwrap().contains("768 MiB"), "{answer}");
        assert_eq!(client.ask("DELETE", "/templates/big", None).0, 204);
        daemon.end();
    });
}

#[test]
fn a_build_that_a_dead_daemon_left_is_a_failed_one() {
    on_lane!({
        let mut daemon = Daemon::start();
        let what = json!({
            "fromTemplate": "base",
            "steps": [step("RUN", &["echo begun; exec sleep 1000"])],
        });
        let (_, path) = start(&daemon.client, json!({"name": "web"}), what, None);
        loop {
            let (_, status) = daemon.client.get(&path);
            assert_eq!(status["status"], "building", "{status}");
            if status["logEntries"].to_string().contains("\"begun\"") {
                break;
            }
            sleep(Duration::from_millis(100));
        }
        daemon.kill();
        daemon.start_again();
        let (_, status) = daemon.client.get(&path);
        assert_eq!(status["status"], "error", "{status}");
        assert!(status["reason"]["message"].as_str().unwrap().contains("daemon"), "{status}");
        daemon.end();
    });
}
