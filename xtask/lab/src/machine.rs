//! A warm nested machine: how it is described, started, found again and ended.
//!
//! Each description has a directory below the cache, keyed by its hash. The directory holds the
//! keeper's socket; a lock on `launch.lock` makes concurrent callers start one machine, not two.

mod logs;

use std::fs::{self, DirBuilder, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::packages::{HostKernel, Kernel};
use crate::plan::{
    GuestPlan, KEEPER_PLAN, KEEPER_SOCKET, KeeperPlan, KeeperReply, KeeperRequest, Share,
};
use crate::wire::{AGENT_PORT, VERSION};
use crate::{initramfs, packages, paths, sys};

/// How long a keeper may take to answer; it answers from memory.
const KEEPER_ANSWER: Duration = Duration::from_secs(20);

/// Seconds a machine may take to boot: ordinarily five, more where builds take the host's CPUs.
const BOOT_LIMIT_S: u64 = 600;

/// Why a nested machine could not be started or reached.
#[derive(Debug, Error)]
pub enum Error {
    /// A tool or the kernel is missing.
    #[error("cannot prepare the nested machine")]
    Packages(#[from] packages::Error),
    /// Its initramfs could not be made.
    #[error("cannot write the nested machine's initramfs")]
    Initramfs(#[from] initramfs::Error),
    /// Its helper program could not be built.
    #[error("cannot build the lab's helper program: {0}")]
    Helper(String),
    /// It did not boot.
    #[error("the nested machine did not start: {reason}; see {log}")]
    Boot {
        /// What its keeper reported.
        reason: String,
        /// Its console's log.
        log: PathBuf,
    },
    /// Its keeper did not answer as it should.
    #[error("the nested machine's keeper in {directory} does not answer")]
    Keeper {
        /// The machine's directory.
        directory: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file of the machine's directory could not be used.
    #[error("{path}")]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Its description cannot be encoded.
    #[error("cannot encode the nested machine's description")]
    Encode(#[from] serde_json::Error),
}

/// What a nested machine is like. Equal descriptions share one machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// Virtual CPUs that commands run on, 1 to 8. Virtual time has one.
    pub cpus: u32,
    /// Memory in MiB, at least 512.
    pub memory_mib: u32,
    /// Count instructions instead of seconds.
    pub virtual_time: bool,
    /// The kernel it runs.
    pub kernel: HostKernel,
    /// Seconds without a user after which the machine ends.
    pub idle_timeout_s: u64,
    /// Further host directories, by absolute path, to share read-only at the same path.
    pub shares: Vec<PathBuf>,
}

/// A machine that is running, as its keeper describes it.
#[derive(Clone, Debug)]
pub struct Running {
    /// Its directory.
    pub directory: PathBuf,
    /// What it was started from.
    pub description: Description,
    /// Port, process, age.
    pub reply: KeeperReply,
}

/// The right to use a machine; it stays up at least until this is dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) reply: KeeperReply,
    pub(crate) directory: PathBuf,
    /// Whether this call started the machine.
    pub(crate) fresh: bool,
    connection: UnixStream,
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_path_buf();
    |source| Error::File { path, source }
}

fn machines_dir() -> PathBuf {
    paths::lab_dir().join("machines")
}

/// Device and inode of a directory; nothing while it is not there.
fn file_identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).ok().map(|data| (data.dev(), data.ino()))
}

impl Description {
    /// The machine's directory, which depends on everything that tells machines apart.
    pub(crate) fn directory(&self) -> Result<PathBuf, Error> {
        // A directory that was removed and made again is another one to a machine that has the
        // old one open.
        let mut shared = vec![paths::checkout(), paths::target_dir()];
        shared.extend(self.shares.iter().cloned());
        let opened: Vec<_> = shared.iter().map(|path| file_identity(path)).collect();
        let identity = (self, VERSION, paths::checkout(), opened);
        let hash = Sha256::digest(serde_json::to_vec(&identity)?);
        let name: String = hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        Ok(machines_dir().join(name))
    }

    /// The directory that host and machine may both write to.
    pub(crate) fn scratch(&self) -> Result<PathBuf, Error> {
        Ok(self.directory()?.join("scratch"))
    }

    /// Uses the machine, starting it where it does not run.
    pub(crate) fn lease(&self) -> Result<Lease, Error> {
        let directory = self.directory()?;
        make_private_dir(&directory)?;
        let _lock = lock(&directory)?;
        let fresh = match lease(&directory)? {
            Some(lease) => return Ok(lease),
            None => true,
        };
        self.launch(&directory)?;
        let leased = lease(&directory)?.ok_or_else(|| Error::Boot {
            reason: "its keeper ended at once".into(),
            log: directory.join("console.log"),
        })?;
        Ok(Lease { fresh, ..leased })
    }

    fn shares(&self) -> Result<Vec<Share>, Error> {
        let share = |path: PathBuf, writable, immutable| Share {
            tag: String::new(),
            path,
            mount_at: None,
            writable,
            immutable,
        };
        let mut shares = vec![share(paths::checkout(), false, false)];
        let target = paths::target_dir();
        if !target.starts_with(paths::checkout()) {
            fs::create_dir_all(&target).map_err(at(&target))?;
            shares.push(share(target, false, false));
        }
        // Files there are named by their contents' hash.
        shares.push(share(paths::cache_dir(), false, true));
        let scratch = self.scratch()?;
        fs::create_dir_all(&scratch).map_err(at(&scratch))?;
        shares.push(share(scratch, true, false));
        shares.extend(self.shares.iter().map(|path| share(path.clone(), false, false)));
        for (number, share) in shares.iter_mut().enumerate() {
            share.tag = format!("share{number}");
        }
        Ok(shares)
    }

    fn launch(&self, directory: &Path) -> Result<(), Error> {
        packages::ensure_tools()?;
        let kernel = packages::ensure_kernel(self.kernel)?;
        let helper = install_helper(directory)?;
        let token = random_token()?;
        let mut shares = self.shares()?;
        shares.push(Share {
            tag: "modules".into(),
            path: kernel.modules(),
            mount_at: Some(Path::new("/lib/modules").join(&kernel.release)),
            writable: false,
            immutable: true,
        });
        let initrd = directory.join("initramfs");
        let guest =
            GuestPlan { token: token.clone(), modules: initramfs::modules(&kernel)?, shares };
        let busybox = packages::busybox()?;
        initramfs::write(&initrd, &kernel, &helper, &busybox, &guest)?;
        let plan = KeeperPlan {
            qemu: self.qemu(&kernel, &initrd, &guest.shares),
            token,
            virtual_time: self.virtual_time,
            idle_timeout_s: self.idle_timeout_s,
            boot_timeout_s: BOOT_LIMIT_S,
        };
        write_file(&directory.join(KEEPER_PLAN), &serde_json::to_vec_pretty(&plan)?)?;
        write_file(&directory.join("description.json"), &serde_json::to_vec_pretty(self)?)?;
        logs::keep(directory)?;
        start_keeper(directory, &helper)
    }

    /// How many processors QEMU emulates. Where there are several, the first one is left to the
    /// machine's kernel: whenever any processor of QEMU 10 loads its FPU, it changes flags of the
    /// first one (IGNNE, beside those of SVM) without a lock. If the first one enters or leaves a
    /// guest at that moment, that guest and the machine's kernel get each other's page tables.
    fn processors(&self) -> u32 {
        if self.virtual_time { 1 } else { self.cpus.saturating_add(1) }
    }

    /// QEMU's command line, but for the keeper's own channels.
    fn qemu(&self, kernel: &Kernel, initrd: &Path, shares: &[Share]) -> Vec<String> {
        let mut line: Vec<String> =
            ["qemu-system-x86_64", "-nodefaults", "-no-user-config"].map(str::to_owned).into();
        let mut option = |name: &str, value: String| line.extend([name.to_owned(), value]);
        option("-machine", "q35".into());
        if self.virtual_time {
            // The keeper switches to one instruction per translation block after the boot.
            option("-accel", "tcg,tb-size=512".into());
            option("-icount", "shift=0,sleep=off".into());
            option("-cpu", "EPYC,+svm,+npt".into());
        } else {
            option("-accel", "tcg,thread=multi,tb-size=512".into());
            option("-cpu", "EPYC,+svm,+npt,+nrip-save".into());
        }
        option("-smp", self.processors().to_string());
        option("-m", self.memory_mib.to_string());
        option("-display", "none".into());
        option("-action", "reboot=shutdown,panic=none".into());
        option("-kernel", kernel.image().display().to_string());
        option("-initrd", initrd.display().to_string());
        // A kernel that measures the counter itself is thrown off by a busy host, and then its
        // clock runs up to twenty times too fast. Virtual time counts at exactly 1 GHz.
        let tsc_khz = if self.virtual_time { 1_000_000 } else { tsc_khz() };
        option(
            "-append",
            format!(
                "console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable \
                 tsc_early_khz={tsc_khz} net.ifnames=0 random.trust_cpu=on"
            ),
        );
        option("-netdev", format!("user,id=net,hostfwd=tcp:127.0.0.1:0-:{AGENT_PORT}"));
        option("-device", "virtio-net-pci,netdev=net,romfile=".into());
        option("-device", "virtio-rng-pci".into());
        for share in shares {
            let access = if share.writable { "" } else { ",readonly=on" };
            // A comma in an option's value is written twice.
            let path = share.path.display().to_string().replace(',', ",,");
            let tag = &share.tag;
            option(
                "-fsdev",
                format!("local,id={tag},path={path},security_model=none,multidevs=remap{access}"),
            );
            option("-device", format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}"));
        }
        line
    }
}

/// The rate of the host's time stamp counter in kHz, which the emulated CPU's follows.
fn tsc_khz() -> u64 {
    const SPAN: Duration = Duration::from_millis(100);
    let (start, first) = (Instant::now(), sys::read_tsc());
    thread::sleep(SPAN);
    let (last, elapsed) = (sys::read_tsc(), start.elapsed());
    let microseconds = elapsed.as_micros().max(1);
    let khz = u128::from(last.saturating_sub(first)).saturating_mul(1000) / microseconds;
    u64::try_from(khz).unwrap_or(u64::MAX)
}

fn make_private_dir(path: &Path) -> Result<(), Error> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(at(path))
}

