//! What the API promises of one sandbox.

use serde_json::json;

use super::client::{Daemon, Sandbox};
use crate::common::on_lane;

#[test]
fn a_paused_sandbox_goes_on_where_it_was_and_again() {
    on_lane!({
        let daemon = Daemon::start();
        let client = &daemon.client;
        let sandbox = client.create(json!({}));
        let path = format!("/sandboxes/{}", sandbox.id);
        for round in 0..3 {
            assert_eq!(client.write(&sandbox, "/root/state", &format!("{round}")), Some(200));
            assert_eq!(client.post(&format!("{path}/pause"), json!({})).0, 204);
            assert_eq!(client.post(&format!("{path}/pause"), json!({})).0, 409);
            assert_eq!(client.get(&path).1["state"], "paused");
            let (status, body) = client.guest(&sandbox, "GET", "/health", b"").unwrap();
            let body = String::from_utf8(body).unwrap();
            assert_eq!(status, 502, "{body}");
            assert!(body.contains("was not found"), "{body}");
            let (status, resumed) = client.post(&format!("/v2{path}/connect"), json!({}));
            assert_eq!((status, &resumed["sandboxID"]), (201, &json!(sandbox.id)));
            assert_eq!(client.read(&sandbox, "/root/state"), round.to_string());
            assert_eq!(client.post(&format!("/v2{path}/connect"), json!({})).0, 200);
        }
        daemon.end();
    });
}

#[test]
fn a_paused_sandbox_is_removed_without_going_on() {
    on_lane!({
        let daemon = Daemon::start();
        let client = &daemon.client;
        let sandbox = client.create(json!({}));
        assert_eq!(client.post(&format!("/sandboxes/{}/pause", sandbox.id), json!({})).0, 204);
        assert_eq!(client.delete(&sandbox.id).0, 204);
        assert_eq!(client.delete(&sandbox.id).0, 404);
        assert_eq!(client.list(), Vec::<String>::new());
        daemon.end();
    });
}

#[test]
fn a_sandbox_whose_time_is_over_is_removed_or_paused() {
    on_lane!({
        let daemon = Daemon::start();
        let client = &daemon.client;
        let removed = client.create(json!({}));
        let paused = client.create(json!({"autoPause": true, "autoResume": {"enabled": true}}));
        assert_eq!(client.write(&paused, "/root/state", "kept"), Some(200));
        for sandbox in [&removed, &paused] {
            let path = format!("/sandboxes/{}/timeout", sandbox.id);
            assert_eq!(client.post(&path, json!({"timeout": 0})).0, 204);
        }
        // Each is asked for until what must happen has happened; the test's own limit ends it.
        while client.get(&format!("/sandboxes/{}", removed.id)).0 != 404 {}
        while client.get(&format!("/sandboxes/{}", paused.id)).1["state"] != "paused" {}
        // Traffic resumes it.
        assert_eq!(client.read(&paused, "/root/state"), "kept");
        assert_eq!(client.get(&format!("/sandboxes/{}", paused.id)).1["state"], "running");
        daemon.end();
    });
}

#[test]
fn a_rollback_undoes_what_came_after_the_snapshot() {
    on_lane!({
        let daemon = Daemon::start();
        let client = &daemon.client;
        let sandbox = client.create(json!({}));
        let path = format!("/sandboxes/{}", sandbox.id);
        assert_eq!(client.write(&sandbox, "/root/state", "one"), Some(200));
        let (status, snapshot) = client.post(&format!("{path}/snapshots"), json!({"name": "s"}));
        assert_eq!((status, &snapshot["names"]), (201, &json!(["s"])));
        assert_eq!(client.write(&sandbox, "/root/state", "two"), Some(200));
        let back = json!({"snapshotID": snapshot["snapshotID"]});
        let changes = || {
            let from = snapshot["snapshotID"].as_str().unwrap();
            let (status, found) = client.get(&format!("{path}/diff?from={from}"));
            assert_eq!(status, 200, "{found}");
            let files = found["files"].as_array().unwrap();
            let state = files.iter().find(|file| file["path"] == "/root/state");
            state.map(|file| file["change"].clone())
        };
        // Added, if its first content was not on disk when the snapshot was made.
        let changed = changes();
        assert!([json!("modified"), json!("added")].map(Some).contains(&changed), "{changed:?}");
        assert_eq!(client.post(&format!("{path}/rollback"), back).0, 204);
        assert_eq!(client.read(&sandbox, "/root/state"), "one");
        let (_, tree) = client.get(&format!("{path}/tree"));
        assert_eq!(tree["standsOn"], snapshot["snapshotID"]);
        assert_eq!(tree["snapshots"][0]["name"], "s");
        assert_eq!(tree["snapshots"].as_array().unwrap().len(), 1, "comparing leaves nothing");
        daemon.end();
    });
}

#[test]
fn forks_go_on_from_a_running_and_from_a_paused_sandbox() {
    on_lane!({
        let daemon = Daemon::start();
        let client = &daemon.client;
        let sandbox = client.create(json!({"metadata": {"kind": "parent"}}));
        let path = format!("/sandboxes/{}", sandbox.id);
        assert_eq!(client.write(&sandbox, "/root/state", "shared"), Some(200));
        for paused in [false, true] {
            if paused {
                assert_eq!(client.post(&format!("{path}/pause"), json!({})).0, 204);
            }
            let wanted = json!({"count": 2, "timeout": 600});
            let (status, forks) = client.post(&format!("{path}/fork"), wanted);
            assert_eq!(status, 201, "{forks}");
            for fork in forks.as_array().unwrap() {
                let fork = Sandbox::of(&fork["sandbox"]);
                assert_ne!(fork.token, sandbox.token);
                assert_eq!(client.read(&fork, "/root/state"), "shared");
                assert_eq!(client.delete(&fork.id).0, 204);
            }
        }
        daemon.end();
    });
}

#[test]
fn a_guest_that_ends_is_not_there_any_more() {
    on_lane!({
        let daemon = Daemon::start();
        let client = &daemon.client;
        let sandbox = client.create(json!({}));
        // The answer may come or not.
        let crash = client.write(&sandbox, "/proc/sysrq-trigger", "c");
        assert_ne!(crash, Some(404));
        while client.get(&format!("/sandboxes/{}", sandbox.id)).0 != 404 {}
        daemon.end();
    });
}
