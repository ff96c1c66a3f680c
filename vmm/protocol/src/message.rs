//! Requests, replies and events.

use serde::{Deserialize, Serialize};

use crate::spec::{ChainSpec, FdIndex, MachineSpec};

/// One request of the manager.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Chosen by the manager, repeated in the reply.
    pub id: u64,
    /// What to do.
    pub op: Op,
}

/// The operations of a machine's life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Op {
    /// Make what a machine of this shape needs of KVM ahead of time, so that a later
    /// [`Op::Create`] of the same shape is quick. Legal once, first.
    Prepare {
        /// Number of vCPUs.
        vcpus: u8,
        /// Guest RAM in MiB.
        memory_mib: u32,
    },
    /// Build the machine; its vCPUs do not run yet. Legal once, first or after [`Op::Prepare`].
    Create(Box<MachineSpec>),
    /// Let the vCPUs run for the first time.
    Start {},
    /// Stop all vCPUs and quiesce all devices; answered when both are true.
    Pause {},
    /// Undo [`Op::Pause`].
    Resume {},
    /// Write a checkpoint of the machine; it runs on, or stays paused, as it was. Answered with
    /// [`ResultBody::Checkpoint`] when the file is complete and durable. One at a time.
    Checkpoint(CheckpointSpec),
    /// The checkpoint last written is where the manager's store keeps it: the machine stands on it
    /// from now on. Without this, or when the connection closes before, the machine goes on
    /// standing on the one before, and its next checkpoint has the same pages again.
    Commit {
        /// The checkpoint's [`CheckpointSpec::id`].
        id: String,
    },
    /// Bring the machine back to a checkpoint in the same tree; it then runs on, or stays paused,
    /// as it was. Answered with [`ResultBody::Rollback`].
    Rollback(RollbackSpec),
    /// Write down which pages of its checkpoint the machine has used since it started, for
    /// [`ChainSpec::working_set`] of later ones.
    RecordWorkingSet {
        /// An empty file, open for writing.
        file: FdIndex,
    },
    /// End the machine now, without asking the guest.
    Stop {},
    /// Ask for the machine's state and counters. Legal always.
    Status {},
    /// Set the balloon's target size.
    SetBalloon {
        /// How much to take from the guest, in MiB.
        target_mib: u32,
    },
}

/// A checkpoint to take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointSpec {
    /// Name of the new checkpoint, for [`Op::Commit`] and [`VmStatus::checkpoint`]; at most 64
    /// bytes.
    pub id: String,
    /// The empty file it is written to, open for reading and writing.
    pub file: FdIndex,
    /// For each disk with an overlay, in order, the empty file that takes its writes from now
    /// on, open for reading and writing. Also after a failure the disks may have gone over to
    /// them: [`VmStatus::disk_layers`] tells.
    #[serde(default)]
    pub overlays: Vec<FdIndex>,
    /// What the manager wants to find in the file; the VMM does not look at it.
    #[serde(default)]
    pub meta: String,
    /// Whether memory is write-protected and copied while the machine runs, so that the pause
    /// does not depend on how much has to be copied.
    #[serde(default)]
    pub background: bool,
}

/// A checkpoint to go back to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RollbackSpec {
    /// The checkpoint and all it stands on.
    pub chain: ChainSpec,
    /// For each disk with an overlay, in order, what it consists of then.
    #[serde(default)]
    pub disks: Vec<DiskRollback>,
}

/// What a disk consists of after a rollback, apart from its base.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskRollback {
    /// The checkpoint's sealed layers, the lowest first, open for reading.
    pub layers: Vec<FdIndex>,
    /// The empty file that takes the writes, open for reading and writing.
    pub overlay: FdIndex,
}

/// A checkpoint that was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointInfo {
    /// How long the vCPUs stood still, in microseconds.
    pub pause_us: u64,
    /// Pages of guest RAM whose content was written; zero pages are not among them.
    pub pages: u64,
    /// Length of the file in bytes, holes included.
    pub bytes: u64,
    /// Runs of pages in the file.
    pub extents: u64,
    /// From the request to a durable checkpoint, in microseconds.
    pub total_us: u64,
}

