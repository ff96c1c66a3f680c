//! Merging layers: what several memory layers, or several layers of a disk, hold together, as one.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use coppice_image::{
    ClusterRun, Image, PAGE, PageSet, ReadError, SealedMap, Source, View, ViewError, WriteError,
    Writer,
};
use thiserror::Error;

/// Pages and clusters copied at once: 1 MiB.
const CHUNK: u64 = 256;
/// Bytes of a page, and of a disk's cluster.
const UNIT: usize = 4096;
const _: () = assert!(PAGE == UNIT as u64);

/// Why layers cannot be merged.
#[derive(Debug, Error)]
pub enum MergeError {
    /// One of them is damaged.
    #[error("a layer cannot be read")]
    Read(#[source] ReadError),
    /// They are of different machines.
    #[error("the layers do not fit together")]
    Fit(#[source] ViewError),
    /// There are none, more than can be numbered, or not what the record says.
    #[error("the layers are not those of the sandbox's record")]
    Layers,
    /// The merged layer cannot be written.
    #[error("the merged layer cannot be written")]
    Write(#[source] WriteError),
    /// A file cannot be copied.
    #[error("a layer cannot be copied")]
    Copy(#[source] io::Error),
}

/// Writes all pages that `layers` hold, the lowest first, each as the topmost of them has it.
/// Checksums are looked at before, so that damage is not given a good one.
pub(super) fn memory(layers: &[Image], to: &mut Writer) -> Result<(), MergeError> {
    let ram_pages = layers.first().ok_or(MergeError::Layers)?.info().ram_pages;
    let mut view = View::empty(ram_pages);
    let mut held = PageSet::new(ram_pages);
    for (number, layer) in layers.iter().enumerate() {
        layer.verify().map_err(MergeError::Read)?;
        let index = layer.page_index().map_err(MergeError::Read)?;
        let number = u16::try_from(number).map_err(|_| MergeError::Layers)?;
        view.push(number, &index).map_err(MergeError::Fit)?;
        for extent in index.extents() {
            held.insert_run(extent.first, extent.count);
        }
    }
    let mut buffer = Vec::new();
    for run in held.runs() {
        let mut first = run.start;
        while first < run.end {
            let end = run.end.min(first + CHUNK);
            buffer.clear();
            for part in view.runs(first..end) {
                let start = buffer.len();
                buffer.resize(start + bytes(part.count), 0);
                let Source::Layer { layer, page } = part.source else { continue };
                let layer = layers.get(usize::from(layer)).ok_or(MergeError::Layers)?;
                let slice = buffer.get_mut(start..).unwrap_or_default();
                // The page lies in the file, as the index was checked.
                let at = page.saturating_mul(PAGE);
                layer.file().read_exact_at(slice, at).map_err(MergeError::Copy)?;
            }
            let count = u32::try_from(end - first).map_err(|_| MergeError::Layers)?;
            to.pages(first, count, &buffer).map_err(MergeError::Write)?;
            first = end;
        }
    }
    Ok(())
}

/// Copies all clusters that `layers` of a disk hold, the lowest first, each as the topmost of them
/// has it, to the empty file `to`; gives the map of what is there then.
pub(super) fn disk(layers: &[(File, SealedMap)], to: &File) -> Result<SealedMap, MergeError> {
    let (top, map) = layers.last().ok_or(MergeError::Layers)?;
    let clusters = map.disk_clusters();
    to.set_len(top.metadata().map_err(MergeError::Copy)?.len()).map_err(MergeError::Copy)?;
    let mut held = PageSet::new(clusters);
    for (file, map) in layers.iter().rev() {
        if map.disk_clusters() != clusters {
            return Err(MergeError::Layers);
        }
        let mut new = PageSet::new(clusters);
        for run in map.runs() {
            new.insert_run(run.first, run.count);
        }
        for run in held.runs() {
            new.remove_run(run.start, run.end - run.start);
        }
        for run in new.runs() {
            copy(file, to, run).map_err(MergeError::Copy)?;
        }
        held.union(&new);
    }
    let runs = held.runs().map(|run| ClusterRun { first: run.start, count: run.end - run.start });
    SealedMap::new(clusters, runs.collect()).ok_or(MergeError::Layers)
}

/// Copies clusters from one layer to another; those of zeroes stay holes.
fn copy(from: &File, to: &File, clusters: std::ops::Range<u64>) -> io::Result<()> {
    let mut buffer = vec![0; bytes(CHUNK.min(clusters.end - clusters.start))];
    let mut first = clusters.start;
    while first < clusters.end {
        let count = CHUNK.min(clusters.end - first);
        let wanted = buffer.get_mut(..bytes(count)).unwrap_or_default();
        let read = read_up_to(from, wanted, first.saturating_mul(PAGE))?;
        let mut at = first.saturating_mul(PAGE);
        for cluster in wanted.get(..read).unwrap_or_default().chunks(UNIT) {
            if cluster.iter().any(|byte| *byte != 0) {
                to.write_all_at(cluster, at)?;
            }
            at = at.saturating_add(PAGE);
        }
        first += count;
    }
    Ok(())
}

/// Reads until the buffer is full or the file ends, as the last cluster of a disk may be cut off.
fn read_up_to(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    let mut done = 0;
    while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
        let offset = at.saturating_add(u64::try_from(done).map_err(io::Error::other)?);
        match file.read_at(rest, offset) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

fn bytes(units: u64) -> usize {
    usize::try_from(units).unwrap_or(usize::MAX).saturating_mul(UNIT)
}
