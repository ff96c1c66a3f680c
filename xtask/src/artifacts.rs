//! Everything a Linux guest needs from this checkout: binaries, kernels and root file systems.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

/// Builds the host binaries, then the kernels and root file systems that are not cached yet.
///
/// # Errors
/// When one of the builds fails; its own output says why.
pub(crate) fn build_all() -> anyhow::Result<()> {
    build_binaries()?;
    let xtask = std::env::current_exe().context("this program's own path is unknown")?;
    run(Command::new(&xtask).arg("kernel"), "the kernel build")?;
    run(Command::new(&xtask).arg("rootfs"), "the build of the root file systems")
}

/// Builds the host binaries.
///
/// # Errors
/// When the build fails; its own output says why.
pub(crate) fn build_binaries() -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let binaries = ["build", "--release", "-p", "coppice", "-p", "coppice-vmm"];
    run(Command::new(cargo).args(binaries), "the release build")
}

/// Builds the `tiny` root file system if need be; returns its image.
///
/// # Errors
/// When the build fails; its own output says why.
pub(crate) fn tiny_image() -> anyhow::Result<PathBuf> {
    let xtask = std::env::current_exe().context("this program's own path is unknown")?;
    run(Command::new(&xtask).args(["rootfs", "tiny"]), "the build of the tiny root file system")?;
    Ok(crate::cache::home().join("images/tiny.ext4"))
}

/// Top of the checkout.
fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn run(command: &mut Command, what: &str) -> anyhow::Result<()> {
    let status =
        command.current_dir(top()).status().with_context(|| format!("{what} cannot start"))?;
    if !status.success() {
        bail!("{what} failed ({status}); see its output above");
    }
    Ok(())
}
