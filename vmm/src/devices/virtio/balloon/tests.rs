//! Tests of the balloon against real, private guest memory.

use std::sync::Arc;

use proptest::prelude::*;
use vm_memory::GuestMemoryRegion as _;
use vm_memory::bitmap::Bitmap as _;
use vm_memory::mmap::MmapRegion;

use super::super::testing::{
    Driver, MEMORY, Machine, SEAM, check_hostile, check_restore, edits, interrupt, memory,
};
use super::super::{INTERRUPT_CONFIG, Interrupt};
use super::*;

const ALL: u64 = EVENT_IDX | F_STATS_VQ | F_DEFLATE_ON_OOM | F_REPORTING;
const LIST: u64 = 0x18_0000;
const MARK: u8 = 0x5A;

struct Guest {
    ram: Arc<GuestRam>,
    drivers: Vec<Driver>,
    balloon: Balloon,
    interrupt: Interrupt,
}

fn guest(features: u64) -> Guest {
    prepared(features, |_| {})
}

/// A guest whose driver does `prepare` before it says that it is ready.
fn prepared(features: u64, prepare: impl FnOnce(&mut [Driver])) -> Guest {
    let ram = memory();
    let mut balloon = Balloon::new(0, true);
    let mut drivers: Vec<_> = (0..balloon.required_queues(features))
        .map(|index| {
            let base = 0x10_0000 + 0x1_0000 * u64::try_from(index).unwrap();
            Driver::new(&ram, base, QUEUE_SIZE)
        })
        .collect();
    prepare(&mut drivers);
    let (interrupt, _) = interrupt();
    let refs: Vec<_> = drivers.iter().collect();
    balloon.activate(Driver::activation(&refs, &interrupt, features)).unwrap();
    Guest { ram, drivers, balloon, interrupt }
}

impl Guest {
    fn mark(&self, page: u64) {
        self.ram.write_obj(MARK, GuestAddress(page * PAGE)).unwrap();
    }

    fn marked(&self, page: u64) -> bool {
        self.ram.read_obj::<u8>(GuestAddress(page * PAGE)).unwrap() == MARK
    }

    fn inflate(&mut self, pages: &[u32]) {
        let bytes: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
        self.ram.write_slice(&bytes, GuestAddress(LIST)).unwrap();
        self.drivers[INFLATE].offer(&[(LIST, u32::try_from(bytes.len()).unwrap(), false)]);
        self.balloon.queue_event(INFLATE);
        assert_eq!(self.drivers[INFLATE].completed(), Some((0, 0)));
    }

    fn send_statistics(&mut self, entries: &[(u16, u64)]) {
        let mut bytes = Vec::new();
        for (tag, value) in entries {
            bytes.extend(tag.to_le_bytes());
            bytes.extend(value.to_le_bytes());
        }
        self.ram.write_slice(&bytes, GuestAddress(LIST)).unwrap();
        self.drivers[2].offer(&[(LIST, u32::try_from(bytes.len()).unwrap(), false)]);
        self.balloon.queue_event(2);
    }
}

#[test]
fn inflated_pages_are_dropped_and_others_stay() {
    let mut guest = guest(ALL);
    // On both sides of the seam between the regions, out of order and twice.
    let seam = u32::try_from(SEAM / PAGE).unwrap();
    (u64::from(seam) - 3..u64::from(seam) + 3).for_each(|page| guest.mark(page));
    guest.inflate(&[seam + 1, seam, seam - 1, seam - 2, seam]);
    let left: Vec<_> = (seam - 3..seam + 3).filter(|&page| guest.marked(u64::from(page))).collect();
    assert_eq!(left, [seam - 3, seam + 2]);
}

