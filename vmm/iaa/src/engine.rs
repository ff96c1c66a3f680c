//! Chunks through a work queue: many at once, and by software whatever the device does not do.
//!
//! Everything a device reads or writes lies in the engine's arena, so chunks are copied in and
//! out, and no buffer of a caller is ever the target of a late write. A device that does not
//! answer in time is not used again, and its arena stays mapped for ever.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::abi::{Completion, Descriptor, Status, is_complete};
use crate::breaker::Breaker;
use crate::queue::{Queue, Submitted};
use crate::software::{Codec, CodecError, bound};
use crate::sys::arena::Arena;
use crate::sys::cpu::{Waiter, features};

mod health;
#[cfg(test)]
mod tests;

pub use health::{Health, Reason};

/// Time since any fixed moment; never goes back.
pub type Clock = Box<dyn Fn() -> Duration + Send>;

/// The system's clock.
pub fn system_clock() -> Clock {
    let start = Instant::now();
    Box::new(move || start.elapsed())
}

/// How an engine treats its device.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Whether the queue lets descriptors block on page faults.
    pub block_on_fault: bool,
    /// Most bytes of one transfer.
    pub max_transfer: u32,
    /// Whether what the device compressed is decompressed again by software, and compared: the
    /// device's checksum is that of its input, and tells nothing of its output.
    pub verify: bool,
    /// How long a piece of work may take, waiting for room in the queue apart.
    pub deadline: Duration,
    /// Failures in a row after which the device is left alone.
    pub failures: u32,
    /// For how long.
    pub rest: Duration,
}

/// A chunk to compress or to decompress.
#[derive(Debug, Clone, Copy)]
pub enum Chunk<'a> {
    /// Compress these bytes.
    Compress(&'a [u8]),
    /// Decompress these bytes into that many.
    Decompress(&'a [u8], usize),
}

/// Why a chunk could not be done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChunkError {
    /// It is larger than an engine takes.
    #[error("a chunk of {size} bytes is larger than {limit}: make it smaller")]
    TooLarge {
        /// Its uncompressed or compressed size in bytes.
        size: usize,
        /// The most.
        limit: usize,
    },
    /// Neither the device nor software could do it.
    #[error("a chunk could not be done by software either")]
    Software(#[from] CodecError),
}

/// What a slot is doing.
#[derive(Debug, Clone, Copy)]
enum Slot {
    Free,
    /// Loaded, to be submitted.
    Ready {
        index: usize,
        retried: bool,
        since: Duration,
    },
    /// At the device.
    Flying {
        index: usize,
        retried: bool,
        since: Duration,
    },
    /// Given up with the device, to be done by software.
    Abandoned {
        index: usize,
    },
}

/// Runs chunks through one work queue.
pub struct Engine {
    queue: Box<dyn Queue>,
    arena: Arc<Arena>,
    settings: Settings,
    clock: Clock,
    waiter: Waiter,
    breaker: Breaker,
    slots: Vec<Slot>,
    codec: Codec,
    scratch: Vec<u8>,
    verified: Vec<u8>,
    max_chunk: usize,
    health: Health,
    disabled: bool,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut text = f.debug_struct("Engine");
        text.field("queue", &self.queue).field("health", &self.health).finish_non_exhaustive()
    }
}

/// Where results go: the chunk's number and its bytes, in any order.
type Done<'a> = &'a mut dyn FnMut(usize, Result<&[u8], ChunkError>);

