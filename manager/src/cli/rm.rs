//! `coppice rm`: removes checkpoints, and sandboxes that ended.

use coppice_manager::failure::Failure;
use coppice_manager::home::Home;
use coppice_manager::registry::State;
use coppice_manager::store::{Error, Found, Store};

use super::owner::{Owner, check_unneeded, daemon};
use super::table::size;

/// Arguments of `coppice rm`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Checkpoints or ended sandboxes: names, IDs, or beginnings of IDs
    #[arg(required = true, value_name = "REFERENCE")]
    references: Vec<String>,
}

/// Explains what removal means.
pub(super) const HELP: &str = "\
Checkpoints made on top of a removed one stay, and so do machines that stand on it: what they
need of it is kept on disk until the last of them is gone.";

/// Removes one after the other; the first failure ends it.
pub(super) async fn run(args: &Args) -> u8 {
    match remove(args).await {
        Ok(text) => super::print(&text),
        Err(failure) => super::fail(&failure),
    }
}

async fn remove(args: &Args) -> Result<String, Failure> {
    let store = Store::open(&Home::from_env()).map_err(|error| error.failure())?;
    let mut text = String::new();
    for reference in &args.references {
        text.push_str(&one(&store, reference).await?);
    }
    Ok(text)
}

async fn one(store: &Store, reference: &str) -> Result<String, Failure> {
    let failed = |error: Error| error.failure();
    match store.find(reference).map_err(failed)? {
        Found::Checkpoint(id) => {
            check_unneeded(&id)?;
            let collected = store.remove_checkpoint(&id).map_err(failed)?;
            Ok(match collected.files {
                0 => format!("{id} removed; its memory is kept for what stands on it\n"),
                _ => format!("{id} removed; {} free\n", size(collected.bytes)),
            })
        }
        Found::Sandbox(id) => {
            match Owner::of(&id)? {
                Owner::Daemon(row) if row.state != State::Running => {
                    daemon().await?.kill(&id).await.map_err(|error| error.failure())?;
                }
                _ => {
                    let sandbox = store.lock_sandbox(&id).map_err(failed)?;
                    store.remove_sandbox(sandbox).map_err(failed)?;
                }
            }
            Ok(format!("{id} removed\n"))
        }
    }
}
