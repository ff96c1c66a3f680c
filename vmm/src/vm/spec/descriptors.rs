//! The descriptors that came with a request: each named once, and each what it should be.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;

use coppice_vmm_protocol::{BootSpec, ChainSpec, DiskSpec, ErrorKind, FdIndex, VsockSpec};

use super::{
    Boot, Chain, Disk, FIRST_CID, MAX_SERIAL, MAX_VSOCK_NAME, SpecError, Vsock, check_cmdline,
    check_id, range,
};
use crate::sys::fd::{self, FileKind};

pub(super) enum Side {
    Input,
    Output,
}

/// Descriptors that came with the request; each can be taken once.
pub(super) struct Descriptors(Vec<Option<OwnedFd>>);

impl Descriptors {
    /// All descriptors of a request.
    pub(super) fn new(fds: Vec<OwnedFd>) -> Self {
        Self(fds.into_iter().map(Some).collect())
    }

    pub(super) fn take(&mut self, index: FdIndex, what: &str) -> Result<OwnedFd, SpecError> {
        usize::try_from(index)
            .ok()
            .and_then(|at| self.0.get_mut(at))
            .and_then(Option::take)
            .ok_or_else(|| SpecError::Descriptor { what: what.to_owned(), index })
    }

    pub(super) fn take_regular(
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

    pub(super) fn take_boot(&mut self, boot: BootSpec) -> Result<Boot, SpecError> {
        check_cmdline(&boot.cmdline)?;
        let kernel = self.take_regular(boot.kernel, "the kernel", ErrorKind::Kernel)?;
        let initrd = boot
            .initrd
            .map(|index| self.take_regular(index, "the initrd", ErrorKind::Initrd))
            .transpose()?;
        Ok(Boot { kernel, initrd, cmdline: boot.cmdline })
    }

    pub(super) fn take_chain(&mut self, chain: ChainSpec) -> Result<Chain, SpecError> {
        check_id(&chain.id)?;
        let take = |(number, index)| {
            let what = format!("checkpoint layer {number}");
            self.take_regular(index, &what, ErrorKind::Checkpoint)
        };
        let layers = (0usize..).zip(chain.layers).map(take).collect::<Result<_, _>>()?;
        let working_set = chain
            .working_set
            .map(|index| self.take_regular(index, "the working set", ErrorKind::Checkpoint))
            .transpose()?;
        Ok(Chain { id: chain.id, layers, working_set, new_identity: chain.new_identity })
    }

    pub(super) fn take_layers(
        &mut self,
        number: usize,
        layers: Vec<FdIndex>,
    ) -> Result<Vec<File>, SpecError> {
        let what = format!("a layer of disk {number}");
        let take = |index| self.take_regular(index, &what, ErrorKind::Disk);
        layers.into_iter().map(take).collect()
    }

    pub(super) fn take_overlays(&mut self, overlays: &[FdIndex]) -> Result<Vec<File>, SpecError> {
        let take = |(number, index): (usize, &FdIndex)| self.take_overlay(number, *index);
        (0usize..).zip(overlays).map(take).collect()
    }

    pub(super) fn take_disk(&mut self, number: usize, disk: DiskSpec) -> Result<Disk, SpecError> {
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
        let layers = self.take_layers(number, disk.layers)?;
        if overlay.is_none() && !layers.is_empty() {
            return Err(SpecError::Layers(number));
        }
        let file = File::from(fd);
        Ok(Disk { file, read_only: disk.read_only, overlay, layers, serial: disk.serial })
    }

    pub(super) fn take_overlay(
        &mut self,
        number: usize,
        index: FdIndex,
    ) -> Result<File, SpecError> {
        self.take_empty(index, &format!("the overlay of disk {number}"), ErrorKind::Disk)
    }

    pub(super) fn take_empty(
        &mut self,
        index: FdIndex,
        what: &str,
        kind: ErrorKind,
    ) -> Result<File, SpecError> {
        let what = what.to_owned();
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

    pub(super) fn take_vsock(&mut self, vsock: VsockSpec) -> Result<Vsock, SpecError> {
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

    pub(super) fn take_console(&mut self, index: FdIndex, side: Side) -> Result<File, SpecError> {
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
