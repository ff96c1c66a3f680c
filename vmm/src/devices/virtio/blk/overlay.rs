//! A copy-on-write disk: a base file and sealed layers that are only read, and a top layer that
//! takes the writes.
//!
//! A layer is a sparse file of the disk's size that holds each cluster at the cluster's own
//! offset. This needs nothing of the file system but sparse files, so it works on ext4, XFS and
//! tmpfs alike. A cluster that the guest discarded is held as a hole: it reads as zeroes, not as
//! what is below. One map says for each cluster which layer holds it.
//!
//! Sealing puts an empty layer on top and gives the map of the one before, with which another
//! process can read it. It copies no data.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use coppice_image::SealedMap;

use super::backend::{Backend, DiskError, capacity, read_exact, write_all, zero};
use super::buffers::Buffers;
use super::bytes;
use super::cluster_map::{CLUSTER, ClusterMap, LayerNumber};

const CLUSTER_BYTES: usize = 4096;
const _: () = assert!(CLUSTER == CLUSTER_BYTES as u64);

/// A layer that does not change any more.
#[derive(Debug, Clone)]
pub struct SealedLayer {
    /// The clusters, at their own offsets. The last writes to it may not be durable yet.
    pub file: Arc<File>,
    /// Which clusters it holds.
    pub map: SealedMap,
}

/// A base and the layers over it.
#[derive(Debug)]
pub struct Overlay {
    base: File,
    capacity: u64,
    layers: Layers,
}

/// What is over the base.
#[derive(Debug)]
struct Layers {
    /// The lowest first.
    sealed: Vec<Arc<File>>,
    top: Arc<File>,
    map: ClusterMap,
    /// So many of the latest sealed files may have writes that no flush made durable.
    unflushed: usize,
}

impl Layers {
    /// Puts `sealed` and an empty `top` together for a disk of `capacity` bytes.
    fn new(capacity: u64, sealed: Vec<(File, SealedMap)>, top: File) -> Result<Self, DiskError> {
        let clusters = capacity.div_ceil(CLUSTER);
        for (number, (file, map)) in sealed.iter().enumerate() {
            let size = file.metadata().map_err(DiskError::Size)?.len();
            if size != capacity || map.disk_clusters() != clusters {
                return Err(DiskError::LayerSize { number, capacity });
            }
        }
        let map = ClusterMap::new(clusters, sealed.iter().map(|(_, map)| map))
            .ok_or(DiskError::TooManyLayers)?;
        let top = empty_layer(top, capacity)?;
        let sealed = sealed.into_iter().map(|(file, _)| Arc::new(file)).collect();
        Ok(Self { sealed, top, map, unflushed: 0 })
    }
}

/// Makes a layer of an empty file.
fn empty_layer(file: File, size: u64) -> Result<Arc<File>, DiskError> {
    if file.metadata().map_err(DiskError::Size)?.len() != 0 {
        return Err(DiskError::OverlayInUse);
    }
    file.set_len(size).map_err(|source| DiskError::OverlaySize { size, source })?;
    Ok(Arc::new(file))
}

impl Overlay {
    /// Puts `top`, an empty file opened for reading and writing, over `base`, opened for reading.
    ///
    /// # Errors
    /// [`DiskError`] when a size cannot be read or set, or when `top` has content.
    pub fn new(base: File, top: File) -> Result<Self, DiskError> {
        Self::with_layers(base, Vec::new(), top)
    }

    /// Puts `layers` that were sealed over `base` earlier, the lowest first, and `top`, an empty
    /// file, over `base`. Their maps may be anything that decodes.
    ///
    /// # Errors
    /// [`DiskError`] when a size cannot be read or set, when `top` has content, or when a layer
    /// is not one of a disk of this size.
    pub fn with_layers(
        base: File,
        layers: Vec<(File, SealedMap)>,
        top: File,
    ) -> Result<Self, DiskError> {
        let capacity = capacity(&base)?;
        let layers = Layers::new(capacity, layers, top)?;
        Ok(Self { base, capacity, layers })
    }

