//! The administrator's interface, on the daemon's own socket: any tenant's sandboxes, without an
//! API key. The command line uses it, by way of the socket or, where no daemon runs, in its own
//! process.
//!
//! | Request | Body | Answer |
//! |---|---|---|
//! | `DELETE /sandboxes/ID` | | 204 |
//! | `POST /sandboxes/ID/pause` | | 204 |
//! | `POST /sandboxes/ID/resume` | [`Resume`] | 204 |
//! | `POST /sandboxes/ID/checkpoint` | [`Checkpoint`] | 201 [`Checkpointed`] |
//! | `POST /sandboxes/ID/rollback` | [`Rollback`] | 200 [`RolledBack`] |
//! | `POST /events` | [`Wanted`] | 200, a line of JSON for each event; never ends |

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, post};
use axum::{Json, Router};
use coppice_image::PAGE;
use coppice_vmm_protocol::RollbackInfo;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::events;
use crate::failure::{Class, Failure, chain};
use crate::fleet::{self, Fleet};
use crate::registry::Wanted;
use crate::sandbox::{CheckpointRequest, Made};
use crate::store::{Id, Name};

/// The most bytes of a request's body.
const MAX_BODY: usize = 64 * 1024;

/// How a sandbox is resumed.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Resume {
    /// For how long, in milliseconds; as long as before if it is absent.
    pub timeout_ms: Option<u64>,
}

/// A checkpoint that is asked for.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Its name.
    pub name: Option<Name>,
    /// Its labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Whether memory is copied while the sandbox runs on: yes, no, or as the host can.
    pub background: Option<bool>,
}

/// A checkpoint that was made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpointed {
    /// Its ID.
    pub id: Id,
    /// Its name.
    pub name: Option<Name>,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// The checkpoint before it.
    pub parent: Option<Id>,
    /// When it was made, in milliseconds since 1970.
    pub created_ms: u64,
    /// The sandbox it was made of.
    pub sandbox: Id,
    /// How long the sandbox stood still, in microseconds.
    pub pause_us: u64,
    /// How long it took in all, in microseconds.
    pub total_us: u64,
    /// Bytes of memory that were written.
    pub memory_bytes: u64,
}

impl From<Made> for Checkpointed {
    fn from(Made { meta, info }: Made) -> Self {
        Self {
            id: meta.id,
            name: meta.name,
            labels: meta.labels,
            parent: meta.standing.parent,
            created_ms: meta.created_ms,
            sandbox: meta.sandbox,
            pause_us: info.pause_us,
            total_us: info.total_us,
            memory_bytes: info.pages.saturating_mul(PAGE),
        }
    }
}

/// Where a sandbox is to go back to.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Rollback {
    /// A checkpoint of its tree.
    pub checkpoint: Id,
}

/// A sandbox that went back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolledBack {
    /// The sandbox.
    pub id: Id,
    /// The checkpoint that it stands on.
    pub checkpoint: Id,
    /// How long it stood still, in microseconds.
    pub pause_us: u64,
    /// Bytes of memory that were brought back.
    pub memory_bytes: u64,
}

impl RolledBack {
    /// A sandbox that is back at a checkpoint, and what that cost.
    pub fn new(id: Id, checkpoint: Id, info: &RollbackInfo) -> Self {
        let memory_bytes = info.pages.saturating_mul(PAGE);
        Self { id, checkpoint, pause_us: info.pause_us, memory_bytes }
    }
}

/// Body of an error: what the command line tells as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// Name of the failure's class.
    pub class: String,
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub remedy: String,
}

/// An error of this interface.
struct Refused(StatusCode, Refusal);

impl From<fleet::Error> for Refused {
    fn from(error: fleet::Error) -> Self {
        let (status, failure) = match &error {
            fleet::Error::Sandbox(error) => (StatusCode::CONFLICT, error.failure()),
            fleet::Error::NotFound { .. } => {
                (StatusCode::NOT_FOUND, Failure::new(Class::NotFound, &error, "see `coppice ls`"))
            }
            fleet::Error::State { .. } => {
                (StatusCode::CONFLICT, Failure::new(Class::Conflict, &error, "see `coppice ls`"))
            }
            _ => {
                let failure = Failure::new(Class::Host, chain(&error), "see the daemon's log");
                (StatusCode::INTERNAL_SERVER_ERROR, failure)
            }
        };
        let Failure { class, message, remedy } = failure;
        Self(status, Refusal { class: class.name().into(), message, remedy })
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        (self.0, Json(self.1)).into_response()
    }
}

/// What all handlers have.
#[derive(Debug, Clone)]
struct Admin {
    fleet: Arc<Fleet>,
    /// Whether the daemon is ending.
    ending: watch::Receiver<bool>,
}

/// The interface as a router; what never ends does when `ending` becomes true.
pub fn router(fleet: Arc<Fleet>, ending: watch::Receiver<bool>) -> Router {
    Router::new()
        .route("/sandboxes/{id}", delete(kill))
        .route("/sandboxes/{id}/pause", post(pause))
        .route("/sandboxes/{id}/resume", post(resume))
        .route("/sandboxes/{id}/checkpoint", post(checkpoint))
        .route("/sandboxes/{id}/rollback", post(roll_back))
        .route("/events", post(follow))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(Admin { fleet, ending })
}

async fn kill(
    State(Admin { fleet, .. }): State<Admin>,
    Path(id): Path<String>,
) -> Result<StatusCode, Refused> {
    fleet.kill(&fleet.any(&id)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn pause(
    State(Admin { fleet, .. }): State<Admin>,
    Path(id): Path<String>,
) -> Result<StatusCode, Refused> {
    fleet.pause(&fleet.any(&id)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn resume(
    State(Admin { fleet, .. }): State<Admin>,
    Path(id): Path<String>,
    Json(Resume { timeout_ms }): Json<Resume>,
) -> Result<StatusCode, Refused> {
    fleet.go_on(&fleet.any(&id)?, timeout_ms).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn checkpoint(
    State(Admin { fleet, .. }): State<Admin>,
    Path(id): Path<String>,
    Json(Checkpoint { name, labels, background }): Json<Checkpoint>,
) -> Result<(StatusCode, Json<Checkpointed>), Refused> {
    let member = fleet.any(&id)?;
    let request = |background| CheckpointRequest { name, labels, background };
    let made = match background {
        Some(background) => fleet.checkpoint(&member, request(background)).await,
        None => fleet.checkpoint_running(&member, request(true)).await,
    };
    Ok((StatusCode::CREATED, Json(made?.into())))
}

async fn roll_back(
    State(Admin { fleet, .. }): State<Admin>,
    Path(id): Path<String>,
    Json(Rollback { checkpoint }): Json<Rollback>,
) -> Result<Json<RolledBack>, Refused> {
    let member = fleet.any(&id)?;
    let info = fleet.roll_back_to(&member, checkpoint.clone()).await?;
    Ok(Json(RolledBack::new(member.id().clone(), checkpoint, &info)))
}

async fn follow(State(admin): State<Admin>, body: Bytes) -> Response {
    let wanted = match serde_json::from_slice::<Wanted>(&body) {
        Ok(wanted) => wanted,
        Err(error) => return (StatusCode::BAD_REQUEST, error.to_string()).into_response(),
    };
    events::follow(admin.fleet, admin.ending, wanted).into_response()
}