#[test]
fn dropped_pages_count_as_written() {
    let mut guest = guest(ALL);
    guest.ram.iter().for_each(|region| MmapRegion::bitmap(region).reset());
    guest.inflate(&[3]);
    let region = guest.ram.find_region(GuestAddress(0)).unwrap();
    let dirty: Vec<_> = (0..8).filter(|page| region.bitmap().dirty_at(page * 4096)).collect();
    assert_eq!(dirty, [3]);
}

#[test]
fn pages_outside_guest_memory_are_ignored() {
    let mut guest = guest(ALL);
    let last = u32::try_from(MEMORY / PAGE).unwrap() - 1;
    guest.mark(u64::from(last));
    guest.inflate(&[u32::MAX, last + 1, last, u32::MAX - 1]);
    assert!(!guest.marked(u64::from(last)));
    assert!(!guest.interrupt.needs_reset());
}

#[test]
fn deflation_is_taken_note_of() {
    let mut guest = guest(ALL);
    guest.mark(9);
    guest.ram.write_obj(9u32, GuestAddress(LIST)).unwrap();
    guest.drivers[DEFLATE].offer(&[(LIST, 4, false)]);
    guest.balloon.queue_event(DEFLATE);
    assert_eq!(guest.drivers[DEFLATE].completed(), Some((0, 0)));
    assert!(guest.marked(9));
}

#[test]
fn reported_runs_are_dropped_but_no_page_in_part() {
    let mut guest = guest(ALL);
    (8..16).for_each(|page| guest.mark(page));
    let half = 8 * PAGE + PAGE / 2;
    guest.drivers[3].offer(&[(half, 3 * 4096, true), (13 * PAGE, 4096, true)]);
    guest.balloon.queue_event(3);
    assert_eq!(guest.drivers[3].completed(), Some((0, 0)));
    let left: Vec<_> = (8..16).filter(|&page| guest.marked(page)).collect();
    assert_eq!(left, [8, 11, 12, 14, 15]);
}

#[test]
fn without_statistics_reporting_moves_to_their_queue() {
    let mut guest = guest(ALL & !F_STATS_VQ);
    guest.mark(8);
    guest.drivers[2].offer(&[(8 * PAGE, 4096, true)]);
    guest.balloon.queue_event(2);
    assert!(!guest.marked(8));
}

#[test]
fn reporting_is_offered_only_when_wanted() {
    let plain = Balloon::new(0, false);
    assert_eq!(plain.features() & F_REPORTING, 0);
    assert_eq!(plain.queue_sizes().len(), 3);
}

#[test]
fn the_target_is_in_the_config_space_and_a_change_is_told() {
    let mut guest = guest(ALL);
    guest.balloon.set_target(3);
    let mut target = [0; 4];
    guest.balloon.read_config(0, &mut target);
    assert_eq!(u32::from_le_bytes(target), 3 * 256);
    assert_eq!(guest.interrupt.status(), INTERRUPT_CONFIG);
}

#[test]
fn the_guest_says_how_large_the_balloon_is() {
    let mut guest = guest(ALL);
    guest.balloon.write_config(CONFIG_ACTUAL, &(5 * 256u32 + 255).to_le_bytes());
    assert_eq!(guest.balloon.actual_mib(), 5);
    guest.balloon.write_config(0, &[0xFF; 4]);
    guest.balloon.write_config(CONFIG_ACTUAL, &[0xFF; 3]);
    assert_eq!(guest.balloon.actual_mib(), 5);
}

#[test]
fn statistics_come_by_name_and_unknown_ones_are_skipped() {
    let mut guest = guest(ALL);
    guest.send_statistics(&[(4, 1 << 20), (5, 1 << 30), (77, 1)]);
    let expected: BTreeMap<String, u64> =
        [("free_memory".to_owned(), 1 << 20), ("total_memory".to_owned(), 1 << 30)].into();
    assert_eq!(guest.balloon.statistics(), expected);
}

