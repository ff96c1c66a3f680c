//! The tree of checkpoints that a sandbox grew in, as its tenant sees it.

use std::sync::Arc;

use super::create::{joined, run};
use super::{Error, Fleet, Member, blocking};
use crate::diff::{self, Difference};
use crate::registry::{State, TemplateKind};
use crate::sandbox::Kept;
use crate::store::Id;

/// A snapshot in a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// Its ID.
    pub id: Id,
    /// Its name.
    pub name: Option<String>,
    /// The snapshot that it stands on, if the tenant has one below it.
    pub parent: Option<Id>,
    /// When it was made, in milliseconds since 1970.
    pub created_ms: u64,
    /// Bytes that its memory takes on disk.
    pub memory_bytes: u64,
    /// Bytes that the disk layers take that were sealed for it.
    pub disk_bytes: u64,
}

/// A tree and where a sandbox stands in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Marked {
    /// The tenant's snapshots in it, by time.
    pub checkpoints: Vec<Checkpoint>,
    /// The one that the sandbox stands on.
    pub stands_on: Option<Id>,
}

impl Fleet {
    /// What changed from one snapshot or template to another, or to a sandbox as it is now.
    ///
    /// # Errors
    /// [`Error::NoTemplate`], [`Error::State`], or [`Error::Diff`].
    pub async fn diff(
        self: &Arc<Self>,
        member: &Arc<Member>,
        from: &str,
        to: Option<&str>,
    ) -> Result<Difference, Error> {
        let named = |reference: &str| -> Result<Id, Error> {
            let found = self.registry.template(&member.tenant(), reference)?;
            let none = || Error::NoTemplate { reference: reference.into() };
            found.map(|template| template.checkpoint).ok_or_else(none)
        };
        let (from, to) = (named(from)?, to.map(named).transpose()?);
        let (fleet, member) = (Arc::clone(self), Arc::clone(member));
        // To its end, whoever waits for it: a checkpoint for now only is removed again.
        joined(tokio::spawn(async move {
            let Some(to) = to else {
                let _turn = member.turn.lock().await;
                let row = member.row();
                return match (row.state, row.pause) {
                    (State::Running, _) => {
                        fleet.write_back(&member).await?;
                        let now = fleet.checkpoint_of(&member).await?;
                        let difference = fleet.compare(from, now.clone()).await;
                        fleet.hide(&now).await;
                        difference
                    }
                    (State::Paused, Some(pause)) => fleet.compare(from, pause).await,
                    (state, _) => Err(Error::State { id: row.id.to_string(), state }),
                };
            };
            fleet.compare(from, to).await
        }))
        .await
    }

    /// Has a guest write to its disk what it only has in memory yet: it would not be seen.
    async fn write_back(&self, member: &Member) -> Result<(), Error> {
        let (store, id) = (self.store.clone(), member.id().clone());
        blocking(move || async move {
            let kept = Kept::open(&store, &id).await?;
            run(kept.agent(), "sync").await
        })
        .await
    }

    async fn compare(&self, from: Id, to: Id) -> Result<Difference, Error> {
        let store = self.store.clone();
        blocking(move || async move {
            let (from, to) = (store.checkpoint(&from)?, store.checkpoint(&to)?);
            Ok(diff::compare(&store, &from, &to)?)
        })
        .await
    }

    /// The tree that a sandbox grew in.
    ///
    /// # Errors
    /// The store's or the registry's.
    pub async fn tree(&self, member: &Arc<Member>) -> Result<Marked, Error> {
        let own: Vec<_> = self
            .registry
            .templates(&member.tenant())?
            .into_iter()
            .filter(|template| template.kind == TemplateKind::Snapshot)
            .collect();
        let (store, id) = (self.store.clone(), member.id().clone());
        let (standing, listing) = blocking(move || async move {
            let standing = store.look_at(&id)?.record().standing.clone();
            store.checkpoints().map(|listing| (standing, listing))
        })
        .await?;
        let name_of = |id: &Id| {
            let found = own.iter().find(|template| template.checkpoint == *id);
            found.map(|template| template.name.clone())
        };
        let nearest = |chain: &[Id]| chain.iter().rev().find(|id| name_of(id).is_some()).cloned();
        let root = standing.memory.first();
        let checkpoints = listing.checkpoints.into_iter().filter_map(|checkpoint| {
            let meta = checkpoint.meta;
            (meta.memory_chain().first() == root).then_some(())?;
            Some(Checkpoint {
                name: name_of(&meta.id)?,
                parent: nearest(&meta.standing.memory),
                created_ms: meta.created_ms,
                memory_bytes: checkpoint.memory_bytes,
                disk_bytes: checkpoint.disk_bytes,
                id: meta.id,
            })
        });
        Ok(Marked { checkpoints: checkpoints.collect(), stands_on: nearest(&standing.memory) })
    }
}
