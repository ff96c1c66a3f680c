//! What sandboxes do now, as their machines say.

use std::collections::BTreeMap;
use std::time::Duration;

use coppice_manager::sandbox::Guest;
use coppice_manager::store::{Id, SandboxEntry, Store};
use coppice_vmm_protocol::VmState;
use tokio::time::timeout;

use super::parallel::in_order;

/// How long a machine may take to say what it does. One that is being built, or whose disk is
/// slow, answers later.
const PATIENCE: Duration = Duration::from_millis(500);

/// States of sandboxes, in one word each.
#[derive(Debug, Default)]
pub(super) struct States(BTreeMap<Id, &'static str>);

impl States {
    /// Asks all machines that are there.
    pub(super) async fn ask(store: &Store, entries: &[SandboxEntry]) -> Self {
        let alive = entries.iter().filter(|entry| entry.alive);
        let jobs: Vec<_> = alive
            .map(|entry| {
                let (store, id) = (store.clone(), entry.id.clone());
                async move { (state(&store, &id).await, id) }
            })
            .collect();
        let mut states = BTreeMap::new();
        in_order(jobs, |(state, id)| {
            states.insert(id, state);
            true
        })
        .await;
        Self(states)
    }

    /// The state of a sandbox.
    pub(super) fn of(&self, entry: &SandboxEntry) -> &'static str {
        let suspended = entry.record.as_ref().is_ok_and(|record| record.suspended);
        match (entry.alive, self.0.get(&entry.id)) {
            (false, _) if suspended => "suspended",
            (false, _) => "ended",
            (true, Some(state)) => state,
            (true, None) => "running",
        }
    }
}

async fn state(store: &Store, id: &Id) -> &'static str {
    let asked = async {
        let guest = Guest::open(store, id).ok()?;
        guest.vmm().status().await.ok()
    };
    match timeout(PATIENCE, asked).await {
        Ok(Some(status)) => word(status.state),
        // It is alive but does not listen (yet), or went just now.
        Ok(None) => "starting",
        Err(_) => "busy",
    }
}

fn word(state: VmState) -> &'static str {
    match state {
        VmState::Empty | VmState::Prepared | VmState::Created => "starting",
        VmState::Running => "running",
        VmState::Paused => "paused",
        VmState::Exited => "ended",
    }
}
