//! Many clients at once, and clients that go away in the middle of things.

use std::io::Write as _;
use std::net::{Shutdown, TcpStream};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::client::{Client, Daemon, Sandbox};
use crate::common::on_lane;

/// Asks for a sandbox as each of these clients, at once; the answers.
fn create_at_once(clients: &[&Client]) -> Vec<(u16, Value)> {
    thread::scope(|scope| {
        let asked: Vec<_> = clients
            .iter()
            .map(|client| {
                let body = json!({"templateID": "base", "timeout": 900});
                scope.spawn(move || client.post("/v2/sandboxes", body))
            })
            .collect();
        asked.into_iter().map(|asked| asked.join().unwrap()).collect()
    })
}

#[test]
fn fifty_who_ask_at_once_get_their_quota_or_are_told_so() {
    on_lane!({
        let daemon = Daemon::start_with(&["--max-sandboxes", "2"]);
        // The built-in template is made once, before.
        let first = daemon.client.create(json!({}));
        assert_eq!(daemon.client.delete(&first.id).0, 204);
        let tenants: Vec<Client> =
            (0..8).map(|number| daemon.other_tenant(&format!("tenant-{number}"))).collect();
        // Two more of the first two.
        let asking: Vec<&Client> = tenants.iter().cycle().take(50).collect();
        let answers = create_at_once(&asking);
        let with = |wanted| answers.iter().filter(|(status, _)| *status == wanted).count();
        assert_eq!((with(201), with(429)), (16, 34), "{answers:?}");
        let made = answers.iter().zip(&asking).filter(|((status, _), _)| *status == 201);
        for ((_, answer), client) in made {
            let made = Sandbox::of(answer);
            assert_eq!(client.read(&made, "/etc/hostname").trim(), made.id);
        }
        // A paused one counts, and one that is gone does not.
        let (tenant, own) = (&tenants[0], tenants[0].list());
        assert_eq!(tenant.post(&format!("/sandboxes/{}/pause", own[0]), json!({})).0, 204);
        assert_eq!(tenant.post("/v2/sandboxes", json!({"templateID": "base"})).0, 429);
        assert_eq!(tenant.delete(&own[0]).0, 204);
        assert_eq!(tenant.post("/v2/sandboxes", json!({"templateID": "base"})).0, 201);
        for tenant in &tenants {
            let own = tenant.list();
            assert_eq!(own.len(), 2);
            for sandbox in own {
                assert_eq!(tenant.delete(&sandbox).0, 204);
            }
        }
        daemon.end();
    });
}

/// Sends a request and goes away: after a while, or before all of it was sent.
fn vanish(client: &Client, head: &str, body: &[u8], sent: usize, after: Duration) {
    let mut stream = TcpStream::connect(client.url.strip_prefix("http://").unwrap()).unwrap();
    let head = format!(
        "{head} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {}\r\ncontent-length: {}\r\n\
         authorization: Basic cm9vdDo=\r\n",
        client.key,
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(b"\r\n").unwrap();
    stream.write_all(&body[..sent.min(body.len())]).unwrap();
    // It goes away at any time, which no event tells of.
    thread::sleep(after);
    let _ = stream.shutdown(Shutdown::Both);
}

#[test]
fn clients_that_vanish_leave_nothing_half_done() {
    on_lane!({
        let daemon = Daemon::start();
        let client = &daemon.client;
        let sandbox = client.create(json!({}));
        assert_eq!(client.write(&sandbox, "/root/state", "kept"), Some(200));
        let path = format!("/sandboxes/{}", sandbox.id);
        let new = br#"{"templateID":"base","timeout":900}"#;
        thread::scope(|scope| {
            for number in 0..6u64 {
                let after = Duration::from_millis(number * 120);
                scope.spawn(move || {
                    vanish(client, "POST /v2/sandboxes", new, new.len(), after);
                    vanish(client, "POST /v2/sandboxes", new, 5, after);
                });
            }
            let guest = format!(
                "\r\ne2b-sandbox-id: {}\r\nx-access-token: {}\r\nx: ",
                sandbox.id, sandbox.token
            );
            // The headers of a guest's request follow its first line here.
            let upload = format!("POST /files?path=/root/half HTTP/1.1{guest}");
            let run = format!("POST /process.Process/Start HTTP/1.1{guest}");
            scope.spawn(move || {
                for number in 0..6u64 {
                    let after = Duration::from_millis(number * 40);
                    vanish(client, &upload, &vec![7; 1 << 20], 600_000, after);
                    vanish(client, &run, b"{}", 1, after);
                }
            });
            for number in 0..4u64 {
                vanish(
                    client,
                    &format!("POST {path}/pause"),
                    b"{}",
                    2,
                    Duration::from_millis(number * 80),
                );
                let (status, answer) = client.post(&format!("/v2{path}/connect"), json!({}));
                assert!([200, 201].contains(&status), "{status}: {answer}");
            }
        });
        assert_eq!(client.read(&sandbox, "/root/state"), "kept");
        // What was made for those who went away runs; each is one that works.
        for other in client.list() {
            let (status, shown) = client.get(&format!("/sandboxes/{other}"));
            assert_eq!((status, &shown["state"]), (200, &json!("running")));
        }
        daemon.end();
    });
}
