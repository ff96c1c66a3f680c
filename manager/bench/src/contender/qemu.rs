//! QEMU's microvm machine, by its command line and its control socket.
//!
//! Its guest's vsock is the host's (`vhost-vsock`), which QEMU has as others have a Unix socket; it
//! needs `/dev/vhost-vsock`, and the client connects to the guest's context ID. Its snapshots are
//! migrations to a file, taken while the machine stands still, as libvirt's `virsh save` does it;
//! there is no snapshot of what changed. Its devices are found by ACPI, since that way alone leaves
//! the kernel's parameters as they are for everybody.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Command as Program, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use coppice_agent_protocol::{ENVD_PORT, READY_PORT};
use rustix::net::accept;
use serde_json::json;

use super::console::{Console, readable};
use super::qmp::{Listener, Qmp};
use super::vsock::limit_reads;
use super::{
    Boot, Contender, Extent, Feature, Guest, Host, Place, Saved, Saving, Vm, agent_cmdline,
    console_cmdline, directory, text, version_of,
};
use crate::agent::{self, Command, Head};
use crate::clock::Clock;
use crate::error::{Doing as _, Error};
use crate::model;
use crate::process::Process;
use crate::sys;

const DISK: &str = "disk";
const STATE: &str = "state";
const QMP: &str = "qmp.sock";

/// More than any disk or memory takes: saving is not to be throttled.
const NO_LIMIT: u64 = 1 << 42;

/// How long the first try to connect to a guest may take.
const FIRST_TRY: Duration = Duration::from_millis(10);

/// `qemu-system-x86_64`.
#[derive(Debug)]
pub struct Qemu {
    name: String,
    program: PathBuf,
    host: Arc<Host>,
    /// The next guest's context ID on this host.
    next_cid: AtomicU32,
}

impl Qemu {
    /// The program at an absolute path.
    #[must_use]
    pub fn new(name: String, program: PathBuf, host: Arc<Host>) -> Self {
        // Another benchmark on the same host begins elsewhere.
        let first = std::process::id() % 0x10_0000 * 0x400 + 0x400;
        Self { name, program, host, next_cid: AtomicU32::new(first) }
    }

    /// What every machine is made of; `disk` may have options after its path.
    fn machine(&self, guest: &Guest, disk: &str) -> Program {
        let mut command = Program::new(&self.program);
        command.args([
            "-machine",
            "microvm,accel=kvm,acpi=on,rtc=off,pit=off,pic=off,pcie=off,usb=off,isa-serial=on",
            "-cpu",
            "host",
            "-smp",
            &guest.vcpus.to_string(),
            "-m",
            &format!("{}M", guest.memory_mib),
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
            "-drive",
            &format!("id=root,if=none,format=raw,file={disk}"),
            "-device",
            "virtio-blk-device,drive=root",
            "-serial",
            "stdio",
        ]);
        command.stdin(Stdio::null());
        command
    }

    /// A machine with a vsock device and a control socket.
    fn start_with_vsock(
        &self,
        guest: &Guest,
        place: Place,
        more: impl FnOnce(&mut Program),
    ) -> Result<Peer, Error> {
        let cid = self.next_cid.fetch_add(1, Ordering::Relaxed);
        let listener = Listener::new(&place.file(QMP))?;
        let mut command = self.machine(guest, DISK);
        command.args(["-device", &format!("vhost-vsock-device,guest-cid={cid}")]);
        command.args(["-qmp", &format!("unix:{QMP}")]);
        more(&mut command);
        command.stdout(Stdio::null());
        let process = self.host.group.start(command, place.path(), None)?;
        let qmp = Some(listener.accept(guest.limit)?);
        let (limit, host) = (guest.limit, self.host.clone());
        Ok(Peer { process, console: None, qmp, cid, limit, host, place })
    }
}

impl Contender for Qemu {
    fn name(&self) -> &str {
        &self.name
    }

    fn about(&self) -> model::Contender {
        model::Contender {
            name: self.name.clone(),
            version: version_of(&self.program),
            program: self.program.display().to_string(),
            kind: "qemu".into(),
        }
    }

