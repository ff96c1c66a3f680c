//! What an administrator does with members, whoever they belong to: with any checkpoint of the
//! store, and without a template of the tenant's.

use std::sync::Arc;

use coppice_vmm_protocol::RollbackInfo;

use super::create::joined;
use super::{Error, Fleet, Member, blocking};
use crate::registry::{Row, State};
use crate::sandbox::{CheckpointRequest, Kept, Made};
use crate::store::Id;
use crate::trace;

impl Fleet {
    /// A sandbox, whoever it belongs to.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn any(&self, id: &str) -> Result<Arc<Member>, Error> {
        self.member(id).ok_or_else(|| Error::NotFound { id: id.into() })
    }

    /// Has a paused sandbox go on for so long, or as long as it was to run when it was paused.
    ///
    /// # Errors
    /// [`Error::State`] unless it is paused, or why it cannot go on.
    pub async fn go_on(
        self: &Arc<Self>,
        member: &Arc<Member>,
        timeout_ms: Option<u64>,
    ) -> Result<(), Error> {
        let row = member.row();
        let timeout_ms = timeout_ms.unwrap_or(row.end_ms.saturating_sub(row.started_ms));
        self.resume(member, timeout_ms).await
    }

    /// Makes a checkpoint of a running sandbox, which is nobody's snapshot.
    ///
    /// # Errors
    /// [`Error::State`] unless it runs, or why the checkpoint cannot be made.
    pub async fn checkpoint(
        self: &Arc<Self>,
        member: &Arc<Member>,
        request: CheckpointRequest,
    ) -> Result<Made, Error> {
        self.in_turn(member, "checkpoint", move |mut kept| async move {
            let made = kept.checkpoint(request).await?;
            let id = made.meta.id.clone();
            Ok((made, id))
        })
        .await
    }

    /// As [`Fleet::checkpoint`], with memory copied while the sandbox runs on if that is possible.
    ///
    /// # Errors
    /// As for [`Fleet::checkpoint`].
    pub async fn checkpoint_running(
        self: &Arc<Self>,
        member: &Arc<Member>,
        request: CheckpointRequest,
    ) -> Result<Made, Error> {
        self.in_turn(member, "checkpoint", move |mut kept| async move {
            let made = kept.checkpoint_running(request).await?;
            let id = made.meta.id.clone();
            Ok((made, id))
        })
        .await
    }

    /// Brings a running sandbox back to any checkpoint of its tree.
    ///
    /// # Errors
    /// [`Error::State`] unless it runs, or why it cannot go there.
    pub async fn roll_back_to(
        self: &Arc<Self>,
        member: &Arc<Member>,
        to: Id,
    ) -> Result<RollbackInfo, Error> {
        let _stage = self.meters.stage("rollback");
        self.in_turn(member, "rollback", move |mut kept| async move {
            Ok((kept.roll_back(&to).await?, to))
        })
        .await
    }

    /// Does something with a running sandbox in its turn, and notes that with the checkpoint that
    /// it was about.
    async fn in_turn<T, F>(
        self: &Arc<Self>,
        member: &Arc<Member>,
        kind: &'static str,
        job: impl FnOnce(Kept) -> F + Send + 'static,
    ) -> Result<T, Error>
    where
        T: Send + 'static,
        F: Future<Output = Result<(T, Id), crate::sandbox::Error>>,
    {
        let (fleet, member) = (Arc::clone(self), Arc::clone(member));
        joined(tokio::spawn(trace::carried(async move {
            let _turn = member.turn.lock().await;
            fleet.expect(&member, State::Running)?;
            let (store, id) = (fleet.store.clone(), member.id().clone());
            let done =
                blocking(move || async move { job(Kept::open(&store, &id).await?).await }).await;
            let (value, checkpoint) = done?;
            fleet.noted(&member.row(), kind, &checkpoint);
            Ok(value)
        })))
        .await
    }

    /// Notes something that was done already: that it cannot be is no failure of what was done.
    pub(super) fn noted(&self, row: &Row, kind: &str, checkpoint: &Id) {
        if let Err(error) = self.registry.note(row, kind, checkpoint.as_str()) {
            tracing::warn!(sandbox = %row.id, %error, kind, "an event cannot be noted");
        }
    }
}
