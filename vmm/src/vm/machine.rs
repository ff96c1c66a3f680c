//! One machine: built in one way, then moved between its states.

use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use coppice_vmm_protocol::{VmState, VmStatus};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};

use super::devices::{self, Devices};
use super::error::VmError;
use super::host;
use super::spec::Spec;
use crate::boot::cpu::CpuTemplate;
use crate::boot::{self, BootConfig, BootEntry};
use crate::devices::GuestSignals;
use crate::memory::{self, layout};
use crate::sys::kvm::VmWithRam;
use crate::vcpu::{Command, Ending, Vcpu};

/// Stack of the thread that loads the guest; it is the size of an I/O thread's, which then gets
/// the same memory.
const LOADER_STACK: usize = 256 * 1024;

/// How long making the virtual machine has the processors to itself: loading begins when it is
/// done, or after this time, by which it has come to its wait. Without it a loader at work would,
/// on a busy host, keep KVM's new thread from beginning to wait.
const HEAD_START: Duration = Duration::from_micros(500);

/// A machine that was built.
pub(super) struct Machine {
    /// Dropped first, so that no vCPU meets a device that is being taken apart.
    vcpus: Vec<Vcpu>,
    devices: Devices,
    memory_mib: u32,
}

impl Machine {
    /// Builds the machine of `spec`, with all vCPUs paused before their first instruction.
    ///
    /// # Errors
    /// [`VmError`]; nothing is left behind.
    pub(super) fn build(spec: Spec, signals: &GuestSignals) -> Result<Self, VmError> {
        let kvm = host::open_kvm()?;
        host::check_capabilities(&kvm)?;
        let count = spec.vcpus;
        let memory_mib = spec.memory_mib;
        let ram = Arc::new(memory::map(&spec.image, memory_mib)?);
        let (vm, entry) = create_and_load(&kvm, &ram, &spec)?;
        let vm = VmWithRam::new(vm, ram)
            .map_err(|source| VmError::Step { step: "take the guest's memory", source })?;
        let vm = Arc::new(vm);
        let template =
            CpuTemplate::new(&kvm, count).map_err(|source| VmError::Cpu { index: 0, source })?;
        let fds = (0..count)
            .map(|index| create_vcpu(&template, vm.vm(), index, &entry))
            .collect::<Result<Vec<_>, _>>()?;
        let devices = Devices::build(vm.vm(), vm.ram(), spec, signals)?;
        let vcpus = (0..)
            .zip(fds)
            .map(|(index, fd)| {
                Vcpu::start(fd, index, Arc::clone(&vm), devices.buses(), signals.clone())
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { vcpus, devices, memory_mib })
    }

    /// Lets the vCPUs run, for the first time or again.
    pub(super) fn run(&self) {
        self.devices.resume();
        self.vcpus.iter().for_each(|vcpu| vcpu.command(Command::Run));
    }

    /// Stops all vCPUs, then lets the I/O at hand finish. When it returns, guest memory and the
    /// state of vCPUs and devices belong together and do not change.
    pub(super) fn pause(&self) {
        self.vcpus.iter().for_each(|vcpu| vcpu.command(Command::Pause));
        for vcpu in &self.vcpus {
            vcpu.wait_stopped();
        }
        self.devices.pause();
    }

    /// Why a vCPU ended by itself, if one did.
    pub(super) fn ending(&self) -> Option<Ending> {
        self.vcpus.iter().find_map(Vcpu::ending)
    }

    /// The machine's counters. Asking the guest for statistics writes to its memory, so that is
    /// left out unless the machine runs.
    pub(super) fn status(&self, state: VmState) -> VmStatus {
        let exits = self.vcpus.iter().map(Vcpu::exits).fold(0, u64::wrapping_add);
        let mut status =
            VmStatus { state, exits, balloon_mib: None, memory_stats: BTreeMap::new() };
        if let Some(mut balloon) = self.devices.balloon() {
            status.balloon_mib = Some(balloon.actual_mib());
            if state == VmState::Running {
                status.memory_stats = balloon.statistics();
            }
        }
        status
    }

    /// Sets how much the balloon is to take from the guest.
    pub(super) fn set_balloon(&self, target_mib: u32) -> Result<(), VmError> {
        let memory_mib = self.memory_mib;
        let mut balloon = self.devices.balloon().ok_or(VmError::NoBalloon)?;
        if target_mib > memory_mib {
            return Err(VmError::BalloonTarget { target_mib, memory_mib });
        }
        balloon.set_target(target_mib);
        Ok(())
    }

    /// The descriptor that is readable when [`Machine::console_event`] has work.
    pub(super) fn console_fd(&self) -> RawFd {
        self.devices.console_fd()
    }

    /// Serves the host's side of the console.
    pub(super) fn console_event(&self) {
        self.devices.console_event();
    }

    /// The reason the kernel gave for a panic, if the console showed one.
    pub(super) fn panic_text(&self) -> Option<String> {
        self.devices.panic_text()
    }
}

/// Makes the virtual machine and, while that waits, loads the guest into its memory.
///
/// For a new virtual machine KVM moves a thread of its own into our control groups, which waits
/// for an RCU grace period of the host: some milliseconds of nothing, in which a kernel is read.
fn create_and_load(
    kvm: &Kvm,
    ram: &memory::GuestRam,
    spec: &Spec,
) -> Result<(VmFd, BootEntry), VmError> {
    let config = BootConfig {
        kernel: &spec.kernel,
        initrd: spec.initrd.as_ref(),
        cmdline: &spec.cmdline,
        vcpus: spec.vcpus,
        virtio_devices: devices::virtio_count(spec),
    };
    let (tell, made) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let load = move || {
            // Whether it was made or the head start is over, now is the time to load.
            let _ = made.recv_timeout(HEAD_START);
            boot::load(ram, &config)
        };
        let loader = thread::Builder::new()
            .name("loader".into())
            .stack_size(LOADER_STACK)
            .spawn_scoped(scope, load)
            .map_err(VmError::Loader)?;
        // On this thread, the process's main one: KVM names a machine's statistics after it.
        let vm = create_vm(kvm);
        drop(tell);
        let entry = loader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok((vm?, entry))
    })
}

/// Makes the virtual machine with its interrupt controllers.
///
/// There is no 8254 timer: kernels that know KVM's clock and the local APIC's timer need none,
/// and each tick of one would cost exits.
fn create_vm(kvm: &Kvm) -> Result<VmFd, VmError> {
    let vm = kvm.create_vm().map_err(VmError::step("create a virtual machine"))?;
    vm.set_tss_address(layout::KVM_TSS).map_err(VmError::step("place its task state"))?;
    vm.set_identity_map_address(layout::KVM_IDENTITY_MAP)
        .map_err(VmError::step("place its identity map"))?;
    vm.create_irq_chip().map_err(VmError::step("create interrupt controllers"))?;
    Ok(vm)
}

/// Makes vCPU `index`; the first one starts at `entry`, the others wait to be started by it.
fn create_vcpu(
    template: &CpuTemplate,
    vm: &VmFd,
    index: u8,
    entry: &BootEntry,
) -> Result<VcpuFd, VmError> {
    let fd = vm.create_vcpu(index.into()).map_err(VmError::step("create a vCPU"))?;
    let entry = (index == 0).then_some(entry);
    template.configure(&fd, index, entry).map_err(|source| VmError::Cpu { index, source })?;
    Ok(fd)
}
