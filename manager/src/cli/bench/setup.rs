//! From the arguments to what is measured: files are copied to one place, so that no sample waits
//! for where they came from, and contenders are made.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coppice_bench::Error;
use coppice_bench::cache::{self, Cache};
use coppice_bench::contender::coppice::Coppice;
use coppice_bench::contender::e2b::E2b;
use coppice_bench::contender::firecracker::Firecracker;
use coppice_bench::contender::qemu::Qemu;
use coppice_bench::contender::{Contender, Guest, Host};
use coppice_bench::process::Group;
use coppice_bench::scenario::Workload;
use coppice_bench::schedule::Plan;
use coppice_manager::failure::{Class, Failure, chain};
use coppice_manager::home::Home;
use coppice_manager::vmm;
use coppice_manager::workdir::WorkDir;

use super::journal::Paper;
use super::{Args, CacheArg};

/// All that a run needs.
pub(super) struct Setup {
    /// Holds all files.
    pub(super) work: WorkDir,
    pub(super) plan: Plan,
    pub(super) contenders: Vec<Box<dyn Contender>>,
    /// Has all processes of contenders here.
    pub(super) host: Arc<Host>,
    pub(super) paper: Paper,
}

impl Setup {
    pub(super) fn new(args: &Args) -> Result<Self, Failure> {
        let work = work_dir(args.dir.as_deref())?;
        let place = work.path();
        let copied = place.join("files");
        fs::create_dir(&copied).map_err(|error| host(&error))?;
        let group = Group::new().map_err(|error| measuring(&error))?;
        let host = Arc::new(Host { group, scratch: place.to_owned() });
        let contenders = contenders(args, &host, &copied)?;
        let guest = guest(args, &contenders, &copied)?;
        let plan = Plan {
            scenarios: args.kinds(),
            rounds: args.samples,
            warm_up: args.warm_up,
            caches: caches(args, place)?,
            guests: guests(args, &guest),
            workload: Workload {
                concurrency: args.concurrency,
                age: args.age,
                dirty_mib: args.dirty,
                io_mib: args.io,
                most_vms: args.most_vms,
                reserve_mib: args.reserve,
                pause: Duration::from_millis(args.pause.into()),
            },
            noise: !args.no_noise,
        };
        let paper = Paper::new(args, &plan, &contenders, place);
        Ok(Self { work, plan, contenders, host, paper })
    }
}

/// The guest, without a size. Who only asks services needs none.
fn guest(args: &Args, contenders: &[Box<dyn Contender>], copied: &Path) -> Result<Guest, Failure> {
    let (mut kernel, mut image) = (PathBuf::new(), PathBuf::new());
    if contenders.iter().any(|contender| contender.template().is_none()) {
        let home = Home::from_env();
        let found = home.kernel(&args.kernel).map_err(|error| {
            let remedy = "make it with `cargo xtask kernel`, or set COPPICE_HOME";
            Failure::new(Class::KernelMissing, error, remedy)
        })?;
        kernel = copy(&found, copied)?;
        let found = home.image(&args.image).map_err(|error| {
            let remedy = "make it with `cargo xtask rootfs`, or set COPPICE_HOME";
            Failure::new(Class::ImageMissing, error, remedy)
        })?;
        image = copy(&found, copied)?;
    }
    Ok(Guest { kernel, image, memory_mib: 0, vcpus: 0, limit: args.limit })
}

/// A guest of every size.
fn guests(args: &Args, guest: &Guest) -> Vec<Guest> {
    let sizes = args.memory.iter().flat_map(|&memory_mib| {
        args.cpus.iter().map(move |&vcpus| Guest { memory_mib, vcpus, ..guest.clone() })
    });
    sizes.collect()
}

fn work_dir(dir: Option<&Path>) -> Result<WorkDir, Failure> {
    let dir = dir.map_or_else(std::env::temp_dir, Path::to_owned);
    let dir = fs::canonicalize(&dir).map_err(|error| {
        let message = format!("{} cannot be used: {error}", dir.display());
        Failure::new(Class::Host, message, "name another directory with --dir")
    })?;
    let user = rustix::process::geteuid().as_raw();
    WorkDir::new(&dir.join(format!("coppice-bench-{user}"))).map_err(|error| {
        Failure::new(Class::Host, chain(&error), "name another directory with --dir")
    })
}

