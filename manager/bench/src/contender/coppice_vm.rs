//! Coppice's side: machines over their control sockets, with the files a manager's store would
//! have open.

use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, bail};
use coppice_vmm_protocol::{
    BootSpec, ChainSpec, CheckpointInfo, CheckpointSpec, ControlSocket, DiskRollback, DiskSpec,
    FdIndex, MachineSpec, Op, Reply, Request, ResultBody, RollbackSpec, Start, VsockSpec,
};

use super::Setup;

const VSOCK: &str = "coppice.vsock";

/// A checkpoint and what it stands on, open.
#[derive(Debug)]
pub(super) struct Node {
    memory: File,
    disk: File,
    /// What a machine of it used at first.
    working_set: Option<File>,
    /// How long the machine stood still for it, and how long it took, in microseconds.
    pub(super) info: CheckpointInfo,
}

/// A `coppice-vmm` process.
#[derive(Debug)]
pub(super) struct Vmm {
    child: Child,
    control: ControlSocket,
    asked: u64,
    /// The disk's present overlay.
    overlay: Option<File>,
}

impl Vmm {
    /// Executes the VMM; it has no machine yet.
    pub(super) fn start(program: &Path) -> anyhow::Result<Self> {
        let (control, theirs) = ControlSocket::pair()?;
        let theirs = theirs.into_fd();
        rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty())
            .context("the control socket cannot be passed on")?;
        let child = Command::new(program)
            .args(["--control-fd", &theirs.as_raw_fd().to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| format!("{} does not start", program.display()))?;
        Ok(Self { child, control, asked: 0, overlay: None })
    }

    /// Has it make what a machine needs of KVM ahead of time.
    pub(super) fn prepare(&mut self, setup: &Setup) -> anyhow::Result<()> {
        let Setup { vcpus, memory_mib, .. } = *setup;
        self.send(Op::Prepare { vcpus, memory_mib }, &[])?;
        self.done()
    }

    /// Boots the guest.
    pub(super) fn boot(&mut self, setup: &Setup, cmdline: &str) -> anyhow::Result<()> {
        let start = Start::Boot(BootSpec { kernel: 4, initrd: None, cmdline: cmdline.into() });
        let kernel = File::open(&setup.kernel).context("the kernel cannot be opened")?;
        self.create(setup, start, Vec::new(), &[kernel.as_fd()])
    }

    /// Makes a machine from a checkpoint, and lets it run.
    pub(super) fn restore(&mut self, setup: &Setup, node: &Node) -> anyhow::Result<()> {
        let mut fds = vec![node.memory.as_fd(), node.disk.as_fd()];
        let mut chain = chain(4, true);
        if let Some(working_set) = &node.working_set {
            chain.working_set = Some(6);
            fds.push(working_set.as_fd());
        }
        self.create(setup, Start::Checkpoint(chain), vec![5], &fds)
    }

    fn create(
        &mut self,
        setup: &Setup,
        start: Start,
        layers: Vec<FdIndex>,
        more: &[BorrowedFd<'_>],
    ) -> anyhow::Result<()> {
        let image = File::open(&setup.image).context("the image cannot be opened")?;
        let overlay = scratch_file(setup)?;
        let path = vsock(setup);
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).context("the vsock socket cannot be made")?;
        let directory = File::open(&setup.scratch).context("the directory cannot be opened")?;
        let spec = MachineSpec {
            vcpus: setup.vcpus,
            memory_mib: setup.memory_mib,
            start,
            disks: vec![DiskSpec {
                fd: 0,
                read_only: false,
                overlay: Some(1),
                layers,
                serial: "root".into(),
            }],
            vsock: Some(VsockSpec { cid: 3, listener: 2, directory: 3, name: VSOCK.into() }),
            console: None,
            rng: false,
            balloon: None,
        };
        let mut fds = vec![image.as_fd(), overlay.as_fd(), listener.as_fd(), directory.as_fd()];
        fds.extend(more);
        self.send(Op::Create(Box::new(spec)), &fds)?;
        self.send(Op::Start {}, &[])?;
        self.done()?;
        self.done()?;
        self.overlay = Some(overlay);
        Ok(())
    }

