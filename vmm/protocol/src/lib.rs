//! Control protocol between the manager and one `coppice-vmm` process.
//!
//! A `coppice-vmm` process is started with one end of a `SOCK_SEQPACKET` Unix socket pair (its
//! descriptor number is given with `--control-fd`). Every packet is one JSON value: the manager
//! sends [`Request`]s, the VMM answers each with one [`Reply`] that carries the same `id`, and
//! sends [`Event`]s at any time in between. Files, sockets and terminals travel as descriptors
//! (`SCM_RIGHTS`) in the packet that mentions them; the JSON names them by their position
//! ([`FdIndex`]). The VMM therefore opens no path of its own.
//!
//! This crate is a leaf: both sides use it, and it knows neither of them.

mod message;
mod options;
mod socket;
mod spec;
mod sys;

pub use message::{
    CheckpointInfo, CheckpointSpec, DiskRollback, ErrorBody, ErrorKind, Event, EventBody,
    ExitReason, Incoming, Op, Reply, Request, ResultBody, RollbackInfo, RollbackSpec, VmState,
    VmStatus,
};
pub use options::FAST_BOOT_OPTIONS;
pub use socket::{ControlSocket, MAX_FDS, MAX_PACKET, SocketError};
pub use spec::{
    BalloonSpec, BootSpec, ChainSpec, ConsoleSpec, DiskSpec, FdIndex, MachineSpec, Start, VsockSpec,
};
