//! Errors as clients get them: a status, and a body with `code` and `message`.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use crate::failure::{Class, chain};
use crate::fleet;

/// How many seconds a client is to wait before it asks again for what cannot be done now, if
/// nothing better is known.
const RETRY_AFTER: u64 = 5;

/// The most bytes of an error's text.
const MAX_TEXT: usize = 4096;

/// Body of an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct ErrorBody {
    /// The status of the answer.
    pub code: u16,
    /// What went wrong, for people.
    pub message: String,
}

/// An error answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    status: StatusCode,
    message: String,
    /// Seconds until it may be asked for again.
    retry_after: u64,
}

impl Failure {
    /// An error with this status and text.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), retry_after: RETRY_AFTER }
    }

    /// A limit on how often something may be asked for; it may be again after `wait`.
    pub fn too_fast(message: &str, wait: Duration) -> Self {
        let retry_after = wait.as_secs().saturating_add(1);
        let message = format!("{message}: wait {retry_after} s");
        Self { retry_after, ..Self::new(StatusCode::TOO_MANY_REQUESTS, message) }
    }

    /// The request is not understood or not supported.
    pub fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// What is asked for is not there.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, message)
    }

    /// Its body.
    pub fn body(&self) -> ErrorBody {
        ErrorBody { code: self.status.as_u16(), message: self.message.clone() }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if [StatusCode::SERVICE_UNAVAILABLE, StatusCode::TOO_MANY_REQUESTS].contains(&self.status) {
            response.headers_mut().insert(header::RETRY_AFTER, self.retry_after.into());
        }
        response
    }
}

impl From<fleet::Error> for Failure {
    fn from(error: fleet::Error) -> Self {
        use fleet::Error;
        let status = match &error {
            Error::NotFound { .. } | Error::NoTemplate { .. } | Error::NoBuild { .. } => {
                StatusCode::NOT_FOUND
            }
            Error::State { .. }
            | Error::BuildStarted { .. }
            | Error::BuildBusy { .. }
            | Error::LastTag { .. } => StatusCode::CONFLICT,
            Error::NoUpload => StatusCode::UNAUTHORIZED,
            Error::UploadTooLong { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Error::KeyReused => StatusCode::UNPROCESSABLE_ENTITY,
            Error::Name { .. } | Error::BuiltIn { .. } | Error::Unbuildable(_) => {
                StatusCode::BAD_REQUEST
            }
            Error::Quota { .. } | Error::Queue { .. } | Error::Uploads { .. } => {
                StatusCode::TOO_MANY_REQUESTS
            }
            Error::Memory | Error::Busy => StatusCode::SERVICE_UNAVAILABLE,
            Error::Sandbox(error) => status_of(error.failure().class),
            Error::Store(error) => status_of(error.failure().class),
            Error::Diff(error) => status_of(error.failure().class),
            Error::Registry(error) if error.is_full() => StatusCode::INSUFFICIENT_STORAGE,
            Error::Home(_)
            | Error::Useless(_)
            | Error::Meters(_)
            | Error::Template(_)
            | Error::Upload(_)
            | Error::Step(_)
            | Error::BringUp(_)
            | Error::BuildTime(_)
            | Error::Agent(_)
            | Error::Registry(_)
            | Error::Random(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let message = chain(&error);
        if status.is_server_error() {
            tracing::error!(error = message, "a request failed");
        }
        Self::new(status, message)
    }
}

/// Gives an error that was made elsewhere, such as for a body that is too long, the form of ours.
pub(super) async fn in_form(response: Response) -> Response {
    let status = response.status();
    let is_json = response.headers().get(header::CONTENT_TYPE)
        == Some(&HeaderValue::from_static("application/json"));
    if is_json || !(status.is_client_error() || status.is_server_error()) {
        return response;
    }
    let text = axum::body::to_bytes(response.into_body(), MAX_TEXT).await.unwrap_or_default();
    let text = String::from_utf8_lossy(&text).trim().to_owned();
    let reason = status.canonical_reason().unwrap_or("the request failed");
    Failure::new(status, if text.is_empty() { reason.to_owned() } else { text }).into_response()
}

fn status_of(class: Class) -> StatusCode {
    match class {
        Class::NotFound => StatusCode::NOT_FOUND,
        Class::Usage => StatusCode::BAD_REQUEST,
        Class::Conflict | Class::CheckpointUnfit => StatusCode::CONFLICT,
        Class::DiskFull => StatusCode::INSUFFICIENT_STORAGE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
