//! Machines that end in the middle of things: by their guest, and by a signal.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use coppice_manager::home::Home;
use coppice_manager::sandbox::Guest;
use coppice_manager::store::{Id, Store};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::client::{Client, Daemon, Sandbox};
use crate::common::{block_on, on_lane};

/// Asks for a sandbox until it is gone; nothing that is asked meanwhile may succeed falsely.
fn until_gone(client: &Client, sandbox: &Sandbox) {
    let path = format!("/sandboxes/{}", sandbox.id);
    // Each asks until what must happen has happened; the test's own limit ends it.
    while client.get(&path).0 != 404 {}
    for (route, body) in [("pause", json!({})), ("snapshots", json!({})), ("fork", json!({}))] {
        let (status, answer) = client.post(&format!("{path}/{route}"), body);
        assert_eq!(status, 404, "{route}: {answer}");
    }
    let (status, body) = client.guest(sandbox, "GET", "/health", b"").unwrap();
    assert_eq!(status, 502);
    assert!(String::from_utf8_lossy(&body).contains("was not found"));
}

#[test]
fn a_guest_that_panics_is_gone_and_the_reason_is_written_down() {
    on_lane!({
        let daemon = Daemon::start();
        let client = &daemon.client;
        let sandbox = client.create(json!({}));
        let crash = client.try_run(&sandbox, "echo c > /proc/sysrq-trigger");
        assert_eq!(crash, None, "a command that ended the guest has an exit code");
        until_gone(client, &sandbox);
        let why = daemon.why_gone(&sandbox.id).unwrap();
        assert!(why.contains("panic") || why.contains("guest"), "{why}");
        assert!(daemon.meter("coppice_sandboxes_ended_total") >= 1.0);
        daemon.end();
    });
}

#[test]
fn a_machine_that_is_killed_under_load_is_gone_and_others_are_not() {
    on_lane!({
        let daemon = Daemon::start();
        let client = &daemon.client;
        let stays = client.create(json!({}));
        let dies = client.create(json!({}));
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            for sandbox in [&stays, &dies] {
                let (stop, dies) = (&stop, &dies);
                scope.spawn(move || {
                    let mut number = 0u64;
                    while !stop.load(Ordering::Relaxed) {
                        number += 1;
                        let text = number.to_string();
                        match client.write(sandbox, "/root/state", &text) {
                            Some(200) => {}
                            // Only of the one that was killed, and never anything but a failure.
                            other => {
                                assert_eq!(sandbox.id, dies.id, "{other:?}");
                                assert!(other.is_none_or(|status| status == 502), "{other:?}");
                            }
                        }
                    }
                });
            }
            let pid = machine_of(&daemon, &dies);
            kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
            until_gone(client, &dies);
            stop.store(true, Ordering::Relaxed);
        });
        assert!(daemon.why_gone(&dies.id).is_some_and(|why| !why.is_empty()));
        assert_eq!(client.write(&stays, "/root/state", "alive"), Some(200));
        assert_eq!(client.read(&stays, "/root/state"), "alive");
        daemon.end();
    });
}

/// The process of a sandbox's machine.
fn machine_of(daemon: &Daemon, sandbox: &Sandbox) -> i32 {
    let store = Store::open(&Home::at(daemon.home().to_owned())).unwrap();
    let id = Id::parse(&sandbox.id).unwrap();
    let pid = block_on(async { Guest::open(&store, &id).unwrap().vmm().pid() });
    i32::try_from(pid).unwrap()
}
