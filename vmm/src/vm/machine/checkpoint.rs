//! Taking checkpoints of a machine, and bringing it to one.

use std::fs::File;
use std::io;
use std::time::Instant;

use coppice_image::{HeaderInfo, Image, Kind, PageSet, SealedMap, encode_maps};
use coppice_vmm_protocol::{CheckpointInfo, RollbackInfo};

use super::Machine;
use super::fork;
use super::saved::{MachinePart, Saved, SavedError, Shape, State, VERSION};
use crate::boot::KernelState;
use crate::checkpoint::{Capture, Finished, Guard, Job, JobError, Order, Part, Spare};
use crate::devices::virtio::blk::{DiskError, Layering, SealedLayer};
use crate::memory::backing::Replaced;
use crate::memory::{backing, pages};
use crate::vcpu::Vcpu;
use crate::vcpu::state::{VcpuState, forget_translations};
use crate::vm::board::{Clock, Irqchip};
use crate::vm::devices::Devices;
use crate::vm::error::VmError;
use crate::vm::spec::{Chain, CheckpointOrder, RollbackOrder};

/// The build that goes into a checkpoint's header.
const BUILD: &str = concat!("coppice-vmm ", env!("CARGO_PKG_VERSION"));

/// Most pages that are copied aside in a pause without having been asked for in the background:
/// 1 GiB.
const SPARE_PAGES: u64 = 1 << 18;

/// A checkpoint under way.
pub(in crate::vm) struct Running {
    pub(in crate::vm) job: Job,
    id: String,
    started: Instant,
    pause_us: u64,
}

/// A checkpoint that is written and waits to be committed.
pub(in crate::vm) struct Written {
    id: String,
    image: Image,
    pages: PageSet,
}

/// How memory is kept as it is in the pause.
enum Means {
    /// Write-protected, and copied while the machine runs.
    Protect(Guard),
    /// Copied to memory that was made ready.
    Copy(Spare),
}

/// What is taken in the pause.
struct Taken {
    capture: Capture,
    parts: Vec<Part>,
    disks: Vec<File>,
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

fn memory_error(source: io::Error) -> VmError {
    VmError::Step { step: "tell which memory was written", source }
}

impl Machine {
    /// Takes a checkpoint: stops the machine if it is `running`, fixes its state, lets it go on,
    /// and starts writing.
    ///
    /// # Errors
    /// [`VmError`]; the machine is as it was, except that its disks may have gone over to their
    /// new overlays.
    pub(in crate::vm) fn checkpoint(
        &mut self,
        order: CheckpointOrder,
        running: bool,
    ) -> Result<Running, VmError> {
        let started = Instant::now();
        self.check_disks(order.overlays.len())?;
        let CheckpointOrder { id, file, overlays, meta, background } = order;
        let means = if background {
            Means::Protect(Guard::new(&self.write_protection)?)
        } else {
            let pages = self.memory.estimate().map_err(memory_error)?;
            Means::Copy(Spare::new(pages.min(SPARE_PAGES))?)
        };
        let paused = Instant::now();
        if running {
            self.pause();
        }
        let taken = self.take(overlays, meta, means);
        if running {
            self.run();
        }
        let pause_us = micros(paused);
        let Taken { capture, parts, disks } = taken?;
        let info = HeaderInfo {
            cpu: self.identity,
            build: BUILD.to_owned(),
            ram_pages: pages::count(self.vm.ram()),
        };
        let written = capture.selection().pages().clone();
        match Job::start(Order { file, info, parts, capture, disks }) {
            Ok(job) => Ok(Running { job, id, started, pause_us }),
            Err(error) => {
                self.memory.keep(&written);
                Err(error.into())
            }
        }
    }

    /// Every writable disk must have an overlay, and each of them gets a new one.
    fn check_disks(&self, overlays: usize) -> Result<(), VmError> {
        let mut layered = 0;
        for (number, mut disk) in self.devices.disks().enumerate() {
            match disk.layering() {
                Layering::NotNeeded => {}
                Layering::Sealed => layered += 1,
                Layering::Impossible => {
                    return Err(VmError::Disk { number, source: DiskError::NotLayered });
                }
            }
        }
        if layered == overlays {
            Ok(())
        } else {
            Err(VmError::Overlays { disks: layered, overlays })
        }
    }

    /// Fixes the state of the paused machine. What can fail without a trace comes first.
    fn take(&mut self, overlays: Vec<File>, meta: String, means: Means) -> Result<Taken, VmError> {
        let mut parts = self.state()?;
        let sealed = self.seal(overlays)?;
        for (instance, maps) in (0..).zip(&self.unsaved_maps) {
            let data = encode_maps(maps);
            parts.push(Part { kind: Kind::DiskMap, instance, version: VERSION, data });
        }
        let meta = meta.into_bytes();
        parts.push(Part { kind: Kind::Meta, instance: 0, version: VERSION, data: meta });
        let written = self.memory.take_written().map_err(memory_error)?;
        let selection = self.memory.select(written.clone());
        let ram = self.vm.ram();
        let capture = match means {
            Means::Protect(guard) => Capture::protect(ram, selection, self.memory.backing(), guard),
            Means::Copy(spare) => Capture::copy(ram, selection, spare),
        };
        match capture {
            Ok(capture) => Ok(Taken { capture, parts, disks: sealed }),
            Err(error) => {
                self.memory.keep(&written);
                Err(error.into())
            }
        }
    }

