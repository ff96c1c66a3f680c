//! From what is written on the command line to what is meant.

use coppice_manager::failure::{Class, Failure};
use coppice_manager::home::Home;
use coppice_manager::store::{Found, Id, Store};

/// The store, and what `reference` means in it.
pub(super) fn find(reference: &str) -> Result<(Store, Found), Failure> {
    let store = Store::open(&Home::from_env()).map_err(|error| error.failure())?;
    let found = store.find(reference).map_err(|error| error.failure())?;
    Ok((store, found))
}

/// The store, and the sandbox that is meant.
pub(super) fn sandbox(reference: &str) -> Result<(Store, Id), Failure> {
    match find(reference)? {
        (store, Found::Sandbox(id)) => Ok((store, id)),
        (_, Found::Checkpoint(id)) => Err(Failure::new(
            Class::Usage,
            format!("{id} is a checkpoint, not a sandbox"),
            "start one from it with `coppice clone`",
        )),
    }
}

/// The checkpoint that is meant in a store.
pub(super) fn checkpoint(store: &Store, reference: &str) -> Result<Id, Failure> {
    match store.find(reference).map_err(|error| error.failure())? {
        Found::Checkpoint(id) => Ok(id),
        Found::Sandbox(id) => Err(Failure::new(
            Class::Usage,
            format!("{id} is a sandbox, not a checkpoint"),
            "see `coppice tree` for checkpoints",
        )),
    }
}
