//! Memory: sealed memory files and the mappings of guest RAM.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use vm_memory::bitmap::Bitmap;
use vm_memory::mmap::MmapRegion;

use super::check;

/// Size and alignment of a transparent huge page on x86-64.
pub const HUGE_PAGE: usize = 2 << 20;

/// The seals that make a memory file an immutable image: no write, no change of size.
const IMMUTABLE: libc::c_int = libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// Makes an empty memory file that can be sealed.
///
/// # Errors
/// Those of `memfd_create`.
pub fn memory_file(name: &CStr) -> io::Result<File> {
    // SAFETY: `name` is a terminated string that outlives the call.
    let fd = check(unsafe {
        libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
    })?;
    // SAFETY: the call succeeded, so the descriptor is open and owned by nobody else.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Makes a memory file immutable for everybody and for good.
///
/// # Errors
/// `EBUSY` while it is mapped writable and shared, `EINVAL` for a file that cannot be sealed.
pub fn seal(file: &File) -> io::Result<()> {
    // SAFETY: sets flags of an open descriptor; no memory is involved.
    check(unsafe {
        libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, IMMUTABLE | libc::F_SEAL_SEAL)
    })
    .map(drop)
}

/// Whether nobody can ever change this file's contents or size.
pub fn is_immutable(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: a query on an open descriptor; no memory is involved.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    seals >= 0 && seals & IMMUTABLE == IMMUTABLE
}

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

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_sealed_file_cannot_be_written() {
        let mut file = memory_file(c"test").unwrap();
        file.write_all(b"image").unwrap();
        assert!(!is_immutable(file.as_fd()));
        seal(&file).unwrap();
        assert!(is_immutable(file.as_fd()));
        file.write_all(b"more").unwrap_err();
    }

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
