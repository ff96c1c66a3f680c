//! A sandbox's private directory for its sockets, which is gone when its owner is gone.
//!
//! The owner holds a lock on the directory for as long as it lives. A directory whose lock can
//! be taken belongs to nobody any more (its owner was killed), so the next run removes it.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::io::Errno;
use thiserror::Error;

/// Longest path of the base directory, in bytes: a Unix socket's path ends at 107.
const MAX_BASE: usize = 70;
/// How often a name is drawn again when a sweep of another process took the fresh directory.
const MAX_TRIES: u32 = 16;

/// Failures around the private directory.
#[derive(Debug, Error)]
pub enum Error {
    /// The base is there but not a directory of ours that others cannot write to.
    #[error("{} is not a private directory of this user", path.display())]
    NotPrivate {
        /// The base directory.
        path: PathBuf,
    },
    /// Something about it failed.
    #[error("the run-time directory {} cannot be used", path.display())]
    Io {
        /// The directory.
        path: PathBuf,
        /// What failed.
        #[source]
        source: io::Error,
    },
}

impl Error {
    /// The system's reason, if there is one.
    pub fn io(&self) -> Option<&io::Error> {
        match self {
            Self::NotPrivate { .. } => None,
            Self::Io { source, .. } => Some(source),
        }
    }
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { path, source }
}

/// The directory under which private directories are made: `$XDG_RUNTIME_DIR/coppice`, else
/// `/run/coppice` for root, else `/tmp/coppice-UID`.
pub fn base() -> PathBuf {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    if let Some(runtime) = runtime.filter(|path| path.is_absolute() && path.is_dir()) {
        let base = runtime.join("coppice");
        if base.as_os_str().len() <= MAX_BASE {
            return base;
        }
    }
    let user = rustix::process::geteuid();
    if user.is_root() && Path::new("/run").is_dir() {
        return PathBuf::from("/run/coppice");
    }
    PathBuf::from(format!("/tmp/coppice-{}", user.as_raw()))
}

/// A private directory; removed with all it holds when dropped.
#[derive(Debug)]
pub struct WorkDir {
    path: PathBuf,
    /// Holds the lock.
    _lock: File,
}

impl WorkDir {
    /// Sweeps what dead owners left under `base`, then makes a fresh directory there.
    ///
    /// # Errors
    /// [`Error::NotPrivate`] when `base` belongs to someone else, [`Error::Io`] otherwise.
    pub fn new(base: &Path) -> Result<Self, Error> {
        prepare_base(base)?;
        sweep(base)?;
        for _ in 0..MAX_TRIES {
            let path = base.join(fresh_name());
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(e) => return Err(io_error(&path)(e)),
            }
            if let Some(lock) = try_lock(&path)? {
                return Ok(Self { path, _lock: lock });
            }
        }
        Err(io_error(base)(io::Error::from(io::ErrorKind::AlreadyExists)))
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// An `O_PATH` descriptor of it.
    ///
    /// # Errors
    /// [`Error::Io`] when the process is out of descriptors.
    pub fn handle(&self) -> Result<OwnedFd, Error> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        open(&self.path, flags, Mode::empty()).map_err(|e| io_error(&self.path)(e.into()))
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        // What cannot be removed now is swept by the next run: the lock goes with this value.
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn prepare_base(base: &Path) -> Result<(), Error> {
    match DirBuilder::new().mode(0o700).create(base) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(io_error(base)(e)),
        _ => {}
    }
    let meta = fs::symlink_metadata(base).map_err(io_error(base))?;
    let ours = meta.uid() == rustix::process::geteuid().as_raw();
    if meta.is_dir() && ours && meta.mode() & 0o022 == 0 {
        Ok(())
    } else {
        Err(Error::NotPrivate { path: base.to_owned() })
    }
}

/// Takes the lock of the directory at `path`; nothing when someone else has it or the directory
/// at that path is not the locked one any more.
fn try_lock(path: &Path) -> Result<Option<File>, Error> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = match open(path, flags, Mode::empty()) {
        Ok(fd) => File::from(fd),
        Err(Errno::NOENT) => return Ok(None),
        Err(e) => return Err(io_error(path)(e.into())),
    };
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(None),
        Err(e) => return Err(io_error(path)(e.into())),
    }
    let locked = file.metadata().map_err(io_error(path))?;
    match fs::symlink_metadata(path) {
        Ok(now) if now.ino() == locked.ino() && now.dev() == locked.dev() => Ok(Some(file)),
        _ => Ok(None),
    }
}

/// Removes the directories under `base` whose owners are gone.
fn sweep(base: &Path) -> Result<(), Error> {
    for entry in fs::read_dir(base).map_err(io_error(base))?.flatten() {
        let path = entry.path();
        // A directory that cannot be opened or removed is left for a run that can.
        if let Ok(Some(_lock)) = try_lock(&path) {
            let _ = fs::remove_dir_all(&path);
        }
    }
    Ok(())
}

/// A name that no other directory is likely to have: the time and this process.
fn fresh_name() -> String {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos());
    format!("{:x}-{:x}", std::process::id(), now & 0xFFFF_FFFF_FFFF)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn temp() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("base");
        (dir, base)
    }

    #[test]
    fn a_directory_is_private_and_goes_with_its_value() {
        let (_dir, base) = temp();
        let work = WorkDir::new(&base).unwrap();
        let path = work.path().to_owned();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        fs::write(path.join("socket"), b"").unwrap();
        drop(work);
        assert!(!path.exists());
    }

    #[test]
    fn the_next_run_sweeps_what_a_dead_owner_left() {
        let (_dir, base) = temp();
        prepare_base(&base).unwrap();
        let stale = base.join("1-1");
        fs::create_dir(&stale).unwrap();
        fs::write(stale.join("vsock"), b"").unwrap();
        let _work = WorkDir::new(&base).unwrap();
        assert!(!stale.exists());
    }

    #[test]
    fn the_next_run_leaves_a_living_owner_alone() {
        let (_dir, base) = temp();
        let first = WorkDir::new(&base).unwrap();
        let _second = WorkDir::new(&base).unwrap();
        assert!(first.path().exists());
    }

    #[test]
    fn a_base_open_to_others_is_refused() {
        let (_dir, base) = temp();
        fs::create_dir(&base).unwrap();
        fs::set_permissions(&base, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(WorkDir::new(&base), Err(Error::NotPrivate { .. })));
    }

    #[test]
    fn a_base_that_is_a_link_is_refused() {
        let (dir, base) = temp();
        symlink(dir.path(), &base).unwrap();
        assert!(matches!(WorkDir::new(&base), Err(Error::NotPrivate { .. })));
    }
}
