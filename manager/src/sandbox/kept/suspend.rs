//! Suspension: a sandbox whose machine ended at a checkpoint and goes on from it later, under the
//! same ID. Nothing of it takes memory meanwhile, and it outlives a restart of the host.

use std::collections::BTreeMap;
use std::path::Path;

use coppice_agent_protocol::READY_PORT;

use super::{CheckpointRequest, Kept, Made, VSOCK_NAME, end_machine, start_process};
use crate::sandbox::Error;
use crate::store::{self, Id, Store};

impl Kept {
    /// Makes a checkpoint of the machine and ends it there. When this fails before the checkpoint
    /// is complete, the machine runs on.
    ///
    /// # Errors
    /// As for [`Kept::checkpoint`], or [`Error::Kill`] when its process does not end.
    pub async fn suspend(mut self, labels: BTreeMap<String, String>) -> Result<Made, Error> {
        // Nothing may happen after the checkpoint that is lost then.
        self.pause().await?;
        let request = CheckpointRequest { labels, ..CheckpointRequest::default() };
        let made = match self.checkpoint(request).await {
            Ok(made) => made,
            Err(error) => {
                self.resume().await?;
                return Err(error);
            }
        };
        self.entry.set_suspended(true)?;
        let Self { vmm, entry, .. } = self;
        vmm.stop().await;
        end_machine(&entry).await?;
        Ok(made)
    }

    /// Starts a suspended sandbox's machine from where it stands, and tells its guest what time it
    /// is. When this fails, the sandbox stays suspended.
    ///
    /// # Errors
    /// [`Error::NotSuspended`], what the VMM refused, or the store's.
    pub async fn wake(store: &Store, program: &Path, id: &Id) -> Result<Self, Error> {
        let mut entry = store.lock_sandbox(id)?;
        let record = entry.record();
        let from = record.standing.parent.clone().filter(|_| record.suspended);
        let from = from.ok_or_else(|| Error::NotSuspended { id: id.clone() })?;
        // Whoever died while doing this before may have left a machine.
        end_machine(&entry).await?;
        let ready = format!("{VSOCK_NAME}_{READY_PORT}");
        entry.clear_sockets(&[VSOCK_NAME, &ready])?;
        let vmm = start_process(&mut entry, program)?;
        let mut kept = Self::of(store, entry, vmm);
        match kept.go_on(&from).await {
            Ok(()) => Ok(kept),
            Err(error) => {
                let Self { vmm, entry, .. } = kept;
                vmm.stop().await;
                end_machine(&entry).await?;
                Err(error)
            }
        }
    }

    async fn go_on(&mut self, from: &Id) -> Result<(), Error> {
        let machine = &self.record().machine;
        self.vmm.prepare(machine.vcpus, machine.memory_mib).await?;
        self.fill(from).await?;
        self.introduce().await?;
        self.entry.set_suspended(false)?;
        Ok(())
    }

    /// Ends the machine of a sandbox that was being suspended when whoever did it died.
    ///
    /// # Errors
    /// [`Error::Kill`] when its process does not end, or the store's.
    pub async fn finish_suspension(store: &Store, id: &Id) -> Result<(), Error> {
        let entry: store::Sandbox = store.lock_sandbox(id)?;
        match entry.record().suspended {
            true => end_machine(&entry).await,
            false => Err(Error::NotSuspended { id: id.clone() }),
        }
    }
}
