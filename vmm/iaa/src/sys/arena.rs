//! The memory that a device reads and writes: the AECS once, then for each slot a completion
//! record, a source and a destination.
//!
//! A device that did not answer in time may still write, so an arena can be left mapped for ever:
//! no later allocation gets its addresses.

use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use crate::abi::{Completion, Descriptor, RECORD_SIZE, Region};
use crate::aecs;

const PAGE: usize = 4096;

/// Memory of slots, in one mapping, all of it present.
#[derive(Debug)]
pub struct Arena {
    start: NonNull<u8>,
    size: usize,
    slots: usize,
    capacity: usize,
    leaked: AtomicBool,
}

// SAFETY: the mapping belongs to the process; bytes are only reached by the calls below, and who
// may do so when is the matter of completion records: the device's side before, ours after.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps and touches memory for `slots` slots, whose source and destination have `capacity`
    /// bytes each, rounded up to pages.
    ///
    /// # Errors
    /// Those of `mmap`; sizes that overflow.
    pub fn new(slots: usize, capacity: usize) -> io::Result<Self> {
        let too_big = || io::Error::from(io::ErrorKind::OutOfMemory);
        let capacity = capacity.checked_next_multiple_of(PAGE).ok_or_else(too_big)?;
        let stride = capacity.checked_mul(2).and_then(|both| both.checked_add(PAGE));
        let size = stride
            .and_then(|stride| stride.checked_mul(slots))
            .and_then(|size| size.checked_add(PAGE))
            .filter(|_| u32::try_from(capacity).is_ok())
            .ok_or_else(too_big)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing one.
        let start = unsafe { libc::mmap(ptr::null_mut(), size, protection, flags, -1, 0) };
        let start = match NonNull::new(start.cast::<u8>()) {
            Some(start) if start.as_ptr().cast() != libc::MAP_FAILED => start,
            _ => return Err(io::Error::last_os_error()),
        };
        let this = Self { start, size, slots, capacity, leaked: AtomicBool::new(false) };
        this.put(0, &aecs::fixed());
        Ok(this)
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Bytes of each slot's source, and of its destination.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The AECS of compression.
    pub fn aecs(&self) -> Region {
        self.region(0, aecs::SIZE)
    }

    /// Address of a slot's completion record.
    pub fn record(&self, slot: usize) -> u64 {
        self.region(self.base(slot), RECORD_SIZE).addr
    }

    /// The first `size` bytes of a slot's source.
    pub fn source(&self, slot: usize, size: usize) -> Region {
        self.region(self.base(slot) + PAGE, size.min(self.capacity))
    }

    /// The first `size` bytes of a slot's destination.
    pub fn target(&self, slot: usize, size: usize) -> Region {
        self.region(self.base(slot) + PAGE + self.capacity, size.min(self.capacity))
    }

    /// Fills a slot's source and clears its record. False when the bytes do not fit.
    pub fn load(&self, slot: usize, bytes: &[u8]) -> bool {
        if bytes.len() > self.capacity {
            return false;
        }
        self.put(self.base(slot) + PAGE, bytes);
        self.clear(slot);
        true
    }

    /// Clears a slot's record, before it is submitted.
    pub fn clear(&self, slot: usize) {
        self.put(self.base(slot), &[0; RECORD_SIZE]);
    }

    /// A slot's status byte.
    pub fn status(&self, slot: usize) -> &AtomicU8 {
        let at = self.start.as_ptr().wrapping_add(self.base(slot));
        // SAFETY: the byte lies in the mapping, which lives as long as `self`; while work is
        // under way it is only reached atomically.
        unsafe { AtomicU8::from_ptr(at) }
    }

    /// A slot's completion record, to be read once its status is not zero.
    pub fn completion(&self, slot: usize) -> Completion {
        let mut bytes = [0; RECORD_SIZE];
        self.get(self.base(slot), &mut bytes);
        Completion::parse(&bytes)
    }

    /// Copies the first bytes of a slot's destination.
    pub fn take(&self, slot: usize, to: &mut [u8]) {
        let room = to.len().min(self.capacity);
        let at = self.base(slot) + PAGE + self.capacity;
        if let Some(to) = to.get_mut(..room) {
            self.get(at, to);
        }
    }

    /// Touches the page at an address, by a write when asked. False when it lies elsewhere.
    pub fn touch(&self, addr: u64) -> bool {
        let Some(at) = self.offset(addr, 1) else { return false };
        let mut byte = [0];
        self.get(at, &mut byte);
        self.put(at, &byte);
        true
    }

    /// Leaves the memory mapped for ever: a device may still write to it.
    pub fn leak(&self) {
        self.leaked.store(true, Ordering::Relaxed);
    }

    /// Whether the memory stays mapped for ever.
    pub fn is_leaked(&self) -> bool {
        self.leaked.load(Ordering::Relaxed)
    }

    /// Whether everything a descriptor names lies in here.
    pub fn holds(&self, descriptor: &Descriptor) -> bool {
        let within = |region: Region| {
            usize::try_from(region.size).is_ok_and(|size| self.offset(region.addr, size).is_some())
        };
        let record = self.offset(descriptor.record(), RECORD_SIZE).is_some();
        let aecs = descriptor.aecs().size == 0 || within(descriptor.aecs());
        record && aecs && within(descriptor.source()) && within(descriptor.target())
    }

    /// What the device's model reads at an address.
    pub(crate) fn device_read(&self, region: Region) -> Option<Vec<u8>> {
        let size = usize::try_from(region.size).ok()?;
        let at = self.offset(region.addr, size)?;
        let mut bytes = vec![0; size];
        self.get(at, &mut bytes);
        Some(bytes)
    }

    /// What the device's model writes at an address.
    pub(crate) fn device_write(&self, addr: u64, bytes: &[u8]) -> Option<()> {
        self.put(self.offset(addr, bytes.len())?, bytes);
        Some(())
    }

    /// How the device's model completes a record: the status last.
    pub(crate) fn device_complete(&self, addr: u64, record: &Completion) -> Option<()> {
        let bytes = record.to_bytes();
        let at = self.offset(addr, RECORD_SIZE)?;
        self.put(at + 1, &bytes[1..]);
        let status = self.start.as_ptr().wrapping_add(at);
        // SAFETY: the byte lies in the mapping and is only reached atomically now.
        unsafe { AtomicU8::from_ptr(status) }.store(bytes[0], Ordering::Release);
        Some(())
    }

    /// Offset of a slot. One that is not there is none of the callers' business: it wraps.
    fn base(&self, slot: usize) -> usize {
        PAGE + (slot % self.slots.max(1)) * (PAGE + 2 * self.capacity)
    }

    fn region(&self, at: usize, size: usize) -> Region {
        let addr = self.start.as_ptr().wrapping_add(at).addr();
        // No region is larger than a slot's capacity, which fits 32 bits.
        Region { addr: addr as u64, size: u32::try_from(size).unwrap_or(u32::MAX) }
    }

    /// Offset of `size` bytes at an address, all in here.
    fn offset(&self, addr: u64, size: usize) -> Option<usize> {
        let at = usize::try_from(addr).ok()?.checked_sub(self.start.as_ptr().addr())?;
        (at.checked_add(size)? <= self.size).then_some(at)
    }

    fn get(&self, at: usize, to: &mut [u8]) {
        if at.checked_add(to.len()).is_none_or(|end| end > self.size) {
            return;
        }
        let from = self.start.as_ptr().wrapping_add(at);
        // SAFETY: the bytes lie in the mapping, and `to` is a buffer of our own.
        unsafe { ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
    }

    fn put(&self, at: usize, from: &[u8]) {
        if at.checked_add(from.len()).is_none_or(|end| end > self.size) {
            return;
        }
        let to = self.start.as_ptr().wrapping_add(at);
        // SAFETY: the bytes lie in the mapping, and `from` is a buffer of our own.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if !self.is_leaked() {
            // SAFETY: the mapping is this value's own and nothing refers to it any more.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.size) };
        }
    }
}
