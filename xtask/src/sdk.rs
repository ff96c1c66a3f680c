//! The E2B SDKs that the daemon is tested with, as their registries publish them.
//!
//! `tests/sdk` says which versions, and pins each with all that it needs by digest. What is
//! installed is cached by those lists and linked where the tests look: `target/coppice/sdk`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, ensure};

use crate::cache::{self, Key, workspace};
use crate::{command, packages, progress};

/// Changes when entries are made in another way from the same lists.
const RECIPE: &str = "1";

/// The oldest Node.js that the SDKs take.
const NODE: (u32, u32) = (20, 18);

/// `cargo xtask sdk`.
///
/// # Errors
/// As [`ensure_all`].
pub(crate) fn run() -> Result<ExitCode> {
    ensure_all()?;
    Ok(ExitCode::SUCCESS)
}

/// Installs the SDKs that are not cached, and links all of them.
///
/// # Errors
/// When tools are missing and cannot be installed, or a registry cannot be reached.
pub(crate) fn ensure_all() -> Result<()> {
    command::watch_interrupts();
    for version in versions("python", "requirements-", ".txt")? {
        let entry = python(&version)?;
        cache::link(&entry, &place("python", &version))?;
    }
    for version in versions("node", "", "")? {
        let entry = node(&version)?;
        cache::link(&entry, &place("node", &version))?;
    }
    Ok(())
}

/// Where the tests find a version.
fn place(language: &str, version: &str) -> PathBuf {
    workspace().join("target/coppice/sdk").join(language).join(version)
}

fn lists(language: &str) -> PathBuf {
    workspace().join("tests/sdk").join(language)
}

/// The versions that there are lists for: what stands between `prefix` and `suffix` in their
/// names, sorted.
fn versions(language: &str, prefix: &str, suffix: &str) -> Result<Vec<String>> {
    let dir = lists(language);
    let context = || format!("cannot read {}", dir.display());
    let mut versions = Vec::new();
    for child in fs::read_dir(&dir).with_context(context)? {
        let name = child.with_context(context)?.file_name();
        let name = name.to_string_lossy();
        let version = name.strip_prefix(prefix).and_then(|rest| rest.strip_suffix(suffix));
        versions.extend(version.filter(|version| is_version(version)).map(str::to_owned));
    }
    versions.sort();
    Ok(versions)
}

fn is_version(text: &str) -> bool {
    text.split('.').count() == 3 && text.split('.').all(|part| part.parse::<u32>().is_ok())
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

fn python(version: &str) -> Result<PathBuf> {
    let list = lists("python").join(format!("requirements-{version}.txt"));
    let key = Key::default().add("recipe", RECIPE).add("list", read(&list)?).finish();
    cache::entry("sdk-python", &key, &format!("Python SDK {version}"), |dir| {
        if command::run(Command::new("python3").args(["-m", "pip", "--version"])).is_err() {
            packages::require("testing with the Python SDK", &["python3", "python3-pip"])?;
        }
        let task = progress::Task::spinner(format!("installing the Python SDK {version}"));
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--quiet"])
            .args(["--no-deps", "--require-hashes", "--only-binary", ":all:", "--target"])
            .arg(dir)
            .arg("--requirement")
            .arg(&list);
        command::run(&mut pip).context(
            "cannot install the Python SDK; check that this machine reaches PyPI (pip download)",
        )?;
        task.done();
        Ok(())
    })
}

fn node(version: &str) -> Result<PathBuf> {
    let lists = lists("node").join(version);
    let names = ["package.json", "package-lock.json"];
    let mut key = Key::default().add("recipe", RECIPE);
    for name in names {
        key = key.add(name, read(&lists.join(name))?);
    }
    cache::entry("sdk-node", &key.finish(), &format!("JavaScript SDK {version}"), |dir| {
        require_node()?;
        for name in names {
            fs::copy(lists.join(name), dir.join(name))
                .with_context(|| format!("cannot copy {name}"))?;
        }
        let task = progress::Task::spinner(format!("installing the JavaScript SDK {version}"));
        let mut npm = Command::new("npm");
        npm.args(["ci", "--ignore-scripts", "--no-audit", "--no-fund"]).current_dir(dir);
        command::run(&mut npm).context(
            "cannot install the JavaScript SDK; check that this machine reaches npm's registry",
        )?;
        task.done();
        Ok(())
    })
}

/// Sees to it that `npm` and a `node` that the SDKs take are there.
fn require_node() -> Result<()> {
    if command::run(Command::new("npm").arg("--version")).is_err() {
        packages::require("testing with the JavaScript SDK", &["nodejs", "npm"])?;
    }
    let version = command::output(Command::new("node").arg("--version"))?;
    let (major, minor) = NODE;
    ensure!(
        node_version(&version).is_some_and(|found| found >= NODE),
        "the JavaScript SDK needs Node.js {major}.{minor} or newer, and node is {}; install a \
         newer one, for example from https://nodejs.org",
        version.trim()
    );
    Ok(())
}

/// Major and minor number of what `node --version` prints.
fn node_version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.trim().strip_prefix('v')?.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_version_of_the_tests_is_listed_with_digests_of_all_it_needs() {
        let python = versions("python", "requirements-", ".txt").unwrap();
        assert_eq!(python, ["2.29.5", "2.50.0", "2.51.0", "2.63.0"]);
        for version in python {
            let text = read(&lists("python").join(format!("requirements-{version}.txt"))).unwrap();
            let packages: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
            assert!(packages.iter().any(|line| line.starts_with(&format!("e2b=={version} "))));
            assert!(packages.iter().all(|line| line.contains(" --hash=sha256:")), "{version}");
        }
        assert_eq!(versions("node", "", "").unwrap(), ["2.29.1", "2.51.0"]);
    }

    #[test]
    fn an_old_node_is_told_from_a_new_one() {
        assert_eq!(node_version("v20.20.2\n"), Some((20, 20)));
        assert!(node_version("v18.19.0\n").unwrap() < NODE);
        assert_eq!(node_version("20.1"), None);
    }
}
