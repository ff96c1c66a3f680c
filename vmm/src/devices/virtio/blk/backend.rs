//! Where a disk's blocks are: a file as it is, or an overlay over a file that many share.
//!
//! A backend sees only byte ranges that lie inside its capacity; the device in front of it checks
//! what the guest asks for.

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;

use thiserror::Error;

use super::SECTOR;
use super::buffers::Buffers;
use super::overlay::Overlay;
use crate::sys::block_io;

/// Zeroes written at once where a file system has no faster way.
const ZERO_CHUNK: usize = 128 * 1024;

/// Why a disk cannot be used.
#[derive(Debug, Error)]
pub enum DiskError {
    /// There is not exactly one file for each map of a sealed layer.
    #[error("the disk has {layers} layers, but the checkpoint knows of {maps}")]
    Layers {
        /// Files given.
        layers: usize,
        /// Maps in the checkpoint.
        maps: usize,
    },
    /// The size of a file cannot be found out.
    #[error("the size of the disk's file cannot be read")]
    Size(#[source] io::Error),
    /// The backing file has less than one sector.
    #[error("the disk's file is shorter than one sector of {SECTOR} bytes; use a disk image")]
    TooSmall,
    /// The overlay has content, which the disk would not know how to read.
    #[error("the disk's overlay file is not empty; give a new one")]
    OverlayInUse,
    /// The overlay cannot be given the size of the disk.
    #[error("the disk's overlay file cannot be given the disk's size of {size} bytes")]
    OverlaySize {
        /// The disk's size in bytes.
        size: u64,
        /// What the kernel says.
        #[source]
        source: io::Error,
    },
    /// A layer is not one of this disk.
    #[error("layer {number} of the disk is not one of a disk of {capacity} bytes")]
    LayerSize {
        /// Its number, the lowest being 0.
        number: usize,
        /// The disk's size in bytes.
        capacity: u64,
    },
    /// There are more layers than can be counted.
    #[error("the disk has too many layers; make a new disk image of it")]
    TooManyLayers,
    /// The disk writes to the file it was given.
    #[error(
        "the disk writes straight to its file, so no point of its past can be kept; \
         run the machine with an overlay over that file, or read-only"
    )]
    NotLayered,
    /// The serial number is too long or not ASCII.
    #[error("the disk's serial number {0:?} is not ASCII of at most 20 characters")]
    Serial(String),
}

