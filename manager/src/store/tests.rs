//! The store on a real directory, with machines that are only a listening socket and a file
//! written as a VMM would.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;

use coppice_image::{CpuIdentity, HeaderInfo, Image, Kind, PAGE, Writer};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};

use super::*;

mod crashes;
mod flatten;
mod hints;
mod lineage;
mod repair;

const RAM_PAGES: u64 = 64;

struct Fixture {
    dir: tempfile::TempDir,
    store: Store,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("base.ext4"), b"base").unwrap();
        let store = Store::open(&Home::at(dir.path().join("home"))).unwrap();
        Self { dir, store }
    }

    fn machine() -> Machine {
        Machine {
            vcpus: 1,
            memory_mib: 64,
            kernel: "/vmlinux".into(),
            cmdline: "quiet".into(),
            initrd: None,
            cid: 3,
            rng: true,
            balloon: None,
        }
    }

    /// A new sandbox with one disk, from a checkpoint or booted.
    fn try_sandbox(&self, from: Option<&Id>, name: Option<&str>) -> Result<Sandbox, Error> {
        let disk = Self::disk(&self.dir.path().join("base.ext4"));
        let new = NewSandbox {
            id: None,
            name: name.map(|name| name.parse().unwrap()),
            machine: Self::machine(),
            disks: if from.is_none() { vec![disk] } else { Vec::new() },
        };
        let (mut sandbox, _tops) = self.store.create_sandbox(new)?;
        if let Some(from) = from {
            self.store.stand_on(&mut sandbox, from)?;
        }
        Ok(sandbox)
    }

    fn disk(path: &Path) -> DiskChain {
        let base = BaseImage::of(path, &File::open(path).unwrap()).unwrap();
        DiskChain { base, read_only: false, serial: "root".into(), layers: Vec::new() }
    }

    /// A new sandbox with this image.
    fn sandbox_of(&self, image: &Path) -> Sandbox {
        let disks = vec![Self::disk(image)];
        let new = NewSandbox { id: None, name: None, machine: Self::machine(), disks };
        self.store.create_sandbox(new).unwrap().0
    }

    fn sandbox(&self, from: Option<&Id>) -> Sandbox {
        self.try_sandbox(from, None).unwrap()
    }

    /// Has the sandbox's machine write to its disk.
    fn write_disk(&self, sandbox: &Sandbox, bytes: usize) {
        let top = sandbox.record().standing.tops().next().unwrap();
        std::fs::write(self.store.disk_path(top), vec![1; bytes]).unwrap();
    }

    fn try_checkpoint(&self, sandbox: &mut Sandbox, name: Option<&str>) -> Result<Meta, Error> {
        let name = name.map(|name| name.parse().unwrap());
        let new = self.store.begin_checkpoint(sandbox, name, BTreeMap::new())?;
        write_image(&new);
        self.store.publish_checkpoint(&new)?;
        self.store.complete_checkpoint(new, sandbox)
    }

    fn checkpoint(&self, sandbox: &mut Sandbox) -> Id {
        self.try_checkpoint(sandbox, None).unwrap().id
    }

    fn roll_back(&self, sandbox: &mut Sandbox, to: &Id) {
        self.store.begin_move(sandbox, to).unwrap();
        self.store.complete_move(sandbox).unwrap();
    }

    /// Names of all files that hold memory or disk content, and what is still being written.
    fn files(&self) -> BTreeSet<String> {
        let mut names = files::names(&self.store.checkpoints_dir()).unwrap();
        names.extend(files::names(&self.store.layers_dir()).unwrap());
        names.into_iter().collect()
    }

    /// Nothing is lost, and nothing is there that nobody stands on.
    fn assert_clean(&self) {
        let report = self.store.check(true, false).unwrap();
        assert_eq!(report.findings, [], "files: {:?}", self.files());
    }
}

/// What the VMM does with the file.
fn write_image(new: &NewCheckpoint) {
    let cpu = CpuIdentity::default();
    let info = HeaderInfo { cpu, build: "test".into(), ram_pages: RAM_PAGES };
    let mut writer = Writer::new(new.file().try_clone().unwrap(), info).unwrap();
    let page = usize::try_from(PAGE).unwrap();
    writer.pages(3, 2, &vec![7; 2 * page]).unwrap();
    writer.section(Kind::Meta, 0, 1, true, new.meta_text().unwrap().as_bytes()).unwrap();
    writer.finish().unwrap();
}

/// A machine: what listens on the sandbox's control socket.
fn machine(sandbox: &Sandbox) -> OwnedFd {
    let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    bind(&socket, &SocketAddrUnix::new(sandbox.control_socket()).unwrap()).unwrap();
    listen(&socket, 4).unwrap();
    socket
}

fn damage(path: &Path, at: u64) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x40], at).unwrap();
}
