//! What the process as a whole asks of the kernel: which descriptors it keeps, what happens when
//! its parent dies, how its heap behaves.

use std::io;
use std::os::fd::RawFd;

use super::check;

unsafe extern "C" {
    /// First byte of the program in memory, by the linker.
    safe static __executable_start: u8;
    /// First byte behind its code, by the linker.
    safe static etext: u8;
}

/// Brings this program's code into memory and into the page tables, so that what runs next does
/// not stop at a page fault every few calls. It is a hint: without it everything works as well.
pub fn load_code() {
    let start = &raw const __executable_start;
    let start = start.map_addr(|address| address & !4095);
    let len = (&raw const etext).addr().saturating_sub(start.addr());
    // SAFETY: reads pages of the program itself, which stays mapped, and changes nothing.
    unsafe { libc::madvise(start.cast_mut().cast(), len, libc::MADV_POPULATE_READ) };
}

/// Closes every descriptor but standard input, output and error and `keep`.
///
/// A manager that starts machines from several threads can leak one machine's descriptors into
/// another's process; a leaked control socket would keep a dead manager's machine alive. Only
/// for the very start of the process, when nothing here owns a descriptor yet.
///
/// # Errors
/// Those of `close_range` (Linux 5.9 or later).
pub fn close_inherited_fds(keep: RawFd) -> io::Result<()> {
    let first = u32::try_from(keep).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    if first > 3 {
        close_range(3, first.saturating_sub(1))?;
    }
    close_range(first.max(2).saturating_add(1), u32::MAX)
}

fn close_range(first: u32, last: u32) -> io::Result<()> {
    // SAFETY: the caller guarantees that nothing in this process owns these descriptors.
    check(unsafe { libc::close_range(first, last, 0) }).map(drop)
}

/// Has `signal` sent to this process whenever the thread that started it, or a later foster
/// parent, ends. The receiver must look at the parent's process ID: the end of one thread of a
/// living parent sends the signal too.
///
/// # Errors
/// `EINVAL` for a number that is no signal.
pub fn set_parent_death_signal(signal: libc::c_int) -> io::Result<()> {
    let signal = libc::c_ulong::try_from(signal)
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: sets an attribute of this process; no memory is involved.
    check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, signal) }).map(drop)
}

/// Keeps the C library from giving every thread a heap of its own: the threads of a machine
/// allocate next to nothing while it runs, and each such heap costs memory.
///
/// Without effect, but harmless, once threads have allocated.
pub fn use_one_heap() {
    // SAFETY: sets a tunable of the allocator; no memory is handed over.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// The process ID of this process's parent: 0 when it lives outside of our PID namespace.
pub fn parent_id() -> u32 {
    std::os::unix::process::parent_id()
}
