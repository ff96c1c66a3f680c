//! The `base` image: Debian with what agents work with, and the agent as init.
//!
//! The packages are installed once per lock, into a cached image without the agent. Adding the
//! agent to a copy of that takes a second, so a rebuilt agent costs no more.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::ext4::{self, Layout};
use super::lock::{self, Packages};
use super::{EPOCH, RECIPE};
use crate::cache::{Key, check_space, workspace};
use crate::{cache, command, packages, progress};

/// Debian release that the image is made of.
const SUITE: &str = "bookworm";

/// Free space that a build takes, in bytes.
const BUILD_SPACE: u64 = 3 << 30;

const LAYOUT: Layout = Layout { size: "8G", label: "coppice-base", options: &["-J", "size=16"] };

/// Packages on the host that a build takes.
const BUILD_PACKAGES: &[&str] = &["debian-archive-keyring", "diffutils", "mmdebstrap", "tar"];

/// What dpkg leaves out, now and when the user installs more.
const LEFT_OUT: [&str; 7] = [
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/lintian/*",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/locale/locale.alias",
    "path-exclude=/usr/share/man/*",
];

/// The image before the agent is in it, and what it is made of.
pub(super) struct Stage {
    pub(super) image: PathBuf,
    pub(super) packages: Packages,
}

fn directory() -> PathBuf {
    workspace().join("rootfs")
}

fn read(name: &str) -> Result<String> {
    let path = directory().join(name);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// The names in `base.packages`.
fn package_names(text: &str) -> Vec<&str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).collect()
}

fn key(locked: &Packages) -> Result<String> {
    let key = Key::default()
        .add("recipe", RECIPE)
        .add("suite", SUITE)
        .add("names", package_names(&read("base.packages")?).join(" "))
        .add("setup", read("base-setup.sh")?)
        .add("left out", LEFT_OUT.join(" "))
        .add("layout", [LAYOUT.size, LAYOUT.label, &LAYOUT.options.join(" ")].join(" "));
    Ok(key.add("lock", lock::render_image("base", locked)).finish())
}

/// Gets the image of the locked packages, from the cache or by building it.
pub(super) fn stage(locked: &Packages) -> Result<Stage> {
    let entry = cache::entry("rootfs-base", &key(locked)?, "root file system base", |dir| {
        build(locked, dir)
    })?;
    open(&entry)
}

/// Builds the image of the archive's newest packages, to be cached as what a lock of just these
/// packages describes.
pub(super) fn newest_stage() -> Result<Stage> {
    let parent = cache::root()?.join("rootfs-base");
    fs::create_dir_all(&parent).context("cannot make the cache directory")?;
    let temporary = tempfile::tempdir_in(&parent).context("cannot make a build directory")?;
    build(&Packages::new(), temporary.path())?;
    let packages = open(temporary.path())?.packages;
    let entry = cache::entry("rootfs-base", &key(&packages)?, "root file system base", |dir| {
        for file in ["base.ext4", "packages.lock"] {
            fs::rename(temporary.path().join(file), dir.join(file))
                .with_context(|| format!("cannot keep {file}"))?;
        }
        Ok(())
    })?;
    open(&entry)
}

/// Builds the image once more and checks that it comes out the same.
pub(super) fn verify(locked: &Packages, stage: &Stage) -> Result<()> {
    let place = tempfile::tempdir_in(cache::root()?).context("cannot make a build directory")?;
    build(locked, place.path())?;
    let again = open(place.path())?;
    if again.packages != stage.packages {
        bail!(
            "the archive changed between the two builds, so they cannot be compared; run \
             `cargo xtask rootfs --update-lock` first"
        );
    }
    let mut cmp = Command::new("cmp");
    command::run(cmp.arg(&stage.image).arg(&again.image))
        .context("two builds of the same packages differ")?;
    progress::step("base: a second build is equal, byte for byte");
    Ok(())
}

fn open(entry: &Path) -> Result<Stage> {
    let path = entry.join("packages.lock");
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let packages = lock::Lock::parse(&text)?.image("base");
    Ok(Stage { image: entry.join("base.ext4"), packages })
}

fn build(locked: &Packages, dir: &Path) -> Result<()> {
    check_space(dir, BUILD_SPACE, "the base image")?;
    packages::require("building root file systems", BUILD_PACKAGES)?;
    let root = nix::unistd::geteuid().is_root();
    if !root {
        packages::require("building root file systems without root", &["fakeroot", "uidmap"])?;
    }
    let work = dir.join("work");
    fs::create_dir(&work).context("cannot make a build directory")?;
    // mmdebstrap's user name space has to get in when it is not run by root.
    let archive = work.join("base.tar");
    let task = progress::Task::spinner("base: installing packages");
    command::run(&mut mmdebstrap(locked, &work, &archive)?).with_context(
        || "cannot install the packages; check that this machine reaches a Debian mirror",
    )?;
    task.done();
    let text = |name: &str| {
        fs::read(work.join(name))
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .with_context(|| format!("mmdebstrap left no {name}"))
    };
    let packages = lock::manifest(&text("installed")?, &text("available")?)?;
    fs::write(dir.join("packages.lock"), lock::render_image("base", &packages))
        .context("cannot write the list of packages")?;
    let task = progress::Task::spinner("base: making the file system");
    ext4::create_from_tar(&dir.join("base.ext4"), &LAYOUT, &archive, &work)?;
    task.done();
    fs::remove_dir_all(&work).context("cannot remove the build directory")
}

fn mmdebstrap(locked: &Packages, work: &Path, archive: &Path) -> Result<Command> {
    let names = read("base.packages")?;
    let preferences = work.join("preferences");
    fs::write(&preferences, lock::preferences(locked)).context("cannot write preferences")?;
    let quoted = |path: &Path| format!("'{}'", path.display());
    let mut command = Command::new("mmdebstrap");
    command.env("SOURCE_DATE_EPOCH", EPOCH.to_string());
    command.args(["--variant=minbase", "--architectures=amd64", "--format=tar"]);
    // devtmpfs fills /dev.
    command.arg("--skip=output/dev");
    command.arg(format!("--include={}", package_names(&names).join(",")));
    command.args(LEFT_OUT.map(|option| format!("--dpkgopt={option}")));
    let inside = "/etc/apt/preferences.d/locked";
    let mut hook = |stage: &str, text: String| {
        command.arg(format!("--{stage}-hook={text}"));
    };
    hook("setup", "mkdir -p \"$1/etc/apt/preferences.d\"".to_owned());
    hook("setup", format!("upload {} {inside}", quoted(&preferences)));
    hook("customize", format!("{} \"$1\"", quoted(&directory().join("base-setup.sh"))));
    for name in ["installed", "available"] {
        hook("customize", format!("download /coppice-{name} {}", quoted(&work.join(name))));
        hook("customize", format!("rm \"$1/coppice-{name}\""));
    }
    hook("customize", format!("rm \"$1{inside}\""));
    command.arg(SUITE).arg(archive);
    Ok(command)
}

/// Copies the image and puts the agent into the copy.
pub(super) fn with_agent(stage: &Stage, agent: &Path, image: &Path, scratch: &Path) -> Result<()> {
    let mut copy = Command::new("cp");
    copy.args(["--reflink=auto", "--sparse=always"]).arg(&stage.image).arg(image);
    command::run(&mut copy)?;
    ext4::add(image, &super::agent_nodes(agent, "usr/sbin/init"), scratch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_without_comments_and_blanks() {
        assert_eq!(package_names("# head\n\nbash\n  git  \n# x\n"), ["bash", "git"]);
    }

    #[test]
    fn the_lock_has_every_package_that_the_list_names() {
        let locked = lock::Lock::parse(&read("packages.lock").unwrap()).unwrap().image("base");
        for name in package_names(&read("base.packages").unwrap()) {
            assert!(locked.contains_key(name), "rootfs/packages.lock lacks {name}");
        }
    }

    #[test]
    fn the_key_depends_on_the_lock() {
        let locked = lock::Lock::parse(&read("packages.lock").unwrap()).unwrap().image("base");
        assert_ne!(key(&locked).unwrap(), key(&Packages::new()).unwrap());
    }
}
