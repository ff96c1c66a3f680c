//! `coppice clone`: new sandboxes from a checkpoint, or from a sandbox as it is now.

use std::path::PathBuf;
use std::sync::Arc;

use coppice_manager::api::admin::Checkpoint;
use coppice_manager::failure::{Class, Failure, chain};
use coppice_manager::sandbox::{CheckpointRequest, Error, Kept, Shell};
use coppice_manager::store::{Found, Id, Machine, Name, Store};
use coppice_manager::vmm;

use super::owner::{Owner, daemon};
use super::parallel::in_order;
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

/// Makes the sandboxes, several at a time, and prints the ID of each as soon as it and all before
/// it run.
pub(super) async fn run(args: Args) -> u8 {
    match attempt(&args).await {
        Ok(code) => code,
        Err(failure) => super::fail_as(&failure, args.json),
    }
}

/// Shells that wait for a checkpoint to be made; each takes some descriptors.
const AHEAD: usize = 64;

async fn attempt(args: &Args) -> Result<u8, Failure> {
    let program = vmm::locate(args.vmm.clone()).map_err(|error| {
        Failure::new(Class::ProgramMissing, chain(&error), "name coppice-vmm with --vmm")
    })?;
    let (store, found) = find(&args.reference)?;
    let machine = match &found {
        Found::Checkpoint(id) => store.checkpoint(id).map(|meta| meta.machine),
        Found::Sandbox(id) => store.look_at(id).map(|view| view.record().machine.clone()),
    };
    let machine = machine.map_err(|error| error.failure())?;
    let order = Arc::new(Order { store, program, machine, json: args.json });
    let names = names(args.name.as_ref(), args.count)?;
    match found {
        Found::Checkpoint(from) => Ok(order.make(&names, Vec::new(), &from).await),
        // The sandbox stands still for the checkpoint only: shells are ready before it.
        Found::Sandbox(id) => {
            let shells = order.shells(names.iter().take(AHEAD)).await;
            match checkpoint_of(&order.store, &id).await {
                Ok(from) => {
                    let code = order.make(&names, shells, &from).await;
                    // What the clones stand on is kept for them.
                    let removed = order.store.remove_checkpoint(&from);
                    removed.map_err(|error| error.failure()).map(|_| code)
                }
                Err(failure) => {
                    discard(shells).await;
                    Err(failure)
                }
            }
        }
    }
}

/// What all the sandboxes have in common.
struct Order {
    store: Store,
    program: PathBuf,
    machine: Machine,
    json: bool,
}

impl Order {
    async fn shell(self: Arc<Self>, name: Option<Name>) -> Result<Shell, Error> {
        Shell::new(&self.store, &self.program, self.machine.clone(), None, name).await
    }

    async fn shells(
        self: &Arc<Self>,
        names: impl Iterator<Item = &Option<Name>>,
    ) -> Vec<Result<Shell, Error>> {
        let mut shells = Vec::new();
        let jobs: Vec<_> = names.map(|name| Arc::clone(self).shell(name.clone())).collect();
        in_order(jobs, |shell| {
            shells.push(shell);
            true
        })
        .await;
        shells
    }

    /// Makes all sandboxes, the first ones from `shells`; the code of the first failure.
    async fn make(
        self: &Arc<Self>,
        names: &[Option<Name>],
        shells: Vec<Result<Shell, Error>>,
        from: &Id,
    ) -> u8 {
        let mut shells = shells.into_iter();
        let jobs: Vec<_> = names
            .iter()
            .map(|name| {
                let (order, name, from) = (Arc::clone(self), name.clone(), from.clone());
                let shell = shells.next();
                async move {
                    let shell = match shell {
                        Some(shell) => shell?,
                        None => order.shell(name).await?,
                    };
                    shell.restore(&from).await
                }
            })
            .collect();
        let (mut number, mut code) = (0, 0);
        in_order(jobs, |made: Result<Kept, Error>| {
            number += 1;
            let (told, go_on) = match made {
                Ok(kept) => {
                    let told = super::print(&super::created(kept.record(), None, self.json));
                    // Nobody reads it: nobody wants more.
                    (told, told == 0)
                }
                Err(error) => {
                    let failure = which(error.failure(), number, names);
                    (super::fail_as(&failure, self.json), true)
                }
            };
            code = if code == 0 { told } else { code };
            go_on
        })
        .await;
        code
    }
}

/// The failure with which of several sandboxes it is about.
fn which(failure: Failure, number: usize, names: &[Option<Name>]) -> Failure {
    let Failure { class, message, remedy } = failure;
    let message = match names.get(number.saturating_sub(1)) {
        Some(Some(name)) => format!("{name}: {message}"),
        _ if names.len() > 1 => format!("clone {number} of {}: {message}", names.len()),
        _ => message,
    };
    Failure::new(class, message, remedy)
}

async fn discard(shells: Vec<Result<Shell, Error>>) {
    let jobs: Vec<_> = shells.into_iter().flatten().map(Shell::discard).collect();
    // What cannot be removed now is found by `coppice fsck`.
    in_order(jobs, |_| true).await;
}

fn names(name: Option<&Name>, count: u32) -> Result<Vec<Option<Name>>, Failure> {
    let numbers = 1..=count;
    match name {
        Some(name) if count > 1 => numbers.map(|at| numbered(name, at).map(Some)).collect(),
        name => Ok(numbers.map(|_| name.cloned()).collect()),
    }
}

fn numbered(name: &Name, number: u32) -> Result<Name, Failure> {
    format!("{name}-{number}")
        .parse()
        .map_err(|why: String| Failure::new(Class::Usage, why, "choose a shorter --name"))
}

/// A checkpoint of a sandbox as it is now.
async fn checkpoint_of(store: &Store, id: &Id) -> Result<Id, Failure> {
    if let Owner::Daemon(_) = Owner::of(id)? {
        let made = daemon().await?.checkpoint(id, &Checkpoint::default()).await;
        return made.map(|made| made.id).map_err(|error| error.failure());
    }
    let mut kept = Kept::open(store, id).await.map_err(|error| error.failure())?;
    let made = kept.checkpoint_running(CheckpointRequest::default()).await;
    made.map(|made| made.meta.id).map_err(|error| error.failure())
}
