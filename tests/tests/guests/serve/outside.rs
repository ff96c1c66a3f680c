//! What is seen of sandboxes from outside, and the command line beside the daemon.

use std::fs::File;

use serde_json::{Value, json};

use super::client::{Daemon, Sandbox};
use crate::common::{on_lane, stdout};

#[test]
fn one_id_goes_from_the_request_to_the_agent() {
    on_lane!({
        let dir = tempfile::tempdir().unwrap();
        File::create(dir.path().join("log")).unwrap();
        let daemon = Daemon::start_in(dir, &[]);
        let client = &daemon.client;
        let asked = [("x-api-key", client.key.as_str()), ("x-request-id", "trace-1")];
        let body = json!({"templateID": "base", "timeout": 900}).to_string();
        let made = client.try_ask("POST", "/v2/sandboxes", &asked, body.as_bytes()).unwrap();
        assert_eq!(made.0, 201);
        let sandbox = Sandbox::of(&serde_json::from_slice(&made.1).unwrap());
        let asked = [
            ("e2b-sandbox-id", sandbox.id.as_str()),
            ("x-access-token", sandbox.token.as_str()),
            ("authorization", "Basic cm9vdDo="),
            ("x-request-id", "trace-2"),
        ];
        let read = client.try_ask("GET", "/files?path=/etc/hostname", &asked, b"").unwrap();
        assert_eq!(read.0, 200);

        let console = "echo from the inside > /dev/console";
        let exec = ["exec", "--user", "root", &sandbox.id, "--", "sh", "-c", console];
        stdout(&mut daemon.command(&exec));
        let logs = stdout(&mut daemon.command(&["logs", &sandbox.id]));
        let wanted = [
            "event    running",
            "agent    request trace-1: POST /init: 204 ",
            "agent    request trace-1: POST /process.Process/Start: 200 ",
            "agent    request trace-2: GET /files: 200 ",
            "console  from the inside",
        ];
        for text in wanted {
            assert!(logs.contains(text), "no {text:?} in {logs}");
        }

        let log = std::fs::read_to_string(daemon.home().join("log")).unwrap();
        let of_create = |line: &&str| line.contains("id=\"trace-1\"") && line.contains("answered");
        let answered = log.lines().find(of_create).unwrap_or_else(|| panic!("{log}"));
        for field in ["status=201", "restore=", "prove=", "queue="] {
            assert!(answered.contains(field), "no {field} in {answered}");
        }
        daemon.end();
    });
}

#[test]
fn the_command_line_changes_the_daemons_sandboxes_and_it_knows() {
    on_lane!({
        let mut daemon = Daemon::start();
        let sandbox = daemon.client.create(json!({}));
        let id = sandbox.id.as_str();
        let path = format!("/sandboxes/{id}");
        assert_eq!(daemon.client.write(&sandbox, "/root/state", "one"), Some(200));
        stdout(&mut daemon.command(&["checkpoint", id, "--name", "one"]));
        assert_eq!(daemon.client.write(&sandbox, "/root/state", "two"), Some(200));
        stdout(&mut daemon.command(&["rollback", id, "one"]));
        assert_eq!(daemon.client.read(&sandbox, "/root/state"), "one");

        stdout(&mut daemon.command(&["pause", id]));
        assert_eq!(daemon.client.get(&path).1["state"], "paused");
        stdout(&mut daemon.command(&["resume", id, "--timeout", "600"]));
        assert_eq!(daemon.client.get(&path).1["state"], "running");
        assert_eq!(daemon.client.read(&sandbox, "/root/state"), "one");

        // A clone is the command's own; the daemon does not know it.
        let clone = stdout(&mut daemon.command(&["clone", id, "--name", "copy"]));
        let state = ["exec", "--user", "root", "copy", "--", "cat", "/root/state"];
        assert_eq!(stdout(&mut daemon.command(&state)), "one");
        assert_eq!(daemon.client.list(), [id]);
        stdout(&mut daemon.command(&["kill", clone.trim()]));

        // The same without a daemon, which finds all as it was promised.
        daemon.kill();
        stdout(&mut daemon.command(&["pause", id]));
        stdout(&mut daemon.command(&["resume", id, "--timeout", "600"]));
        stdout(&mut daemon.command(&["rollback", id, "one"]));
        daemon.start_again();
        assert_eq!(daemon.client.read(&sandbox, "/root/state"), "one");
        let events = stdout(&mut daemon.command(&["events", "--json", "--sandbox", id]));
        let kinds = events.lines().map(|line| {
            let event: Value = serde_json::from_str(line).unwrap();
            event["kind"].as_str().unwrap().to_owned()
        });
        let round = ["pausing", "paused", "resuming", "running"];
        let mut wanted = vec!["creating", "running", "checkpoint", "rollback"];
        wanted.extend(round);
        wanted.push("checkpoint");
        wanted.extend(round);
        wanted.push("rollback");
        assert_eq!(kinds.collect::<Vec<_>>(), wanted);
        stdout(&mut daemon.command(&["rm", "one"]));
        daemon.end();
    });
}
