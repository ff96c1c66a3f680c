//! What this host's KVM can do, found by asking it and by running a tiny guest.
//!
//! Some hosts offer a /dev/kvm that emulates guest kernel code instruction by instruction. It
//! answers every question as hardware would, so the only way to tell is to time the same loop
//! in a guest's kernel mode and outside of it.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvm_bindings::{KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_CAP_PRE_FAULT_MEMORY, kvm_segment};
use kvm_ioctls::{Cap, Kvm, VcpuExit, VcpuFd};
use serde::Serialize;
use thiserror::Error;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use super::host::{self, KvmError};
use super::text::one_line;
use crate::memory::GuestRam;
use crate::sys::cpu::{COUNTDOWN_CODE, countdown};
use crate::sys::kvm::VmWithRam;
use crate::sys::uffd::Userfaultfd;

/// Turns of a short and of a long loop. Only the difference of their times counts, so that what
/// it costs to enter and leave a guest does not. Even where every instruction costs
/// microseconds, the long one takes less than a tenth of a second.
const SHORT: u32 = 2_000;
const LONG: u32 = 22_000;

/// Repetitions; the fastest counts, so that an interruption does not.
const REPETITIONS: usize = 4;

/// A guest whose loop takes this many times longer than the host's is emulated. Hardware is at
/// about 1, the emulation of single instructions in the thousands.
const EMULATED_RATIO: f64 = 50.0;

/// How guest kernel code is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelMode {
    /// By the processor.
    Hardware,
    /// By software, far too slowly for an operating system.
    Emulated,
}

/// What the probe found; printed as one JSON object.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Whether /dev/kvm can be used and the probe guest ran.
    pub kvm: bool,
    /// What is wrong, with the remedy, in one line.
    pub error: Option<String>,
    /// The version of the KVM interface.
    pub api_version: Option<i32>,
    /// How guest kernel code is run.
    pub kernel_mode: Option<KernelMode>,
    /// Time of a loop in guest kernel mode over the time of the same loop on the host.
    pub loop_ns_ratio: Option<f64>,
    /// KVM's answers by capability: 0 is no, 1 is yes, more is a number that belongs to it.
    pub capabilities: BTreeMap<&'static str, i32>,
    /// Whether this user may resolve page faults that KVM takes (`userfaultfd`).
    pub userfaultfd: bool,
}

