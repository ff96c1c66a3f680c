//! Command line of `coppice`: arguments here, one module per command.

mod bench;
mod checkpoint;
mod clone;
mod command;
mod diff;
mod doctor;
mod events;
mod exec;
mod fsck;
mod input;
mod key;
mod logs;
mod ls;
mod manual;
mod output;
mod owner;
mod parallel;
mod power;
mod reference;
mod rm;
mod run;
mod serve;
mod session;
mod states;
mod table;
mod template;
mod terminal;
mod top;
mod tree;
mod when;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use coppice_manager::failure::{CLASSES, Class, Failure};
use coppice_manager::store::SandboxRecord;
use serde_json::json;

use self::power::Power;

/// Run commands in microVMs, each with a kernel of its own, and go back to any earlier state.
#[derive(Debug, Parser)]
#[command(name = "coppice", version, after_help = EXAMPLES, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  coppice doctor                              what this host can do, and what it lacks
  coppice run -- uname -a                     boot a microVM, run a command, remove it
  coppice run -it -- bash                     a shell in a microVM
  echo 'print(6 * 7)' | coppice run -i -- python3 -
  coppice run --memory 1024 --cpus 4 --env N=8 -- make -j8
  coppice run --detach --name web             a microVM that stays
  coppice exec web -- ./setup.sh
  coppice checkpoint web --name ready         keep its state
  coppice clone ready -n 10                   ten more that go on from there
  coppice rollback web ready                  undo what web did since
  coppice diff ready later                    which files changed, how much memory
  coppice serve                               the same for clients of E2B, over HTTP

Kernels and images are looked for in COPPICE_HOME; `cargo xtask kernel` and `cargo xtask rootfs`
make them.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Boot a microVM, run a command in it, and remove it
    #[command(after_help = run::EXAMPLES, after_long_help = run::long_help())]
    Run(Box<run::Args>),
    /// Run a command in a sandbox that was started with `run --detach` or `clone`
    Exec(exec::Args),
    /// Keep a sandbox's present state: memory, disks and devices
    Checkpoint(checkpoint::Args),
    /// Start sandboxes from a checkpoint, or from another sandbox as it is now
    Clone(clone::Args),
    /// Bring a sandbox back to a checkpoint of its tree
    Rollback(checkpoint::RollbackArgs),
    /// Stop sandboxes for a while
    #[command(after_help = power::PAUSE_HELP)]
    Pause(power::Args),
    /// Let paused sandboxes run on
    Resume(power::ResumeArgs),
    /// End sandboxes and remove them
    Kill(power::Args),
    /// Say what this host can do and what to do about what it lacks
    Doctor(doctor::Args),
    /// List the sandboxes
    Ls(ls::Args),
    /// Draw the tree of checkpoints, and where each sandbox stands
    Tree(tree::Args),
    /// Show what changed between two checkpoints
    #[command(after_help = diff::HELP)]
    Diff(diff::Args),
    /// Remove checkpoints, or sandboxes that ended
    #[command(after_help = rm::HELP)]
    Rm(rm::Args),
    /// Show what happened to the daemon's sandboxes
    #[command(after_help = events::HELP)]
    Events(events::Args),
    /// Show a sandbox's logs: what happened to it, its machine's, its console's and its agent's
    #[command(after_help = logs::HELP)]
    Logs(logs::Args),
    /// Show what the sandboxes use, again and again
    #[command(after_help = top::HELP)]
    Top(top::Args),
    /// Check the store of checkpoints
    Fsck(fsck::Args),
    /// Serve sandboxes to E2B's clients
    #[command(after_help = serve::HELP)]
    Serve(serve::Args),
    /// Build, list and remove what `serve` makes sandboxes from
    #[command(after_help = template::HELP)]
    Template(template::Args),
    /// Make, list and remove the API keys that `serve` asks for
    #[command(after_help = key::HELP)]
    Key(key::Args),
    /// Measure boots, restores, clones and more, beside peers
    #[command(after_help = bench::EXAMPLES, after_long_help = bench::long_help())]
    Bench(Box<bench::Args>),
    /// Print the completions of a shell
    #[command(after_help = manual::COMPLETIONS_HELP)]
    Completions(manual::CompletionsArgs),
    /// Write the manual pages
    #[command(hide = true)]
    Man(manual::ManArgs),
}

