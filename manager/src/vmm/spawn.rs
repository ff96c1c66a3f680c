//! Starts the VMM program with nothing but what it needs.

use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use coppice_vmm_protocol::{ControlSocket, SocketError};
use tokio::process::Child;

use super::Error;
use crate::sys;

/// Name of the program, looked for next to our own.
const PROGRAM: &str = "coppice-vmm";
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
    rustix::io::ioctl_fionbio(&ours, true).map_err(|e| Error::Socket(SocketError::Io(e.into())))?;
    let mut command = std::process::Command::new(program);
    command
        .arg("--control-fd")
        .arg(theirs.as_raw_fd().to_string())
        .env_clear()
        .envs(std::env::var_os(LOG).map(|level| (LOG, level)))
        .current_dir("/")
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    sys::pass_only(&mut command, theirs.as_raw_fd());
    let mut command = tokio::process::Command::from(command);
    command.kill_on_drop(true);
    let child =
        command.spawn().map_err(|source| Error::Spawn { path: program.to_owned(), source })?;
    Ok((child, ours))
}
