//! `coppice exec`: a command in a sandbox that stays.

use coppice_manager::failure::{Class, Failure};
use coppice_manager::registry::State;
use coppice_manager::sandbox::Guest;
use tokio::time::Instant;

use super::command::CommandArgs;
use super::output::Output;
use super::owner::Owner;
use super::reference::sandbox;
use super::session::{self, Host};
use super::terminal::Signals;

/// Arguments of `coppice exec`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    how: CommandArgs,
    /// The sandbox: its name, ID, or the beginning of its ID
    #[arg(value_name = "SANDBOX")]
    sandbox: String,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    command: Vec<String>,
}

/// Runs the command and returns the exit code of `coppice`.
pub(super) async fn run(args: Args) -> u8 {
    let mut output = Output::new(args.how.json);
    let outcome = attempt(&args, &mut output).await;
    output.conclude(outcome).await
}

async fn attempt(args: &Args, output: &mut Output) -> Result<u8, Failure> {
    let began = Instant::now();
    let mut signals =
        Signals::listen().map_err(|e| Failure::new(Class::Host, e, "see `ulimit -n`"))?;
    let request = args.how.request(&args.command)?;
    let (store, id) = sandbox(&args.sandbox)?;
    if let Owner::Daemon(row) = Owner::of(&id)?
        && row.state != State::Running
    {
        let message = format!("sandbox {id} is {}", row.state.name());
        return Err(Failure::new(Class::Conflict, message, "see `coppice resume`"));
    }
    let guest = Guest::open(&store, &id).map_err(|error| error.failure())?;
    session::run(Host::Kept(&guest, began), &request, &mut signals, output).await
}
