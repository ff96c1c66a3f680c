//! Why a machine cannot be built or changed, with the class a manager acts upon.

use std::io;
use std::sync::Arc;

use coppice_vmm_protocol::{ErrorBody, ErrorKind};
use thiserror::Error;

use super::devices::DeviceError;
use super::host::KvmError;
use super::machine::ForkError;
use super::machine::saved::SavedError;
use super::policy::Illegal;
use super::spec::SpecError;
use super::text::one_line;
use crate::boot::BootError;
use crate::checkpoint::{CaptureError, JobError};
use crate::devices::legacy::VmGenIdError;
use crate::devices::virtio::blk::DiskError;
use crate::memory::MemoryError;
use crate::vcpu::StartError;
use crate::vcpu::state::StateError;

/// Why a request failed.
#[derive(Debug, Error)]
pub enum VmError {
    /// The request is not legal now.
    #[error(transparent)]
    Illegal(#[from] Illegal),
    /// The machine's description is wrong.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The host's KVM cannot be used.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// KVM refused a step of building the machine.
    #[error("KVM cannot {step}")]
    Step {
        /// What was to be done.
        step: &'static str,
        /// What KVM said.
        #[source]
        source: io::Error,
    },
    /// Guest memory cannot be made.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The kernel and what goes with it cannot be loaded.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// There is no thread to load the guest.
    #[error("the thread that loads the guest cannot be started")]
    Loader(#[source] io::Error),
    /// A vCPU cannot be given its first state.
    #[error("vCPU {index} cannot be set up")]
    Cpu {
        /// The vCPU's number.
        index: u8,
        /// What is wrong.
        #[source]
        source: crate::boot::cpu::CpuError,
    },
    /// A vCPU cannot be started.
    #[error(transparent)]
    Start(#[from] StartError),
    /// A device cannot be made.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A prepared process is for other machines.
    #[error(
        "this process was prepared for a machine of {vcpus} vCPUs and {memory_mib} MiB: use \
         another one"
    )]
    Shape {
        /// vCPUs it has.
        vcpus: usize,
        /// MiB of RAM it has.
        memory_mib: u32,
    },
    /// The thread that brings in a working set cannot be started.
    #[error("the thread that brings in the working set cannot be started")]
    Prefetch(#[source] io::Error),
    /// The working set cannot be written down.
    #[error("the working set was not recorded")]
    Record(#[source] io::Error),
    /// The process cannot look at its own memory.
    #[error("/proc/self/pagemap cannot be opened: mount /proc")]
    Pagemap(#[source] Arc<io::Error>),
    /// A checkpoint cannot be restored, or the state of the machine cannot be saved.
    #[error(transparent)]
    Saved(#[from] SavedError),
    /// The pages of a checkpoint cannot be captured.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// A checkpoint was not written.
    #[error(transparent)]
    Job(JobError),
    /// A disk's layers cannot be changed.
    #[error("disk {number} cannot follow the machine")]
    Disk {
        /// Its position.
        number: usize,
        /// What is wrong.
        #[source]
        source: DiskError,
    },
    /// A request does not have an overlay for each disk that needs one.
    #[error("the machine has {disks} disks with an overlay, but {overlays} new ones were given")]
    Overlays {
        /// Disks that need one.
        disks: usize,
        /// Overlays given.
        overlays: usize,
    },
    /// A request does not have the layers that the checkpoint's disk consists of.
    #[error("disk {number} consists of {maps} layers in the checkpoint, but {layers} were given")]
    DiskLayers {
        /// Its position.
        number: usize,
        /// Layers given.
        layers: usize,
        /// Layers in the checkpoint.
        maps: usize,
    },
    /// Another checkpoint than the one that was written is to be committed.
    #[error("checkpoint {asked:?} cannot be committed: the one written last is {written:?}")]
    CommitId {
        /// The one that waits.
        written: String,
        /// The one asked for.
        asked: String,
    },
    /// KVM does not say what state there is.
    #[error("the machine's state could not be saved on this host")]
    State(#[from] StateError),
    /// The guest's kernel cannot be told apart from other clones.
    #[error(transparent)]
    Fork(#[from] ForkError),
    /// The generation ID cannot be changed.
    #[error(transparent)]
    Generation(VmGenIdError),
    /// There is no machine, though there should be.
    #[error("there is no machine")]
    NoMachine,
    /// There is no balloon to set.
    #[error("the machine has no balloon: create it with one")]
    NoBalloon,
    /// The balloon would take more than there is.
    #[error("the balloon cannot take {target_mib} MiB of a machine with {memory_mib} MiB")]
    BalloonTarget {
        /// What was asked for.
        target_mib: u32,
        /// What there is.
        memory_mib: u32,
    },
}

impl VmError {
    /// For `map_err`: the failure of one step with KVM.
    pub(super) fn step(step: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |e| Self::Step { step, source: io::Error::from_raw_os_error(e.errno()) }
    }

    /// The failure's class.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Illegal(_) => ErrorKind::State,
            Self::Spec(e) => e.kind(),
            Self::Kvm(_) | Self::Step { .. } | Self::Cpu { .. } => ErrorKind::Kvm,
            Self::Memory(_) => ErrorKind::Memory,
            Self::Boot(e) => e.kind(),
            Self::Loader(_) | Self::Start(_) => ErrorKind::Host,
            Self::Device(e) => e.kind(),
            Self::Saved(e) => e.kind(),
            Self::Capture(CaptureError::NotAllowed(_)) => ErrorKind::NoBackgroundCopy,
            Self::Capture(_) => ErrorKind::Memory,
            Self::Job(_) => ErrorKind::Checkpoint,
            Self::Disk { .. } => ErrorKind::Disk,
            Self::State(_) => ErrorKind::Kvm,
            Self::Prefetch(_)
            | Self::Record(_)
            | Self::Fork(_)
            | Self::Pagemap(_)
            | Self::Generation(_) => ErrorKind::Host,
            Self::NoBalloon
            | Self::BalloonTarget { .. }
            | Self::Shape { .. }
            | Self::Overlays { .. }
            | Self::DiskLayers { .. }
            | Self::CommitId { .. }
            | Self::NoMachine => ErrorKind::BadRequest,
        }
    }

    /// The failure as it travels to the manager.
    pub fn to_body(&self) -> ErrorBody {
        ErrorBody { kind: self.kind(), message: one_line(self) }
    }
}
