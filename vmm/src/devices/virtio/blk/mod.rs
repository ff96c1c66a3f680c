//! The block device (virtio 1.2 section 5.2).
//!
//! Requests are served one after the other in the order they came; data moves straight between
//! the backing file and guest memory. [`request`] takes a chain apart, [`backend`] and
//! [`overlay`] hold the blocks, and this module checks the one against the other.
//!
//! # When data is durable
//! The device is a write-back cache: a completed write is in the host's page cache, and a
//! completed FLUSH has brought all earlier ones to the disk (`fdatasync`). A driver that does not
//! accept VIRTIO_BLK_F_FLUSH cannot ask for that, so for it every write is flushed before it
//! completes (section 5.2.6.2). VIRTIO_BLK_F_CONFIG_WCE is not offered: it would let the driver
//! switch between these two at run time, and a guest gains nothing by that.

mod backend;
mod buffers;
mod cluster_map;
mod overlay;
mod request;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;

use coppice_image::SealedMap;

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_blk as spec;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use vm_memory::{Bytes as _, GuestAddress};

pub use self::backend::{Backend, DiskError, Raw};
pub use self::buffers::Buffers;
pub use self::overlay::{Overlay, SealedLayer};
use self::request::{Chain, Kind, Malformed, RANGE, Request};
use super::queue::ActiveQueue;
use super::{ActivateError, Activation, EVENT_IDX, QueuePosition, VirtioDevice};
use crate::devices::{OwnState, StateError, ensure};
use crate::memory::GuestRam;

const NAME: &str = "blk";
const STATE_VERSION: u16 = 1;

/// Bytes per sector, the unit of all positions in the protocol.
const SECTOR: u64 = 512;
/// Descriptors of the queue.
const QUEUE_SIZE: u16 = 256;
/// Most data descriptors of a request (`seg_max`): all of the queue but header and status.
const SEGMENTS_MAX: usize = 254;
/// Most sectors of a discard range: 1 GiB, which a file system frees in a moment.
const DISCARD_SECTORS_MAX: u32 = 1 << 21;
/// Most sectors of a write-zeroes range: 32 MiB, for where zeroes have to be written out.
const ZEROES_SECTORS_MAX: u32 = 1 << 16;
/// Most ranges of a discard or write-zeroes request.
const RANGES_MAX: u32 = 32;
/// Sectors per physical block, as a power of two: a page, which the page cache and the overlay's
/// clusters work in.
const PHYSICAL_BLOCK_EXP: u8 = 3;

const F_SEG_MAX: u64 = 1 << spec::VIRTIO_BLK_F_SEG_MAX;
const F_RO: u64 = 1 << spec::VIRTIO_BLK_F_RO;
const F_BLK_SIZE: u64 = 1 << spec::VIRTIO_BLK_F_BLK_SIZE;
const F_FLUSH: u64 = 1 << spec::VIRTIO_BLK_F_FLUSH;
const F_TOPOLOGY: u64 = 1 << spec::VIRTIO_BLK_F_TOPOLOGY;
const F_DISCARD: u64 = 1 << spec::VIRTIO_BLK_F_DISCARD;
const F_WRITE_ZEROES: u64 = 1 << spec::VIRTIO_BLK_F_WRITE_ZEROES;

const ID_BYTES: usize = 20;
const CONFIG_BYTES: usize = 60;

/// A disk.
pub struct Blk {
    disk: Disk,
    config: [u8; CONFIG_BYTES],
    chain: Chain,
    queue: Option<ActiveQueue>,
}

/// What a checkpoint has to do about a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layering {
    /// Nothing: the disk is read-only and does not change.
    NotNeeded,
    /// [`Blk::seal`].
    Sealed,
    /// There cannot be one: the disk writes straight to its file.
    Impossible,
}

/// What a disk has besides queue and content.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    /// Bytes; the guest was told once and for all.
    capacity: u64,
}

/// What serves requests.
struct Disk {
    backend: Box<dyn Backend>,
    read_only: bool,
    id: [u8; ID_BYTES],
    /// Features the driver accepted.
    accepted: u64,
    error_told: bool,
}

