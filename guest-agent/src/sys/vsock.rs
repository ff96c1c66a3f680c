//! The machine's place in vsock.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// `_IO(7, 0xb9)` of Linux `vm_sockets.h`.
const IOCTL_VM_SOCKETS_GET_LOCAL_CID: libc::c_ulong = 0x7b9;

/// The context ID under which the host reaches this machine, or one of the special values when
/// the kernel has no driver or no device that leads there.
///
/// # Errors
/// When there is no `/dev/vsock`, or it does not know the request.
pub(crate) fn local_cid() -> io::Result<u32> {
    let device = File::open("/dev/vsock")?;
    let mut cid: libc::c_uint = 0;
    // SAFETY: the request writes one unsigned integer through the pointer, which is `cid`.
    let result =
        unsafe { libc::ioctl(device.as_raw_fd(), IOCTL_VM_SOCKETS_GET_LOCAL_CID, &raw mut cid) };
    nix::errno::Errno::result(result)?;
    Ok(cid)
}
