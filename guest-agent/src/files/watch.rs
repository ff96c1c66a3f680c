//! Collects what happens in a directory, or in a tree of directories, from the kernel's inotify.
//!
//! A directory that appears in a watched tree is first watched and then scanned, so whatever is put
//! into it is either found or told of; what is found and told of is reported once. Directories that
//! are moved are forgotten under the old name and scanned under the new one.
//!
//! Memory is bounded: events are taken from the kernel up to a limit of bytes, the rest waits in
//! the kernel's queue, and when that overflows, the watch fails and says so.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::ReadDir;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use coppice_agent_protocol::filesystem::{EventType, FilesystemEvent};
use coppice_agent_protocol::{Code, ConnectError};
use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};

use super::{describe, failure};
use crate::users::Names;

/// Most directories of one tree.
const MAX_DIRECTORIES: usize = 65_536;

/// Most names remembered as found in a scan; more may be reported twice.
const MAX_FOUND: usize = 65_536;

/// What an event takes beside its name, and with an entry.
const EVENT_BYTES: usize = 64;
const ENTRY_BYTES: usize = 512;

/// Magic numbers of file systems that others change too (linux/magic.h, and the sources of CIFS):
/// NFS, SMB, CIFS, SMB 2, FUSE.
const NETWORK: [i64; 5] = [0x6969, 0x517B, 0xFF53_4D42, 0xFE53_4D42, 0x6573_5546];

/// What is told of each directory.
const EVENTS: AddWatchFlags = AddWatchFlags::IN_CREATE
    .union(AddWatchFlags::IN_DELETE)
    .union(AddWatchFlags::IN_MODIFY)
    .union(AddWatchFlags::IN_ATTRIB)
    .union(AddWatchFlags::IN_MOVED_FROM)
    .union(AddWatchFlags::IN_MOVED_TO)
    .union(AddWatchFlags::IN_ONLYDIR);

/// What is told of the watched directory itself in addition.
const OWN_EVENTS: AddWatchFlags = AddWatchFlags::IN_DELETE_SELF.union(AddWatchFlags::IN_MOVE_SELF);

/// What to watch, and how.
#[derive(Debug, Clone)]
pub(crate) struct Scope {
    /// The directory.
    pub(crate) path: PathBuf,
    /// Whether all directories within are watched too.
    pub(crate) recursive: bool,
    /// Whether events describe what they are about.
    pub(crate) include_entry: bool,
    /// Whether the directory may be on a network file system.
    pub(crate) allow_network_mounts: bool,
}

/// Why collecting paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The kernel has no more events.
    Drained,
    /// There are as many as were asked for.
    Full,
    /// The watch is over.
    Failed,
}

/// The collector; see the module.
#[derive(Debug)]
pub(crate) struct Collector {
    scope: Scope,
    inotify: Inotify,
    root: WatchDescriptor,
    /// Watched directories, relative to the root.
    directories: HashMap<WatchDescriptor, PathBuf>,
    /// Directories being scanned, the innermost last.
    scans: Vec<Scan>,
    /// What scans found; the kernel may tell of it too, until it has no more to tell.
    found: HashSet<PathBuf>,
    /// Taken from the kernel and not understood yet.
    raw: VecDeque<InotifyEvent>,
    events: Vec<FilesystemEvent>,
    /// Bytes that `events` take.
    bytes: usize,
    failure: Option<ConnectError>,
    /// Names of users, of late.
    names: Option<Names>,
}

#[derive(Debug)]
struct Scan {
    directory: PathBuf,
    entries: ReadDir,
    /// Whether what is found was there before the watch began.
    quiet: bool,
}