fn write_file(path: &Path, contents: &[u8]) -> Result<(), Error> {
    fs::write(path, contents).map_err(at(path))
}

fn lock(directory: &Path) -> Result<Flock<File>, Error> {
    let path = directory.join("launch.lock");
    let file = File::create(&path).map_err(at(&path))?;
    Flock::lock(file, FlockArg::LockExclusive)
        .map_err(|(_, errno)| Error::File { path, source: errno.into() })
}

fn random_token() -> Result<String, Error> {
    let mut bytes = [0_u8; 16];
    let path = Path::new("/dev/urandom");
    File::open(path).and_then(|mut file| file.read_exact(&mut bytes)).map_err(at(path))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Builds the helper and copies it to the machine's directory: a later build must not change the
/// file a running keeper was started from.
fn install_helper(directory: &Path) -> Result<PathBuf, Error> {
    // A build directory of its own: the common one is locked while anything else is built, and
    // a command in the lab should not wait for that.
    let build = paths::target_dir().join("lab");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["build", "--quiet", "--release", "--bin", "coppice-lab-guest", "--target-dir"])
        .arg(&build)
        .args(["-p", "coppice-lab"])
        .current_dir(paths::checkout())
        .stdin(Stdio::null())
        .output()
        .map_err(|error| Error::Helper(format!("cannot run cargo: {error}")))?;
    if !output.status.success() {
        return Err(Error::Helper(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    let built = build.join("x86_64-unknown-linux-gnu/release/coppice-lab-guest");
    let installed = directory.join("coppice-lab-guest");
    match fs::remove_file(&installed) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at(&installed)(error)),
        _ => {}
    }
    fs::copy(&built, &installed).map_err(at(&built))?;
    Ok(installed)
}

impl Lease {
    /// What a machine that went away said last, by its logs; `None` while it runs.
    pub(crate) fn last_words(&self) -> Option<String> {
        // The keeper says nothing more after its answer; the connection ends with it.
        let ended = (&self.connection).read(&mut [0]).is_ok_and(|count| count == 0);
        ended.then(|| logs::last_words(&self.directory))
    }
}

/// Starts the keeper and waits until the machine serves.
fn start_keeper(directory: &Path, helper: &Path) -> Result<(), Error> {
    let log_path = directory.join("keeper.log");
    let log = File::create(&log_path).map_err(at(&log_path))?;
    let mut keeper = Command::new(helper)
        .arg("keep")
        .current_dir(directory)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .map_err(at(helper))?;
    let mut line = String::new();
    if let Some(output) = keeper.stdout.take() {
        BufReader::new(output).read_line(&mut line).map_err(at(&log_path))?;
    }
    if line.trim() == "ready" {
        return Ok(());
    }
    let reason = match line.trim().strip_prefix("failed: ") {
        Some(reason) => reason.to_owned(),
        None => format!("its keeper ended, see {}", log_path.display()),
    };
    let qemu = fs::read_to_string(directory.join("qemu.log")).unwrap_or_default();
    let last = qemu.lines().rev().find(|line| !line.contains("warning:")).unwrap_or_default();
    let reason = if last.is_empty() { reason } else { format!("{reason} ({last})") };
    Err(Error::Boot { reason, log: directory.join("console.log") })
}

/// Asks the keeper of the machine in `directory`; `None` where none runs.
fn ask(
    directory: &Path,
    request: KeeperRequest,
) -> Result<Option<(KeeperReply, UnixStream)>, Error> {
    let problem = |source: io::Error| Error::Keeper { directory: directory.to_path_buf(), source };
    let opened = match File::open(directory) {
        Ok(opened) => opened,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(at(directory)(error)),
    };
    // Through the descriptor, because a socket's path may not be longer than 107 bytes.
    let socket = format!("/proc/self/fd/{}/{KEEPER_SOCKET}", opened.as_raw_fd());
    let mut stream = match UnixStream::connect(socket) {
        Ok(stream) => stream,
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
            ) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(problem(error)),
    };
    stream.set_read_timeout(Some(KEEPER_ANSWER)).map_err(problem)?;
    let mut text = serde_json::to_string(&request)?;
    text.push('\n');
    stream.write_all(text.as_bytes()).map_err(problem)?;
    let mut line = String::new();
    if BufReader::new(&stream).read_line(&mut line).map_err(problem)? == 0 {
        // It ended between accepting and answering.
        return Ok(None);
    }
    Ok(Some((serde_json::from_str(&line)?, stream)))
}

