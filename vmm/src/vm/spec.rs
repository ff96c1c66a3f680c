//! What a machine is made of, checked: the internal form of the wire's `MachineSpec`.
//!
//! The wire form is only text and positions of descriptors. Converting it resolves the
//! descriptors and checks every value, so that building a machine needs no further checks of
//! its own; a [`Spec`] is never serialised.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;

use coppice_vmm_protocol::{
    BalloonSpec, ConsoleSpec, DiskSpec, ErrorKind, FdIndex, MachineSpec, VsockSpec,
};
use thiserror::Error;

use crate::memory::layout::CMDLINE_MAX;
use crate::memory::{MAX_MEMORY_MIB, MIN_MEMORY_MIB, MemoryImage};
use crate::sys::fd::{self, FileKind};

/// Most vCPUs of a machine.
pub(super) const MAX_VCPUS: u8 = 8;
/// Most block devices of a machine.
pub(super) const MAX_DISKS: usize = 8;
/// Longest disk serial number, in bytes (virtio 1.2 section 5.2.6, VIRTIO_BLK_T_GET_ID).
pub(super) const MAX_SERIAL: usize = 20;
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
    /// What guest RAM starts from.
    pub image: MemoryImage,
    /// The kernel image, a readable regular file.
    pub kernel: File,
    /// The initial RAM disk, a readable regular file.
    pub initrd: Option<File>,
    /// The kernel command line: printable ASCII that fits with its terminating zero.
    pub cmdline: String,
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

/// A block device to build.
#[derive(Debug)]
pub struct Disk {
    /// The backing file: a regular file or block device, writable if it has to be.
    pub file: File,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// The empty regular file that takes the writes.
    pub overlay: Option<File>,
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
}

impl SpecError {
    /// The failure's class.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Memory(_) => ErrorKind::Memory,
            Self::CmdlineLength(_) | Self::CmdlineCharacter(_) => ErrorKind::Cmdline,
            Self::Unsuitable { kind, .. } | Self::Examine { kind, .. } => *kind,
            Self::Range { .. } | Self::Descriptor { .. } | Self::Text { .. } | Self::Overlay(_) => {
                ErrorKind::BadRequest
            }
        }
    }
}

impl Spec {
    /// Checks a wire spec and resolves its descriptors; those that nothing names are closed.
    ///
    /// # Errors
    /// [`SpecError`] for the first thing that is wrong.
    pub fn from_wire(wire: MachineSpec, fds: Vec<OwnedFd>) -> Result<Self, SpecError> {
        let mut fds = Descriptors(fds.into_iter().map(Some).collect());
        range("the number of vCPUs", wire.vcpus, 1, MAX_VCPUS)?;
        if !(MIN_MEMORY_MIB..=MAX_MEMORY_MIB).contains(&wire.memory_mib) {
            return Err(SpecError::Memory(wire.memory_mib));
        }
        check_cmdline(&wire.cmdline)?;
        range("the number of disks", wire.disks.len(), 0, MAX_DISKS)?;
        let kernel = fds.take_regular(wire.kernel, "the kernel", ErrorKind::Kernel)?;
        let initrd = wire
            .initrd
            .map(|index| fds.take_regular(index, "the initrd", ErrorKind::Initrd))
            .transpose()?;
        let disks = (0usize..)
            .zip(wire.disks)
            .map(|(number, disk)| fds.take_disk(number, disk))
            .collect::<Result<_, _>>()?;
        let vsock = wire.vsock.map(|vsock| fds.take_vsock(vsock)).transpose()?;
        let ConsoleSpec { input, output } =
            wire.console.unwrap_or(ConsoleSpec { input: None, output: None });
        Ok(Self {
            vcpus: wire.vcpus,
            memory_mib: wire.memory_mib,
            image: MemoryImage::Empty,
            kernel,
            initrd,
            cmdline: wire.cmdline,
            disks,
            vsock,
            console_input: input.map(|index| fds.take_console(index, Side::Input)).transpose()?,
            console_output: output
                .map(|index| fds.take_console(index, Side::Output))
                .transpose()?,
            rng: wire.rng,
            balloon: wire.balloon.map(|b| check_balloon(&b, wire.memory_mib)).transpose()?,
        })
    }
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

enum Side {
    Input,
    Output,
}

/// Descriptors that came with the request; each can be taken once.
struct Descriptors(Vec<Option<OwnedFd>>);

impl Descriptors {
    fn take(&mut self, index: FdIndex, what: &str) -> Result<OwnedFd, SpecError> {
        usize::try_from(index)
            .ok()
            .and_then(|at| self.0.get_mut(at))
            .and_then(Option::take)
            .ok_or_else(|| SpecError::Descriptor { what: what.to_owned(), index })
    }

