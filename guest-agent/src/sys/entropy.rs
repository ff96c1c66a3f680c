//! The kernel's random generator.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

/// Most bytes one call credits.
const MAX_BYTES: usize = coppice_agent_protocol::control::Identity::MAX_ENTROPY;

/// `struct rand_pool_info` of linux/random.h with room for the largest request.
#[repr(C)]
struct RandPoolInfo {
    entropy_count: libc::c_int,
    buf_size: libc::c_int,
    buf: [u8; MAX_BYTES],
}

// _IOW('R', 0x03, int[2]) and _IO('R', 0x07) of linux/random.h.
const RNDADDENTROPY: libc::Ioctl = 0x4008_5203;
const RNDRESEEDCRNG: libc::Ioctl = 0x5207;

/// Mixes `bytes` into the kernel's pool and credits them as full entropy.
///
/// # Errors
/// When there are too many bytes, or the kernel refuses (it wants `CAP_SYS_ADMIN`).
pub(crate) fn add_entropy(device: &File, bytes: &[u8]) -> io::Result<()> {
    let mut info = Box::new(RandPoolInfo { entropy_count: 0, buf_size: 0, buf: [0; MAX_BYTES] });
    let size = libc::c_int::try_from(bytes.len()).map_err(io::Error::other)?;
    info.buf.get_mut(..bytes.len()).ok_or(io::ErrorKind::InvalidInput)?.copy_from_slice(bytes);
    info.buf_size = size;
    info.entropy_count = size.saturating_mul(8);
    let argument: *const RandPoolInfo = &raw const *info;
    // SAFETY: the kernel reads the two counts and `buf_size` bytes after them, all within `info`.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), RNDADDENTROPY, argument) };
    nix::errno::Errno::result(result)?;
    Ok(())
}

/// Makes the kernel's generator reseed from its pool now.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn reseed(device: &File) -> io::Result<()> {
    // SAFETY: this ioctl takes no argument.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), RNDRESEEDCRNG) };
    nix::errno::Errno::result(result)?;
    Ok(())
}
