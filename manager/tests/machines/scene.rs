//! A store, and micro-guests that stay in it as `coppice run --detach` would leave them.

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use coppice_manager::home::Home;
use coppice_manager::store::{BaseImage, DiskChain, Id, Machine, Meta, NewSandbox, Store};
use coppice_manager::vmm::{Passed, ProcessId, Vmm};
use coppice_micro::{Code, Interpreter};
use coppice_vmm_protocol::{
    BootSpec, ChainSpec, ConsoleSpec, DiskSpec, MachineSpec, Start, VsockSpec,
};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::program;

const MEMORY_MIB: u32 = 64;
const DISK_BYTES: usize = 64 << 10;
const CID: u32 = 3;
/// What the manager calls a sandbox's vsock socket.
const VSOCK: &str = "vsock.sock";

pub(crate) struct Scene {
    dir: tempfile::TempDir,
    pub(crate) store: Store,
    pub(crate) program: PathBuf,
}

impl Scene {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("base"), vec![0; DISK_BYTES]).unwrap();
        let store = Store::open(&Home::at(dir.path().join("home"))).unwrap();
        Self { dir, store, program: program("coppice-vmm") }
    }

    /// Where machines may not have their memory write-protected by themselves.
    pub(crate) fn without_write_protection() -> Self {
        let mut scene = Self::new();
        let wrapper = scene.dir.path().join("coppice-vmm");
        let vmm = scene.program.display();
        // Neither by privilege nor by the device, which a mount hides.
        let script = format!(
            "#!/bin/sh\nif [ -e /dev/userfaultfd ] && [ -z \"$HIDDEN\" ]; then\n\
             HIDDEN=1 exec unshare --mount -- \"$0\" \"$@\"\nfi\n\
             [ -z \"$HIDDEN\" ] || mount --bind /dev/null /dev/userfaultfd\n\
             exec setpriv --bounding-set -sys_ptrace {vmm} \"$@\"\n"
        );
        std::fs::write(&wrapper, script).unwrap();
        std::fs::set_permissions(&wrapper, Permissions::from_mode(0o700)).unwrap();
        scene.program = wrapper;
        scene
    }

    pub(crate) fn machine() -> Machine {
        Machine {
            vcpus: 1,
            memory_mib: MEMORY_MIB,
            kernel: "/micro".into(),
            cmdline: String::new(),
            initrd: None,
            cid: CID,
            rng: true,
            balloon: None,
        }
    }

    fn spec(
        passed: &mut Passed,
        start: Start,
        base: File,
        layers: Vec<File>,
        top: File,
    ) -> MachineSpec {
        let layers = layers.into_iter().map(|layer| passed.add(layer).unwrap()).collect();
        MachineSpec {
            vcpus: 1,
            memory_mib: MEMORY_MIB,
            start,
            disks: vec![DiskSpec {
                fd: passed.add(base).unwrap(),
                read_only: false,
                overlay: Some(passed.add(top).unwrap()),
                layers,
                serial: "root".into(),
            }],
            vsock: None,
            console: None,
            rng: true,
            balloon: None,
        }
    }

    /// Boots a sandbox that runs the interpreter.
    pub(crate) async fn boot(&self) -> (Id, Interpreter) {
        let path = self.dir.path().join("base");
        let base = BaseImage::of(&path, &File::open(&path).unwrap()).unwrap();
        let disk = DiskChain { base, read_only: false, serial: "root".into(), layers: Vec::new() };
        let new = NewSandbox { id: None, name: None, machine: Self::machine(), disks: vec![disk] };
        let (mut entry, tops) = self.store.create_sandbox(new).unwrap();
        let log = File::create(entry.directory().join("vmm.log")).unwrap();
        let vmm = Vmm::start_detached(&self.program, &entry.control_socket(), log).unwrap();
        entry.set_process(ProcessId::of(vmm.pid()).unwrap()).unwrap();
        let mut passed = Passed::default();
        let kernel = passed.add(Code::new().interpreter().kernel()).unwrap();
        let start = Start::Boot(BootSpec { kernel, initrd: None, cmdline: String::new() });
        let top = tops.into_iter().next().unwrap();
        let base = File::open(&path).unwrap();
        let mut spec = Self::spec(&mut passed, start, base, Vec::new(), top);
        let listener = UnixListener::bind(entry.socket(VSOCK)).unwrap();
        let directory = entry.handle().try_clone().unwrap();
        spec.vsock = Some(vsock(&mut passed, listener, directory));
        let guest = console(&mut passed, &mut spec);
        vmm.create(spec, passed).await.unwrap();
        vmm.run().await.unwrap();
        (entry.record().id.clone(), guest)
    }

    /// Starts a machine from a checkpoint that is no sandbox of the store; it ends with its VMM's
    /// handle.
    pub(crate) async fn look_into(&self, meta: &Meta) -> (Vmm, Interpreter) {
        let vmm = Vmm::start(&self.program).unwrap();
        let mut passed = Passed::default();
        let memory = meta.memory_chain();
        let mut open = |path| passed.add(File::open(path).unwrap()).unwrap();
        let layers = memory.iter().map(|id| open(self.store.memory_path(id))).collect();
        let id = meta.id.to_string();
        let chain = ChainSpec { id, layers, working_set: None, new_identity: true };
        let disk = &meta.standing.disks[0];
        let sealed = disk.layers.iter().map(|id| File::open(self.store.disk_path(id)).unwrap());
        let (base, top) = (File::open(&disk.base.path).unwrap(), tempfile::tempfile().unwrap());
        let start = Start::Checkpoint(chain);
        let mut spec = Self::spec(&mut passed, start, base, sealed.collect(), top);
        let sockets = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(sockets.path().join(VSOCK)).unwrap();
        spec.vsock = Some(vsock(&mut passed, listener, File::open(sockets.path()).unwrap().into()));
        let guest = console(&mut passed, &mut spec);
        vmm.create(spec, passed).await.unwrap();
        vmm.run().await.unwrap();
        (vmm, guest)
    }

    /// Where a checkpoint's file is.
    pub(crate) fn checkpoint_file(&self, meta: &Meta) -> PathBuf {
        self.store.path().join("checkpoints").join(format!("{}.ckpt", meta.id))
    }

    /// The store opens and nothing in it is damaged, down to every page.
    pub(crate) fn assert_whole(&self) {
        let store = Store::open(&Home::at(self.store.path())).unwrap();
        let report = store.check(true, false).unwrap();
        assert!(!report.findings.iter().any(|finding| finding.is_loss()), "{report:?}");
    }

    /// Names of all files that hold memory or disks, and of sandboxes.
    pub(crate) fn files(&self) -> Vec<String> {
        let names = |part: &str| {
            let entries = std::fs::read_dir(self.store.path().join(part)).unwrap();
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap())
        };
        let mut all: Vec<_> =
            names("checkpoints").chain(names("layers")).chain(names("sandboxes")).collect();
        all.sort();
        all
    }
}

impl Drop for Scene {
    /// A test that fails leaves no machine behind.
    fn drop(&mut self) {
        for entry in self.store.sandboxes().unwrap_or_default() {
            let process = entry.record.ok().and_then(|record| record.process);
            let process = process.filter(|_| entry.alive);
            if let Some(pid) =
                process.and_then(|process| Pid::from_raw(process.pid.try_into().ok()?))
            {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

fn vsock(
    passed: &mut Passed,
    listener: UnixListener,
    directory: std::os::fd::OwnedFd,
) -> VsockSpec {
    VsockSpec {
        cid: CID,
        listener: passed.add(listener).unwrap(),
        directory: passed.add(directory).unwrap(),
        name: VSOCK.into(),
    }
}

fn console(passed: &mut Passed, spec: &mut MachineSpec) -> Interpreter {
    let (guest, input, output) = Interpreter::pipes();
    let (input, output) = (passed.add(input).unwrap(), passed.add(output).unwrap());
    spec.console = Some(ConsoleSpec { input: Some(input), output: Some(output) });
    guest
}

pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}
