//! The system calls below everything else, each behind a safe function.
//!
//! Nearly all `unsafe` of this crate is here. Functions take and give owned or borrowed
//! descriptors and return `io::Error`; what a failure means is for the caller to say.

pub mod block_io;
pub mod cpu;
pub mod fd;
pub mod jail;
pub mod kvm;
pub mod mem;
pub mod pagemap;
pub mod privileges;
pub mod process;
pub mod random;
pub mod reclaim;
pub mod signal;
pub mod thread;
pub mod uffd;
pub mod vsock;

use std::io;

/// Turns the return value of a system call into a result.
fn check(ret: libc::c_int) -> io::Result<libc::c_int> {
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(ret) }
}
