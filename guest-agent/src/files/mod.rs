//! What the agent does with the guest's file systems, apart from the content of files.
//!
//! Everything here may block, since a guest can mount anything; it is called on helper threads.
//! Like the rest of the file services it acts with the agent's own rights: the user a request
//! names decides where paths start and who owns what is created.

mod entry;
mod list;
mod metadata;
mod remove;
mod watch;

use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use coppice_agent_protocol::{Code, ConnectError};
use nix::unistd::{Uid, chown};

use crate::users::User;

pub(crate) use entry::describe;
pub(crate) use list::list;
pub(crate) use metadata::Metadata;
pub(crate) use remove::remove;
pub(crate) use watch::{Collector, Progress, Scope};

/// Creates the missing ones of a directory and its parents, for the user.
pub(crate) fn ensure_directories(directory: &Path, user: &User) -> io::Result<()> {
    let mut missing: Vec<&Path> =
        directory.ancestors().take_while(|ancestor| !ancestor.exists()).collect();
    while let Some(next) = missing.pop() {
        match std::fs::DirBuilder::new().mode(0o755).create(next) {
            Ok(()) if Uid::effective().is_root() => {
                chown(next, Some(user.uid), Some(user.gid))?;
            }
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    Ok(())
}

/// Creates a directory and its missing parents, for the user. It is an error when it exists.
pub(crate) fn make_directory(path: &Path, user: &User) -> Result<(), ConnectError> {
    match path.metadata() {
        Ok(metadata) if metadata.is_dir() => {
            let message = format!("directory '{}' exists", path.display());
            return Err(ConnectError::new(Code::AlreadyExists, message));
        }
        Ok(_) => {
            let message = format!("path '{}' exists and is not a directory", path.display());
            return Err(ConnectError::new(Code::InvalidArgument, message));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failure("creating directory", path, &error)),
    }
    // With a link that leads nowhere at this path, the last step fails as it should.
    ensure_directories(path, user).map_err(|error| failure("creating directory", path, &error))?;
    if path.is_dir() {
        return Ok(());
    }
    let message = format!("path '{}' exists and is not a directory", path.display());
    Err(ConnectError::new(Code::InvalidArgument, message))
}

/// Renames, replacing what `destination` names, and creates its missing parents for the user.
pub(crate) fn rename(source: &Path, destination: &Path, user: &User) -> Result<(), ConnectError> {
    // Before anything is created for it.
    source.symlink_metadata().map_err(|error| failure("moving", source, &error))?;
    if let Some(parent) = destination.parent() {
        ensure_directories(parent, user)
            .map_err(|error| failure("moving to", destination, &error))?;
    }
    std::fs::rename(source, destination).map_err(|error| {
        let what = format!("moving '{}' to", source.display());
        failure(&what, destination, &error)
    })
}

/// What a caller is told when `what` failed at `path`.
pub(crate) fn failure(what: &str, path: &Path, error: &io::Error) -> ConnectError {
    let code = match error.kind() {
        io::ErrorKind::NotFound => {
            let message = format!("path '{}' does not exist", path.display());
            return ConnectError::new(Code::NotFound, message);
        }
        io::ErrorKind::AlreadyExists => Code::AlreadyExists,
        io::ErrorKind::InvalidInput
        | io::ErrorKind::InvalidFilename
        | io::ErrorKind::NotADirectory
        | io::ErrorKind::IsADirectory => Code::InvalidArgument,
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            Code::PermissionDenied
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Code::ResourceExhausted,
        io::ErrorKind::DirectoryNotEmpty
        | io::ErrorKind::CrossesDevices
        | io::ErrorKind::ResourceBusy => Code::FailedPrecondition,
        _ => match error.raw_os_error() {
            Some(libc::ELOOP) => Code::FailedPrecondition,
            Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM) => Code::ResourceExhausted,
            _ => Code::Internal,
        },
    };
    ConnectError::new(code, format!("{what} '{}': {error}", path.display()))
}