impl Engine {
    /// An engine over a queue whose descriptors name `arena`. It takes chunks of as many bytes as
    /// still fit the arena's slots and one transfer when they do not compress.
    pub fn new(queue: Box<dyn Queue>, arena: Arc<Arena>, settings: Settings, clock: Clock) -> Self {
        let transfer = usize::try_from(settings.max_transfer).unwrap_or(usize::MAX);
        let room = arena.capacity().min(transfer);
        // The inverse of `bound`, rounded down.
        let max_chunk = room.saturating_sub(64) / 9 * 8;
        let slots = vec![Slot::Free; arena.slots().min(queue.depth())];
        let breaker = Breaker::new(settings.failures, settings.rest);
        Self {
            queue,
            arena,
            settings,
            clock,
            waiter: Waiter::new(features()),
            breaker,
            slots,
            codec: Codec::new(),
            scratch: vec![0; bound(max_chunk)],
            verified: vec![0; if settings.verify { max_chunk } else { 0 }],
            max_chunk,
            health: Health::default(),
            disabled: false,
        }
    }

    /// Most bytes of an uncompressed chunk.
    pub fn max_chunk(&self) -> usize {
        self.max_chunk
    }

    /// What happened so far.
    pub fn health(&self) -> &Health {
        &self.health
    }

    /// Whether the device did not answer in time once, and is not used any more.
    pub fn is_disabled(&self) -> bool {
        self.disabled
    }

    /// Runs one chunk, and returns its bytes.
    ///
    /// # Errors
    /// [`ChunkError`].
    pub fn run_one(&mut self, chunk: Chunk<'_>) -> Result<Vec<u8>, ChunkError> {
        let mut result = Ok(Vec::new());
        self.run(&[chunk], &mut |_, bytes| result = bytes.map(<[u8]>::to_vec));
        result
    }

