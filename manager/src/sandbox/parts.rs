//! The files, sockets and settings a machine is built from, opened and checked before its VMM
//! is started.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use coppice_vmm_protocol::{
    BootSpec, ChainSpec, ConsoleSpec, DiskSpec, FAST_BOOT_OPTIONS, FdIndex, MAX_FDS, MachineSpec,
    Start, VsockSpec,
};
use rustix::fs::{Mode, OFlags, open, statvfs};

use super::{Config, Error, MIN_MEMORY_MIB};
use crate::image::{self, Format};
use crate::store::{BaseImage, DiskChain, Machine, Meta, Store};
use crate::vmm::Passed;

/// Kernel parameters for every guest besides [`FAST_BOOT_OPTIONS`]: a console for the reason when
/// it does not come up, and an end instead of a hang when the kernel panics.
///
/// Of the ways to reset, the keyboard controller's needs least from the kernel; `reboot=t` would
/// make a crash look like a reset.
const CMDLINE: &str = "console=ttyS0 panic=-1 reboot=k";
/// Path of the agent in our images.
const INIT: &str = "/sbin/init";
/// The guest's context ID. Each machine's vsock is its own, so all can have the same.
const CID: u32 = 3;
/// Least free space for what a guest writes, in bytes.
const MIN_FREE: u64 = 16 << 20;
/// Where what a guest writes goes when the directory asked for cannot take it.
const FALLBACK_SCRATCH: &str = "/var/tmp";

/// The parts gathered so far.
#[derive(Debug)]
pub(super) struct Parts {
    spec: MachineSpec,
    passed: Passed,
    names: Names,
    /// What lies under each disk.
    disks: Vec<DiskChain>,
}

/// What the parts are called, for error messages.
#[derive(Debug, Clone)]
pub(super) struct Names {
    pub(super) kernel: PathBuf,
    pub(super) image: PathBuf,
    pub(super) memory_mib: u32,
}

impl Parts {
    /// Opens the kernel and the image.
    pub(super) fn open(config: &Config) -> Result<Self, Error> {
        if config.memory_mib < MIN_MEMORY_MIB {
            return Err(Error::Memory { mib: config.memory_mib });
        }
        let mut passed = Passed::default();
        let kernel = open_regular(&config.kernel)
            .map_err(|source| Error::Kernel { path: config.kernel.clone(), source })?;
        let kernel = passed.add(kernel).map_err(Error::Socket)?;
        let image = open_regular(&config.image)
            .map_err(|source| Error::ImageOpen { path: config.image.clone(), source })?;
        let format = image::inspect(&image)
            .map_err(|source| Error::Image { path: config.image.clone(), source })?;
        let base = BaseImage::of(&config.image, &image).map_err(Error::Socket)?;
        let image = passed.add(image).map_err(Error::Socket)?;
        let disk = |read_only| DiskSpec {
            fd: image,
            read_only,
            overlay: None,
            layers: Vec::new(),
            serial: "root".into(),
        };
        let (initrd, disks) = match format {
            Format::Cpio => (Some(image), Vec::new()),
            Format::Ext4 => (None, vec![disk(false)]),
            Format::Erofs => (None, vec![disk(true)]),
        };
        let spec = MachineSpec {
            vcpus: config.vcpus,
            memory_mib: config.memory_mib,
            start: Start::Boot(BootSpec {
                kernel,
                initrd,
                cmdline: cmdline(format, config.append.as_deref()),
            }),
            disks,
            vsock: None,
            console: None,
            rng: true,
            balloon: None,
        };
        let names = Names {
            kernel: config.kernel.clone(),
            image: config.image.clone(),
            memory_mib: config.memory_mib,
        };
        let chain = |disk: &DiskSpec| DiskChain {
            base: base.clone(),
            read_only: disk.read_only,
            serial: disk.serial.clone(),
            layers: Vec::new(),
        };
        let disks = spec.disks.iter().map(chain).collect();
        Ok(Self { spec, passed, names, disks })
    }

