//! A daemon that is killed at any moment: what was acknowledged is there, and nothing else.

use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::client::{Client, Daemon, Sandbox};
use crate::common::on_lane;

/// Changes that each worker asks for, and workers.
const STEPS: u64 = 34;
const WORKERS: u64 = 3;
/// Times that the daemon is killed.
const KILLS: u32 = 12;

/// What a worker knows of a sandbox: its state and a file's content, each one of those that it can
/// be, as the last change may have happened or not.
#[derive(Debug)]
struct Known {
    sandbox: Sandbox,
    states: Vec<&'static str>,
    contents: Vec<u64>,
}

/// Where the daemon is now, as it moves when it is started again.
#[derive(Debug, Default)]
struct Place {
    client: Mutex<Option<String>>,
    moved: Condvar,
}

impl Place {
    fn set(&self, url: Option<String>) {
        *self.client.lock().unwrap_or_else(PoisonError::into_inner) = url;
        self.moved.notify_all();
    }

    /// Waits until there is a daemon.
    fn client(&self, key: &str) -> Client {
        let url = self.client.lock().unwrap();
        let back = Duration::from_secs(120);
        let (url, waited) = self.moved.wait_timeout_while(url, back, |url| url.is_none()).unwrap();
        assert!(!waited.timed_out(), "the daemon does not come back");
        Client { url: url.clone().unwrap(), key: key.to_owned() }
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (self.0 >> 33) % end
    }
}

/// Asks until a daemon answers, however often it is killed meanwhile.
fn answered(place: &Place, key: &str, method: &str, path: &str) -> (u16, Value) {
    loop {
        if let Some(answer) = place.client(key).try_api(method, path, None) {
            return answer;
        }
        thread::yield_now();
    }
}

/// Looks whether all that is known is so, and knows it exactly then.
fn check(place: &Place, key: &str, known: &mut Vec<Known>) {
    known.retain_mut(|one| {
        let (status, shown) =
            answered(place, key, "GET", &format!("/sandboxes/{}", one.sandbox.id));
        if status == 404 {
            assert!(one.states.contains(&"gone"), "{one:?} is lost");
            return false;
        }
        assert_eq!(status, 200, "{shown}");
        let state = shown["state"].as_str().unwrap().to_owned();
        // A change that was asked for may still be under way.
        let state = one.states.iter().find(|known| **known == state);
        one.states = vec![state.copied().unwrap_or_else(|| panic!("{one:?} is {shown}"))];
        true
    });
}

/// One change of a sandbox, or a new one.
fn step(client: &Client, known: &mut Vec<Known>, random: &mut Random, number: u64) {
    if known.is_empty() || (known.len() < 3 && random.below(3) == 0) {
        let body = json!({"templateID": "base", "timeout": 3600});
        if let Some((status, made)) = client.try_api("POST", "/v2/sandboxes", Some(body)) {
            assert_eq!(status, 201, "{made}");
            let sandbox = Sandbox::of(&made);
            known.push(Known { sandbox, states: vec!["running"], contents: vec![0] });
        }
        return;
    }
    let at = usize::try_from(random.below(u64::try_from(known.len()).unwrap())).unwrap();
    let one = &mut known[at];
    let path = format!("/sandboxes/{}", one.sandbox.id);
    let running = one.states == ["running"];
    match (running, random.below(4)) {
        (true, 0 | 1) => {
            one.contents.push(number);
            let text = number.to_string();
            if let Some(status) = client.write(&one.sandbox, "/root/state", &text) {
                assert_eq!(status, 200, "{one:?}");
                one.contents = vec![number];
            }
        }
        (true, 2) => {
            one.states = vec!["running", "paused"];
            if let Some((status, said)) = client.try_api("POST", &format!("{path}/pause"), None) {
                assert_eq!(status, 204, "{said}");
                one.states = vec!["paused"];
            }
        }
        (false, 0..=2) => {
            one.states = vec!["running", "paused"];
            let body = json!({"timeout": 3600});
            let path = format!("/v2{path}/connect");
            if let Some((status, said)) = client.try_api("POST", &path, Some(body)) {
                assert_eq!(status, 201, "{said}");
                one.states = vec!["running"];
            }
        }
        _ => {
            one.states.push("gone");
            if let Some((status, said)) = client.try_api("DELETE", &path, None) {
                assert_eq!(status, 204, "{said}");
                known.remove(at);
            }
        }
    }
}

fn work(place: &Place, key: &str, seed: u64) -> Vec<Known> {
    let (mut known, mut random) = (Vec::new(), Random(seed));
    for number in 1..=STEPS {
        step(&place.client(key), &mut known, &mut random, seed * 1000 + number);
        check(place, key, &mut known);
    }
    known
}

#[test]
fn what_a_killed_daemon_acknowledged_is_there_and_nothing_else() {
    on_lane!({
        let mut daemon = Daemon::start();
        // The built-in template is made once, before.
        let first = daemon.client.create(json!({}));
        assert_eq!(daemon.client.delete(&first.id).0, 204);
        let (place, key) = (Place::default(), daemon.client.key.clone());
        place.set(Some(daemon.client.url.clone()));
        let mut known: Vec<Known> = thread::scope(|scope| {
            let workers: Vec<_> = (1..=WORKERS)
                .map(|seed| {
                    let (place, key) = (&place, key.as_str());
                    scope.spawn(move || work(place, key, seed))
                })
                .collect();
            let mut random = Random(4711);
            for _ in 0..KILLS {
                // When it is killed is not to depend on what it does.
                thread::sleep(Duration::from_millis(200 + random.below(1800)));
                place.set(None);
                daemon.kill();
                daemon.start_again();
                place.set(Some(daemon.client.url.clone()));
            }
            workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
        });
        check(&place, &key, &mut known);
        let client = daemon.client.clone();
        for one in &known {
            if one.states == ["paused"] {
                let path = format!("/v2/sandboxes/{}/connect", one.sandbox.id);
                assert_eq!(client.post(&path, json!({})).0, 201);
            }
            if one.contents != [0] {
                let content: u64 = client.read(&one.sandbox, "/root/state").parse().unwrap();
                assert!(one.contents.contains(&content), "{one:?} has {content}");
            }
        }
        daemon.end();
    });
}