/// A rollback that was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RollbackInfo {
    /// How long the vCPUs stood still, in microseconds.
    pub pause_us: u64,
    /// Pages of guest RAM that were brought back.
    pub pages: u64,
}

/// The answer to the request with the same `id`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// The request's `id`.
    pub id: u64,
    /// How it went.
    pub result: ResultBody,
}

/// How a request went.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResultBody {
    /// Done; nothing to tell.
    Done,
    /// Answer to [`Op::Status`].
    Status(VmStatus),
    /// Answer to [`Op::Checkpoint`].
    Checkpoint(CheckpointInfo),
    /// Answer to [`Op::Rollback`].
    Rollback(RollbackInfo),
    /// Refused or failed; the machine is as it was unless an exit event says otherwise.
    Error(ErrorBody),
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// For programs.
    pub kind: ErrorKind,
    /// For people: one line that names the thing and the remedy.
    pub message: String,
}

/// Classes of failure a manager acts upon; each maps to its own exit code of the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// The request is not legal in the machine's present state.
    State,
    /// The packet or a value in the spec is not valid.
    BadRequest,
    /// The kernel file is not a kernel this VMM can load, or it is truncated.
    Kernel,
    /// The initrd cannot be loaded.
    Initrd,
    /// The guest has too little memory for what has to be loaded.
    Memory,
    /// The command line is too long or not ASCII.
    Cmdline,
    /// A disk's backing file cannot be used.
    Disk,
    /// The vsock sockets cannot be used.
    Vsock,
    /// /dev/kvm is absent, not permitted, or lacks something needed.
    Kvm,
    /// A checkpoint file is damaged, of another machine, or not for this host.
    Checkpoint,
    /// The host does not let a checkpoint's memory be copied while the machine runs; nothing was
    /// changed.
    NoBackgroundCopy,
    /// Any other failure of the host.
    Host,
}

/// Something that happened in the machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// What happened.
    pub event: EventBody,
}

/// Kinds of events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventBody {
    /// The machine ended; it is the last packet before the VMM closes the socket and exits.
    Exited {
        /// Why it ended.
        reason: ExitReason,
    },
    /// The guest's kernel announced a panic; an `exited` event follows.
    Panicked {},
}

/// Why a machine ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitReason {
    /// The guest powered itself off.
    PowerOff,
    /// The guest reset itself. A microVM is not restarted in place.
    Reset,
    /// The guest's kernel panicked.
    Panic,
    /// A vCPU met a fault that its kernel had no way left to handle (a triple fault), so that
    /// there was neither a panic nor a reset asked of a device. A guest may do this on purpose,
    /// as Linux does with `reboot=t`.
    TripleFault {
        /// Which vCPU, and where, in one line for people.
        message: String,
    },
    /// The manager asked, its socket closed, or a signal asked.
    Stopped,
    /// The VMM cannot go on; `message` says why.
    Failed {
        /// One line for people.
        message: String,
    },
}

/// States of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// No machine was made yet.
    Empty,
    /// No machine was made yet, but what it needs of KVM was.
    Prepared,
    /// Built, never run.
    Created,
    /// The vCPUs run.
    Running,
    /// The vCPUs are stopped and the devices are quiet.
    Paused,
    /// It ended.
    Exited,
}

/// A machine's state and counters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmStatus {
    /// The state.
    pub state: VmState,
    /// vCPU exits to the VMM so far, all vCPUs together.
    pub exits: u64,
    /// The balloon's present size in MiB, as the guest reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balloon_mib: Option<u32>,
    /// For each disk with an overlay, in order, how many sealed layers lie under the present one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disk_layers: Vec<u32>,
    /// The checkpoint the machine stands on, by the name the manager gave it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
    /// Checkpoint layers that guest RAM stands on.
    #[serde(default)]
    pub memory_layers: u32,
    /// Guest memory statistics from the balloon, in bytes, by the names of the virtio
    /// specification in lower case (`free_memory`, `total_memory`, ...).
    #[serde(default, skip_serializing_if = "std::collections::BTreeMap::is_empty")]
    pub memory_stats: std::collections::BTreeMap<String, u64>,
}

/// What a manager may read from the socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Incoming {
    /// An answer.
    Reply(Reply),
    /// News.
    Event(Event),
}
