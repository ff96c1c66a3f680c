//! Bodies of requests: read whole within bounds of size and time, or not kept at all.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::{CONNECTION, CONTENT_LENGTH};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::Response;
use http_body_util::BodyExt as _;
use tokio::time::timeout;

use super::Failure;

/// The most bytes of a request's body.
const MAX_BODY: usize = 1 << 20;
/// How long one may take: a slow network's time for so much.
const BODY_TIME: Duration = Duration::from_secs(60);
/// The most bytes of a body that are read for nothing, and the longest time they may take.
const MAX_UNREAD: usize = 64 * 1024;
const UNREAD_TIME: Duration = Duration::from_secs(1);

/// Reads a body whole; one that says it is too long is not read.
///
/// # Errors
/// What is wrong with it. The connection is of no use then.
pub(super) async fn whole(headers: &HeaderMap, body: Body) -> Result<Bytes, Failure> {
    let length = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok());
    let fits = length.is_none_or(|length| length.parse().is_ok_and(|n: usize| n <= MAX_BODY));
    let too_long = || {
        let text = format!("a body has at most {MAX_BODY} bytes");
        Failure::new(StatusCode::PAYLOAD_TOO_LARGE, text)
    };
    if !fits {
        return Err(too_long());
    }
    match timeout(BODY_TIME, axum::body::to_bytes(body, MAX_BODY)).await {
        Ok(read) => read.map_err(|_| too_long()),
        Err(_) => {
            let text = format!("a body may take {} seconds", BODY_TIME.as_secs());
            Err(Failure::new(StatusCode::REQUEST_TIMEOUT, text))
        }
    }
}

/// Gives an answer that does not depend on the request's body when that was read, for nothing:
/// the connection would look usable to the client otherwise and would not be. What is long or does
/// not come ends it.
pub(crate) async fn after(mut body: Body, response: Response) -> Response {
    let mut room = MAX_UNREAD;
    let to_its_end = async {
        while let Some(frame) = body.frame().await {
            let length = frame.ok()?.data_ref().map_or(0, Bytes::len);
            room = room.checked_sub(length)?;
        }
        Some(())
    };
    match timeout(UNREAD_TIME, to_its_end).await {
        Ok(Some(())) => response,
        Ok(None) | Err(_) => closing(response),
    }
}

/// An answer after which the connection ends.
pub(crate) fn closing(mut response: Response) -> Response {
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}
