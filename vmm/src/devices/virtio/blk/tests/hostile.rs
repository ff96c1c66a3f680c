//! Chains that no driver would make.

use proptest::prelude::*;
use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};

use super::*;

const HEADER: u64 = 0x10_0000;
const STATUS: u64 = 0x10_1000;
const DATA: u64 = 0x10_2000;

fn guest() -> Guest {
    let guest = Guest::raw(&image(64 * 512).0);
    guest.ram.write_obj(STATUS_UNSET, GuestAddress(STATUS)).unwrap();
    guest
}

/// The status byte and the length that come back for a chain.
fn outcome(pieces: &[Piece]) -> (u8, u32) {
    let mut guest = guest();
    guest.driver.offer(pieces);
    guest.blk.queue_event(0);
    let (_, written) = guest.driver.completed().unwrap();
    (guest.ram.read_obj(GuestAddress(STATUS)).unwrap(), written)
}

#[test]
fn data_outside_guest_memory_is_an_error() {
    for addr in [MEMORY, MEMORY - 256, u64::MAX - 511, u64::MAX] {
        let pieces = [(HEADER, 16, false), (addr, 512, true), (STATUS, 1, true)];
        assert_eq!(outcome(&pieces), (1, 0), "data at {addr:#x}");
    }
}

#[test]
fn a_status_outside_guest_memory_is_not_written() {
    for addr in [MEMORY, u64::MAX] {
        let pieces = [(HEADER, 16, false), (DATA, 512, true), (addr, 1, true)];
        assert_eq!(outcome(&pieces), (STATUS_UNSET, 0));
    }
}

#[test]
fn a_header_that_is_too_short_is_an_error() {
    assert_eq!(outcome(&[(HEADER, 15, false), (STATUS, 1, true)]), (1, 0));
}

#[test]
fn a_chain_without_room_for_a_status_is_dropped() {
    assert_eq!(outcome(&[(HEADER, 16, false)]), (STATUS_UNSET, 0));
    assert_eq!(outcome(&[(HEADER, 16, false), (STATUS, 0, true)]), (STATUS_UNSET, 0));
}

#[test]
fn reading_after_writing_descriptors_is_an_error() {
    let pieces = [(HEADER, 16, false), (DATA, 512, true), (DATA, 512, false), (STATUS, 1, true)];
    assert_eq!(outcome(&pieces), (1, 0));
}

#[test]
fn empty_descriptors_do_no_harm() {
    let pieces = [
        (DATA, 0, false),
        (HEADER, 16, false),
        (u64::MAX, 0, true),
        (DATA, 512, true),
        (STATUS, 1, true),
    ];
    assert_eq!(outcome(&pieces), (0, 513));
}

#[test]
fn a_chain_that_bites_its_tail_is_dropped() {
    let mut guest = guest();
    let next = u16::try_from(VRING_DESC_F_NEXT).unwrap();
    guest.driver.describe(0, HEADER, 16, next, 1);
    guest.driver.describe(1, STATUS, 1, next | u16::try_from(VRING_DESC_F_WRITE).unwrap(), 1);
    guest.driver.publish(0);
    guest.blk.queue_event(0);
    assert_eq!(guest.driver.completed(), Some((0, 0)));
    assert_eq!(guest.ram.read_obj::<u8>(GuestAddress(STATUS)).unwrap(), STATUS_UNSET);
}

#[test]
fn more_segments_than_allowed_are_an_error() {
    // An indirect table can hold more descriptors than the queue.
    let mut guest = guest();
    let table = 0x12_0000;
    let count: u16 = 400;
    for index in 0..count {
        let last = index + 1 == count;
        let flags = match index {
            0 => VRING_DESC_F_NEXT,
            _ if last => VRING_DESC_F_WRITE,
            _ => VRING_DESC_F_NEXT | VRING_DESC_F_WRITE,
        };
        let addr = if last { STATUS } else { DATA };
        let at = GuestAddress(table + 16 * u64::from(index));
        let len: u32 = if index == 0 { 16 } else { 1 };
        guest.ram.write_obj(addr, at).unwrap();
        guest.ram.write_obj(len, GuestAddress(at.0 + 8)).unwrap();
        guest.ram.write_obj(u16::try_from(flags).unwrap(), GuestAddress(at.0 + 12)).unwrap();
        guest.ram.write_obj(index + 1, GuestAddress(at.0 + 14)).unwrap();
    }
    let indirect = u16::try_from(VRING_DESC_F_INDIRECT).unwrap();
    guest.driver.describe(0, table, 16 * u32::from(count), indirect, 0);
    guest.driver.publish(0);
    guest.blk.queue_event(0);
    assert_eq!(guest.driver.completed(), Some((0, 0)));
    assert_eq!(guest.ram.read_obj::<u8>(GuestAddress(STATUS)).unwrap(), 1);
}

#[test]
fn an_available_index_out_of_reach_asks_for_a_reset() {
    let mut guest = guest();
    guest.driver.set_available(QUEUE_SIZE + 1);
    guest.blk.queue_event(0);
    assert!(guest.interrupt.needs_reset());
    // Nothing more is done, not even with a sensible index.
    guest.driver.set_available(0);
    guest.driver.offer(&[(HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true)]);
    guest.blk.queue_event(0);
    assert_eq!(guest.driver.completed(), None);
}

#[test]
fn a_head_outside_the_table_asks_for_a_reset() {
    let mut guest = guest();
    guest.driver.publish(QUEUE_SIZE);
    guest.blk.queue_event(0);
    assert!(guest.interrupt.needs_reset());
}

fn descriptor() -> impl Strategy<Value = (u64, u32, u16, u16)> {
    let addr = prop_oneof![
        8 => 0..MEMORY,
        2 => MEMORY - 5000..MEMORY + 5000,
        2 => SEAM - 5000..SEAM + 5000,
        1 => any::<u64>(),
    ];
    let len = prop_oneof![4 => Just(16u32), 4 => (0u32..20).prop_map(|n| n * 512), 2 => 0u32..40, 1 => any::<u32>()];
    (addr, len, 0u16..8, 0u16..24)
}

proptest! {
    /// Random tables, a random header in each readable place: nothing panics, the file keeps its
    /// size, and each chain comes back unless the device asks for a reset.
    #[test]
    fn random_chains_do_no_harm(
        descriptors in prop::collection::vec(descriptor(), 20),
        headers in prop::collection::vec((0u32..16, 0u64..70), 20),
        heads in prop::collection::vec(0u16..24, 1..8),
    ) {
        let (file, _) = image(64 * 512);
        let mut guest = Guest::raw(&file);
        for (index, (addr, len, flags, next)) in (0..).zip(&descriptors) {
            // The rings stay as they are, so that the chains keep being taken.
            let addr = if *addr < 0x2_0000 { addr + 0x2_0000 } else { *addr };
            guest.driver.describe(index, addr, *len, *flags, *next);
            let (kind, sector) = headers[usize::from(index)];
            let _ = guest.ram.write_obj(kind, GuestAddress(addr));
            let _ = guest.ram.write_obj(sector, GuestAddress(addr.wrapping_add(8)));
        }
        for head in &heads {
            guest.driver.publish(*head);
        }
        guest.blk.queue_event(0);
        let mut back = 0;
        while guest.driver.completed().is_some() {
            back += 1;
        }
        prop_assert_eq!(back, heads.len());
        prop_assert!(!guest.interrupt.needs_reset());
        prop_assert_eq!(file.metadata().unwrap().len(), 64 * 512);
    }
}
