//! One machine: built in one way, then moved between its states.

mod checkpoint;
mod fork;
mod memory;
pub(super) mod saved;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;

use coppice_image::{CpuIdentity, SealedMap};
use coppice_vmm_protocol::{VmState, VmStatus};
use vm_memory::bitmap::AtomicBitmap;

use self::checkpoint::begin_restore;
pub(super) use self::checkpoint::{Running, Written};
pub(super) use self::fork::ForkError;
use self::memory::Memory;
use self::saved::{Saved, SavedError, shape_of};
use super::devices::{self, Devices};
use super::error::VmError;
use super::host::Host;
use super::shell::Shell;
use super::spec::{Boot, Chain, Origin, Spec};
use crate::boot::{self, BootConfig, BootEntry, KernelState, cpu};
use crate::checkpoint::{Depth, Prefetch, WorkingSet};
use crate::devices::GuestSignals;
use crate::memory::backing::Backing;
use crate::memory::pages;
use crate::memory::{self as ram_memory, GuestRam};
use crate::sys::kvm::VmWithRam;
use crate::sys::thread::Begun;
use crate::sys::uffd::Userfaultfd;
use crate::vcpu::state::MsrList;
use crate::vcpu::{Command, Ending, Vcpu};

/// A machine that was built.
pub(super) struct Machine {
    /// Dropped first, so that no vCPU meets a device that is being taken apart.
    vcpus: Vec<Vcpu>,
    devices: Devices,
    memory: Memory,
    msrs: MsrList,
    identity: CpuIdentity,
    memory_mib: u32,
    /// For each disk with an overlay, the maps of sealed layers that no checkpoint has yet.
    unsaved_maps: Vec<Vec<SealedMap>>,
    /// The checkpoint it stands on, by the manager's name.
    standing: Option<String>,
    /// Where the guest's kernel keeps what its clones must not share.
    kernel: Option<KernelState>,
    /// Brings in what the guest will use.
    prefetch: Option<Prefetch>,
    /// What background checkpoints protect memory with.
    write_protection: Result<Arc<Userfaultfd>, Arc<io::Error>>,
    vm: Arc<VmWithRam<AtomicBitmap>>,
}

impl Machine {
    /// Builds the machine of `spec` from `origin`, in `shell` if there is one, with all vCPUs paused: before
    /// their first instruction, or where a checkpoint has them.
    ///
    /// # Errors
    /// [`VmError`]; nothing is left behind.
    pub(super) fn build(
        host: &Host,
        shell: Option<Shell>,
        spec: Spec,
        origin: Origin,
        signals: &GuestSignals,
    ) -> Result<Self, VmError> {
        match origin {
            Origin::Boot(boot) => {
                let load = |ram: &Arc<GuestRam>, _| load(ram, &boot, &spec);
                let (shell, entry) = fill(host, shell, &spec, load)?;
                if let Some(first) = shell.vcpus.first() {
                    cpu::set_entry(first, &entry)
                        .map_err(|source| VmError::Cpu { index: 0, source })?;
                }
                let backing = Backing::empty(shell.vm.ram());
                let mut machine =
                    Self::assemble(host, shell, spec, Vec::new(), signals, |_, _| Ok(backing))?;
                let first = machine.devices.first_generation(machine.vm.ram());
                first.map_err(VmError::Generation)?;
                machine.kernel = boot::kernel_state(&boot.kernel);
                Ok(machine)
            }
            Origin::Checkpoint(Chain { id, layers, working_set, new_identity }) => {
                let checkpoint = Saved::open(layers)?;
                let chain = checkpoint.chain(ram_memory::pages_of(spec.memory_mib))?;
                let map = move |ram: &Arc<GuestRam>, depth| {
                    let backing = Backing::map(ram, chain).map_err(SavedError::from)?;
                    let ahead = working_set.map(|file| bring_in(ram, &file, depth)).transpose()?;
                    Ok((backing, ahead))
                };
                let (shell, filling) = begin_fill(host, shell, &spec, map)?;
                let shape = shape_of(&spec);
                let kernel = checkpoint.check(&shape, &shell.identity)?;
                let maps = checkpoint.disk_maps(shape.overlays)?;
                let state = checkpoint.state(shell.vcpus.len())?;
                let mut ahead = None;
                let mut machine =
                    Self::assemble(host, shell, spec, maps, signals, |vcpus, devices| {
                        begin_restore(vcpus, devices, &state)?;
                        let (backing, started) = filling.wait()?;
                        ahead = started;
                        Ok(backing)
                    })?;
                machine.kernel = kernel;
                if let Some((prefetch, written)) = ahead {
                    machine.prefetch = Some(prefetch);
                    machine.vcpus.iter().take(1).for_each(|vcpu| vcpu.fault_ahead(written.clone()));
                }
                machine.restore(&state)?;
                if new_identity && let Some(kernel) = &kernel {
                    fork::forget_boot_id(machine.vm.ram(), kernel)?;
                }
                machine.standing = Some(id);
                Ok(machine)
            }
        }
    }

