//! `cargo xtask lab`: runs a command on the best lane this machine has.

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::ensure;
use coppice_lab::{HostKernel, Lab, LaneChoice, Options, machine};

/// Arguments of `cargo xtask lab`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Use the nested machine even where this host has hardware KVM
    #[arg(long, conflicts_with = "direct")]
    nested: bool,
    /// Run on this host, whatever its /dev/kvm can do
    #[arg(long)]
    direct: bool,
    /// Use a nested machine whose clock counts instructions instead of seconds
    #[arg(long, conflicts_with = "direct")]
    virtual_time: bool,
    /// Have the nested machine run the kernel of Debian's backports
    #[arg(long, conflicts_with = "direct")]
    backports: bool,
    /// Virtual CPUs of the nested machine that the command may use; virtual time has one
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=8))]
    cpus: u32,
    /// Memory of the nested machine, in MiB
    #[arg(
        long,
        value_name = "MIB",
        default_value_t = 6144,
        value_parser = clap::value_parser!(u32).range(512..=65536)
    )]
    memory: u32,
    /// Kill the command after this many seconds of wall-clock time
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
    /// Minutes without a user after which the nested machine ends
    #[arg(long, value_name = "MINUTES", default_value_t = 30)]
    idle_timeout: u64,
    /// Run the command on a terminal
    #[arg(short = 't', long)]
    tty: bool,
    /// List the nested machines that run
    #[arg(long, conflicts_with_all = ["command", "stop"])]
    status: bool,
    /// End the nested machines that nobody uses
    #[arg(long, conflicts_with = "command")]
    stop: bool,
    /// With --stop: end those in use as well, which fails the commands in them
    #[arg(long, requires = "stop")]
    force: bool,
    /// The command and its arguments; without one the nested machine is only started
    #[arg(last = true)]
    command: Vec<String>,
}

/// Runs a command on the best lane this machine has.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.status {
        let machines = machine::running()?;
        report(&machines, "running");
        if machines.is_empty() {
            println!("no nested machine runs");
        }
        return Ok(ExitCode::SUCCESS);
    }
    if args.stop {
        let (ended, left) = machine::stop_all(args.force)?;
        report(&ended, "ended");
        report(&left, "in use, left running (--force ends it)");
        return Ok(if left.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    let choice = match (args.nested, args.direct) {
        (true, _) => LaneChoice::Nested,
        (_, true) => LaneChoice::Direct,
        _ => LaneChoice::Best,
    };
    let options = Options {
        cpus: args.cpus,
        memory_mib: args.memory,
        virtual_time: args.virtual_time,
        kernel: if args.backports { HostKernel::Backports } else { HostKernel::Stable },
        idle_timeout: Duration::from_secs(args.idle_timeout.saturating_mul(60)),
        ..Options::default()
    };
    let lab = Lab::open(choice, &options)?;
    eprintln!("lab: lane {} ({})", lab.lane(), lab.reason());
    if args.command.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let mut command = lab.command(args.command.iter().cloned()).stdin_inherited();
    if let Some(seconds) = args.timeout {
        command = command.timeout(Duration::from_secs(seconds));
    }
    if args.tty {
        ensure!(io::stdin().is_terminal(), "--tty needs a terminal as standard input");
        command = command.on_terminal();
    }
    let exit = command.run()?;
    if exit.leftovers > 0 {
        eprintln!("lab: the command left {} processes running: killed", exit.leftovers);
    }
    Ok(ExitCode::from(exit.status.shell_code()))
}

fn report(machines: &[machine::Running], state: &str) {
    for machine in machines {
        let description = &machine.description;
        println!(
            "{state}: {} CPUs, {} MiB{}; QEMU process {}, up {} s, {} users; {}",
            description.cpus,
            description.memory_mib,
            if description.virtual_time { ", virtual time" } else { "" },
            machine.reply.qemu_pid,
            machine.reply.age_s,
            machine.reply.leases,
            machine.directory.display(),
        );
    }
}
