//! Requests about checkpoints, checked: the internal form of the wire's.

use std::fs::File;
use std::os::fd::OwnedFd;

use coppice_vmm_protocol::{CheckpointSpec, DiskRollback, ErrorKind, FdIndex, RollbackSpec};

use super::descriptors::Descriptors;
use super::{Chain, SpecError, check_id};

/// A checkpoint to take.
#[derive(Debug)]
pub(in crate::vm) struct CheckpointOrder {
    /// The manager's name for it.
    pub(in crate::vm) id: String,
    /// The empty file it goes to.
    pub(in crate::vm) file: File,
    /// The empty files that take the writes of disks with overlays from then on.
    pub(in crate::vm) overlays: Vec<File>,
    /// What the manager wants to find in it.
    pub(in crate::vm) meta: String,
    /// Whether memory is copied while the machine runs.
    pub(in crate::vm) background: bool,
}

/// A checkpoint to go back to.
#[derive(Debug)]
pub(in crate::vm) struct RollbackOrder {
    /// The checkpoint and what it stands on.
    pub(in crate::vm) chain: Chain,
    /// The sealed layers and the empty overlay of each disk with an overlay.
    pub(in crate::vm) disks: Vec<(Vec<File>, File)>,
}

/// The empty file of a request that takes a record.
///
/// # Errors
/// [`SpecError`] when it is something else.
pub(in crate::vm) fn take_record(index: FdIndex, fds: Vec<OwnedFd>) -> Result<File, SpecError> {
    let what = "the file for the working set";
    Descriptors::new(fds).take_empty(index, what, ErrorKind::Checkpoint)
}

impl CheckpointOrder {
    /// Resolves the descriptors of a wire request.
    ///
    /// # Errors
    /// [`SpecError`] for the first one that is wrong.
    pub(in crate::vm) fn from_wire(
        wire: CheckpointSpec,
        fds: Vec<OwnedFd>,
    ) -> Result<Self, SpecError> {
        let mut fds = Descriptors::new(fds);
        let file = fds.take_empty(wire.file, "the checkpoint's file", ErrorKind::Checkpoint)?;
        let overlays = fds.take_overlays(&wire.overlays)?;
        let CheckpointSpec { id, meta, background, .. } = wire;
        check_id(&id)?;
        Ok(Self { id, file, overlays, meta, background })
    }
}

impl RollbackOrder {
    /// Resolves the descriptors of a wire request.
    ///
    /// # Errors
    /// [`SpecError`] for the first one that is wrong.
    pub(in crate::vm) fn from_wire(
        wire: RollbackSpec,
        fds: Vec<OwnedFd>,
    ) -> Result<Self, SpecError> {
        let mut fds = Descriptors::new(fds);
        let chain = fds.take_chain(wire.chain)?;
        let disks = (0usize..)
            .zip(wire.disks)
            .map(|(number, DiskRollback { layers, overlay })| {
                Ok((fds.take_layers(number, layers)?, fds.take_overlay(number, overlay)?))
            })
            .collect::<Result<_, SpecError>>()?;
        Ok(Self { chain, disks })
    }
}
