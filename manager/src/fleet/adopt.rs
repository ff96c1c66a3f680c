//! The start of the daemon: sandboxes of before are found again, and what was under way when it
//! ended is finished or undone.

use std::sync::Arc;

use coppice_vmm_protocol::VmState;

use super::lifecycle::is_labelled;
use super::quota::Usage;
use super::{Error, Fleet, Member, blocking};
use crate::registry::{Row, State};
use crate::sandbox::{self, Kept};
use crate::store::{self, Id, SandboxRecord, Store};

/// What became of the sandboxes of before.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Adopted {
    /// Those whose machines run.
    pub running: usize,
    /// Those that are paused.
    pub paused: usize,
    /// Those that nobody was told of, or that were to be removed.
    pub removed: usize,
    /// Those that were promised and whose machines are gone.
    pub lost: Vec<Id>,
}

/// What is found in the store of a sandbox.
enum Found {
    /// Its machine runs.
    Alive(Box<Kept>),
    /// It is suspended.
    Suspended(Box<SandboxRecord>),
    /// Nothing that could go on.
    Gone,
}

impl Fleet {
    /// Takes over what an earlier daemon left; to be called once, before anything else.
    ///
    /// # Errors
    /// The registry's.
    pub async fn adopt(self: &Arc<Self>) -> Result<Adopted, Error> {
        self.remove_shells().await?;
        self.uploads.clear_parts();
        self.registry.interrupt_builds("the daemon ended while the template was built")?;
        let mut adopted = Adopted::default();
        for row in self.registry.sandboxes()? {
            let (id, member) = (row.id.clone(), Arc::new(Member::new(row, Usage::default())));
            self.members().insert(id.clone(), Arc::clone(&member));
            match self.settle(&member).await {
                Ok(Some(State::Running)) => adopted.running += 1,
                Ok(Some(_)) => adopted.paused += 1,
                Ok(None) => adopted.removed += 1,
                Err(Lost(reason)) => {
                    tracing::error!(sandbox = %id, reason, "a sandbox of before is lost");
                    adopted.lost.push(id);
                    if let Err(error) = self.remove(&member, &reason).await {
                        tracing::error!(sandbox = %member.id(), %error, "its rest stays");
                    }
                }
            }
        }
        self.hide_unpromised().await?;
        Ok(adopted)
    }

    /// Removes checkpoints that a daemon made and had not written down yet when it ended.
    async fn hide_unpromised(&self) -> Result<(), Error> {
        let store = self.store.clone();
        let listing = blocking(move || async move { store.checkpoints() }).await?;
        for checkpoint in listing.checkpoints {
            if is_labelled(&checkpoint.meta.labels) {
                self.hide(&checkpoint.meta.id).await;
            }
        }
        Ok(())
    }

    /// Removes what is left of machines that were prepared and not used.
    async fn remove_shells(&self) -> Result<(), Error> {
        for id in self.registry.shells()? {
            let (store, shell) = (self.store.clone(), id.clone());
            match blocking(move || async move { Kept::remove(&store, &shell).await }).await {
                Ok(()) | Err(sandbox::Error::Store(store::Error::NotFound { .. })) => {
                    self.registry.remove_shell(&id)?;
                }
                Err(error) => tracing::warn!(sandbox = %id, %error, "a prepared machine stays"),
            }
        }
        Ok(())
    }

    /// Finishes or undoes what was under way; the state it is in then, or none if it is removed.
    async fn settle(self: &Arc<Self>, member: &Arc<Member>) -> Result<Option<State>, Lost> {
        let row = member.row();
        if matches!(row.state, State::Creating | State::Killing) {
            self.remove(member, "the daemon ended meanwhile").await?;
            return Ok(None);
        }
        let (store, id) = (self.store.clone(), member.id().clone());
        match blocking(move || async move { found(&store, &id).await }).await? {
            Found::Alive(kept) => {
                self.connect(member, *kept)?;
                let pause = row.pause.clone();
                self.promise(member, Row { state: State::Running, pause: None, ..row })?;
                self.watch(member);
                if let Some(pause) = pause {
                    self.hide(&pause).await;
                }
                Ok(Some(State::Running))
            }
            Found::Suspended(record) => {
                member.set_machine(&record);
                let pause = record.standing.parent;
                self.promise(member, Row { state: State::Paused, pause, ..row })?;
                Ok(Some(State::Paused))
            }
            Found::Gone => Err(Lost("its machine has ended".into())),
        }
    }
}

/// Why a sandbox is lost.
#[derive(Debug)]
struct Lost(String);

impl<E: std::error::Error> From<E> for Lost {
    fn from(error: E) -> Self {
        Self(crate::failure::chain(&error))
    }
}

/// Looks what there is of a sandbox. One that is suspended has no machine after this, and one
/// that was stopped to be suspended goes on.
async fn found(store: &Store, id: &Id) -> Result<Found, sandbox::Error> {
    if store.look_at(id)?.record().suspended {
        Kept::finish_suspension(store, id).await?;
        return Ok(Found::Suspended(Box::new(store.look_at(id)?.record().clone())));
    }
    match Kept::open(store, id).await {
        Ok(kept) => {
            if kept.status().await?.state == VmState::Paused {
                kept.resume().await?;
            }
            Ok(Found::Alive(Box::new(kept)))
        }
        Err(sandbox::Error::Gone { .. }) => Ok(Found::Gone),
        Err(error) => Err(error),
    }
}
