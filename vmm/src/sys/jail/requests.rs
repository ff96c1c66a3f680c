//! Numbers of the `ioctl` requests in the lists (`Documentation/userspace-api/ioctl`).

#![allow(
    clippy::cast_possible_truncation,
    reason = "constants: sizes of structures, and request numbers, which have 32 bits"
)]

use std::mem::size_of;

use kvm_bindings::{
    KVMIO, kvm_clear_dirty_log, kvm_clock_data, kvm_cpuid2, kvm_debugregs, kvm_device_attr,
    kvm_dirty_log, kvm_enable_cap, kvm_fpu, kvm_ioeventfd, kvm_irqchip, kvm_irqfd, kvm_lapic_state,
    kvm_mp_state, kvm_msr_list, kvm_msrs, kvm_pre_fault_memory, kvm_regs, kvm_sregs,
    kvm_userspace_memory_region, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use vmm_sys_util::ioctl::ioctl_expr;

const UFFDIO: u32 = 0xAA;

const NONE: u32 = 0;
const WRITE: u32 = 1;
const READ: u32 = 2;
const BOTH: u32 = READ | WRITE;

const fn number<T>(direction: u32, kind: u32, number: u32) -> u32 {
    ioctl_expr(direction, kind, number, size_of::<T>() as u32) as u32
}

macro_rules! requests {
    ($($name:ident = $direction:ident $kind:ident $number:literal $type:ty;)*) => {
        $(pub(super) const $name: u32 = number::<$type>($direction, $kind, $number);)*
    };
}

requests! {
    KVM_CREATE_VM = NONE KVMIO 0x01 ();
    KVM_GET_MSR_INDEX_LIST = BOTH KVMIO 0x02 kvm_msr_list;
    KVM_CHECK_EXTENSION = NONE KVMIO 0x03 ();
    KVM_GET_VCPU_MMAP_SIZE = NONE KVMIO 0x04 ();
    KVM_GET_SUPPORTED_CPUID = BOTH KVMIO 0x05 kvm_cpuid2;
    KVM_CREATE_VCPU = NONE KVMIO 0x41 ();
    KVM_GET_DIRTY_LOG = WRITE KVMIO 0x42 kvm_dirty_log;
    KVM_SET_USER_MEMORY_REGION = WRITE KVMIO 0x46 kvm_userspace_memory_region;
    KVM_SET_TSS_ADDR = NONE KVMIO 0x47 ();
    KVM_SET_IDENTITY_MAP_ADDR = WRITE KVMIO 0x48 u64;
    KVM_CREATE_IRQCHIP = NONE KVMIO 0x60 ();
    KVM_GET_IRQCHIP = BOTH KVMIO 0x62 kvm_irqchip;
    KVM_SET_IRQCHIP = READ KVMIO 0x63 kvm_irqchip;
    KVM_IRQFD = WRITE KVMIO 0x76 kvm_irqfd;
    KVM_IOEVENTFD = WRITE KVMIO 0x79 kvm_ioeventfd;
    KVM_SET_CLOCK = WRITE KVMIO 0x7B kvm_clock_data;
    KVM_GET_CLOCK = READ KVMIO 0x7C kvm_clock_data;
    KVM_RUN = NONE KVMIO 0x80 ();
    KVM_GET_REGS = READ KVMIO 0x81 kvm_regs;
    KVM_SET_REGS = WRITE KVMIO 0x82 kvm_regs;
    KVM_GET_SREGS = READ KVMIO 0x83 kvm_sregs;
    KVM_SET_SREGS = WRITE KVMIO 0x84 kvm_sregs;
    KVM_GET_MSRS = BOTH KVMIO 0x88 kvm_msrs;
    KVM_SET_MSRS = WRITE KVMIO 0x89 kvm_msrs;
    KVM_SET_FPU = WRITE KVMIO 0x8D kvm_fpu;
    KVM_GET_LAPIC = READ KVMIO 0x8E kvm_lapic_state;
    KVM_SET_LAPIC = WRITE KVMIO 0x8F kvm_lapic_state;
    KVM_SET_CPUID2 = WRITE KVMIO 0x90 kvm_cpuid2;
    KVM_GET_CPUID2 = BOTH KVMIO 0x91 kvm_cpuid2;
    KVM_GET_MP_STATE = READ KVMIO 0x98 kvm_mp_state;
    KVM_SET_MP_STATE = WRITE KVMIO 0x99 kvm_mp_state;
    KVM_GET_VCPU_EVENTS = READ KVMIO 0x9F kvm_vcpu_events;
    KVM_SET_VCPU_EVENTS = WRITE KVMIO 0xA0 kvm_vcpu_events;
    KVM_GET_DEBUGREGS = READ KVMIO 0xA1 kvm_debugregs;
    KVM_SET_DEBUGREGS = WRITE KVMIO 0xA2 kvm_debugregs;
    KVM_SET_TSC_KHZ = NONE KVMIO 0xA2 ();
    KVM_GET_TSC_KHZ = NONE KVMIO 0xA3 ();
    KVM_ENABLE_CAP = WRITE KVMIO 0xA3 kvm_enable_cap;
    KVM_GET_XSAVE = READ KVMIO 0xA4 kvm_xsave;
    KVM_SET_XSAVE = WRITE KVMIO 0xA5 kvm_xsave;
    KVM_GET_XCRS = READ KVMIO 0xA6 kvm_xcrs;
    KVM_SET_XCRS = WRITE KVMIO 0xA7 kvm_xcrs;
    KVM_KVMCLOCK_CTRL = NONE KVMIO 0xAD ();
    KVM_CLEAR_DIRTY_LOG = BOTH KVMIO 0xC0 kvm_clear_dirty_log;
    KVM_PRE_FAULT_MEMORY = BOTH KVMIO 0xD5 kvm_pre_fault_memory;
    KVM_SET_DEVICE_ATTR = WRITE KVMIO 0xE1 kvm_device_attr;
    KVM_GET_DEVICE_ATTR = WRITE KVMIO 0xE2 kvm_device_attr;
    UFFDIO_REGISTER = BOTH UFFDIO 0x00 [u64; 4];
    UFFDIO_UNREGISTER = READ UFFDIO 0x01 [u64; 2];
    UFFDIO_WRITEPROTECT = BOTH UFFDIO 0x06 [u64; 3];
}

/// Makes a socket non-blocking (`ioctl_fionbio(2)`).
pub(super) const FIONBIO: u32 = 0x5421;
/// Whether a descriptor is a terminal (`ioctl_tty(2)`).
pub(super) const TCGETS: u32 = 0x5401;
