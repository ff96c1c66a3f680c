//! The few things the manager asks of the system that no safe interface offers; all `unsafe` of
//! this crate is here.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use coppice_vmm_protocol::ControlSocket;
use tokio::io::unix::AsyncFd;

/// First descriptor after standard input, output and error.
const FIRST_OTHER_FD: libc::c_uint = 3;

/// Has the child start with descriptors 0, 1 and 2 only, whatever this process inherited.
pub(crate) fn pass_standard_descriptors_only(command: &mut Command) {
    // SAFETY: the closure runs between fork and exec and makes one async-signal-safe system call.
    unsafe { command.pre_exec(close_others_on_exec) };
}

/// Has the runtime watch a control socket, which must be non-blocking.
pub(crate) fn watch(socket: ControlSocket) -> io::Result<AsyncFd<ControlSocket>> {
    // SAFETY: a `ControlSocket` owns its descriptor and never replaces or closes it before it is
    // dropped; its `as_raw_fd` always gives that descriptor.
    let registered = unsafe { AsyncFd::register(socket) };
    registered.map_err(io::Error::from)
}

/// Marks every descriptor from [`FIRST_OTHER_FD`] on as close-on-exec.
fn close_others_on_exec() -> io::Result<()> {
    // SAFETY: the call takes numbers only and closes nothing before exec.
    let ret = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            FIRST_OTHER_FD,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