/// Parses the arguments, runs the command and returns its exit code.
pub(crate) fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are no errors. There is nobody to tell when this cannot be written.
            let _ = error.print();
            let failed = error.use_stderr();
            return ExitCode::from(if failed { Class::Usage.exit_code() } else { 0 });
        }
    };
    allow_descriptors();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            let failure = Failure::new(Class::Host, error, "see `ulimit -n`");
            return ExitCode::from(fail(&failure));
        }
    };
    let code = runtime.block_on(async {
        match cli.command {
            Command::Run(args) => run::run(*args).await,
            Command::Doctor(args) => doctor::run(&args).await,
            Command::Exec(args) => exec::run(args).await,
            Command::Checkpoint(args) => checkpoint::run(args).await,
            Command::Clone(args) => clone::run(args).await,
            Command::Rollback(args) => checkpoint::roll_back(args).await,
            Command::Pause(args) => power::run(&args, Power::Pause).await,
            Command::Resume(args) => power::resume(&args).await,
            Command::Kill(args) => power::run(&args, Power::Kill).await,
            Command::Ls(args) => ls::run(&args).await,
            Command::Tree(args) => tree::run(&args).await,
            Command::Diff(args) => diff::run(&args),
            Command::Rm(args) => rm::run(&args).await,
            Command::Events(args) => events::run(&args).await,
            Command::Logs(args) => logs::run(&args).await,
            Command::Top(args) => top::run(&args).await,
            Command::Fsck(args) => fsck::run(&args),
            Command::Serve(args) => serve::run(args).await,
            Command::Template(args) => template::run(args).await,
            Command::Key(args) => key::run(&args),
            Command::Bench(args) => bench::run(*args).await,
            Command::Completions(args) => manual::completions(&args),
            Command::Man(args) => manual::pages(&args),
        }
    });
    // A thread may still sit in a read of standard input; the end of the process ends it.
    runtime.shutdown_background();
    ExitCode::from(code)
}

/// Shows a failure on standard error and returns its exit code.
fn fail(failure: &Failure) -> u8 {
    // There is nobody to tell when standard error is gone.
    let _ = writeln!(std::io::stderr(), "coppice: {failure}");
    failure.class.exit_code()
}

/// Shows a failure as [`fail`] does, or as a JSON object on standard output.
fn fail_as(failure: &Failure, json: bool) -> u8 {
    if !json {
        return fail(failure);
    }
    let code = failure.class.exit_code();
    let error = json!({
        "event": "error",
        "code": code,
        "class": failure.class.name(),
        "message": failure.message,
        "remedy": failure.remedy,
    });
    match print(&format!("{error}\n")) {
        0 => code,
        failed => failed,
    }
}

/// Allows this process, and the machines it starts, as many descriptors as they may have: the
/// usual limit is there for programs that cannot number them further, and a machine keeps the
/// files of all checkpoints open that were made of it.
fn allow_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // Where it is refused, the usual limit stays.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// How a new sandbox is told of.
fn created(record: &SandboxRecord, boot_ms: Option<f64>, json: bool) -> String {
    if !json {
        return format!("{}\n", record.id);
    }
    let told = json!({
        "id": record.id,
        "name": record.name,
        "checkpoint": record.standing.parent,
        "boot_ms": boot_ms,
    });
    format!("{told}\n")
}

/// Microseconds as milliseconds with two digits.
fn milliseconds(us: u64) -> String {
    format!("{}.{:02}", us / 1000, us % 1000 / 10)
}

/// Writes the result of a command to standard output; 0, or the exit code of the failure.
fn print(text: &str) -> u8 {
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => 0,
        Err(error) => fail(&Failure::new(Class::Host, error, "see where standard output goes")),
    }
}

/// The table of exit codes for `--help`.
fn exit_codes() -> String {
    let mut text = String::from(
        "Exit codes:\n  the command's own; 128 + N when signal N ended it\n  \
         124  the command ran longer than --timeout\n  \
         126  the command is in the guest but cannot be executed\n  \
         127  the command is not in the guest\n",
    );
    for (_, code, name, meaning) in CLASSES {
        text.push_str(&format!("  {code:>3}  {meaning} ({name})\n"));
    }
    text
}
