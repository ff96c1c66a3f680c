//! The state of a stopped vCPU: taken for a checkpoint, set for a clone or a rollback.
//!
//! The order of the calls matters (`Documentation/virt/kvm/api.rst`). Reading the run state first
//! makes KVM finish what it has pending, and reading the pending events puts the address of a page
//! fault that waits for its delivery into CR2, before that is read. When setting, the system
//! registers come before the local APIC because they hold its mode, the local APIC before the
//! model-specific registers because the TSC deadline needs its timer's mode, and events come last.
//!
//! Saved state is as untrusted as the file it comes from: KVM checks what it is given, and a
//! value it refuses is an error here.

use std::io;

use kvm_bindings::{
    CpuId, KVM_MAX_MSR_ENTRIES, Msrs, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state,
    kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuFd};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::sys::kvm as sys;

/// The time stamp counter: set through its offset, or last of all registers.
const MSR_TSC: u32 = 0x10;

/// Bits of system registers: paging, physical address extension, long mode in use.
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LMA: u64 = 1 << 10;

/// Most CPUID entries of a saved vCPU; KVM's own limit is 256.
const CPUID_MAX: usize = 256;
/// Most model-specific registers of a saved vCPU; kernels list about 200.
const MSRS_MAX: usize = 4096;

/// Why a vCPU's state cannot be taken or set.
#[derive(Debug, Error)]
pub enum StateError {
    /// KVM does not give or take a part.
    #[error("KVM refuses the vCPU's {what}")]
    Part {
        /// The part.
        what: &'static str,
        /// What KVM said.
        #[source]
        source: kvm_ioctls::Error,
    },
    /// KVM does not take a model-specific register.
    #[error("KVM refuses model-specific register {0:#x} with the value it had")]
    Msr(u32),
    /// The time stamp counter cannot be read or set.
    #[error("the vCPU's time stamp counter cannot be moved")]
    Tsc(#[source] io::Error),
    /// There are more entries than any KVM has.
    #[error("the saved vCPU has too many {0}")]
    TooMany(&'static str),
    /// The saved bytes are not a vCPU.
    #[error("the saved vCPU cannot be decoded")]
    Decode(#[source] postcard::Error),
    /// The state cannot be encoded.
    #[error("the vCPU's state cannot be encoded")]
    Encode(#[source] postcard::Error),
}

fn part(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> StateError {
    move |source| StateError::Part { what, source }
}

/// Everything a vCPU is.
#[derive(Debug, Serialize, Deserialize)]
pub struct VcpuState {
    cpuid: Vec<kvm_cpuid_entry2>,
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    /// The classic 4 KiB area: features that need more are not offered to guests unless the
    /// process asks the kernel for them, which it does not.
    xsave: kvm_xsave,
    xcrs: kvm_xcrs,
    debug_regs: kvm_debugregs,
    lapic: kvm_lapic_state,
    events: kvm_vcpu_events,
    msrs: Vec<kvm_msr_entry>,
    tsc: Tsc,
}

/// The time stamp counter as it was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Tsc {
    /// Counts per millisecond.
    khz: u32,
    /// The guest's count.
    value: u64,
    /// What was added to the host's count to make it, on kernels that tell.
    offset: Option<u64>,
}

/// By how much the host's time stamp counter advanced between the moment a checkpoint was taken
/// and the moment it is restored. It is one number for all vCPUs of a machine, so that their
/// counters stay as they were to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TscShift(pub u64);

/// The model-specific registers that this host's KVM can save.
#[derive(Debug, Clone)]
pub struct MsrList(Vec<u32>);

impl MsrList {
    /// Asks KVM.
    ///
    /// # Errors
    /// When KVM has no list.
    pub fn new(kvm: &Kvm) -> Result<Self, StateError> {
        let list = kvm.get_msr_index_list().map_err(part("list of registers"))?;
        let savable = |index: &u32| *index != MSR_TSC;
        Ok(Self(list.as_slice().iter().copied().filter(savable).collect()))
    }

    /// Reads all registers; those that this vCPU does not have leave the list, so that the next
    /// vCPU and the next time need no second try.
    fn read(&mut self, vcpu: &VcpuFd) -> Result<Vec<kvm_msr_entry>, StateError> {
        let mut entries = Vec::with_capacity(self.0.len());
        while let Some(wanted) = self.0.get(entries.len()..).filter(|rest| !rest.is_empty()) {
            let wanted = wanted.get(..KVM_MAX_MSR_ENTRIES).unwrap_or(wanted);
            let request: Vec<_> =
                wanted.iter().map(|&index| kvm_msr_entry { index, ..Default::default() }).collect();
            let mut msrs =
                Msrs::from_entries(&request).map_err(|_| StateError::TooMany("registers"))?;
            let count = vcpu.get_msrs(&mut msrs).map_err(part("registers"))?;
            entries.extend(msrs.as_slice().iter().take(count));
            if count < request.len() {
                self.0.remove(entries.len());
            }
        }
        Ok(entries)
    }
}

impl VcpuState {
    /// Takes the state of a stopped vCPU.
    ///
    /// # Errors
    /// [`StateError`] when KVM does not give a part.
    pub fn save(vcpu: &VcpuFd, msrs: &mut MsrList) -> Result<Self, StateError> {
        let mp_state = vcpu.get_mp_state().map_err(part("run state"))?;
        let events = vcpu.get_vcpu_events().map_err(part("pending events"))?;
        let regs = vcpu.get_regs().map_err(part("registers"))?;
        let sregs = vcpu.get_sregs().map_err(part("system registers"))?;
        let xsave = vcpu.get_xsave().map_err(part("extended state"))?;
        let xcrs = vcpu.get_xcrs().map_err(part("extended control registers"))?;
        let debug_regs = vcpu.get_debug_regs().map_err(part("debug registers"))?;
        let lapic = vcpu.get_lapic().map_err(part("local interrupt controller"))?;
        let msrs = msrs.read(vcpu)?;
        let tsc = Tsc {
            khz: vcpu.get_tsc_khz().map_err(part("time stamp counter frequency"))?,
            value: read_tsc(vcpu)?,
            offset: sys::tsc_offset(vcpu).ok(),
        };
        let cpuid = vcpu.get_cpuid2(CPUID_MAX).map_err(part("features"))?.as_slice().to_vec();
        Ok(Self { cpuid, mp_state, regs, sregs, xsave, xcrs, debug_regs, lapic, events, msrs, tsc })
    }

    /// Begins to make a stopped vCPU what it was, with all parts that KVM sets without a look at
    /// guest memory, which may be filled meanwhile.
    ///
    /// # Errors
    /// [`StateError`] when KVM does not take a part; the vCPU is then of no use.
    pub fn begin_restore(&self, vcpu: &VcpuFd) -> Result<(), StateError> {
        self.restore_features(vcpu)?;
        vcpu.set_mp_state(self.mp_state).map_err(part("run state"))?;
        vcpu.set_regs(&self.regs).map_err(part("registers"))?;
        if !self.has_entries_in_memory() {
            self.restore_system(vcpu)?;
        }
        sys::set_xsave(vcpu, &self.xsave).map_err(part("extended state"))?;
        vcpu.set_xcrs(&self.xcrs).map_err(part("extended control registers"))?;
        vcpu.set_debug_regs(&self.debug_regs).map_err(part("debug registers"))
    }

    /// Does the rest when guest memory is what it was: some of the model-specific registers are
    /// addresses that KVM writes to. `shift` is the machine's.
    ///
    /// # Errors
    /// [`StateError`] when KVM does not take a part; the vCPU is then of no use.
    pub fn finish_restore(&self, vcpu: &VcpuFd, shift: TscShift) -> Result<(), StateError> {
        if self.has_entries_in_memory() {
            self.restore_system(vcpu)?;
        }
        // Before the registers: the deadline of its timer is among them.
        self.restore_tsc(vcpu, shift)?;
        write_msrs(vcpu, &self.msrs)?;
        vcpu.set_vcpu_events(&self.events).map_err(part("pending events"))
    }

    /// Whether the system registers make KVM read the four entries at the top of 32-bit page
    /// tables from guest memory: with PAE paging outside of long mode.
    fn has_entries_in_memory(&self) -> bool {
        let paging = self.sregs.cr0 & CR0_PG != 0 && self.sregs.cr4 & CR4_PAE != 0;
        paging && self.sregs.efer & EFER_LMA == 0
    }

    /// System registers, then what depends on its mode, which they hold.
    fn restore_system(&self, vcpu: &VcpuFd) -> Result<(), StateError> {
        vcpu.set_sregs(&self.sregs).map_err(part("system registers"))?;
        vcpu.set_lapic(&self.lapic).map_err(part("local interrupt controller"))
    }

    /// KVM does not allow new features once a vCPU has run, and setting the same ones costs time.
    fn restore_features(&self, vcpu: &VcpuFd) -> Result<(), StateError> {
        if self.cpuid.len() > CPUID_MAX {
            return Err(StateError::TooMany("features"));
        }
        let present = vcpu.get_cpuid2(CPUID_MAX).map_err(part("features"))?;
        if present.as_slice() == self.cpuid {
            return Ok(());
        }
        let cpuid =
            CpuId::from_entries(&self.cpuid).map_err(|_| StateError::TooMany("features"))?;
        vcpu.set_cpuid2(&cpuid).map_err(part("features"))
    }

    /// The counter goes on from the value it had, at the rate it had.
    fn restore_tsc(&self, vcpu: &VcpuFd, shift: TscShift) -> Result<(), StateError> {
        let host = vcpu.get_tsc_khz().map_err(part("time stamp counter frequency"))?;
        let same_rate = host == self.tsc.khz;
        if !same_rate {
            vcpu.set_tsc_khz(self.tsc.khz).map_err(part("time stamp counter frequency"))?;
        }
        match self.tsc.offset {
            // With another rate the offset would count in other units.
            Some(offset) if same_rate => {
                sys::set_tsc_offset(vcpu, offset.wrapping_sub(shift.0)).map_err(StateError::Tsc)
            }
            _ => write_msrs(
                vcpu,
                &[kvm_msr_entry { index: MSR_TSC, data: self.tsc.value, ..Default::default() }],
            ),
        }
    }

    /// The state in the form it has in a checkpoint.
    ///
    /// # Errors
    /// Never in practice.
    pub fn encode(&self) -> Result<Vec<u8>, StateError> {
        postcard::to_stdvec(self).map_err(StateError::Encode)
    }

    /// Reads [`VcpuState::encode`]'s form.
    ///
    /// # Errors
    /// When the bytes are something else.
    pub fn decode(bytes: &[u8]) -> Result<Self, StateError> {
        let state: Self = postcard::from_bytes(bytes).map_err(StateError::Decode)?;
        if state.msrs.len() > MSRS_MAX {
            return Err(StateError::TooMany("registers"));
        }
        Ok(state)
    }
}

/// Has KVM forget which addresses the guest's page tables lead where, before a vCPU that has run
/// is restored over other memory. KVM does so by itself only when a control register changes, and
/// a guest that is rolled back often has the same ones: without this it would go on to use what
/// its processor remembers of page tables that are undone.
///
/// # Errors
/// [`StateError`] when KVM does not give or take the system registers; they are changed.
pub fn forget_translations(vcpu: &VcpuFd) -> Result<(), StateError> {
    let sregs = vcpu.get_sregs().map_err(part("system registers"))?;
    // Any other page will do: nothing reads it before the true value is set.
    let other = kvm_sregs { cr3: sregs.cr3 ^ 0x1000, ..sregs };
    vcpu.set_sregs(&other).map_err(part("system registers"))
}

fn read_tsc(vcpu: &VcpuFd) -> Result<u64, StateError> {
    let request = [kvm_msr_entry { index: MSR_TSC, ..Default::default() }];
    let mut msrs = Msrs::from_entries(&request).map_err(|_| StateError::TooMany("registers"))?;
    let count = vcpu.get_msrs(&mut msrs).map_err(part("time stamp counter"))?;
    let value = msrs.as_slice().first().map(|msr| msr.data);
    value.filter(|_| count == 1).ok_or(StateError::Msr(MSR_TSC))
}

fn write_msrs(vcpu: &VcpuFd, entries: &[kvm_msr_entry]) -> Result<(), StateError> {
    for chunk in entries.chunks(KVM_MAX_MSR_ENTRIES) {
        let msrs = Msrs::from_entries(chunk).map_err(|_| StateError::TooMany("registers"))?;
        let taken = vcpu.set_msrs(&msrs).map_err(part("registers"))?;
        // KVM stops at the first one it does not take.
        if let Some(refused) = chunk.get(taken) {
            return Err(StateError::Msr(refused.index));
        }
    }
    Ok(())
}
