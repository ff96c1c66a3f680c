//! `coppice checkpoint`, and `coppice rollback` to one.

use coppice_manager::api::admin::{Checkpoint, Checkpointed, RolledBack};
use coppice_manager::failure::Failure;
use coppice_manager::sandbox::{CheckpointRequest, Kept};
use coppice_manager::store::Name;
use serde_json::json;

use super::owner::{Owner, daemon};
use super::reference::{checkpoint, sandbox};
use super::table::size;

/// Arguments of `coppice checkpoint`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The sandbox: its name, ID, or the beginning of its ID
    #[arg(value_name = "SANDBOX")]
    sandbox: String,
    /// Name of the checkpoint
    #[arg(long, value_name = "NAME")]
    name: Option<Name>,
    /// A label; may be given several times
    #[arg(short, long = "label", value_name = "KEY=VALUE", value_parser = label)]
    labels: Vec<(String, String)>,
    /// Copy memory while the machine runs on, so that the pause does not depend on how much of it
    /// was written
    #[arg(long = "async")]
    background: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("not KEY=VALUE")?;
    if key.is_empty() || text.chars().any(char::is_control) {
        return Err("a label has a name, and no control characters".into());
    }
    if key.starts_with("coppice.") {
        return Err(
            "labels whose names begin with coppice. are the daemon's, which removes them".into()
        );
    }
    Ok((key.to_owned(), value.to_owned()))
}

/// Makes a checkpoint and prints its ID.
pub(super) async fn run(args: Args) -> u8 {
    let json = args.json;
    match attempt(args).await {
        Ok(made) => super::print(&told(&made, json)),
        Err(failure) => super::fail_as(&failure, json),
    }
}

async fn attempt(args: Args) -> Result<Checkpointed, Failure> {
    let (store, id) = sandbox(&args.sandbox)?;
    if let Owner::Daemon(_) = Owner::of(&id)? {
        let body = Checkpoint {
            name: args.name,
            labels: args.labels.into_iter().collect(),
            background: Some(args.background),
        };
        let made = daemon().await?.checkpoint(&id, &body).await;
        return made.map_err(|error| error.failure());
    }
    let mut kept = Kept::open(&store, &id).await.map_err(|error| error.failure())?;
    let request = CheckpointRequest {
        name: args.name,
        labels: args.labels.into_iter().collect(),
        background: args.background,
    };
    let made = kept.checkpoint(request).await.map_err(|error| error.failure())?;
    Ok(made.into())
}

fn told(made: &Checkpointed, json: bool) -> String {
    if json {
        return format!("{}\n", json!(made));
    }
    let pause = super::milliseconds(made.pause_us);
    let written = size(made.memory_bytes);
    format!("{}\n{written} of memory, paused for {pause} ms\n", made.id)
}

/// Arguments of `coppice rollback`.
#[derive(Debug, clap::Args)]
pub(super) struct RollbackArgs {
    /// The sandbox: its name, ID, or the beginning of its ID
    #[arg(value_name = "SANDBOX")]
    sandbox: String,
    /// The checkpoint to go back to: its name, ID, or the beginning of its ID
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Brings a sandbox back to a checkpoint.
pub(super) async fn roll_back(args: RollbackArgs) -> u8 {
    let moved = async {
        let (store, id) = sandbox(&args.sandbox)?;
        let to = checkpoint(&store, &args.checkpoint)?;
        if let Owner::Daemon(_) = Owner::of(&id)? {
            let moved = daemon().await?.roll_back(&id, &to).await;
            return moved.map_err(|error| error.failure());
        }
        let mut kept = Kept::open(&store, &id).await.map_err(|error| error.failure())?;
        let info = kept.roll_back(&to).await.map_err(|error| error.failure())?;
        Ok(RolledBack::new(id, to, &info))
    };
    match moved.await {
        Ok(moved) if args.json => super::print(&format!("{}\n", json!(moved))),
        Ok(RolledBack { id, checkpoint, pause_us, .. }) => {
            let pause = super::milliseconds(pause_us);
            super::print(&format!("{id} is back at {checkpoint}, paused for {pause} ms\n"))
        }
        Err(failure) => super::fail_as(&failure, args.json),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_have_a_name_and_a_value() {
        assert_eq!(label("a=b=c"), Ok(("a".into(), "b=c".into())));
        for text in ["a", "=b", "a=\x1b[2J", "coppice.snapshot=x"] {
            label(text).unwrap_err();
        }
    }
}
