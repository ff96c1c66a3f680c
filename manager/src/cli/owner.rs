//! Whose a sandbox is: of the command that made it, or of the daemon. What the daemon answers for
//! is changed by the daemon, so that what it promised stays true.

use coppice_manager::client::Client;
use coppice_manager::failure::{Class, Failure, chain};
use coppice_manager::home::Home;
use coppice_manager::registry::{Registry, Row};
use coppice_manager::store::Id;
use coppice_manager::vmm;

/// Whose a sandbox is.
#[derive(Debug)]
pub(super) enum Owner {
    /// Of whoever made it with this program: it is changed directly.
    Command,
    /// Of a tenant of the daemon.
    Daemon(Box<Row>),
}

impl Owner {
    /// The owner of a sandbox.
    pub(super) fn of(id: &Id) -> Result<Self, Failure> {
        let Some(registry) = registry()? else { return Ok(Self::Command) };
        if let Some(row) = registry.sandbox(id).map_err(|error| super::key::failed(&error))? {
            return Ok(Self::Daemon(Box::new(row)));
        }
        let shells = registry.shells().map_err(|error| super::key::failed(&error))?;
        match shells.contains(id) {
            true => Err(Failure::new(
                Class::Conflict,
                format!("{id} is a machine that the daemon prepared: there is nothing in it yet"),
                "leave it to the daemon",
            )),
            false => Ok(Self::Command),
        }
    }
}

/// What was promised about sandboxes, if a daemon ever did.
pub(super) fn registry() -> Result<Option<Registry>, Failure> {
    Registry::existing(Home::from_env().path()).map_err(|error| super::key::failed(&error))
}

/// The daemon, or its place.
pub(super) async fn daemon() -> Result<Client, Failure> {
    let program = vmm::locate(None).map_err(|error| {
        Failure::new(Class::ProgramMissing, chain(&error), "name coppice-vmm with COPPICE_VMM")
    })?;
    Client::open(&Home::from_env(), program).await.map_err(|error| error.failure())
}

/// Refuses to remove a checkpoint that the daemon goes on from.
pub(super) fn check_unneeded(checkpoint: &Id) -> Result<(), Failure> {
    let Some(registry) = registry()? else { return Ok(()) };
    let failed = |error| super::key::failed(&error);
    if registry.is_template(checkpoint).map_err(failed)? {
        let message = format!("{checkpoint} is a template's or a snapshot's of the daemon");
        let remedy = "remove that, with `coppice template rm` or by the API";
        return Err(Failure::new(Class::Conflict, message, remedy));
    }
    let rows = registry.sandboxes().map_err(failed)?;
    match rows.iter().find(|row| row.pause.as_ref() == Some(checkpoint)) {
        Some(row) => {
            let message = format!("the paused sandbox {} goes on from {checkpoint}", row.id);
            Err(Failure::new(Class::Conflict, message, "end it first with `coppice kill`"))
        }
        None => Ok(()),
    }
}
