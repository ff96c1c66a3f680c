//! The few things the manager asks of the system that no safe interface offers; all `unsafe` of
//! this crate is here.

use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use coppice_vmm_protocol::ControlSocket;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// First descriptor after standard input, output and error.
const FIRST_OTHER_FD: libc::c_uint = 3;

/// Has the child start with descriptors 0, 1, 2 and `fd` only, whatever this process inherited.
/// `fd` keeps its number and must stay open until the child is started.
pub(crate) fn pass_only(command: &mut Command, fd: RawFd) {
    // SAFETY: the closure runs between fork and exec and makes async-signal-safe system calls
    // only.
    unsafe { command.pre_exec(move || close_others_on_exec(fd)) };
}

/// Has the child lead a session of its own, so that no terminal's end reaches it.
pub(crate) fn leave_session(command: &mut Command) {
    let set_session = || match rustix::process::setsid() {
        Ok(_) => Ok(()),
        Err(errno) => Err(errno.into()),
    };
    // SAFETY: the closure runs between fork and exec and makes one async-signal-safe system call.
    unsafe { command.pre_exec(set_session) };
}

/// Takes a descriptor that this process was started with; no child will have it. To be called at
/// most once for each number.
pub(crate) fn take_inherited(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: sets a flag of a descriptor; no memory is involved, and a number that is none is
    // refused.
    let ret = unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
    if ret < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open, was passed to this process at its start for this purpose,
    // and nothing else here owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Has the runtime watch a control socket, which must be non-blocking.
pub(crate) fn watch(socket: ControlSocket) -> io::Result<AsyncFd<ControlSocket>> {
    // SAFETY: a `ControlSocket` owns its descriptor and never replaces or closes it before it is
    // dropped; its `as_raw_fd` always gives that descriptor.
    let registered = unsafe { AsyncFd::register(socket) };
    registered.map_err(io::Error::from)
}

/// Has the runtime watch a descriptor for when it can be read.
pub(crate) fn watch_readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` owns its descriptor, never replaces it, and closes it when dropped.
    let registered = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
    registered.map_err(io::Error::from)
}

/// Marks every descriptor from [`FIRST_OTHER_FD`] on as close-on-exec, except `keep`.
fn close_others_on_exec(keep: RawFd) -> io::Result<()> {
    // SAFETY: the call takes numbers only and closes nothing before exec.
    let ret = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            FIRST_OTHER_FD,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    if ret < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: clears a flag of a descriptor; no memory is involved.
    let ret = unsafe { libc::fcntl(keep, libc::F_SETFD, 0) };
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
