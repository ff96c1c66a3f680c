//! The memory balloon (virtio 1.2 section 5.5): the guest gives pages back to the host.
//!
//! Three ways lead here. The guest puts pages into the balloon when told to (inflate), it reports
//! runs of free pages by itself (free page reporting), and it tells how much memory it has in
//! what state (statistics). Pages given back are dropped with one call per run.
//!
//! # What a dropped page holds
//! Guest memory is a private mapping, so a dropped page reads as what the mapping starts from:
//! zeroes for a machine that was booted, the page of its image for one that was restored. Both
//! are safe: the guest had either there before, and it promises not to care about the content
//! (VIRTIO_BALLOON_F_PAGE_POISON is not offered, so a guest that does care reports no pages).
//! Dropped pages count as written: they differ from what a checkpoint before has.

mod statistics;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;
use virtio_queue::DescriptorChain;
use vm_memory::{Address as _, Bytes as _, GuestAddress, GuestMemoryBackend as _};

use self::statistics::Statistics;
use super::queue::ActiveQueue;
use super::{ActivateError, Activation, EVENT_IDX, Interrupt, QueuePosition, VirtioDevice};
use crate::devices::{OwnState, StateError, ensure};
use crate::memory::GuestRam;
use crate::sys::reclaim;

const NAME: &str = "balloon";
const STATE_VERSION: u16 = 1;

/// Feature bits of section 5.5.3.
const F_STATS_VQ: u64 = 1 << 1;
const F_DEFLATE_ON_OOM: u64 = 1 << 2;
const F_REPORTING: u64 = 1 << 5;

/// Each queue's size; Linux reports up to 32 runs at a time.
const QUEUE_SIZE: u16 = 128;
const QUEUES: [u16; 4] = [QUEUE_SIZE; 4];

const INFLATE: usize = 0;
const DEFLATE: usize = 1;

/// The balloon counts in pages of this size, whatever the guest uses.
const PAGE: u64 = 4096;
const PAGES_PER_MIB: u32 = 256;

/// Page numbers looked at together, so that neighbours are dropped together; as many as Linux
/// sends at a time.
const BATCH: usize = 256;
/// Most page numbers taken from one chain.
const PAGES_PER_CHAIN_MAX: usize = 4096;

/// Offset of the balloon's size in the configuration space, after the target.
const CONFIG_ACTUAL: u64 = 4;

/// The balloon.
#[derive(Debug)]
pub struct Balloon {
    reporting: bool,
    target_pages: u32,
    actual_pages: u32,
    statistics: Statistics,
    active: Option<Active>,
}

/// What the balloon has besides its queues.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    target_pages: u32,
    actual_pages: u32,
    statistics: Statistics,
    kept: Option<u16>,
}

#[derive(Debug)]
struct Active {
    queues: Vec<ActiveQueue>,
    interrupt: Interrupt,
    features: u64,
    /// The statistics buffer, kept until new figures are wanted.
    kept: Option<u16>,
}

impl Active {
    fn new(activation: Activation, kept: Option<u16>) -> Self {
        let Activation { ram, queues, interrupt, features } = activation;
        let queues = queues
            .into_iter()
            .map(|queue| ActiveQueue::new(queue, ram.clone(), interrupt.clone()))
            .collect();
        Self { queues, interrupt, features, kept }
    }

    /// Whether the statistics queue can have given this chain.
    fn may_keep(&self, head: u16) -> bool {
        let queue = self.statistics_index().and_then(|index| self.queues.get(index));
        queue.is_some_and(|queue| head < queue.size())
    }

    /// The statistics queue's index, if the driver has one.
    fn statistics_index(&self) -> Option<usize> {
        (self.features & F_STATS_VQ != 0).then_some(2)
    }

    /// The reporting queue's index, if the driver has one. Queues that a driver does not use get
    /// no index.
    fn reporting_index(&self) -> Option<usize> {
        let index = if self.features & F_STATS_VQ != 0 { 3 } else { 2 };
        (self.features & F_REPORTING != 0).then_some(index)
    }
}

impl Balloon {
    /// Makes a balloon that is to take `target_mib` from the guest; with `reporting` the guest
    /// is also offered to report free pages.
    pub fn new(target_mib: u32, reporting: bool) -> Self {
        Self {
            reporting,
            target_pages: target_mib.saturating_mul(PAGES_PER_MIB),
            actual_pages: 0,
            statistics: Statistics::default(),
            active: None,
        }
    }

    /// Sets how much the balloon is to take from the guest, in MiB. The guest follows in its own
    /// time, and takes pages back when it runs out of memory.
    pub fn set_target(&mut self, target_mib: u32) {
        self.target_pages = target_mib.saturating_mul(PAGES_PER_MIB);
        if let Some(active) = &self.active {
            active.interrupt.signal_config();
        }
    }

    /// How much the balloon has taken from the guest, in MiB, as the guest says.
    pub fn actual_mib(&self) -> u32 {
        self.actual_pages / PAGES_PER_MIB
    }

    /// The guest's latest memory statistics, in bytes and counts, by the names of section
    /// 5.5.6.3; empty before the guest's driver runs. Asks the guest for new ones, so the next
    /// call has those of about now.
    pub fn statistics(&mut self) -> BTreeMap<String, u64> {
        if let Some(active) = &mut self.active
            && let Some(index) = active.statistics_index()
            && let Some(queue) = active.queues.get_mut(index)
            && let Some(head) = active.kept.take()
        {
            queue.give_back(head);
        }
        self.statistics.by_name()
    }

    fn config(&self) -> [u8; 8] {
        let [a, b, c, d] = self.target_pages.to_le_bytes();
        let [e, f, g, h] = self.actual_pages.to_le_bytes();
        [a, b, c, d, e, f, g, h]
    }
}

