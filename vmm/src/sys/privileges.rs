//! Giving up what a process may do beyond what any of its user's processes may, for good.

use std::io;

use super::check;

/// Numbers above that of any capability; the kernel says where its own end.
const CAPABILITIES_END: libc::c_ulong = 64;

/// `capset(2)`, version 3: two words for each set.
const CAPABILITY_VERSION: u32 = 0x2008_0522;

#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: libc::c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapabilitySets {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Gives up all capabilities, the right to gain any by executing a program, and core dumps. What
/// is open stays open.
///
/// A process of the superuser is closed to its user's other processes as well (`PR_SET_DUMPABLE`):
/// they are of other machines, or have the privilege to look in all the same, as the manager does.
/// One of another user stays open to that user, whose manager could not read how much memory it
/// takes otherwise.
///
/// # Errors
/// Those of the calls; what was given up until then is gone.
pub fn give_up() -> io::Result<()> {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `none` is a valid limit that is only read.
    check(unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const none) })?;
    // SAFETY: takes a number; cannot fail.
    unsafe { libc::umask(0o077) };
    prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0)?;
    let ambient = libc::c_ulong::try_from(libc::PR_CAP_AMBIENT_CLEAR_ALL);
    prctl(libc::PR_CAP_AMBIENT, ambient.unwrap_or_default(), 0)?;
    empty_bounding_set()?;
    set_no_capabilities()?;
    // SAFETY: takes and gives numbers only.
    if unsafe { libc::geteuid() } == 0 {
        prctl(libc::PR_SET_DUMPABLE, 0, 0)?;
    }
    Ok(())
}

/// Takes everything from the bounding set, which only a privileged process may. To others it means
/// nothing, since they gain no privileges any more.
fn empty_bounding_set() -> io::Result<()> {
    for capability in 0..CAPABILITIES_END {
        match prctl(libc::PR_CAPBSET_DROP, capability, 0) {
            Ok(()) => {}
            // Behind the last one, or not privileged.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EPERM)) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn set_no_capabilities() -> io::Result<()> {
    let header = CapabilityHeader { version: CAPABILITY_VERSION, pid: 0 };
    let sets = [CapabilitySets::default(); 2];
    // SAFETY: header and sets are what this version of the call reads.
    let ret = unsafe { libc::syscall(libc::SYS_capset, &raw const header, sets.as_ptr()) };
    check(libc::c_int::try_from(ret).unwrap_or(-1)).map(drop)
}

fn prctl(option: libc::c_int, first: libc::c_ulong, second: libc::c_ulong) -> io::Result<()> {
    // SAFETY: all options used here take numbers and set attributes of this process.
    check(unsafe { libc::prctl(option, first, second, 0, 0) }).map(drop)
}
