//! Machines that run [`Code::interpreter`] and the checkpoints they come from and leave behind:
//! a small manager without a store, which keeps each checkpoint's files open instead.

use std::fs::{self, File};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;

use coppice_vmm_protocol::{
    ChainSpec, CheckpointInfo, CheckpointSpec, ConsoleSpec, DiskRollback, DiskSpec, MachineSpec,
    Op, ResultBody, RollbackInfo, RollbackSpec, Start,
};

use crate::{Code, Interpreter, Vmm, plain_spec};

/// A checkpoint with all it stands on; one without files is a machine's state before its first.
#[derive(Debug, Clone, Default)]
pub struct Node {
    /// Its name.
    pub id: String,
    /// The files of its layers, the root first.
    pub files: Vec<Arc<File>>,
    /// Guest RAM in MiB.
    pub memory_mib: u32,
    /// The disk, if there is one.
    pub disk: Option<Disk>,
    /// What an earlier clone used at first.
    pub working_set: Option<Arc<File>>,
}

/// A disk up to some moment.
#[derive(Debug, Clone)]
pub struct Disk {
    /// What is under all layers.
    pub base: Arc<File>,
    /// The sealed layers, the lowest first.
    pub layers: Vec<Arc<File>>,
}

/// A machine's disk.
struct Live {
    sealed: Disk,
    /// Takes the writes.
    top: Arc<File>,
    /// Handed over with a checkpoint of which nobody knows yet what became.
    next: Option<Arc<File>>,
}

impl Live {
    fn over(sealed: &Disk) -> Self {
        Self { sealed: sealed.clone(), top: Arc::new(memory_file()), next: None }
    }

    /// The new layer that was handed over takes the writes.
    fn switch(&mut self) {
        if let Some(next) = self.next.take() {
            self.sealed.layers.push(std::mem::replace(&mut self.top, next));
        }
    }

    /// The disk of a new machine, whose first file becomes descriptor `first` of the packet.
    fn spec(&self, first: usize) -> DiskSpec {
        let first = u32::try_from(first).unwrap();
        let overlay = first + 1 + u32::try_from(self.sealed.layers.len()).unwrap();
        DiskSpec {
            fd: first,
            read_only: false,
            overlay: Some(overlay),
            layers: (first + 1..overlay).collect(),
            serial: "disk".into(),
        }
    }

    /// The files of [`Live::spec`].
    fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let files = std::iter::once(&self.sealed.base).chain(&self.sealed.layers);
        files.chain(std::iter::once(&self.top)).map(|file| file.as_fd())
    }
}

impl Node {
    /// The files to pass along with a [`Node::chain`].
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.files.iter().map(|file| file.as_fd()).collect()
    }

    /// The chain whose first file is descriptor `first` of the packet, as for a rollback.
    pub fn chain(&self, first: u32) -> ChainSpec {
        let count = u32::try_from(self.files.len()).unwrap();
        ChainSpec {
            id: self.id.clone(),
            layers: (first..first + count).collect(),
            working_set: None,
            new_identity: false,
        }
    }
}

/// A new file in memory, as far as there is such a file system.
pub fn memory_file() -> File {
    let memory = Path::new("/dev/shm");
    let file = if memory.is_dir() { tempfile::tempfile_in(memory) } else { tempfile::tempfile() };
    file.unwrap()
}

/// A machine that runs the interpreter.
pub struct Machine {
    pub vmm: Vmm,
    pub guest: Interpreter,
    /// What it stands on.
    pub node: Node,
    disk: Option<Live>,
}

fn spec(start: Start, memory_mib: u32, disk: Option<DiskSpec>) -> MachineSpec {
    MachineSpec {
        start,
        memory_mib,
        disks: disk.into_iter().collect(),
        console: Some(ConsoleSpec { input: Some(1), output: Some(2) }),
        rng: true,
        ..plain_spec()
    }
}

impl Machine {
    /// Boots one in a process of its own.
    pub fn boot(memory_mib: u32) -> Self {
        Self::boot_on(Node { memory_mib, ..Node::default() })
    }

    /// Boots one with a disk; the guest has yet to set it up.
    pub fn boot_with_disk(memory_mib: u32, base: File) -> Self {
        let disk = Some(Disk { base: Arc::new(base), layers: Vec::new() });
        Self::boot_on(Node { memory_mib, disk, ..Node::default() })
    }

    fn boot_on(node: Node) -> Self {
        let (guest, input, output) = Interpreter::pipes();
        let mut vmm = Vmm::start();
        let kernel = Code::new().interpreter().kernel();
        let disk = node.disk.as_ref().map(Live::over);
        let mut fds = vec![kernel.as_fd(), input.as_fd(), output.as_fd()];
        let disk_spec = disk.as_ref().map(|disk| disk.spec(fds.len()));
        fds.extend(disk.iter().flat_map(Live::fds));
        let op = Op::Create(Box::new(spec(plain_spec().start, node.memory_mib, disk_spec)));
        assert_eq!(vmm.request_with(op, &fds), ResultBody::Done);
        vmm.done(Op::Start {});
        Self { vmm, guest, node, disk }
    }

    /// Starts a clone in a new process.
    pub fn clone_of(node: &Node) -> Self {
        Self::clone_in(Vmm::start(), node)
    }

