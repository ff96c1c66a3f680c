//! Questions to descriptors that came from outside: what they are and what may be done with them.

use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use super::check;

/// Takes ownership of the descriptor with this number and makes it close-on-exec.
///
/// For a number given on the command line, at most once per number and before anything else
/// owns descriptors.
///
/// # Errors
/// `EBADF` when it is not open.
pub fn adopt(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: a query and a flag on a number; no memory is involved.
    check(unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) })?;
    // SAFETY: the descriptor is open, was inherited for our use, and is taken once.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// What may be done with an open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// It can be read.
    pub read: bool,
    /// It can be written.
    pub write: bool,
    /// It was opened with `O_PATH`: only a place in the file system.
    pub path_only: bool,
}

/// Asks with which rights a file was opened.
///
/// # Errors
/// Those of `fcntl(F_GETFL)`.
pub fn access(fd: BorrowedFd<'_>) -> io::Result<Access> {
    let flags = status_flags(fd)?;
    let path_only = flags & libc::O_PATH != 0;
    let mode = flags & libc::O_ACCMODE;
    Ok(Access {
        read: !path_only && mode != libc::O_WRONLY,
        write: !path_only && mode != libc::O_RDONLY,
        path_only,
    })
}

/// Makes reads and writes return `WouldBlock` rather than wait.
///
/// The flag belongs to the open file, so it is seen by every process that shares it.
///
/// # Errors
/// Those of `fcntl`.
pub fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    let flags = status_flags(fd)? | libc::O_NONBLOCK;
    // SAFETY: sets flags of an open descriptor; no memory is involved.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags) }).map(drop)
}

fn status_flags(fd: BorrowedFd<'_>) -> io::Result<libc::c_int> {
    // SAFETY: a query on an open descriptor; no memory is involved.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) })
}

/// Takes in one who connected to a listening socket; the new descriptor is close-on-exec.
///
/// # Errors
/// Those of `accept4`, such as `WouldBlock` on a non-blocking socket that nobody waits at.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let fd = loop {
        // SAFETY: no address is asked for, so no memory is involved.
        let fd = unsafe {
            libc::accept4(
                listener.as_raw_fd(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                libc::SOCK_CLOEXEC,
            )
        };
        match check(fd) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => break other?,
        }
    };
    // SAFETY: the call succeeded, so the descriptor is open and owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether it is a Unix socket of this type (`SOCK_STREAM`, `SOCK_SEQPACKET`) and, when
/// `listening`, one that takes connections.
pub fn is_unix_socket(fd: BorrowedFd<'_>, kind: libc::c_int, listening: bool) -> bool {
    let is = |option, value| socket_option(fd, option).is_ok_and(|got| got == value);
    is(libc::SO_DOMAIN, libc::AF_UNIX)
        && is(libc::SO_TYPE, kind)
        && is(libc::SO_ACCEPTCONN, libc::c_int::from(listening))
}

fn socket_option(fd: BorrowedFd<'_>, option: libc::c_int) -> io::Result<libc::c_int> {
    let mut value: libc::c_int = 0;
    let mut len = libc::socklen_t::try_from(size_of::<libc::c_int>())
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: `value` has room for the `len` bytes that the kernel may write.
    check(unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw mut value).cast(),
            &raw mut len,
        )
    })?;
    Ok(value)
}

/// Kinds of files a machine is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A block device.
    BlockDevice,
    /// A directory.
    Directory,
    /// Anything else.
    Other,
}

/// Asks what kind of file it is; works for `O_PATH` descriptors too.
///
/// # Errors
/// Those of `fstat`.
pub fn kind(fd: BorrowedFd<'_>) -> io::Result<FileKind> {
    Ok(match stat(fd)?.st_mode & libc::S_IFMT {
        libc::S_IFREG => FileKind::Regular,
        libc::S_IFBLK => FileKind::BlockDevice,
        libc::S_IFDIR => FileKind::Directory,
        _ => FileKind::Other,
    })
}

fn stat(fd: BorrowedFd<'_>) -> io::Result<libc::stat> {
    // SAFETY: all-zero bytes are a valid `stat`, which is plain data.
    let mut stat = unsafe { zeroed::<libc::stat>() };
    // SAFETY: `stat` has room for what the kernel writes.
    check(unsafe { libc::fstat(fd.as_raw_fd(), &raw mut stat) })?;
    Ok(stat)
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::os::fd::AsFd;
    use std::os::unix::fs::OpenOptionsExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn rights_are_those_of_the_open_file() {
        let null = File::open("/dev/null").unwrap();
        assert_eq!(
            access(null.as_fd()).unwrap(),
            Access { read: true, write: false, path_only: false }
        );
        let path = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open("/").unwrap();
        assert_eq!(
            access(path.as_fd()).unwrap(),
            Access { read: false, write: false, path_only: true }
        );
        assert_eq!(kind(path.as_fd()).unwrap(), FileKind::Directory);
    }

    #[test]
    fn a_listener_is_told_from_a_stream_and_from_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
        let (stream, _peer) = UnixStream::pair().unwrap();
        let null = File::open("/dev/null").unwrap();
        let listens = |fd: BorrowedFd<'_>| is_unix_socket(fd, libc::SOCK_STREAM, true);
        assert!(listens(listener.as_fd()));
        assert!(!listens(stream.as_fd()));
        assert!(!listens(null.as_fd()));
    }
}
