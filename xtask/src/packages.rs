//! Debian packages: tools a build needs, and pinned downloads checked against digests.

mod pinned;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::cache::sha256_file;
use crate::{command, progress};

pub(crate) use pinned::{Fetched, Pin, fetch, newest};

/// One version of a package as apt's index, which the archive signs, describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Indexed {
    /// The Debian version, with its epoch.
    pub(crate) version: String,
    /// The SHA-256 digest of the .deb file, in hexadecimal.
    pub(crate) sha256: String,
}

/// Makes sure that `packages` are installed: installs what is missing when root, else says how.
///
/// `purpose` tells the user what they are for.
pub(crate) fn require(purpose: &str, packages: &[&str]) -> Result<()> {
    let missing = missing(packages)?;
    if missing.is_empty() {
        return Ok(());
    }
    if !nix::unistd::geteuid().is_root() {
        bail!(
            "{purpose} needs Debian packages that are missing; install them with: sudo apt-get install {}",
            missing.join(" ")
        );
    }
    let task = progress::Task::spinner(format!("installing {} for {purpose}", missing.join(" ")));
    let install = || {
        command::run(apt_get().args(["install", "-y", "--no-install-recommends"]).args(&missing))
    };
    // A fresh machine has no package index yet, and an old index names files that are gone.
    if install().is_err() {
        update()?;
        install()
            .with_context(|| network_hint(&format!("cannot install {}", missing.join(" "))))?;
    }
    task.done();
    Ok(())
}

/// Which of `packages` are not installed.
fn missing(packages: &[&str]) -> Result<Vec<String>> {
    let mut query = Command::new("dpkg-query");
    query.args(["-W", "-f", "${Package} ${db:Status-Status}\n"]);
    // It fails when it does not know one of them; the others are still listed.
    let output = query.args(packages).output().context(
        "cannot ask dpkg-query for installed packages; this command needs a Debian host",
    )?;
    Ok(not_installed(packages, &String::from_utf8_lossy(&output.stdout)))
}

fn not_installed(packages: &[&str], listing: &str) -> Vec<String> {
    let installed = |package: &str| {
        listing.lines().any(|line| line.split_once(' ') == Some((package, "installed")))
    };
    packages.iter().filter(|p| !installed(p)).map(|&p| p.to_owned()).collect()
}

/// Refreshes apt's package index, which only root can.
pub(crate) fn update() -> Result<()> {
    command::run(apt_get().arg("update"))
        .with_context(|| network_hint("cannot refresh the package index"))
}

/// All versions of `package` that apt's index knows, the preferred one first.
pub(crate) fn index(package: &str) -> Result<Vec<Indexed>> {
    let show = || -> Vec<Indexed> {
        let text = command::output(Command::new("apt-cache").args(["show", package]));
        // It fails when it knows no such package.
        text.map(|text| parse_index(&text)).unwrap_or_default()
    };
    let mut versions = show();
    if versions.is_empty() && nix::unistd::geteuid().is_root() {
        update()?;
        versions = show();
    }
    if versions.is_empty() {
        bail!(
            "apt knows no package {package}; run apt-get update, and check that a bookworm-security source is configured"
        );
    }
    Ok(versions)
}

fn parse_index(text: &str) -> Vec<Indexed> {
    let stanza = |stanza: &str| {
        let field = |name: &str| {
            stanza.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()))
        };
        Some(Indexed { version: field("Version:")?, sha256: field("SHA256:")? })
    };
    text.split("\n\n").filter_map(stanza).collect()
}

/// Downloads one version of a package into `dir` and checks its digest.
///
/// # Errors
/// Without a network, without space, or when the content is not what was asked for.
pub(crate) fn download(package: &str, wanted: &Indexed, dir: &Path) -> Result<PathBuf> {
    let name = format!("{package}={}", wanted.version);
    let task = progress::Task::spinner(format!("downloading {name}"));
    // apt would drop to a user that may not enter a private directory.
    let mut get = apt_get();
    get.args(["-o", "APT::Sandbox::User=root", "download", &name]).current_dir(dir);
    command::run(&mut get).with_context(|| network_hint(&format!("cannot download {name}")))?;
    let file = fs::read_dir(dir)
        .with_context(|| format!("cannot read {}", dir.display()))?
        .filter_map(|child| Some(child.ok()?.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .with_context(|| format!("apt-get download {name} left no file"))?;
    let digest = sha256_file(&file)?;
    if digest != wanted.sha256 {
        bail!(
            "{name} has the digest {digest}, not {}; the download cannot be trusted",
            wanted.sha256
        );
    }
    task.done();
    Ok(file)
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive").args(["-q", "-o", "DPkg::Lock::Timeout=300"]);
    command
}

fn network_hint(what: &str) -> String {
    format!("{what}; check that this machine reaches its Debian mirror (apt-get update)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_fully_installed_packages_count() {
        let listing = "bc installed\nflex config-files\nlibelf-dev installed\n";
        assert_eq!(
            not_installed(&["bc", "flex", "bison", "libelf-dev"], listing),
            ["flex", "bison"]
        );
        assert_eq!(not_installed(&[], listing), Vec::<String>::new());
    }

    #[test]
    fn an_index_lists_versions_in_order_and_skips_entries_without_a_digest() {
        let text = "Package: p\nVersion: 1:2.0-1\nDescription: x\n Version: 9\nSHA256: aa\n\n\
                    Package: p\nVersion: 1.0\n\nPackage: p\nVersion: 1.5\nSHA256: bb\n";
        let entry = |version: &str, sha256: &str| Indexed {
            version: version.to_owned(),
            sha256: sha256.to_owned(),
        };
        assert_eq!(parse_index(text), [entry("1:2.0-1", "aa"), entry("1.5", "bb")]);
    }
}
