//! The two places where KVM and this process share memory: guest RAM in memory slots, and the
//! page through which a vCPU is told to come out of `KVM_RUN`.

use std::fmt;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use kvm_bindings::{kvm_run, kvm_userspace_memory_region};
use kvm_ioctls::{VcpuFd, VmFd};
use vm_memory::bitmap::Bitmap;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// A KVM virtual machine together with the memory in its slots, so that neither can outlive what
/// it needs. Keep it alive, too, as long as any vCPU of the machine.
pub struct VmWithRam<B: Bitmap> {
    // Dropped first.
    vm: VmFd,
    ram: Arc<GuestMemoryMmap<B>>,
}

impl<B: Bitmap> fmt::Debug for VmWithRam<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VmWithRam").field("vm", &self.vm.as_raw_fd()).finish_non_exhaustive()
    }
}

impl<B: Bitmap> VmWithRam<B> {
    /// Registers each region of `ram` as one memory slot, numbered in order of address, without
    /// dirty logging.
    ///
    /// # Errors
    /// Those of `KVM_SET_USER_MEMORY_REGION`.
    pub fn new(vm: VmFd, ram: Arc<GuestMemoryMmap<B>>) -> io::Result<Self> {
        let machine = Self { vm, ram };
        for (slot, region) in (0..).zip(machine.ram.iter()) {
            let host = u64::try_from(region.as_ptr().addr()).map_err(io::Error::other)?;
            let memory = kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: region.start_addr().raw_value(),
                memory_size: region.len(),
                userspace_addr: host,
            };
            // SAFETY: the range is a whole live mapping which `machine` keeps alive longer than
            // the virtual machine; guest RAM is only accessed as volatile memory.
            unsafe { machine.vm.set_user_memory_region(memory) }
                .map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
        }
        Ok(machine)
    }

    /// The virtual machine.
    pub fn vm(&self) -> &VmFd {
        &self.vm
    }

    /// The memory in its slots.
    pub fn ram(&self) -> &Arc<GuestMemoryMmap<B>> {
        &self.ram
    }
}

/// A second mapping of the page that a vCPU shares with KVM, for threads other than its own.
///
/// With it a vCPU is brought out of `KVM_RUN` without a lost wake-up: first
/// [`RunPage::set_immediate_exit`], then the signal. A vCPU about to enter sees the flag, one
/// that is inside gets the signal.
#[derive(Debug)]
pub struct RunPage {
    page: *mut kvm_run,
}

// SAFETY: the mapping is owned, lives as long as the value, and is accessed only by atomic and
// volatile operations.
unsafe impl Send for RunPage {}
// SAFETY: as above.
unsafe impl Sync for RunPage {}

impl RunPage {
    const SIZE: usize = 4096;

    /// Maps the page of `vcpu`.
    ///
    /// # Errors
    /// Those of `mmap`.
    pub fn new(vcpu: &VcpuFd) -> io::Result<Self> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice; every vCPU has at least
        // this one page.
        let page = unsafe {
            libc::mmap(ptr::null_mut(), Self::SIZE, prot, libc::MAP_SHARED, vcpu.as_raw_fd(), 0)
        };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { page: page.cast() })
    }

    /// Sets or clears the flag that makes `KVM_RUN` complete pending I/O and return `EINTR`.
    pub fn set_immediate_exit(&self, on: bool) {
        // SAFETY: a projection inside the mapped page, which is larger than the field's offset.
        let field = unsafe { &raw mut (*self.page).immediate_exit };
        // SAFETY: the field is one byte in a live mapping, and all accesses from this process
        // to it are through this function.
        let flag = unsafe { AtomicU8::from_ptr(field) };
        flag.store(u8::from(on), Ordering::SeqCst);
    }

    /// Bytes moved by each single transfer of the port I/O exit just taken: string instructions
    /// move several at once. Meaningless after any other exit.
    pub fn port_io_size(&self) -> usize {
        // SAFETY: a projection inside the mapped page.
        let field = unsafe { &raw const (*self.page).__bindgen_anon_1.io.size };
        // SAFETY: one initialised byte in a live mapping; any value is valid.
        usize::from(unsafe { field.read_volatile() })
    }
}

impl Drop for RunPage {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing refers to it any more.
        unsafe { libc::munmap(self.page.cast(), Self::SIZE) };
    }
}
