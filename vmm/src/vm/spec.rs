//! What a machine is made of, checked: the internal form of the wire's `MachineSpec`.
//!
//! The wire form is only text and positions of descriptors. Converting it resolves the
//! descriptors and checks every value, so that building a machine needs no further checks of
//! its own; a [`Spec`] is never serialised.

mod descriptors;
mod orders;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;

use coppice_vmm_protocol::{BalloonSpec, ConsoleSpec, ErrorKind, FdIndex, MachineSpec, Start};
use thiserror::Error;

use self::descriptors::{Descriptors, Side};
pub(super) use self::orders::{CheckpointOrder, RollbackOrder, take_record};
use crate::memory::layout::CMDLINE_MAX;
use crate::memory::{MAX_MEMORY_MIB, MIN_MEMORY_MIB};

/// Most vCPUs of a machine.
pub(super) const MAX_VCPUS: u8 = 8;
/// Most block devices of a machine.
pub(super) const MAX_DISKS: usize = 8;
/// Longest disk serial number, in bytes (virtio 1.2 section 5.2.6, VIRTIO_BLK_T_GET_ID).
pub(super) const MAX_SERIAL: usize = 20;
/// Longest name of a checkpoint, in bytes.
const MAX_ID: usize = 64;
/// First context ID a guest may have (virtio 1.2 section 5.10.4); the all-ones ID is reserved.
pub(super) const FIRST_CID: u32 = 3;
/// Longest name of the vsock socket: `_` and a ten-digit port follow, and all must fit into
/// `/proc/self/fd/N/NAME` as a socket address of 108 bytes.
pub(super) const MAX_VSOCK_NAME: usize = 64;

/// A machine to build.
#[derive(Debug)]
pub struct Spec {
    /// Number of vCPUs, 1 to [`MAX_VCPUS`].
    pub vcpus: u8,
    /// Guest RAM in MiB.
    pub memory_mib: u32,
    /// Block devices in the guest's order.
    pub disks: Vec<Disk>,
    /// The vsock device.
    pub vsock: Option<Vsock>,
    /// Where the console reads, readable.
    pub console_input: Option<File>,
    /// Where the console writes, writable.
    pub console_output: Option<File>,
    /// Whether there is an entropy device.
    pub rng: bool,
    /// The balloon; its target is no larger than the memory.
    pub balloon: Option<Balloon>,
}

/// What a machine starts from.
#[derive(Debug)]
pub enum Origin {
    /// A kernel that boots.
    Boot(Boot),
    /// A checkpoint.
    Checkpoint(Chain),
}

/// A checkpoint and what it stands on.
#[derive(Debug)]
pub struct Chain {
    /// The manager's name for the checkpoint.
    pub id: String,
    /// Readable regular files, the root first, the checkpoint itself last.
    pub layers: Vec<File>,
    /// What an earlier machine used of it, readable.
    pub working_set: Option<File>,
    /// Whether the machine is another one than the one that was saved.
    pub new_identity: bool,
}

/// A kernel and what goes with it.
#[derive(Debug)]
pub struct Boot {
    /// The kernel image, a readable regular file.
    pub kernel: File,
    /// The initial RAM disk, a readable regular file.
    pub initrd: Option<File>,
    /// The kernel command line: printable ASCII that fits with its terminating zero.
    pub cmdline: String,
}

/// A block device to build.
#[derive(Debug)]
pub struct Disk {
    /// The backing file: a regular file or block device, writable if it has to be.
    pub file: File,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// The empty regular file that takes the writes.
    pub overlay: Option<File>,
    /// Sealed layers between the two, the lowest first.
    pub layers: Vec<File>,
    /// What GET_ID answers.
    pub serial: String,
}

/// A vsock device to build.
#[derive(Debug)]
pub struct Vsock {
    /// The guest's context ID.
    pub cid: u32,
    /// Takes host-initiated streams.
    pub listener: UnixListener,
    /// The directory of the sockets for guest-initiated streams.
    pub directory: OwnedFd,
    /// The file name that `_PORT` is appended to.
    pub name: String,
}

/// A balloon to build.
#[derive(Debug, Clone, Copy)]
pub struct Balloon {
    /// Its first target in MiB.
    pub target_mib: u32,
    /// Whether free pages are reported.
    pub free_page_reporting: bool,
}

