//! Live sandboxes in the store: directories with a record, a lock and sockets.
//!
//! Whoever changes a sandbox holds its lock, so commands on one sandbox follow each other. Whether
//! its machine still runs shows on its control socket: the VMM listens there as long as it lives.

use std::fs::{self, File};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::files::{self, Held, at};
use super::record::machine_id;
use super::record::now_ms;
use super::{
    DiskChain, Error, GuestSettings, Id, Machine, Meta, Name, Next, SandboxRecord, Standing, Store,
};
use crate::vmm::ProcessId;

/// File name of a sandbox's record.
const RECORD: &str = "sandbox.json";
/// File name of its lock.
const LOCK: &str = "lock";
/// File name of the VMM's control socket.
const CONTROL: &str = "control.sock";

/// A sandbox as it is found in the store.
#[derive(Debug)]
pub struct SandboxEntry {
    /// Its ID.
    pub id: Id,
    /// Its record, or why it cannot be read.
    pub record: Result<SandboxRecord, Error>,
    /// Whether its machine runs, or somebody is working on it.
    pub alive: bool,
    /// Bytes that the layers it writes to take on disk.
    pub disk_bytes: u64,
}

/// What a new sandbox is to be.
#[derive(Debug, Clone)]
pub struct NewSandbox {
    /// Its ID, drawn by the caller; one is drawn when it is absent.
    pub id: Option<Id>,
    /// Its name.
    pub name: Option<Name>,
    /// The machine.
    pub machine: Machine,
    /// Its disks if it is booted; of one that is not, [`Store::stand_on`] gives them later.
    pub disks: Vec<DiskChain>,
}

/// A sandbox whose lock this process holds.
#[derive(Debug)]
pub struct Sandbox {
    record: SandboxRecord,
    directory: PathBuf,
    /// Keeps short paths into the directory valid.
    handle: OwnedFd,
    _lock: Held,
}

/// A sandbox to look at and to connect to.
#[derive(Debug)]
pub struct View {
    record: SandboxRecord,
    /// Keeps short paths into the directory valid.
    handle: OwnedFd,
}

impl View {
    /// Its record, which somebody else may change.
    pub fn record(&self) -> &SandboxRecord {
        &self.record
    }

    /// As [`Sandbox::socket`].
    pub fn socket(&self, name: &str) -> PathBuf {
        short_path(&self.handle, name)
    }

    /// As [`Sandbox::control_socket`].
    pub fn control_socket(&self) -> PathBuf {
        self.socket(CONTROL)
    }
}

impl Sandbox {
    /// Its record.
    pub fn record(&self) -> &SandboxRecord {
        &self.record
    }

    /// Its directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// An `O_PATH` descriptor of the directory.
    pub fn handle(&self) -> &OwnedFd {
        &self.handle
    }

    /// Path of a socket in the directory, short enough for any socket while this value lives.
    pub fn socket(&self, name: &str) -> PathBuf {
        short_path(&self.handle, name)
    }

    /// Path of the VMM's control socket, as [`Sandbox::socket`].
    pub fn control_socket(&self) -> PathBuf {
        self.socket(CONTROL)
    }

    /// Writes down which process runs the machine.
    ///
    /// # Errors
    /// The system's.
    pub fn set_process(&mut self, process: ProcessId) -> Result<(), Error> {
        self.record.process = Some(process);
        self.write()
    }

    /// Writes down what its guest is to be told whenever it was copied or taken back.
    ///
    /// # Errors
    /// The system's.
    pub fn set_guest(&mut self, guest: GuestSettings) -> Result<(), Error> {
        self.record.guest = guest;
        self.write()
    }

    /// Writes down that its machine is to end, or has ended, and goes on later from where it
    /// stands; or that it goes on.
    ///
    /// # Errors
    /// The system's.
    pub fn set_suspended(&mut self, suspended: bool) -> Result<(), Error> {
        self.record.suspended = suspended;
        self.write()
    }

    /// Removes the sockets that an ended machine left, so that the next one can bind its own.
    ///
    /// # Errors
    /// The system's.
    pub fn clear_sockets(&self, names: &[&str]) -> Result<(), Error> {
        for name in names.iter().chain([&CONTROL]) {
            let path = self.directory.join(name);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(at(&path)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Writes down that it stands on other files with the same content.
    ///
    /// # Errors
    /// The system's; it stands as before then.
    pub(super) fn stand(&mut self, standing: Standing) -> Result<(), Error> {
        let before = std::mem::replace(&mut self.record.standing, standing);
        self.write().inspect_err(|_| self.record.standing = before)
    }

    /// Writes down what is under way.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn plan(&mut self, next: Next) -> Result<(), Error> {
        self.record.next = Some(next);
        self.write()
    }

    /// Writes down that it succeeded.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn arrive(&mut self) -> Result<(), Error> {
        if let Some(next) = self.record.next.take() {
            self.record.standing = next.standing;
        }
        self.write()
    }

    /// Writes down that it did not; `switched` if the machine writes to the new layers anyway.
    pub(super) fn stay(&mut self, switched: bool) -> Result<(), Error> {
        if let Some(next) = self.record.next.take().filter(|_| switched) {
            self.record.standing.disks = next.standing.disks;
        }
        self.write()
    }

    fn write(&self) -> Result<(), Error> {
        let bytes = serde_json::to_vec_pretty(&self.record).map_err(Error::Encode)?;
        files::replace(&self.directory.join(RECORD), &bytes)
    }
}

impl Store {
    /// All sandboxes.
    ///
    /// # Errors
    /// [`Error::Io`] when the store cannot be read; an unreadable record is part of the answer.
    pub fn sandboxes(&self) -> Result<Vec<SandboxEntry>, Error> {
        let _lock = self.shared()?;
        self.read_sandboxes()
    }

