//! What can go wrong with the store, and what to do about each.

use std::io;
use std::path::PathBuf;

use coppice_image::{ReadError, WriteError};
use thiserror::Error;

use super::{Id, MergeError, Name};
use crate::failure::{Class, Failure, chain};

/// Failures of the store.
#[derive(Debug, Error)]
pub enum Error {
    /// A file or directory of the store cannot be used.
    #[error("{} cannot be used", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// Nothing has this name or ID.
    #[error("there is no checkpoint or sandbox '{reference}'")]
    NotFound {
        /// As given.
        reference: String,
    },
    /// Several IDs begin like this.
    #[error("'{reference}' is the beginning of {count} IDs")]
    Ambiguous {
        /// As given.
        reference: String,
        /// How many.
        count: usize,
    },
    /// Another checkpoint or sandbox has the name.
    #[error("the name '{name}' is taken")]
    NameTaken {
        /// The name.
        name: Name,
    },
    /// A checkpoint's file cannot be read.
    #[error("the checkpoint {} is damaged", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: ReadError,
    },
    /// A checkpoint's file holds no record of ours, or one of another checkpoint.
    #[error("the checkpoint {} has no usable record ({reason})", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A record cannot be put into words.
    #[error("the record cannot be written")]
    Encode(#[source] serde_json::Error),
    /// The file for a new checkpoint cannot be written.
    #[error("the checkpoint {} cannot be written", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What failed.
        #[source]
        source: WriteError,
    },
    /// A checkpoint was to become visible, but its file is not complete.
    #[error("the checkpoint {id} was not completed")]
    Incomplete {
        /// The checkpoint.
        id: Id,
        /// What is wrong with it.
        #[source]
        source: ReadError,
    },
    /// A sandbox's record cannot be read.
    #[error("the sandbox {id} has no usable record ({reason})")]
    SandboxRecord {
        /// The sandbox.
        id: Id,
        /// What is wrong with it.
        reason: String,
    },
    /// The machine of a sandbox still runs.
    #[error("the sandbox {id} is running")]
    Running {
        /// The sandbox.
        id: Id,
    },
    /// A checkpoint needs a file that is not there or was changed.
    #[error("the checkpoint {id} stands on {}, which {what}", path.display())]
    Base {
        /// The checkpoint.
        id: Id,
        /// The file.
        path: PathBuf,
        /// Such as "is not there".
        what: &'static str,
    },
    /// What a sandbox stands on cannot be brought together in fewer files.
    #[error("the layers that sandbox {id} stands on cannot be merged")]
    Flatten {
        /// The sandbox.
        id: Id,
        /// What failed.
        #[source]
        source: MergeError,
    },
    /// Files cannot be told from those in use while a record is unreadable.
    #[error("{count} records cannot be read, so nothing was removed")]
    Unclear {
        /// How many.
        count: usize,
    },
}

impl Error {
    /// The failure as users see it.
    pub fn failure(&self) -> Failure {
        let (class, remedy) = match self {
            Self::Io { source, .. } if is_full(source) => (Class::DiskFull, MAKE_ROOM),
            Self::Write { source: WriteError::Io(source), .. } if is_full(source) => {
                (Class::DiskFull, MAKE_ROOM)
            }
            Self::Flatten { source: MergeError::Copy(source), .. } if is_full(source) => {
                (Class::DiskFull, MAKE_ROOM)
            }
            Self::Flatten { source: MergeError::Write(WriteError::Io(source)), .. }
                if is_full(source) =>
            {
                (Class::DiskFull, MAKE_ROOM)
            }
            Self::Flatten { .. } => (Class::StoreDamaged, "see `coppice fsck --deep`"),
            Self::Io { .. } | Self::Write { .. } => {
                (Class::Host, "point COPPICE_HOME to a directory this user can write")
            }
            Self::NotFound { .. } => (Class::NotFound, "see `coppice tree` for what there is"),
            Self::Ambiguous { .. } => (Class::NotFound, "give more of the ID"),
            Self::NameTaken { .. } => {
                (Class::Conflict, "choose another, or remove what has it with `coppice rm`")
            }
            Self::Running { .. } => (Class::Conflict, "end it first with `coppice kill`"),
            Self::Damaged { .. } | Self::Record { .. } | Self::SandboxRecord { .. } => {
                (Class::StoreDamaged, "see `coppice fsck`")
            }
            Self::Unclear { .. } => {
                (Class::StoreDamaged, "run `coppice fsck --repair`, which sets them aside")
            }
            Self::Base { .. } => {
                (Class::StoreDamaged, "put the file back as it was when the checkpoint was made")
            }
            Self::Encode(_) | Self::Incomplete { .. } => {
                (Class::Internal, "run `coppice fsck`, and report this if all is well there")
            }
        };
        Failure::new(class, chain(self), remedy)
    }
}

const MAKE_ROOM: &str = "free some space or point COPPICE_HOME to another disk";

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
