//! Flattening: a machine can be handed a limited number of files, so what a long session stands on
//! is brought together in fewer.
//!
//! The oldest layers are merged, except for the root: it is the largest, and all machines of a
//! tree share its pages. A running machine goes on with the files it has open; its record lists
//! the merged ones, which hold the same, and so does every checkpoint made of it from then on.
//! Older checkpoints keep their own lists.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use coppice_image::{HeaderInfo, Image, Kind, SealedMap, Writer, decode_maps, encode_maps};
use rustix::fs::FlockOperation;

use super::files::{self, at};
use super::merge::{self, MergeError};
use super::record::{META_VERSION, now_ms};
use super::{Error, Id, Meta, Sandbox, Standing, Store};

/// So many files of layers are handed to a machine without a thought.
const MAX_LAYERS: usize = 128;
/// One of so many of the memory layers, the youngest ones, stays as it is: they are where
/// a session goes back to, and a machine shares what it has in common with its target by file.
const KEPT_PART: usize = 4;
/// Version of the sections with maps of disk layers.
const MAPS_VERSION: u16 = 1;
/// The build that goes into a merged layer's header.
const BUILD: &str = concat!("coppice ", env!("CARGO_PKG_VERSION"));

/// A file without a name yet, which is locked.
struct NewFile {
    id: Id,
    temp: PathBuf,
    file: File,
}

/// What of a standing is merged.
struct Plan {
    root: Id,
    lower: Vec<Id>,
    kept: Vec<Id>,
}

impl Plan {
    /// The layers between the root and the youngest ones; nothing if there are not two.
    fn of(standing: &Standing) -> Option<Self> {
        let (root, above) = standing.memory.split_first()?;
        let kept = standing.memory.len() / KEPT_PART;
        let (lower, kept) = above.split_at_checked(above.len().checked_sub(kept)?)?;
        let plan = Self { root: root.clone(), lower: lower.to_vec(), kept: kept.to_vec() };
        (plan.lower.len() > 1).then_some(plan)
    }
}

/// The layers of one disk, split like a [`Plan`]'s.
struct DiskPlan<'a> {
    root: &'a [Id],
    lower: &'a [Id],
    kept: &'a [Id],
    /// The maps of the lower ones.
    maps: Vec<SealedMap>,
}

impl Store {
    /// Whether a machine that stands so should get a flatter standing before its next checkpoint.
    pub fn is_deep(&self, standing: &Standing) -> bool {
        standing.memory.len() + standing.disk_layers().count() >= MAX_LAYERS
    }

    /// Has a sandbox stand on fewer files that hold the same. Its machine may run meanwhile.
    ///
    /// # Errors
    /// [`Error::Flatten`] or the system's; the sandbox stands as before.
    pub fn flatten(&self, sandbox: &mut Sandbox) -> Result<(), Error> {
        let standing = sandbox.record().standing.clone();
        let Some(plan) = Plan::of(&standing) else { return Ok(()) };
        let merged = self.merge(sandbox, &standing, &plan);
        if merged.is_err() {
            // Half-written files: whoever collects next removes them if this fails, too.
            let _ = self.collect();
        }
        merged
    }

    fn merge(&self, sandbox: &mut Sandbox, standing: &Standing, plan: &Plan) -> Result<(), Error> {
        let failed = |source| Error::Flatten { id: sandbox.record().id.clone(), source };
        let open = |id: &Id| -> Result<Image, Error> {
            let path = self.memory_path(id);
            let file = File::open(&path).map_err(at(&path))?;
            Image::open(file).map_err(|source| Error::Damaged { path, source })
        };
        let root = open(&plan.root)?;
        let lower = plan.lower.iter().map(open).collect::<Result<Vec<_>, _>>()?;

        let mut flat = Standing { memory: Vec::new(), ..standing.clone() };
        let mut disks = Vec::new();
        let mut sections = Vec::new();
        let writable = flat.disks.iter_mut().filter(|disk| !disk.read_only);
        for (instance, disk) in (0..).zip(writable) {
            let layers = disk.layers.clone();
            let split = split_disk(&layers, instance, &root, &lower).map_err(failed)?;
            let (new, map) = self.merge_disk(&split).map_err(|e| e.or(failed))?;
            disk.layers = [split.root, std::slice::from_ref(&new.id), split.kept].concat();
            sections.push((instance, map, new.id.clone(), split.root.to_vec()));
            disks.push(new);
        }

        let memory = self.new_file(&self.checkpoints_dir())?;
        let meta = merged_meta(sandbox, standing, plan, &memory.id, &sections);
        let write = || -> Result<(), MergeError> {
            let info = HeaderInfo { build: BUILD.into(), ..root.info().clone() };
            let file = memory.file.try_clone().map_err(MergeError::Copy)?;
            let mut writer = Writer::new(file, info).map_err(MergeError::Write)?;
            merge::memory(&lower, &mut writer)?;
            let meta = serde_json::to_vec(&meta).map_err(|_| MergeError::Layers)?;
            let mut section = |kind, instance, version, data: &[u8]| {
                writer.section(kind, instance, version, true, data).map_err(MergeError::Write)
            };
            section(Kind::Meta, 0, META_VERSION, &meta)?;
            for (instance, map, ..) in &sections {
                let maps = encode_maps(std::slice::from_ref(map));
                section(Kind::DiskMap, *instance, MAPS_VERSION, &maps)?;
            }
            writer.finish().map(drop).map_err(MergeError::Write)
        };
        write().map_err(failed)?;

        flat.memory = [&[plan.root.clone(), memory.id.clone()], plan.kept.as_slice()].concat();
        let _lock = self.exclusive()?;
        for disk in &disks {
            files::rename(&disk.temp, &self.disk_path(&disk.id))?;
        }
        files::sync_directory(&self.layers_dir())?;
        files::rename(&memory.temp, &self.hidden_path(&memory.id))?;
        files::sync_directory(&self.checkpoints_dir())?;
        // Until here nobody names the new files, from here on the record does.
        sandbox.stand(flat)
    }

