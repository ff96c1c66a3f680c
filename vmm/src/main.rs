//! The `coppice-vmm` process: one machine, driven over a control socket, or one look at the host.

mod args;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use coppice_vmm::control::{self, Manager};
use coppice_vmm::sys::{fd, process};
use coppice_vmm_protocol::ExitReason;
use tracing::Level;

use self::args::{Args, USAGE};

/// The guest ended, or it was asked to: not a failure of ours.
const EXIT_OK: u8 = 0;
/// The process could not do its work: no machine was served to its end.
const EXIT_FAILURE: u8 = 1;
/// The command line was wrong.
const EXIT_USAGE: u8 = 2;
/// The guest's kernel panicked, or a fault took it down.
const EXIT_PANIC: u8 = 3;
/// The machine could not go on.
const EXIT_MACHINE: u8 = 4;

fn main() -> ExitCode {
    let parent = process::parent_id();
    let code = match args::parse(std::env::args_os().skip(1)) {
        Ok(Args::Help) => print(USAGE),
        Ok(Args::Version) => print(concat!("coppice-vmm ", env!("CARGO_PKG_VERSION"), "\n")),
        Ok(Args::Probe) => probe(),
        Ok(Args::Serve { control_fd }) => serve(control_fd, false, parent),
        Ok(Args::Listen { listen_fd }) => serve(listen_fd, true, parent),
        Err(error) => {
            eprintln!("coppice-vmm: {error}; try --help");
            Ok(EXIT_USAGE)
        }
    };
    ExitCode::from(code.unwrap_or_else(|error| {
        eprintln!("coppice-vmm: {error:#}");
        EXIT_FAILURE
    }))
}

fn print(text: &str) -> anyhow::Result<u8> {
    std::io::stdout().write_all(text.as_bytes()).context("cannot write to standard output")?;
    Ok(EXIT_OK)
}

fn probe() -> anyhow::Result<u8> {
    let report = coppice_vmm::vm::probe();
    let mut line = serde_json::to_string(&report).context("cannot render the report")?;
    line.push('\n');
    print(&line)?;
    Ok(if report.kvm { EXIT_OK } else { EXIT_FAILURE })
}

fn serve(number: i32, listening: bool, parent: u32) -> anyhow::Result<u8> {
    process::close_inherited_fds(number).context("cannot close inherited descriptors")?;
    let option = if listening { "--listen-fd" } else { "--control-fd" };
    let socket =
        fd::adopt(number).with_context(|| format!("descriptor {number} ({option}) is not open"))?;
    let kind = if listening { "listening" } else { "connected" };
    anyhow::ensure!(
        fd::is_unix_socket(std::os::fd::AsFd::as_fd(&socket), libc::SOCK_SEQPACKET, listening),
        "descriptor {number} ({option}) is not a {kind} SOCK_SEQPACKET Unix socket"
    );
    let manager = if listening { Manager::Listening(socket) } else { Manager::Connected(socket) };
    process::use_one_heap();
    start_log();
    let reason = control::serve(manager, parent)?;
    Ok(match reason {
        ExitReason::PowerOff | ExitReason::Reset | ExitReason::Stopped => EXIT_OK,
        ExitReason::Panic | ExitReason::TripleFault { .. } => EXIT_PANIC,
        ExitReason::Failed { .. } => EXIT_MACHINE,
    })
}

/// Logs to standard error when `COPPICE_LOG` names a level; otherwise logging costs nothing.
fn start_log() {
    let Ok(level) = std::env::var("COPPICE_LOG") else { return };
    match level.parse::<Level>() {
        Ok(level) => {
            tracing_subscriber::fmt()
                .with_max_level(level)
                .with_writer(std::io::stderr)
                .with_ansi(false)
                .init();
        }
        Err(_) => eprintln!(
            "coppice-vmm: COPPICE_LOG={level:?} is not a level: use error, warn, info, debug or trace"
        ),
    }
}
