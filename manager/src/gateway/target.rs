//! Which sandbox and port a request is for.
//!
//! A host such as `3000-ID.example.org` names both, and nothing else about the request is
//! believed then. The headers `E2b-Sandbox-Id` and `E2b-Sandbox-Port` do where the host is an
//! address, `localhost`, or begins with `sandbox.`: what serves pages of a guest under a name of
//! its own must not be led to another guest by a header.

use axum::extract::Request;
use axum::http::header::HOST;
use axum::http::{HeaderMap, Method, Uri};

use crate::store::Id;

const ID_HEADER: &str = "e2b-sandbox-id";
const PORT_HEADER: &str = "e2b-sandbox-port";

/// A port of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) sandbox: Id,
    pub(super) port: u16,
}

/// What a request is for; nothing if it is for the API.
///
/// # Errors
/// What is wrong with it, for its sender.
pub(super) fn of<T>(request: &Request<T>) -> Result<Option<Target>, &'static str> {
    let host = host(request.uri(), request.headers())?;
    if request.method() == Method::CONNECT {
        return Err("CONNECT is not supported");
    }
    if let Some(host) = &host
        && let Some(target) = named(host)
    {
        return Ok(Some(target));
    }
    let headers = request.headers();
    if !headers.contains_key(ID_HEADER) || !host.as_deref().is_none_or(is_trusted) {
        return Ok(None);
    }
    let id = only(headers, ID_HEADER)?.and_then(Id::parse);
    let port = only(headers, PORT_HEADER)?;
    let port = port.map_or(Ok(default_port()), |port| port.parse().map_err(|_| WRONG_PORT))?;
    match id {
        Some(sandbox) if port != 0 => Ok(Some(Target { sandbox, port })),
        Some(_) => Err(WRONG_PORT),
        None => Err("the header E2b-Sandbox-Id is not a sandbox's ID"),
    }
}

const WRONG_PORT: &str = "the header E2b-Sandbox-Port is not a port";

fn default_port() -> u16 {
    u16::try_from(coppice_agent_protocol::ENVD_PORT).unwrap_or(u16::MAX)
}

/// The one value of a header; nothing if there is none.
fn only<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, &'static str> {
    let mut values = headers.get_all(name).iter();
    let (first, second) = (values.next(), values.next());
    match (first, second) {
        (None, _) => Ok(None),
        (Some(value), None) => value.to_str().map(Some).map_err(|_| "a header is not ASCII"),
        (Some(_), Some(_)) => Err("a header that says where to is there twice"),
    }
}

/// The host that a request names, without its port.
fn host(uri: &Uri, headers: &HeaderMap) -> Result<Option<String>, &'static str> {
    let named = only(headers, HOST.as_str())?;
    let [named, asked] = [named, uri.host()]
        .map(|host| host.map(|host| without_port(host).trim_end_matches('.').to_ascii_lowercase()));
    match (asked, named) {
        // Whoever passed it on may have gone by the one or by the other.
        (Some(asked), Some(named)) if asked != named => Err("the request names two hosts"),
        (asked, named) => Ok(asked.or(named)),
    }
}

fn without_port(host: &str) -> &str {
    match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(rest),
        None => host.split(':').next().unwrap_or(host),
    }
}

/// The port and sandbox in the first label of a host.
fn named(host: &str) -> Option<Target> {
    let (label, _) = host.split_once('.')?;
    let (port, id) = label.split_once('-')?;
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let port = port.parse().ok().filter(|port| digits && *port != 0)?;
    Some(Target { sandbox: Id::parse(id)?, port })
}

/// Whether headers may say where a request goes that came to this host.
fn is_trusted(host: &str) -> bool {
    host == "localhost" || host.starts_with("sandbox.") || host.parse::<std::net::IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ID: &str = "0123456789ab";

    fn asked(host: &str, headers: &[(&str, &str)]) -> Result<Option<Target>, &'static str> {
        let mut request = Request::builder().uri("/x").header("host", host);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        of(&request.body(()).unwrap())
    }

    fn target(port: u16) -> Target {
        Target { sandbox: Id::parse(ID).unwrap(), port }
    }

    #[test]
    fn a_host_names_port_and_sandbox() {
        let found = asked(&format!("3000-{ID}.localhost:49380"), &[]);
        assert_eq!(found, Ok(Some(target(3000))));
    }

    #[test]
    fn headers_name_them_where_the_host_does_not() {
        let headers = [("E2b-Sandbox-Id", ID), ("E2b-Sandbox-Port", "8080")];
        for host in ["localhost:1", "127.0.0.1:1", "[::1]:1", "sandbox.example.org"] {
            assert_eq!(asked(host, &headers), Ok(Some(target(8080))), "{host}");
        }
        assert_eq!(asked("localhost", &headers[..1]), Ok(Some(target(49_983))));
    }

    #[test]
    fn a_page_under_its_own_name_is_not_led_elsewhere() {
        let other = [("E2b-Sandbox-Id", "zzzzzzzzzzzz"), ("E2b-Sandbox-Port", "1")];
        assert_eq!(asked(&format!("80-{ID}.example.org"), &other), Ok(Some(target(80))));
        assert_eq!(asked("example.org", &other), Ok(None));
    }

    #[test]
    fn a_header_that_is_there_twice_is_refused() {
        let twice = [("E2b-Sandbox-Id", ID), ("E2b-Sandbox-Id", "zzzzzzzzzzzz")];
        asked("localhost", &twice).unwrap_err();
        asked("localhost", &[("host", &format!("1-{ID}.localhost"))]).unwrap_err();
    }

    #[test]
    fn a_request_that_names_two_hosts_is_refused() {
        let asked = |uri: &str, host: &str| {
            of(&Request::builder().uri(uri).header("host", host).body(()).unwrap())
        };
        let own = format!("http://80-{ID}.localhost/x");
        asked(&own, "localhost").unwrap_err();
        asked("http://localhost/x", &format!("80-{ID}.localhost")).unwrap_err();
        assert_eq!(asked(&own, &format!("80-{ID}.LOCALHOST:1")), Ok(Some(target(80))));
        // A dot at the end is the same host.
        assert_eq!(asked("/x", &format!("80-{ID}.localhost.")), Ok(Some(target(80))));
    }

    #[test]
    fn a_tunnel_is_refused() {
        let request =
            Request::builder().method(Method::CONNECT).uri(format!("80-{ID}.localhost:80"));
        of(&request.body(()).unwrap()).unwrap_err();
    }

    #[test]
    fn what_is_no_sandbox_or_port_is_refused() {
        for (id, port) in [("../../x", "1"), (ID, "0"), (ID, "65536"), (ID, "x")] {
            asked("localhost", &[("E2b-Sandbox-Id", id), ("E2b-Sandbox-Port", port)]).unwrap_err();
        }
        for label in ["-", "0-0123456789ab", "+1-0123456789ab", "1-0123456789AB"] {
            // The last one is in lower case once it is a host.
            let found = asked(&format!("{label}.localhost"), &[]).unwrap();
            assert_eq!(found.is_some(), label.ends_with('B'), "{label}");
        }
    }

    proptest! {
        #[test]
        fn any_host_is_judged_without_a_panic(host in "[\\x20-\\x7e]{0,40}") {
            let request = Request::builder().uri("/").header("host", host).body(());
            if let Ok(request) = request {
                let _ = of(&request);
            }
        }
    }
}