    /// Merges the lower layers of a disk into a new file, which is on disk when this returns.
    fn merge_disk(&self, split: &DiskPlan<'_>) -> Result<(NewFile, SealedMap), Failed> {
        let new = self.new_file(&self.layers_dir())?;
        let open = |id: &Id| {
            let path = self.disk_path(id);
            File::open(&path).map_err(at(&path))
        };
        let files = split.lower.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let layers: Vec<_> = files.into_iter().zip(split.maps.iter().cloned()).collect();
        let map = merge::disk(&layers, &new.file)?;
        new.file.sync_data().map_err(at(&new.temp))?;
        Ok((new, map))
    }

    /// Makes a file that nobody takes for left over as long as it is open.
    fn new_file(&self, directory: &Path) -> Result<NewFile, Error> {
        let _lock = self.exclusive()?;
        let id = Id::new().map_err(at(directory))?;
        let temp = directory.join(format!(".{id}.tmp"));
        let file = files::create_new(&temp)?;
        files::flock(&temp, &file, FlockOperation::NonBlockingLockExclusive)?;
        Ok(NewFile { id, temp, file })
    }
}

/// Failures of [`Store::merge_disk`].
enum Failed {
    Store(Error),
    Merge(MergeError),
}

impl Failed {
    fn or(self, merge: impl FnOnce(MergeError) -> Error) -> Error {
        match self {
            Self::Store(error) => error,
            Self::Merge(error) => merge(error),
        }
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Store(error)
    }
}

impl From<MergeError> for Failed {
    fn from(error: MergeError) -> Self {
        Self::Merge(error)
    }
}

/// Splits a disk's layers by the checkpoints that sealed them.
fn split_disk<'a>(
    layers: &'a [Id],
    instance: u32,
    root: &Image,
    lower: &[Image],
) -> Result<DiskPlan<'a>, MergeError> {
    let maps_of = |image: &Image| -> Result<Vec<SealedMap>, MergeError> {
        let section = image.section(Kind::DiskMap, instance).map_err(MergeError::Read)?;
        let section = section.filter(|section| section.version == MAPS_VERSION);
        let section = section.ok_or(MergeError::Layers)?;
        decode_maps(&section.data).map_err(|_| MergeError::Layers)
    };
    let below = maps_of(root)?.len();
    let mut maps = Vec::new();
    for image in lower {
        maps.extend(maps_of(image)?);
    }
    let (root, above) = layers.split_at_checked(below).ok_or(MergeError::Layers)?;
    let (lower, kept) = above.split_at_checked(maps.len()).ok_or(MergeError::Layers)?;
    // The top that the machine writes to is among those kept.
    if lower.is_empty() || kept.is_empty() {
        return Err(MergeError::Layers);
    }
    Ok(DiskPlan { root, lower, kept, maps })
}

/// The record of the merged layer: as of the topmost checkpoint in it.
fn merged_meta(
    sandbox: &Sandbox,
    standing: &Standing,
    plan: &Plan,
    id: &Id,
    disks: &[(u32, SealedMap, Id, Vec<Id>)],
) -> Meta {
    let mut standing = Standing {
        parent: plan.lower.last().cloned(),
        memory: vec![plan.root.clone()],
        ..standing.clone()
    };
    let writable = standing.disks.iter_mut().filter(|disk| !disk.read_only);
    for (disk, (_, _, merged, root)) in writable.zip(disks) {
        disk.layers = [root.as_slice(), std::slice::from_ref(merged)].concat();
    }
    let record = sandbox.record();
    Meta {
        id: id.clone(),
        name: None,
        labels: BTreeMap::new(),
        created_ms: now_ms(),
        sandbox: record.id.clone(),
        machine: record.machine.clone(),
        standing,
    }
}