/// The blocks of a disk.
///
/// Ranges are in bytes and inside the capacity. What a completed write leaves is seen by later
/// reads at once, and survives a crash of the host only after a [`Backend::flush`] that began
/// after it.
pub trait Backend: Send {
    /// Size of the disk in bytes, a multiple of 512; fixed.
    fn capacity(&self) -> u64;
    /// Fills `buffers` from `offset`.
    ///
    /// # Errors
    /// The file's; the buffers may then be partly filled.
    fn read(&mut self, offset: u64, buffers: Buffers<'_>) -> io::Result<()>;
    /// Writes `buffers` to `offset`.
    ///
    /// # Errors
    /// The file's, such as a full file system; the range may then be partly written.
    fn write(&mut self, offset: u64, buffers: Buffers<'_>) -> io::Result<()>;
    /// Makes a range read as zeroes; with `unmap` the room it takes may be given back.
    ///
    /// # Errors
    /// The file's; the range may then be partly zeroed.
    fn write_zeroes(&mut self, offset: u64, len: u64, unmap: bool) -> io::Result<()>;
    /// The guest does not need the content of a range any more.
    ///
    /// # Errors
    /// The file's; the content is then either there or zeroes.
    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()>;
    /// Makes all completed writes durable.
    ///
    /// # Errors
    /// The file's; writes since the last flush may then be lost.
    fn flush(&mut self) -> io::Result<()>;
    /// The backend as one that has layers, if it has.
    fn as_overlay(&mut self) -> Option<&mut Overlay> {
        None
    }
}

/// A file or block device, block by block as it is.
#[derive(Debug)]
pub struct Raw {
    file: File,
    capacity: u64,
}

impl Raw {
    /// Uses `file`, opened for reading, and for writing unless the disk is read-only. A tail
    /// shorter than a sector is not part of the disk.
    ///
    /// # Errors
    /// [`DiskError::Size`], [`DiskError::TooSmall`].
    pub fn new(file: File) -> Result<Self, DiskError> {
        let capacity = capacity(&file)?;
        Ok(Self { file, capacity })
    }
}

impl Backend for Raw {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn read(&mut self, offset: u64, buffers: Buffers<'_>) -> io::Result<()> {
        read_exact(&self.file, offset, buffers)
    }

    fn write(&mut self, offset: u64, buffers: Buffers<'_>) -> io::Result<()> {
        write_all(&self.file, offset, buffers)
    }

    fn write_zeroes(&mut self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        zero(&self.file, offset, len, unmap)
    }

    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        // A discard is a hint: where it cannot be followed the content stays.
        unless_unsupported(block_io::punch_hole(self.file.as_fd(), offset, len)).map(drop)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }
}

/// Size of a file or block device, in whole sectors.
pub(super) fn capacity(mut file: &File) -> Result<u64, DiskError> {
    let size = file.seek(SeekFrom::End(0)).map_err(DiskError::Size)?;
    match size - size % SECTOR {
        0 => Err(DiskError::TooSmall),
        capacity => Ok(capacity),
    }
}

/// Fills `buffers` from `offset` of `file`.
pub(super) fn read_exact(file: &File, mut offset: u64, mut buffers: Buffers<'_>) -> io::Result<()> {
    while !buffers.is_empty() {
        let count = block_io::read_at(file.as_fd(), buffers.slices(), offset)?;
        advance(&mut offset, &mut buffers, count, io::ErrorKind::UnexpectedEof)?;
    }
    Ok(())
}

/// Writes all of `buffers` to `offset` of `file`.
pub(super) fn write_all(file: &File, mut offset: u64, mut buffers: Buffers<'_>) -> io::Result<()> {
    while !buffers.is_empty() {
        let count = block_io::write_at(file.as_fd(), buffers.slices(), offset)?;
        advance(&mut offset, &mut buffers, count, io::ErrorKind::WriteZero)?;
    }
    Ok(())
}

fn advance(
    offset: &mut u64,
    buffers: &mut Buffers<'_>,
    count: usize,
    stuck: io::ErrorKind,
) -> io::Result<()> {
    if count == 0 {
        return Err(stuck.into());
    }
    buffers.split_front(count);
    let moved = u64::try_from(count).ok().and_then(|count| offset.checked_add(count));
    *offset = moved.ok_or(io::ErrorKind::InvalidInput)?;
    Ok(())
}

/// Makes a range of `file` read as zeroes, in the fastest way its file system has.
pub(super) fn zero(file: &File, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
    if unmap && unless_unsupported(block_io::punch_hole(file.as_fd(), offset, len))? {
        return Ok(());
    }
    if unless_unsupported(block_io::zero_range(file.as_fd(), offset, len))? {
        return Ok(());
    }
    let chunk = len.min(u64::try_from(ZERO_CHUNK).unwrap_or(len));
    let zeroes = vec![0; usize::try_from(chunk).unwrap_or(ZERO_CHUNK)];
    let (mut offset, mut left) = (offset, len);
    while left > 0 {
        let now = left.min(chunk);
        let count = usize::try_from(now).unwrap_or(ZERO_CHUNK).min(zeroes.len());
        file.write_all_at(&zeroes[..count], offset)?;
        offset += now;
        left -= now;
    }
    Ok(())
}

/// Whether a call that not every file system knows did its work.
fn unless_unsupported(result: io::Result<()>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(false),
        Err(error) => Err(error),
    }
}
