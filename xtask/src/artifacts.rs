//! Everything a Linux guest needs from this checkout: binaries, kernels and root file systems.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, bail};

use crate::cache;
use crate::kernel::{self, Flavour, Series};
use crate::rootfs::{self, Image};

/// Builds the host binaries, then the kernels and root file systems that are not cached yet.
///
/// # Errors
/// When one of the builds fails; its own output says why.
pub(crate) fn build_all() -> anyhow::Result<()> {
    build_binaries()?;
    kernel::ensure(Flavour::Micro, Series::default())?;
    kernel::ensure(Flavour::Agent, Series::default())?;
    rootfs::ensure(None)
}

/// Builds the host binaries.
///
/// # Errors
/// When the build fails; its own output says why.
pub(crate) fn build_binaries() -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let binaries =
        ["build", "--release", "-p", "coppice", "-p", "coppice-vmm", "-p", "coppice-benches"];
    run(Command::new(cargo).args(binaries), "the release build")
}

/// Builds what the benchmarks of micro-guests need.
///
/// # Errors
/// When the build fails; its own output says why.
pub(crate) fn build_micro() -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let binaries = ["build", "--release", "-p", "coppice-vmm", "-p", "coppice-benches"];
    run(Command::new(cargo).args(binaries), "the release build")
}

/// Builds the `tiny` root file system if need be; returns its image.
///
/// # Errors
/// When the build fails; its own output says why.
pub(crate) fn tiny_image() -> anyhow::Result<PathBuf> {
    rootfs::ensure(Some(Image::Tiny))?;
    Ok(cache::home().join("images/tiny.ext4"))
}

fn run(command: &mut Command, what: &str) -> anyhow::Result<()> {
    let status = command
        .current_dir(cache::workspace())
        .status()
        .with_context(|| format!("{what} cannot start"))?;
    if !status.success() {
        bail!("{what} failed ({status}); see its output above");
    }
    Ok(())
}
