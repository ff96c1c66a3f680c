//! Positioned I/O between files and guest memory, without a copy in between, and the calls that
//! free or zero parts of a file.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

use super::check;

/// Pieces given to one system call; more take another call. Small enough for the stack.
pub const MAX_PARTS: usize = 64;

/// Reads from `offset` of a file into guest memory, in the order of `slices`, and marks what was
/// read into as dirty. Returns how many bytes were read: 0 at the end of the file or without
/// slices, and possibly fewer than there is room for.
///
/// # Errors
/// As of `preadv(2)`; never `EINTR`.
pub fn read_at<'a, B: BitmapSlice + 'a>(
    file: BorrowedFd<'_>,
    slices: impl Iterator<Item = VolatileSlice<'a, B>> + Clone,
    offset: u64,
) -> io::Result<usize> {
    let (iovecs, count) = gather(slices.clone());
    let offset = file_offset(offset)?;
    let result = retry(|| {
        // SAFETY: each iovec covers a slice of mapped guest memory, which outlives the call and
        // may change at any time without breaking any assumption of ours; `count` are set.
        unsafe { libc::preadv(file.as_raw_fd(), iovecs.as_ptr(), count, offset) }
    });
    // Even a failed call may have written some of it.
    for slice in slices.take(MAX_PARTS) {
        slice.bitmap().mark_dirty(0, slice.len());
    }
    result
}

/// Writes guest memory, in the order of `slices`, to `offset` of a file. Returns how many bytes
/// were written, possibly fewer than given.
///
/// # Errors
/// As of `pwritev(2)`; never `EINTR`.
pub fn write_at<'a, B: BitmapSlice + 'a>(
    file: BorrowedFd<'_>,
    slices: impl Iterator<Item = VolatileSlice<'a, B>>,
    offset: u64,
) -> io::Result<usize> {
    let (iovecs, count) = gather(slices);
    let offset = file_offset(offset)?;
    retry(|| {
        // SAFETY: each iovec covers a slice of mapped guest memory, which outlives the call and
        // is only read; `count` of them are set.
        unsafe { libc::pwritev(file.as_raw_fd(), iovecs.as_ptr(), count, offset) }
    })
}

/// Frees a range of a file, which then reads as zeroes; the file's length stays.
///
/// # Errors
/// `EOPNOTSUPP` where the file system cannot; others as of `fallocate(2)`.
pub fn punch_hole(file: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<()> {
    fallocate(file, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, offset, len)
}

/// Makes a range of a file read as zeroes and keeps its room reserved; the file's length stays.
///
/// # Errors
/// `EOPNOTSUPP` where the file system cannot; others as of `fallocate(2)`.
pub fn zero_range(file: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<()> {
    fallocate(file, libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE, offset, len)
}

fn fallocate(file: BorrowedFd<'_>, mode: libc::c_int, offset: u64, len: u64) -> io::Result<()> {
    let (offset, len) = (file_offset(offset)?, file_offset(len)?);
    loop {
        // SAFETY: takes plain numbers; the descriptor is open.
        match check(unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, len) }) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other.map(drop),
        }
    }
}

/// The first pieces as the kernel wants them. The mapping behind a slice is there for as long as
/// the slice (no backend of ours maps on demand), so the pointers need no guard.
fn gather<'a, B: BitmapSlice + 'a>(
    slices: impl Iterator<Item = VolatileSlice<'a, B>>,
) -> ([libc::iovec; MAX_PARTS], libc::c_int) {
    let mut iovecs = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; MAX_PARTS];
    let mut count = 0;
    for (iovec, slice) in iovecs.iter_mut().zip(slices) {
        iovec.iov_base = slice.ptr_guard_mut().as_ptr().cast();
        iovec.iov_len = slice.len();
        count += 1;
    }
    (iovecs, count)
}

fn retry(mut call: impl FnMut() -> libc::ssize_t) -> io::Result<usize> {
    loop {
        if let Ok(bytes) = usize::try_from(call()) {
            return Ok(bytes);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

fn file_offset(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}
