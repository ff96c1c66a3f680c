//! Removes files and directories.
//!
//! Each directory is opened relative to the one it is in and never through a link, so whoever swaps
//! directories for links meanwhile does not lead the agent elsewhere. There is no recursion: a tree
//! may be deeper than the thread's stack.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags};
use rustix::io::Errno;

/// Deepest tree that is removed; each level takes a descriptor.
const MAX_DEPTH: usize = 4096;

/// How often a directory may fill again while it is removed.
const MAX_REFILLS: u32 = 64;

/// A directory on the way down.
struct Level {
    directory: OwnedFd,
    /// Its name in the level above.
    name: CString,
}

/// Removes what is at `path`, with all that is in it. Nothing there is no error.
///
/// # Errors
/// When something cannot be removed; what was removed until then stays so.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    let top = crate::users::c_path(path)?;
    match unlink(CWD, &top)? {
        Unlinked::Gone => return Ok(()),
        Unlinked::Directory => {}
    }
    let mut levels: Vec<Level> = Vec::new();
    let mut next = Some(top);
    let mut refills = 0_u32;
    loop {
        if let Some(name) = next.take() {
            if levels.len() >= MAX_DEPTH {
                return Err(io::Error::other(format!("it is deeper than {MAX_DEPTH} directories")));
            }
            let parent = levels.last().map_or(CWD, |level| level.directory.as_fd());
            match rustix::fs::openat(parent, &name, DIRECTORY, Mode::empty()) {
                Ok(directory) => levels.push(Level { directory, name }),
                Err(Errno::NOENT) => {}
                // It is something else by now.
                Err(Errno::NOTDIR | Errno::LOOP) => {
                    unlink(parent, &name)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        let Some(level) = levels.last() else { return Ok(()) };
        next = empty(&level.directory)?;
        if next.is_some() {
            continue;
        }
        let Some(Level { name, .. }) = levels.pop() else { return Ok(()) };
        let parent = levels.last().map_or(CWD, |level| level.directory.as_fd());
        match rustix::fs::unlinkat(parent, &name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::NOTEMPTY | Errno::EXIST) if refills < MAX_REFILLS => {
                refills = refills.saturating_add(1);
                next = Some(name);
            }
            Err(error) => return Err(error.into()),
        }
        if levels.is_empty() && next.is_none() {
            return Ok(());
        }
    }
}

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC)
    .union(OFlags::NONBLOCK);

/// Removes the files of a directory; the first directory in it, if it has one.
fn empty(directory: &OwnedFd) -> io::Result<Option<CString>> {
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        if matches!(unlink(directory.as_fd(), name)?, Unlinked::Directory) {
            return Ok(Some(name.to_owned()));
        }
    }
    Ok(None)
}

enum Unlinked {
    /// It is not there any more.
    Gone,
    /// It is a directory, and there.
    Directory,
}

fn unlink(parent: rustix::fd::BorrowedFd<'_>, name: &CStr) -> io::Result<Unlinked> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(Unlinked::Gone),
        Err(Errno::ISDIR) => Ok(Unlinked::Directory),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_tree_deeper_than_a_path_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        std::fs::create_dir(&top).unwrap();
        let mut directory = rustix::fs::open(&top, DIRECTORY, Mode::empty()).unwrap();
        for _ in 0..3000 {
            rustix::fs::mkdirat(&directory, "deeper", Mode::RWXU).unwrap();
            directory = rustix::fs::openat(&directory, "deeper", DIRECTORY, Mode::empty()).unwrap();
        }
        raise_open_files();
        remove(&top).unwrap();
        assert!(!top.exists());
    }

    fn raise_open_files() {
        use nix::sys::resource::{Resource, getrlimit, setrlimit};
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, hard.min(65_536), hard).unwrap();
    }

    #[test]
    fn links_are_removed_and_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (kept, top) = (dir.path().join("kept"), dir.path().join("top"));
        std::fs::create_dir_all(&top).unwrap();
        std::fs::create_dir(&kept).unwrap();
        std::fs::write(kept.join("file"), "").unwrap();
        symlink(&kept, top.join("link")).unwrap();
        remove(&top).unwrap();
        assert!(!top.exists() && kept.join("file").exists());
    }

    #[test]
    fn a_wide_tree_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        for number in 0..200 {
            std::fs::create_dir_all(top.join(format!("a{number}/b"))).unwrap();
            std::fs::write(top.join(format!("a{number}/b/c")), "").unwrap();
            std::fs::write(top.join(format!("f{number}")), "").unwrap();
        }
        remove(&top).unwrap();
        assert!(!top.exists());
    }

    #[test]
    fn nothing_to_remove_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        remove(&dir.path().join("nothing")).unwrap();
    }
}
