//! The checkpoint tree of a sandbox, and the way back in it.

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;

use super::auth::Caller;
use super::types::{Node, Rollback, Tree, parse, rfc3339};
use super::{Api, ErrorBody, Failure};

/// Bring a sandbox back to a snapshot of its tree: memory, disk and processes
#[utoipa::path(post, path = "/sandboxes/{id}/rollback", params(("id" = String, Path)),
    request_body = Rollback, security(("ApiKey" = [])),
    responses((status = 204), (status = "default", body = ErrorBody)))]
pub(super) async fn roll_back(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path(id): Path<String>,
    body: Bytes,
) -> Result<StatusCode, Failure> {
    let Rollback { snapshot_id } = parse(&body)?;
    api.fleet.roll_back(&api.fleet.find(&tenant, &id)?, &snapshot_id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Show the tree that a sandbox grew in
#[utoipa::path(get, path = "/sandboxes/{id}/tree", params(("id" = String, Path)),
    security(("ApiKey" = [])),
    responses((status = 200, body = Tree), (status = "default", body = ErrorBody)))]
pub(super) async fn show(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path(id): Path<String>,
) -> Result<Json<Tree>, Failure> {
    let marked = api.fleet.tree(&api.fleet.find(&tenant, &id)?).await?;
    let snapshots = marked.checkpoints.into_iter().map(|checkpoint| Node {
        snapshot_id: checkpoint.id.into(),
        name: checkpoint.name,
        parent_id: checkpoint.parent.map(String::from),
        created_at: rfc3339(checkpoint.created_ms),
        memory_bytes: checkpoint.memory_bytes,
        disk_bytes: checkpoint.disk_bytes,
    });
    let stands_on = marked.stands_on.map(String::from);
    Ok(Json(Tree { snapshots: snapshots.collect(), stands_on }))
}