    /// vCPUs, interrupt controllers, clock and devices, as sections.
    fn state(&mut self) -> Result<Vec<Part>, VmError> {
        let part = |kind, instance, data| Part { kind, instance, version: VERSION, data };
        let machine = MachinePart { shape: self.shape(), kernel: self.kernel };
        let machine = serde_json::to_vec(&machine)
            .map_err(|source| SavedError::Malformed { what: "machine", source })?;
        let mut parts = vec![part(Kind::Machine, 0, machine)];
        for (instance, vcpu) in (0u32..).zip(&self.vcpus) {
            let index = usize::try_from(instance).unwrap_or_default();
            let failed = |source| SavedError::Vcpu { index, source };
            let state = VcpuState::save(&vcpu.fd(), &mut self.msrs).map_err(failed)?;
            parts.push(part(Kind::Vcpu, instance, state.encode().map_err(failed)?));
        }
        let vm = self.vm.vm();
        let irqchip = Irqchip::save(vm).map_err(SavedError::from)?;
        parts.push(part(Kind::Irqchip, 0, irqchip.encode().map_err(SavedError::from)?));
        let clock = Clock::save(vm).map_err(SavedError::from)?;
        parts.push(part(Kind::Clock, 0, clock.encode().map_err(SavedError::from)?));
        for (instance, saved) in self.devices.save().map_err(SavedError::from)? {
            let version = saved.version;
            parts.push(Part { kind: Kind::Device, instance, version, data: saved.data });
        }
        Ok(parts)
    }

    /// Seals all disks with overlays; gives the files that have to be made durable. The maps are
    /// kept until a checkpoint has them.
    fn seal(&mut self, overlays: Vec<File>) -> Result<Vec<File>, VmError> {
        let mut files = Vec::new();
        let mut overlays = overlays.into_iter();
        self.unsaved_maps.resize_with(overlays.len(), Vec::new);
        let mut maps = self.unsaved_maps.iter_mut();
        for (number, mut disk) in self.devices.disks().enumerate() {
            let failed = |source| VmError::Disk { number, source };
            if disk.layering() != Layering::Sealed {
                continue;
            }
            let (Some(overlay), Some(maps)) = (overlays.next(), maps.next()) else { break };
            let SealedLayer { file, map } = disk.seal(overlay).map_err(failed)?;
            maps.push(map);
            files.push(file.try_clone().map_err(|e| failed(DiskError::Size(e)))?);
        }
        Ok(files)
    }

    /// Waits for the job of a checkpoint.
    ///
    /// # Errors
    /// Why there is no checkpoint; the machine runs on and the next one will have its pages.
    pub(in crate::vm) fn finish(
        &mut self,
        running: Running,
    ) -> Result<(Written, CheckpointInfo), VmError> {
        let Running { job, id, started, pause_us } = running;
        let pages = job.pages().clone();
        match job.finish() {
            Ok(Finished { image, summary }) => {
                let info = CheckpointInfo {
                    pause_us,
                    pages: summary.pages_written,
                    bytes: summary.file_bytes,
                    extents: u64::try_from(summary.extents).unwrap_or(u64::MAX),
                    total_us: micros(started),
                };
                Ok((Written { id, image, pages }, info))
            }
            Err(error) => {
                self.memory.keep(&pages);
                Err(error.into())
            }
        }
    }

    /// Lets the machine stand on a checkpoint that was written.
    ///
    /// # Errors
    /// When its name is not `id`, or the file is not what was written; it stays uncommitted.
    pub(in crate::vm) fn commit(&mut self, written: &Written, id: &str) -> Result<(), VmError> {
        if written.id != id {
            return Err(VmError::CommitId { written: written.id.clone(), asked: id.to_owned() });
        }
        self.memory.advance(&written.image).map_err(SavedError::from)?;
        self.unsaved_maps.iter_mut().for_each(Vec::clear);
        self.standing = Some(written.id.clone());
        Ok(())
    }

    /// A checkpoint that was written will not be committed: the next one must have its pages.
    pub(in crate::vm) fn abandon(&mut self, written: &Written) {
        self.memory.keep(&written.pages);
    }

    fn shape(&self) -> Shape {
        let overlays = self.devices.disk_layers().len();
        Shape { vcpus: self.vcpus.len(), memory_mib: self.memory_mib, overlays }
    }

    /// After [`begin_restore`], sets the rest of the paused machine to what a checkpoint has;
    /// memory and disks are there already. The guest is told that its time line forked.
    ///
    /// # Errors
    /// [`VmError`]; the machine must not run then.
    pub(super) fn restore(&self, state: &State) -> Result<(), VmError> {
        self.set(state)?;
        if let Some(kernel) = &self.kernel {
            fork::reseed(self.vm.ram(), kernel)?;
        }
        self.devices.new_generation(self.vm.ram()).map_err(VmError::Generation)?;
        self.devices.revive();
        Ok(())
    }

