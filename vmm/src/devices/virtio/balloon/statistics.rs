//! Memory statistics as the guest sends them: a list of tags and values (section 5.5.6.3).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use virtio_queue::DescriptorChain;
use vm_memory::Bytes as _;

use crate::memory::GuestRam;

/// Names by tag.
const NAMES: [&str; 10] = [
    "swap_in",
    "swap_out",
    "major_faults",
    "minor_faults",
    "free_memory",
    "total_memory",
    "available_memory",
    "disk_caches",
    "hugetlb_allocations",
    "hugetlb_failures",
];

/// Bytes of one entry: a tag of 16 bits and a value of 64.
const ENTRY: usize = 10;

/// Most entries looked at; newer guests send some that have no name here.
const ENTRIES_MAX: usize = 64;

/// One set of figures.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Statistics {
    values: [Option<u64>; NAMES.len()],
}

impl Statistics {
    /// Reads what a chain's buffers hold; unknown tags are skipped, and reading ends where the
    /// buffers do.
    pub(super) fn read(ram: &GuestRam, chain: DescriptorChain<&GuestRam>) -> Self {
        let mut bytes = [0; ENTRY * ENTRIES_MAX];
        let mut filled = 0;
        for descriptor in chain.readable() {
            let rest = &mut bytes[filled..];
            let len = usize::try_from(descriptor.len()).unwrap_or(usize::MAX).min(rest.len());
            if ram.read_slice(&mut rest[..len], descriptor.addr()).is_err() {
                break;
            }
            filled += len;
        }
        let mut statistics = Self::default();
        let (entries, _) = bytes[..filled].as_chunks::<ENTRY>();
        for [t0, t1, value @ ..] in entries {
            let tag = usize::from(u16::from_le_bytes([*t0, *t1]));
            if let Some(slot) = statistics.values.get_mut(tag) {
                *slot = Some(u64::from_le_bytes(*value));
            }
        }
        statistics
    }

    pub(super) fn by_name(&self) -> BTreeMap<String, u64> {
        NAMES
            .iter()
            .zip(self.values)
            .filter_map(|(name, value)| Some(((*name).to_owned(), value?)))
            .collect()
    }
}
