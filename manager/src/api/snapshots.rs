//! Snapshots of sandboxes, and sandboxes made of running ones.

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;

use super::auth::{Caller, may_create};
use super::types::{Fork, Forked, NewSnapshot, Sandbox, Snapshot, parse, timeout_ms, with_memory};
use super::{Api, ErrorBody, Failure};
use crate::registry::{Template, TemplateKind};

/// The most forks of one request.
const MAX_FORKS: usize = 100;
/// Seconds that a fork has when nobody says.
const FORK_TIMEOUT: u64 = 15;

fn told(template: Template) -> Snapshot {
    Snapshot { snapshot_id: template.id, names: template.name.into_iter().collect() }
}

/// Keep a sandbox's state; the snapshot's ID can be used as a template's
#[utoipa::path(post, path = "/sandboxes/{id}/snapshots", params(("id" = String, Path)),
    request_body = NewSnapshot, security(("ApiKey" = [])),
    responses((status = 201, body = Snapshot), (status = "default", body = ErrorBody)))]
pub(super) async fn take(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path(id): Path<String>,
    body: Bytes,
) -> Result<(StatusCode, Json<Snapshot>), Failure> {
    let NewSnapshot { name, memory } = parse(&body)?;
    with_memory(memory)?;
    let template = api.fleet.snapshot(&api.fleet.find(&tenant, &id)?, name).await?;
    Ok((StatusCode::CREATED, Json(told(template))))
}

/// Which snapshots are listed.
#[derive(Debug, Clone, Deserialize, IntoParams)]
pub(super) struct Of {
    /// Those of this sandbox only.
    #[serde(rename = "sandboxID")]
    sandbox_id: Option<String>,
}

/// List snapshots, oldest first
#[utoipa::path(get, path = "/snapshots", params(Of), security(("ApiKey" = [])),
    responses((status = 200, body = Vec<Snapshot>), (status = "default", body = ErrorBody)))]
pub(super) async fn list(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Query(of): Query<Of>,
) -> Result<Json<Vec<Snapshot>>, Failure> {
    let mut found = api.fleet.registry().templates(&tenant).map_err(crate::fleet::Error::from)?;
    found.retain(|template| {
        let sandbox = template.sandbox.as_ref().map(crate::store::Id::as_str);
        template.kind == TemplateKind::Snapshot
            && of.sandbox_id.as_ref().is_none_or(|wanted| sandbox == Some(wanted))
    });
    found.sort_by(|a, b| (a.created_ms, &a.id).cmp(&(b.created_ms, &b.id)));
    Ok(Json(found.into_iter().map(told).collect()))
}

/// Remove a template or snapshot; what was made from it stays
#[utoipa::path(delete, path = "/templates/{id}", params(("id" = String, Path)),
    security(("ApiKey" = [])),
    responses((status = 204), (status = "default", body = ErrorBody)))]
pub(super) async fn remove(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path(id): Path<String>,
) -> Result<StatusCode, Failure> {
    api.fleet.remove_template(&tenant, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Make sandboxes that go on from another one as it is now
#[utoipa::path(post, path = "/sandboxes/{id}/fork", params(("id" = String, Path)),
    request_body = Fork, security(("ApiKey" = [])),
    responses((status = 201, body = Vec<Forked>), (status = "default", body = ErrorBody)))]
pub(super) async fn fork(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path(id): Path<String>,
    body: Bytes,
) -> Result<(StatusCode, Json<Vec<Forked>>), Failure> {
    let Fork { timeout, count } = parse(&body)?;
    let (count, timeout) = (count.unwrap_or(1), timeout_ms(timeout.unwrap_or(FORK_TIMEOUT))?);
    if !(1..=MAX_FORKS).contains(&count) {
        return Err(Failure::bad(format!("count is 1 to {MAX_FORKS}")));
    }
    let member = api.fleet.find(&tenant, &id)?;
    may_create(&api, &tenant, count)?;
    let forks = api.fleet.fork(&member, count, timeout).await?;
    let forks = forks.into_iter().map(|fork| match fork {
        Ok(member) => Forked::Sandbox(Sandbox::of(member.shown(), &api)),
        Err(error) => Forked::Error(Failure::from(error).body()),
    });
    Ok((StatusCode::CREATED, Json(forks.collect())))
}
