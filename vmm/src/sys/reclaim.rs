//! Giving pages of guest memory back to the host.

use std::io;

use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

use super::check;

/// Drops the pages of a page-aligned piece of guest memory and marks them as dirty.
///
/// Guest memory is private, so what the guest reads there next is what the mapping starts from:
/// zeroes, or the page of the image. That is a change of the page's content like any write.
///
/// # Errors
/// `EINVAL` for a piece that is not aligned or that is locked in memory.
pub fn drop_pages<B: BitmapSlice>(slice: &VolatileSlice<'_, B>) -> io::Result<()> {
    let pages = slice.ptr_guard_mut();
    // SAFETY: the range is mapped for as long as the slice lives and stays mapped; only its
    // content changes, which guest memory may do at any time.
    let ret = unsafe { libc::madvise(pages.as_ptr().cast(), slice.len(), libc::MADV_DONTNEED) };
    slice.bitmap().mark_dirty(0, slice.len());
    check(ret).map(drop)
}
