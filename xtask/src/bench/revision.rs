//! Another revision of this project, built to be measured beside this one.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, bail};
use coppice_lab::paths;

use crate::command;

/// The VMM of a revision, by its commit. It is built once.
pub(super) fn build(revision: &str) -> anyhow::Result<(String, PathBuf)> {
    let commit = commit(revision)?;
    let short: String = commit.chars().take(12).collect();
    let base = paths::target_dir().join("ab");
    let program = base.join(&short).join("coppice-vmm");
    if program.is_file() {
        return Ok((short, program));
    }
    fs::create_dir_all(base.join(&short)).context("no room for another revision")?;
    let tree = base.join(format!("{short}.tree"));
    let checkout = paths::checkout();
    if !tree.exists() {
        let mut add = Command::new("git");
        add.arg("-C").arg(&checkout).args(["worktree", "add", "--quiet", "--detach"]);
        command::run(add.arg(&tree).arg(&commit))?;
    }
    eprintln!("bench: building {short}");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["build", "--release", "-p", "coppice-vmm", "--bin", "coppice-vmm"]);
    // One directory for all of them: what they have in common is compiled once.
    build.current_dir(&tree).env("CARGO_TARGET_DIR", base.join("build"));
    let status = build.status().context("cargo does not start")?;
    let mut remove = Command::new("git");
    remove.arg("-C").arg(&checkout).args(["worktree", "remove", "--force"]);
    command::run(remove.arg(&tree))?;
    if !status.success() {
        bail!("{revision} ({short}) cannot be built: {status}");
    }
    let release = paths::release_dir();
    let below = release.strip_prefix(paths::target_dir()).context("an unusual target directory")?;
    fs::copy(base.join("build").join(below).join("coppice-vmm"), &program)
        .with_context(|| format!("{} cannot be kept", program.display()))?;
    Ok((short, program))
}

fn commit(revision: &str) -> anyhow::Result<String> {
    let output = Command::new("git")
        .arg("-C")
        .arg(paths::checkout())
        .args(["rev-parse", "--verify", "--quiet"])
        .arg(format!("{revision}^{{commit}}"))
        .output()
        .context("git does not start")?;
    if !output.status.success() {
        bail!("{revision} is no revision of this repository");
    }
    Ok(String::from_utf8(output.stdout).context("git speaks no UTF-8")?.trim().to_owned())
}
