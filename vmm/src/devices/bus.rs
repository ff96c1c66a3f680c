//! The port bus and the memory bus: which device answers at an address.
//!
//! A bus is built once, before the vCPUs run, and never changes. Looking up a device therefore
//! takes no lock; only the device's own lock is held while it answers.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use thiserror::Error;

use super::BusDevice;

/// A device shared by the buses it is on and by those that manage it.
pub type SharedDevice = Arc<Mutex<dyn BusDevice>>;

/// Two devices want the same addresses, or a range is empty or runs over the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the bus range of {size:#x} bytes at {start:#x} is empty or already taken")]
pub struct RangeError {
    /// First address.
    pub start: u64,
    /// Number of addresses.
    pub size: u64,
}

struct Range {
    start: u64,
    /// The last address, so that a range may end at the end of the address space.
    last: u64,
    device: SharedDevice,
}

/// Devices by address.
#[derive(Default)]
pub struct Bus {
    /// Ordered by address, without overlap.
    ranges: Vec<Range>,
}

impl fmt::Debug for Bus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.ranges.iter().map(|r| r.start..=r.last)).finish()
    }
}

impl Bus {
    /// Puts a device at `size` addresses from `start` on.
    ///
    /// # Errors
    /// [`RangeError`] when any of these addresses is taken already.
    pub fn insert(
        &mut self,
        start: u64,
        size: u64,
        device: SharedDevice,
    ) -> Result<(), RangeError> {
        let error = RangeError { start, size };
        let last = size.checked_sub(1).and_then(|n| start.checked_add(n)).ok_or(error)?;
        let at = self.ranges.partition_point(|range| range.last < start);
        if self.ranges.get(at).is_some_and(|range| range.start <= last) {
            return Err(error);
        }
        self.ranges.insert(at, Range { start, last, device });
        Ok(())
    }

    /// Lets the device at `address` fill `data`; where there is none the guest reads ones, as
    /// from an undriven bus.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        match self.find(address, data.len()) {
            Some(range) => {
                let mut device = range.device.lock().unwrap_or_else(PoisonError::into_inner);
                device.read(address - range.start, data);
            }
            None => data.fill(0xFF),
        }
    }

    /// Gives `data` to the device at `address`; where there is none it is dropped.
    pub fn write(&self, address: u64, data: &[u8]) {
        if let Some(range) = self.find(address, data.len()) {
            let mut device = range.device.lock().unwrap_or_else(PoisonError::into_inner);
            device.write(address - range.start, data);
        }
    }

    /// The range that holds all `len` bytes from `address` on. An access that leaves its device
    /// belongs to nobody.
    fn find(&self, address: u64, len: usize) -> Option<&Range> {
        let last = address.checked_add(u64::try_from(len).ok()?.checked_sub(1)?)?;
        let at = self.ranges.partition_point(|range| range.last < address);
        self.ranges.get(at).filter(|range| range.start <= address && last <= range.last)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Answers every read with its own mark and remembers writes.
    struct Mark(u8, Vec<(u64, Vec<u8>)>);

    impl BusDevice for Mark {
        fn read(&mut self, _offset: u64, data: &mut [u8]) {
            data.fill(self.0);
        }
        fn write(&mut self, offset: u64, data: &[u8]) {
            self.1.push((offset, data.to_vec()));
        }
    }

    fn mark(value: u8) -> Arc<Mutex<Mark>> {
        Arc::new(Mutex::new(Mark(value, Vec::new())))
    }

    #[test]
    fn a_write_reaches_its_device_with_the_offset_inside_it() {
        let device = mark(1);
        let mut bus = Bus::default();
        bus.insert(0x3F8, 8, device.clone()).unwrap();
        bus.write(0x3FB, &[7]);
        bus.write(0x400, &[8]);
        assert_eq!(device.lock().unwrap().1, [(3, vec![7])]);
    }

    #[test]
    fn nobody_answers_with_ones() {
        let bus = Bus::default();
        let mut data = [0; 4];
        bus.read(0x80, &mut data);
        assert_eq!(data, [0xFF; 4]);
    }

    #[test]
    fn an_access_over_the_end_of_a_device_is_not_its() {
        let mut bus = Bus::default();
        bus.insert(0x10, 4, mark(1)).unwrap();
        bus.insert(0x14, 4, mark(2)).unwrap();
        let mut data = [0; 4];
        bus.read(0x12, &mut data);
        assert_eq!(data, [0xFF; 4]);
    }

    #[test]
    fn an_empty_or_endless_range_is_refused() {
        let mut bus = Bus::default();
        bus.insert(0x10, 0, mark(1)).unwrap_err();
        bus.insert(u64::MAX, 2, mark(1)).unwrap_err();
    }

    proptest! {
        #[test]
        fn lookup_agrees_with_a_plain_search(
            wanted in proptest::collection::vec((0u64..200, 1u64..20), 0..12),
            address in 0u64..230,
            len in 1usize..9,
        ) {
            let mut bus = Bus::default();
            let mut placed: Vec<(u64, u64, u8)> = Vec::new();
            for (value, (start, size)) in (0u8..).zip(wanted) {
                let free = placed.iter().all(|(s, n, _)| start + size <= *s || s + n <= start);
                let inserted = bus.insert(start, size, mark(value));
                prop_assert_eq!(inserted.is_ok(), free);
                if free {
                    placed.push((start, size, value));
                }
            }
            let end = address + u64::try_from(len).unwrap();
            let expected = placed
                .iter()
                .find(|(s, n, _)| *s <= address && end <= s + n)
                .map_or(0xFF, |(_, _, value)| *value);
            let mut data = vec![0xEE; len];
            bus.read(address, &mut data);
            prop_assert_eq!(data, vec![expected; len]);
        }
    }
}
