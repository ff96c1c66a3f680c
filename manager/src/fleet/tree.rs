//! The tree of checkpoints that a sandbox grew in, as its tenant sees it.

use std::sync::Arc;

use super::{Error, Fleet, Member, blocking};
use crate::registry::TemplateKind;
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