    /// Puts devices and vCPU threads around a shell. `fill` gives what its memory stands on when
    /// it is filled.
    fn assemble(
        host: &Host,
        shell: Shell,
        spec: Spec,
        maps: Vec<Vec<SealedMap>>,
        signals: &GuestSignals,
        fill: impl FnOnce(&[Vcpu], &Devices) -> Result<Backing, VmError>,
    ) -> Result<Self, VmError> {
        let Shell { vm, vcpus: fds, identity, msrs, pagemap, memory_mib, .. } = shell;
        let (vcpu_threads, device_threads) = (shell.vcpu_threads, shell.device_threads);
        let wires = shell.wires;
        let devices = Devices::build(wires, vm.ram(), spec, maps, signals, device_threads)?;
        let vcpus = (0..)
            .zip(fds.into_iter().zip(vcpu_threads))
            .map(|(index, (fd, thread))| {
                let buses = devices.buses();
                Vcpu::start(fd, index, Arc::clone(&vm), buses, signals.clone(), thread)
            })
            .collect::<Result<Vec<_>, _>>()?;
        let memory = Memory::new(Arc::clone(&vm), fill(&vcpus, &devices)?, pagemap);
        let unsaved_maps = Vec::new();
        Ok(Self {
            vcpus,
            devices,
            memory,
            msrs,
            identity,
            memory_mib,
            unsaved_maps,
            standing: None,
            kernel: None,
            prefetch: None,
            write_protection: host.write_protection.clone(),
            vm,
        })
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
        let mut status = VmStatus {
            state,
            exits,
            balloon_mib: None,
            disk_layers: self.devices.disk_layers(),
            checkpoint: self.standing.clone(),
            memory_layers: self.memory.layers(),
            memory_stats: BTreeMap::new(),
        };
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

    /// Writes down which pages of its checkpoint the machine has used.
    pub(super) fn record_working_set(&self, file: &File) -> Result<(), VmError> {
        self.memory.record_working_set(file).map_err(VmError::Record)
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

/// Loads the kernel and what goes with it.
fn load(ram: &GuestRam, boot: &Boot, spec: &Spec) -> Result<BootEntry, VmError> {
    let config = BootConfig {
        kernel: &boot.kernel,
        initrd: boot.initrd.as_ref(),
        cmdline: &boot.cmdline,
        vcpus: spec.vcpus,
        virtio_devices: devices::virtio_count(spec),
    };
    Ok(boot::load(ram, &config)?)
}

/// Brings in what a record says that the guest will use: copies what it writes, has a thread read
/// the rest, and returns the thread and the addresses of what was copied. Without a record that
/// makes sense the guest comes by its pages itself.
fn bring_in(
    ram: &Arc<GuestRam>,
    record: &File,
    depth: Depth,
) -> Result<(Prefetch, Vec<Range<u64>>), VmError> {
    let set = WorkingSet::read(record, pages::count(ram)).unwrap_or_default();
    let addresses = set.written_addresses(ram);
    if let Err(error) = set.copy_written(ram) {
        tracing::debug!(%error, "the pages that the guest writes were not copied ahead");
    }
    let prefetch = Prefetch::start(Arc::clone(ram), set, depth).map_err(VmError::Prefetch)?;
    Ok((prefetch, addresses))
}

/// Fills the memory of the shell that is there, or of one made meanwhile.
fn fill<T: Send>(
    host: &Host,
    shell: Option<Shell>,
    spec: &Spec,
    by: impl FnOnce(&Arc<GuestRam>, Depth) -> Result<T, VmError> + Send,
) -> Result<(Shell, T), VmError> {
    let Some(shell) = shell else { return Shell::with(host, spec.vcpus, spec.memory_mib, by) };
    shell.check(spec.vcpus, spec.memory_mib)?;
    let filled = by(shell.vm.ram(), Depth::PageCache)?;
    Ok((shell, filled))
}

/// Memory that is filled or being filled.
enum Filling<T> {
    Done(T),
    Begun(Begun<Result<T, VmError>>),
}

impl<T> Filling<T> {
    fn wait(self) -> Result<T, VmError> {
        match self {
            Self::Done(filled) => Ok(filled),
            Self::Begun(begun) => begun.wait().map_err(VmError::Loader)?,
        }
    }
}

/// As [`fill`], but in a shell that is there a thread of its own fills the memory while this one
/// goes on; it ends then.
fn begin_fill<T: Send + 'static>(
    host: &Host,
    shell: Option<Shell>,
    spec: &Spec,
    by: impl FnOnce(&Arc<GuestRam>, Depth) -> Result<T, VmError> + Send + 'static,
) -> Result<(Shell, Filling<T>), VmError> {
    let Some(mut shell) = shell else {
        let (shell, filled) = Shell::with(host, spec.vcpus, spec.memory_mib, by)?;
        return Ok((shell, Filling::Done(filled)));
    };
    shell.check(spec.vcpus, spec.memory_mib)?;
    let ram = Arc::clone(shell.vm.ram());
    let filling = match shell.loader.take() {
        Some(thread) => {
            let fill = move || by(&ram, Depth::PageCache);
            Filling::Begun(thread.begin(fill).map_err(VmError::Loader)?)
        }
        None => Filling::Done(by(&ram, Depth::PageCache)?),
    };
    Ok((shell, filling))
}
