//! Warm shells: sandboxes that have a process with all that KVM needs for a machine, but nothing
//! in it yet. What takes long in starting from a checkpoint does not depend on the checkpoint, so
//! it is done ahead of it.

use std::path::Path;
use std::sync::Arc;

use super::{Kept, VSOCK_NAME};
use crate::agent::Agent;
use crate::sandbox::Error;
use crate::store::{GuestSettings, Id, Machine, Name, NewSandbox, Store};

/// A sandbox without content. It has to become a [`Kept`] or be discarded: when it is dropped,
/// its machine ends, but its directory stays for `coppice fsck`.
#[derive(Debug)]
pub struct Shell(Kept);

impl Shell {
    /// Makes a shell for a machine of this shape; on failure nothing is left of it.
    ///
    /// # Errors
    /// What the VMM refused, or the store's.
    pub async fn new(
        store: &Store,
        vmm: &Path,
        machine: Machine,
        id: Option<Id>,
        name: Option<Name>,
    ) -> Result<Self, Error> {
        let (vcpus, memory_mib) = (machine.vcpus, machine.memory_mib);
        let new = NewSandbox { id, name, machine, disks: Vec::new() };
        let (entry, _no_tops) = store.create_sandbox(new)?;
        let (kept, ()) = Kept::start(store, entry, vmm, |_| Ok(()))?;
        let prepared = kept.vmm.prepare(vcpus, memory_mib).await.map_err(Error::Vmm);
        kept.or_nothing(prepared).await.map(|(kept, ())| Self(kept))
    }

    /// The ID that the sandbox will have.
    pub fn id(&self) -> &Id {
        &self.0.record().id
    }

    /// Whether its process still runs.
    pub fn is_alive(&self) -> bool {
        self.0.vmm.is_alive()
    }

    /// Sets what its guest is told once it runs.
    ///
    /// # Errors
    /// The store's.
    pub fn set_guest(&mut self, guest: GuestSettings) -> Result<(), Error> {
        let Kept { agent, entry, .. } = &mut self.0;
        let token = guest.access_token.clone();
        entry.set_guest(guest)?;
        *agent = Arc::new(Agent::over_vsock(&entry.socket(VSOCK_NAME)).with_token(token));
        Ok(())
    }

    /// Has the sandbox go on from a checkpoint of a machine of the same shape, and tells its guest
    /// who it is now; on failure nothing is left of it.
    ///
    /// # Errors
    /// What the VMM refused, or the store's.
    pub async fn restore(self, from: &Id) -> Result<Kept, Error> {
        let kept = self.start(from).await?;
        let introduced = kept.introduce().await;
        let (kept, ()) = kept.or_nothing(introduced).await?;
        // It only helps later clones: this one is well without.
        let _ = kept.record_working_set(from).await;
        Ok(kept)
    }

    /// As [`Shell::restore`] for a guest without an agent: nobody tells it anything.
    ///
    /// # Errors
    /// As for [`Shell::restore`].
    pub async fn start(mut self, from: &Id) -> Result<Kept, Error> {
        let restored = self.0.fill(from).await;
        self.0.or_nothing(restored).await.map(|(kept, ())| kept)
    }

    /// Removes the shell.
    ///
    /// # Errors
    /// [`Error::Kill`] when its process does not end, or the store's.
    pub async fn discard(self) -> Result<(), Error> {
        self.0.discard().await
    }
}

impl Kept {
    /// Writes down which memory of its checkpoint a clone used until its agent answered, unless
    /// an earlier one did.
    async fn record_working_set(&self, checkpoint: &Id) -> Result<(), Error> {
        let Some(new) = self.store.begin_working_set(checkpoint)? else { return Ok(()) };
        let file = new.file().try_clone().map_err(Error::Socket)?;
        self.vmm.record_working_set(file.into()).await?;
        Ok(self.store.complete_working_set(&new)?)
    }
}
