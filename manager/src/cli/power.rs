//! `coppice pause`, `coppice resume` and `coppice kill`.

use std::time::Duration;

use coppice_manager::failure::Failure;
use coppice_manager::sandbox::Kept;
use coppice_manager::store::Id;

use super::command::seconds;
use super::owner::{Owner, daemon};
use super::reference::sandbox;

/// What a pause of the daemon's sandboxes is.
pub(super) const PAUSE_HELP: &str = "\
A sandbox of this program's stands still and keeps its memory. One of the daemon's is suspended, as
its clients' pause does: its state is written to disk, its machine ends, and it outlives a restart
of the host.";

/// Arguments of `coppice pause` and `coppice kill`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The sandboxes: names, IDs, or beginnings of IDs
    #[arg(required = true, value_name = "SANDBOX")]
    sandboxes: Vec<String>,
}

/// Arguments of `coppice resume`.
#[derive(Debug, clap::Args)]
pub(super) struct ResumeArgs {
    #[command(flatten)]
    which: Args,
    /// How many seconds a sandbox of the daemon's may live from now on [default: as many as before]
    #[arg(long, value_name = "SECS", value_parser = seconds)]
    timeout: Option<Duration>,
}

/// What is done with each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Power {
    /// Stop it.
    Pause,
    /// Let it run on, one of the daemon's for so many milliseconds.
    Resume(Option<u64>),
    /// End and remove it.
    Kill,
}

/// Lets sandboxes run on, as [`run`] does.
pub(super) async fn resume(args: &ResumeArgs) -> u8 {
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    run(&args.which, Power::Resume(args.timeout.map(ms))).await
}

/// Does it with one sandbox after the other, and tells of each failure; the code of the first.
pub(super) async fn run(args: &Args, power: Power) -> u8 {
    let mut code = 0;
    for reference in &args.sandboxes {
        if let Err(failure) = one(reference, power).await {
            let failed = super::fail(&failure);
            if code == 0 {
                code = failed;
            }
        }
    }
    code
}

async fn one(reference: &str, power: Power) -> Result<(), Failure> {
    let (store, id) = sandbox(reference)?;
    if let Owner::Daemon(_) = Owner::of(&id)? {
        return by_daemon(&id, power).await;
    }
    let done = match power {
        Power::Kill => Kept::remove(&store, &id).await,
        Power::Pause | Power::Resume(_) => match Kept::open(&store, &id).await {
            Ok(kept) if power == Power::Pause => kept.pause().await,
            Ok(kept) => kept.resume().await,
            Err(error) => Err(error),
        },
    };
    done.map_err(|error| error.failure())
}

async fn by_daemon(id: &Id, power: Power) -> Result<(), Failure> {
    let daemon = daemon().await?;
    let done = match power {
        Power::Kill => daemon.kill(id).await,
        Power::Pause => daemon.pause(id).await,
        Power::Resume(timeout_ms) => daemon.resume(id, timeout_ms).await,
    };
    done.map_err(|error| error.failure())?;
    if power == Power::Pause {
        super::print(&format!("{id} is suspended: its state is on disk, its machine has ended\n"));
    }
    Ok(())
}