    /// What a machine needs that goes on from a checkpoint; `tops` are empty files for what it
    /// writes to its disks.
    pub(super) fn of_checkpoint(
        store: &Store,
        meta: &Meta,
        tops: Vec<File>,
    ) -> Result<Self, Error> {
        let mut passed = Passed::default();
        let mut chain = add_chain(&mut passed, store, meta)?;
        if let Some(record) = store.working_set(&meta.id) {
            chain.working_set = Some(passed.add(record).map_err(Error::Socket)?);
        }
        let mut tops = tops.into_iter();
        let mut disks = Vec::new();
        for disk in &meta.standing.disks {
            let base = File::open(&disk.base.path)
                .map_err(|source| Error::ImageOpen { path: disk.base.path.clone(), source })?;
            let top = if disk.read_only { None } else { tops.next() };
            disks.push(DiskSpec {
                fd: passed.add(base).map_err(Error::Socket)?,
                read_only: disk.read_only,
                overlay: top.map(|top| passed.add(top)).transpose().map_err(Error::Socket)?,
                layers: add_layers(&mut passed, store, disk)?,
                serial: disk.serial.clone(),
            });
        }
        let machine = &meta.machine;
        let spec = MachineSpec {
            vcpus: machine.vcpus,
            memory_mib: machine.memory_mib,
            start: Start::Checkpoint(chain),
            disks,
            vsock: None,
            console: None,
            rng: machine.rng,
            balloon: machine.balloon.clone(),
        };
        let names = Names {
            kernel: machine.kernel.clone(),
            image: store.memory_path(&meta.id),
            memory_mib: machine.memory_mib,
        };
        Ok(Self { spec, passed, names, disks: Vec::new() })
    }

    /// The machine's shape, for its record; nothing of one that is not booted.
    pub(super) fn machine(&self) -> Option<Machine> {
        let Start::Boot(boot) = &self.spec.start else { return None };
        let Names { kernel, image, memory_mib } = self.names.clone();
        Some(Machine {
            vcpus: self.spec.vcpus,
            memory_mib,
            kernel,
            cmdline: boot.cmdline.clone(),
            initrd: boot.initrd.map(|_| image),
            cid: CID,
            rng: self.spec.rng,
            balloon: self.spec.balloon.clone(),
        })
    }

    /// What lies under each of the disks.
    pub(super) fn disks(&self) -> &[DiskChain] {
        &self.disks
    }

    /// Adds files that take the guest's writes, for the disks that can be written, in order.
    pub(super) fn add_tops(&mut self, tops: Vec<File>) -> Result<(), Error> {
        let writable = self.spec.disks.iter_mut().filter(|disk| !disk.read_only);
        for (disk, top) in writable.zip(tops) {
            disk.overlay = Some(self.passed.add(top).map_err(Error::Socket)?);
        }
        Ok(())
    }

    /// Adds the file that takes the guest's writes, for a disk that can be written.
    pub(super) fn add_overlay(&mut self, scratch: &Path, work: &Path) -> Result<(), Error> {
        for disk in self.spec.disks.iter_mut().filter(|disk| !disk.read_only) {
            let file = nameless_file(&[scratch, Path::new(FALLBACK_SCRATCH), work])?;
            disk.overlay = Some(self.passed.add(file).map_err(Error::Socket)?);
        }
        Ok(())
    }

    /// Binds the socket of the guest's vsock, called `name` in `directory`.
    pub(super) fn add_vsock(
        &mut self,
        socket: &Path,
        directory: OwnedFd,
        name: &str,
    ) -> Result<(), Error> {
        let listener = UnixListener::bind(socket).map_err(Error::Socket)?;
        self.spec.vsock = Some(VsockSpec {
            cid: CID,
            listener: self.passed.add(listener).map_err(Error::Socket)?,
            directory: self.passed.add(directory).map_err(Error::Socket)?,
            name: name.into(),
        });
        Ok(())
    }