impl VirtioDevice for Balloon {
    fn name(&self) -> &'static str {
        NAME
    }

    fn device_id(&self) -> u32 {
        VIRTIO_ID_BALLOON
    }

    fn features(&self) -> u64 {
        let reporting = if self.reporting { F_REPORTING } else { 0 };
        EVENT_IDX | F_STATS_VQ | F_DEFLATE_ON_OOM | reporting
    }

    fn queue_sizes(&self) -> &[u16] {
        if self.reporting { &QUEUES } else { &QUEUES[..3] }
    }

    fn required_queues(&self, features: u64) -> usize {
        let optional = [F_STATS_VQ, F_REPORTING];
        2 + optional.iter().filter(|&&feature| features & feature != 0).count()
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        super::read_config_bytes(&self.config(), offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        if let (CONFIG_ACTUAL, Ok(actual)) = (offset, data.try_into()) {
            self.actual_pages = u32::from_le_bytes(actual);
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let active = self.active.insert(Active::new(activation, None));
        // Linux kicks this queue before it says that it is ready, when nobody can look yet.
        if let Some(index) = active.statistics_index() {
            self.queue_event(index);
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.active = None;
        self.actual_pages = 0;
        self.statistics = Statistics::default();
    }

    fn queue_positions(&self) -> Option<Vec<QueuePosition>> {
        let active = self.active.as_ref()?;
        Some(active.queues.iter().map(ActiveQueue::position).collect())
    }

    fn save(&self) -> Result<OwnState, StateError> {
        let state = State {
            target_pages: self.target_pages,
            actual_pages: self.actual_pages,
            statistics: self.statistics.clone(),
            kept: self.active.as_ref().and_then(|active| active.kept),
        };
        OwnState::encode(NAME, STATE_VERSION, &state)
    }

    fn restore(
        &mut self,
        state: &OwnState,
        activation: Option<Activation>,
    ) -> Result<(), StateError> {
        let State { target_pages, actual_pages, statistics, kept } =
            state.decode(NAME, STATE_VERSION)?;
        let active = activation.map(|activation| Active::new(activation, kept));
        let may_keep = |head| active.as_ref().is_some_and(|active| active.may_keep(head));
        ensure(kept.is_none_or(may_keep), NAME, "it keeps a buffer that it cannot have")?;
        self.target_pages = target_pages;
        self.actual_pages = actual_pages;
        self.statistics = statistics;
        self.active = active;
        Ok(())
    }

    fn queue_event(&mut self, index: usize) {
        let Some(active) = &mut self.active else { return };
        let (statistics, reporting) = (active.statistics_index(), active.reporting_index());
        let Some(queue) = active.queues.get_mut(index) else { return };
        if index == INFLATE {
            queue.drain(drop_listed);
        } else if index == DEFLATE {
            // Pages that leave the balloon come back when the guest touches them.
            queue.drain(|_, _| 0);
        } else if Some(index) == reporting {
            queue.drain(drop_reported);
        } else if Some(index) == statistics {
            while let Some((head, figures)) = queue.take(Statistics::read) {
                self.statistics = figures;
                if let Some(earlier) = active.kept.replace(head) {
                    queue.give_back(earlier);
                }
            }
        }
    }
}

/// Drops the pages whose numbers a chain lists (32 bits each, in any order).
fn drop_listed(ram: &GuestRam, chain: DescriptorChain<&GuestRam>) -> u32 {
    let mut budget = PAGES_PER_CHAIN_MAX;
    for descriptor in chain.readable() {
        let mut addr = descriptor.addr();
        let mut left = usize::try_from(descriptor.len() / 4).unwrap_or(0).min(budget);
        budget -= left;
        while left > 0 {
            let mut bytes = [0; BATCH * 4];
            let count = left.min(BATCH);
            if ram.read_slice(&mut bytes[..count * 4], addr).is_err() {
                return 0;
            }
            let mut pages = [0; BATCH];
            let (words, _) = bytes.as_chunks();
            for (page, word) in pages.iter_mut().zip(words) {
                *page = u32::from_le_bytes(*word);
            }
            drop_pages(ram, &mut pages[..count]);
            left -= count;
            let Some(next) = addr.checked_add((BATCH * 4) as u64) else { return 0 };
            addr = next;
        }
    }
    0
}

/// Drops pages by number, neighbours together.
fn drop_pages(ram: &GuestRam, pages: &mut [u32]) {
    pages.sort_unstable();
    for run in pages.chunk_by(|a, b| b - a <= 1) {
        if let (Some(&first), Some(&last)) = (run.first(), run.last()) {
            let start = u64::from(first) * PAGE;
            drop_range(ram, start, (u64::from(last) + 1) * PAGE);
        }
    }
}

/// Drops the runs of free pages that a chain's buffers are.
fn drop_reported(ram: &GuestRam, chain: DescriptorChain<&GuestRam>) -> u32 {
    for descriptor in chain.writable() {
        let start = descriptor.addr().0;
        let end = start.saturating_add(u64::from(descriptor.len()));
        if let Some(start) = start.checked_next_multiple_of(PAGE) {
            drop_range(ram, start, end - end % PAGE);
        }
    }
    0
}

/// Drops what of a page-aligned range is guest memory, from its start up to the first byte that
/// is not.
fn drop_range(ram: &GuestRam, start: u64, end: u64) {
    let len = end.checked_sub(start).and_then(|len| usize::try_from(len).ok()).unwrap_or(0);
    for slice in ram.get_slices(GuestAddress(start), len).map_while(Result::ok) {
        if let Err(error) = reclaim::drop_pages(&slice) {
            tracing::debug!(%error, "pages given back by the guest were not dropped");
        }
    }
}
