//! Tests of the entropy device.

use proptest::proptest;
use vm_memory::GuestAddress;

use super::super::testing::{
    Driver, MEMORY, Machine, SEAM, check_hostile, check_restore, edits, interrupt, memory,
};
use super::*;

const BUFFER: u64 = SEAM - 100;

/// What came back for a chain of pieces, and the memory at [`BUFFER`] after it.
fn ask(pieces: &[super::super::testing::Piece]) -> (u32, Vec<u8>) {
    let ram = memory();
    let mut driver = Driver::new(&ram, 0x1000, QUEUE_SIZE);
    let mut rng = Rng::default();
    rng.activate(Driver::activation(&[&driver], &interrupt().0, EVENT_IDX)).unwrap();
    driver.offer(pieces);
    rng.queue_event(0);
    let (_, written) = driver.completed().unwrap();
    let mut data = vec![0; 8192];
    ram.read_slice(&mut data, GuestAddress(BUFFER)).unwrap();
    (written, data)
}

fn zeroes(data: &[u8]) -> usize {
    data.iter().filter(|&&byte| byte == 0).count()
}

#[test]
fn a_buffer_is_filled_and_nothing_after_it() {
    let (written, data) = ask(&[(BUFFER, 1000, true)]);
    assert_eq!(written, 1000);
    // About 4 of 1000 random bytes are zero; 60 would be a wonder.
    assert!(zeroes(&data[..1000]) < 60);
    assert_eq!(zeroes(&data[1000..]), data.len() - 1000);
}

#[test]
fn two_requests_differ() {
    let pieces = [(BUFFER, 64, true)];
    assert_ne!(ask(&pieces).1[..64], ask(&pieces).1[..64]);
}

#[test]
fn a_request_has_a_limit_over_all_its_buffers() {
    let (written, data) = ask(&[(BUFFER, 3000, true), (BUFFER + 3000, u32::MAX - 3000, true)]);
    assert_eq!(written, 4096);
    assert_eq!(zeroes(&data[4096..]), data.len() - 4096);
}

#[test]
fn buffers_outside_guest_memory_get_nothing() {
    for addr in [MEMORY, MEMORY - 8, u64::MAX] {
        assert_eq!(ask(&[(addr, 64, true)]).0, 0);
    }
}

#[test]
fn a_buffer_the_device_may_not_write_stays() {
    let (written, data) = ask(&[(BUFFER, 64, false)]);
    assert_eq!((written, zeroes(&data)), (0, data.len()));
}

/// The driver has two requests under way, one of which the device has not been kicked for.
fn two_requests(machine: &mut Machine<Rng>) {
    machine.drivers[0].offer(&[(BUFFER, 8, true)]);
    machine.kick(0);
    machine.drivers[0].offer(&[(BUFFER, 16, true)]);
}

#[test]
fn a_restored_device_answers_what_is_open_and_what_comes() {
    check_restore(Rng::default, two_requests, |machine| {
        let mut answers = vec![machine.drivers[0].completed(), machine.drivers[0].completed()];
        machine.drivers[0].offer(&[(BUFFER, 32, true)]);
        machine.kick(0);
        answers.extend([machine.drivers[0].completed(), machine.drivers[0].completed()]);
        assert_eq!(answers, [Some((0, 8)), Some((0, 16)), Some((0, 32)), None]);
        answers
    });
}

#[test]
fn a_restored_clone_draws_other_bytes_than_its_parent() {
    let drawn = std::cell::RefCell::new(Vec::new());
    check_restore(Rng::default, two_requests, |machine| {
        let mut bytes = [0; 16];
        machine.ram.read_slice(&mut bytes, GuestAddress(BUFFER)).unwrap();
        assert!(!drawn.borrow().contains(&bytes));
        drawn.borrow_mut().push(bytes);
    });
}

proptest! {
    #[test]
    fn hostile_state_is_survived(edits in edits()) {
        check_hostile(Rng::default(), two_requests, &edits);
    }
}
