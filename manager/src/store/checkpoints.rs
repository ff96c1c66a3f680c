//! Checkpoints in the store: reading them, and a new one from its first byte to its name.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use coppice_image::{Image, Kind};
use rustix::fs::FlockOperation;

use super::files::{self, at};
use super::record::{META_VERSION, now_ms};
use super::{Error, Id, Meta, Name, Next, Sandbox, Store};

/// A visible checkpoint.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    /// Its record.
    pub meta: Meta,
    /// Bytes that its memory layer and its record take on disk.
    pub memory_bytes: u64,
    /// Bytes that the disk layers take that were sealed for it.
    pub disk_bytes: u64,
}

/// What reading all checkpoints gave.
#[derive(Debug, Default)]
pub struct Listing {
    /// The good ones, by time and ID.
    pub checkpoints: Vec<Checkpoint>,
    /// Why others cannot be read.
    pub damaged: Vec<Error>,
}

/// A checkpoint in the making: nobody sees it yet, but everything it needs is kept for it.
#[derive(Debug)]
pub struct NewCheckpoint {
    meta: Meta,
    file: File,
    tops: Vec<(Id, File)>,
}

impl NewCheckpoint {
    /// Its record.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// The record as it is stored in the file.
    ///
    /// # Errors
    /// [`Error::Encode`] when a path in it is not UTF-8.
    pub fn meta_text(&self) -> Result<String, Error> {
        serde_json::to_string(&self.meta).map_err(Error::Encode)
    }

    /// The empty file to write it into. It carries the writer's lock, which ends with the last
    /// copy of the descriptor.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Empty files for what the machine's writable disks write from now on, in order.
    pub fn tops(&self) -> impl Iterator<Item = &File> {
        self.tops.iter().map(|(_, file)| file)
    }
}

impl Store {
    /// All visible checkpoints.
    ///
    /// # Errors
    /// [`Error::Io`] when the store cannot be read; a damaged checkpoint is part of the answer.
    pub fn checkpoints(&self) -> Result<Listing, Error> {
        let _lock = self.shared()?;
        self.read_checkpoints()
    }

    /// One visible checkpoint, whose base images are as they were.
    ///
    /// # Errors
    /// [`Error::NotFound`], that it is damaged, or [`Error::Base`].
    pub fn checkpoint(&self, id: &Id) -> Result<Meta, Error> {
        let _lock = self.shared()?;
        self.usable(id)
    }

    /// As [`Store::checkpoint`], for one that holds the lock.
    pub(super) fn usable(&self, id: &Id) -> Result<Meta, Error> {
        let path = self.checkpoint_path(id);
        if !path.exists() {
            return Err(Error::NotFound { reference: id.to_string() });
        }
        let meta = read_meta(&path, id)?;
        self.check_base(&meta)?;
        Ok(meta)
    }

    pub(super) fn check_base(&self, meta: &Meta) -> Result<(), Error> {
        for disk in &meta.standing.disks {
            if let Some(what) = disk.base.trouble() {
                let (id, path) = (meta.id.clone(), disk.base.path.clone());
                return Err(Error::Base { id, path, what });
            }
        }
        let missing =
            |path: PathBuf| Error::Base { id: meta.id.clone(), path, what: "is not there" };
        for layer in meta.standing.disk_layers() {
            let path = self.disk_path(layer);
            path.exists().then_some(()).ok_or_else(|| missing(path))?;
        }
        for layer in &meta.standing.memory {
            let path = self.memory_path(layer);
            path.exists().then_some(()).ok_or_else(|| missing(path))?;
        }
        Ok(())
    }

    pub(super) fn read_checkpoints(&self) -> Result<Listing, Error> {
        let mut listing = Listing::default();
        for name in files::names(&self.checkpoints_dir())? {
            let Some(id) = name.strip_suffix(".ckpt").and_then(Id::parse) else { continue };
            let path = self.checkpoint_path(&id);
            match read_meta(&path, &id) {
                Ok(meta) => listing.checkpoints.push(self.measured(meta, &path)),
                Err(error) => listing.damaged.push(error),
            }
        }
        listing
            .checkpoints
            .sort_by(|a, b| (a.meta.created_ms, &a.meta.id).cmp(&(b.meta.created_ms, &b.meta.id)));
        Ok(listing)
    }

    fn measured(&self, meta: Meta, path: &Path) -> Checkpoint {
        let memory_bytes = files::allocated(path);
        let disk_bytes = meta.standing.tops().map(|id| files::allocated(&self.disk_path(id))).sum();
        Checkpoint { meta, memory_bytes, disk_bytes }
    }

