//! `coppice pause`, `coppice resume` and `coppice kill`.

use coppice_manager::failure::Failure;
use coppice_manager::sandbox::Kept;

use super::reference::sandbox;

/// Arguments of each of the three.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The sandboxes: names, IDs, or beginnings of IDs
    #[arg(required = true, value_name = "SANDBOX")]
    sandboxes: Vec<String>,
}

/// What is done with each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Power {
    /// Stop it.
    Pause,
    /// Let it run on.
    Resume,
    /// End and remove it.
    Kill,
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
    let done = match power {
        Power::Kill => Kept::remove(&store, &id).await,
        Power::Pause | Power::Resume => match Kept::open(&store, &id).await {
            Ok(kept) if power == Power::Pause => kept.pause().await,
            Ok(kept) => kept.resume().await,
            Err(error) => Err(error),
        },
    };
    done.map_err(|error| error.failure())
}
