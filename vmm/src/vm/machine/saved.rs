//! A checkpoint as it was found on disk: opened, checked and taken apart before anything of the
//! machine changes.

use std::fs::File;

use coppice_image::{
    CpuIdentity, CpuMismatch, Image, Kind, MapError, ReadError, SealedMap, decode_maps,
};
use coppice_vmm_protocol::ErrorKind;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::boot::KernelState;
use crate::devices;
use crate::memory::backing::{BackingError, Chain};
use crate::vcpu::state::{StateError, VcpuState};
use crate::vm::board::{BoardError, Clock, Irqchip};
use crate::vm::spec::Spec;

/// Version of the sections this module writes and reads; devices have their own.
pub(super) const VERSION: u16 = 1;

/// Why a checkpoint cannot be restored.
#[derive(Debug, Error)]
pub enum SavedError {
    /// A file is damaged.
    #[error("checkpoint layer {layer} cannot be read")]
    Read {
        /// Its position, from the root.
        layer: usize,
        /// What is wrong.
        #[source]
        source: ReadError,
    },
    /// A part is missing or has another version.
    #[error(
        "the checkpoint has no {0} that this version understands: restore it with the version of \
         coppice-vmm that wrote it"
    )]
    Missing(&'static str),
    /// A part is not what it should be.
    #[error("the checkpoint's {what} cannot be understood")]
    Malformed {
        /// The part.
        what: &'static str,
        /// What is wrong.
        #[source]
        source: serde_json::Error,
    },
    /// It is of a machine with other properties.
    #[error("the checkpoint is of a machine with {saved}, which this one has not")]
    Shape {
        /// What the checkpoint's machine has.
        saved: String,
    },
    /// It is of another kind of processor.
    #[error(transparent)]
    Cpu(#[from] CpuMismatch),
    /// Its memory does not fit.
    #[error(transparent)]
    Memory(#[from] BackingError),
    /// A vCPU cannot be restored.
    #[error("vCPU {index} cannot be restored")]
    Vcpu {
        /// The vCPU.
        index: usize,
        /// What is wrong.
        #[source]
        source: StateError,
    },
    /// Interrupt controllers or clocks cannot be restored.
    #[error(transparent)]
    Board(#[from] BoardError),
    /// A device cannot be restored.
    #[error(transparent)]
    Device(#[from] devices::StateError),
    /// A disk's layers cannot be understood.
    #[error("the layers of disk {disk} in the checkpoint cannot be understood")]
    Disk {
        /// The disk.
        disk: usize,
        /// What is wrong.
        #[source]
        source: MapError,
    },
    /// There are no layers.
    #[error("a checkpoint without layers cannot be restored")]
    NoLayers,
}

impl SavedError {
    /// The failure's class.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::Checkpoint
    }
}

/// The section about the machine as a whole.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MachinePart {
    pub(super) shape: Shape,
    /// Where the guest's kernel keeps what its clones must not share.
    pub(super) kernel: Option<KernelState>,
}

/// The properties of a machine that a checkpoint depends on and that the file's header lacks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Shape {
    pub(super) vcpus: usize,
    pub(super) memory_mib: u32,
    /// Disks with an overlay.
    pub(super) overlays: usize,
}

/// All of a machine but its memory and disks.
pub(super) struct State {
    /// In order.
    pub(super) vcpus: Vec<VcpuState>,
    pub(super) irqchip: Irqchip,
    pub(super) clock: Clock,
    /// By instance number.
    pub(super) devices: Vec<(u32, devices::Saved)>,
}

/// A checkpoint and what it stands on.
pub(super) struct Saved {
    images: Vec<Image>,
}

impl Saved {
    /// Opens the files, the root first.
    ///
    /// # Errors
    /// [`SavedError`]: one is not a checkpoint.
    pub(super) fn open(files: Vec<File>) -> Result<Self, SavedError> {
        if files.is_empty() {
            return Err(SavedError::NoLayers);
        }
        let open =
            |(layer, file)| Image::open(file).map_err(|source| SavedError::Read { layer, source });
        Ok(Self { images: (0..).zip(files).map(open).collect::<Result<_, _>>()? })
    }

    fn top(&self) -> Result<&Image, SavedError> {
        self.images.last().ok_or(SavedError::NoLayers)
    }

    /// Guest RAM on these layers.
    ///
    /// # Errors
    /// [`SavedError`]: they do not fit the machine.
    pub(super) fn chain(&self, ram_pages: u64) -> Result<Chain, SavedError> {
        Ok(Chain::new(&self.images, ram_pages)?)
    }

    /// Whether a machine of `shape` on this host can be what was saved; gives what is known of
    /// its kernel.
    ///
    /// # Errors
    /// [`SavedError::Shape`], [`SavedError::Cpu`] or damage.
    pub(super) fn check(
        &self,
        shape: &Shape,
        host: &CpuIdentity,
    ) -> Result<Option<KernelState>, SavedError> {
        let data = self.section(Kind::Machine, 0, "machine")?;
        let MachinePart { shape: saved, kernel } = serde_json::from_slice(&data)
            .map_err(|source| SavedError::Malformed { what: "machine", source })?;
        if saved != *shape {
            let Shape { vcpus, memory_mib, overlays } = saved;
            let saved = format!("{vcpus} vCPUs, {memory_mib} MiB and {overlays} writable disks");
            return Err(SavedError::Shape { saved });
        }
        self.top()?.info().cpu.fits_on(host)?;
        Ok(kernel)
    }

    fn section(
        &self,
        kind: Kind,
        instance: u32,
        what: &'static str,
    ) -> Result<Vec<u8>, SavedError> {
        let layer = self.images.len() - 1;
        let section = self
            .top()?
            .section(kind, instance)
            .map_err(|source| SavedError::Read { layer, source })?;
        let section = section.filter(|section| section.version == VERSION);
        section.map(|section| section.data).ok_or(SavedError::Missing(what))
    }

    /// The state of a machine with `vcpus` vCPUs.
    ///
    /// # Errors
    /// Damage.
    pub(super) fn state(&self, vcpus: usize) -> Result<State, SavedError> {
        let vcpus = self.vcpus(vcpus)?;
        let (irqchip, clock) = self.board()?;
        Ok(State { vcpus, irqchip, clock, devices: self.devices()? })
    }

    /// The vCPUs in order.
    fn vcpus(&self, count: usize) -> Result<Vec<VcpuState>, SavedError> {
        (0u32..)
            .zip(0..count)
            .map(|(instance, index)| {
                let data = self.section(Kind::Vcpu, instance, "vCPU")?;
                VcpuState::decode(&data).map_err(|source| SavedError::Vcpu { index, source })
            })
            .collect()
    }

    /// Interrupt controllers and clock.
    fn board(&self) -> Result<(Irqchip, Clock), SavedError> {
        let irqchip = Irqchip::decode(&self.section(Kind::Irqchip, 0, "interrupt controllers")?)?;
        let clock = Clock::decode(&self.section(Kind::Clock, 0, "clock")?)?;
        Ok((irqchip, clock))
    }

    /// The devices by instance number.
    fn devices(&self) -> Result<Vec<(u32, devices::Saved)>, SavedError> {
        let top = self.top()?;
        let layer = self.images.len() - 1;
        top.instances(Kind::Device)
            .into_iter()
            .map(|instance| {
                let section = top
                    .section(Kind::Device, instance)
                    .map_err(|source| SavedError::Read { layer, source })?
                    .ok_or(SavedError::Missing("device"))?;
                let saved = devices::Saved { version: section.version, data: section.data };
                Ok((instance, saved))
            })
            .collect()
    }

    /// For each of `count` disks with an overlay, the maps of its sealed layers, the lowest
    /// first: those that each checkpoint of the chain added.
    ///
    /// # Errors
    /// Damage.
    pub(super) fn disk_maps(&self, count: usize) -> Result<Vec<Vec<SealedMap>>, SavedError> {
        let mut maps: Vec<Vec<SealedMap>> = (0..count).map(|_| Vec::new()).collect();
        for (layer, image) in self.images.iter().enumerate() {
            for (disk, maps) in maps.iter_mut().enumerate() {
                let instance = u32::try_from(disk).map_err(|_| SavedError::Missing("disk"))?;
                let section = image
                    .section(Kind::DiskMap, instance)
                    .map_err(|source| SavedError::Read { layer, source })?
                    .filter(|section| section.version == VERSION)
                    .ok_or(SavedError::Missing("disk"))?;
                let added = decode_maps(&section.data);
                maps.extend(added.map_err(|source| SavedError::Disk { disk, source })?);
            }
        }
        Ok(maps)
    }
}

/// The shape of a machine to be built.
pub(super) fn shape_of(spec: &Spec) -> Shape {
    Shape {
        vcpus: usize::from(spec.vcpus),
        memory_mib: spec.memory_mib,
        overlays: spec.disks.iter().filter(|disk| disk.overlay.is_some()).count(),
    }
}
