//! The daemon's place in its home: a lock that one at a time has, and a socket for who may open
//! it. Whoever can open the socket may do everything with every tenant's sandboxes, so only the
//! daemon's own user and root can.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags, fchmod, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use thiserror::Error;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};

/// File name of the lock, with the number of the process that has it.
const LOCK: &str = "daemon.lock";
/// File name of the socket.
const SOCKET: &str = "daemon.sock";
/// How long a command that has the place of a daemon may take before it is not waited for.
const PATIENCE: Duration = Duration::from_secs(10);
/// Clients that may wait to be let in.
const BACKLOG: i32 = 128;

/// Why the place cannot be had.
#[derive(Debug, Error)]
pub enum Error {
    /// There is a daemon.
    #[error("a daemon serves {} already", home.display())]
    Served {
        /// Its home.
        home: PathBuf,
    },
    /// Somebody has the lock and does not answer.
    #[error("process {} has {} and does not answer", holder.trim(), lock.display())]
    Held {
        /// The lock.
        lock: PathBuf,
        /// The number of the process, as it wrote it.
        holder: String,
    },
    /// A file or socket in the home cannot be made.
    #[error("{} cannot be used", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
}

fn at(path: &Path) -> impl FnOnce(Errno) -> Error {
    move |errno| Error::Io { path: path.to_owned(), source: errno.into() }
}

/// The place of the daemon of a home; nobody else has it until this is dropped.
#[derive(Debug)]
pub struct Place {
    home: PathBuf,
    lock: File,
}

impl Place {
    /// Takes the place, waiting for a command that has it for a moment.
    ///
    /// # Errors
    /// [`Error::Served`], [`Error::Held`], or the system's.
    pub async fn take(home: &Path) -> Result<Self, Error> {
        let (path, lock) = open_lock(home)?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Self::with(home, lock),
            Err(Errno::WOULDBLOCK) => {}
            Err(errno) => return Err(at(&path)(errno)),
        }
        // Whoever takes longer to answer is a daemon that looks after what it finds.
        if tokio::time::timeout(PATIENCE, answers(home)).await.unwrap_or(true) {
            return Err(Error::Served { home: home.to_owned() });
        }
        let waiting = tokio::task::spawn_blocking(move || {
            let locked = loop {
                match flock(&lock, FlockOperation::LockExclusive) {
                    Err(Errno::INTR) => {}
                    locked => break locked,
                }
            };
            locked.map(|()| lock)
        });
        match tokio::time::timeout(PATIENCE, waiting).await {
            Ok(Ok(Ok(lock))) => Self::with(home, lock),
            Ok(Ok(Err(errno))) => Err(at(&path)(errno)),
            Ok(Err(_)) | Err(_) => {
                let holder = std::fs::read_to_string(&path).unwrap_or_default();
                Err(Error::Held { lock: path, holder })
            }
        }
    }

    fn with(home: &Path, lock: File) -> Result<Self, Error> {
        let place = Self { home: home.to_owned(), lock };
        let path = home.join(LOCK);
        let failed = |source| Error::Io { path: path.clone(), source };
        place.lock.set_len(0).map_err(failed)?;
        writeln!(&place.lock, "{}", std::process::id()).map_err(failed)?;
        Ok(place)
    }

    /// Listens on the socket; what a dead daemon left there is replaced.
    ///
    /// # Errors
    /// The system's.
    pub fn listen(&self) -> Result<UnixListener, Error> {
        let path = self.home.join(SOCKET);
        match std::fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(Error::Io { path, source });
            }
            _ => {}
        }
        let listener = bind(&self.home).map_err(at(&path))?;
        UnixListener::from_std(listener.into()).map_err(|source| Error::Io { path, source })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // A program that is being started has a copy of the descriptor for a while.
        let _ = flock(&self.lock, FlockOperation::Unlock);
    }
}

/// Whether somebody serves the socket. That it can be connected to says nothing: programs that a
/// daemon was starting when it was killed have a copy of it, and of the lock, for a while.
async fn answers(home: &Path) -> bool {
    let Ok(mut stream) = connect(home).await else { return false };
    let asked = stream.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    asked.is_ok() && matches!(stream.read(&mut [0]).await, Ok(1))
}

fn open_lock(home: &Path) -> Result<(PathBuf, File), Error> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(home);
    made.map_err(|source| Error::Io { path: home.to_owned(), source })?;
    let path = home.join(LOCK);
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    match options.open(&path) {
        Ok(file) => Ok((path, file)),
        Err(source) => Err(Error::Io { path, source }),
    }
}

fn bind(home: &Path) -> Result<OwnedFd, Errno> {
    let directory = open_directory(home)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Linux gives the file the mode that the socket has when it is bound.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(short_path(&directory))?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Connects to the daemon of a home.
///
/// # Errors
/// The system's, when there is none.
pub async fn connect(home: &Path) -> io::Result<UnixStream> {
    let directory = open_directory(home)?;
    UnixStream::connect(short_path(&directory)).await
}

fn open_directory(home: &Path) -> Result<OwnedFd, Errno> {
    rustix::fs::open(home, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

/// A path through a descriptor: a socket's path may have 107 bytes only, a home's may be longer.
fn short_path(directory: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}/{SOCKET}", directory.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// A home whose path is longer than a socket's may be.
    fn home() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().join("h".repeat(120));
        (dir, home)
    }

    #[tokio::test]
    async fn what_a_killed_daemons_children_still_hold_is_waited_for() {
        let (_dir, home) = home();
        let dead = Place::take(&home).await.unwrap();
        let listener = dead.listen().unwrap();
        let child = async {
            // It never answers, and is a program of its own then.
            drop(listener.accept().await.unwrap());
            drop((listener, dead));
        };
        let (taken, ()) = tokio::join!(Place::take(&home), child);
        taken.unwrap();
    }

    #[tokio::test]
    async fn only_the_owner_can_open_the_socket() {
        let (_dir, home) = home();
        let place = Place::take(&home).await.unwrap();
        let _listener = place.listen().unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&home), mode(&home.join(SOCKET))), (0o700, 0o600));
    }

    #[tokio::test]
    async fn there_is_one_daemon_and_the_next_replaces_its_socket() {
        let (_dir, home) = home();
        let first = Place::take(&home).await.unwrap();
        let listener = first.listen().unwrap();
        assert!(matches!(Place::take(&home).await, Err(Error::Served { .. })));
        drop((listener, first));
        assert!(home.join(SOCKET).exists());
        connect(&home).await.unwrap_err();
        let second = Place::take(&home).await.unwrap();
        let _listener = second.listen().unwrap();
        connect(&home).await.unwrap();
    }

    #[tokio::test]
    async fn a_command_that_has_the_place_is_waited_for() {
        let (_dir, home) = home();
        let command = Place::take(&home).await.unwrap();
        let waiting = tokio::spawn({
            let home = home.clone();
            async move { Place::take(&home).await }
        });
        tokio::task::yield_now().await;
        drop(command);
        waiting.await.unwrap().unwrap();
    }
}
