//! Calls of the bare system that need care: memory that a virtual machine sees.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::ptr;

use kvm_bindings::{kvm_userspace_memory_region, kvm_xsave};
use kvm_ioctls::{VcpuFd, VmFd};

/// Private anonymous memory, given back on drop.
#[derive(Debug)]
pub struct Mapping {
    start: *mut libc::c_void,
    size: usize,
}

impl Mapping {
    /// Maps `size` bytes of zeroes, a multiple of the page size.
    ///
    /// # Errors
    /// Those of `mmap`.
    pub fn new(size: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing one.
        let start = unsafe { libc::mmap(ptr::null_mut(), size, prot, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { start, size })
    }

    /// Asks for huge pages, where the kernel has them.
    ///
    /// # Errors
    /// Those of `madvise`.
    pub fn use_huge_pages(&mut self) -> io::Result<()> {
        // SAFETY: advice on our own mapping, which does not change its content.
        let result = unsafe { libc::madvise(self.start, self.size, libc::MADV_HUGEPAGE) };
        match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()).or_else(|error: io::Error| {
                if error.raw_os_error() == Some(libc::EINVAL) { Ok(()) } else { Err(error) }
            }),
        }
    }

    /// Puts a private mapping of a file of the same size over all of it.
    ///
    /// # Errors
    /// Those of `mmap`.
    pub fn map_file_over(&mut self, file: BorrowedFd<'_>) -> io::Result<()> {
        let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE | libc::MAP_FIXED;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range is ours, and the exclusive borrow says that nobody refers to it.
        let at = unsafe { libc::mmap(self.start, self.size, prot, flags, file.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// The bytes; not for memory that a virtual machine runs in.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has this size, is initialised, and is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), self.size) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing refers to it any more.
        unsafe { libc::munmap(self.start, self.size) };
    }
}

/// Makes `memory` the RAM of `vm` from address 0 on; it has to outlive the machine's vCPUs.
///
/// # Errors
/// Those of `KVM_SET_USER_MEMORY_REGION`.
pub fn register(vm: &VmFd, memory: &Mapping) -> io::Result<()> {
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: memory.size as u64,
        userspace_addr: memory.start.expose_provenance() as u64,
    };
    // SAFETY: the range is a whole live mapping, which the caller keeps.
    unsafe { vm.set_user_memory_region(region) }
        .map_err(|error| io::Error::from_raw_os_error(error.errno()))
}

/// Sets the floating-point and vector registers.
///
/// # Errors
/// Those of `KVM_SET_XSAVE`.
pub fn set_xsave(vcpu: &VcpuFd, state: &kvm_xsave) -> io::Result<()> {
    // SAFETY: the kernel reads more than the 4 KiB given only when this process asked for
    // features whose state is larger, which it never does.
    unsafe { vcpu.set_xsave(state) }.map_err(|error| io::Error::from_raw_os_error(error.errno()))
}
