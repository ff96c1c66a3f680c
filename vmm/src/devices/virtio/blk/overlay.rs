//! A copy-on-write disk: a base file that is only read, and a layer that takes the writes.
//!
//! The layer is a sparse file of the disk's size that holds each cluster at the cluster's own
//! offset, and a map that says which clusters it holds. This needs nothing of the file system but
//! sparse files, so it works on ext4, XFS and tmpfs alike. A cluster that the guest discarded is
//! held as a hole: it reads as zeroes, not as what the base has there.
//!
//! The map lives in memory, so a layer is of use only to the process that made it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use super::backend::{Backend, DiskError, capacity, read_exact, write_all, zero};
use super::buffers::Buffers;
use super::bytes;
use super::cluster_map::{CLUSTER, ClusterMap};

const CLUSTER_BYTES: usize = 4096;
const _: () = assert!(CLUSTER == CLUSTER_BYTES as u64);

/// A layer of written clusters.
#[derive(Debug)]
struct Layer {
    file: File,
    map: ClusterMap,
}

/// A base and the layer over it.
#[derive(Debug)]
pub struct Overlay {
    base: File,
    top: Layer,
    capacity: u64,
}

impl Overlay {
    /// Puts `top`, an empty file opened for reading and writing, over `base`, opened for reading.
    ///
    /// # Errors
    /// [`DiskError`] when a size cannot be read or set, or when `top` has content.
    pub fn new(base: File, top: File) -> Result<Self, DiskError> {
        let capacity = capacity(&base)?;
        if top.metadata().map_err(DiskError::Size)?.len() != 0 {
            return Err(DiskError::OverlayInUse);
        }
        top.set_len(capacity)
            .map_err(|source| DiskError::OverlaySize { size: capacity, source })?;
        let map = ClusterMap::new(capacity.div_ceil(CLUSTER));
        Ok(Self { base, top: Layer { file: top, map }, capacity })
    }

    /// Makes sure that a change of the range leaves the rest of the clusters at its edges as it
    /// was, by copying those that the layer does not hold yet. They count as held only once the
    /// change is made.
    fn copy_edges(&self, offset: u64, end: u64) -> io::Result<()> {
        let first = offset / CLUSTER;
        let last = end / CLUSTER;
        let head = !offset.is_multiple_of(CLUSTER);
        let tail = !end.is_multiple_of(CLUSTER) && end < self.capacity;
        if head {
            self.copy_up(first)?;
        }
        if tail && !(head && first == last) {
            self.copy_up(last)?;
        }
        Ok(())
    }

    fn copy_up(&self, cluster: u64) -> io::Result<()> {
        if self.top.map.contains(cluster) {
            return Ok(());
        }
        let start = cluster * CLUSTER;
        let len = usize::try_from(self.capacity - start).unwrap_or(usize::MAX).min(CLUSTER_BYTES);
        let mut bytes = [0; CLUSTER_BYTES];
        let bytes = &mut bytes[..len];
        self.base.read_exact_at(bytes, start)?;
        self.top.file.write_all_at(bytes, start)
    }

    /// The range's clusters are now in the layer.
    fn hold(&mut self, offset: u64, end: u64) {
        self.top.map.insert(offset / CLUSTER, (end - 1) / CLUSTER);
    }
}

impl Backend for Overlay {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn read(&mut self, mut offset: u64, mut buffers: Buffers<'_>) -> io::Result<()> {
        while !buffers.is_empty() {
            let end = offset + bytes(buffers.len());
            let (held, run_end) = self.top.map.run(offset / CLUSTER, end.div_ceil(CLUSTER));
            let run = (run_end * CLUSTER).min(end) - offset;
            let file = if held { &self.top.file } else { &self.base };
            let part = buffers.split_front(usize::try_from(run).unwrap_or(usize::MAX));
            read_exact(file, offset, part)?;
            offset += run;
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, buffers: Buffers<'_>) -> io::Result<()> {
        if buffers.is_empty() {
            return Ok(());
        }
        let end = offset + bytes(buffers.len());
        self.copy_edges(offset, end)?;
        write_all(&self.top.file, offset, buffers)?;
        self.hold(offset, end);
        Ok(())
    }

    fn write_zeroes(&mut self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        if len == 0 {
            return Ok(());
        }
        let end = offset + len;
        self.copy_edges(offset, end)?;
        // Also where the layer holds nothing: a failed write may have left bytes there.
        zero(&self.top.file, offset, len, unmap)?;
        self.hold(offset, end);
        Ok(())
    }

    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.write_zeroes(offset, len, true)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.top.file.sync_data()
    }
}
