//! What outlives a command: checkpoints, their disk layers, and sandboxes, as plain files.
//!
//! ```text
//! COPPICE_HOME/checkpoints/ID.ckpt    a checkpoint: its record and one layer of memory
//!                          ID.layer   one that was removed, while others stand on its memory;
//!                                     also what several of them hold together
//!                          .ID.tmp    one that is being written; its writer holds a lock on it
//!                          ID.ws      which memory a clone of it uses first; a hint
//!             layers/ID.disk          a layer of a disk: sealed, or the top of a live sandbox
//!                    ID.base          an image that was made for a template
//!                    .ID.tmp          one of these that is being made, as above
//!             sandboxes/ID/           a live sandbox: sandbox.json, lock, sockets
//!             lock                    taken shared to look, exclusive to change
//! ```
//!
//! There is no index beside the files: the records in them name what they stand on, so references
//! are counted from what is there, and nothing can disagree with it. Every change is one rename or
//! the removal of something that nothing names, in an order in which a crash at any point leaves a
//! whole store, at most with files that [`Store::collect`] removes.

mod checkpoints;
mod collect;
mod error;
mod files;
mod flatten;
mod fsck;
mod id;
mod images;
mod merge;
mod record;
mod sandboxes;
mod tree;
mod working_set;

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

pub use checkpoints::{Checkpoint, Listing, NewCheckpoint};
pub use collect::Collected;
pub use error::Error;
pub use fsck::{Finding, Report};
pub use id::{Id, Name};
pub use images::NewImage;
pub use merge::MergeError;
pub use record::{
    BaseImage, DiskChain, GuestSettings, Machine, Meta, Next, SandboxRecord, Standing,
};
pub use sandboxes::{NewSandbox, Sandbox, SandboxEntry, View};
pub use tree::{Node, Tree};
pub use working_set::NewWorkingSet;

use crate::home::Home;
use files::{Held, at};

/// The store in one `COPPICE_HOME`.
#[derive(Debug, Clone)]
pub struct Store {
    root: PathBuf,
}

/// What a name on the command line means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// A checkpoint.
    Checkpoint(Id),
    /// A sandbox.
    Sandbox(Id),
}

impl Store {
    /// Opens the store, and makes its directories when they are not there yet.
    ///
    /// # Errors
    /// [`Error::Io`] when the directories cannot be made.
    pub fn open(home: &Home) -> Result<Self, Error> {
        let store = Self { root: home.path().to_owned() };
        for directory in [store.checkpoints_dir(), store.layers_dir(), store.sandboxes_dir()] {
            let made = DirBuilder::new().recursive(true).mode(0o700).create(&directory);
            made.map_err(at(&directory))?;
        }
        Ok(store)
    }

    /// What `reference` means: an ID, a name, or the beginning of one ID.
    ///
    /// # Errors
    /// [`Error::NotFound`], or [`Error::Ambiguous`] when several IDs begin like this.
    pub fn find(&self, reference: &str) -> Result<Found, Error> {
        let _lock = self.shared()?;
        let checkpoints = self.read_checkpoints()?.checkpoints;
        let sandboxes = self.read_sandboxes()?;
        let named = checkpoints
            .iter()
            .map(|c| (Found::Checkpoint(c.meta.id.clone()), &c.meta.id, &c.meta.name))
            .chain(
                sandboxes
                    .iter()
                    .filter_map(|entry| entry.record.as_ref().ok())
                    .map(|record| (Found::Sandbox(record.id.clone()), &record.id, &record.name)),
            );
        let mut beginning = Vec::new();
        let mut by_name = None;
        for (found, id, name) in named {
            if id.as_str() == reference {
                return Ok(found);
            }
            if name.as_ref().is_some_and(|name| name.as_str() == reference) {
                by_name = Some(found);
            } else if !reference.is_empty() && id.as_str().starts_with(reference) {
                beginning.push(found);
            }
        }
        match (by_name, beginning.as_slice()) {
            (Some(found), _) => Ok(found),
            (None, [found]) => Ok(found.clone()),
            (None, []) => Err(Error::NotFound { reference: reference.into() }),
            (None, several) => {
                Err(Error::Ambiguous { reference: reference.into(), count: several.len() })
            }
        }
    }

    /// Where a layer of a disk is.
    pub fn disk_path(&self, id: &Id) -> PathBuf {
        self.layers_dir().join(format!("{id}.disk"))
    }

    /// Where the memory of a checkpoint is, one that was removed included.
    pub fn memory_path(&self, id: &Id) -> PathBuf {
        let visible = self.checkpoint_path(id);
        if visible.exists() { visible } else { self.hidden_path(id) }
    }

    fn checkpoint_path(&self, id: &Id) -> PathBuf {
        self.checkpoints_dir().join(format!("{id}.ckpt"))
    }

    fn hidden_path(&self, id: &Id) -> PathBuf {
        self.checkpoints_dir().join(format!("{id}.layer"))
    }

    fn temp_path(&self, id: &Id) -> PathBuf {
        self.checkpoints_dir().join(format!(".{id}.tmp"))
    }

    fn checkpoints_dir(&self) -> PathBuf {
        self.root.join("checkpoints")
    }

    fn layers_dir(&self) -> PathBuf {
        self.root.join("layers")
    }

    fn sandboxes_dir(&self) -> PathBuf {
        self.root.join("sandboxes")
    }

    /// Waits for the lock that keeps changes away.
    fn shared(&self) -> Result<Held, Error> {
        Held::take(&self.root.join("lock"), FlockOperation::LockShared)
    }

    /// Waits for the lock that keeps everybody else away. It is held for a few file operations
    /// only, never while a machine works.
    fn exclusive(&self) -> Result<Held, Error> {
        Held::take(&self.root.join("lock"), FlockOperation::LockExclusive)
    }

    /// Whether a name is still free among checkpoints and sandboxes.
    fn check_name(&self, name: Option<&Name>) -> Result<(), Error> {
        let Some(name) = name else { return Ok(()) };
        let listing = self.read_checkpoints()?;
        let checkpoint = listing.checkpoints.iter().any(|c| c.meta.name.as_ref() == Some(name));
        let sandbox = || -> Result<bool, Error> {
            let entries = self.read_sandboxes()?;
            let mut records = entries.iter().filter_map(|entry| entry.record.as_ref().ok());
            Ok(records.any(|record| {
                let planned = record.next.as_ref().and_then(|next| next.name.as_ref());
                [record.name.as_ref(), planned].contains(&Some(name))
            }))
        };
        if checkpoint || sandbox()? {
            return Err(Error::NameTaken { name: name.clone() });
        }
        Ok(())
    }

    /// The directory of the store.
    pub fn path(&self) -> &Path {
        &self.root
    }
}

#[cfg(test)]
mod tests;
