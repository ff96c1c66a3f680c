//! The checkpoint tree of a sandbox, and the way back in it.

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;

use super::auth::Caller;
use super::types::{ChangedFile, Difference, Node, Rollback, Tree, parse, rfc3339};
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

/// What is compared.
#[derive(Debug, Clone, Deserialize, IntoParams)]
pub(super) struct Between {
    /// The snapshot or template to begin with.
    from: String,
    /// The snapshot to compare it with; without it, the sandbox as it is now.
    to: Option<String>,
}

/// Show which files changed, and how much memory was written, from one snapshot to another or to
/// now. What the guest had not written to its disk when a snapshot was made counts as written
/// later. Guests' file names that are not UTF-8 are shown with replacement characters
#[utoipa::path(get, path = "/sandboxes/{id}/diff", params(("id" = String, Path), Between),
    security(("ApiKey" = [])),
    responses((status = 200, body = Difference), (status = "default", body = ErrorBody)))]
pub(super) async fn diff(
    Caller(tenant): Caller,
    State(api): State<Api>,
    Path(id): Path<String>,
    Query(Between { from, to }): Query<Between>,
) -> Result<Json<Difference>, Failure> {
    let member = api.fleet.find(&tenant, &id)?;
    let found = api.fleet.diff(&member, &from, to.as_deref()).await?;
    let files = found.files.into_iter().map(|file| ChangedFile {
        disk: file.disk,
        change: file.change.word(),
        path: String::from_utf8_lossy(&file.path).into_owned(),
    });
    Ok(Json(Difference { files: files.collect(), memory_bytes: found.memory_bytes }))
}