/// What is wrong with a wire spec.
#[derive(Debug, Error)]
pub enum SpecError {
    /// A number is out of range.
    #[error("{what} must be {from} to {to}, not {got}")]
    Range {
        /// What the number is.
        what: &'static str,
        /// Least value.
        from: u64,
        /// Greatest value.
        to: u64,
        /// The value given.
        got: u64,
    },
    /// Guest RAM is out of range.
    #[error("guest memory must be {MIN_MEMORY_MIB} to {MAX_MEMORY_MIB} MiB, not {0}")]
    Memory(u32),
    /// The command line does not fit.
    #[error("the kernel command line has {0} bytes: shorten it to at most {most}", most = CMDLINE_MAX - 1)]
    CmdlineLength(usize),
    /// The command line has other than printable ASCII characters.
    #[error("the kernel command line has the character {0:?}: use printable ASCII only")]
    CmdlineCharacter(char),
    /// A descriptor is missing or taken twice.
    #[error("{what} is descriptor {index}, which was not passed or is used twice")]
    Descriptor {
        /// What it is for.
        what: String,
        /// Its position.
        index: FdIndex,
    },
    /// A descriptor is not what it should be.
    #[error("{what} must be {wanted}")]
    Unsuitable {
        /// The failure's class.
        kind: ErrorKind,
        /// What it is for.
        what: String,
        /// What it should be.
        wanted: &'static str,
    },
    /// A descriptor cannot be examined.
    #[error("{what} cannot be examined")]
    Examine {
        /// The failure's class.
        kind: ErrorKind,
        /// What it is for.
        what: String,
        /// What the host said.
        #[source]
        source: io::Error,
    },
    /// A text is not valid.
    #[error("{what} must be {wanted}, not {got:?}")]
    Text {
        /// What the text is.
        what: String,
        /// What it should be.
        wanted: &'static str,
        /// The text given.
        got: String,
    },
    /// A read-only disk with a place for writes.
    #[error("disk {0} is read-only but has an overlay for writes: drop one of the two")]
    Overlay(usize),
    /// Layers without a place for writes.
    #[error("disk {0} has sealed layers but no overlay for writes: give it one")]
    Layers(usize),
}

impl SpecError {
    /// The failure's class.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Memory(_) => ErrorKind::Memory,
            Self::CmdlineLength(_) | Self::CmdlineCharacter(_) => ErrorKind::Cmdline,
            Self::Unsuitable { kind, .. } | Self::Examine { kind, .. } => *kind,
            Self::Range { .. }
            | Self::Descriptor { .. }
            | Self::Text { .. }
            | Self::Overlay(_)
            | Self::Layers(_) => ErrorKind::BadRequest,
        }
    }
}

impl Spec {
    /// Checks a wire spec, also of what the machine starts from, and resolves its descriptors; those that nothing names are closed.
    ///
    /// # Errors
    /// [`SpecError`] for the first thing that is wrong.
    pub fn from_wire(wire: MachineSpec, fds: Vec<OwnedFd>) -> Result<(Self, Origin), SpecError> {
        let mut fds = Descriptors::new(fds);
        check_shape(wire.vcpus, wire.memory_mib)?;
        range("the number of disks", wire.disks.len(), 0, MAX_DISKS)?;
        let origin = match wire.start {
            Start::Boot(boot) => Origin::Boot(fds.take_boot(boot)?),
            Start::Checkpoint(chain) => Origin::Checkpoint(fds.take_chain(chain)?),
        };
        let disks = (0usize..)
            .zip(wire.disks)
            .map(|(number, disk)| fds.take_disk(number, disk))
            .collect::<Result<_, _>>()?;
        let vsock = wire.vsock.map(|vsock| fds.take_vsock(vsock)).transpose()?;
        let ConsoleSpec { input, output } =
            wire.console.unwrap_or(ConsoleSpec { input: None, output: None });
        let spec = Self {
            vcpus: wire.vcpus,
            memory_mib: wire.memory_mib,
            disks,
            vsock,
            console_input: input.map(|index| fds.take_console(index, Side::Input)).transpose()?,
            console_output: output
                .map(|index| fds.take_console(index, Side::Output))
                .transpose()?,
            rng: wire.rng,
            balloon: wire.balloon.map(|b| check_balloon(&b, wire.memory_mib)).transpose()?,
        };
        Ok((spec, origin))
    }
}

/// Checks the numbers that a machine's shape consists of.
///
/// # Errors
/// [`SpecError`] for the first one that is out of range.
pub(super) fn check_shape(vcpus: u8, memory_mib: u32) -> Result<(), SpecError> {
    range("the number of vCPUs", vcpus, 1, MAX_VCPUS)?;
    if (MIN_MEMORY_MIB..=MAX_MEMORY_MIB).contains(&memory_mib) {
        return Ok(());
    }
    Err(SpecError::Memory(memory_mib))
}

fn range<T: Copy + PartialOrd + TryInto<u64>>(
    what: &'static str,
    got: T,
    from: T,
    to: T,
) -> Result<(), SpecError> {
    if (from..=to).contains(&got) {
        return Ok(());
    }
    // Only for display: every number here fits.
    let show = |value: T| value.try_into().unwrap_or(u64::MAX);
    Err(SpecError::Range { what, from: show(from), to: show(to), got: show(got) })
}

pub(super) fn check_id(id: &str) -> Result<(), SpecError> {
    if (1..=MAX_ID).contains(&id.len()) {
        return Ok(());
    }
    let what = "the checkpoint's id".to_owned();
    Err(SpecError::Text { what, wanted: "1 to 64 bytes", got: id.to_owned() })
}

fn check_cmdline(cmdline: &str) -> Result<(), SpecError> {
    if let Some(bad) = cmdline.chars().find(|c| !matches!(c, ' '..='~')) {
        return Err(SpecError::CmdlineCharacter(bad));
    }
    if cmdline.len() >= CMDLINE_MAX {
        return Err(SpecError::CmdlineLength(cmdline.len()));
    }
    Ok(())
}

fn check_balloon(balloon: &BalloonSpec, memory_mib: u32) -> Result<Balloon, SpecError> {
    range("the balloon's target in MiB", balloon.target_mib, 0, memory_mib)?;
    Ok(Balloon { target_mib: balloon.target_mib, free_page_reporting: balloon.free_page_reporting })
}

#[cfg(test)]
mod tests;
