//! `coppice diff`: what changed between two checkpoints.

use coppice_manager::diff::{self, Difference};
use coppice_manager::failure::Failure;
use coppice_manager::home::Home;
use coppice_manager::store::{Id, Store};
use serde_json::json;

use super::reference::checkpoint;
use super::table::size;

/// Arguments of `coppice diff`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The checkpoint to start from: its name, ID, or the beginning of its ID
    #[arg(value_name = "FROM")]
    from: String,
    /// The checkpoint to compare it with
    #[arg(value_name = "TO")]
    to: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Explains the letters.
pub(super) const HELP: &str = "\
One line for each file that was added (A), modified (M) or deleted (D), then how much memory was
written between the two. To compare a sandbox as it is now, take a checkpoint of it first. Files are
compared as they are on disk: what a guest has not written there yet, as by `sync`, is not seen.";

/// Compares and prints.
pub(super) fn run(args: &Args) -> u8 {
    match attempt(args) {
        Ok(text) => super::print(&text),
        Err(failure) => super::fail_as(&failure, args.json),
    }
}

fn attempt(args: &Args) -> Result<String, Failure> {
    let store = Store::open(&Home::from_env()).map_err(|error| error.failure())?;
    let (from, to) = (checkpoint(&store, &args.from)?, checkpoint(&store, &args.to)?);
    let meta = |id: &Id| store.checkpoint(id).map_err(|error| error.failure());
    let difference =
        diff::compare(&store, &meta(&from)?, &meta(&to)?).map_err(|error| error.failure())?;
    Ok(if args.json { as_json(&from, &to, &difference) } else { as_text(&difference) })
}

fn as_text(difference: &Difference) -> String {
    let several = difference.files.iter().any(|file| file.disk > 0);
    let mut text = String::new();
    for file in &difference.files {
        let disk = if several { format!("disk {}: ", file.disk) } else { String::new() };
        // A guest's file names must not reach a terminal as they are.
        let path = file.path.escape_ascii();
        text.push_str(&format!("{disk}{} {path}\n", file.change));
    }
    text + &format!("memory: {} written\n", size(difference.memory_bytes))
}

fn as_json(from: &Id, to: &Id, difference: &Difference) -> String {
    let files: Vec<_> = difference
        .files
        .iter()
        .map(|file| {
            json!({
                "disk": file.disk,
                "change": file.change.word(),
                "path": String::from_utf8_lossy(&file.path),
            })
        })
        .collect();
    let told = json!({
        "from": from, "to": to, "files": files, "memory_bytes": difference.memory_bytes,
    });
    format!("{told}\n")
}
