//! Removal: checkpoints from sight, and files that nothing stands on from the disk.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::files;
use super::images::name_of;
use super::sandboxes::{is_alive, remove_directory};
use super::{Error, Id, Standing, Store};

/// What was removed because nothing stood on it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Collected {
    /// Number of files and directories.
    pub files: usize,
    /// Bytes they took on disk.
    pub bytes: u64,
}

/// What the records in the store name.
#[derive(Debug, Default)]
pub(super) struct References {
    /// Checkpoints whose files hold somebody's memory.
    pub(super) memory: BTreeSet<Id>,
    /// Disk layers.
    pub(super) disks: BTreeSet<Id>,
    /// Images of the store.
    pub(super) images: BTreeSet<Id>,
    /// Records that cannot be read, so that what they name is not known.
    pub(super) unreadable: Vec<Error>,
}

/// A file of the store that nothing stands on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Orphan {
    /// A removed checkpoint's memory, a disk layer or a file of a writer that is gone.
    File(PathBuf),
    /// A sandbox's directory without a record.
    Directory(PathBuf),
}

impl References {
    fn add(&mut self, standing: Standing) {
        self.disks.extend(standing.disk_layers().cloned());
        self.images.extend(standing.disks.iter().filter_map(|disk| name_of(&disk.base.path)));
        self.memory.extend(standing.memory);
    }
}

impl Store {
    /// Removes a checkpoint from sight. Its children stay; its files go as soon as nothing stands
    /// on them.
    ///
    /// # Errors
    /// [`Error::NotFound`], or the system's.
    pub fn remove_checkpoint(&self, id: &Id) -> Result<Collected, Error> {
        let _lock = self.exclusive()?;
        let path = self.checkpoint_path(id);
        if !path.exists() {
            return Err(Error::NotFound { reference: id.to_string() });
        }
        files::rename(&path, &self.hidden_path(id))?;
        files::sync_directory(&self.checkpoints_dir())?;
        self.collect_locked()
    }

    /// Removes everything that no visible checkpoint and no sandbox stands on.
    ///
    /// # Errors
    /// [`Error::Unclear`] when a record cannot be read, or the system's.
    pub fn collect(&self) -> Result<Collected, Error> {
        let _lock = self.exclusive()?;
        self.collect_locked()
    }

    pub(super) fn collect_locked(&self) -> Result<Collected, Error> {
        let references = self.references()?;
        if !references.unreadable.is_empty() {
            return Err(Error::Unclear { count: references.unreadable.len() });
        }
        let mut collected = Collected::default();
        for orphan in self.orphans(&references)? {
            collected.files += 1;
            match orphan {
                Orphan::File(path) => {
                    collected.bytes += files::allocated(&path);
                    files::remove(&path)?;
                }
                Orphan::Directory(path) => remove_directory(&path)?,
            }
        }
        Ok(collected)
    }

    /// What all records name.
    pub(super) fn references(&self) -> Result<References, Error> {
        let mut references = References::default();
        let listing = self.read_checkpoints()?;
        references.unreadable = listing.damaged;
        for checkpoint in listing.checkpoints {
            references.add(checkpoint.meta.standing);
        }
        for entry in self.read_sandboxes()? {
            match entry.record {
                Ok(record) => {
                    let next = record.next.map(|next| next.standing);
                    for standing in [Some(record.standing), next].into_iter().flatten() {
                        references.add(standing);
                    }
                }
                // A machine that is gone stands on nothing.
                Err(error) if entry.alive => references.unreadable.push(error),
                Err(_) => {}
            }
        }
        Ok(references)
    }

    /// Files that nothing stands on.
    pub(super) fn orphans(&self, references: &References) -> Result<Vec<Orphan>, Error> {
        let mut orphans = Vec::new();
        let directory = self.checkpoints_dir();
        for name in files::names(&directory)? {
            let hidden = name.strip_suffix(".layer").and_then(Id::parse);
            let temp = name
                .strip_prefix('.')
                .and_then(|name| name.strip_suffix(".tmp").or_else(|| name.strip_suffix(".ws")));
            let working_set = name.strip_suffix(".ws").and_then(Id::parse);
            let path = directory.join(&name);
            let orphan = match (hidden, temp.and_then(Id::parse), working_set) {
                (Some(id), ..) => !references.memory.contains(&id),
                // Its writer holds a lock.
                (None, Some(_), _) => !files::is_locked(&path)?,
                (None, None, Some(id)) => !self.checkpoint_path(&id).exists(),
                (None, None, None) => false,
            };
            orphans.extend(orphan.then_some(Orphan::File(path)));
        }
        let directory = self.layers_dir();
        for name in files::names(&directory)? {
            let path = directory.join(&name);
            let temp = name.strip_prefix('.').and_then(|name| name.strip_suffix(".tmp"));
            let sealed = name.strip_suffix(".disk").and_then(Id::parse);
            let orphan = match (sealed, name_of(&path), temp.and_then(Id::parse)) {
                (Some(id), ..) => !references.disks.contains(&id),
                // Who made it may be about to have something stand on it.
                (None, Some(id), _) => {
                    !references.images.contains(&id) && !files::is_locked(&path)?
                }
                (None, None, Some(_)) => !files::is_locked(&path)?,
                (None, None, None) => false,
            };
            orphans.extend(orphan.then_some(Orphan::File(path)));
        }
        for entry in self.read_sandboxes()?.into_iter().filter(|e| e.record.is_err() && !e.alive) {
            let directory = self.sandboxes_dir().join(entry.id.as_str());
            if !is_alive(&directory)? {
                orphans.push(Orphan::Directory(directory));
            }
        }
        Ok(orphans)
    }
}
