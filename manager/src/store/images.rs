//! Images that the store owns: made for one template, and gone when nothing stands on them.

use std::fs::File;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use super::files::{self, at};
use super::{Error, Id, Store};

/// Ending of an image's name.
pub(super) const ENDING: &str = ".base";

/// An image that is being written, or that nothing stands on yet: nobody takes it for left over as
/// long as this is there.
#[derive(Debug)]
pub struct NewImage {
    id: Id,
    path: PathBuf,
    file: File,
}

impl NewImage {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Store {
    /// Makes an empty file for an image, to be written and then [kept](Self::keep_image).
    ///
    /// # Errors
    /// The system's.
    pub fn new_image(&self) -> Result<NewImage, Error> {
        let _lock = self.exclusive()?;
        let directory = self.layers_dir();
        let id = Id::new().map_err(at(&directory))?;
        let path = directory.join(format!(".{id}.tmp"));
        let file = files::create_new(&path)?;
        files::flock(&path, &file, FlockOperation::NonBlockingLockExclusive)?;
        Ok(NewImage { id, path, file })
    }

    /// Gives an image its name, once all of it is on disk.
    ///
    /// # Errors
    /// The system's.
    pub fn keep_image(&self, image: NewImage) -> Result<NewImage, Error> {
        image.file.sync_all().map_err(at(&image.path))?;
        let path = self.layers_dir().join(format!("{}{ENDING}", image.id));
        files::rename(&image.path, &path)?;
        files::sync_directory(&self.layers_dir())?;
        Ok(NewImage { path, ..image })
    }
}

/// The name of an image in the store, if the path can be one's. The store may have been moved since
/// the path was written down.
pub(super) fn name_of(path: &Path) -> Option<Id> {
    path.file_name()?.to_str()?.strip_suffix(ENDING).and_then(Id::parse)
}