/// How a request failed.
enum Failure {
    /// VIRTIO_BLK_S_IOERR for a request that is wrong.
    Invalid,
    /// VIRTIO_BLK_S_IOERR because the backing file failed.
    Io(io::Error),
    /// VIRTIO_BLK_S_UNSUPP.
    Unsupported,
}

impl Blk {
    /// Makes a disk of `backend`. `serial` is what the guest shows as the disk's serial number,
    /// at most 20 ASCII characters.
    ///
    /// # Errors
    /// [`DiskError::Serial`].
    pub fn new(
        backend: Box<dyn Backend>,
        read_only: bool,
        serial: &str,
    ) -> Result<Self, DiskError> {
        let mut id = [0; ID_BYTES];
        match id.get_mut(..serial.len()) {
            Some(room) if serial.is_ascii() => room.copy_from_slice(serial.as_bytes()),
            _ => return Err(DiskError::Serial(serial.to_owned())),
        }
        let config = config_space(backend.capacity() / SECTOR);
        let disk = Disk { backend, read_only, id, accepted: 0, error_told: false };
        Ok(Self { disk, config, chain: Chain::default(), queue: None })
    }

    /// What a checkpoint has to do about the disk.
    pub fn layering(&mut self) -> Layering {
        if self.disk.read_only {
            Layering::NotNeeded
        } else if self.disk.backend.as_overlay().is_some() {
            Layering::Sealed
        } else {
            Layering::Impossible
        }
    }

    /// How many sealed layers it stands on; nothing for a disk without an overlay.
    pub fn layers(&mut self) -> Option<usize> {
        self.disk.backend.as_overlay().map(|overlay| overlay.sealed_layers())
    }

    /// Seals the layer that takes the writes and goes on with `new_top`; see [`Overlay::seal`].
    ///
    /// # Errors
    /// [`DiskError`], such as [`DiskError::NotLayered`]; nothing has changed then.
    pub fn seal(&mut self, new_top: File) -> Result<SealedLayer, DiskError> {
        self.disk.backend.as_overlay().ok_or(DiskError::NotLayered)?.seal(new_top)
    }

    /// Replaces the layers of the disk for a rollback; see [`Overlay::replace`].
    ///
    /// # Errors
    /// [`DiskError`], such as [`DiskError::NotLayered`]; nothing has changed then.
    pub fn replace(&mut self, layers: Vec<(File, SealedMap)>, top: File) -> Result<(), DiskError> {
        self.disk.backend.as_overlay().ok_or(DiskError::NotLayered)?.replace(layers, top)
    }

    fn attach(&mut self, activation: Activation) -> Option<()> {
        let Activation { ram, queues, interrupt, features } = activation;
        let queue = queues.into_iter().next()?;
        self.disk.accepted = features;
        self.queue = Some(ActiveQueue::new(queue, ram, interrupt));
        Some(())
    }
}

impl VirtioDevice for Blk {
    fn name(&self) -> &'static str {
        NAME
    }

    fn device_id(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn features(&self) -> u64 {
        let access = if self.disk.read_only { F_RO } else { F_FLUSH | F_DISCARD | F_WRITE_ZEROES };
        EVENT_IDX | F_SEG_MAX | F_BLK_SIZE | F_TOPOLOGY | access
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        super::read_config_bytes(&self.config, offset, data);
    }

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        self.attach(activation).ok_or_else(|| ActivateError {
            device: NAME,
            reason: "it was given no queue".to_owned(),
        })
    }

    fn reset(&mut self) {
        self.queue = None;
        self.disk.accepted = 0;
    }

    fn queue_positions(&self) -> Option<Vec<QueuePosition>> {
        self.queue.as_ref().map(|queue| vec![queue.position()])
    }

    fn save(&self) -> Result<OwnState, StateError> {
        OwnState::encode(NAME, STATE_VERSION, &State { capacity: self.disk.backend.capacity() })
    }

    fn restore(
        &mut self,
        state: &OwnState,
        activation: Option<Activation>,
    ) -> Result<(), StateError> {
        let State { capacity } = state.decode(NAME, STATE_VERSION)?;
        ensure(capacity == self.disk.backend.capacity(), NAME, "the disk has another size")?;
        match activation {
            Some(activation) => {
                let attached = self.attach(activation).is_some();
                ensure(attached, NAME, "it has no queue")
            }
            None => Ok(()),
        }
    }

    fn queue_event(&mut self, _index: usize) {
        let (chain, disk) = (&mut self.chain, &mut self.disk);
        if let Some(queue) = &mut self.queue {
            queue.drain(|ram, descriptors| match chain.parse(ram, descriptors) {
                Ok(request) => disk.serve(ram, request),
                Err(Malformed::Answerable(status)) => {
                    answer(ram, status, spec::VIRTIO_BLK_S_IOERR);
                    0
                }
                Err(Malformed::Silent) => 0,
            });
        }
    }
}

