//! The pieces of guest memory that one request reads from or writes to.

use vm_memory::bitmap::{AtomicBitmap, BS};
use vm_memory::{GuestAddress, GuestMemoryBackend as _, VolatileSlice};

use crate::memory::GuestRam;

/// A piece of guest memory inside one region; never empty.
#[derive(Debug, Clone, Copy)]
pub(super) struct Segment {
    pub(super) addr: GuestAddress,
    pub(super) len: usize,
}

/// A list of segments, or a part of what they cover, seen as one run of bytes.
#[derive(Debug, Clone, Copy)]
pub struct Buffers<'a> {
    ram: &'a GuestRam,
    segments: &'a [Segment],
    /// Bytes of the first segment that are not part of it.
    skip: usize,
    len: usize,
}

impl<'a> Buffers<'a> {
    pub(super) fn new(ram: &'a GuestRam, segments: &'a [Segment]) -> Self {
        let len = segments.iter().map(|segment| segment.len).sum();
        Self { ram, segments, skip: 0, len }
    }

    /// Bytes in all.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Cuts off the first `count` bytes, or all if there are fewer, and returns them.
    pub fn split_front(&mut self, count: usize) -> Self {
        let count = count.min(self.len);
        let front = Self { len: count, ..*self };
        self.len -= count;
        self.skip += count;
        while let Some((first, rest)) = self.segments.split_first()
            && self.skip >= first.len
        {
            self.skip -= first.len;
            self.segments = rest;
        }
        front
    }

    /// The bytes as slices of guest memory.
    pub fn slices(
        &self,
    ) -> impl Iterator<Item = VolatileSlice<'a, BS<'a, AtomicBitmap>>> + Clone + use<'a> {
        let Self { ram, segments, mut skip, mut len } = *self;
        segments.iter().map_while(move |segment| {
            let from = std::mem::take(&mut skip);
            let count = segment.len.checked_sub(from)?.min(len);
            len -= count;
            let addr = segment.addr.0.checked_add(u64::try_from(from).ok()?)?;
            // Segments were checked when they were made and guest memory does not change its
            // shape, so this finds all of them.
            (count > 0).then(|| ram.get_slice(GuestAddress(addr), count).ok())?
        })
    }

    /// Takes as many bytes as `target` has off the front and copies them there; `false`, with
    /// nothing taken, if there are fewer.
    pub(super) fn take_bytes(&mut self, target: &mut [u8]) -> bool {
        if target.len() > self.len {
            return false;
        }
        let mut rest = target;
        for slice in self.split_front(rest.len()).slices() {
            let Some((now, later)) = rest.split_at_mut_checked(slice.len()) else { break };
            slice.copy_to(now);
            rest = later;
        }
        true
    }

    /// Copies `source` to the front; the caller has checked that it fits.
    pub(super) fn put_bytes(&self, mut source: &[u8]) {
        for slice in self.slices() {
            let (now, later) = source.split_at(slice.len().min(source.len()));
            slice.copy_from(now);
            source = later;
        }
    }
}