fn caches(args: &Args, place: &Path) -> Result<Vec<Cache>, Failure> {
    let caches = args.cache.iter().map(|cache| match cache {
        CacheArg::Warm => Ok(Cache::Warm),
        CacheArg::Cold if cache::is_memory(place) => Err(Failure::new(
            Class::Usage,
            format!("files in {} are memory, and no cache of them can be cold", place.display()),
            "name a directory on a disk with --dir",
        )),
        CacheArg::Cold => Ok(Cache::cold()),
    });
    caches.collect()
}

/// Coppice and the peers, in the order of the command line.
fn contenders(
    args: &Args,
    host: &Arc<Host>,
    copied: &Path,
) -> Result<Vec<Box<dyn Contender>>, Failure> {
    let mut all: Vec<Box<dyn Contender>> = Vec::new();
    if !args.peers_only {
        let program = vmm::locate(args.vmm.clone()).map_err(|error| {
            Failure::new(Class::ProgramMissing, chain(&error), "name coppice-vmm with --vmm")
        })?;
        let program = copy(&program, copied)?;
        all.push(Box::new(Coppice::new("coppice".into(), program, host.clone())));
    }
    for (number, peer) in args.peers.iter().enumerate() {
        let Some((label, what)) = peer.split_once('=') else { return Err(unknown(peer)) };
        let (kind, _) = label.split_once('@').unwrap_or((label, ""));
        let taken = all.iter().any(|contender| contender.name() == label);
        let name = if taken { format!("{label}-{}", number + 1) } else { label.to_owned() };
        // A copy of each, since two may be called alike.
        let own = || -> Result<PathBuf, Failure> {
            let directory = copied.join(format!("peer-{number}"));
            fs::create_dir(&directory).map_err(|error| self::host(&error))?;
            copy(&program(what)?, &directory)
        };
        all.push(match kind {
            "coppice" => Box::new(Coppice::new(name, own()?, host.clone())),
            "firecracker" => Box::new(Firecracker::new(name, own()?, host.clone())),
            // It has its firmware and libraries beside it.
            "qemu" => Box::new(Qemu::new(name, program(what)?, host.clone())),
            "e2b" => Box::new(service(name, what, args)?),
            _ => return Err(unknown(peer)),
        });
    }
    Ok(all)
}

fn service(name: String, url: &str, args: &Args) -> Result<E2b, Failure> {
    let key = std::env::var("E2B_API_KEY").map_err(|_| {
        Failure::new(Class::Usage, "E2B_API_KEY is not set", "set it to a key of the service")
    })?;
    let sandboxes = std::env::var("E2B_SANDBOX_URL").ok();
    E2b::new(name, url, sandboxes.as_deref(), key, args.template.clone())
        .map_err(|error| Failure::new(Class::Usage, error.chain(), "give e2b=http://HOST:PORT"))
}

fn unknown(peer: &str) -> Failure {
    if peer.starts_with("cloud-hypervisor") {
        return Failure::new(
            Class::Usage,
            "Cloud Hypervisor has PCI devices only, for which the guest kernels have no drivers",
            "leave it out: it cannot boot what the others boot",
        );
    }
    Failure::new(
        Class::Usage,
        format!("--peer {peer} is not understood"),
        "give firecracker=PATH, qemu=PATH, e2b=URL or coppice=PATH",
    )
}

/// The whole path of a peer's program.
fn program(path: &str) -> Result<PathBuf, Failure> {
    fs::canonicalize(path).map_err(|error| {
        let message = format!("the peer {path} cannot be used: {error}");
        Failure::new(Class::ProgramMissing, message, "name a program that is there")
    })
}

fn copy(path: &Path, to: &Path) -> Result<PathBuf, Failure> {
    let name = path.file_name().unwrap_or(path.as_os_str());
    let copy = to.join(name);
    fs::copy(path, &copy).map_err(|error| {
        let message = format!("{} cannot be copied: {error}", path.display());
        Failure::new(Class::Host, message, "name a directory with more room with --dir")
    })?;
    Ok(copy)
}

fn host(error: &std::io::Error) -> Failure {
    Failure::new(Class::Host, error, "name another directory with --dir")
}

fn measuring(error: &Error) -> Failure {
    Failure::new(Class::Host, error.chain(), "see what `coppice doctor` says")
}
