//! Tests of the loop over a queue while its driver is at work.

use std::sync::mpsc::channel;

use super::super::testing::{Driver, interrupt, memory};
use super::super::{EVENT_IDX, INTERRUPT_USED_RING};
use super::*;

const SIZE: u16 = 16;

fn active(driver: &Driver, features: u64) -> (ActiveQueue, Interrupt) {
    let (interrupt, _) = interrupt();
    let activation = Driver::activation(&[driver], &interrupt, features);
    let queue = activation.queues.into_iter().next().unwrap();
    (ActiveQueue::new(queue, activation.ram, interrupt.clone()), interrupt)
}

#[test]
fn chains_added_meanwhile_are_taken_and_none_breaks_the_queue() {
    const CHAINS: usize = 20_000;
    for features in [0, EVENT_IDX] {
        let ram = memory();
        let mut driver = Driver::new(&ram, 0x1000, SIZE);
        let (mut queue, interrupt) = active(&driver, features);
        let (kick, kicks) = channel();
        let (done, room) = channel();
        let guest = std::thread::spawn(move || {
            driver.describe(0, 0x10_0000, 16, 0, 0);
            for sent in 0..CHAINS {
                if sent >= usize::from(SIZE) && room.recv().is_err() {
                    return;
                }
                driver.publish(0);
                let _ = kick.send(());
            }
        });
        let mut handled = 0;
        while handled < CHAINS && kicks.recv().is_ok() {
            queue.drain(|_, _| {
                handled += 1;
                let _ = done.send(());
                0
            });
            assert!(!interrupt.needs_reset(), "broken after {handled} chains");
        }
        guest.join().unwrap();
        assert_eq!(handled, CHAINS);
    }
}

#[test]
fn a_chain_that_is_kept_comes_back_when_given() {
    let ram = memory();
    let mut driver = Driver::new(&ram, 0x1000, SIZE);
    let (mut queue, interrupt) = active(&driver, 0);
    driver.offer(&[(0x10_0000, 7, false)]);
    let (head, len) = queue.take(|_, mut chain| chain.next().unwrap().len()).unwrap();
    assert_eq!((head, len), (0, 7));
    assert_eq!(driver.completed(), None);
    queue.give_back(head);
    assert_eq!(driver.completed(), Some((0, 0)));
    assert_eq!(interrupt.status(), INTERRUPT_USED_RING);
}

#[test]
fn a_chain_outside_the_table_is_not_kept() {
    let ram = memory();
    let mut driver = Driver::new(&ram, 0x1000, SIZE);
    let (mut queue, interrupt) = active(&driver, 0);
    driver.publish(SIZE);
    assert_eq!(queue.take(|_, _| ()), None);
    assert!(interrupt.needs_reset());
}