    fn lacks(&self, feature: Feature) -> Option<&'static str> {
        match feature {
            Feature::Diff => Some("QEMU does not save what changed only"),
            Feature::Boot | Feature::Memory => None,
            Feature::Save | Feature::Many => match fs::exists("/dev/vhost-vsock") {
                Ok(true) => None,
                _ => Some("QEMU's vsock needs /dev/vhost-vsock: `modprobe vhost_vsock`"),
            },
        }
    }

    fn place(&self, guest: &Guest, from: Option<&Saved>) -> Result<Place, Error> {
        let place = Place::new(&self.host, "qemu.")?;
        let disk = match from {
            Some(saved) => saved.directory()?.join(DISK),
            None => guest.image.clone(),
        };
        fs::copy(disk, place.file(DISK)).doing("copying a disk")?;
        Ok(place)
    }

    fn boot_to_console(
        &self,
        guest: &Guest,
        token: &str,
        place: Place,
        clock: &mut Clock,
    ) -> Result<Box<dyn Vm>, Error> {
        let mut command = self.machine(guest, &format!("{},read-only=on", text(&guest.image)?));
        let cmdline = console_cmdline("root=/dev/vda ro", token);
        command.arg("-kernel").arg(&guest.kernel).args(["-append", &cmdline]);
        let (console, output) = std::io::pipe().doing("making a pipe")?;
        command.stdout(output);
        let process = self.host.group.start(command, place.path(), None)?;
        clock.mark("started");
        let (limit, host) = (guest.limit, self.host.clone());
        let console = Some(Console::new(console));
        Ok(Box::new(Peer { process, console, qmp: None, cid: 0, limit, host, place }))
    }

    fn boot(&self, guest: &Guest, how: Boot, clock: &mut Clock) -> Result<Box<dyn Vm>, Error> {
        // The agent connects to the host itself, where one at a time listens.
        let ready = sys::vsock_listen(sys::ANY_CID, READY_PORT).doing("listening for the agent")?;
        let cmdline = format!("{} root=/dev/vda rw", agent_cmdline());
        let vm = self.start_with_vsock(guest, how.place, |command| {
            command.arg("-kernel").arg(&guest.kernel).args(["-append", &cmdline]);
        })?;
        clock.mark("started");
        if !readable(&ready, guest.limit)? {
            return Err(Error::Late("the guest's agent did not come up".into()));
        }
        accept(&ready).doing("waiting for the guest's agent to serve")?;
        clock.mark("ready");
        Ok(Box::new(vm))
    }

    fn restore(
        &self,
        guest: &Guest,
        from: &Saved,
        place: Place,
        clock: &mut Clock,
    ) -> Result<Box<dyn Vm>, Error> {
        let state = format!("file:{}", text(&from.directory()?.join(STATE))?);
        let mut vm = self.start_with_vsock(guest, place, |command| {
            command.args(["-incoming", "defer"]);
        })?;
        clock.mark("started");
        let qmp = vm.qmp()?;
        qmp.ask("migrate-set-capabilities", &with_events())?;
        qmp.ask("migrate-incoming", &json!({ "uri": state }))?;
        qmp.wait_for_migration()?;
        qmp.ask("cont", &json!({}))?;
        clock.mark("running");
        Ok(Box::new(vm))
    }
}

/// Has QEMU tell when a migration ends.
fn with_events() -> serde_json::Value {
    json!({ "capabilities": [{ "capability": "events", "state": true }] })
}

/// A QEMU process.
#[derive(Debug)]
struct Peer {
    process: Process,
    console: Option<Console>,
    qmp: Option<Qmp>,
    cid: u32,
    limit: Duration,
    host: Arc<Host>,
    place: Place,
}

impl Peer {
    fn qmp(&mut self) -> Result<&mut Qmp, Error> {
        self.qmp.as_mut().ok_or_else(|| Error::Missing("this QEMU has no control socket".into()))
    }

    /// Connects to the agent. Until a restored guest has heard of its new context ID its answers
    /// are dropped, and nobody repeats them: so the first try is short, and later ones longer.
    fn connect(&self) -> Result<OwnedFd, Error> {
        let started = Instant::now();
        let mut patience = FIRST_TRY;
        loop {
            match sys::vsock_connect(self.cid, ENVD_PORT, patience.min(self.limit)) {
                Err(error)
                    if error.kind() == io::ErrorKind::TimedOut
                        && started.elapsed() < self.limit => {}
                result => return result.doing("connecting to the guest's vsock"),
            }
            patience = patience.saturating_mul(2);
        }
    }
}

impl Vm for Peer {
    fn pid(&self) -> Option<u32> {
        Some(self.process.id())
    }

    fn wait_for_line(&mut self, token: &str) -> Result<(), Error> {
        let console = self.console.as_mut();
        let console = console.ok_or_else(|| Error::Missing("there is no console".into()))?;
        console.wait_for(token, self.limit)
    }

    fn run(&self, command: &Command, on_output: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
        let stream = self.connect()?;
        limit_reads(&stream, self.limit)?;
        agent::run(File::from(stream), &Head::default(), command, self.limit, on_output)
    }

    fn save(&mut self, guest: &Guest, extent: Extent) -> Result<(Saved, Saving), Error> {
        if extent == Extent::Diff {
            return Err(Error::Missing("QEMU does not save what changed only".into()));
        }
        let directory = directory(&self.host, "qemu-saved.")?;
        let uri = format!("file:{}", text(&directory.path().join(STATE))?);
        let disk = self.place.file(DISK);
        let limit = guest.limit;
        let qmp = self.qmp()?;
        qmp.ask("migrate-set-capabilities", &with_events())?;
        qmp.ask("migrate-set-parameters", &json!({ "max-bandwidth": NO_LIMIT }))?;
        let asked = Instant::now();
        qmp.ask("stop", &json!({}))?;
        qmp.ask("migrate", &json!({ "uri": uri }))?;
        qmp.wait_for_migration()?;
        let saved = asked.elapsed();
        if saved > limit {
            return Err(Error::Late("saving took longer than the limit".into()));
        }
        fs::copy(disk, directory.path().join(DISK)).doing("copying a disk")?;
        let resumed = Instant::now();
        self.qmp()?.ask("cont", &json!({}))?;
        let pause_ms = (saved + resumed.elapsed()).as_secs_f64() * 1000.0;
        Ok((Saved::Files(Arc::new(directory)), Saving { pause_ms, total_ms: pause_ms }))
    }

    fn end(&mut self) -> Result<(), Error> {
        self.process.kill()
    }
}
