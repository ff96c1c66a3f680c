//! The processors: what CPUID tells the guest, and the registers they start with.
//!
//! KVM already gives a vCPU the architecture's reset state (a PAT by the book, SYSENTER and
//! SYSCALL registers at zero, the TSC synchronised), so only what differs is set. Application
//! processors wait for the kernel's start-up interrupt, which sets their registers; they need
//! CPUID and model-specific registers only.

mod cpuid;
mod identity;
mod regs;

use std::arch::x86_64::__cpuid;

use coppice_image::CpuIdentity;
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, Msrs, kvm_lapic_state, kvm_msr_entry};
use kvm_ioctls::{Cap, Kvm, VcpuFd};
use thiserror::Error;

use super::BootEntry;

pub(super) use regs::gdt;

/// `IA32_MISC_ENABLE`: fast strings are on; no branch trace, no precise event sampling.
const MISC_ENABLE: u32 = 0x1A0;
const MISC_ENABLE_VALUE: u64 = (1 << 0) | (1 << 11) | (1 << 12);
/// `IA32_MTRR_DEF_TYPE`: memory is cached write-back unless page tables say otherwise.
const MTRR_DEF_TYPE: u32 = 0x2FF;
const MTRR_DEF_TYPE_VALUE: u64 = (1 << 11) | 6;

/// Local APIC registers: the two local interrupt pins, and their delivery modes.
const LVT_LINT0: usize = 0x350;
const LVT_LINT1: usize = 0x360;
const DELIVERY_MODE: u32 = 0b111 << 8;
const DELIVERY_NMI: u32 = 0b100 << 8;
const DELIVERY_EXTINT: u32 = 0b111 << 8;

/// Why a processor cannot be set up.
#[derive(Debug, Error)]
pub enum CpuError {
    /// KVM does not say what processor features it supports.
    #[error("KVM gives no list of processor features")]
    SupportedCpuid(#[source] kvm_ioctls::Error),
    /// The list of features grew over KVM's limit.
    #[error("the processor's features do not fit in KVM's table of {KVM_MAX_CPUID_ENTRIES}")]
    CpuidTable,
    /// KVM refuses a part of the processor's state.
    #[error("KVM refuses the processor's {what}")]
    State {
        /// The part.
        what: &'static str,
        /// What KVM said.
        #[source]
        source: kvm_ioctls::Error,
    },
    /// KVM refuses a model-specific register.
    #[error("KVM refuses the model-specific register {0:#x}")]
    Msr(u32),
}

/// What all processors of a machine have in common; computed once per machine.
#[derive(Debug, Clone)]
pub struct CpuTemplate {
    cpuid: Vec<kvm_bindings::kvm_cpuid_entry2>,
}

impl CpuTemplate {
    /// Makes the processors' features from what the host has: a machine of `count` (1 to 8)
    /// single-threaded cores in one socket.
    ///
    /// # Errors
    /// When KVM does not say what it supports.
    pub fn new(kvm: &Kvm, count: u8) -> Result<Self, CpuError> {
        let supported =
            kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(CpuError::SupportedCpuid)?;
        // KVM leaves this bit to us, because it holds only with its own interrupt controller.
        let tsc_deadline = kvm.check_extension(Cap::TscDeadlineTimer);
        let mut cpuid = cpuid::template(supported.as_slice(), count, tsc_deadline);
        cpuid::set_brand(&mut cpuid, host_leaf);
        Ok(Self { cpuid })
    }

    /// What a machine needs of a processor to run with these features.
    pub fn identity(&self) -> CpuIdentity {
        identity::identity(&self.cpuid)
    }

    /// Sets up vCPU `index` as it is before it starts. The first one of a machine that boots also
    /// needs [`set_entry`], those of a machine that is restored their saved state.
    ///
    /// # Errors
    /// When KVM refuses a part of the state.
    pub fn configure(&self, vcpu: &VcpuFd, index: u8) -> Result<(), CpuError> {
        let mut entries = self.cpuid.clone();
        cpuid::set_apic_id(&mut entries, index);
        let cpuid = CpuId::from_entries(&entries).map_err(|_| CpuError::CpuidTable)?;
        vcpu.set_cpuid2(&cpuid).map_err(state("features"))?;
        set_msrs(vcpu)
    }
}

/// Has the first vCPU start at the `entry` that [`super::load`] gave.
///
/// # Errors
/// When KVM refuses a part of the state.
pub fn set_entry(vcpu: &VcpuFd, entry: &BootEntry) -> Result<(), CpuError> {
    set_local_interrupts(vcpu)?;
    let mut sregs = vcpu.get_sregs().map_err(state("system registers"))?;
    regs::set_system_registers(&mut sregs, entry.protocol);
    vcpu.set_sregs(&sregs).map_err(state("system registers"))?;
    vcpu.set_regs(&regs::registers(entry)).map_err(state("registers"))?;
    vcpu.set_fpu(&regs::fpu()).map_err(state("floating-point state"))
}

fn host_leaf(leaf: u32) -> [u32; 4] {
    let registers = __cpuid(leaf);
    [registers.eax, registers.ebx, registers.ecx, registers.edx]
}

fn state(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> CpuError {
    move |source| CpuError::State { what, source }
}

fn set_msrs(vcpu: &VcpuFd) -> Result<(), CpuError> {
    let msr = |index, data| kvm_msr_entry { index, data, ..Default::default() };
    let wanted = [msr(MISC_ENABLE, MISC_ENABLE_VALUE), msr(MTRR_DEF_TYPE, MTRR_DEF_TYPE_VALUE)];
    let msrs = Msrs::from_entries(&wanted).map_err(|_| CpuError::Msr(MISC_ENABLE))?;
    let taken = vcpu.set_msrs(&msrs).map_err(state("model-specific registers"))?;
    // KVM stops at the first one it does not take.
    wanted.get(taken).map_or(Ok(()), |refused| Err(CpuError::Msr(refused.index)))
}

/// Wires the first processor's local interrupt pins as a PC's firmware does: the interrupt
/// controller of old on the first, NMI on the second.
fn set_local_interrupts(vcpu: &VcpuFd) -> Result<(), CpuError> {
    const WHAT: &str = "local interrupt controller";
    let mut lapic = vcpu.get_lapic().map_err(state(WHAT))?;
    set_delivery_mode(&mut lapic, LVT_LINT0, DELIVERY_EXTINT);
    set_delivery_mode(&mut lapic, LVT_LINT1, DELIVERY_NMI);
    vcpu.set_lapic(&lapic).map_err(state(WHAT))
}

fn set_delivery_mode(lapic: &mut kvm_lapic_state, register: usize, mode: u32) {
    // The bytes are `c_char` by accident of the header file.
    let Some(bytes) = lapic.regs.get_mut(register..register + 4) else { return };
    let mut value = [0u8; 4];
    for (to, from) in value.iter_mut().zip(bytes.iter()) {
        *to = from.cast_unsigned();
    }
    let value = (u32::from_le_bytes(value) & !DELIVERY_MODE) | mode;
    for (to, from) in bytes.iter_mut().zip(value.to_le_bytes()) {
        *to = from.cast_signed();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delivery_mode_leaves_the_other_bits() {
        let mut lapic = kvm_lapic_state::default();
        lapic.regs[LVT_LINT1 + 2] = 1;
        lapic.regs[LVT_LINT1 + 1] = 0x7;
        set_delivery_mode(&mut lapic, LVT_LINT1, DELIVERY_NMI);
        assert_eq!(lapic.regs[LVT_LINT1..LVT_LINT1 + 4], [0, 4, 1, 0]);
    }
}
