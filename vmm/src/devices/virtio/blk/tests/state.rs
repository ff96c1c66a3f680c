//! A disk's state across save and restore.

use proptest::prelude::*;

use super::super::super::testing::{Machine, check_hostile, check_restore, edits};
use super::*;

const READ: u64 = SEAM + 0x1000;

fn disk() -> Blk {
    let (file, _) = image(64 * 512);
    Blk::new(Box::new(Raw::new(file).unwrap()), false, "disk-1").unwrap()
}

/// Asks for a sector, in the first descriptors of the table, without a kick.
fn ask(machine: &mut Machine<Blk>, sector: u64) {
    let header = [&[0; 8][..], &sector.to_le_bytes()].concat();
    machine.ram.write_slice(&header, GuestAddress(REQUEST)).unwrap();
    machine.drivers[0].offer(&[(REQUEST, 16, false), (READ, 512, true), (READ + 512, 1, true)]);
}

fn answer(machine: &mut Machine<Blk>) -> (Option<(u32, u32)>, Vec<u8>) {
    let mut data = vec![0; 513];
    machine.ram.read_slice(&mut data, GuestAddress(READ)).unwrap();
    (machine.drivers[0].completed(), data)
}

/// One request is answered and seen, one is under way.
fn in_use(machine: &mut Machine<Blk>) {
    ask(machine, 1);
    machine.kick(0);
    machine.drivers[0].completed();
    ask(machine, 2);
}

#[test]
fn a_restored_disk_answers_what_is_open_and_what_comes() {
    let content = image(64 * 512).1;
    check_restore(disk, in_use, |machine| {
        let open = answer(machine);
        assert_eq!(open.0, Some((0, 513)));
        assert_eq!(open.1[..512], content[1024..1536]);
        ask(machine, 3);
        machine.kick(0);
        (open, answer(machine))
    });
}

#[test]
fn the_state_of_a_disk_of_another_size_is_refused() {
    let mut large = disk();
    let state = disk().save().unwrap();
    large.restore(&state, None).unwrap();
    let backend = Raw::new(image(65 * 512).0).unwrap();
    let error = Blk::new(Box::new(backend), false, "").unwrap().restore(&state, None).unwrap_err();
    assert!(error.to_string().contains("device blk"), "{error}");
}

proptest! {
    #[test]
    fn hostile_state_is_survived(edits in edits()) {
        check_hostile(disk(), in_use, &edits);
    }
}
