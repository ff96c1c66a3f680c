//! What a child does between fork and exec.

use std::ffi::CString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use nix::unistd::{Gid, Uid};

/// The last of the signals with names.
const LAST_SIGNAL: libc::c_int = 31;

/// Who the child becomes and where it starts.
#[derive(Debug)]
pub(crate) struct ChildSetup {
    /// Its user.
    pub(crate) uid: Uid,
    /// Its primary group.
    pub(crate) gid: Gid,
    /// All its groups.
    pub(crate) groups: Vec<Gid>,
    /// Its working directory, entered with the rights of its user.
    pub(crate) cwd: CString,
    /// Whether its standard input is a terminal that becomes its controlling one.
    pub(crate) terminal: bool,
    /// Whether this process may change users; without that right the child stays what it is.
    pub(crate) change_user: bool,
}

/// Makes `command` run `setup` in its child.
pub(crate) fn prepare(command: &mut Command, setup: ChildSetup) {
    let hook = move || enter(&setup);
    // SAFETY: the hook runs in the child after fork. It only makes system calls on memory prepared
    // before the fork: it does not allocate and takes no lock.
    unsafe {
        command.pre_exec(hook);
    }
}

/// Signals that whoever started this process ignored, such as SIGHUP under nohup, would stay
/// ignored in the child.
fn default_signals() {
    for signal in 1..=LAST_SIGNAL {
        // SAFETY: sets a disposition; no memory is involved. It fails for SIGKILL and SIGSTOP,
        // which always have their default.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

fn enter(setup: &ChildSetup) -> io::Result<()> {
    default_signals();
    // A session of its own: signals for the process' group reach what it starts, and nothing else.
    nix::unistd::setsid()?;
    if setup.terminal {
        // SAFETY: this ioctl takes an integer, no pointer.
        let result = unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) };
        nix::errno::Errno::result(result)?;
    }
    if setup.change_user {
        nix::unistd::setgroups(&setup.groups)?;
        nix::unistd::setgid(setup.gid)?;
        nix::unistd::setuid(setup.uid)?;
    }
    nix::unistd::chdir(setup.cwd.as_c_str())?;
    Ok(())
}
