//! Firecracker, by its API socket and, for boots, by its configuration file.
//!
//! Its snapshots refer to disks and sockets by path. Every machine has a directory of its own, in
//! which the process is started, and all paths are relative to it, so that any number of machines
//! can be made of one snapshot. Each has a copy of the disk, made ahead of the clock.

use std::fs;
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command as Program, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::inotify;
use serde_json::{Value, json};

use super::console::{Console, readable};
use super::http::Call;
use super::vsock::{self, Ready};
use super::{
    Boot, Contender, Extent, Feature, Guest, Host, Place, Saved, Saving, Vm, agent_cmdline,
    console_cmdline, directory, text, version_of,
};
use crate::agent::{self, Command, Head};
use crate::clock::Clock;
use crate::error::{Doing as _, Error};
use crate::model;
use crate::process::Process;

const API: &str = "api.sock";
const VSOCK: &str = "vsock";
const DISK: &str = "disk";
const CONFIG: &str = "machine.json";
const STATE: &str = "state";
const MEMORY: &str = "memory";

/// `firecracker`.
#[derive(Debug)]
pub struct Firecracker {
    name: String,
    program: PathBuf,
    host: Arc<Host>,
}

impl Firecracker {
    /// The program at an absolute path.
    #[must_use]
    pub fn new(name: String, program: PathBuf, host: Arc<Host>) -> Self {
        Self { name, program, host }
    }

    fn start(&self, place: &Place, args: &[&str], console: Stdio) -> Result<Process, Error> {
        let mut command = Program::new(&self.program);
        command.args(["--level", "Error"]).args(args);
        command.stdin(Stdio::null()).stdout(console);
        self.host.group.start(command, place.path(), None)
    }

    /// Starts it and waits until its API socket is there.
    fn start_with_api(&self, place: Place, args: &[&str], guest: &Guest) -> Result<Peer, Error> {
        let args: Vec<_> = ["--api-sock", API].iter().chain(args).copied().collect();
        let process = self.start(&place, &args, Stdio::null())?;
        let api = place.file(API);
        let watch = place.watch.as_ref();
        let watch = watch.ok_or_else(|| Error::Missing("nothing watches the directory".into()))?;
        let mut buffer = [MaybeUninit::uninit(); 1024];
        let mut created = inotify::Reader::new(watch, &mut buffer);
        while !api.exists() {
            if !readable(watch, guest.limit)? {
                return Err(Error::Late("firecracker made no API socket".into()));
            }
            created.next().doing("waiting for the API socket of firecracker")?;
        }
        Ok(Peer { process, console: None, limit: guest.limit, place, host: self.host.clone() })
    }
}

impl Contender for Firecracker {
    fn name(&self) -> &str {
        &self.name
    }

    fn about(&self) -> model::Contender {
        model::Contender {
            name: self.name.clone(),
            version: version_of(&self.program),
            program: self.program.display().to_string(),
            kind: "firecracker".into(),
        }
    }

    fn lacks(&self, _feature: Feature) -> Option<&'static str> {
        None
    }

    fn place(&self, guest: &Guest, from: Option<&Saved>) -> Result<Place, Error> {
        let mut place = Place::new(&self.host, "firecracker.")?;
        let disk = match from {
            Some(saved) => saved.directory()?.join(DISK),
            None => guest.image.clone(),
        };
        fs::copy(disk, place.file(DISK)).doing("copying a disk")?;
        let watch = inotify::init(inotify::CreateFlags::CLOEXEC).doing("watching a directory")?;
        inotify::add_watch(&watch, place.path(), inotify::WatchFlags::CREATE)
            .doing("watching a directory")?;
        place.watch = Some(watch);
        Ok(place)
    }

    fn boot_to_console(
        &self,
        guest: &Guest,
        token: &str,
        place: Place,
        clock: &mut Clock,
    ) -> Result<Box<dyn Vm>, Error> {
        let cmdline = console_cmdline("", token);
        let config = config(guest, text(&guest.image)?, true, false, &cmdline)?;
        fs::write(place.file(CONFIG), config.to_string()).doing("writing a configuration")?;
        let (console, output) = std::io::pipe().doing("making a pipe")?;
        let process = self.start(&place, &["--no-api", "--config-file", CONFIG], output.into())?;
        clock.mark("started");
        let console = Some(Console::new(console));
        let host = self.host.clone();
        Ok(Box::new(Peer { process, console, limit: guest.limit, place, host }))
    }

    fn boot(&self, guest: &Guest, how: Boot, clock: &mut Clock) -> Result<Box<dyn Vm>, Error> {
        let Boot { place, diff } = how;
        let mut config = config(guest, DISK, false, diff, &agent_cmdline())?;
        config["vsock"] = json!({ "guest_cid": 3, "uds_path": VSOCK });
        fs::write(place.file(CONFIG), config.to_string()).doing("writing a configuration")?;
        let ready = Ready::listen(&place.file(VSOCK), guest.limit)?;
        let vm = self.start_with_api(place, &["--config-file", CONFIG], guest)?;
        clock.mark("started");
        ready.wait()?;
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
        let saved = from.directory()?;
        let vm = self.start_with_api(place, &[], guest)?;
        clock.mark("started");
        let load = json!({
            "snapshot_path": text(&saved.join(STATE))?,
            "mem_backend": { "backend_type": "File", "backend_path": text(&saved.join(MEMORY))? },
            "resume_vm": true,
        });
        vm.call("PUT", "/snapshot/load", &load)?;
        clock.mark("running");
        Ok(Box::new(vm))
    }
}