    /// Takes a checkpoint of the machine, which stands on it then.
    pub(super) fn checkpoint(&mut self, setup: &Setup) -> anyhow::Result<Node> {
        let memory = scratch_file(setup)?;
        let overlay = scratch_file(setup)?;
        let spec = CheckpointSpec {
            id: NODE.into(),
            file: 0,
            overlays: vec![1],
            meta: "{}".into(),
            background: false,
        };
        self.send(Op::Checkpoint(spec), &[memory.as_fd(), overlay.as_fd()])?;
        let info = match self.answer()? {
            ResultBody::Checkpoint(info) => info,
            other => bail!("no checkpoint: {other:?}"),
        };
        self.send(Op::Commit { id: NODE.into() }, &[])?;
        self.done()?;
        let disk = self.overlay.replace(overlay).context("the machine has no disk")?;
        Ok(Node { memory, disk, working_set: None, info })
    }

    /// Has later machines of the checkpoint know what this one used.
    pub(super) fn record_working_set(
        &mut self,
        setup: &Setup,
        node: &mut Node,
    ) -> anyhow::Result<()> {
        let file = scratch_file(setup)?;
        self.send(Op::RecordWorkingSet { file: 0 }, &[file.as_fd()])?;
        self.done()?;
        node.working_set = Some(file);
        Ok(())
    }

    /// Brings the machine back to a checkpoint in place.
    pub(super) fn roll_back(&mut self, setup: &Setup, node: &Node) -> anyhow::Result<()> {
        let overlay = scratch_file(setup)?;
        let disks = vec![DiskRollback { layers: vec![1], overlay: 2 }];
        let op = Op::Rollback(RollbackSpec { chain: chain(0, false), disks });
        self.send(op, &[node.memory.as_fd(), node.disk.as_fd(), overlay.as_fd()])?;
        match self.answer()? {
            ResultBody::Rollback(_) => self.overlay = Some(overlay),
            other => bail!("no rollback: {other:?}"),
        }
        Ok(())
    }

    /// Ends the process; returns when it is gone.
    pub(super) fn kill(mut self) -> anyhow::Result<()> {
        self.child.kill().context("the VMM cannot be killed")?;
        self.child.wait().context("the VMM cannot be waited for")?;
        Ok(())
    }

    fn send(&mut self, op: Op, fds: &[BorrowedFd<'_>]) -> anyhow::Result<()> {
        self.asked += 1;
        Ok(self.control.send(&Request { id: self.asked, op }, fds)?)
    }

    fn answer(&mut self) -> anyhow::Result<ResultBody> {
        let (reply, _): (Reply, Vec<OwnedFd>) = self.control.receive()?;
        match reply.result {
            ResultBody::Error(error) => bail!("coppice-vmm refused: {}", error.message),
            result => Ok(result),
        }
    }

    fn done(&mut self) -> anyhow::Result<()> {
        match self.answer()? {
            ResultBody::Done => Ok(()),
            other => bail!("coppice-vmm answered another question: {other:?}"),
        }
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        // Already gone is as good as killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Name of the one checkpoint.
const NODE: &str = "node";

fn chain(first: FdIndex, new_identity: bool) -> ChainSpec {
    ChainSpec { id: NODE.into(), layers: vec![first], working_set: None, new_identity }
}

/// The guest's vsock socket.
pub(super) fn vsock(setup: &Setup) -> PathBuf {
    setup.scratch.join(VSOCK)
}

fn scratch_file(setup: &Setup) -> anyhow::Result<File> {
    tempfile::tempfile_in(&setup.scratch).context("no temporary file")
}
