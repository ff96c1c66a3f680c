//! One request to a guest and its answer, streamed both ways, upgrades included.

use axum::body::Body;
use axum::http::header::{CONNECTION, UPGRADE};
use axum::http::{HeaderMap, HeaderName, Request, Response, StatusCode, Uri, Version};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use thiserror::Error;
use tokio::io::copy_bidirectional;
use tokio::net::UnixStream;

use crate::agent::{self, Agent};
use crate::listen::Place;

/// Headers about a connection and not about what goes over it (RFC 9110, section 7.6.1), besides
/// those that `Connection` names.
const HOP: [HeaderName; 6] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("te"),
    HeaderName::from_static("trailer"),
    HeaderName::from_static("transfer-encoding"),
];

/// The most bytes of an answer's head, and of what waits to be sent.
const MAX_BUFFER: usize = 64 * 1024;

/// Why a guest gave no answer.
#[derive(Debug, Error)]
pub(super) enum Error {
    /// Nobody listens on the port.
    #[error("the port is not open")]
    Closed,
    /// The guest cannot be reached.
    #[error("the guest cannot be reached")]
    Agent(#[source] agent::Error),
    /// The guest's answer is not HTTP, or it ended before it came.
    #[error("the guest broke the exchange off")]
    Http(#[source] hyper::Error),
    /// The guest went over to another protocol that nobody asked for.
    #[error("the guest went over to another protocol without being asked to")]
    Unasked,
    /// The request cannot be written as the guest's.
    #[error("the request cannot be passed on")]
    Request(#[source] axum::http::Error),
}

/// Opens a stream to a port of a guest.
pub(super) async fn open(agent: &Agent, port: u16) -> Result<UnixStream, Error> {
    agent.connect(port).await.map_err(|error| match error {
        agent::Error::PortClosed(_) => Error::Closed,
        error => Error::Agent(error),
    })
}

/// Sends a request over a stream; the answer's body comes as the guest sends it. With an upgrade
/// in it, both ends are joined from then on.
pub(super) async fn exchange(
    stream: UnixStream,
    mut request: Request<Body>,
) -> Result<Response<Body>, Error> {
    let mut builder = http1::Builder::new();
    builder.max_buf_size(MAX_BUFFER);
    let (mut sender, connection) =
        builder.handshake(TokioIo::new(stream)).await.map_err(Error::Http)?;
    // Its failures surface in the exchange.
    tokio::spawn(async move { drop(connection.with_upgrades().await) });
    let upgrade = upgrade_of(request.headers());
    let place = request.extensions().get::<Place>().cloned();
    let asked = upgrade.is_some();
    let client = asked.then(|| hyper::upgrade::on(&mut request));
    let request = passed_on(request, upgrade.as_ref())?;
    let mut response = sender.send_request(request).await.map_err(Error::Http)?;
    let upgraded = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    if let Some(client) = client.filter(|_| upgraded) {
        let guest = hyper::upgrade::on(&mut response);
        tokio::spawn(async move {
            let _place = place;
            let (Ok(client), Ok(guest)) = tokio::join!(client, guest) else { return };
            let (mut client, mut guest) = (TokioIo::new(client), TokioIo::new(guest));
            // Either end may break off at any time.
            let _ = copy_bidirectional(&mut client, &mut guest).await;
        });
    }
    if upgraded && !asked {
        return Err(Error::Unasked);
    }
    let kept = upgrade_of(response.headers()).filter(|_| upgraded);
    strip(response.headers_mut(), kept.as_ref());
    Ok(response.map(Body::new))
}

/// The request as the guest gets it: only a path in its first line, and no headers about the
/// connection to the client.
fn passed_on(
    request: Request<Body>,
    upgrade: Option<&axum::http::HeaderValue>,
) -> Result<Request<Body>, Error> {
    let (mut parts, body) = request.into_parts();
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    let path: Uri = path.parse().map_err(|error| Error::Request(axum::http::Error::from(error)))?;
    parts.uri = path;
    parts.version = Version::HTTP_11;
    strip(&mut parts.headers, upgrade);
    Ok(Request::from_parts(parts, body))
}

/// The protocol that a message wants to go over to.
fn upgrade_of(headers: &HeaderMap) -> Option<axum::http::HeaderValue> {
    let wants = |value: &axum::http::HeaderValue| {
        let value = value.to_str().unwrap_or_default();
        value.split(',').any(|word| word.trim().eq_ignore_ascii_case("upgrade"))
    };
    headers.get_all(CONNECTION).iter().any(wants).then(|| headers.get(UPGRADE).cloned()).flatten()
}

/// Removes what is about a connection; sets what an upgrade needs of it.
fn strip(headers: &mut HeaderMap, upgrade: Option<&axum::http::HeaderValue>) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|word| word.trim().parse().ok())
        .collect();
    for name in named.iter().chain(&HOP).chain([&UPGRADE]) {
        headers.remove(name);
    }
    if let Some(upgrade) = upgrade {
        headers.insert(CONNECTION, axum::http::HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, upgrade.clone());
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect()
    }

    #[test]
    fn headers_of_the_connection_stay_behind() {
        let mut stripped = headers(&[
            ("connection", "close, x-secret"),
            ("x-secret", "1"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("accept", "*/*"),
        ]);
        strip(&mut stripped, None);
        assert_eq!(stripped, headers(&[("accept", "*/*")]));
    }

    #[test]
    fn an_upgrade_is_passed_on() {
        let asked = headers(&[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")]);
        let upgrade = upgrade_of(&asked);
        let mut stripped = asked;
        strip(&mut stripped, upgrade.as_ref());
        let wanted = headers(&[("connection", "upgrade"), ("upgrade", "websocket")]);
        assert_eq!(stripped, wanted);
    }
}
