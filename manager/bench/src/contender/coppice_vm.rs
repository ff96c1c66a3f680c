//! A `coppice-vmm` process, asked over its control socket.

use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command as Program, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coppice_vmm_protocol::{
    BootSpec, ChainSpec, CheckpointSpec, ConsoleSpec, ControlSocket, DiskRollback, DiskSpec,
    FdIndex, MachineSpec, Op, Reply, Request, ResultBody, RollbackSpec, Start, VsockSpec,
};

use super::console::Console;
use super::coppice::Node;
use super::{Extent, Guest, Host, Place, Saved, Saving, Shell, Vm, vsock};
use crate::agent::{self, Command, Head};
use crate::clock::Clock;
use crate::error::{Doing as _, Error};
use crate::process::Process;

/// Name of the vsock socket.
const VSOCK: &str = "vsock";

/// The process, with or without a machine.
#[derive(Debug)]
pub(super) struct CoppiceVm {
    process: Process,
    control: ControlSocket,
    asked: u64,
    /// What the machine stands on.
    node: Node,
    /// The disk's present overlay.
    overlay: Option<Arc<File>>,
    console: Option<Console>,
    limit: Duration,
    // Dropped last: the process has sockets in it.
    place: Place,
}

impl CoppiceVm {
    /// Executes the VMM; it has no machine yet.
    pub(super) fn start(
        program: &Path,
        host: &Host,
        place: Place,
        guest: &Guest,
    ) -> Result<Self, Error> {
        let (control, theirs) = ControlSocket::pair()?;
        vsock::limit_reads(&control, guest.limit)?;
        let theirs = theirs.into_fd();
        let mut command = Program::new(program);
        command.args(["--control-fd", &theirs.as_raw_fd().to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let process = host.group.start(command, place.path(), Some(theirs.as_fd()))?;
        let node = Node { layers: Vec::new(), disks: Vec::new(), working_set: None };
        Ok(Self {
            process,
            control,
            asked: 0,
            node,
            overlay: None,
            console: None,
            limit: guest.limit,
            place,
        })
    }

    /// Where the guest's vsock is in a place.
    pub(super) fn socket(place: &Place) -> PathBuf {
        place.file(VSOCK)
    }

    /// Has it make what a machine needs of KVM ahead of time.
    pub(super) fn prepare(&mut self, guest: &Guest) -> Result<(), Error> {
        let Guest { vcpus, memory_mib, .. } = *guest;
        self.done("a machine ahead of time", Op::Prepare { vcpus, memory_mib }, &[])
    }

    /// Boots the guest with a console and a disk that it may only read.
    pub(super) fn boot_to_console(&mut self, guest: &Guest, cmdline: &str) -> Result<(), Error> {
        let (console, output) = std::io::pipe().doing("making a pipe")?;
        let disk = DiskSpec {
            fd: 1,
            read_only: true,
            overlay: None,
            layers: Vec::new(),
            serial: "root".into(),
        };
        let start = Start::Boot(BootSpec { kernel: 0, initrd: None, cmdline: cmdline.into() });
        let console_spec = ConsoleSpec { input: None, output: Some(2) };
        let spec = machine(guest, start, disk, None, Some(console_spec));
        let (kernel, root) = (open(&guest.kernel)?, open(&guest.image)?);
        let fds = [kernel.as_fd(), root.as_fd(), output.as_fd()];
        self.done("a machine", Op::Create(Box::new(spec)), &fds)?;
        self.done("a start", Op::Start {}, &[])?;
        self.console = Some(Console::new(console));
        Ok(())
    }

    /// Boots the guest with the agent.
    pub(super) fn boot(&mut self, guest: &Guest, cmdline: &str) -> Result<(), Error> {
        let start = Start::Boot(BootSpec { kernel: 4, initrd: None, cmdline: cmdline.into() });
        let kernel = open(&guest.kernel)?;
        self.create(guest, start, Vec::new(), &[kernel.as_fd()])
    }

    fn create(
        &mut self,
        guest: &Guest,
        start: Start,
        layers: Vec<FdIndex>,
        more: &[BorrowedFd<'_>],
    ) -> Result<(), Error> {
        let image = open(&guest.image)?;
        let overlay = self.file()?;
        let listener = UnixListener::bind(Self::socket(&self.place))
            .doing("making the guest's vsock socket")?;
        let directory = open(self.place.path())?;
        let vsock = VsockSpec { cid: 3, listener: 2, directory: 3, name: VSOCK.into() };
        let disk =
            DiskSpec { fd: 0, read_only: false, overlay: Some(1), layers, serial: "root".into() };
        let spec = machine(guest, start, disk, Some(vsock), None);
        let mut fds = vec![image.as_fd(), overlay.as_fd(), listener.as_fd(), directory.as_fd()];
        fds.extend(more);
        // Both at once: it need not wait for this process in between.
        self.send(Op::Create(Box::new(spec)), &fds)?;
        self.send(Op::Start {}, &[])?;
        self.expect_done("a machine")?;
        self.expect_done("a start")?;
        self.overlay = Some(overlay);
        Ok(())
    }

    /// An empty file without a name, in the machine's directory.
    fn file(&self) -> Result<Arc<File>, Error> {
        tempfile::tempfile_in(self.place.path()).map(Arc::new).doing("making a file")
    }

    fn send(&mut self, op: Op, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        self.asked += 1;
        Ok(self.control.send(&Request { id: self.asked, op }, fds)?)
    }

    fn answer(&mut self, what: &str) -> Result<ResultBody, Error> {
        let (reply, _): (Reply, Vec<OwnedFd>) = self.control.receive()?;
        match reply.result {
            ResultBody::Error(error) => Err(refused(what, error.message)),
            result => Ok(result),
        }
    }

    fn expect_done(&mut self, what: &str) -> Result<(), Error> {
        match self.answer(what)? {
            ResultBody::Done => Ok(()),
            other => Err(refused(what, format!("{other:?}"))),
        }
    }

    fn done(&mut self, what: &str, op: Op, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        self.send(op, fds)?;
        self.expect_done(what)
    }
}

impl Vm for CoppiceVm {
    fn pid(&self) -> Option<u32> {
        Some(self.process.id())
    }

    fn wait_for_line(&mut self, token: &str) -> Result<(), Error> {
        let console = self.console.as_mut();
        let console = console.ok_or_else(|| Error::Missing("there is no console".into()))?;
        console.wait_for(token, self.limit)
    }

    fn run(&self, command: &Command, on_output: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
        let stream = vsock::connect(&Self::socket(&self.place), self.limit)?;
        agent::run(stream, &Head::default(), command, self.limit, on_output)
    }

    fn save(&mut self, _guest: &Guest, _extent: Extent) -> Result<(Saved, Saving), Error> {
        let asked = Instant::now();
        let (memory, overlay) = (self.file()?, self.file()?);
        let id = format!("node-{}", self.node.layers.len());
        let spec = CheckpointSpec {
            id: id.clone(),
            file: 0,
            overlays: vec![1],
            meta: "{}".into(),
            background: false,
        };
        self.send(Op::Checkpoint(spec), &[memory.as_fd(), overlay.as_fd()])?;
        let info = match self.answer("a checkpoint")? {
            ResultBody::Checkpoint(info) => info,
            other => return Err(refused("a checkpoint", format!("{other:?}"))),
        };
        self.done("to commit", Op::Commit { id }, &[])?;
        let disk = self.overlay.replace(overlay);
        let disk = disk.ok_or_else(|| Error::Missing("the machine has no disk".into()))?;
        self.node.layers.push(memory);
        self.node.disks.push(disk);
        self.node.working_set = None;
        let saving = Saving {
            pause_ms: Duration::from_micros(info.pause_us).as_secs_f64() * 1000.0,
            total_ms: asked.elapsed().as_secs_f64() * 1000.0,
        };
        Ok((Saved::Coppice(self.node.clone()), saving))
    }

    fn roll_back(&mut self, from: &Saved) -> Result<Option<()>, Error> {
        let node = node(from)?;
        let overlay = self.file()?;
        let (layers, disks) = (node.layers.len(), node.disks.len());
        let disk =
            DiskRollback { layers: indices(layers, disks)?, overlay: index(layers + disks)? };
        let chain = chain(layers, 0, false)?;
        let mut fds: Vec<_> = node.layers.iter().chain(&node.disks).map(|f| f.as_fd()).collect();
        fds.push(overlay.as_fd());
        self.send(Op::Rollback(RollbackSpec { chain, disks: vec![disk] }), &fds)?;
        match self.answer("a rollback")? {
            ResultBody::Rollback(_) => self.overlay = Some(overlay),
            other => return Err(refused("a rollback", format!("{other:?}"))),
        }
        self.node = node.clone();
        Ok(Some(()))
    }

    fn note_working_set(&mut self, from: &mut Saved) -> Result<bool, Error> {
        let file = self.file()?;
        self.done("a working set", Op::RecordWorkingSet { file: 0 }, &[file.as_fd()])?;
        if let Saved::Coppice(node) = from {
            node.working_set = Some(file);
        }
        Ok(true)
    }

    fn end(&mut self) -> Result<(), Error> {
        self.process.kill()
    }
}

impl Shell for CoppiceVm {
    fn restore(
        mut self: Box<Self>,
        guest: &Guest,
        from: &Saved,
        clock: &mut Clock,
    ) -> Result<Box<dyn Vm>, Error> {
        let node = node(from)?;
        let (layers, disks) = (node.layers.len(), node.disks.len());
        let mut chain = chain(layers, 4, true)?;
        let mut fds: Vec<_> = node.layers.iter().chain(&node.disks).map(|f| f.as_fd()).collect();
        if let Some(working_set) = &node.working_set {
            chain.working_set = Some(index(4 + layers + disks)?);
            fds.push(working_set.as_fd());
        }
        self.create(guest, Start::Checkpoint(chain), indices(4 + layers, disks)?, &fds)?;
        self.node = node.clone();
        clock.mark("running");
        Ok(self)
    }
}

fn node(from: &Saved) -> Result<&Node, Error> {
    match from {
        Saved::Coppice(node) => Ok(node),
        Saved::Files(_) | Saved::Named(_) => {
            Err(Error::Missing("what was saved is of another contender".into()))
        }
    }
}

fn machine(
    guest: &Guest,
    start: Start,
    disk: DiskSpec,
    vsock: Option<VsockSpec>,
    console: Option<ConsoleSpec>,
) -> MachineSpec {
    MachineSpec {
        vcpus: guest.vcpus,
        memory_mib: guest.memory_mib,
        start,
        disks: vec![disk],
        vsock,
        console,
        rng: false,
        balloon: None,
    }
}

/// A chain of `count` layers from descriptor `first` on.
fn chain(count: usize, first: usize, new_identity: bool) -> Result<ChainSpec, Error> {
    let id = format!("node-{}", count.saturating_sub(1));
    Ok(ChainSpec { id, layers: indices(first, count)?, working_set: None, new_identity })
}

fn index(number: usize) -> Result<FdIndex, Error> {
    FdIndex::try_from(number).map_err(|_| Error::Missing("too many files".into()))
}

fn indices(first: usize, count: usize) -> Result<Vec<FdIndex>, Error> {
    (first..first + count).map(index).collect()
}

fn refused(what: &str, answer: String) -> Error {
    Error::Refused { who: "coppice-vmm".into(), what: what.into(), answer }
}

fn open(path: &Path) -> Result<File, Error> {
    File::open(path).doing(format!("opening {}", path.display()))
}