    /// Seals the top layer, and has `new_top`, an empty file, take the writes from now on. The
    /// sealed file is for the caller to make durable when the guest runs again; until then a flush
    /// of the guest does it.
    ///
    /// # Errors
    /// [`DiskError`] when `new_top` has content or cannot be given the disk's size, or there are
    /// too many layers; nothing has changed then.
    pub fn seal(&mut self, new_top: File) -> Result<SealedLayer, DiskError> {
        let new_top = empty_layer(new_top, self.capacity)?;
        let layers = &mut self.layers;
        let map = layers.map.seal().ok_or(DiskError::TooManyLayers)?;
        let file = std::mem::replace(&mut layers.top, new_top);
        layers.sealed.push(Arc::clone(&file));
        layers.unflushed += 1;
        Ok(SealedLayer { file, map })
    }

    /// Replaces everything over the base, as in [`Overlay::with_layers`], for a rollback to any
    /// point that was sealed before. The layers have to be durable already.
    ///
    /// # Errors
    /// As for [`Overlay::with_layers`]; nothing has changed then.
    pub fn replace(&mut self, layers: Vec<(File, SealedMap)>, top: File) -> Result<(), DiskError> {
        self.layers = Layers::new(self.capacity, layers, top)?;
        Ok(())
    }

    /// How many sealed layers there are.
    pub fn sealed_layers(&self) -> usize {
        self.layers.sealed.len()
    }

    /// The file that holds what layer `number` has.
    fn file(&self, number: LayerNumber) -> &File {
        let Some(place) = number.checked_sub(1) else { return &self.base };
        self.layers.sealed.get(usize::from(place)).unwrap_or(&self.layers.top)
    }

    /// Makes sure that a change of the range leaves the rest of the clusters at its edges as it
    /// was, by copying those that the top layer does not hold yet. They count as held only once
    /// the change is made.
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
        if self.layers.map.is_in_top(cluster) {
            return Ok(());
        }
        let start = cluster * CLUSTER;
        let len = usize::try_from(self.capacity - start).unwrap_or(usize::MAX).min(CLUSTER_BYTES);
        let mut bytes = [0; CLUSTER_BYTES];
        let bytes = &mut bytes[..len];
        self.file(self.layers.map.layer(cluster)).read_exact_at(bytes, start)?;
        self.layers.top.write_all_at(bytes, start)
    }

    /// The range's clusters are now in the top layer.
    fn hold(&mut self, offset: u64, end: u64) {
        self.layers.map.insert(offset / CLUSTER, end.div_ceil(CLUSTER));
    }
}

impl Backend for Overlay {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn read(&mut self, mut offset: u64, mut buffers: Buffers<'_>) -> io::Result<()> {
        while !buffers.is_empty() {
            let end = offset + bytes(buffers.len());
            let (layer, run_end) = self.layers.map.run(offset / CLUSTER, end.div_ceil(CLUSTER));
            let run = (run_end * CLUSTER).min(end) - offset;
            let part = buffers.split_front(usize::try_from(run).unwrap_or(usize::MAX));
            read_exact(self.file(layer), offset, part)?;
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
        write_all(&self.layers.top, offset, buffers)?;
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
        zero(&self.layers.top, offset, len, unmap)?;
        self.hold(offset, end);
        Ok(())
    }

    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.write_zeroes(offset, len, true)
    }

    fn flush(&mut self) -> io::Result<()> {
        let layers = &mut self.layers;
        let flushed = layers.sealed.len().saturating_sub(layers.unflushed);
        for file in layers.sealed.get(flushed..).unwrap_or_default() {
            file.sync_data()?;
        }
        layers.unflushed = 0;
        layers.top.sync_data()
    }

    fn as_overlay(&mut self) -> Option<&mut Overlay> {
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn empty() -> File {
        tempfile::tempfile().unwrap()
    }

    /// A disk with one sealed layer, and a socket, which cannot be made durable.
    fn sealed() -> (Overlay, Arc<File>) {
        let base = empty();
        base.set_len(4096).unwrap();
        let mut overlay = Overlay::new(base, empty()).unwrap();
        overlay.seal(empty()).unwrap();
        let (socket, _) = UnixStream::pair().unwrap();
        (overlay, Arc::new(File::from(OwnedFd::from(socket))))
    }

    #[test]
    fn a_flush_covers_writes_that_were_sealed_before_it() {
        let (mut overlay, socket) = sealed();
        overlay.layers.sealed[0] = socket;
        overlay.flush().unwrap_err();
    }

    #[test]
    fn a_sealed_layer_is_flushed_once() {
        let (mut overlay, socket) = sealed();
        overlay.flush().unwrap();
        overlay.layers.sealed[0] = socket;
        overlay.flush().unwrap();
    }
}
