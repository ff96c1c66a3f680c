//! `cargo xtask rootfs`: builds the guest root file systems.
//!
//! `base` is a Debian system for agents, `tiny` the agent and busybox for benchmarks. Both have
//! coppice-agent as init and come out the same for the same packages and agent.

mod base;
mod ext4;
mod lock;
mod tiny;
mod tree;

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;

use crate::cache::{Key, sha256_file, workspace};
use crate::{cache, command, packages, progress};
use lock::{Lock, Package, Packages};
use tree::{Kind, Node};

/// Changes whenever this code builds something else from the same ingredients.
const RECIPE: &str = "1";

/// All times in the images, in seconds since 1970: 1 January 2026.
const EPOCH: u32 = 1_767_225_600;

/// Where the agent is in an image.
const AGENT_PATH: &str = "/usr/bin/coppice-agent";

/// Name servers until the manager sets others.
const RESOLV_CONF: &str = "nameserver 1.1.1.1\nnameserver 8.8.8.8\n";

/// Packages on the host that every image takes.
const BUILD_PACKAGES: &[&str] = &["coreutils", "dpkg", "e2fsprogs"];

/// Arguments of `cargo xtask rootfs`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The images appear in target/coppice/home/images: base.ext4, tiny.ext4 and tiny.cpio. Installed
packages are cached (~/.cache/coppice/rootfs-base), so a rebuilt agent costs a second.

rootfs/packages.lock records the packages with their digests. Where the archive has moved on, the
newer versions are named and used; --locked refuses them, --update-lock records them.")]
pub(crate) struct Args {
    /// Build only this image
    #[arg(value_enum)]
    image: Option<Image>,
    /// Fail when a package is not the one that rootfs/packages.lock names
    #[arg(long)]
    locked: bool,
    /// Take the newest packages of the archive and record them in rootfs/packages.lock
    #[arg(long, conflicts_with_all = ["locked", "verify"])]
    update_lock: bool,
    /// Build the packages' part of `base` a second time and fail unless it is equal
    #[arg(long)]
    verify: bool,
}

/// What an image is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Image {
    /// Debian with what agents work with
    Base,
    /// The agent and busybox
    Tiny,
}

/// Makes sure that an image, or all of them, is built and linked into the home directory.
///
/// # Errors
/// When packages cannot be had or a build fails.
pub(crate) fn ensure(image: Option<Image>) -> Result<()> {
    run(&Args { image, locked: false, update_lock: false, verify: false }).map(|_| ())
}

/// Builds the images that the arguments ask for and says where they are.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    command::watch_interrupts();
    packages::require("building root file systems", BUILD_PACKAGES)?;
    let path = workspace().join("rootfs/packages.lock");
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut lock = Lock::parse(&text)?;
    let agent = build_agent()?;
    // For root file systems that are made of directories.
    let key = Key::default().add("agent", sha256_file(&agent)?).finish();
    cache::keyed_file(&cache::home().join("coppice-agent"), &key, "the agent", |new| {
        fs::copy(&agent, new).map(drop).context("cannot copy the agent")
    })?;
    // The small one first: who waits for it need not wait for both.
    for image in [Image::Tiny, Image::Base] {
        if args.image.is_none_or(|only| only == image) {
            let name = if image == Image::Base { "base" } else { "tiny" };
            let locked = lock.image(name);
            let built = match image {
                Image::Base => ensure_base(args, &locked, &agent)?,
                Image::Tiny => ensure_tiny(args, &locked, &agent)?,
            };
            report(name, &locked, &built, args.locked, args.update_lock)?;
            if args.update_lock {
                lock.0.insert(name.to_owned(), built);
            }
        }
    }
    if args.update_lock {
        cache::write_file(&path, &lock.render())?;
        progress::step(format_args!("recorded in {}", path.display()));
    }
    Ok(ExitCode::SUCCESS)
}

fn report(
    name: &str,
    locked: &Packages,
    built: &Packages,
    strict: bool,
    silent: bool,
) -> Result<()> {
    let differences = lock::differences(locked, built);
    if differences.is_empty() || silent {
        return Ok(());
    }
    let list: String = differences.iter().map(|line| format!("\n  {line}")).collect();
    let what = format!(
        "{name}: {} packages are not as rootfs/packages.lock names them",
        differences.len()
    );
    if strict {
        bail!("{what}; record the newer ones with --update-lock:{list}");
    }
    progress::note(format_args!("{what}; built with what the archive has:{list}"));
    Ok(())
}

/// Builds the agent and returns its path.
fn build_agent() -> Result<PathBuf> {
    let target = workspace().join("target");
    let task = progress::Task::spinner("building coppice-agent");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--profile", "agent", "-p", "coppice-agent", "--target-dir"]).arg(&target);
    command::run(cargo.current_dir(workspace()))?;
    task.done();
    Ok(target.join("x86_64-unknown-linux-gnu/agent/coppice-agent"))
}

/// The agent and the link that makes it init. `init` is the real path of /sbin/init, since
/// debugfs does not follow /sbin where that is a link.
fn agent_nodes(agent: &Path, init: &str) -> [Node; 2] {
    [
        Node::new(AGENT_PATH.trim_start_matches('/'), Kind::File(agent.to_owned()), 0o755),
        Node::new(init, Kind::Link(AGENT_PATH.to_owned()), 0o777),
    ]
}

fn images() -> PathBuf {
    cache::home().join("images")
}

fn ensure_base(args: &Args, locked: &Packages, agent: &Path) -> Result<Packages> {
    let stage = if args.update_lock { base::newest_stage()? } else { base::stage(locked)? };
    if args.verify {
        base::verify(locked, &stage)?;
    }
    let key = Key::default()
        .add("recipe", RECIPE)
        .add("stage", stage.image.as_os_str().as_encoded_bytes())
        .add("agent", sha256_file(agent)?)
        .finish();
    make("base.ext4", &key, |image, scratch| base::with_agent(&stage, agent, image, scratch))?;
    Ok(stage.packages)
}

fn ensure_tiny(args: &Args, locked: &Packages, agent: &Path) -> Result<Packages> {
    let none = Packages::new();
    let package = tiny::fetch(if args.update_lock { &none } else { locked })?;
    let busybox = tiny::unpack(&package)?;
    let nodes = tiny::tree(agent, &busybox)?;
    let key = Key::default()
        .add("recipe", RECIPE)
        .add("tree", format!("{nodes:?}"))
        .add("busybox", &package.sha256)
        .add("agent", sha256_file(agent)?)
        .finish();
    make("tiny.ext4", &key, |image, scratch| tiny::ext4(image, &nodes, scratch))?;
    make("tiny.cpio", &key, |archive, _| tiny::cpio(archive, &nodes))?;
    let built = Package {
        version: package.version,
        architecture: "amd64".to_owned(),
        sha256: package.sha256,
    };
    Ok(Packages::from([(tiny::PACKAGE.to_owned(), built)]))
}

/// Makes one file of the home directory and says how large it is.
fn make(name: &str, key: &str, build: impl FnOnce(&Path, &Path) -> Result<()>) -> Result<()> {
    let path = images().join(name);
    cache::keyed_file(&path, key, name, |new| {
        let scratch = tempfile::tempdir().context("cannot make a temporary directory")?;
        build(new, scratch.path())
    })?;
    let data = fs::metadata(&path).with_context(|| format!("cannot look at {name}"))?;
    // The file system counts used blocks in units of 512 bytes.
    let used = progress::size(data.blocks().saturating_mul(512));
    progress::step(format_args!("{name}: {used} on disk, {} in size", progress::size(data.len())));
    println!("{}", path.display());
    Ok(())
}
