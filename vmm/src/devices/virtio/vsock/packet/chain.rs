//! Descriptor chains as lists of guest memory slices.

use std::io;
use std::os::fd::BorrowedFd;

use thiserror::Error;
use virtio_queue::DescriptorChain;
use vm_memory::bitmap::MS;
use vm_memory::{GuestMemory, GuestMemoryError, Permissions, VolatileMemoryError, VolatileSlice};

use super::header::{HEADER_SIZE, Header};
use crate::memory::GuestRam;
use crate::sys::vsock as sys;

type Slice<'a> = VolatileSlice<'a, MS<'a, GuestRam>>;

/// Why a chain is not a packet. The guest gets it back unused.
#[derive(Debug, Error)]
pub(crate) enum ChainError {
    /// A buffer lies outside of guest memory.
    #[error("a descriptor points outside of guest memory")]
    Memory(#[source] GuestMemoryError),
    /// A slice was cut beyond its end.
    #[error("a descriptor cannot be cut to the packet")]
    Slice(#[source] VolatileMemoryError),
    /// A descriptor is writable in a packet to send, or read-only in one to fill.
    #[error("a descriptor has the wrong direction")]
    Direction,
    /// There is no room for a header, and a receive buffer needs some for payload too.
    #[error("a chain of {0} bytes is too short for a packet")]
    TooShort(usize),
    /// More pieces than a packet may have.
    #[error("a chain has more than {} buffers", sys::MAX_SLICES)]
    TooMany,
}

/// The pieces of guest memory behind a chain, in order.
struct Slices<'a> {
    items: [Option<Slice<'a>>; sys::MAX_SLICES],
    count: usize,
    bytes: usize,
}

impl<'a> Slices<'a> {
    fn collect(
        ram: &'a GuestRam,
        chain: DescriptorChain<&GuestRam>,
        access: Permissions,
    ) -> Result<Self, ChainError> {
        let mut slices = Self { items: [const { None }; sys::MAX_SLICES], count: 0, bytes: 0 };
        for descriptor in chain {
            if descriptor.is_write_only() != access.has_write() {
                return Err(ChainError::Direction);
            }
            let len = usize::try_from(descriptor.len()).unwrap_or(usize::MAX);
            let pieces =
                ram.get_slices(descriptor.addr(), len, access).map_err(ChainError::Memory)?;
            for piece in pieces {
                slices.push(piece.map_err(ChainError::Memory)?)?;
            }
        }
        Ok(slices)
    }

    fn push(&mut self, slice: Slice<'a>) -> Result<(), ChainError> {
        let item = self.items.get_mut(self.count).ok_or(ChainError::TooMany)?;
        self.bytes = self.bytes.saturating_add(slice.len());
        *item = Some(slice);
        self.count += 1;
        Ok(())
    }

    fn iter(&self) -> impl Iterator<Item = &Slice<'a>> + Clone {
        self.items.iter().flatten()
    }

    /// The part from `start` on, `len` bytes or as much as there is.
    fn part(&self, start: usize, len: usize) -> Result<Self, ChainError> {
        let mut part = Self { items: [const { None }; sys::MAX_SLICES], count: 0, bytes: 0 };
        let mut skip = start;
        let mut room = len;
        for slice in self.iter() {
            let skipped = slice.len().min(skip);
            skip -= skipped;
            let taken = (slice.len() - skipped).min(room);
            if taken > 0 {
                part.push(slice.subslice(skipped, taken).map_err(ChainError::Slice)?)?;
                room -= taken;
            }
        }
        Ok(part)
    }

    fn read(&self, buffer: &mut [u8]) -> usize {
        let mut done = 0;
        for slice in self.iter() {
            done += slice.copy_to(&mut buffer[done..]);
        }
        done
    }

    fn write(&self, buffer: &[u8]) {
        let mut rest = buffer;
        for slice in self.iter() {
            let (now, later) = rest.split_at(slice.len().min(rest.len()));
            slice.copy_from(now);
            rest = later;
        }
    }
}

/// A packet the guest sends.
pub(crate) struct TxPacket<'a> {
    /// Its header, read once: what the guest changes later has no effect.
    pub(crate) header: Header,
    payload: Slices<'a>,
}

impl<'a> TxPacket<'a> {
    /// Reads the header of a chain and finds its payload, which may be shorter than the header
    /// says (see [`TxPacket::is_complete`]) but is never longer.
    pub(crate) fn parse(
        ram: &'a GuestRam,
        chain: DescriptorChain<&GuestRam>,
    ) -> Result<Self, ChainError> {
        let slices = Slices::collect(ram, chain, Permissions::Read)?;
        let mut bytes = [0; HEADER_SIZE];
        if slices.read(&mut bytes) < HEADER_SIZE {
            return Err(ChainError::TooShort(slices.bytes));
        }
        let header = Header::from_bytes(&bytes);
        let len = usize::try_from(header.len).unwrap_or(usize::MAX);
        Ok(Self { header, payload: slices.part(HEADER_SIZE, len)? })
    }

    /// Whether all the payload that the header speaks of is there.
    pub(crate) fn is_complete(&self) -> bool {
        u32::try_from(self.payload.bytes) == Ok(self.header.len)
    }

    /// Sends the payload to `socket` straight from guest memory; returns how much it took.
    pub(crate) fn send_to(&self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        sys::send_slices(socket, self.payload.iter())
    }

    /// Hands the payload from byte `start` on to `sink`, in pieces.
    pub(crate) fn copy_from(&self, start: usize, mut sink: impl FnMut(&[u8])) {
        let mut piece = [0; 1024];
        let mut skip = start;
        for slice in self.payload.iter() {
            let mut offset = skip.min(slice.len());
            skip -= offset;
            while let Ok(rest) = slice.offset(offset) {
                let count = rest.copy_to(&mut piece);
                if count == 0 {
                    break;
                }
                sink(&piece[..count]);
                offset += count;
            }
        }
    }
}

/// A buffer of the guest that waits for a packet.
pub(crate) struct RxPacket<'a> {
    header: Slices<'a>,
    payload: Slices<'a>,
}

impl<'a> RxPacket<'a> {
    /// Finds the room for header and payload in a chain.
    pub(crate) fn parse(
        ram: &'a GuestRam,
        chain: DescriptorChain<&GuestRam>,
    ) -> Result<Self, ChainError> {
        let slices = Slices::collect(ram, chain, Permissions::Write)?;
        // A buffer without room for payload could keep data waiting for ever.
        if slices.bytes <= HEADER_SIZE {
            return Err(ChainError::TooShort(slices.bytes));
        }
        Ok(Self {
            header: slices.part(0, HEADER_SIZE)?,
            payload: slices.part(HEADER_SIZE, usize::MAX)?,
        })
    }

    /// Receives up to `limit` bytes of payload from `socket` straight into guest memory.
    pub(crate) fn receive_from(&self, socket: BorrowedFd<'_>, limit: usize) -> io::Result<usize> {
        sys::receive_slices(socket, self.payload.iter(), limit)
    }

    /// Writes the header and returns the length of the whole packet in bytes.
    pub(crate) fn finish(&self, header: Header) -> u32 {
        self.header.write(&header.to_bytes());
        u32::try_from(HEADER_SIZE).unwrap_or(u32::MAX).saturating_add(header.len)
    }
}
