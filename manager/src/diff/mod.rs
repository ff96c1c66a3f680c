//! What changed between two checkpoints: files by name, memory by size.
//!
//! Nothing is mounted and no guest runs: a disk is put together from its base and the sealed
//! layers over it, and its ext4 file system is read by a library in this process. A file counts
//! as modified when its kind, size, owner, mode, time of modification or link target differ.

mod disk;
mod files;

use coppice_image::{Image, PAGE, PageSet, ReadError};
use thiserror::Error;

use crate::failure::{Class, Failure, chain};
use crate::store::{self, Id, Meta, Store};
use disk::DiskView;
pub use files::{Change, Changed};

/// Why two checkpoints cannot be compared.
#[derive(Debug, Error)]
pub enum Error {
    /// The store cannot be read.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// A file that a checkpoint stands on cannot be read.
    #[error("a layer of checkpoint {id} cannot be read")]
    Layer {
        /// The checkpoint.
        id: Id,
        /// What is wrong.
        #[source]
        source: ReadError,
    },
    /// A disk cannot be put together.
    #[error("disk {disk} of checkpoint {id} cannot be read")]
    Disk {
        /// The checkpoint.
        id: Id,
        /// The disk's position.
        disk: usize,
        /// What is wrong.
        #[source]
        source: disk::DiskError,
    },
    /// A disk's file system cannot be read.
    #[error("the file system on disk {disk} of checkpoint {id} cannot be read")]
    Files {
        /// The checkpoint.
        id: Id,
        /// The disk's position.
        disk: usize,
        /// What is wrong.
        #[source]
        source: files::FilesError,
    },
    /// The checkpoints are of machines with different memory.
    #[error("the checkpoints are of machines with different memory or disks")]
    Machines,
}

impl Error {
    /// The failure as a user sees it.
    pub fn failure(&self) -> Failure {
        match self {
            Self::Store(error) => error.failure(),
            Self::Machines => Failure::new(
                Class::Usage,
                chain(self),
                "compare checkpoints of one tree; `coppice tree` draws them",
            ),
            Self::Layer { .. } | Self::Disk { .. } => {
                Failure::new(Class::StoreDamaged, chain(self), "see `coppice fsck --deep`")
            }
            Self::Files { .. } => Failure::new(
                Class::ImageInvalid,
                chain(self),
                "only ext4 file systems can be compared",
            ),
        }
    }
}

/// What differs between two checkpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Files that differ on each disk, by path.
    pub files: Vec<Changed>,
    /// Bytes of memory that were written between the two, on either way to where they meet.
    pub memory_bytes: u64,
}

/// Compares two checkpoints of one tree.
///
/// # Errors
/// [`Error`]: something is damaged, or they are of different machines.
pub fn compare(store: &Store, from: &Meta, to: &Meta) -> Result<Difference, Error> {
    let alike = from.machine.memory_mib == to.machine.memory_mib
        && from.standing.disks.len() == to.standing.disks.len();
    if !alike {
        return Err(Error::Machines);
    }
    let memory_bytes = memory(store, from, to)?;
    let mut changes = Vec::new();
    let mut overlay = 0;
    for (number, (one, other)) in from.standing.disks.iter().zip(&to.standing.disks).enumerate() {
        if one.base != other.base {
            return Err(Error::Machines);
        }
        if one.read_only {
            continue;
        }
        if one.layers != other.layers {
            let before = tree(store, from, number, overlay)?;
            let after = tree(store, to, number, overlay)?;
            changes.extend(files::compare(number, &before, &after));
        }
        overlay += 1;
    }
    Ok(Difference { files: changes, memory_bytes })
}

/// The files on the disk at position `number`, the `overlay`-th of those that take writes.
fn tree(store: &Store, meta: &Meta, number: usize, overlay: u32) -> Result<files::Tree, Error> {
    let failed = |source| Error::Disk { id: meta.id.clone(), disk: number, source };
    let view = DiskView::open(store, meta, number, overlay).map_err(failed)?;
    files::read(view).map_err(|source| Error::Files { id: meta.id.clone(), disk: number, source })
}

/// Bytes of memory in the layers that only one of two checkpoints stands on.
fn memory(store: &Store, from: &Meta, to: &Meta) -> Result<u64, Error> {
    let (one, other) = (from.memory_chain(), to.memory_chain());
    let only = |chain: &[Id], without: &[Id]| -> Vec<Id> {
        chain.iter().filter(|id| !without.contains(id)).cloned().collect()
    };
    let mut pages: Option<PageSet> = None;
    for id in only(&one, &other).into_iter().chain(only(&other, &one)) {
        let failed = |source| Error::Layer { id: id.clone(), source };
        let file = std::fs::File::open(store.memory_path(&id))
            .map_err(|source| failed(ReadError::Io(source)))?;
        let image = Image::open(file).map_err(failed)?;
        let limit = image.info().ram_pages;
        let set = pages.get_or_insert_with(|| PageSet::new(limit));
        for extent in image.page_index().map_err(failed)?.extents() {
            set.insert_run(extent.first, extent.count);
        }
    }
    Ok(pages.map_or(0, |pages| pages.len()).saturating_mul(PAGE))
}
