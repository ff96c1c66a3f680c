//! Memory: the mappings of guest RAM and of what it is filled from, and buffers outside the heap.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use vm_memory::bitmap::Bitmap;
use vm_memory::mmap::MmapRegion;

use super::check;

/// Size and alignment of a transparent huge page on x86-64.
pub const HUGE_PAGE: usize = 2 << 20;

/// Runs `map`, which makes one mapping of `size` bytes at an address of the kernel's choice, so
/// that the mapping is likely to start on a huge page boundary.
///
/// Before Linux 6.7 the kernel does not align mappings for huge pages. It takes the highest gap
/// that fits, though, so a gap of just the right size and place is made first. That is a hint:
/// when it does not work out, the mapping is merely not aligned.
///
/// # Errors
/// Those of `mmap` for the space around the gap.
pub fn with_huge_page_gap<T>(size: usize, map: impl FnOnce() -> T) -> io::Result<T> {
    let too_big = || io::Error::from(io::ErrorKind::OutOfMemory);
    let space = Reservation::new(size.checked_add(HUGE_PAGE).ok_or_else(too_big)?)?;
    let start = space.start();
    let aligned = start.checked_next_multiple_of(HUGE_PAGE).ok_or_else(too_big)?;
    let (below, rest) = space.split(aligned.saturating_sub(start));
    let (gap, above) = rest.split(size);
    drop(gap);
    let mapped = map();
    drop((below, above));
    Ok(mapped)
}

/// Address space that nothing else can be mapped into; given back on drop.
#[derive(Debug)]
struct Reservation {
    start: *mut libc::c_void,
    size: usize,
}

impl Reservation {
    fn new(size: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing one.
        let start = unsafe { libc::mmap(ptr::null_mut(), size, libc::PROT_NONE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { start, size })
    }

    fn start(&self) -> usize {
        self.start.addr()
    }

    /// Splits after `at` bytes, a multiple of the page size.
    fn split(self, at: usize) -> (Self, Self) {
        let at = at.min(self.size);
        let first = Self { start: self.start, size: at };
        let second = Self { start: self.start.wrapping_byte_add(at), size: self.size - at };
        // The two parts own the space now.
        let _ = std::mem::ManuallyDrop::new(self);
        (first, second)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.size == 0 {
            return;
        }
        // SAFETY: this range is ours and holds no data anybody can refer to (PROT_NONE).
        unsafe { libc::munmap(self.start, self.size) };
    }
}

/// Advice on a region of guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Leave it out of core dumps.
    DontDump,
    /// Back it with huge pages where possible.
    HugePages,
}

/// Gives the kernel advice on a whole region.
///
/// # Errors
/// Those of `madvise`, such as `EINVAL` on a kernel built without the feature.
pub fn advise<B: Bitmap>(region: &MmapRegion<B>, advice: Advice) -> io::Result<()> {
    let advice = match advice {
        Advice::DontDump => libc::MADV_DONTDUMP,
        Advice::HugePages => libc::MADV_HUGEPAGE,
    };
    // SAFETY: the range is the whole of a live mapping, and neither advice changes its contents.
    check(unsafe { libc::madvise(region.as_ptr().cast(), region.size(), advice) }).map(drop)
}