    /// Starts a clone in a process that has no machine yet.
    pub fn clone_in(vmm: Vmm, node: &Node) -> Self {
        let mut clone = Self::begin_clone(vmm, node);
        for _ in 0..2 {
            assert_eq!(clone.vmm.answer().unwrap(), ResultBody::Done);
        }
        clone
    }

    /// Asks for a clone and for its start at once; both answers are still to come.
    pub fn begin_clone(mut vmm: Vmm, node: &Node) -> Self {
        let (guest, input, output) = Interpreter::pipes();
        // The first descriptor would be the kernel of a machine that boots.
        let mut fds = vec![input.as_fd(), input.as_fd(), output.as_fd()];
        fds.extend(node.fds());
        let disk = node.disk.as_ref().map(Live::over);
        let disk_spec = disk.as_ref().map(|disk| disk.spec(fds.len()));
        fds.extend(disk.iter().flat_map(Live::fds));
        let working_set = node.working_set.as_ref().map(|_| u32::try_from(fds.len()).unwrap());
        fds.extend(node.working_set.iter().map(|file| file.as_fd()));
        let chain = ChainSpec { new_identity: true, working_set, ..node.chain(3) };
        let start = Start::Checkpoint(chain);
        vmm.send(Op::Create(Box::new(spec(start, node.memory_mib, disk_spec))), &fds).unwrap();
        vmm.send(Op::Start {}, &[]).unwrap();
        Self { vmm, guest, node: node.clone(), disk }
    }

    /// Takes a checkpoint into `file`; it is not committed.
    pub fn try_checkpoint(&mut self, id: &str, file: &File, background: bool) -> ResultBody {
        self.begin_checkpoint(id, file, background);
        self.vmm.answer().unwrap()
    }

    /// Asks for a checkpoint into `file`; the answer is still to come.
    pub fn begin_checkpoint(&mut self, id: &str, file: &File, background: bool) {
        self.settle();
        let next = self.disk.as_mut().map(|disk| &*disk.next.insert(Arc::new(memory_file())));
        let mut fds = vec![file.as_fd()];
        fds.extend(next.map(|file| file.as_fd()));
        let spec = CheckpointSpec {
            id: id.into(),
            file: 0,
            overlays: (1..u32::try_from(fds.len()).unwrap()).collect(),
            meta: "{}".into(),
            background,
        };
        self.vmm.send(Op::Checkpoint(spec), &fds).unwrap();
    }

    /// Finds out whether a checkpoint that was not committed left the disk on its new layer.
    fn settle(&mut self) {
        let Some(disk) = &mut self.disk else { return };
        let Some(next) = &disk.next else { return };
        let place = |meta: fs::Metadata| (meta.dev(), meta.ino());
        let wanted = place(next.metadata().unwrap());
        let mut open = fs::read_dir(format!("/proc/{}/fd", self.vmm.child.id())).unwrap();
        // One that was closed meanwhile is not the disk's.
        let is_next = |entry: fs::DirEntry| {
            fs::metadata(entry.path()).is_ok_and(|meta| place(meta) == wanted)
        };
        match open.any(|entry| is_next(entry.unwrap())) {
            true => disk.switch(),
            false => disk.next = None,
        }
    }

    /// Takes and commits a checkpoint in a new file.
    pub fn checkpoint(&mut self, id: &str, background: bool) -> (Node, CheckpointInfo) {
        self.checkpoint_to(id, tempfile::tempfile().unwrap(), background)
    }

    /// Takes and commits a checkpoint in this file.
    pub fn checkpoint_to(
        &mut self,
        id: &str,
        file: File,
        background: bool,
    ) -> (Node, CheckpointInfo) {
        let info = match self.try_checkpoint(id, &file, background) {
            ResultBody::Checkpoint(info) => info,
            other => panic!("no checkpoint: {other:?}"),
        };
        self.commit(id, file);
        (self.node.clone(), info)
    }

    /// Commits the checkpoint that was written to `file`.
    pub fn commit(&mut self, id: &str, file: File) {
        self.vmm.done(Op::Commit { id: id.into() });
        self.node.id = id.into();
        self.node.files.push(Arc::new(file));
        if let Some(disk) = &mut self.disk {
            disk.switch();
            self.node.disk = Some(disk.sealed.clone());
        }
    }

    /// Goes back to any checkpoint of the tree.
    pub fn roll_back(&mut self, node: &Node) -> RollbackInfo {
        let mut fds = node.fds();
        let disk = node.disk.as_ref().map(Live::over);
        let disks = disk.iter().map(|disk| {
            // All but the base, which stays.
            let DiskSpec { layers, overlay, .. } = disk.spec(fds.len() - 1);
            DiskRollback { layers, overlay: overlay.unwrap() }
        });
        let disks = disks.collect();
        fds.extend(disk.iter().flat_map(|disk| disk.fds().skip(1)));
        let op = Op::Rollback(RollbackSpec { chain: node.chain(0), disks });
        match self.vmm.request_with(op, &fds) {
            ResultBody::Rollback(info) => {
                self.node = node.clone();
                self.disk = disk;
                info
            }
            other => panic!("no rollback: {other:?}"),
        }
    }
}
