//! Taking a descriptor chain apart into one block request (virtio 1.2 section 5.2.6).
//!
//! The driver may cut header, data and status into descriptors as it likes; only their order and
//! direction mean anything. What is read here decides where the device reads and writes, so every
//! address is checked against guest memory and every length against the device's limits.

use virtio_bindings::virtio_blk as spec;
use virtio_queue::DescriptorChain;
use vm_memory::{GuestAddress, GuestMemoryBackend as _};

use super::SEGMENTS_MAX;
use super::buffers::{Buffers, Segment};
use crate::memory::GuestRam;

/// Bytes of a request's header: type, reserved, sector.
const HEADER: usize = 16;
/// Bytes of one range of a discard or write-zeroes request.
pub(super) const RANGE: usize = 16;

/// What the driver wants done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
    Flush,
    GetId,
    Discard,
    WriteZeroes,
    Unknown,
}

/// A request whose every address lies in guest memory.
#[derive(Debug)]
pub(super) struct Request<'a> {
    pub(super) kind: Kind,
    pub(super) sector: u64,
    /// What the driver sends beyond the header.
    pub(super) sent: Buffers<'a>,
    /// What the driver wants filled, without the status byte.
    pub(super) wanted: Buffers<'a>,
    pub(super) status: GuestAddress,
}

/// A chain that is not a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Malformed {
    /// It has a place for a status byte, which can tell the driver.
    Answerable(GuestAddress),
    /// There is no telling.
    Silent,
}

/// Room for the segments of one chain, kept from request to request.
#[derive(Debug, Default)]
pub(super) struct Chain {
    segments: Vec<Segment>,
    /// Index of the first segment that the device writes to.
    writable: usize,
}

impl Chain {
    /// Takes a chain apart.
    pub(super) fn parse<'a>(
        &'a mut self,
        ram: &'a GuestRam,
        descriptors: DescriptorChain<&GuestRam>,
    ) -> Result<Request<'a>, Malformed> {
        let status = self.collect(ram, descriptors)?;
        let (sent, wanted) =
            self.segments.split_at_checked(self.writable).ok_or(Malformed::Silent)?;
        let mut sent = Buffers::new(ram, sent);
        let mut wanted = Buffers::new(ram, wanted);
        let wanted = wanted.split_front(wanted.len().saturating_sub(1));

        let mut header = [0; HEADER];
        if !sent.take_bytes(&mut header) {
            return Err(Malformed::Answerable(status));
        }
        let [kind, _, sector_low, sector_high] = words(header);
        let kind = match kind {
            spec::VIRTIO_BLK_T_IN => Kind::Read,
            spec::VIRTIO_BLK_T_OUT => Kind::Write,
            spec::VIRTIO_BLK_T_FLUSH => Kind::Flush,
            spec::VIRTIO_BLK_T_GET_ID => Kind::GetId,
            spec::VIRTIO_BLK_T_DISCARD => Kind::Discard,
            spec::VIRTIO_BLK_T_WRITE_ZEROES => Kind::WriteZeroes,
            _ => Kind::Unknown,
        };
        let sector = u64::from(sector_high) << 32 | u64::from(sector_low);
        Ok(Request { kind, sector, sent, wanted, status })
    }

    /// Lists the chain's segments and returns the address of its status byte, the last one that
    /// the device may write. Even a chain with faults is followed to its end to find that.
    fn collect(
        &mut self,
        ram: &GuestRam,
        descriptors: DescriptorChain<&GuestRam>,
    ) -> Result<GuestAddress, Malformed> {
        self.segments.clear();
        self.writable = 0;
        let mut fault = false;
        let mut unterminated = true;
        let mut status = None;
        let mut writing = false;
        for (count, descriptor) in descriptors.enumerate() {
            unterminated = descriptor.has_next();
            fault |= count >= SEGMENTS_MAX + 2;
            fault |= writing && !descriptor.is_write_only();
            if !writing && descriptor.is_write_only() {
                writing = true;
                self.writable = self.segments.len();
            }
            let (addr, len) = (descriptor.addr(), descriptor.len());
            if writing && len > 0 {
                let last = addr.0.checked_add(u64::from(len) - 1).map(GuestAddress);
                status = last.filter(|&last| ram.address_in_range(last));
            }
            fault |= !fault && !self.push(ram, addr, len);
        }
        match status {
            Some(status) if !unterminated && !fault => Ok(status),
            Some(status) if !unterminated => Err(Malformed::Answerable(status)),
            _ => Err(Malformed::Silent),
        }
    }

    /// Adds what one descriptor covers, region by region; `false` if it leaves guest memory.
    fn push(&mut self, ram: &GuestRam, addr: GuestAddress, len: u32) -> bool {
        let Ok(len) = usize::try_from(len) else { return false };
        let mut at = addr.0;
        for slice in ram.get_slices(addr, len) {
            let Ok(slice) = slice else { return false };
            self.segments.push(Segment { addr: GuestAddress(at), len: slice.len() });
            let Some(next) = u64::try_from(slice.len()).ok().and_then(|len| at.checked_add(len))
            else {
                return false;
            };
            at = next;
        }
        true
    }
}

/// A range of a discard or write-zeroes request: first sector, sectors, flags.
pub(super) fn range(bytes: [u8; RANGE]) -> (u64, u32, u32) {
    let [sector_low, sector_high, count, flags] = words(bytes);
    (u64::from(sector_high) << 32 | u64::from(sector_low), count, flags)
}

fn words(bytes: [u8; 16]) -> [u32; 4] {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = bytes;
    [[a, b, c, d], [e, f, g, h], [i, j, k, l], [m, n, o, p]].map(u32::from_le_bytes)
}
