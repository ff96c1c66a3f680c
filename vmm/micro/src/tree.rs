//! Machines that run [`Code::interpreter`] and the checkpoints they come from and leave behind:
//! a small manager without a store, which keeps each checkpoint's files open instead.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;

use coppice_vmm_protocol::{
    ChainSpec, CheckpointInfo, CheckpointSpec, ConsoleSpec, MachineSpec, Op, ResultBody,
    RollbackInfo, RollbackSpec, Start,
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
}

fn spec(start: Start, memory_mib: u32) -> MachineSpec {
    MachineSpec {
        start,
        memory_mib,
        console: Some(ConsoleSpec { input: Some(1), output: Some(2) }),
        rng: true,
        ..plain_spec()
    }
}

impl Machine {
    /// Boots one in a process of its own.
    pub fn boot(memory_mib: u32) -> Self {
        let (guest, input, output) = Interpreter::pipes();
        let mut vmm = Vmm::start();
        let kernel = Code::new().interpreter().kernel();
        let op = Op::Create(Box::new(spec(plain_spec().start, memory_mib)));
        let fds = [kernel.as_fd(), input.as_fd(), output.as_fd()];
        assert_eq!(vmm.request_with(op, &fds), ResultBody::Done);
        vmm.done(Op::Start {});
        Self { vmm, guest, node: Node { memory_mib, ..Node::default() } }
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
        let start = Start::Checkpoint(ChainSpec { new_identity: true, ..node.chain(3) });
        vmm.send(Op::Create(Box::new(spec(start, node.memory_mib))), &fds).unwrap();
        vmm.send(Op::Start {}, &[]).unwrap();
        Self { vmm, guest, node: node.clone() }
    }

    /// Takes a checkpoint into `file`; it is not committed.
    pub fn try_checkpoint(&mut self, id: &str, file: &File, background: bool) -> ResultBody {
        self.begin_checkpoint(id, file, background);
        self.vmm.answer().unwrap()
    }

    /// Asks for a checkpoint into `file`; the answer is still to come.
    pub fn begin_checkpoint(&mut self, id: &str, file: &File, background: bool) {
        let spec = CheckpointSpec {
            id: id.into(),
            file: 0,
            overlays: Vec::new(),
            meta: "{}".into(),
            background,
        };
        self.vmm.send(Op::Checkpoint(spec), &[file.as_fd()]).unwrap();
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
    }

    /// Goes back to any checkpoint of the tree.
    pub fn roll_back(&mut self, node: &Node) -> RollbackInfo {
        let op = Op::Rollback(RollbackSpec { chain: node.chain(0), disks: Vec::new() });
        match self.vmm.request_with(op, &node.fds()) {
            ResultBody::Rollback(info) => {
                self.node = node.clone();
                info
            }
            other => panic!("no rollback: {other:?}"),
        }
    }
}