    pub(super) fn read_sandboxes(&self) -> Result<Vec<SandboxEntry>, Error> {
        let mut entries = Vec::new();
        for name in files::names(&self.sandboxes_dir())? {
            let Some(id) = Id::parse(&name) else { continue };
            let directory = self.sandboxes_dir().join(&name);
            let record = read_record(&directory, &id);
            let tops = record.iter().flat_map(|record| record.standing.tops());
            let disk_bytes = tops.map(|top| files::allocated(&self.disk_path(top))).sum();
            entries.push(SandboxEntry { alive: is_alive(&directory)?, id, record, disk_bytes });
        }
        Ok(entries)
    }

    /// Makes a sandbox's directory and the layers its disks write to, which are returned open and
    /// in order, and takes its lock.
    ///
    /// # Errors
    /// [`Error::NameTaken`], or the system's.
    pub fn create_sandbox(&self, new: NewSandbox) -> Result<(Sandbox, Vec<File>), Error> {
        let _lock = self.exclusive()?;
        self.check_name(new.name.as_ref())?;
        let id = new.id.map_or_else(Id::new, Ok).map_err(at(&self.sandboxes_dir()))?;
        let directory = self.sandboxes_dir().join(id.as_str());
        files::create_directory(&directory)?;
        let lock = take_lock(&directory)?;
        let (mut disks, mut tops) = (new.disks, Vec::new());
        for disk in disks.iter_mut().filter(|disk| !disk.read_only) {
            let (id, top) = self.unzipped_layers(1)?;
            disk.layers = id;
            tops.extend(top);
        }
        let standing = Standing { parent: None, memory: Vec::new(), disks };
        let record = SandboxRecord {
            id,
            name: new.name,
            created_ms: now_ms(),
            machine: new.machine,
            machine_id: machine_id().map_err(at(&directory))?,
            process: None,
            suspended: false,
            guest: GuestSettings::default(),
            standing,
            next: None,
        };
        let handle = open_directory(&directory)?;
        let sandbox = Sandbox { record, directory, handle, _lock: lock };
        sandbox.write()?;
        Ok((sandbox, tops))
    }

    /// Has a sandbox that has no disks yet start from a checkpoint: gives the checkpoint's record
    /// and the layers its disks write to, open and in order.
    ///
    /// # Errors
    /// Those of [`Store::checkpoint`], or the system's.
    pub fn stand_on(&self, sandbox: &mut Sandbox, from: &Id) -> Result<(Meta, Vec<File>), Error> {
        let _lock = self.shared()?;
        let meta = self.usable(from)?;
        let (ids, tops) = self.unzipped_layers(meta.standing.writable_disks())?;
        sandbox.record.standing = meta.continued(&ids);
        sandbox.write()?;
        Ok((meta, tops))
    }

    fn unzipped_layers(&self, count: usize) -> Result<(Vec<Id>, Vec<File>), Error> {
        Ok(self.new_layers(count)?.into_iter().unzip())
    }

    /// Takes the lock of a sandbox, waiting for whoever has it.
    ///
    /// # Errors
    /// [`Error::NotFound`], or [`Error::SandboxRecord`] when its record is unusable.
    pub fn lock_sandbox(&self, id: &Id) -> Result<Sandbox, Error> {
        let directory = self.sandboxes_dir().join(id.as_str());
        let found = |directory: &Path| match directory.join(RECORD).exists() {
            true => Ok(()),
            false => Err(Error::NotFound { reference: id.to_string() }),
        };
        found(&directory)?;
        let handle = open_directory(&directory)?;
        let lock = take_lock(&directory);
        // Looked at under the lock: who had it before may have changed or removed the sandbox.
        found(&directory)?;
        let record = read_record(&directory, id)?;
        Ok(Sandbox { record, directory, handle, _lock: lock? })
    }

    /// Looks at a sandbox without its lock.
    ///
    /// # Errors
    /// As for [`Store::lock_sandbox`].
    pub fn look_at(&self, id: &Id) -> Result<View, Error> {
        let directory = self.sandboxes_dir().join(id.as_str());
        if !directory.join(RECORD).exists() {
            return Err(Error::NotFound { reference: id.to_string() });
        }
        let handle = open_directory(&directory)?;
        Ok(View { record: read_record(&directory, id)?, handle })
    }