#[derive(Debug, Error)]
enum ProbeError {
    #[error(transparent)]
    Kvm(#[from] KvmError),
    #[error("the probe guest cannot be made: {what}")]
    Make {
        what: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("the probe guest's memory cannot be written")]
    Memory(#[source] GuestMemoryError),
    #[error("the probe guest did not run to its end: KVM returned {0}")]
    Run(String),
}

/// Looks at the host.
pub fn probe() -> Report {
    let mut report = Report {
        kvm: false,
        error: None,
        api_version: None,
        kernel_mode: None,
        loop_ns_ratio: None,
        capabilities: BTreeMap::new(),
        userfaultfd: Userfaultfd::new().is_ok(),
    };
    if let Err(error) = fill(&mut report) {
        report.error = Some(one_line(&error));
    }
    report
}

fn fill(report: &mut Report) -> Result<(), ProbeError> {
    let kvm = host::open_kvm()?;
    report.api_version = Some(kvm.get_api_version());
    report.capabilities = capabilities(&kvm);
    host::check_capabilities(&kvm)?;
    let guest = loop_time(|turns| time_guest(&kvm, turns))?;
    let host = loop_time(|turns| {
        let start = Instant::now();
        countdown(turns);
        Ok(start.elapsed())
    })?;
    let ratio = guest.as_secs_f64() / host.as_secs_f64().max(f64::MIN_POSITIVE);
    report.loop_ns_ratio = Some((ratio * 100.0).round() / 100.0);
    report.kernel_mode =
        Some(if ratio < EMULATED_RATIO { KernelMode::Hardware } else { KernelMode::Emulated });
    report.kvm = true;
    Ok(())
}

fn capabilities(kvm: &Kvm) -> BTreeMap<&'static str, i32> {
    let raw = |cap: u32| kvm.check_extension_raw(cap.into());
    BTreeMap::from([
        ("irqchip", kvm.check_extension_int(Cap::Irqchip)),
        ("irqfd", kvm.check_extension_int(Cap::Irqfd)),
        ("ioeventfd", kvm.check_extension_int(Cap::Ioeventfd)),
        ("immediate_exit", kvm.check_extension_int(Cap::ImmediateExit)),
        ("tsc_deadline_timer", kvm.check_extension_int(Cap::TscDeadlineTimer)),
        ("tsc_control", kvm.check_extension_int(Cap::TscControl)),
        ("xsave2", kvm.check_extension_int(Cap::Xsave2)),
        ("max_vcpus", kvm.check_extension_int(Cap::MaxVcpus)),
        ("memslots", kvm.check_extension_int(Cap::NrMemslots)),
        ("dirty_log_ring", kvm.check_extension_int(Cap::DirtyLogRing)),
        ("manual_dirty_log_protect2", raw(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2)),
        ("pre_fault_memory", raw(KVM_CAP_PRE_FAULT_MEMORY)),
        ("guest_memfd", kvm.check_extension_int(Cap::GuestMemfd)),
    ])
}

/// Time of the turns by which the long loop is longer.
fn loop_time(
    mut time: impl FnMut(u32) -> Result<Duration, ProbeError>,
) -> Result<Duration, ProbeError> {
    let (mut short, mut long) = (Duration::MAX, Duration::MAX);
    for _ in 0..REPETITIONS {
        short = short.min(time(SHORT)?);
        long = long.min(time(LONG)?);
    }
    Ok(long.saturating_sub(short))
}

const PAGE_TABLES: u64 = 0x1000;
const CODE: u64 = 0x4000;
const MEMORY: usize = 0x8000;
const DONE_PORT: u8 = 0x80;

/// Runs the loop in 64-bit kernel mode, from entry to its port write.
fn time_guest(kvm: &Kvm, turns: u32) -> Result<Duration, ProbeError> {
    let make = |what| move |source| ProbeError::Make { what, source };
    let kvm_make = |what| {
        move |e: kvm_ioctls::Error| ProbeError::Make {
            what,
            source: io::Error::from_raw_os_error(e.errno()),
        }
    };
    let ram = GuestRam::from_ranges(&[(GuestAddress(0), MEMORY)])
        .map_err(|e| ProbeError::Make { what: "memory", source: io::Error::other(e) })?;
    load(&ram, turns).map_err(ProbeError::Memory)?;
    let vm = kvm.create_vm().map_err(kvm_make("virtual machine"))?;
    let vm = VmWithRam::new(vm, Arc::new(ram)).map_err(make("memory slot"))?;
    let mut vcpu = vm.vm().create_vcpu(0).map_err(kvm_make("vCPU"))?;
    enter_long_mode(&vcpu).map_err(kvm_make("registers"))?;
    let start = Instant::now();
    match vcpu.run() {
        Ok(VcpuExit::IoOut(port, _)) if port == u16::from(DONE_PORT) => Ok(start.elapsed()),
        Ok(other) => Err(ProbeError::Run(format!("{other:?}"))),
        Err(error) => Err(ProbeError::Run(error.to_string())),
    }
}

fn load(ram: &GuestRam, turns: u32) -> Result<(), GuestMemoryError> {
    // One huge page at 0, reached through three levels: present and writable, and huge.
    ram.write_obj(PAGE_TABLES + 0x1003, GuestAddress(PAGE_TABLES))?;
    ram.write_obj(PAGE_TABLES + 0x2003, GuestAddress(PAGE_TABLES + 0x1000))?;
    ram.write_obj(0x83u64, GuestAddress(PAGE_TABLES + 0x2000))?;
    let mut code = vec![0xB9];
    code.extend(turns.to_le_bytes());
    code.extend(COUNTDOWN_CODE);
    code.extend([0xE6, DONE_PORT]);
    ram.write_slice(&code, GuestAddress(CODE))
}

fn enter_long_mode(vcpu: &VcpuFd) -> Result<(), kvm_ioctls::Error> {
    const CR0_PE_PG: u64 = 1 | 1 << 31;
    const CR4_PAE: u64 = 1 << 5;
    const EFER_LME_LMA: u64 = 1 << 8 | 1 << 10;
    let code = kvm_segment {
        limit: 0xFFFF_FFFF,
        selector: 8,
        type_: 11,
        present: 1,
        s: 1,
        l: 1,
        g: 1,
        ..Default::default()
    };
    let data = kvm_segment { selector: 16, type_: 3, l: 0, db: 1, ..code };
    let mut sregs = vcpu.get_sregs()?;
    sregs.cs = code;
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.cr0 |= CR0_PE_PG;
    sregs.cr3 = PAGE_TABLES;
    sregs.cr4 |= CR4_PAE;
    sregs.efer |= EFER_LME_LMA;
    vcpu.set_sregs(&sregs)?;
    let mut regs = vcpu.get_regs()?;
    regs.rip = CODE;
    regs.rflags = 2;
    vcpu.set_regs(&regs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_one_line_of_json_with_either_an_answer_or_an_error() {
        let report = probe();
        assert_eq!(report.kvm, report.error.is_none(), "{report:?}");
        assert_eq!(report.kvm, report.kernel_mode.is_some(), "{report:?}");
        let json = serde_json::to_string(&report).unwrap();
        assert!(!json.contains('\n'));
    }

    #[test]
    fn the_loop_takes_time_in_proportion_to_its_turns() {
        // It was not optimised away.
        let time = |turns| {
            let start = Instant::now();
            countdown(turns);
            Ok(start.elapsed())
        };
        assert!(loop_time(time).unwrap() > Duration::ZERO);
    }
}
