//! The way to ports in guests, on the same address as the API: a request that names a sandbox is
//! handed to its guest over vsock, and the answer back, both as they come.
//!
//! Which sandbox and port are meant is in [`target`]. The agent's port is reached directly, any
//! other through the agent, which connects to it in the guest.

mod forward;
mod internal;
mod target;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use axum::{Json, http};
use coppice_agent_protocol::ENVD_PORT;
use http::StatusCode;
use serde_json::json;
use tokio::net::UnixStream;

use crate::api::{KEY_HEADER, after_body, closing};
use crate::fleet::{Fleet, Member};
use crate::registry::{self, now_ms};
use crate::store::Id;
use internal::is_internal;
use target::Target;

/// Time in milliseconds that a sandbox has at least when traffic resumes it, as with E2B.
const AWAKE_MS: u64 = 300_000;

/// Forwards requests for guests; all others go on to the API.
pub async fn guests_first(
    State(fleet): State<Arc<Fleet>>,
    request: Request,
    next: Next,
) -> Response {
    match target::of(&request) {
        Ok(None) => next.run(request).await,
        Ok(Some(target)) => to_guest(&fleet, &target, request).await,
        Err(reason) => {
            let body = json!({"code": 400, "message": reason});
            (StatusCode::BAD_REQUEST, Json(body)).into_response()
        }
    }
}

async fn to_guest(fleet: &Arc<Fleet>, target: &Target, mut request: Request<Body>) -> Response {
    withhold_key(fleet, request.headers_mut());
    match reach(fleet, target, request.uri().path()).await {
        Ok((member, stream)) => match forward::exchange(stream, request).await {
            Ok(response) => response,
            // Of the request's body an unknown part was read.
            Err(error) => closing(no_answer(target, &member, &error)),
        },
        Err(response) => after_body(request.into_body(), response).await,
    }
}

/// Takes out a tenant's key: a guest must not get to know it. Keys of the guest's own are passed on.
fn withhold_key(fleet: &Fleet, headers: &mut http::HeaderMap) {
    let is_ours = |key: &http::HeaderValue| {
        let found = key.to_str().ok().map(|key| fleet.registry().tenant_of(key));
        // What cannot be looked up may be one.
        found.is_some_and(|found| found.is_err() || found.is_ok_and(|tenant| tenant.is_some()))
    };
    if headers.get_all(KEY_HEADER).iter().any(is_ours) {
        headers.remove(KEY_HEADER);
    }
}

/// A stream to the port, or the answer that there is none.
async fn reach(
    fleet: &Arc<Fleet>,
    target: &Target,
    path: &str,
) -> Result<(Arc<Member>, UnixStream), Response> {
    if u32::from(target.port) == ENVD_PORT && is_internal(path) {
        let body = json!({"code": 404, "message": "there is no such route"});
        return Err((StatusCode::NOT_FOUND, Json(body)).into_response());
    }
    let gone = || gone(&target.sandbox);
    let member = fleet.member(target.sandbox.as_str()).ok_or_else(gone)?;
    awake(fleet, &member).await?;
    let guest = member.guest().ok_or_else(gone)?;
    match forward::open(guest.agent(), target.port).await {
        Ok(stream) => Ok((member, stream)),
        Err(error) => Err(no_answer(target, &member, &error)),
    }
}

fn no_answer(target: &Target, member: &Member, error: &forward::Error) -> Response {
    match error {
        forward::Error::Closed => closed(target),
        error if member.guest().is_some() => {
            tracing::info!(sandbox = %target.sandbox, port = target.port, %error, "no answer");
            broken(error)
        }
        _ => gone(&target.sandbox),
    }
}

/// Resumes a paused sandbox that is to go on when it is asked something.
async fn awake(fleet: &Arc<Fleet>, member: &Arc<Member>) -> Result<(), Response> {
    let row = member.shown().row;
    if row.state != registry::State::Paused || !row.auto_resume {
        return Ok(());
    }
    // It gets the time that it had when it was made or connected to last.
    let span = row.end_ms.saturating_sub(row.started_ms).max(row.end_ms.saturating_sub(now_ms()));
    let span = span.max(AWAKE_MS);
    match fleet.wake_or_extend(member, span).await {
        Ok(_) => Ok(()),
        Err(error) => {
            let failure = crate::api::Failure::from(error);
            Err(failure.into_response())
        }
    }
}

/// What clients take for the end of a sandbox.
fn gone(sandbox: &Id) -> Response {
    let message = format!("The sandbox {sandbox} was not found");
    let body = json!({"sandboxId": sandbox, "message": message, "code": 502});
    (StatusCode::BAD_GATEWAY, Json(body)).into_response()
}

/// What clients take for a port that nobody listens on.
fn closed(target: &Target) -> Response {
    let Target { sandbox, port } = target;
    let message = "The sandbox is running but port is not open";
    let body = json!({"sandboxId": sandbox, "message": message, "port": port, "code": 502});
    (StatusCode::BAD_GATEWAY, Json(body)).into_response()
}

fn broken(error: &forward::Error) -> Response {
    let message = format!("the sandbox did not answer: {}", crate::failure::chain(error));
    (StatusCode::BAD_GATEWAY, Json(json!({"code": 502, "message": message}))).into_response()
}