    /// Plans that the sandbox goes on from a checkpoint, with new layers on top of its disks;
    /// those are returned with the checkpoint's record, open and in order.
    /// [`Store::complete_move`] follows, or [`Store::settle`] when it fails.
    ///
    /// # Errors
    /// Those of [`Store::checkpoint`], or the system's.
    pub fn begin_move(&self, sandbox: &mut Sandbox, to: &Id) -> Result<(Meta, Vec<File>), Error> {
        let _lock = self.shared()?;
        let meta = self.usable(to)?;
        let (ids, tops) = self.unzipped_layers(meta.standing.writable_disks())?;
        let standing = meta.continued(&ids);
        sandbox.plan(Next { standing, checkpoint: None, name: None })?;
        Ok((meta, tops))
    }

    /// Finds out what became of an operation that failed or whose command died, and writes it
    /// down. `stands_on` is the checkpoint that the machine stands on, as the VMM says; it must
    /// have been asked after [`Store::lock_sandbox`] and after the operation's files were closed
    /// here.
    ///
    /// The VMM keeps the lock that a new top layer was handed over with, which shows whether the
    /// machine writes to it.
    ///
    /// # Errors
    /// The system's.
    pub fn settle(&self, sandbox: &mut Sandbox, stands_on: Option<&str>) -> Result<(), Error> {
        let Some(next) = sandbox.record.next.clone() else { return Ok(()) };
        let top = next.standing.tops().next();
        let switched = top.map(|top| files::is_locked(&self.disk_path(top))).transpose()?;
        let parent = next.standing.parent.as_ref().map(Id::as_str);
        let arrived = match (&next.checkpoint, switched) {
            // Without disks, going back to where it stands changes nothing that is written down.
            (Some(_), _) | (None, None) => stands_on == parent,
            (None, Some(switched)) => switched,
        };
        match arrived {
            true => sandbox.arrive()?,
            false => sandbox.stay(next.checkpoint.is_some() && switched == Some(true))?,
        }
        self.collect().map(drop)
    }

    /// Completes a move: the sandbox stands on the checkpoint, and what it wrote since is gone.
    ///
    /// # Errors
    /// The system's.
    pub fn complete_move(&self, sandbox: &mut Sandbox) -> Result<(), Error> {
        sandbox.arrive()?;
        self.collect().map(drop)
    }

    /// Removes a sandbox whose machine does not run any more, and the layers that only it had.
    ///
    /// # Errors
    /// [`Error::Running`], or the system's.
    pub fn remove_sandbox(&self, sandbox: Sandbox) -> Result<(), Error> {
        {
            let _lock = self.exclusive()?;
            if listens(&sandbox.control_socket()) {
                return Err(Error::Running { id: sandbox.record.id.clone() });
            }
            remove_directory(&sandbox.directory)?;
        }
        drop(sandbox);
        self.collect().map(drop)
    }
}

/// Removes a sandbox's directory, its record first: without it the rest is nobody's.
pub(super) fn remove_directory(directory: &Path) -> Result<(), Error> {
    files::remove(&directory.join(RECORD))?;
    fs::remove_dir_all(directory).map_err(at(directory))
}

/// Whether a sandbox's machine runs, or somebody holds its lock.
pub(super) fn is_alive(directory: &Path) -> Result<bool, Error> {
    if files::is_locked(&directory.join(LOCK))? {
        return Ok(true);
    }
    let Ok(handle) = open_directory(directory) else { return Ok(false) };
    Ok(listens(&short_path(&handle, CONTROL)))
}

/// Whether a program accepts connections on a control socket.
fn listens(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let Ok(address) = SocketAddrUnix::new(path) else { return false };
    let kind = SocketType::SEQPACKET;
    let Ok(socket) = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None) else {
        // Out of descriptors: nothing may be taken for dead.
        return true;
    };
    match rustix::net::connect(&socket, &address) {
        // A full backlog is a listener's too.
        Ok(()) | Err(rustix::io::Errno::AGAIN) => true,
        Err(_) => false,
    }
}

fn take_lock(directory: &Path) -> Result<Held, Error> {
    Held::take(&directory.join(LOCK), FlockOperation::LockExclusive)
}

fn open_directory(directory: &Path) -> Result<OwnedFd, Error> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::open(directory, flags, Mode::empty()).map_err(|e| at(directory)(e.into()))
}

/// A path through a descriptor: a socket's path may have 107 bytes only, a store's may be longer.
fn short_path(directory: &OwnedFd, name: &str) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}/{name}", directory.as_raw_fd()))
}

pub(super) fn read_record(directory: &Path, id: &Id) -> Result<SandboxRecord, Error> {
    let unusable = |reason: String| Error::SandboxRecord { id: id.clone(), reason };
    let bytes = fs::read(directory.join(RECORD)).map_err(|error| unusable(error.to_string()))?;
    let record: SandboxRecord =
        serde_json::from_slice(&bytes).map_err(|error| unusable(error.to_string()))?;
    if record.id != *id {
        return Err(unusable(format!("it is of {}", record.id)));
    }
    Ok(record)
}