    fn take_regular(
        &mut self,
        index: FdIndex,
        what: &str,
        kind: ErrorKind,
    ) -> Result<File, SpecError> {
        let fd = self.take(index, what)?;
        let examine = |source| SpecError::Examine { kind, what: what.to_owned(), source };
        let readable = fd::access(fd.as_fd()).map_err(examine)?.read;
        if readable && fd::kind(fd.as_fd()).map_err(examine)? == FileKind::Regular {
            return Ok(File::from(fd));
        }
        let wanted = "a regular file, open for reading";
        Err(SpecError::Unsuitable { kind, what: what.to_owned(), wanted })
    }

    fn take_disk(&mut self, number: usize, disk: DiskSpec) -> Result<Disk, SpecError> {
        let kind = ErrorKind::Disk;
        let what = format!("disk {number}");
        if disk.serial.len() > MAX_SERIAL || !disk.serial.chars().all(|c| c.is_ascii_graphic()) {
            return Err(SpecError::Text {
                what: format!("the serial number of disk {number}"),
                wanted: "at most 20 printable ASCII characters without spaces",
                got: disk.serial,
            });
        }
        if disk.read_only && disk.overlay.is_some() {
            return Err(SpecError::Overlay(number));
        }
        let fd = self.take(disk.fd, &what)?;
        let examine = |source| SpecError::Examine { kind, what: what.clone(), source };
        let access = fd::access(fd.as_fd()).map_err(examine)?;
        let file_kind = fd::kind(fd.as_fd()).map_err(examine)?;
        let writable = disk.read_only || disk.overlay.is_some() || access.write;
        let suitable = matches!(file_kind, FileKind::Regular | FileKind::BlockDevice);
        if !access.read || !suitable || !writable {
            let wanted = if writable {
                "a regular file or block device, open for reading"
            } else {
                "a regular file or block device, open for reading and writing"
            };
            return Err(SpecError::Unsuitable { kind, what, wanted });
        }
        let overlay = disk.overlay.map(|index| self.take_overlay(number, index)).transpose()?;
        Ok(Disk { file: File::from(fd), read_only: disk.read_only, overlay, serial: disk.serial })
    }

    fn take_overlay(&mut self, number: usize, index: FdIndex) -> Result<File, SpecError> {
        let kind = ErrorKind::Disk;
        let what = format!("the overlay of disk {number}");
        let fd = self.take(index, &what)?;
        let examine = |source| SpecError::Examine { kind, what: what.clone(), source };
        let access = fd::access(fd.as_fd()).map_err(examine)?;
        let regular = fd::kind(fd.as_fd()).map_err(examine)? == FileKind::Regular;
        let file = File::from(fd);
        let empty = file.metadata().map_err(examine)?.len() == 0;
        if !(access.read && access.write && regular && empty) {
            let wanted = "an empty regular file, open for reading and writing";
            return Err(SpecError::Unsuitable { kind, what, wanted });
        }
        Ok(file)
    }

    fn take_vsock(&mut self, vsock: VsockSpec) -> Result<Vsock, SpecError> {
        let kind = ErrorKind::Vsock;
        range("the vsock context ID", vsock.cid, FIRST_CID, u32::MAX - 1)?;
        let name_fits = (1..=MAX_VSOCK_NAME).contains(&vsock.name.len());
        if !name_fits || vsock.name.contains(['/', '\0']) {
            return Err(SpecError::Text {
                what: "the vsock socket's name".to_owned(),
                wanted: "a file name of at most 64 bytes",
                got: vsock.name,
            });
        }
        let listener = self.take(vsock.listener, "the vsock listener")?;
        if !fd::is_unix_socket(listener.as_fd(), libc::SOCK_STREAM, true) {
            let wanted = "a listening Unix stream socket";
            return Err(SpecError::Unsuitable { kind, what: "the vsock listener".into(), wanted });
        }
        let what = "the vsock directory";
        let directory = self.take(vsock.directory, what)?;
        let examine = |source| SpecError::Examine { kind, what: what.into(), source };
        if fd::kind(directory.as_fd()).map_err(examine)? != FileKind::Directory {
            let wanted = "a directory";
            return Err(SpecError::Unsuitable { kind, what: what.into(), wanted });
        }
        let listener = UnixListener::from(listener);
        Ok(Vsock { cid: vsock.cid, listener, directory, name: vsock.name })
    }

    fn take_console(&mut self, index: FdIndex, side: Side) -> Result<File, SpecError> {
        let kind = ErrorKind::BadRequest;
        let (what, wanted) = match side {
            Side::Input => ("the console input", "open for reading"),
            Side::Output => ("the console output", "open for writing"),
        };
        let fd = self.take(index, what)?;
        let access = fd::access(fd.as_fd()).map_err(|source| SpecError::Examine {
            kind,
            what: what.into(),
            source,
        })?;
        let suitable = match side {
            Side::Input => access.read,
            Side::Output => access.write,
        };
        if suitable {
            Ok(File::from(fd))
        } else {
            Err(SpecError::Unsuitable { kind, what: what.into(), wanted })
        }
    }
}

#[cfg(test)]
mod tests;
