//! The device file of a work queue: its portal, or `write` where mapping one is not allowed.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::ptr;

use super::arena::Arena;
use super::cpu::{Enqcmd, Movdir64b, store_fence};
use crate::abi::{Descriptor, RECORD_SIZE};

/// Bytes of a portal.
const PAGE: usize = 4096;

/// A mapped portal. The mapping does not outlive this process, nor is it inherited.
#[derive(Debug)]
pub(crate) struct Portal {
    page: *mut u8,
    next: usize,
    // The work queue is bound to this process as long as the file is open.
    _file: File,
}

// SAFETY: the mapping belongs to the process, not to a thread, and only `&mut self` uses it.
unsafe impl Send for Portal {}

/// Opens the device file of a work queue.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

impl Portal {
    /// Maps the portal. Without CAP_SYS_RAWIO kernels refuse with EPERM since INTEL-SA-01084.
    pub(crate) fn map(file: File) -> Result<Self, (File, io::Error)> {
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        let fd = file.as_raw_fd();
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing one.
        let page = unsafe { libc::mmap(ptr::null_mut(), PAGE, libc::PROT_WRITE, flags, fd, 0) };
        if page == libc::MAP_FAILED {
            return Err((file, io::Error::last_os_error()));
        }
        Ok(Self { page: page.cast(), next: 0, _file: file })
    }

    /// The cache line for the next submission: the next of the page, so that writes that follow
    /// each other do not wait for one another.
    fn line(&mut self) -> *mut u8 {
        let line = self.page.wrapping_add(self.next);
        self.next = next_line(self.next);
        line
    }

    /// Submits to a shared queue; false when it is full. What the descriptor names lies in
    /// `arena`, which its owner keeps until the record is complete.
    pub(crate) fn enqueue(&mut self, by: Enqcmd, descriptor: &Descriptor, arena: &Arena) -> bool {
        if !arena.holds(descriptor) {
            return false;
        }
        store_fence();
        let line = self.line();
        // SAFETY: the line lies in the portal, and the arena holds what the descriptor names.
        unsafe { by.submit(line, descriptor) }
    }

    /// Submits to a dedicated queue, which must have room.
    pub(crate) fn push(&mut self, by: Movdir64b, descriptor: &Descriptor, arena: &Arena) -> bool {
        if !arena.holds(descriptor) {
            return false;
        }
        store_fence();
        let line = self.line();
        // SAFETY: the line lies in the portal, and the arena holds what the descriptor names.
        unsafe { by.submit(line, descriptor) };
        true
    }
}

/// Offset of the line after that at `offset`, around within the page.
fn next_line(offset: usize) -> usize {
    (offset + RECORD_SIZE) % PAGE
}

impl Drop for Portal {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own and nothing refers to it any more.
        unsafe { libc::munmap(self.page.cast(), PAGE) };
    }
}

/// Submits by `write`; false when the queue is full.
pub(crate) fn write(file: &mut File, descriptor: &Descriptor, arena: &Arena) -> io::Result<bool> {
    if !arena.holds(descriptor) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    store_fence();
    match file.write(&descriptor.to_bytes()) {
        Ok(RECORD_SIZE) => Ok(true),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_the_portal_take_turns_within_the_page() {
        let mut seen: Vec<usize> =
            std::iter::successors(Some(0), |at| Some(next_line(*at))).take(65).collect();
        assert_eq!(seen.pop(), Some(0));
        assert_eq!(seen, (0..4096).step_by(64).collect::<Vec<_>>());
    }
}