    fn set(&self, State { vcpus, irqchip, clock, .. }: &State) -> Result<(), VmError> {
        let shift = clock.shift();
        for (index, (vcpu, state)) in self.vcpus.iter().zip(vcpus).enumerate() {
            let failed = |source| SavedError::Vcpu { index, source };
            state.finish_restore(&vcpu.fd(), shift).map_err(failed)?;
        }
        irqchip.restore(self.vm.vm()).map_err(SavedError::from)?;
        clock.restore(self.vm.vm()).map_err(SavedError::from)?;
        Ok(())
    }

    /// Brings the machine to a checkpoint in place: stops it if it is `running`, and lets it go
    /// on from there.
    ///
    /// # Errors
    /// An inner error leaves the machine as it was, running or not. An outer one means that it
    /// is neither what it was nor what it should be, and must end.
    pub(in crate::vm) fn roll_back(
        &mut self,
        order: RollbackOrder,
        running: bool,
    ) -> Result<Result<RollbackInfo, VmError>, VmError> {
        let target = match self.prepare(order) {
            Ok(target) => target,
            Err(error) => return Ok(Err(error)),
        };
        let paused = Instant::now();
        if running {
            self.pause();
        }
        let (pages, replaced) = self.go_to(target)?;
        if running {
            self.run();
        }
        let pause_us = micros(paused);
        drop(replaced);
        Ok(Ok(RollbackInfo { pause_us, pages }))
    }

    /// Opens and checks all that a rollback needs.
    fn prepare(&self, order: RollbackOrder) -> Result<Target, VmError> {
        self.check_disks(order.disks.len())?;
        let Chain { id, layers, .. } = order.chain;
        let saved = Saved::open(layers)?;
        let kernel = saved.check(&self.shape(), &self.identity)?;
        let chain = saved.chain(pages::count(self.vm.ram()))?;
        let maps = saved.disk_maps(order.disks.len())?;
        let disks = order.disks.into_iter().zip(maps).enumerate();
        let disks = disks
            .map(|(number, ((layers, overlay), maps))| Ok((pair(number, layers, maps)?, overlay)))
            .collect::<Result<_, VmError>>()?;
        let state = saved.state(self.vcpus.len())?;
        Ok(Target { id, kernel, state, chain, disks })
    }

    /// Makes the paused machine the target.
    fn go_to(&mut self, target: Target) -> Result<(u64, Replaced), VmError> {
        let Target { id, kernel, state, chain, disks } = target;
        let written = self.memory.take_written().map_err(memory_error)?;
        let rolled_back = self.memory.roll_back(written, chain);
        let (pages, replaced) = rolled_back.map_err(SavedError::from)?;
        let mut disks = disks.into_iter();
        for (number, mut disk) in self.devices.disks().enumerate() {
            if disk.layering() == Layering::Sealed
                && let Some((layers, overlay)) = disks.next()
            {
                disk.replace(layers, overlay).map_err(|source| VmError::Disk { number, source })?;
            }
        }
        self.unsaved_maps.iter_mut().for_each(Vec::clear);
        self.kernel = kernel;
        for (index, vcpu) in self.vcpus.iter().enumerate() {
            forget_translations(&vcpu.fd()).map_err(|source| SavedError::Vcpu { index, source })?;
        }
        begin_restore(&self.vcpus, &self.devices, &state)?;
        self.restore(&state)?;
        self.standing = Some(id);
        Ok((pages, replaced))
    }
}

/// Sets what of stopped vCPUs and of devices does not depend on guest memory.
///
/// # Errors
/// [`VmError`]; the machine must not run then.
pub(super) fn begin_restore(
    vcpus: &[Vcpu],
    devices: &Devices,
    state: &State,
) -> Result<(), VmError> {
    for (index, (vcpu, state)) in vcpus.iter().zip(&state.vcpus).enumerate() {
        let failed = |source| SavedError::Vcpu { index, source };
        state.begin_restore(&vcpu.fd()).map_err(failed)?;
    }
    devices.restore(&state.devices).map_err(SavedError::from)?;
    Ok(())
}

/// A checkpoint to go back to, checked.
struct Target {
    id: String,
    kernel: Option<KernelState>,
    state: State,
    chain: backing::Chain,
    disks: Vec<(Vec<(File, SealedMap)>, File)>,
}

/// The layers of a disk with their maps.
fn pair(
    number: usize,
    layers: Vec<File>,
    maps: Vec<SealedMap>,
) -> Result<Vec<(File, SealedMap)>, VmError> {
    if layers.len() != maps.len() {
        return Err(VmError::DiskLayers { number, layers: layers.len(), maps: maps.len() });
    }
    Ok(layers.into_iter().zip(maps).collect())
}

impl From<JobError> for VmError {
    fn from(source: JobError) -> Self {
        Self::Job(source)
    }
}