    /// Begins a checkpoint of a sandbox: makes the file to write and a new top layer for each
    /// writable disk, and has the sandbox's record keep both. [`Store::publish_checkpoint`]
    /// follows, or [`Store::settle`] when it fails.
    ///
    /// # Errors
    /// [`Error::NameTaken`], or the system's.
    pub fn begin_checkpoint(
        &self,
        sandbox: &mut Sandbox,
        name: Option<Name>,
        labels: BTreeMap<String, String>,
    ) -> Result<NewCheckpoint, Error> {
        let _lock = self.exclusive()?;
        self.check_name(name.as_ref())?;
        let id = Id::new().map_err(at(&self.checkpoints_dir()))?;
        let record = sandbox.record();
        let meta = Meta {
            id,
            name,
            labels,
            created_ms: now_ms(),
            sandbox: record.id.clone(),
            machine: record.machine.clone(),
            standing: record.standing.clone(),
        };
        let tops = self.new_layers(meta.standing.writable_disks())?;
        let path = self.temp_path(&meta.id);
        let file = files::create_new(&path)?;
        files::flock(&path, &file, FlockOperation::NonBlockingLockExclusive)?;
        let ids: Vec<Id> = tops.iter().map(|(id, _)| id.clone()).collect();
        sandbox.plan(Next {
            standing: meta.continued(&ids),
            checkpoint: Some(meta.id.clone()),
            name: meta.name.clone(),
        })?;
        Ok(NewCheckpoint { meta, file, tops })
    }

    /// Makes a checkpoint visible whose file is complete; all it stands on is on disk before. The
    /// machine is told next, and [`Store::complete_checkpoint`] follows.
    ///
    /// # Errors
    /// [`Error::Incomplete`], or the system's; the checkpoint stays invisible then.
    pub fn publish_checkpoint(&self, new: &NewCheckpoint) -> Result<(), Error> {
        let NewCheckpoint { meta, .. } = new;
        let temp = self.temp_path(&meta.id);
        let file = File::open(&temp).map_err(at(&temp))?;
        let stored = Image::open(file)
            .map_err(|source| Error::Incomplete { id: meta.id.clone(), source })
            .and_then(|image| meta_of(&image, &temp, &meta.id))?;
        if stored != *meta {
            return Err(Error::Record { path: temp, reason: "it is another checkpoint's".into() });
        }
        for layer in meta.standing.tops() {
            let path = self.disk_path(layer);
            File::open(&path).and_then(|file| file.sync_data()).map_err(at(&path))?;
        }
        files::sync_directory(&self.layers_dir())?;
        let _lock = self.shared()?;
        files::rename(&temp, &self.checkpoint_path(&meta.id))?;
        files::sync_directory(&self.checkpoints_dir())
    }

    /// Has the sandbox stand on a published checkpoint, as its machine does now.
    ///
    /// # Errors
    /// The system's.
    pub fn complete_checkpoint(
        &self,
        new: NewCheckpoint,
        sandbox: &mut Sandbox,
    ) -> Result<Meta, Error> {
        sandbox.arrive()?;
        Ok(new.meta)
    }

    /// Makes empty disk layers. Each descriptor carries a lock, which ends with its last copy: it
    /// shows whether a machine writes to the layer.
    pub(super) fn new_layers(&self, count: usize) -> Result<Vec<(Id, File)>, Error> {
        let mut layers = Vec::with_capacity(count);
        for _ in 0..count {
            let id = Id::new().map_err(at(&self.layers_dir()))?;
            let path = self.disk_path(&id);
            let file = files::create_new(&path)?;
            files::flock(&path, &file, FlockOperation::NonBlockingLockExclusive)?;
            layers.push((id, file));
        }
        Ok(layers)
    }
}

/// Reads the record in a checkpoint's file, which must be about `id`.
pub(super) fn read_meta(path: &Path, id: &Id) -> Result<Meta, Error> {
    let file = File::open(path).map_err(at(path))?;
    let image =
        Image::open(file).map_err(|source| Error::Damaged { path: path.to_owned(), source })?;
    meta_of(&image, path, id)
}

fn meta_of(image: &Image, path: &Path, id: &Id) -> Result<Meta, Error> {
    let unusable = |reason: String| Error::Record { path: path.to_owned(), reason };
    let section = image
        .section(Kind::Meta, 0)
        .map_err(|source| Error::Damaged { path: path.to_owned(), source })?
        .ok_or_else(|| unusable("it has none".into()))?;
    if section.version != META_VERSION {
        return Err(unusable(format!("version {} is not known here", section.version)));
    }
    let meta: Meta =
        serde_json::from_slice(&section.data).map_err(|error| unusable(error.to_string()))?;
    if meta.id != *id {
        return Err(unusable(format!("it is of {}", meta.id)));
    }
    Ok(meta)
}
