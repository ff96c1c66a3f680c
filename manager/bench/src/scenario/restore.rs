//! Checkpoints of Linux guests: from a checkpoint to the first output of a command, in a new
//! process, in a prepared one, and in place; and the same of a peer's snapshot.
//!
//! Every time ends when the first bytes of the command's output have come to the client, which
//! connects to the guest's vsock socket after the VMM has said that the machine runs again. It
//! begins before the VMM process is executed (`restore_ms`), before the old one is killed
//! (`kill_restore_ms`), or before the request to a process that is there (`warm_ms`,
//! `rollback_ms`). Files and sockets that a VMM is handed are made within the time.

#[path = "../agent.rs"]
mod client;
#[path = "../contender/coppice_vm.rs"]
mod coppice;
#[path = "../contender/firecracker.rs"]
mod firecracker;

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use coppice_vmm_protocol::FAST_BOOT_OPTIONS;
use serde::Serialize;

use crate::machine::Contender;
use client::{Client, Ready};

/// Kernel parameters of every contender besides [`FAST_BOOT_OPTIONS`] and the root device.
const OPTIONS: &str = "console=ttyS0 panic=-1 reboot=k rootfstype=ext4 init=/sbin/init";

/// How long a guest has been up when its checkpoint is taken: one without a past is not what
/// anybody clones, and its first timers would be special.
const UP_TIME: Duration = Duration::from_secs(3);

/// What every contender runs.
#[derive(Debug, Clone)]
pub struct Setup {
    /// ELF kernel.
    pub kernel: PathBuf,
    /// Root file system with the agent, as ext4; it is not written to.
    pub image: PathBuf,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Directory for sockets, disks and checkpoints.
    pub scratch: PathBuf,
}

/// One pass through everything, in milliseconds.
#[derive(Debug, Clone, Serialize)]
pub struct Sample {
    /// Who.
    pub contender: &'static str,
    /// The first restore of a checkpoint, of which nothing is known yet: exec of the VMM,
    /// restore, first output.
    pub first_restore_ms: f64,
    /// A later one; Coppice brings in what the first one used.
    pub restore_ms: f64,
    /// The part of it until the VMM said that the machine runs.
    pub restore_call_ms: f64,
    /// Request to a prepared VMM, first output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warm_ms: Option<f64>,
    /// The part of it until the VMM said that the machine runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warm_call_ms: Option<f64>,
    /// Kill of the VMM, its end, exec of another, restore, first output.
    pub kill_restore_ms: f64,
    /// Rollback in place, first output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollback_ms: Option<f64>,
    /// The part of it until the VMM said that the machine runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollback_call_ms: Option<f64>,
    /// The command alone, in a machine that has run it before.
    pub command_ms: f64,
    /// How long the machine stood still for its checkpoint: for a peer, the calls that pause and
    /// save.
    pub checkpoint_pause_ms: f64,
}

/// Boots, checkpoints and restores one machine after another.
///
/// # Errors
/// When a machine does not do what it should.
pub fn once(contender: &Contender, setup: &Setup) -> anyhow::Result<Sample> {
    match contender {
        Contender::Coppice(vmm) => coppice_once(vmm, setup),
        Contender::Firecracker(vmm) => firecracker_once(vmm, setup),
    }
}

/// The time of an action and of the first output after it, both from before the action.
struct Times {
    call_ms: f64,
    output_ms: f64,
}

/// Does something to a machine, then has the command run in it.
fn time<T>(
    client: &Client,
    vsock: &Path,
    action: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<(T, Times)> {
    let started = Instant::now();
    let machine = action()?;
    let call_ms = millis(started);
    let output_ms = Cell::new(0.0);
    client.run(vsock, || output_ms.set(millis(started)))?;
    Ok((machine, Times { call_ms, output_ms: output_ms.get() }))
}

fn coppice_once(program: &Path, setup: &Setup) -> anyhow::Result<Sample> {
    let client = Client::new()?;
    let vsock = coppice::vsock(setup);
    let ready = Ready::listen(&vsock)?;
    let mut machine = coppice::Vmm::start(program)?;
    machine.boot(setup, &format!("{} root=/dev/vda rw", cmdline()))?;
    ready.wait()?;
    std::thread::sleep(UP_TIME);
    client.run(&vsock, || ())?;
    let mut node = machine.checkpoint(setup)?;
    let ((), command) = time(&client, &vsock, || Ok(()))?;
    machine.kill()?;

    let restore = |node: &coppice::Node| {
        let mut vmm = coppice::Vmm::start(program)?;
        vmm.restore(setup, node)?;
        Ok(vmm)
    };
    let (mut machine, first) = time(&client, &vsock, || restore(&node))?;
    machine.record_working_set(setup, &mut node)?;
    machine.kill()?;
    let (machine, cold) = time(&client, &vsock, || restore(&node))?;
    let (mut machine, again) = time(&client, &vsock, || {
        machine.kill()?;
        restore(&node)
    })?;
    let ((), rollback) = time(&client, &vsock, || machine.roll_back(setup, &node))?;
    machine.kill()?;
    let mut shell = coppice::Vmm::start(program)?;
    shell.prepare(setup)?;
    let ((), warm) = time(&client, &vsock, || shell.restore(setup, &node))?;
    shell.kill()?;
    Ok(Sample {
        contender: "coppice",
        first_restore_ms: first.output_ms,
        restore_ms: cold.output_ms,
        restore_call_ms: cold.call_ms,
        warm_ms: Some(warm.output_ms),
        warm_call_ms: Some(warm.call_ms),
        kill_restore_ms: again.output_ms,
        rollback_ms: Some(rollback.output_ms),
        rollback_call_ms: Some(rollback.call_ms),
        command_ms: command.output_ms,
        checkpoint_pause_ms: Duration::from_micros(node.info.pause_us).as_secs_f64() * 1000.0,
    })
}

fn firecracker_once(program: &Path, setup: &Setup) -> anyhow::Result<Sample> {
    let client = Client::new()?;
    let files = firecracker::Files::new(setup)?;
    let vsock = &files.vsock;
    let ready = Ready::listen(vsock)?;
    let machine = firecracker::Vmm::boot(setup, program, &files, &cmdline())?;
    ready.wait()?;
    std::thread::sleep(UP_TIME);
    client.run(vsock, || ())?;
    let checkpoint_pause_ms = machine.snapshot(&files)?;
    let ((), command) = time(&client, vsock, || Ok(()))?;
    machine.kill()?;

    let restore = || firecracker::Vmm::restore(program, &files);
    files.copy_disk()?;
    let (machine, first) = time(&client, vsock, restore)?;
    machine.kill()?;
    files.copy_disk()?;
    let (machine, cold) = time(&client, vsock, restore)?;
    files.copy_disk()?;
    let (machine, again) = time(&client, vsock, || {
        machine.kill()?;
        restore()
    })?;
    machine.kill()?;
    Ok(Sample {
        contender: "firecracker",
        first_restore_ms: first.output_ms,
        restore_ms: cold.output_ms,
        restore_call_ms: cold.call_ms,
        warm_ms: None,
        warm_call_ms: None,
        kill_restore_ms: again.output_ms,
        rollback_ms: None,
        rollback_call_ms: None,
        command_ms: command.output_ms,
        checkpoint_pause_ms,
    })
}

fn cmdline() -> String {
    format!("{FAST_BOOT_OPTIONS} {OPTIONS}")
}

fn millis(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}