/// Puts a private mapping of `file` from `file_offset` over a part of a region; what was there
/// is gone. All numbers are multiples of the page size. KVM notices by itself.
///
/// # Errors
/// Those of `mmap`; a range outside the region is `InvalidInput`.
pub fn map_file_over<B: Bitmap>(
    region: &MmapRegion<B>,
    offset: usize,
    len: usize,
    file: BorrowedFd<'_>,
    file_offset: u64,
) -> io::Result<()> {
    let address = part(region, offset, len)?;
    let file_offset = libc::off_t::try_from(file_offset).map_err(io::Error::other)?;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: the range lies inside a mapping that `region` owns, so nothing else is replaced;
    // guest RAM is only accessed as volatile memory, which may change at any time.
    let mapped = unsafe { libc::mmap(address, len, prot, flags, file.as_raw_fd(), file_offset) };
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Drops what was written to a part of a region since it was mapped: the part shows the file, or
/// the zeroes, under it again.
///
/// # Errors
/// Those of `madvise`; a range outside the region is `InvalidInput`.
pub fn forget_writes<B: Bitmap>(
    region: &MmapRegion<B>,
    offset: usize,
    len: usize,
) -> io::Result<()> {
    let address = part(region, offset, len)?;
    // SAFETY: the range lies inside a live mapping of guest RAM, whose contents may change at any
    // time.
    check(unsafe { libc::madvise(address, len, libc::MADV_DONTNEED) }).map(drop)
}

/// Has the kernel begin to read the files behind a part of a region.
///
/// # Errors
/// Those of `madvise`.
pub fn read_ahead<B: Bitmap>(region: &MmapRegion<B>, offset: usize, len: usize) -> io::Result<()> {
    let address = part(region, offset, len)?;
    // SAFETY: advice on a live mapping, whose content it does not change.
    check(unsafe { libc::madvise(address, len, libc::MADV_WILLNEED) }).map(drop)
}

/// Whether the page at `offset` of a region is in memory. Of files that this process neither owns
/// nor may write to, the kernel says so of every page.
///
/// # Errors
/// Those of `mincore`.
pub fn is_resident<B: Bitmap>(region: &MmapRegion<B>, offset: usize) -> io::Result<bool> {
    const PAGE: usize = 4096;
    let address = part(region, offset, PAGE)?;
    let mut residency = 0;
    // SAFETY: the result for one page of a live mapping is one byte.
    check(unsafe { libc::mincore(address, PAGE, &raw mut residency) })?;
    Ok(residency & 1 != 0)
}

/// Fills the page tables of a part of a region for reading, from the page cache or the disk.
///
/// # Errors
/// Those of `madvise`, such as `EINVAL` on kernels older than 5.14.
pub fn populate<B: Bitmap>(region: &MmapRegion<B>, offset: usize, len: usize) -> io::Result<()> {
    let address = part(region, offset, len)?;
    // SAFETY: reads pages of a live mapping and changes nothing.
    check(unsafe { libc::madvise(address, len, libc::MADV_POPULATE_READ) }).map(drop)
}

/// Makes a part of a region this process's own, as writing to each of its pages would, and fills
/// its page tables. The content stays.
///
/// # Errors
/// Those of `madvise`, such as `EINVAL` on kernels older than 5.14.
pub fn populate_for_writes<B: Bitmap>(
    region: &MmapRegion<B>,
    offset: usize,
    len: usize,
) -> io::Result<()> {
    let address = part(region, offset, len)?;
    // SAFETY: a live mapping, whose content does not change.
    check(unsafe { libc::madvise(address, len, libc::MADV_POPULATE_WRITE) }).map(drop)
}

/// The address of a part of a region.
fn part<B: Bitmap>(
    region: &MmapRegion<B>,
    offset: usize,
    len: usize,
) -> io::Result<*mut libc::c_void> {
    match offset.checked_add(len) {
        Some(end) if end <= region.size() => Ok(region.as_ptr().wrapping_add(offset).cast()),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// A buffer of zeroes outside the heap, given back as a whole, whose pages are all there from
/// the start: filling it takes no page fault.
#[derive(Debug)]
pub struct Buffer {
    start: *mut libc::c_void,
    size: usize,
}

// SAFETY: the mapping is owned and has no ties to a thread.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Makes a buffer of `size` bytes, rounded up to a whole page.
    ///
    /// # Errors
    /// When the host has no memory for it.
    pub fn new(size: usize) -> io::Result<Self> {
        let size = size.max(1).checked_next_multiple_of(HUGE_PAGE);
        let size = size.ok_or(io::ErrorKind::OutOfMemory)?;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing one.
        let start = unsafe { libc::mmap(ptr::null_mut(), size, prot, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let buffer = Self { start, size };
        // Huge pages make it a few faults instead of thousands; without them it works as well.
        // SAFETY: advice on our own mapping.
        unsafe { libc::madvise(start, size, libc::MADV_HUGEPAGE) };
        // SAFETY: as above; on kernels older than 5.14 the pages come when they are touched.
        unsafe { libc::madvise(start, size, libc::MADV_POPULATE_WRITE) };
        Ok(buffer)
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping has this size, is initialised, and is not changed while borrowed.
        unsafe { std::slice::from_raw_parts(self.start.cast(), self.size) }
    }

    /// The bytes, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else has a reference to it.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), self.size) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing refers to it any more.
        unsafe { libc::munmap(self.start, self.size) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gap_leads_to_aligned_mappings() {
        // Another thread may take the gap, so one of several attempts counts.
        let aligned = (0..16).any(|_| {
            let map = || MmapRegion::<()>::new(3 * HUGE_PAGE).unwrap();
            let region = with_huge_page_gap(3 * HUGE_PAGE, map).unwrap();
            region.as_ptr().addr().is_multiple_of(HUGE_PAGE)
        });
        assert!(aligned);
    }
}