    /// Runs chunks, as many at once as the queue takes. `done` gets each one's number and bytes,
    /// in the order in which they end. Returns when all have ended, in bounded time.
    pub fn run(&mut self, chunks: &[Chunk<'_>], done: Done<'_>) {
        if self.slots.iter().any(|slot| matches!(slot, Slot::Flying { .. })) {
            // A caller's `done` panicked: what was under way then is lost.
            self.disable();
            self.slots.fill(Slot::Free);
        }
        let mut next = 0;
        while next < chunks.len() || self.slots.iter().any(|slot| !matches!(slot, Slot::Free)) {
            let filled = self.fill(chunks, &mut next, done);
            self.submit(chunks, done);
            self.recover(chunks, done);
            let ended = self.reap(chunks, done);
            if filled || ended {
                self.waiter.reset();
            } else {
                self.wait();
            }
        }
    }

    /// Loads chunks into free slots; those not for the device are done at once.
    fn fill(&mut self, chunks: &[Chunk<'_>], next: &mut usize, done: Done<'_>) -> bool {
        let before = *next;
        while let Some(chunk) = chunks.get(*next).copied() {
            let index = *next;
            if let Some(error) = self.refuse(chunk) {
                done(index, Err(error));
            } else if let Some(reason) = self.unsuited(chunk) {
                self.fall_back(index, chunk, reason, done);
            } else {
                let free = self.slots.iter().position(|slot| matches!(slot, Slot::Free));
                let Some(free) = free else { break };
                let now = (self.clock)();
                if !self.breaker.admits(now) {
                    self.fall_back(index, chunk, Reason::BreakerOpen, done);
                } else {
                    let (Chunk::Compress(source) | Chunk::Decompress(source, _)) = chunk;
                    self.arena.load(free, source);
                    if let Some(slot) = self.slots.get_mut(free) {
                        *slot = Slot::Ready { index, retried: false, since: now };
                    }
                }
            }
            *next = next.saturating_add(1);
        }
        *next > before
    }

    fn refuse(&self, chunk: Chunk<'_>) -> Option<ChunkError> {
        let limit = bound(self.max_chunk);
        let (size, limit) = match chunk {
            Chunk::Compress(source) => (source.len(), self.max_chunk),
            Chunk::Decompress(_, size) if size > self.max_chunk => (size, self.max_chunk),
            Chunk::Decompress(source, _) => (source.len(), limit),
        };
        (size > limit).then_some(ChunkError::TooLarge { size, limit })
    }

    fn unsuited(&self, chunk: Chunk<'_>) -> Option<Reason> {
        let empty = match chunk {
            Chunk::Compress(source) => source.is_empty(),
            Chunk::Decompress(source, size) => source.is_empty() || size == 0,
        };
        match (self.disabled, empty) {
            (true, _) => Some(Reason::Disabled),
            // Devices take no transfer of zero bytes.
            (false, true) => Some(Reason::Empty),
            (false, false) => None,
        }
    }

    fn descriptor(&self, slot: usize, chunk: Chunk<'_>) -> Descriptor {
        let record = self.arena.record(slot);
        let made = match chunk {
            Chunk::Compress(source) => Descriptor::compress(
                self.arena.source(slot, source.len()),
                self.arena.target(slot, bound(source.len())),
                self.arena.aecs(),
                record,
            ),
            Chunk::Decompress(source, size) => Descriptor::decompress(
                self.arena.source(slot, source.len()),
                self.arena.target(slot, size),
                record,
            ),
        };
        if self.settings.block_on_fault { made.blocking_on_fault() } else { made }
    }

    /// Submits what is ready, while there is room.
    fn submit(&mut self, chunks: &[Chunk<'_>], done: Done<'_>) {
        for at in 0..self.slots.len() {
            let Some(Slot::Ready { index, retried, since }) = self.slots.get(at).copied() else {
                continue;
            };
            let Some(chunk) = chunks.get(index).copied() else { continue };
            let now = (self.clock)();
            let result = self.queue.submit(&self.descriptor(at, chunk));
            let late = now.saturating_sub(since) > self.settings.deadline;
            let (slot, reason) = match result {
                Ok(Submitted::Accepted) => {
                    self.health.submitted += 1;
                    (Slot::Flying { index, retried, since: now }, None)
                }
                Ok(Submitted::Busy) if late => (Slot::Free, Some(Reason::Busy)),
                Ok(Submitted::Busy) => (Slot::Ready { index, retried, since }, None),
                Err(_) => (Slot::Free, Some(Reason::Submission)),
            };
            if let Some(to) = self.slots.get_mut(at) {
                *to = slot;
            }
            if let Some(reason) = reason {
                self.breaker.failed(now);
                self.fall_back(index, chunk, reason, done);
            } else if matches!(slot, Slot::Ready { .. }) {
                self.health.busy += 1;
                return;
            }
        }
    }

    /// Does by software what was given up with the device.
    fn recover(&mut self, chunks: &[Chunk<'_>], done: Done<'_>) {
        for at in 0..self.slots.len() {
            let Some(slot) = self.slots.get_mut(at) else { continue };
            let Slot::Abandoned { index } = *slot else { continue };
            *slot = Slot::Free;
            if let Some(chunk) = chunks.get(index).copied() {
                self.fall_back(index, chunk, Reason::Deadline, done);
            }
        }
    }

    /// Takes what has ended; true when something has.
    fn reap(&mut self, chunks: &[Chunk<'_>], done: Done<'_>) -> bool {
        let mut ended = false;
        for at in 0..self.slots.len() {
            let Some(Slot::Flying { index, retried, .. }) = self.slots.get(at).copied() else {
                continue;
            };
            let Some(chunk) = chunks.get(index).copied() else { continue };
            if !is_complete(self.arena.status(at)) {
                continue;
            }
            ended = true;
            self.queue.completed();
            self.health.completed += 1;
            let record = self.arena.completion(at);
            let again = record.status == Status::PageFault && !retried;
            let slot = if again && self.arena.touch(record.fault_addr) {
                self.health.retried += 1;
                self.arena.clear(at);
                Slot::Ready { index, retried: true, since: (self.clock)() }
            } else {
                Slot::Free
            };
            if let Some(to) = self.slots.get_mut(at) {
                *to = slot;
            }
            if matches!(slot, Slot::Free) {
                self.finish(at, index, chunk, &record, done);
            }
        }
        ended
    }

    /// Hands on what a descriptor made, or falls back.
    fn finish(
        &mut self,
        at: usize,
        index: usize,
        chunk: Chunk<'_>,
        record: &Completion,
        done: Done<'_>,
    ) {
        match self.check(at, chunk, record) {
            Ok(size) => {
                let bytes = self.scratch.get(..size).unwrap_or_default();
                self.breaker.succeeded();
                done(index, Ok(bytes));
            }
            Err(reason) => {
                let full = Reason::Status(Status::OutputOverflow);
                let innocent = match chunk {
                    // Bytes that do not compress are no fault of the device.
                    Chunk::Compress(_) => reason == full,
                    // Nor is a damaged chunk.
                    Chunk::Decompress(source, size) => {
                        let to = self.scratch.get_mut(..size).unwrap_or_default();
                        self.codec.decompress(source, to).is_err()
                    }
                };
                if innocent {
                    self.breaker.succeeded();
                } else {
                    self.breaker.failed((self.clock)());
                }
                self.fall_back(index, chunk, reason, done);
            }
        }
    }

    /// Copies what a descriptor made to the scratch buffer, if its record and its bytes say that
    /// all went well, and returns its size.
    fn check(&mut self, at: usize, chunk: Chunk<'_>, record: &Completion) -> Result<usize, Reason> {
        if record.status != Status::Success {
            return Err(Reason::Status(record.status));
        }
        let size = usize::try_from(record.output_size).or(Err(Reason::WrongSize))?;
        let fits = match chunk {
            Chunk::Compress(source) => size > 0 && size <= bound(source.len()),
            Chunk::Decompress(_, expected) => size == expected,
        };
        let made = self.scratch.get_mut(..size).filter(|_| fits).ok_or(Reason::WrongSize)?;
        self.arena.take(at, made);
        let plain = match chunk {
            Chunk::Compress(source) => source,
            Chunk::Decompress(..) => &*made,
        };
        if crc32fast::hash(plain) != record.crc {
            return Err(Reason::WrongChecksum);
        }
        if let (Chunk::Compress(source), true) = (chunk, self.settings.verify) {
            let again = self.verified.get_mut(..source.len()).unwrap_or_default();
            let read = self.codec.decompress(made, again);
            if read.is_err() || again != source {
                return Err(Reason::WrongOutput);
            }
        }
        Ok(size)
    }

    fn fall_back(&mut self, index: usize, chunk: Chunk<'_>, reason: Reason, done: Done<'_>) {
        self.health.fell_back(reason);
        let result = match chunk {
            Chunk::Compress(source) => self.codec.compress(source, &mut self.scratch),
            Chunk::Decompress(source, size) => {
                let to = self.scratch.get_mut(..size).unwrap_or_default();
                self.codec.decompress(source, to).map(|()| size)
            }
        };
        match result {
            Ok(size) => done(index, Ok(self.scratch.get(..size).unwrap_or_default())),
            Err(error) => done(index, Err(error.into())),
        }
    }

    /// Waits a little for the device, or gives it up.
    fn wait(&mut self) {
        let now = (self.clock)();
        let mut oldest: Option<(usize, Duration)> = None;
        for (at, slot) in self.slots.iter().enumerate() {
            if let Slot::Flying { since, .. } = slot
                && oldest.is_none_or(|(_, other)| *since < other)
            {
                oldest = Some((at, *since));
            }
        }
        let Some((at, since)) = oldest else { return std::thread::yield_now() };
        if now.saturating_sub(since) <= self.settings.deadline {
            self.waiter.wait(self.arena.status(at));
            return;
        }
        self.disable();
        for slot in &mut self.slots {
            if let Slot::Flying { index, .. } | Slot::Ready { index, .. } = *slot {
                *slot = Slot::Abandoned { index };
            }
        }
    }

    /// Never uses the device again, nor its memory.
    fn disable(&mut self) {
        self.disabled = true;
        self.arena.leak();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.slots.iter().any(|slot| matches!(slot, Slot::Flying { .. })) {
            self.arena.leak();
        }
    }
}