fn lease(directory: &Path) -> Result<Option<Lease>, Error> {
    let answer = ask(directory, KeeperRequest::Lease)?;
    Ok(answer.map(|(reply, connection)| Lease {
        reply,
        directory: directory.to_path_buf(),
        fresh: false,
        connection,
    }))
}

/// Ends the machine in `directory`, if it runs, and waits until its keeper has gone.
pub(crate) fn stop(directory: &Path) -> Result<bool, Error> {
    let Some((_, mut connection)) = ask(directory, KeeperRequest::Stop)? else {
        return Ok(false);
    };
    // The keeper holds its end open until QEMU has been reaped.
    let mut rest = Vec::new();
    connection
        .read_to_end(&mut rest)
        .map_err(|source| Error::Keeper { directory: directory.to_path_buf(), source })?;
    Ok(true)
}

/// The machines of this user that run now.
///
/// # Errors
/// [`Error::File`] where the cache cannot be read, [`Error::Keeper`] where a keeper hangs.
pub fn running() -> Result<Vec<Running>, Error> {
    let root = machines_dir();
    let entries = match fs::read_dir(&root) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(at(&root)(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let directory = entry.map_err(at(&root))?.path();
        let Some((reply, _)) = ask(&directory, KeeperRequest::Status)? else { continue };
        let path = directory.join("description.json");
        let description = serde_json::from_slice(&fs::read(&path).map_err(at(&path))?)?;
        found.push(Running { directory, description, reply });
    }
    Ok(found)
}

/// Ends the machines of this user: those that nobody uses or, with `in_use_too`, all. Returns
/// those ended and those left.
///
/// # Errors
/// As [`running`].
pub fn stop_all(in_use_too: bool) -> Result<(Vec<Running>, Vec<Running>), Error> {
    let (ended, left): (Vec<Running>, Vec<Running>) =
        running()?.into_iter().partition(|machine| in_use_too || machine.reply.leases == 0);
    for machine in &ended {
        stop(&machine.directory)?;
    }
    Ok((ended, left))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_that_was_made_again_belongs_to_another_machine() {
        let parent = tempfile::tempdir().unwrap();
        let shared = parent.path().join("shared");
        std::fs::create_dir(&shared).unwrap();
        let description = Description {
            cpus: 1,
            memory_mib: 512,
            virtual_time: false,
            kernel: HostKernel::Stable,
            idle_timeout_s: 60,
            shares: vec![shared.clone()],
        };
        let first = description.directory().unwrap();
        assert_eq!(description.directory().unwrap(), first);
        // The old one is kept, so that its inode cannot be used again.
        std::fs::rename(&shared, parent.path().join("old")).unwrap();
        std::fs::create_dir(&shared).unwrap();
        assert_ne!(description.directory().unwrap(), first);
    }
}
