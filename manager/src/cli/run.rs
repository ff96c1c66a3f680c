//! `coppice run`: one command in one microVM.

use std::path::PathBuf;
use std::time::Duration;

use coppice_manager::failure::{Class, EXIT_SIGNAL_BASE, Failure, chain};
use coppice_manager::home::Home;
use coppice_manager::sandbox::{BootTime, Config, Error, Kept, Sandbox};
use coppice_manager::store::{Name, Store};
use coppice_manager::{vmm, workdir};

use super::command::{CommandArgs, seconds};
use super::output::Output;
use super::session::{self, Host};
use super::terminal::Signals;

/// Shown by `-h`.
pub(super) const EXAMPLES: &str = "\
Examples:
  coppice run -- uname -a
  coppice run -it -- bash
  coppice run --image tiny --kernel micro --memory 128 -- echo hello
  tar c src | coppice run -i -- sh -c 'tar x && make -C src'
  coppice run --timeout 10 --json -- python3 -c 'print(6 * 7)'";

/// Shown by `--help`.
pub(super) fn long_help() -> String {
    format!("{EXAMPLES}\n\n{}", super::exit_codes())
}

/// Arguments of `coppice run`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Root file system: a name in COPPICE_HOME/images, or a path with a slash
    #[arg(long, value_name = "NAME|PATH", default_value = "base")]
    image: String,
    /// Kernel: a name in COPPICE_HOME/kernels, or a path with a slash
    #[arg(long, value_name = "NAME|PATH", default_value = "agent")]
    kernel: String,
    /// Guest memory in MiB, at least 64
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    memory: u32,
    /// Number of virtual CPUs, 1 to 8
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u8).range(1..=8))]
    cpus: u8,
    #[command(flatten)]
    how: CommandArgs,
    /// How many seconds the guest may take to boot
    #[arg(long, value_name = "SECS", value_parser = seconds, default_value = "60")]
    boot_timeout: Duration,
    /// Leave the machine running in the background, and print its ID; see `coppice exec`
    #[arg(short, long, conflicts_with_all = ["env", "cwd", "user", "timeout", "interactive",
          "tty", "command"])]
    detach: bool,
    /// Name of a machine in the background
    #[arg(long, requires = "detach", value_name = "NAME")]
    name: Option<Name>,
    /// More kernel parameters
    #[arg(long, value_name = "PARAMETERS")]
    append: Option<String>,
    /// The coppice-vmm program [default: COPPICE_VMM, else the one next to this program]
    #[arg(long, value_name = "PATH")]
    vmm: Option<PathBuf>,
    /// The command and its arguments
    #[arg(required_unless_present = "detach", trailing_var_arg = true, value_name = "CMD")]
    command: Vec<String>,
}

/// Runs the command and returns the exit code of `coppice`.
pub(super) async fn run(args: Args) -> u8 {
    if args.detach {
        return detach(&args).await;
    }
    let mut output = Output::new(args.how.json);
    let outcome = attempt(&args, &mut output).await;
    output.conclude(outcome).await
}

async fn attempt(args: &Args, output: &mut Output) -> Result<u8, Failure> {
    let mut signals = Signals::listen().map_err(|e| Failure::new(Class::Host, e, NO_SIGNALS))?;
    let config = config(args)?;
    let request = args.how.request(&args.command)?;
    output.booting().await;
    let mut sandbox = Sandbox::new(&config).map_err(|error| error.failure())?;
    let booted = tokio::select! {
        booted = sandbox.boot() => Ok(booted),
        signal = signals.next() => Err(signal),
    };
    let outcome = match booted {
        Ok(Ok(time)) => serve(&mut sandbox, time, &request, &mut signals, output).await,
        Ok(Err(error)) => Err(error.failure()),
        Err(signal) => Ok(EXIT_SIGNAL_BASE.saturating_add(signal)),
    };
    // Nothing of the guest is kept, so it need not end in order.
    sandbox.stop().await;
    outcome
}

const NO_SIGNALS: &str = "run `coppice doctor` to see what the host lacks";

async fn serve(
    sandbox: &mut Sandbox,
    time: BootTime,
    request: &session::Request,
    signals: &mut Signals,
    output: &mut Output,
) -> Result<u8, Failure> {
    output.started(time).await;
    session::run(Host::Own(sandbox), request, signals, output).await
}

fn config(args: &Args) -> Result<Config, Failure> {
    let home = Home::from_env();
    let kernel = home.kernel(&args.kernel).map_err(|error| {
        let remedy = "make it with `cargo xtask kernel`, or set COPPICE_HOME";
        Failure::new(Class::KernelMissing, error, have(&home.kernels(), remedy))
    })?;
    let image = home.image(&args.image).map_err(|error| {
        let remedy = "make it with `cargo xtask rootfs`, or set COPPICE_HOME";
        Failure::new(Class::ImageMissing, error, have(&home.images(), remedy))
    })?;
    let vmm = vmm::locate(args.vmm.clone()).map_err(|error| {
        Failure::new(Class::ProgramMissing, chain(&error), "name coppice-vmm with --vmm")
    })?;
    Ok(Config {
        vmm,
        kernel,
        image,
        memory_mib: args.memory,
        vcpus: args.cpus,
        append: args.append.clone(),
        scratch: home.path().to_owned(),
        runtime: workdir::base(),
        boot_timeout: args.boot_timeout,
    })
}

/// Boots a machine that stays, and prints its ID.
async fn detach(args: &Args) -> u8 {
    let prepared = || {
        let store = Store::open(&Home::from_env()).map_err(|error| error.failure())?;
        let signals = Signals::listen().map_err(|e| Failure::new(Class::Host, e, NO_SIGNALS))?;
        Ok((store, signals, config(args)?))
    };
    let (store, mut signals, config) = match prepared() {
        Ok(prepared) => prepared,
        Err(failure) => return super::fail_as(&failure, args.how.json),
    };
    match Kept::boot(&store, &config, None, args.name.clone(), signals.next()).await {
        Ok((kept, time)) => {
            let ms = time.until_ready.as_secs_f64() * 1000.0;
            super::print(&super::created(kept.record(), Some(ms), args.how.json))
        }
        Err(Error::Interrupted { signal }) => EXIT_SIGNAL_BASE.saturating_add(signal),
        Err(error) => super::fail_as(&error.failure(), args.how.json),
    }
}

/// A remedy that mentions what is there instead.
fn have(names: &[String], remedy: &str) -> String {
    if names.is_empty() {
        remedy.into()
    } else {
        format!("choose {}, or {remedy}", names.join(", "))
    }
}
