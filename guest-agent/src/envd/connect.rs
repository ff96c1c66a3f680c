//! The server's side of the Connect protocol: bodies in, frames and errors out.

use std::time::Duration;

use bytes::Bytes;
use coppice_agent_protocol::envelope::{self, FrameDecoder};
use coppice_agent_protocol::{Code, ConnectError, STREAM_CONTENT_TYPE, UNARY_CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde::de::DeserializeOwned;

use crate::body::Body;

/// Largest message a caller may send. Input comes in messages, so this is also the largest piece
/// of input.
pub(super) const MAX_MESSAGE: usize = 16 * 1024 * 1024;

/// How long a caller may pause within a message.
const BODY_IDLE: Duration = Duration::from_secs(60);

/// The parts of a call, or the answer to a request that cannot be one.
pub(super) fn accept(
    request: Request<Incoming>,
    streaming: bool,
) -> Result<(HeaderMap, Incoming), Box<Response<Body>>> {
    if request.method() != Method::POST {
        let mut response = super::empty(StatusCode::METHOD_NOT_ALLOWED);
        response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("POST"));
        return Err(Box::new(response));
    }
    let (parts, body) = request.into_parts();
    let expected = if streaming { STREAM_CONTENT_TYPE } else { UNARY_CONTENT_TYPE };
    if !has_content_type(&parts.headers, expected) {
        return Err(Box::new(unsupported_media_type(streaming)));
    }
    Ok((parts.headers, body))
}

/// The answer to a call of a procedure that a service does not have.
pub(super) fn no_procedure(service: &str, procedure: &str) -> Response<Body> {
    let message = format!("{service} has no procedure {procedure}");
    let error = ConnectError::new(Code::Unimplemented, message);
    super::json(StatusCode::NOT_FOUND, &error)
}

/// Runs a call that is over when it returns, for at most the time the caller gives.
pub(super) async fn within_timeout<T>(
    headers: &HeaderMap,
    call: impl Future<Output = Result<T, ConnectError>>,
) -> Result<T, ConnectError> {
    let Some(limit) = super::headers::timeout(headers)? else { return call.await };
    tokio::time::timeout(limit, call)
        .await
        .map_err(|_| ConnectError::new(Code::DeadlineExceeded, "the call's time is over"))?
}

/// Whether the request has this content type, parameters aside.
pub(super) fn has_content_type(headers: &HeaderMap, expected: &str) -> bool {
    headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .and_then(|text| text.split(';').next())
        .is_some_and(|media_type| media_type.trim().eq_ignore_ascii_case(expected))
}

/// The next piece of a body, `None` at its end.
pub(super) async fn next_piece(body: &mut Incoming) -> Result<Option<Bytes>, ConnectError> {
    loop {
        let frame = match body.frame().await {
            None => return Ok(None),
            Some(frame) => frame,
        };
        let frame = frame.map_err(|error| {
            ConnectError::new(Code::Canceled, format!("reading the request: {error}"))
        })?;
        // Trailers have no meaning here.
        if let Ok(data) = frame.into_data() {
            return Ok(Some(data));
        }
    }
}

/// The same, bounded in time: for messages that are to arrive at once.
async fn next_piece_soon(body: &mut Incoming) -> Result<Option<Bytes>, ConnectError> {
    let late = |_| ConnectError::new(Code::DeadlineExceeded, "the request's body does not arrive");
    tokio::time::timeout(BODY_IDLE, next_piece(body)).await.map_err(late)?
}

/// The message of a unary call.
pub(super) async fn unary_message<T: DeserializeOwned>(
    body: &mut Incoming,
) -> Result<T, ConnectError> {
    let mut text = Vec::new();
    while let Some(piece) = next_piece_soon(body).await? {
        if text.len().saturating_add(piece.len()) > MAX_MESSAGE {
            return Err(too_large());
        }
        text.extend_from_slice(&piece);
    }
    parse(&text)
}

