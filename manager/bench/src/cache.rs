//! The page cache before a sample.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, fadvise, sync};

use crate::error::{Doing as _, Error};

/// A file system whose files are memory, as statfs(2) names it.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// What is done to the page cache before every sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cache {
    /// Nothing: files that were read before are in it.
    Warm,
    /// Everything is dropped, by `/proc/sys/vm/drop_caches`, which root may.
    DropAll,
    /// The kernel is advised to drop the files of the guest and of its saved states; it keeps
    /// those parts that others use.
    Advise,
}

impl Cache {
    /// The cold cache that this process can make.
    #[must_use]
    pub fn cold() -> Self {
        if rustix::process::geteuid().is_root() { Self::DropAll } else { Self::Advise }
    }

    /// Word for reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Warm => "warm",
            Self::DropAll => "cold (drop_caches)",
            Self::Advise => "cold (fadvise)",
        }
    }

    /// Makes the cache so.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn make(self, files: &[PathBuf]) -> Result<(), Error> {
        match self {
            Self::Warm => Ok(()),
            Self::DropAll => {
                sync();
                fs::write("/proc/sys/vm/drop_caches", "3").doing("dropping the page cache")
            }
            Self::Advise => {
                // Only what is on disk can be dropped.
                sync();
                files.iter().try_for_each(|path| {
                    let doing = || format!("dropping {} from the page cache", path.display());
                    let file = File::open(path).doing(doing())?;
                    fadvise(&file, 0, None, Advice::DontNeed).doing(doing())
                })
            }
        }
    }
}

/// Whether files in a directory are memory and nothing else, so that no cache of them can be cold.
#[must_use]
pub fn is_memory(directory: &Path) -> bool {
    rustix::fs::statfs(directory).is_ok_and(|statfs| statfs.f_type == TMPFS_MAGIC)
}
