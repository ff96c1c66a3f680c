//! What a guest writes to its serial console after it is up, kept beside the sandbox without a
//! process that reads it.
//!
//! The machine writes to a FIFO that it holds open for both ways itself, so it never waits for a
//! reader nor misses one. What is in it, the first 64 KiB since it was looked at last, goes to a
//! file when somebody looks; of the file, the end is kept. Both go with the sandbox, and what nobody
//! looked at with its machine.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, FlockOperation, Mode, OFlags, flock, mknodat};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;

use crate::sys;

/// File name of the FIFO in a sandbox's directory.
const FIFO: &str = "console.fifo";
/// File name of what was read from it.
const FILE: &str = "console.log";
/// The most bytes of the file; then its first half goes.
const MAX: usize = 256 * 1024;

/// Where the console of a sandbox's machine goes.
pub(super) fn open(directory: &Path) -> io::Result<OwnedFd> {
    let path = directory.join(FIFO);
    match mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(errno.into()),
    }
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    Ok(rustix::fs::open(&path, flags, Mode::empty())?)
}

/// Begins the file with what the guest wrote while it came up.
pub(super) fn begin(directory: &Path, text: &str) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options.append(true).create(true).mode(0o600).open(directory.join(FILE))?;
    file.write_all(text.as_bytes())
}

/// Path of the FIFO.
pub(super) fn fifo(directory: &Path) -> PathBuf {
    directory.join(FIFO)
}

/// What the guest wrote: what nobody has looked at yet, and all that is kept with it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Transcript {
    /// All that is kept, as it came; it may be anything.
    pub whole: Vec<u8>,
    /// How many bytes at its end are new.
    pub new: usize,
}

impl Transcript {
    /// Reads what is there. Nothing of a machine without a console.
    ///
    /// # Errors
    /// The system's.
    pub fn read(directory: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true).mode(0o600);
        let mut file = options.open(directory.join(FILE))?;
        // One at a time: what is read from the FIFO is not there for others.
        flock(&file, FlockOperation::LockExclusive)?;
        let read = Self::under_lock(directory, &mut file);
        flock(&file, FlockOperation::Unlock)?;
        read
    }

    fn under_lock(directory: &Path, file: &mut File) -> io::Result<Self> {
        let mut whole = Vec::new();
        file.read_to_end(&mut whole)?;
        let before = whole.len();
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        match rustix::fs::open(directory.join(FIFO), flags, Mode::empty()) {
            // More than this at a time comes next time: the guest may write for ever.
            Ok(fifo) => match File::from(fifo).take(64 * 1024).read_to_end(&mut whole) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            },
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno.into()),
        }
        let new = whole.len().saturating_sub(before);
        if whole.len() > MAX {
            let half = whole.len().saturating_sub(MAX / 2);
            file.set_len(0)?;
            file.write_all(whole.get(half..).unwrap_or_default())?;
        } else {
            file.write_all(whole.get(before..).unwrap_or_default())?;
        }
        Ok(Self { whole, new })
    }

    /// What is new.
    pub fn news(&self) -> &[u8] {
        self.whole.get(self.whole.len().saturating_sub(self.new)..).unwrap_or_default()
    }
}

/// Somebody who reads what a guest writes when it does. Of two, each gets a part.
#[derive(Debug)]
pub struct Follower {
    directory: PathBuf,
    fifo: AsyncFd<OwnedFd>,
}

impl Follower {
    /// Of the sandbox with this directory.
    ///
    /// # Errors
    /// The system's, also when its machine has no console.
    pub fn of(directory: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fifo = rustix::fs::open(fifo(directory), flags, Mode::empty())?;
        Ok(Self { directory: directory.to_owned(), fifo: sys::watch_readable(fifo)? })
    }

    /// What the guest wrote next; nothing when there is no machine any more.
    ///
    /// # Errors
    /// The system's.
    pub async fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        loop {
            let mut ready = self.fifo.readable().await?;
            let read = Transcript::read(&self.directory)?;
            if read.new > 0 {
                return Ok(Some(read.news().to_vec()));
            }
            if ready.ready().is_read_closed() {
                return Ok(None);
            }
            // Another reader was faster.
            ready.clear_ready();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_writes_whether_somebody_reads_or_not() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Transcript::read(dir.path()).unwrap(), Transcript::default());
        let mut machine = File::from(open(dir.path()).unwrap());
        machine.write_all(b"one\n").unwrap();
        let first = Transcript::read(dir.path()).unwrap();
        assert_eq!((&first.whole[..], first.new), (&b"one\n"[..], 4));
        machine.write_all(b"two\n").unwrap();
        let second = Transcript::read(dir.path()).unwrap();
        assert_eq!((&second.whole[..], second.news()), (&b"one\ntwo\n"[..], &b"two\n"[..]));
        // The next machine of the sandbox goes on there.
        drop(machine);
        let mut next = File::from(open(dir.path()).unwrap());
        next.write_all(b"three\n").unwrap();
        drop(next);
        assert_eq!(Transcript::read(dir.path()).unwrap().whole, b"one\ntwo\n");
    }

    #[tokio::test]
    async fn a_follower_gets_what_comes_until_the_machine_ends() {
        let dir = tempfile::tempdir().unwrap();
        let mut machine = File::from(open(dir.path()).unwrap());
        let mut follower = Follower::of(dir.path()).unwrap();
        for text in ["one", "two"] {
            let (next, ()) = tokio::join!(follower.next(), async {
                machine.write_all(text.as_bytes()).unwrap();
            });
            assert_eq!(next.unwrap().unwrap(), text.as_bytes());
        }
        drop(machine);
        assert_eq!(follower.next().await.unwrap(), None);
    }

    #[test]
    fn a_guest_that_never_stops_fills_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut machine = File::from(open(dir.path()).unwrap());
        for round in 0..20_u8 {
            // As much as there is room for; it does not wait.
            while machine.write(&[b'a' + round; 4096]).is_ok() {}
            let read = Transcript::read(dir.path()).unwrap();
            assert!(read.new > 0 && read.whole.len() <= MAX + 64 * 1024, "{round}");
        }
        let kept = std::fs::read(dir.path().join(FILE)).unwrap();
        assert!(kept.len() <= MAX && kept.ends_with(b"ttt"), "{}", kept.len());
    }
}