/// The one message of a call whose reply streams.
pub(super) async fn single_message<T: DeserializeOwned>(
    body: &mut Incoming,
) -> Result<T, ConnectError> {
    let mut decoder = FrameDecoder::new(MAX_MESSAGE);
    let mut message = None;
    loop {
        while let Some(frame) = decoder.next_frame().map_err(bad_envelope)? {
            if frame.is_end() {
                continue;
            }
            if message.replace(parse(&frame.payload)?).is_some() {
                return Err(invalid("the request has more than one message"));
            }
        }
        match next_piece_soon(body).await? {
            Some(piece) => decoder.push(&piece),
            None if !decoder.is_at_boundary() => return Err(invalid("the request is cut short")),
            None => break,
        }
    }
    message.ok_or_else(|| invalid("the request has no message"))
}

/// Messages of a call whose request streams.
pub(super) struct Messages {
    body: Incoming,
    decoder: FrameDecoder,
}

impl Messages {
    pub(super) const fn new(body: Incoming) -> Self {
        Self { body, decoder: FrameDecoder::new(MAX_MESSAGE) }
    }

    /// The next message, whenever it comes; `None` at the end.
    pub(super) async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ConnectError> {
        loop {
            if let Some(frame) = self.decoder.next_frame().map_err(bad_envelope)? {
                if frame.is_end() {
                    return Ok(None);
                }
                return parse(&frame.payload).map(Some);
            }
            match next_piece(&mut self.body).await? {
                Some(piece) => self.decoder.push(&piece),
                None if self.decoder.is_at_boundary() => return Ok(None),
                None => return Err(invalid("the request is cut short")),
            }
        }
    }
}

fn parse<T: DeserializeOwned>(text: &[u8]) -> Result<T, ConnectError> {
    // A message without fields may be an empty body.
    let text = if text.is_empty() { b"{}" } else { text };
    serde_json::from_slice(text)
        .map_err(|error| invalid(format!("the message is not what the call takes: {error}")))
}

pub(super) fn invalid(message: impl Into<String>) -> ConnectError {
    ConnectError::new(Code::InvalidArgument, message)
}

fn bad_envelope(error: envelope::EnvelopeError) -> ConnectError {
    let code = match error {
        envelope::EnvelopeError::TooLarge { .. } => Code::ResourceExhausted,
        envelope::EnvelopeError::Compressed => Code::Unimplemented,
    };
    ConnectError::new(code, error.to_string())
}

fn too_large() -> ConnectError {
    let message = format!("the message is larger than the limit of {MAX_MESSAGE} bytes");
    ConnectError::new(Code::ResourceExhausted, message)
}

/// The response to a unary call.
pub(super) fn unary_response<T: serde::Serialize>(
    outcome: Result<T, ConnectError>,
) -> Response<Body> {
    match outcome {
        Ok(message) => super::json(StatusCode::OK, &message),
        Err(error) => {
            let status = StatusCode::from_u16(error.code.http_status());
            super::json(status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), &error)
        }
    }
}

/// The response to a streaming call: always status 200, failures are in the last frame.
pub(super) fn stream_response(outcome: Result<Body, ConnectError>) -> Response<Body> {
    let body =
        outcome.unwrap_or_else(|error| Body::Full(Bytes::from(envelope::encode_end(Some(error)))));
    let mut response = Response::new(body);
    let content_type = HeaderValue::from_static(STREAM_CONTENT_TYPE);
    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    response
}

/// The response to a call with a content type it cannot have.
fn unsupported_media_type(streaming: bool) -> Response<Body> {
    let mut response = super::empty(StatusCode::UNSUPPORTED_MEDIA_TYPE);
    let accepted = if streaming { STREAM_CONTENT_TYPE } else { UNARY_CONTENT_TYPE };
    response.headers_mut().insert("accept-post", HeaderValue::from_static(accepted));
    response
}
