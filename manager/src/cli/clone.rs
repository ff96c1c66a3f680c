//! `coppice clone`: new sandboxes from a checkpoint, or from a sandbox as it is now.

use std::path::PathBuf;

use coppice_manager::failure::{Class, Failure, chain};
use coppice_manager::sandbox::{CheckpointRequest, Kept};
use coppice_manager::store::{Found, Id, Name, Store};
use coppice_manager::vmm;

use super::reference::find;

/// Arguments of `coppice clone`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// A checkpoint or a running sandbox: its name, ID, or the beginning of its ID
    #[arg(value_name = "REFERENCE")]
    reference: String,
    /// Name of the new sandbox; with several, the beginning of their names
    #[arg(long, value_name = "NAME")]
    name: Option<Name>,
    /// How many to make
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    count: u32,
    /// Print one JSON object per sandbox
    #[arg(long)]
    json: bool,
    /// The coppice-vmm program [default: COPPICE_VMM, else the one next to this program]
    #[arg(long, value_name = "PATH")]
    vmm: Option<PathBuf>,
}

/// Makes the sandboxes and prints the ID of each as soon as it runs.
pub(super) async fn run(args: Args) -> u8 {
    match attempt(&args).await {
        Ok(code) => code,
        Err(failure) => super::fail_as(&failure, args.json),
    }
}

async fn attempt(args: &Args) -> Result<u8, Failure> {
    let program = vmm::locate(args.vmm.clone()).map_err(|error| {
        Failure::new(Class::ProgramMissing, chain(&error), "name coppice-vmm with --vmm")
    })?;
    let (store, found) = find(&args.reference)?;
    let (from, passing) = match found {
        Found::Checkpoint(id) => (id, false),
        Found::Sandbox(id) => (checkpoint_of(&store, &id).await?, true),
    };
    let made = make(args, &store, &program, &from).await;
    if passing {
        // What the clones stand on is kept for them.
        store.remove_checkpoint(&from).map_err(|error| error.failure())?;
    }
    made
}

async fn make(
    args: &Args,
    store: &Store,
    program: &std::path::Path,
    from: &Id,
) -> Result<u8, Failure> {
    for number in 1..=args.count {
        let name = match &args.name {
            Some(name) if args.count > 1 => Some(numbered(name, number)?),
            name => name.clone(),
        };
        let restored = Kept::restore(store, program, from, name).await;
        let kept = restored.map_err(|error| error.failure())?;
        match super::print(&super::created(kept.record(), None, args.json)) {
            0 => {}
            failed => return Ok(failed),
        }
    }
    Ok(0)
}

fn numbered(name: &Name, number: u32) -> Result<Name, Failure> {
    format!("{name}-{number}")
        .parse()
        .map_err(|why: String| Failure::new(Class::Usage, why, "choose a shorter --name"))
}

/// A checkpoint of a sandbox as it is now.
async fn checkpoint_of(store: &Store, id: &Id) -> Result<Id, Failure> {
    let mut kept = Kept::open(store, id).await.map_err(|error| error.failure())?;
    let request = CheckpointRequest::default();
    let made = kept.checkpoint(request).await.map_err(|error| error.failure())?;
    Ok(made.meta.id)
}
