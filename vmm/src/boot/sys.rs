//! Positioned reads straight into guest memory.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

/// Reads at most `slice.len()` bytes at `offset` into guest memory, and marks the pages written.
/// Does not use or move the descriptor's own position, which other processes may share.
pub(super) fn read_at<B: BitmapSlice>(
    file: &File,
    offset: u64,
    slice: &mut VolatileSlice<'_, B>,
) -> io::Result<usize> {
    let offset = libc::off64_t::try_from(offset)
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let guard = slice.ptr_guard_mut();
    // SAFETY: the slice is `len` writable bytes of guest memory, mapped while `guard` lives;
    // nothing else assumes that guest memory does not change.
    let read =
        unsafe { libc::pread64(file.as_raw_fd(), guard.as_ptr().cast(), guard.len(), offset) };
    let read = usize::try_from(read).map_err(|_| io::Error::last_os_error())?;
    slice.bitmap().mark_dirty(0, read);
    Ok(read)
}