    /// Adds where the serial console's output goes.
    pub(super) fn add_console(&mut self, output: OwnedFd) -> Result<(), Error> {
        let output = Some(self.passed.add(output).map_err(Error::Socket)?);
        self.spec.console = Some(ConsoleSpec { input: None, output });
        Ok(())
    }

    /// What the parts are called.
    pub(super) fn names(&self) -> Names {
        self.names.clone()
    }

    /// The spec and its descriptors.
    pub(super) fn finish(self) -> (MachineSpec, Passed) {
        (self.spec, self.passed)
    }
}

/// Adds the files of a checkpoint's memory.
pub(super) fn add_chain(
    passed: &mut Passed,
    store: &Store,
    meta: &Meta,
) -> Result<ChainSpec, Error> {
    let mut layers = Vec::new();
    for id in meta.memory_chain() {
        layers.push(add_file(passed, store.memory_path(&id))?);
    }
    Ok(ChainSpec { id: meta.id.to_string(), layers, working_set: None, new_identity: true })
}

/// Adds the layers of a checkpoint's disk.
pub(super) fn add_layers(
    passed: &mut Passed,
    store: &Store,
    disk: &DiskChain,
) -> Result<Vec<FdIndex>, Error> {
    disk.layers.iter().map(|id| add_file(passed, store.disk_path(id))).collect()
}

/// Whether so many files of layers can be handed to a VMM: a packet carries a limited number, and
/// some of it is left for what else a machine needs.
pub(super) fn can_be_passed(layers: usize) -> bool {
    const OTHERS: usize = 32;
    layers <= MAX_FDS - OTHERS
}

/// Adds a file for reading.
fn add_file(passed: &mut Passed, path: PathBuf) -> Result<FdIndex, Error> {
    if !can_be_passed(passed.len() + 1) {
        return Err(Error::TooDeep);
    }
    let file = File::open(&path).map_err(|source| Error::Layer { path, source })?;
    passed.add(file).map_err(Error::Socket)
}

/// Opens a regular file; anything else (a directory, a pipe that would block) is refused.
fn open_regular(path: &Path) -> io::Result<File> {
    let file: File =
        open(path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())?.into();
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"))
    }
}

fn cmdline(format: Format, append: Option<&str>) -> String {
    let root = match format {
        Format::Ext4 => format!("root=/dev/vda rootfstype=ext4 rw init={INIT}"),
        Format::Erofs => format!("root=/dev/vda rootfstype=erofs ro init={INIT}"),
        Format::Cpio => format!("rdinit={INIT}"),
    };
    match append {
        Some(append) => format!("{FAST_BOOT_OPTIONS} {CMDLINE} {root} {append}"),
        None => format!("{FAST_BOOT_OPTIONS} {CMDLINE} {root}"),
    }
}

/// Makes a file without a name in the first of the directories that can hold one.
fn nameless_file(directories: &[&Path]) -> Result<OwnedFd, Error> {
    let mut first_error = None;
    for directory in directories {
        match try_nameless_file(directory) {
            Ok(file) => return Ok(file),
            Err(error @ Error::NoSpace { .. }) => return Err(error),
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    Err(first_error.unwrap_or(Error::Socket(io::Error::from(io::ErrorKind::NotFound))))
}

fn try_nameless_file(directory: &Path) -> Result<OwnedFd, Error> {
    let error =
        |source: rustix::io::Errno| Error::scratch(directory.to_owned(), io::Error::from(source));
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = open(directory, flags, Mode::RUSR | Mode::WUSR).map_err(error)?;
    let space = statvfs(directory).map_err(error)?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    if free < MIN_FREE {
        return Err(Error::NoSpace { directory: directory.to_owned() });
    }
    Ok(file)
}

#[cfg(test)]
mod tests;
