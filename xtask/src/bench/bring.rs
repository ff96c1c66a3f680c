//! Brings what is measured to where the lane sees it: the nested machine has hardly any programs.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};
use coppice_lab::Lab;

use crate::command;

/// Debian's QEMU, which is a peer wherever it is installed.
const QEMU: &str = "/usr/bin/qemu-system-x86_64";

/// What QEMU's microvm machine reads besides its libraries.
const FIRMWARE: [&str; 6] = [
    "/usr/share/qemu/pvh.bin",
    "/usr/share/qemu/linuxboot_dma.bin",
    "/usr/share/qemu/kvmvapic.bin",
    "/usr/share/qemu/qboot.rom",
    "/usr/share/seabios/bios-microvm.bin",
    "/usr/share/seabios/bios-256k.bin",
];

/// The peers as the lane knows them. Without one called `qemu`, QEMU is added if this host has it.
pub(super) fn peers(lab: &Lab, wanted: &[String], scratch: &Path) -> anyhow::Result<Vec<String>> {
    let mut peers = wanted.to_vec();
    let named = peers.iter().any(|peer| peer.starts_with("qemu"));
    if !named && Path::new(QEMU).is_file() {
        peers.push(format!("qemu={QEMU}"));
    }
    peers.iter().map(|peer| bring(lab, peer, scratch)).collect()
}

fn bring(lab: &Lab, peer: &str, scratch: &Path) -> anyhow::Result<String> {
    let (name, what) = peer.split_once('=').context("--peer wants NAME=PATH")?;
    let kind = name.split('@').next().unwrap_or(name);
    if !lab.lane().is_nested() || kind == "e2b" {
        return Ok(peer.to_owned());
    }
    if kind == "qemu" {
        install(lab, Path::new(what), scratch)?;
        return Ok(peer.to_owned());
    }
    let copy = scratch.join(format!("peer-{name}"));
    fs::copy(what, &copy).with_context(|| format!("{what} cannot be copied"))?;
    Ok(format!("{name}={}", copy.display()))
}

/// Puts a program with its libraries and QEMU's firmware into the nested machine, at the same paths,
/// and loads what QEMU's vsock needs. No loader's script stands before it: it is executed as here.
fn install(lab: &Lab, program: &Path, scratch: &Path) -> anyhow::Result<()> {
    let mut files: BTreeSet<PathBuf> = libraries(program)?;
    files.insert(program.to_owned());
    files.extend(FIRMWARE.iter().map(PathBuf::from).filter(|path| path.is_file()));
    let archive = scratch.join("qemu.tar");
    let mut tar = Command::new("tar");
    tar.args(["--create", "--dereference", "--absolute-names", "--file"]).arg(&archive);
    command::run(tar.args(&files))?;
    let script = format!("modprobe vhost_vsock; tar -xf {} -C /", archive.display());
    let exit = lab.command(["sh", "-c", &script]).run()?;
    if !exit.status.success() {
        bail!("QEMU cannot be brought to the nested machine: {}", exit.status);
    }
    Ok(())
}

/// The libraries that a program is linked to, with its loader.
fn libraries(program: &Path) -> anyhow::Result<BTreeSet<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("ldd does not start")?;
    if !output.status.success() {
        bail!("{} is not linked to libraries that ldd finds", program.display());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.split_whitespace().map(PathBuf::from).filter(|path| path.is_absolute()).collect())
}
