//! Boot: from exec of the VMM to the guest's init, and from exec of `coppice run` to the first
//! byte of the first command's output.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, bail};
use coppice_vmm_protocol::FAST_BOOT_OPTIONS;
use serde::Serialize;

use crate::machine::{Contender, Guest};
use crate::observe;

/// What the guest's init of the benchmark writes to the console, first of all.
pub const INIT_MARKER: &str = "coppice-bench: init";

/// Kernel parameters that every contender gets besides [`FAST_BOOT_OPTIONS`] and its root device:
/// those that Firecracker's documents recommend.
const OPTIONS: &str = "console=ttyS0 reboot=k panic=1 i8042.noaux i8042.nomux i8042.dumbkbd \
                       init=/bench-init";

/// One boot, with everything that was seen of it.
#[derive(Debug, Clone, Serialize)]
pub struct Sample {
    /// Who booted.
    pub contender: &'static str,
    /// Exec of the VMM to the first line of init, in milliseconds.
    pub boot_ms: f64,
    /// KVM exits until then, where the kernel tells.
    pub exits: Option<u64>,
    /// Memory of the VMM without guest RAM, in KiB.
    pub pss_kib: u64,
    /// Guest RAM resident at that time, in KiB.
    pub guest_rss_kib: u64,
}

/// Boots one machine and looks at it when its init has spoken.
///
/// # Errors
/// When the machine does not come up.
pub fn boot_once(contender: &Contender, guest: &Guest, scratch: &Path) -> anyhow::Result<Sample> {
    let options = format!("{FAST_BOOT_OPTIONS} {OPTIONS}");
    let started = Instant::now();
    let mut machine = contender.start(guest, &options, scratch)?;
    machine.wait_for(INIT_MARKER)?;
    let boot_ms = millis(started);
    let exits = observe::kvm_exits(machine.pid());
    let memory = observe::memory(machine.pid(), guest.memory_mib)?;
    Ok(Sample {
        contender: contender.name(),
        boot_ms,
        exits,
        pss_kib: memory.pss_kib,
        guest_rss_kib: memory.guest_rss_kib,
    })
}

/// How `coppice run` is called to time a first command.
#[derive(Debug, Clone)]
pub struct FirstCommand {
    /// The `coppice` binary.
    pub coppice: PathBuf,
    /// Kernel, by path.
    pub kernel: PathBuf,
    /// Image, by path.
    pub image: PathBuf,
    /// Memory in MiB.
    pub memory_mib: u32,
}

/// Time from exec of `coppice run` to the first byte of the command's output, in milliseconds.
///
/// # Errors
/// When the command prints nothing or fails.
pub fn first_output_once(run: &FirstCommand) -> anyhow::Result<f64> {
    let started = Instant::now();
    let mut child = Command::new(&run.coppice)
        .arg("run")
        .arg("--kernel")
        .arg(&run.kernel)
        .arg("--image")
        .arg(&run.image)
        .args(["--memory", &run.memory_mib.to_string(), "--cpus", "1", "--", "echo", "hello"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("{} does not start", run.coppice.display()))?;
    let mut output = child.stdout.take().context("the command has no output")?;
    let mut first = [0u8];
    let got = output.read(&mut first).context("the command's output cannot be read")?;
    let elapsed = millis(started);
    let mut rest = Vec::new();
    output.read_to_end(&mut rest).context("the command's output cannot be read")?;
    let status = child.wait().context("the command cannot be waited for")?;
    if got == 0 || !status.success() {
        bail!("`coppice run` printed nothing or failed ({status})");
    }
    Ok(elapsed)
}

fn millis(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}