impl Disk {
    /// Serves a request, sets its status, and says how many bytes were written to guest memory
    /// from the first writable byte on.
    fn serve(&mut self, ram: &GuestRam, request: Request<'_>) -> u32 {
        let (status, wanted) = (request.status, request.wanted.len());
        let (code, filled) = match self.execute(request) {
            Ok(()) => (spec::VIRTIO_BLK_S_OK, true),
            Err(Failure::Unsupported) => (spec::VIRTIO_BLK_S_UNSUPP, false),
            Err(Failure::Invalid) => (spec::VIRTIO_BLK_S_IOERR, false),
            Err(Failure::Io(error)) => {
                self.tell(&error);
                (spec::VIRTIO_BLK_S_IOERR, false)
            }
        };
        answer(ram, status, code);
        // The count says that all bytes before it were written, the status last.
        if filled || wanted == 0 { u32::try_from(wanted).unwrap_or(0).saturating_add(1) } else { 0 }
    }

    fn execute(&mut self, request: Request<'_>) -> Result<(), Failure> {
        let Request { kind, sector, sent, wanted, .. } = request;
        let one_way = match kind {
            Kind::Read | Kind::GetId => sent.is_empty(),
            Kind::Write | Kind::Discard | Kind::WriteZeroes => wanted.is_empty(),
            Kind::Flush => sent.is_empty() && wanted.is_empty(),
            Kind::Unknown => return Err(Failure::Unsupported),
        };
        if !one_way {
            return Err(Failure::Invalid);
        }
        match kind {
            Kind::Read => {
                let offset = self.byte_range(sector, bytes(wanted.len()))?;
                Ok(self.backend.read(offset, wanted)?)
            }
            Kind::Write if self.read_only => Err(Failure::Invalid),
            Kind::Write => {
                let offset = self.byte_range(sector, bytes(sent.len()))?;
                self.backend.write(offset, sent)?;
                self.settle()
            }
            Kind::Flush if self.read_only => Ok(()),
            Kind::Flush => Ok(self.backend.flush()?),
            Kind::GetId if wanted.len() < ID_BYTES => Err(Failure::Invalid),
            Kind::GetId => {
                wanted.put_bytes(&self.id);
                Ok(())
            }
            Kind::Discard if self.accepted & F_DISCARD != 0 => self.discard(sent),
            Kind::WriteZeroes if self.accepted & F_WRITE_ZEROES != 0 => self.write_zeroes(sent),
            Kind::Discard | Kind::WriteZeroes | Kind::Unknown => Err(Failure::Unsupported),
        }
    }

    fn discard(&mut self, ranges: Buffers<'_>) -> Result<(), Failure> {
        // The unmap flag means nothing for a discard and must not be set.
        self.each_range(ranges, DISCARD_SECTORS_MAX, 0, |backend, offset, len, _| {
            backend.discard(offset, len)
        })
    }

