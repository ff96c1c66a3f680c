//! Starts the VMM program with nothing but what it needs.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use coppice_vmm_protocol::{ControlSocket, SocketError};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use tokio::process::Child;

use super::Error;
use crate::sys;

/// Name of the program, looked for next to our own.
const PROGRAM: &str = "coppice-vmm";
/// How many managers may wait to be let in.
const BACKLOG: i32 = 16;
/// The one environment variable the program sees: how much it logs.
const LOG: &str = "COPPICE_LOG";

/// The VMM program's absolute path: the one given (or in `COPPICE_VMM`), else the file
/// `coppice-vmm` next to this program.
///
/// # Errors
/// The system's reason when a relative path or our own path cannot be resolved.
pub fn locate(given: Option<PathBuf>) -> std::io::Result<PathBuf> {
    match given.or_else(|| std::env::var_os("COPPICE_VMM").map(PathBuf::from)) {
        Some(path) => std::path::absolute(path),
        None => Ok(std::env::current_exe()?.with_file_name(PROGRAM)),
    }
}

/// Starts the program; returns it and our end of its control socket, non-blocking.
pub(super) fn spawn(program: &Path) -> Result<(Child, ControlSocket), Error> {
    let (ours, theirs) = ControlSocket::pair().map_err(Error::Socket)?;
    set_nonblocking(&ours)?;
    let mut command = command(program, "--control-fd", &theirs);
    command.process_group(0).stderr(Stdio::piped());
    sys::pass_only(&mut command, theirs.as_raw_fd());
    Ok((start(command, program, true)?, ours))
}

/// Starts the program so that it outlives this process, listening on `control`; its standard
/// error goes to `log`.
pub(super) fn spawn_detached(program: &Path, control: &OwnedFd, log: File) -> Result<Child, Error> {
    let mut command = command(program, "--listen-fd", control);
    command.stderr(log);
    sys::leave_session(&mut command);
    sys::pass_only(&mut command, control.as_raw_fd());
    start(command, program, false)
}

/// Connects to a control socket that a VMM listens on; non-blocking.
pub(super) fn connect(path: &Path) -> Result<ControlSocket, Error> {
    let failed = |e: Errno| Error::Connect(e.into());
    let flags = SocketFlags::CLOEXEC;
    let kind = SocketType::SEQPACKET;
    let socket = socket_with(AddressFamily::UNIX, kind, flags, None).map_err(failed)?;
    // Waits while many others connect; the VMM accepts at once otherwise.
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).map_err(failed)?).map_err(failed)?;
    let socket = ControlSocket::new(socket);
    set_nonblocking(&socket)?;
    Ok(socket)
}

/// Binds and opens a control socket for a VMM to listen on.
pub(super) fn listen(path: &Path) -> Result<OwnedFd, Error> {
    let failed = |e: Errno| Error::Socket(SocketError::Io(e.into()));
    let flags = SocketFlags::CLOEXEC;
    let kind = SocketType::SEQPACKET;
    let socket = socket_with(AddressFamily::UNIX, kind, flags, None).map_err(failed)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).map_err(failed)?).map_err(failed)?;
    rustix::net::listen(&socket, BACKLOG).map_err(failed)?;
    Ok(socket)
}

fn set_nonblocking(socket: &ControlSocket) -> Result<(), Error> {
    rustix::io::ioctl_fionbio(socket, true).map_err(|e| Error::Socket(SocketError::Io(e.into())))
}

fn command(program: &Path, option: &str, socket: &impl AsRawFd) -> std::process::Command {
    let mut command = std::process::Command::new(program);
    command
        .arg(option)
        .arg(socket.as_raw_fd().to_string())
        .env_clear()
        .envs(std::env::var_os(LOG).map(|level| (LOG, level)))
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command
}

fn start(command: std::process::Command, program: &Path, owned: bool) -> Result<Child, Error> {
    let mut command = tokio::process::Command::from(command);
    command.kill_on_drop(owned);
    command.spawn().map_err(|source| Error::Spawn { path: program.to_owned(), source })
}
