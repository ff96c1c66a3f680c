//! Requests that mean one thing to one reader and another to the next, at raw sockets of the real
//! daemon. No sandbox is there: where a request was led is seen by the answer.

use std::io::{Read as _, Write as _};
use std::time::Duration;

use crate::daemon::Daemon;

const ONE: &str = "0123456789ab";
const TWO: &str = "zzzzzzzzzzzz";

/// Sends bytes; all that the daemon answers until it closes the connection.
fn answers(daemon: &Daemon, bytes: &[u8]) -> String {
    let mut stream = daemon.connect();
    // It may have closed before all was sent.
    let _ = stream.write_all(bytes);
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut all = Vec::new();
    let _ = stream.read_to_end(&mut all);
    String::from_utf8_lossy(&all).into_owned()
}

/// What a request was taken for, by the first line and the body of the answer.
#[derive(Debug, PartialEq, Eq)]
enum Led {
    /// To a sandbox, which is not there.
    To(&'static str),
    /// To the API.
    Api(u16),
    /// Nowhere.
    Refused(u16),
}

fn led(answer: &str) -> Led {
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status: u16 = status.unwrap_or_else(|| panic!("no answer: {answer:?}"));
    for id in [ONE, TWO] {
        if answer.contains(&format!("The sandbox {id} was not found")) {
            assert_eq!(status, 502);
            return Led::To(id);
        }
    }
    match status {
        400 | 414 | 431 | 501 | 505 => Led::Refused(status),
        status => Led::Api(status),
    }
}

#[test]
fn a_request_is_led_to_one_place_or_refused() {
    let daemon = Daemon::start(&[]);
    let own = format!("80-{ONE}.localhost");
    let other = format!("80-{TWO}.localhost");
    let cases = [
        // What is usual.
        (format!("GET / HTTP/1.1\r\nhost: {own}\r\n"), Led::To(ONE)),
        (format!("GET / HTTP/1.1\r\nhost: localhost\r\ne2b-sandbox-id: {ONE}\r\n"), Led::To(ONE)),
        ("GET /v2/sandboxes HTTP/1.1\r\nhost: localhost\r\n".into(), Led::Api(401)),
        // A page of one guest does not lead to another.
        (format!("GET / HTTP/1.1\r\nhost: {own}\r\ne2b-sandbox-id: {TWO}\r\n"), Led::To(ONE)),
        (format!("GET / HTTP/1.1\r\nhost: x.org\r\ne2b-sandbox-id: {TWO}\r\n"), Led::Api(404)),
        // Two of what there is one of.
        (format!("GET / HTTP/1.1\r\nhost: {own}\r\nhost: {other}\r\n"), Led::Refused(400)),
        (format!("GET / HTTP/1.1\r\nhost: localhost\r\nHost: {own}\r\n"), Led::Refused(400)),
        (
            format!(
                "GET / HTTP/1.1\r\nhost: localhost\r\ne2b-sandbox-id: {ONE}\r\n\
                 E2B-SANDBOX-ID: {TWO}\r\n"
            ),
            Led::Refused(400),
        ),
        (
            format!(
                "GET / HTTP/1.1\r\nhost: localhost\r\ne2b-sandbox-id: {ONE}\r\n\
                 e2b-sandbox-port: 80\r\ne2b-sandbox-port: 49983\r\n"
            ),
            Led::Refused(400),
        ),
        (
            format!("GET / HTTP/1.1\r\nhost: localhost\r\ne2b-sandbox-id: {ONE}, {TWO}\r\n"),
            Led::Refused(400),
        ),
        // The first line against the headers.
        (format!("GET http://{own}/ HTTP/1.1\r\nhost: {other}\r\n"), Led::Refused(400)),
        (format!("GET http://{own}/ HTTP/1.1\r\nhost: localhost\r\n"), Led::Refused(400)),
        (format!("GET http://localhost/ HTTP/1.1\r\nhost: {own}\r\n"), Led::Refused(400)),
        (format!("GET http://{own}/ HTTP/1.1\r\nhost: {own}\r\n"), Led::To(ONE)),
        (format!("GET http://{own}@{other}/ HTTP/1.1\r\nhost: {other}\r\n"), Led::To(TWO)),
        // Headers that are none, or that go on in the next line.
        (format!("GET / HTTP/1.1\r\nhost: localhost\r\n {own}\r\n"), Led::Refused(400)),
        (
            format!("GET / HTTP/1.1\r\nhost: x\r\nx: 1\r\n\te2b-sandbox-id: {ONE}\r\n"),
            Led::Refused(400),
        ),
        (format!("GET / HTTP/1.1\r\nhost : {own}\r\n"), Led::Refused(400)),
        (
            format!("GET / HTTP/1.1\r\nhost: localhost\r\ne2b-sandbox-id\x0b: {ONE}\r\n"),
            Led::Refused(400),
        ),
        (format!("GET / HTTP/1.1\r\nhost: {own}\0.x.org\r\n"), Led::Refused(400)),
        // Tunnels.
        (format!("CONNECT {own}:80 HTTP/1.1\r\nhost: {own}\r\n"), Led::Refused(400)),
        (
            format!(
                "CONNECT localhost:49983 HTTP/1.1\r\nhost: localhost\r\ne2b-sandbox-id: {ONE}\r\n"
            ),
            Led::Refused(400),
        ),
        // Lengths that are none, and two of them.
        (
            format!("POST / HTTP/1.1\r\nhost: {own}\r\ncontent-length: 1\r\ncontent-length: 2\r\n"),
            Led::Refused(400),
        ),
        (format!("POST / HTTP/1.1\r\nhost: {own}\r\ncontent-length: +1\r\n"), Led::Refused(400)),
        (format!("POST / HTTP/1.1\r\nhost: {own}\r\ncontent-length: 1, 1\r\n"), Led::Refused(400)),
        (
            format!("POST / HTTP/1.1\r\nhost: {own}\r\ntransfer-encoding: chunked, identity\r\n"),
            Led::Refused(400),
        ),
        (
            format!("POST / HTTP/1.1\r\nhost: {own}\r\ntransfer-encoding: xchunked\r\n"),
            Led::Refused(400),
        ),
        (
            format!("POST / HTTP/1.0\r\nhost: {own}\r\ntransfer-encoding: chunked\r\n"),
            Led::Refused(400),
        ),
    ];
    for (head, wanted) in cases {
        let answer = answers(&daemon, format!("{head}connection: close\r\n\r\n").as_bytes());
        assert_eq!(led(&answer), wanted, "{head:?}\n{answer}");
    }
}

/// What comes behind a request is only taken for another one if that is certain.
#[test]
fn nothing_is_hidden_behind_a_request() {
    let daemon = Daemon::start(&[]);
    let hidden = format!("GET / HTTP/1.1\r\nhost: 80-{TWO}.localhost\r\nconnection: close\r\n\r\n");
    let length = hidden.len();
    // The chunks end at once; by the length, the rest would be the body.
    let both = format!(
        "POST / HTTP/1.1\r\nhost: 80-{ONE}.localhost\r\ncontent-length: {}\r\n\
         transfer-encoding: chunked\r\n\r\n0\r\n\r\n{hidden}",
        length + 5
    );
    let answer = answers(&daemon, both.as_bytes());
    assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
    assert!(!answer.contains(TWO), "{answer}");
    // One after the other is what it says: each led by its own head.
    let plain = format!(
        "POST / HTTP/1.1\r\nhost: 80-{ONE}.localhost\r\ncontent-length: 2\r\n\r\nab{hidden}"
    );
    let answer = answers(&daemon, plain.as_bytes());
    let (first, second) = answer.split_at(answer.rfind("HTTP/1.1 ").unwrap());
    assert_eq!((led(first), led(second)), (Led::To(ONE), Led::To(TWO)), "{answer}");
    // An upgrade that there is nobody for is a request like another.
    let upgrade = format!(
        "GET / HTTP/1.1\r\nhost: 80-{ONE}.localhost\r\nconnection: upgrade\r\n\
         upgrade: websocket\r\n\r\n{hidden}"
    );
    let answer = answers(&daemon, upgrade.as_bytes());
    assert!(answer.starts_with("HTTP/1.1 502 "), "{answer}");
    assert_eq!(answer.matches("HTTP/1.1 101").count(), 0, "{answer}");
}

#[test]
fn the_agents_own_routes_are_not_reached_however_they_are_spelt() {
    let daemon = Daemon::start(&[]);
    let spellings = [
        "/init",
        "//init",
        "/./init",
        "/init/",
        "/INIT",
        "/%69nit",
        "/%2569nit",
        "/x/../init",
        "/x/%2e%2e/init",
        "/init%2f",
        "/init;x",
        "/init?x=1",
        "/freeze",
        "/collapse",
    ];
    for path in spellings {
        for (target, host) in [
            (path.to_owned(), "localhost".to_owned()),
            (format!("http://localhost{path}"), "localhost".to_owned()),
            (path.to_owned(), format!("49983-{ONE}.localhost")),
        ] {
            let head = format!(
                "POST {target} HTTP/1.1\r\nhost: {host}\r\ne2b-sandbox-id: {ONE}\r\n\
                 content-length: 2\r\nconnection: close\r\n\r\n{{}}"
            );
            let answer = answers(&daemon, head.as_bytes());
            assert!(answer.starts_with("HTTP/1.1 404 "), "{head:?}\n{answer}");
            assert!(answer.contains("there is no such route"), "{head:?}\n{answer}");
        }
    }
}
