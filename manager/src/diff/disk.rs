//! A disk as a checkpoint has it: its base image and the sealed layers over it, for reading.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use coppice_image::{Image, Kind, MapError, ReadError, SealedMap, decode_maps};
use ext4_view::Ext4Read;
use thiserror::Error;

use crate::store::{Meta, Store};

/// Bytes of a cluster, the unit in which layers hold content.
const CLUSTER: u64 = 4096;

/// Why a disk cannot be put together.
#[derive(Debug, Error)]
pub enum DiskError {
    /// One of its files cannot be opened.
    #[error("one of its files cannot be opened")]
    Open(#[source] io::Error),
    /// A checkpoint that says what its layers hold cannot be read.
    #[error("what its layers hold cannot be read")]
    Read(#[source] ReadError),
    /// What its layers hold cannot be understood.
    #[error("what its layers hold cannot be understood")]
    Map(#[source] MapError),
    /// There are not as many layers as there should be.
    #[error("it has {files} layers where its checkpoints know of {maps}")]
    Layers {
        /// Layer files.
        files: usize,
        /// Layers that checkpoints know of.
        maps: usize,
    },
}

/// A disk, put together.
#[derive(Debug)]
pub(super) struct DiskView {
    /// The base first, then the layers, lowest first.
    files: Vec<File>,
    /// By first cluster: the cluster behind the last, and the file that holds them. What is not
    /// here is in the base.
    spans: BTreeMap<u64, (u64, usize)>,
}

impl DiskView {
    /// Opens the disk at position `number`, the `overlay`-th of those that take writes.
    pub(super) fn open(
        store: &Store,
        meta: &Meta,
        number: usize,
        overlay: u32,
    ) -> Result<Self, DiskError> {
        let missing = || DiskError::Open(io::ErrorKind::NotFound.into());
        let chain = meta.standing.disks.get(number).ok_or_else(missing)?;
        let mut files = vec![File::open(&chain.base.path).map_err(DiskError::Open)?];
        for layer in &chain.layers {
            files.push(File::open(store.disk_path(layer)).map_err(DiskError::Open)?);
        }
        let mut maps = Vec::new();
        for id in meta.memory_chain() {
            let file = File::open(store.memory_path(&id)).map_err(DiskError::Open)?;
            let image = Image::open(file).map_err(DiskError::Read)?;
            let section = image.section(Kind::DiskMap, overlay).map_err(DiskError::Read)?;
            if let Some(section) = section {
                maps.extend(decode_maps(&section.data).map_err(DiskError::Map)?);
            }
        }
        if maps.len() != chain.layers.len() {
            return Err(DiskError::Layers { files: chain.layers.len(), maps: maps.len() });
        }
        Ok(Self::over(files, &maps))
    }

    /// Puts files together: the base, and one for each map.
    fn over(files: Vec<File>, maps: &[SealedMap]) -> Self {
        let mut spans = BTreeMap::new();
        for (number, map) in (1..).zip(maps) {
            for run in map.runs() {
                cover(&mut spans, run.first, run.end(), number);
            }
        }
        Self { files, spans }
    }

    /// The file that holds a cluster, and the cluster up to which it does.
    fn place(&self, cluster: u64) -> (usize, u64) {
        if let Some((_, (end, file))) = self.spans.range(..=cluster).next_back()
            && cluster < *end
        {
            return (*file, *end);
        }
        let next =
            self.spans.range(cluster..).next().map_or(u64::MAX / CLUSTER, |(start, _)| *start);
        (0, next)
    }
}

/// Has `file` hold the clusters from `first` to before `end`, whatever held them.
fn cover(spans: &mut BTreeMap<u64, (u64, usize)>, first: u64, end: u64, file: usize) {
    let touched: Vec<_> = spans
        .range(..end)
        .rev()
        .map(|(start, (end, file))| (*start, *end, *file))
        .take_while(|(_, old_end, _)| *old_end > first)
        .collect();
    for (start, old_end, old_file) in touched {
        spans.remove(&start);
        if start < first {
            spans.insert(start, (first, old_file));
        }
        if old_end > end {
            spans.insert(end, (old_end, old_file));
        }
    }
    spans.insert(first, (end, file));
}

impl Ext4Read for DiskView {
    fn read(
        &mut self,
        start_byte: u64,
        mut to: &mut [u8],
    ) -> Result<(), Box<dyn StdError + Send + Sync + 'static>> {
        let mut at = start_byte;
        while !to.is_empty() {
            let (file, end) = self.place(at / CLUSTER);
            let here = usize::try_from(end.saturating_mul(CLUSTER).saturating_sub(at));
            let (now, rest) = to.split_at_mut(here.unwrap_or(usize::MAX).min(to.len()));
            let file =
                self.files.get(file).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
            file.read_exact_at(now, at)?;
            at = at.saturating_add(u64::try_from(now.len())?);
            to = rest;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use coppice_image::ClusterRun;
    use proptest::prelude::*;

    use super::*;

    const CLUSTERS: u64 = 24;

    /// A file whose clusters all begin with `mark`.
    fn file(mark: u8) -> File {
        let mut file = tempfile::tempfile().unwrap();
        for _ in 0..CLUSTERS {
            file.write_all(&[mark; 4096]).unwrap();
        }
        file
    }

    proptest! {
        #[test]
        fn each_cluster_comes_from_the_topmost_layer_that_holds_it(
            layers in prop::collection::vec(prop::collection::btree_set(0..CLUSTERS, 0..12), 0..5),
        ) {
            let maps: Vec<_> = layers.iter().map(|held| {
                let mut runs: Vec<ClusterRun> = Vec::new();
                for cluster in held {
                    match runs.last_mut().filter(|run| run.end() == *cluster) {
                        Some(run) => run.count += 1,
                        None => runs.push(ClusterRun { first: *cluster, count: 1 }),
                    }
                }
                SealedMap::new(CLUSTERS, runs).unwrap()
            }).collect();
            let marks = 0..=u8::try_from(layers.len()).unwrap();
            let mut view = DiskView::over(marks.map(file).collect(), &maps);
            let mut bytes = vec![0; usize::try_from(CLUSTERS * CLUSTER).unwrap() - 1000];
            view.read(500, &mut bytes).unwrap();
            for (place, byte) in (500..).zip(bytes) {
                let holds = |held: &std::collections::BTreeSet<u64>| held.contains(&(place / CLUSTER));
                let top = layers.iter().rposition(holds).map_or(0, |layer| layer + 1);
                prop_assert_eq!(usize::from(byte), top);
            }
        }
    }
}
