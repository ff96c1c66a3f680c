//! What an engine counts.

use std::collections::BTreeMap;
use std::fmt;

use crate::abi::Status;

/// Why a chunk was done by software.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// The device ended with this status.
    Status(Status),
    /// The device's output has another size than it may have.
    WrongSize,
    /// The device's checksum is not that of the data.
    WrongChecksum,
    /// What the device compressed does not decompress to what it was.
    WrongOutput,
    /// The queue had no room in time.
    Busy,
    /// The queue took no descriptor.
    Submission,
    /// The device did not answer in time.
    Deadline,
    /// The device is left alone after failures.
    BreakerOpen,
    /// The device is not used any more.
    Disabled,
    /// There is nothing to do.
    Empty,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Status(status) => return status.fmt(f),
            Self::WrongSize => "output of a wrong size",
            Self::WrongChecksum => "a wrong checksum",
            Self::WrongOutput => "output that does not decompress to what it was",
            Self::Busy => "a full queue",
            Self::Submission => "a queue that takes no descriptor",
            Self::Deadline => "no answer in time",
            Self::BreakerOpen => "a device left alone after failures",
            Self::Disabled => "a device that did not answer before",
            Self::Empty => "nothing to do",
        })
    }
}

/// Counters since the engine was made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Health {
    /// Descriptors that the queue accepted.
    pub submitted: u64,
    /// Descriptors whose record came.
    pub completed: u64,
    /// Descriptors submitted again after a page fault.
    pub retried: u64,
    /// Submissions that found the queue full.
    pub busy: u64,
    /// Chunks done by software, by reason.
    pub fallbacks: BTreeMap<Reason, u64>,
}

impl Health {
    pub(super) fn fell_back(&mut self, reason: Reason) {
        let count = self.fallbacks.entry(reason).or_default();
        *count = count.saturating_add(1);
    }
}