#[test]
fn a_statistics_buffer_from_before_the_driver_was_ready_is_taken() {
    let mut guest = prepared(ALL, |drivers| drivers[2].offer(&[(LIST, 10, false)]));
    guest.balloon.statistics();
    assert_eq!(guest.drivers[2].completed(), Some((0, 0)));
}

#[test]
fn the_statistics_buffer_goes_back_when_new_figures_are_wanted() {
    let mut guest = guest(ALL);
    guest.send_statistics(&[(4, 1)]);
    assert_eq!(guest.drivers[2].completed(), None);
    guest.balloon.statistics();
    assert_eq!(guest.drivers[2].completed(), Some((0, 0)));
    guest.send_statistics(&[(4, 2)]);
    assert_eq!(guest.balloon.statistics()["free_memory"], 2);
}

proptest! {
    /// Whatever is listed or reported, nothing panics and pages not named stay.
    #[test]
    fn random_lists_touch_only_what_they_name(
        pages in prop::collection::vec(prop_oneof![0u32..32, any::<u32>()], 0..600),
        runs in prop::collection::vec((prop_oneof![0..40 * PAGE, any::<u64>()], 0u32..20_000), 1..8),
    ) {
        let mut guest = guest(ALL);
        (0..40).for_each(|page| guest.mark(page));
        guest.inflate(&pages);
        let pieces: Vec<_> = runs.iter().map(|&(addr, len)| (addr, len, true)).collect();
        guest.drivers[3].offer(&pieces);
        guest.balloon.queue_event(3);
        prop_assert!(guest.drivers[3].completed().is_some());
        for page in 0..40u64 {
            let listed = pages.iter().any(|&listed| u64::from(listed) == page);
            let reported = runs.iter().any(|&(addr, len)| {
                addr <= page * PAGE && (page + 1) * PAGE <= addr.saturating_add(len.into())
            });
            prop_assert_eq!(guest.marked(page), !(listed || reported), "page {}", page);
        }
    }
}

/// A balloon in use: a target, an inflated page, figures of which the device keeps the buffer, and
/// a report that it has not been kicked for.
fn in_use(machine: &mut Machine<Balloon>) {
    machine.device.lock().unwrap().set_target(3);
    machine.ram.write_obj(5u32.to_le(), GuestAddress(LIST)).unwrap();
    machine.drivers[INFLATE].offer(&[(LIST, 4, false)]);
    machine.kick(INFLATE);
    machine.ram.write_slice(&[4, 0, 77, 0, 0, 0, 0, 0, 0, 0], GuestAddress(LIST)).unwrap();
    machine.drivers[2].offer(&[(LIST, 10, false)]);
    machine.kick(2);
    machine.device.lock().unwrap().write_config(CONFIG_ACTUAL, &7u32.to_le_bytes());
    machine.ram.write_obj(MARK, GuestAddress(SEAM)).unwrap();
    machine.drivers[3].offer(&[(SEAM, 4096, true)]);
}

#[test]
fn a_restored_balloon_goes_on_where_it_was() {
    check_restore(
        || Balloon::new(1, true),
        in_use,
        |machine| {
            let config = machine.config();
            assert_eq!(config, (7 << 32) | (3 * 256));
            let reported = machine.drivers[3].completed();
            let marked: u8 = machine.ram.read_obj(GuestAddress(SEAM)).unwrap();
            assert_eq!((reported, marked), (Some((0, 0)), 0));
            // The kept buffer goes back, and new figures come in it.
            assert_eq!(machine.drivers[2].completed(), None);
            let figures = machine.device.lock().unwrap().statistics();
            assert_eq!(figures, BTreeMap::from([("free_memory".to_owned(), 77)]));
            assert_eq!(machine.drivers[2].completed(), Some((0, 0)));
            machine.drivers[INFLATE].completed()
        },
    );
}

proptest! {
    #[test]
    fn hostile_state_is_survived(edits in edits()) {
        check_hostile(Balloon::new(1, true), in_use, &edits);
    }
}
