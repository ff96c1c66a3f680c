//! Working sets: which pages of a checkpoint its first clone used by the time its agent answered.
//! Later clones have them brought in ahead. A record is a hint: losing it costs time and nothing
//! else, so nothing waits for it to reach the disk.

use std::fs::File;
use std::path::PathBuf;

use rustix::fs::FlockOperation;

use super::files;
use super::{Error, Id, Store};

/// A record in the making. Dropped, it leaves a file that is removed with the next ones that
/// nobody needs.
#[derive(Debug)]
pub struct NewWorkingSet {
    checkpoint: Id,
    file: File,
}

impl NewWorkingSet {
    /// The empty file to write it into. It carries the writer's lock.
    pub fn file(&self) -> &File {
        &self.file
    }
}

impl Store {
    /// The record of a checkpoint, open for reading, if there is one.
    pub fn working_set(&self, checkpoint: &Id) -> Option<File> {
        File::open(self.working_set_path(checkpoint)).ok()
    }

    /// Begins the record of a checkpoint; nothing if there is one or somebody makes it just now.
    ///
    /// # Errors
    /// The system's.
    pub fn begin_working_set(&self, checkpoint: &Id) -> Result<Option<NewWorkingSet>, Error> {
        let _lock = self.exclusive()?;
        let temp = self.new_working_set_path(checkpoint);
        let there = self.working_set_path(checkpoint).exists() || files::is_locked(&temp)?;
        if there || !self.checkpoint_path(checkpoint).exists() {
            return Ok(None);
        }
        files::remove(&temp)?;
        let file = files::create_new(&temp)?;
        files::flock(&temp, &file, FlockOperation::NonBlockingLockExclusive)?;
        Ok(Some(NewWorkingSet { checkpoint: checkpoint.clone(), file }))
    }

    /// Gives a record its name; it goes with its checkpoint.
    ///
    /// # Errors
    /// The system's.
    pub fn complete_working_set(&self, new: &NewWorkingSet) -> Result<(), Error> {
        let _lock = self.shared()?;
        let NewWorkingSet { checkpoint, .. } = new;
        files::rename(&self.new_working_set_path(checkpoint), &self.working_set_path(checkpoint))
    }

    fn working_set_path(&self, checkpoint: &Id) -> PathBuf {
        self.checkpoints_dir().join(format!("{checkpoint}.ws"))
    }

    fn new_working_set_path(&self, checkpoint: &Id) -> PathBuf {
        self.checkpoints_dir().join(format!(".{checkpoint}.ws"))
    }
}