    fn write_zeroes(&mut self, ranges: Buffers<'_>) -> Result<(), Failure> {
        let unmap = spec::VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
        self.each_range(ranges, ZEROES_SECTORS_MAX, unmap, |backend, offset, len, flags| {
            backend.write_zeroes(offset, len, flags & unmap != 0)
        })
    }

    /// Checks each range and hands it (offset and length in bytes, flags) to `act`.
    fn each_range(
        &mut self,
        mut ranges: Buffers<'_>,
        sectors_max: u32,
        known_flags: u32,
        act: impl Fn(&mut dyn Backend, u64, u64, u32) -> io::Result<()>,
    ) -> Result<(), Failure> {
        let count = ranges.len() / RANGE;
        let fits = usize::try_from(RANGES_MAX).is_ok_and(|max| count <= max);
        if count == 0 || !fits || !ranges.len().is_multiple_of(RANGE) {
            return Err(Failure::Invalid);
        }
        let mut bytes = [0; RANGE];
        while ranges.take_bytes(&mut bytes) {
            let (sector, sectors, flags) = request::range(bytes);
            if flags & !known_flags != 0 {
                return Err(Failure::Unsupported);
            }
            if sectors > sectors_max {
                return Err(Failure::Invalid);
            }
            let len = u64::from(sectors) * SECTOR;
            let offset = self.byte_range(sector, len)?;
            if len > 0 {
                act(&mut *self.backend, offset, len, flags)?;
            }
        }
        self.settle()
    }

    /// Where `len` bytes from `sector` on start, if they are whole sectors of the disk.
    fn byte_range(&self, sector: u64, len: u64) -> Result<u64, Failure> {
        let offset = sector.checked_mul(SECTOR).ok_or(Failure::Invalid)?;
        let end = offset.checked_add(len).ok_or(Failure::Invalid)?;
        if len.is_multiple_of(SECTOR) && end <= self.backend.capacity() {
            Ok(offset)
        } else {
            Err(Failure::Invalid)
        }
    }

    /// Makes a change durable now for a driver that cannot ask for it later.
    fn settle(&mut self) -> Result<(), Failure> {
        if self.accepted & F_FLUSH == 0 { Ok(self.backend.flush()?) } else { Ok(()) }
    }

    /// Says once that the backing file fails; the guest sees every failure.
    fn tell(&mut self, error: &io::Error) {
        if !std::mem::replace(&mut self.error_told, true) {
            let id = String::from_utf8_lossy(&self.id);
            let disk = id.trim_end_matches('\0');
            tracing::warn!(disk, %error, "a disk's file failed; the guest got an I/O error");
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// A length in memory as a length on a disk.
fn bytes(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}

/// Sets a request's status byte. Its address was checked, so this cannot fail.
fn answer(ram: &GuestRam, status: GuestAddress, code: u32) {
    if let Ok(code) = u8::try_from(code) {
        let _ = ram.write_obj(code, status);
    }
}

/// The configuration space (`struct virtio_blk_config`) up to the limits of write-zeroes.
fn config_space(sectors: u64) -> [u8; CONFIG_BYTES] {
    let mut config = [0; CONFIG_BYTES];
    let mut set = |offset: usize, bytes: &[u8]| {
        config[offset..offset + bytes.len()].copy_from_slice(bytes);
    };
    let block = 1u32 << PHYSICAL_BLOCK_EXP;
    set(0, &sectors.to_le_bytes());
    set(12, &u32::try_from(SEGMENTS_MAX).unwrap_or(1).to_le_bytes());
    set(20, &u32::try_from(SECTOR).unwrap_or(512).to_le_bytes());
    set(24, &[PHYSICAL_BLOCK_EXP]);
    set(26, &u16::try_from(block).unwrap_or(1).to_le_bytes());
    set(36, &DISCARD_SECTORS_MAX.to_le_bytes());
    set(40, &RANGES_MAX.to_le_bytes());
    set(44, &block.to_le_bytes());
    set(48, &ZEROES_SECTORS_MAX.to_le_bytes());
    set(52, &RANGES_MAX.to_le_bytes());
    set(56, &[1]); // Zeroing may unmap.
    config
}
