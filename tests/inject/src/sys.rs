//! Two calls for all signals, the real-time ones among them, for which `nix` has no names.

use nix::errno::Errno;
use nix::libc::{self, c_int};
use nix::unistd::Pid;

/// Waits for a stop or the end of any thread that is followed; nothing when there is none left.
pub(crate) fn wait() -> Result<Option<(Pid, c_int)>, Errno> {
    let mut status = 0;
    // SAFETY: `status` has room for what the kernel writes.
    match Errno::result(unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL) }) {
        Ok(thread) => Ok(Some((Pid::from_raw(thread), status))),
        Err(Errno::ECHILD) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Lets a thread go on to its next call, with a signal unless it is 0.
pub(crate) fn resume(thread: Pid, signal: c_int) -> Result<(), Errno> {
    let nothing = std::ptr::null_mut::<libc::c_void>();
    let signal = std::ptr::without_provenance_mut::<libc::c_void>(
        usize::try_from(signal).map_err(|_| Errno::EINVAL)?,
    );
    // SAFETY: the request takes a number where others take an address.
    let ret = unsafe { libc::ptrace(libc::PTRACE_SYSCALL, thread.as_raw(), nothing, signal) };
    Errno::result(ret).map(drop)
}
