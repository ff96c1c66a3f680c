//! Reaping, with the raw status: the safe wrappers refuse real-time signals.

use nix::errno::Errno;

/// Status of an ended process as the kernel encodes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RawStatus(pub(crate) i32);

/// Result of one attempt to reap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reaped {
    /// This process ended.
    Process(i32, RawStatus),
    /// All children run.
    AllRunning,
    /// There are no children.
    NoChildren,
}

/// Reaps one ended child, if there is one, without waiting.
pub(crate) fn reap_one() -> Reaped {
    loop {
        let mut status: libc::c_int = 0;
        // SAFETY: waitpid writes one int to where the pointer points, which is `status`.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
        match Errno::result(pid) {
            Ok(0) => return Reaped::AllRunning,
            Ok(pid) => return Reaped::Process(pid, RawStatus(status)),
            Err(Errno::EINTR) => {}
            Err(_) => return Reaped::NoChildren,
        }
    }
}
