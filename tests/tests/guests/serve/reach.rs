//! Who gets at what: another tenant at nothing, whatever the route; and nobody but the manager at
//! what the agent does for it.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::{Value, json};

use super::client::{Client, Daemon, Sandbox};
use crate::common::on_lane;

/// Bodies that each route understands its part of.
fn body(snapshot: &str) -> Value {
    json!({
        "templateID": snapshot, "snapshotID": snapshot, "fromTemplate": snapshot, "name": "mine",
        "timeout": 1, "duration": 1, "count": 1,
    })
}

#[test]
fn what_is_another_tenants_is_out_of_reach_by_every_route() {
    on_lane!({
        let daemon = Daemon::start();
        let client = &daemon.client;
        let sandbox = client.create(json!({}));
        let path = format!("/sandboxes/{}", sandbox.id);
        let (_, snapshot) = client.post(&format!("{path}/snapshots"), json!({"name": "secret"}));
        let snapshot = snapshot["snapshotID"].as_str().unwrap();
        let (status, new) = client.post("/v3/templates", json!({"name": "hidden"}));
        assert_eq!(status, 202, "{new}");
        let (template, build) =
            (new["templateID"].as_str().unwrap(), new["buildID"].as_str().unwrap());
        let before = client.get(&path).1;
        let other = daemon.other_tenant("other");
        let (_, document) = client.get("/openapi.json");
        let (mut with, mut without) = (0, 0);
        for (route, methods) in document["paths"].as_object().unwrap() {
            let id = if route.contains("/sandboxes/") { sandbox.id.as_str() } else { template };
            // A snapshot is removed as a template is.
            for id in [id, if id == template { snapshot } else { id }] {
                let filled = route
                    .replace("{id}", id)
                    .replace("{build}", build)
                    .replace("{hash}", "ab")
                    .replace("{alias}", "secret");
                assert!(!filled.contains('{'), "{route} has a part that this test does not know");
                for method in methods.as_object().unwrap().keys() {
                    let method = method.to_uppercase();
                    let wanted = (method != "GET").then(|| body(snapshot));
                    let asked = format!("{filled}?from={snapshot}&to={snapshot}");
                    let (status, answer) = other.ask(&method, &asked, wanted);
                    if filled == *route {
                        // A list, or something new of its own.
                        without += 1;
                        let text = answer.to_string();
                        for secret in [&sandbox.id, snapshot, template, build, "secret", "hidden"] {
                            let named = text.contains(secret) && status < 400;
                            assert!(!named, "{method} {route}: {answer}");
                        }
                        continue;
                    }
                    with += 1;
                    let code = &answer["code"];
                    assert_eq!((status, code), (404, &json!(404)), "{method} {filled}: {answer}");
                }
            }
        }
        assert!(with >= 22 && without >= 6, "{with} routes with and {without} without a part");
        assert_eq!(client.get(&path).1, before);
        let (status, state) = client.get(&format!("/templates/{template}/builds/{build}/status"));
        assert_eq!((status, &state["status"]), (200, &json!("waiting")));
        let stranger = Sandbox { token: "x".into(), ..sandbox.clone() };
        let (status, _) = other.guest(&stranger, "GET", "/files?path=/etc/hostname", b"").unwrap();
        assert_eq!(status, 401);
        daemon.end();
    });
}

/// Answers with what it was asked, goes over to an echo when it is asked to, or unasked.
const SERVER: &str = r#"
import socket
listener = socket.create_server(("127.0.0.1", 8000))
while True:
    s, _ = listener.accept()
    seen = b""
    while b"\r\n\r\n" not in seen:
        seen += s.recv(4096)
    head, rest = seen.split(b"\r\n\r\n", 1)
    if head.startswith(b"GET /up"):
        s.sendall(b"HTTP/1.1 101 Go On\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n" + rest)
        while got := s.recv(4096):
            s.sendall(got)
    else:
        s.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(head) + head)
    s.close()
"#;

fn connect(client: &Client, head: &str) -> TcpStream {
    let mut stream = TcpStream::connect(client.url.strip_prefix("http://").unwrap()).unwrap();
    stream.write_all(head.as_bytes()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

fn until(stream: &mut TcpStream, end: &str) -> String {
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains(end) {
        let mut piece = [0; 4096];
        let got = stream.read(&mut piece).unwrap();
        assert!(got > 0, "no {end:?} after {:?}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&piece[..got]);
    }
    String::from_utf8(seen).unwrap()
}

#[test]
fn a_guest_gets_what_is_for_it_and_nothing_else() {
    on_lane!({
        let daemon = Daemon::start();
        let client = &daemon.client;
        let sandbox = client.create(json!({}));
        assert_eq!(client.write(&sandbox, "/root/server.py", SERVER), Some(200));
        client.run(&sandbox, "nohup python3 /root/server.py >/dev/null 2>&1 &");
        let host = format!("8000-{}.localhost", sandbox.id);
        // Until it listens, the port is closed.
        let served = |more: &str| loop {
            let head =
                format!("GET /x HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{more}\r\n");
            let mut answer = String::new();
            connect(client, &head).read_to_string(&mut answer).unwrap();
            if !answer.contains("port is not open") {
                assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
                return answer.to_lowercase();
            }
        };
        // A tenant's key stays here; what is the guest's own is passed on.
        let seen = served(&format!("x-api-key: {}\r\nx-own: 1\r\n", client.key));
        assert!(seen.contains("x-own: 1") && !seen.contains("x-api-key"), "{seen}");
        assert!(served("x-api-key: mine\r\n").contains("x-api-key: mine"));
        // What is about the connection ends here, and takes only what it may with it.
        let seen =
            served("connection: x-hop, host\r\nx-hop: 1\r\nte: trailers\r\nkeep-alive: 5\r\n");
        for gone in ["x-hop", "te: ", "keep-alive"] {
            assert!(!seen.contains(&format!("\r\n{gone}")), "{seen}");
        }

        // What comes behind an upgrade is the guest's, however much it looks like a request.
        let hidden = "GET /v2/sandboxes HTTP/1.1\r\nhost: localhost\r\n\r\n";
        let up = format!(
            "GET /up HTTP/1.1\r\nhost: {host}\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n{hidden}"
        );
        let answer = until(&mut connect(client, &up), hidden);
        assert!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
        assert_eq!(answer.matches("HTTP/1.1 4").count(), 0, "{answer}");
        // Nobody asked for it here.
        let head = format!("GET /up HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n{hidden}");
        let mut answer = String::new();
        connect(client, &head).read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 502 "), "{answer}");

        for path in ["/init", "//init", "/%69nit", "/./init", "/init/", "/INIT", "/x/../init"] {
            let (status, answer) = client.guest(&sandbox, "POST", path, b"{}").unwrap();
            assert_eq!(status, 404, "{path}: {}", String::from_utf8_lossy(&answer));
        }
        assert_eq!(client.guest(&sandbox, "GET", "/health", b"").unwrap().0, 204);
        for path in ["../../etc/shadow", "/proc/../etc/../root/./server.py"] {
            let (status, _) =
                client.guest(&sandbox, "GET", &format!("/files?path={path}"), b"").unwrap();
            // Paths are the guest's own: they lead out of nothing.
            assert!([200, 400, 404].contains(&status), "{path}: {status}");
        }
        daemon.end();
    });
}
