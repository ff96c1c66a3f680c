//! What is done with a kept sandbox: pause and resume, checkpoint, and the way back.

use std::collections::BTreeMap;

use coppice_vmm_protocol::{
    CheckpointInfo, CheckpointSpec, DiskRollback, ErrorKind, RollbackInfo, RollbackSpec,
};

use super::{Error, Kept};
use crate::sandbox::parts::{add_chain, add_layers, can_be_passed};
use crate::store::{Id, Meta, Name, NewCheckpoint};
use crate::vmm::{self, Passed};

/// How a checkpoint is to be made.
#[derive(Debug, Clone, Default)]
pub struct CheckpointRequest {
    /// Its name.
    pub name: Option<Name>,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Whether memory is copied while the machine runs on.
    pub background: bool,
}

/// A checkpoint that was made.
#[derive(Debug, Clone)]
pub struct Made {
    /// Its record.
    pub meta: Meta,
    /// What it cost.
    pub info: CheckpointInfo,
}

impl Kept {
    /// Stops the machine's vCPUs and devices.
    ///
    /// # Errors
    /// What the VMM refused.
    pub async fn pause(&self) -> Result<(), Error> {
        self.vmm.pause().await.map_err(|source| self.failed("a pause", source))
    }

    /// Lets the machine run on.
    ///
    /// # Errors
    /// What the VMM refused.
    pub async fn resume(&self) -> Result<(), Error> {
        self.vmm.resume().await.map_err(|source| self.failed("a resume", source))
    }

    /// Makes a checkpoint of the machine, which goes on standing on it. It is visible when this
    /// returns, and not before it is complete.
    ///
    /// # Errors
    /// What the VMM refused, or the store's; the machine goes on as if nothing was asked.
    /// [`Error::TooDeep`] when nothing could be started from the checkpoint.
    pub async fn checkpoint(&mut self, request: CheckpointRequest) -> Result<Made, Error> {
        if self.store.is_deep(&self.record().standing) {
            self.store.flatten(&mut self.entry)?;
        }
        let standing = &self.record().standing;
        let layers = standing.memory.len() + 1 + standing.disk_layers().count();
        if !can_be_passed(layers) {
            return Err(Error::TooDeep);
        }
        let CheckpointRequest { name, labels, background } = request;
        let new = self.store.begin_checkpoint(&mut self.entry, name, labels)?;
        match self.write(&new, background).await {
            Ok(info) => {
                let meta = self.store.complete_checkpoint(new, &mut self.entry)?;
                Ok(Made { meta, info })
            }
            Err(error) => {
                drop(new);
                self.settle().await?;
                Err(error)
            }
        }
    }

    /// As [`Kept::checkpoint`], with memory copied while the machine runs on if the host lets it
    /// be, whatever is asked for.
    ///
    /// # Errors
    /// As for [`Kept::checkpoint`].
    pub async fn checkpoint_running(&mut self, request: CheckpointRequest) -> Result<Made, Error> {
        let background = CheckpointRequest { background: true, ..request.clone() };
        match self.checkpoint(background).await {
            Err(Error::Checkpoint { source, .. })
                if source.kind() == Some(ErrorKind::NoBackgroundCopy) =>
            {
                self.checkpoint(CheckpointRequest { background: false, ..request }).await
            }
            made => made,
        }
    }

    async fn write(&self, new: &NewCheckpoint, background: bool) -> Result<CheckpointInfo, Error> {
        let id = new.meta().id.to_string();
        let mut passed = Passed::default();
        let mut add = |file: &std::fs::File| {
            file.try_clone().and_then(|file| passed.add(file)).map_err(Error::Socket)
        };
        let file = add(new.file())?;
        let overlays = new.tops().map(&mut add).collect::<Result<Vec<_>, _>>()?;
        let meta = new.meta_text()?;
        let spec = CheckpointSpec { id: id.clone(), file, overlays, meta, background };
        let failed = |source| self.failed("a checkpoint", source);
        let info = self.vmm.checkpoint(spec, passed).await.map_err(failed)?;
        self.store.publish_checkpoint(new)?;
        self.vmm.commit(id).await.map_err(failed)?;
        Ok(info)
    }

    /// Brings the machine back to a checkpoint of its tree: memory, disks and devices. What it did
    /// since then is gone.
    ///
    /// # Errors
    /// [`Error::OtherTree`], what the VMM refused, or the store's.
    pub async fn roll_back(&mut self, to: &Id) -> Result<RollbackInfo, Error> {
        let target = self.store.checkpoint(to)?;
        let root = |memory: &[Id]| memory.first().cloned();
        if root(&target.memory_chain()) != root(&self.record().standing.memory) {
            let sandbox = self.record().id.clone();
            return Err(Error::OtherTree { checkpoint: to.clone(), sandbox });
        }
        let (meta, tops) = self.store.begin_move(&mut self.entry, to)?;
        match self.move_to(&meta, tops).await {
            Ok(info) => {
                self.store.complete_move(&mut self.entry)?;
                self.introduce().await?;
                Ok(info)
            }
            Err(error) => {
                self.settle().await?;
                Err(error)
            }
        }
    }

    async fn move_to(&self, meta: &Meta, tops: Vec<std::fs::File>) -> Result<RollbackInfo, Error> {
        let mut passed = Passed::default();
        let chain = add_chain(&mut passed, &self.store, meta)?;
        let mut disks = Vec::new();
        let writable = meta.standing.disks.iter().filter(|disk| !disk.read_only);
        for (disk, top) in writable.zip(tops) {
            let layers = add_layers(&mut passed, &self.store, disk)?;
            let overlay = passed.add(top).map_err(Error::Socket)?;
            disks.push(DiskRollback { layers, overlay });
        }
        let spec = RollbackSpec { chain, disks };
        self.vmm.rollback(spec, passed).await.map_err(|source| self.failed("a rollback", source))
    }

    /// Writes down what became of an operation, as the VMM tells. Files that were passed for it
    /// must be closed here.
    pub(super) async fn settle(&mut self) -> Result<(), Error> {
        let status = self.status().await?;
        Ok(self.store.settle(&mut self.entry, status.checkpoint.as_deref())?)
    }

    fn failed(&self, what: &str, source: vmm::Error) -> Error {
        match source {
            vmm::Error::Refused(_) => {
                Error::Checkpoint { what: format!("{what} of {}", self.record().id), source }
            }
            source => Error::Vmm(source),
        }
    }
}
