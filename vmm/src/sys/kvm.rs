//! Where KVM and this process share memory (guest RAM in memory slots, its dirty log, the page
//! through which a vCPU is told to come out of `KVM_RUN`), and calls that kvm-ioctls lacks.

use std::fmt;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE,
    KVM_MEM_LOG_DIRTY_PAGES, KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, KVMIO, kvm_clear_dirty_log,
    kvm_clear_dirty_log__bindgen_ty_1, kvm_device_attr, kvm_enable_cap, kvm_pre_fault_memory,
    kvm_run, kvm_userspace_memory_region, kvm_xsave,
};
use kvm_ioctls::{VcpuFd, VmFd};
use vm_memory::bitmap::Bitmap;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref};
use vmm_sys_util::{ioctl_iow_nr, ioctl_iowr_nr};

use super::check;

/// Request numbers; the macros make functions of them.
#[allow(missing_docs, reason = "the kernel's documentation says what each request does")]
mod request {
    use super::*;

    ioctl_iowr_nr!(KVM_CLEAR_DIRTY_LOG, KVMIO, 0xC0, kvm_clear_dirty_log);
    ioctl_iowr_nr!(KVM_PRE_FAULT_MEMORY, KVMIO, 0xD5, kvm_pre_fault_memory);
    ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, KVMIO, 0xE1, kvm_device_attr);
    ioctl_iow_nr!(KVM_GET_DEVICE_ATTR, KVMIO, 0xE2, kvm_device_attr);
}
use request::*;

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
        machine.register(0)?;
        Ok(machine)
    }

    /// Registers each region as its slot, or changes the flags of a slot that is registered.
    fn register(&self, flags: u32) -> io::Result<()> {
        for (slot, region) in (0..).zip(self.ram.iter()) {
            let host = u64::try_from(region.as_ptr().addr()).map_err(io::Error::other)?;
            let memory = kvm_userspace_memory_region {
                slot,
                flags,
                guest_phys_addr: region.start_addr().raw_value(),
                memory_size: region.len(),
                userspace_addr: host,
            };
            // SAFETY: the range is a whole live mapping which `self` keeps alive longer than
            // the virtual machine; guest RAM is only accessed as volatile memory.
            unsafe { self.vm.set_user_memory_region(memory) }
                .map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
        }
        Ok(())
    }

    /// Makes KVM keep what it logged until [`VmWithRam::clear_dirty_log`] says otherwise, so that
    /// the log can be looked at without changing it (`KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`).
    ///
    /// # Errors
    /// On kernels older than 5.3.
    pub fn keep_dirty_log(&self) -> io::Result<()> {
        let mut cap =
            kvm_enable_cap { cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, ..Default::default() };
        cap.args[0] = u64::from(KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE);
        self.vm.enable_cap(&cap).map_err(|e| io::Error::from_raw_os_error(e.errno()))
    }

    /// Starts or stops logging the pages that the guest writes, for all of RAM. Each write to a
    /// page not written since costs a fault while this is on.
    ///
    /// # Errors
    /// Those of `KVM_SET_USER_MEMORY_REGION`.
    pub fn log_dirty(&self, on: bool) -> io::Result<()> {
        self.register(if on { KVM_MEM_LOG_DIRTY_PAGES } else { 0 })
    }

    /// The pages of region `slot` that the guest wrote since they were last cleared: a bit for
    /// each page, in words of 64.
    ///
    /// # Errors
    /// Those of `KVM_GET_DIRTY_LOG`, such as `ENOENT` while nothing is logged.
    pub fn dirty_log(&self, slot: u32) -> io::Result<Vec<u64>> {
        let region = usize::try_from(slot).ok().and_then(|at| self.ram.iter().nth(at));
        let region = region.ok_or(io::ErrorKind::InvalidInput)?;
        let size = usize::try_from(region.len()).map_err(io::Error::other)?;
        let failed = |e: kvm_ioctls::Error| io::Error::from_raw_os_error(e.errno());
        self.vm.get_dirty_log(slot, size).map_err(failed)
    }

    /// Forgets the pages whose bits are set in `bitmap`, which starts at page `first` of region
    /// `slot` (a multiple of 64) and covers `pages` pages: they are logged again at the next
    /// write.
    ///
    /// # Errors
    /// Those of `KVM_CLEAR_DIRTY_LOG`.
    pub fn clear_dirty_log(
        &self,
        slot: u32,
        first: u64,
        pages: u32,
        bitmap: &mut [u64],
    ) -> io::Result<()> {
        let words = usize::try_from(pages.div_ceil(64)).map_err(io::Error::other)?;
        if bitmap.len() < words {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let clear = kvm_clear_dirty_log {
            slot,
            num_pages: pages,
            first_page: first,
            __bindgen_anon_1: kvm_clear_dirty_log__bindgen_ty_1 {
                dirty_bitmap: bitmap.as_mut_ptr().cast(),
            },
        };
        // SAFETY: the descriptor is a virtual machine, and the bitmap has a bit for each page
        // named, as checked above.
        check(unsafe { ioctl_with_ref(&self.vm, KVM_CLEAR_DIRTY_LOG(), &clear) }).map(drop)
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

/// Fills the page tables through which the guest reaches `len` bytes of its memory from `start`,
/// as reading them would; those that this process has written to are also ready for writes. Both
/// are multiples of the page size. Returns how many bytes were done, from the start: fewer than
/// asked for when a signal came (`KVM_PRE_FAULT_MEMORY`, Linux 6.11).
///
/// # Errors
/// `ENOTTY` or `EINVAL` on older kernels, `EOPNOTSUPP` where KVM shadows page tables, `EINTR`
/// when a signal came before the first page, `ENOENT` outside of memory slots.
pub fn pre_fault(vcpu: &VcpuFd, start: u64, len: u64) -> io::Result<u64> {
    let mut range = kvm_pre_fault_memory { gpa: start, size: len, ..Default::default() };
    // SAFETY: the descriptor is a vCPU, and the kernel writes to nothing but `range`.
    check(unsafe { ioctl_with_mut_ref(vcpu, KVM_PRE_FAULT_MEMORY(), &mut range) })?;
    Ok(len.saturating_sub(range.size))
}

fn tsc_offset_attr(value: &mut u64) -> kvm_device_attr {
    kvm_device_attr {
        flags: 0,
        group: KVM_VCPU_TSC_CTRL,
        attr: u64::from(KVM_VCPU_TSC_OFFSET),
        addr: ptr::from_mut(value).expose_provenance() as u64,
    }
}

/// What is added to the host's TSC to make the vCPU's
/// (`Documentation/virt/kvm/devices/vcpu.rst`, `KVM_VCPU_TSC_OFFSET`).
///
/// # Errors
/// `ENXIO` and others on kernels older than 5.16.
pub fn tsc_offset(vcpu: &VcpuFd) -> io::Result<u64> {
    let mut offset = 0;
    let mut attr = tsc_offset_attr(&mut offset);
    // SAFETY: the attribute is 64 bits at an address that is live during the call.
    check(unsafe { ioctl_with_mut_ref(vcpu, KVM_GET_DEVICE_ATTR(), &mut attr) })?;
    Ok(offset)
}

/// Sets [`tsc_offset`]. The vCPU's TSC then counts on from the host's, whatever other vCPUs do.
///
/// # Errors
/// As for [`tsc_offset`].
pub fn set_tsc_offset(vcpu: &VcpuFd, mut offset: u64) -> io::Result<()> {
    let attr = tsc_offset_attr(&mut offset);
    // SAFETY: the attribute is 64 bits at an address that is live during the call.
    check(unsafe { ioctl_with_ref(vcpu, KVM_SET_DEVICE_ATTR(), &attr) }).map(drop)
}

/// Sets the floating-point and vector registers.
///
/// # Errors
/// `EINVAL` for state that the processor cannot have.
pub fn set_xsave(vcpu: &VcpuFd, state: &kvm_xsave) -> Result<(), kvm_ioctls::Error> {
    // SAFETY: the kernel reads more than the 4 KiB given only when this process asked for
    // features whose state is larger (`ARCH_REQ_XCOMP_GUEST_PERM`), which it never does.
    unsafe { vcpu.set_xsave(state) }
}
