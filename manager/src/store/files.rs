//! File operations of the store: each does one thing that a crash cannot halve.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::Error;

/// Bytes of one block in file metadata.
const STAT_BLOCK: u64 = 512;

/// Names the file that an error is about.
pub(super) fn at(path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { path, source }
}

/// Makes a directory that must not be there yet.
pub(super) fn create_directory(path: &Path) -> Result<(), Error> {
    crash::point(path)?;
    DirBuilder::new().mode(0o700).create(path).map_err(at(path))
}

/// Gives a file another name in the same directory.
pub(super) fn rename(from: &Path, to: &Path) -> Result<(), Error> {
    crash::point(to)?;
    fs::rename(from, to).map_err(at(to))
}

/// Opens a file for reading and writing, which is made if it is not there.
fn open_or_create(path: &Path) -> Result<File, Error> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options.open(path).map_err(at(path))
}

/// Makes a file that must not be there yet.
pub(super) fn create_new(path: &Path) -> Result<File, Error> {
    crash::point(path)?;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(0o600);
    options.open(path).map_err(at(path))
}

/// A lock on a file, held until dropped. It is let go explicitly then: a program that is being
/// started at that moment has a copy of the descriptor for a while.
#[derive(Debug)]
pub(super) struct Held(File);

impl Held {
    /// Takes the lock on the file at `path`, which is made if it is not there, and waits for it.
    pub(super) fn take(path: &Path, operation: FlockOperation) -> Result<Self, Error> {
        let file = open_or_create(path)?;
        flock(path, &file, operation)?;
        Ok(Self(file))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // The end of the process lets it go at the latest.
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

/// Takes a lock and waits for it if `operation` does.
pub(super) fn flock(path: &Path, file: &File, operation: FlockOperation) -> Result<(), Error> {
    loop {
        match rustix::fs::flock(file, operation) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(at(path)(errno.into())),
        }
    }
}

/// Whether somebody holds a lock on the file at `path`; a file that is not there has no holder.
pub(super) fn is_locked(path: &Path) -> Result<bool, Error> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(at(path)(error)),
    };
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(false),
        Err(Errno::WOULDBLOCK) => Ok(true),
        Err(errno) => Err(at(path)(errno.into())),
    }
}

/// Has the names in a directory survive a crash of the host.
pub(super) fn sync_directory(path: &Path) -> Result<(), Error> {
    crash::point(path)?;
    File::open(path).and_then(|directory| directory.sync_all()).map_err(at(path))
}

/// Puts `content` in place of a file in one step. A crash of the host may undo it.
pub(super) fn replace(path: &Path, content: &[u8]) -> Result<(), Error> {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let temp = Path::new(&name);
    crash::point(temp)?;
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(true).mode(0o600).open(temp);
    file.and_then(|mut file| file.write_all(content)).map_err(at(temp))?;
    rename(temp, path)
}

/// Removes a file; one that is gone already is as good.
pub(super) fn remove(path: &Path) -> Result<(), Error> {
    crash::point(path)?;
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at(path)(error)),
        _ => Ok(()),
    }
}

/// Names in a directory, sorted. Those that are not UTF-8 are none of ours.
pub(super) fn names(directory: &Path) -> Result<Vec<String>, Error> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).map_err(at(directory))? {
        let name = entry.map_err(at(directory))?.file_name();
        names.extend(name.into_string().ok());
    }
    names.sort();
    Ok(names)
}

/// Bytes that a file takes on disk; nothing if it is not there.
pub(super) fn allocated(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |meta| meta.blocks().saturating_mul(STAT_BLOCK))
}

/// Places before each change to the disk where a test can have the program die.
pub(super) mod crash {
    use std::path::Path;

    use super::Error;

    /// Nothing happens here outside tests.
    #[cfg(not(test))]
    pub(super) fn point(_: &Path) -> Result<(), Error> {
        Ok(())
    }

    #[cfg(test)]
    thread_local! {
        static LEFT: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
    }

    #[cfg(test)]
    pub(super) fn point(path: &Path) -> Result<(), Error> {
        match LEFT.get() {
            None => Ok(()),
            Some(0) => Err(super::at(path)(std::io::Error::other("crashed here"))),
            Some(left) => {
                LEFT.set(Some(left - 1));
                Ok(())
            }
        }
    }

    /// Runs something that dies before its change number `changes`, counted from 0, and every one
    /// after it. The store cleans nothing up on an error, so that an error there is as good as
    /// the end of the process.
    #[cfg(test)]
    pub(in crate::store) fn before_change<T>(changes: usize, run: impl FnOnce() -> T) -> T {
        LEFT.set(Some(changes));
        let result = run();
        LEFT.set(None);
        result
    }
}
