//! The envd service: what an SDK talks to.

mod auth;
mod compose;
mod connect;
mod files;
mod filesystem;
mod headers;
mod multipart;
mod procedures;
mod query;
mod upload;

use std::rc::Rc;

use bytes::Bytes;
use coppice_agent_protocol::{filesystem as filesystem_protocol, process as process_protocol};
use http::{Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;

use crate::agent::Agent;
use crate::body::Body;

/// Answers one request.
pub(crate) async fn route(agent: Rc<Agent>, request: Request<Incoming>) -> Response<Body> {
    if let Err(denied) = auth::check(&agent.settings.borrow(), &request) {
        return auth::response(&request, &denied);
    }
    let path = request.uri().path();
    if let Some(procedure) = path.strip_prefix(process_protocol::SERVICE) {
        let procedure = procedure.to_owned();
        return procedures::call(&agent, &procedure, request).await;
    }
    if let Some(procedure) = path.strip_prefix(filesystem_protocol::SERVICE) {
        let procedure = procedure.to_owned();
        return filesystem::call(&agent, &procedure, request).await;
    }
    match (path, request.method()) {
        ("/health", &Method::GET | &Method::HEAD) => empty(StatusCode::NO_CONTENT),
        ("/files", &Method::GET) => respond(files::download(&agent, &request).await),
        ("/files", &Method::POST) => respond(upload::upload(&agent, request).await),
        ("/files/compose", &Method::POST) => respond(compose::compose(&agent, request).await),
        ("/envs", &Method::GET) => json(StatusCode::OK, agent.settings.borrow().envs()),
        ("/metrics", &Method::GET) => respond(metrics(&agent).await),
        ("/health" | "/files" | "/files/compose" | "/envs" | "/metrics", _) => {
            error(StatusCode::METHOD_NOT_ALLOWED, "this path does not take this method")
        }
        (path, _) => error(StatusCode::NOT_FOUND, &format!("no such path: {path}")),
    }
}

async fn metrics(agent: &Agent) -> Result<Response<Body>, HttpError> {
    let metrics = agent.metrics().await.map_err(|error| {
        HttpError::new(StatusCode::INTERNAL_SERVER_ERROR, format!("measuring: {error}"))
    })?;
    Ok(json(StatusCode::OK, &metrics))
}

/// Why a plain HTTP request failed: its status and a message for people.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct HttpError {
    status: StatusCode,
    message: String,
}

impl HttpError {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }
}

fn respond(outcome: Result<Response<Body>, HttpError>) -> Response<Body> {
    outcome.unwrap_or_else(|failure| error(failure.status, &failure.message))
}

fn error(status: StatusCode, message: &str) -> Response<Body> {
    json(status, &serde_json::json!({ "code": status.as_u16(), "message": message }))
}

/// A response with a JSON body.
pub(crate) fn json<T: serde::Serialize>(status: StatusCode, value: &T) -> Response<Body> {
    let text = serde_json::to_vec(value).unwrap_or_default();
    let mut response = Response::new(Body::Full(Bytes::from(text)));
    *response.status_mut() = status;
    let content_type = header::HeaderValue::from_static(coppice_agent_protocol::UNARY_CONTENT_TYPE);
    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    response
}

/// A response without a body.
pub(crate) fn empty(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(Body::EMPTY);
    *response.status_mut() = status;
    response
}