fn config(
    guest: &Guest,
    disk: &str,
    read_only: bool,
    track_dirty_pages: bool,
    cmdline: &str,
) -> Result<Value, Error> {
    Ok(json!({
        "boot-source": { "kernel_image_path": text(&guest.kernel)?, "boot_args": cmdline },
        "drives": [{
            "drive_id": "root", "path_on_host": disk,
            "is_root_device": true, "is_read_only": read_only,
        }],
        "machine-config": {
            "vcpu_count": guest.vcpus, "mem_size_mib": guest.memory_mib,
            "track_dirty_pages": track_dirty_pages,
        },
    }))
}

/// A `firecracker` process.
#[derive(Debug)]
struct Peer {
    process: Process,
    console: Option<Console>,
    limit: Duration,
    host: Arc<Host>,
    place: Place,
}

impl Peer {
    fn call(&self, method: &str, path: &str, body: &Value) -> Result<(), Error> {
        let stream = connect(&self.place.file(API))?;
        vsock::limit_reads(&stream, self.limit)?;
        let call = Call {
            who: "firecracker",
            method,
            path,
            host: "localhost",
            more: "",
            body: Some(body),
        };
        call.make(stream).map(drop)
    }
}

/// Connects to the API socket; between its creation and its first accept it may refuse.
fn connect(api: &Path) -> Result<UnixStream, Error> {
    loop {
        match UnixStream::connect(api) {
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                std::thread::yield_now();
            }
            result => return result.doing("connecting to the API socket of firecracker"),
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
        let stream = vsock::connect(&self.place.file(VSOCK), self.limit)?;
        agent::run(stream, &Head::default(), command, self.limit, on_output)
    }

    /// Pauses, saves, copies the disk and resumes. The copy of the disk, which is not its doing, is
    /// not within the time that it stood still.
    fn save(&mut self, _guest: &Guest, extent: Extent) -> Result<(Saved, Saving), Error> {
        let directory = directory(&self.host, "firecracker-saved.")?;
        let paused = Instant::now();
        self.call("PATCH", "/vm", &json!({ "state": "Paused" }))?;
        let kind = if extent == Extent::Diff { "Diff" } else { "Full" };
        let create = json!({
            "snapshot_type": kind,
            "snapshot_path": text(&directory.path().join(STATE))?,
            "mem_file_path": text(&directory.path().join(MEMORY))?,
        });
        self.call("PUT", "/snapshot/create", &create)?;
        let saved_ms = paused.elapsed();
        fs::copy(self.place.file(DISK), directory.path().join(DISK)).doing("copying a disk")?;
        let resumed = Instant::now();
        self.call("PATCH", "/vm", &json!({ "state": "Resumed" }))?;
        let pause_ms = (saved_ms + resumed.elapsed()).as_secs_f64() * 1000.0;
        Ok((Saved::Files(Arc::new(directory)), Saving { pause_ms, total_ms: pause_ms }))
    }

    fn settle(&mut self) {
        self.place.watch = None;
    }

    fn end(&mut self) -> Result<(), Error> {
        self.process.kill()
    }
}