impl Collector {
    /// Watches; what happens after this is collected.
    ///
    /// # Errors
    /// When the path is no directory that can be watched.
    pub(crate) fn new(scope: Scope) -> Result<Self, ConnectError> {
        let fail = |error: io::Error| failure("watching", &scope.path, &error);
        let metadata = scope.path.metadata().map_err(fail)?;
        if !metadata.is_dir() {
            let message = format!("path '{}' is not a directory", scope.path.display());
            return Err(ConnectError::new(Code::InvalidArgument, message));
        }
        let kind = rustix::fs::statfs(&scope.path).map_err(|error| fail(error.into()))?.f_type;
        if NETWORK.contains(&kind) && !scope.allow_network_mounts {
            let message = format!(
                "path '{}' is on a network file system, whose changes elsewhere are not told: \
                 allow network mounts to watch it all the same",
                scope.path.display()
            );
            return Err(ConnectError::new(Code::InvalidArgument, message));
        }
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)
            .map_err(|errno| fail(errno.into()))?;
        let root = inotify
            .add_watch(&scope.path, EVENTS | OWN_EVENTS)
            .map_err(|errno| watch_error(&scope.path, errno))?;
        let mut collector = Self {
            scope,
            inotify,
            root,
            directories: HashMap::from([(root, PathBuf::new())]),
            scans: Vec::new(),
            found: HashSet::new(),
            raw: VecDeque::new(),
            events: Vec::new(),
            bytes: 0,
            failure: None,
            names: None,
        };
        if collector.scope.recursive {
            collector.scan(PathBuf::new(), true)?;
            while collector.scan_step()? {}
        }
        Ok(collector)
    }

    /// A descriptor that is readable while the kernel has events.
    pub(crate) fn descriptor(&self) -> io::Result<OwnedFd> {
        self.inotify.as_fd().try_clone_to_owned()
    }

    /// Collects until there are no more events, or those collected take `limit` bytes.
    pub(crate) fn collect(&mut self, limit: usize) -> Progress {
        self.names = None;
        while self.failure.is_none() {
            if self.bytes >= limit {
                return Progress::Full;
            }
            match self.step() {
                Ok(true) => {}
                Ok(false) => return Progress::Drained,
                Err(error) => self.failure = Some(error),
            }
        }
        Progress::Failed
    }

    /// The events collected, and why there will not be more, if so.
    pub(crate) fn take(&mut self) -> (Vec<FilesystemEvent>, Option<ConnectError>) {
        self.bytes = 0;
        (std::mem::take(&mut self.events), self.failure.clone())
    }

    /// Does one thing; whether there was one to do.
    fn step(&mut self) -> Result<bool, ConnectError> {
        // Scans first: the kernel's later events may be about what they find.
        if self.scan_step()? {
            return Ok(true);
        }
        if let Some(event) = self.raw.pop_front() {
            self.understand(event)?;
            return Ok(true);
        }
        match self.inotify.read_events() {
            Ok(events) => self.raw.extend(events),
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => {
                self.found = HashSet::new();
                return Ok(false);
            }
            Err(errno) => return Err(failure("watching", &self.scope.path, &errno.into())),
        }
        Ok(true)
    }

    fn understand(&mut self, event: InotifyEvent) -> Result<(), ConnectError> {
        let mask = event.mask;
        if mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
            let message = format!(
                "events in '{}' were lost: more happened than was read; watch again",
                self.scope.path.display()
            );
            return Err(ConnectError::new(Code::ResourceExhausted, message));
        }
        if mask.contains(AddWatchFlags::IN_IGNORED) {
            self.directories.remove(&event.wd);
            return Ok(());
        }
        let Some(directory) = self.directories.get(&event.wd) else { return Ok(()) };
        let name = match event.name {
            Some(name) => directory.join(name),
            None if event.wd == self.root => PathBuf::new(),
            // Told of by the directory above as well.
            None => return Ok(()),
        };
        let Some(kind) = kind(mask) else { return Ok(()) };
        let is_directory = mask.contains(AddWatchFlags::IN_ISDIR) && self.scope.recursive;
        let told = match kind {
            EventType::Create | EventType::Remove | EventType::Rename => self.found.remove(&name),
            _ => false,
        };
        if is_directory && kind == EventType::Rename && !name.as_os_str().is_empty() {
            self.forget(&name);
        }
        if !(told && kind == EventType::Create) {
            self.report(&name, kind);
        }
        if is_directory && kind == EventType::Create { self.adopt(name, false) } else { Ok(()) }
    }

    fn report(&mut self, name: &Path, kind: EventType) {
        let gone = matches!(kind, EventType::Remove | EventType::Rename);
        let entry = if self.scope.include_entry && !gone {
            let names = self.names.get_or_insert_with(Names::read);
            describe(&self.scope.path.join(name), names).ok().map(Box::new)
        } else {
            None
        };
        let shown = if name.as_os_str().is_empty() { Path::new(".") } else { name };
        let name = shown.to_string_lossy().into_owned();
        let entry_bytes = if entry.is_some() { ENTRY_BYTES } else { 0 };
        let event_bytes = name.len().saturating_add(EVENT_BYTES).saturating_add(entry_bytes);
        self.bytes = self.bytes.saturating_add(event_bytes);
        self.events.push(FilesystemEvent { name, kind, entry });
    }

    /// Watches a directory of the tree and begins its scan, unless that was done.
    fn adopt(&mut self, directory: PathBuf, quiet: bool) -> Result<(), ConnectError> {
        let path = self.scope.path.join(&directory);
        let flags = EVENTS | AddWatchFlags::IN_DONT_FOLLOW;
        let watch = match self.inotify.add_watch(&path, flags) {
            Ok(watch) => watch,
            // It was removed, or replaced by something else.
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => return Ok(()),
            Err(errno) => return Err(watch_error(&path, errno)),
        };
        if self.directories.get(&watch) == Some(&directory) {
            return Ok(());
        }
        if self.directories.len() >= MAX_DIRECTORIES {
            let message = format!(
                "'{}' has more than {MAX_DIRECTORIES} directories: watch a part of it",
                self.scope.path.display()
            );
            return Err(ConnectError::new(Code::ResourceExhausted, message));
        }
        self.directories.insert(watch, directory.clone());
        self.scan(directory, quiet)
    }

    fn scan(&mut self, directory: PathBuf, quiet: bool) -> Result<(), ConnectError> {
        let path = self.scope.path.join(&directory);
        match path.read_dir() {
            Ok(entries) => self.scans.push(Scan { directory, entries, quiet }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failure("watching", &path, &error)),
        }
        Ok(())
    }

    /// Looks at the next entry of the innermost scan; whether there was a scan.
    fn scan_step(&mut self) -> Result<bool, ConnectError> {
        let Some(scan) = self.scans.last_mut() else { return Ok(false) };
        let Some(entry) = scan.entries.next() else {
            self.scans.pop();
            return Ok(true);
        };
        let path = self.scope.path.join(&scan.directory);
        let entry = entry.map_err(|error| failure("watching", &path, &error))?;
        let (name, quiet) = (scan.directory.join(entry.file_name()), scan.quiet);
        let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if !quiet {
            self.report(&name, EventType::Create);
            if entry.metadata().is_ok_and(|found| found.is_file() && found.len() > 0) {
                // Whoever wrote it may have been done before its directory was watched.
                self.report(&name, EventType::Write);
            }
            if self.found.len() < MAX_FOUND {
                self.found.insert(name.clone());
            }
        }
        if is_directory {
            self.adopt(name, quiet)?;
        }
        Ok(true)
    }

    /// Ends the watches of a directory that was moved away, and of those in it.
    fn forget(&mut self, moved: &Path) {
        let inotify = &self.inotify;
        self.directories.retain(|watch, directory| {
            let keep = !directory.starts_with(moved);
            if !keep {
                // It may be gone by itself.
                let _ = inotify.rm_watch(*watch);
            }
            keep
        });
    }
}

fn kind(mask: AddWatchFlags) -> Option<EventType> {
    let kinds = [
        (AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO, EventType::Create),
        (AddWatchFlags::IN_MODIFY, EventType::Write),
        (AddWatchFlags::IN_ATTRIB, EventType::Chmod),
        (AddWatchFlags::IN_MOVED_FROM | AddWatchFlags::IN_MOVE_SELF, EventType::Rename),
        (AddWatchFlags::IN_DELETE | AddWatchFlags::IN_DELETE_SELF, EventType::Remove),
    ];
    kinds.into_iter().find(|(bits, _)| mask.intersects(*bits)).map(|(_, kind)| kind)
}

fn watch_error(path: &Path, errno: Errno) -> ConnectError {
    if errno == Errno::ENOSPC {
        let message = format!(
            "watching '{}': the kernel's limit of watches is reached: raise \
             fs.inotify.max_user_watches or watch less",
            path.display()
        );
        return ConnectError::new(Code::ResourceExhausted, message);
    }
    failure("watching", path, &errno.into())
}
