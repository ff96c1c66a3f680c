//! The transport's state across save and restore, from anywhere a driver can bring it.

use proptest::prelude::*;

use super::*;
use crate::devices::Saved;
use crate::devices::virtio::testing::edits;

/// All that a driver and the device's owner can see.
fn seen(guest: &mut Guest) -> (Vec<u32>, bool, Option<Vec<QueuePosition>>) {
    let mut registers = Vec::new();
    for offset in (0u32..0x100).step_by(4) {
        registers.push(guest.read(offset));
    }
    let device = guest.device.lock().unwrap();
    (registers, device.active, device.positions.clone())
}

fn run(guest: &mut Guest, up: bool, accesses: &[(u64, Vec<u8>, bool)]) {
    if up {
        guest.start();
    }
    for (offset, data, write) in accesses {
        if *write {
            guest.transport.write(*offset, data);
        } else {
            guest.transport.read(*offset, &mut data.clone());
        }
    }
}

fn history() -> impl Strategy<Value = (bool, Vec<(u64, Vec<u8>, bool)>)> {
    (any::<bool>(), prop::collection::vec(access(), 0..60))
}

proptest! {
    #[test]
    fn a_restored_transport_is_as_the_one_saved(
        (up, accesses) in history(),
        (other_up, other) in history(),
        (next_up, next) in history(),
    ) {
        let mut original = Guest::new();
        run(&mut original, up, &accesses);
        original.device.lock().unwrap().own = 7;
        let saved = original.transport.save().unwrap();

        let mut used = Guest::new();
        run(&mut used, other_up, &other);
        for mut restored in [Guest::new(), used] {
            restored.transport.restore(&saved).unwrap();
            prop_assert_eq!(seen(&mut restored), seen(&mut original));
            prop_assert_eq!(restored.device.lock().unwrap().own, 7);
            prop_assert_eq!(restored.transport.save().unwrap(), saved.clone());
            // And they go on alike.
            let mut twin = Guest::new();
            twin.transport.restore(&saved).unwrap();
            run(&mut restored, next_up, &next);
            run(&mut twin, next_up, &next);
            prop_assert_eq!(seen(&mut restored), seen(&mut twin));
        }
    }

    /// The probe asserts the promises of an activation.
    #[test]
    fn hostile_state_breaks_no_promise(
        (up, accesses) in history(),
        edits in edits(),
        (next_up, next) in history(),
    ) {
        let mut guest = Guest::new();
        run(&mut guest, up, &accesses);
        let mut saved = guest.transport.save().unwrap();
        edits.iter().for_each(|edit| edit.apply(&mut saved));
        let restored = guest.transport.restore(&saved);
        if restored.is_err() {
            // As after a reset by the driver, which keeps the count of configurations.
            let (mut registers, active, positions) = seen(&mut guest);
            registers.pop();
            prop_assert_eq!(registers, &seen(&mut Guest::new()).0[..63]);
            prop_assert_eq!((active, positions), (false, None));
        }
        let accepted = guest.transport.registers.accepted();
        prop_assert_eq!(accepted & !(OFFERED | 1 << VIRTIO_F_VERSION_1), 0);
        if guest.active() {
            prop_assert_eq!(guest.read(reg::VIRTIO_MMIO_STATUS) & ALL_BITS, ALL_BITS);
        }
        run(&mut guest, next_up, &next);
    }
}

/// Saves a running transport, has `change` edit the JSON, and says why it is refused.
fn refusal(change: impl FnOnce(&mut serde_json::Value)) -> String {
    let mut guest = Guest::new();
    guest.start();
    let Saved { version, data } = guest.transport.save().unwrap();
    let mut state = serde_json::from_slice(&data).unwrap();
    change(&mut state);
    let data = serde_json::to_vec(&state).unwrap();
    let error = guest.transport.restore(&Saved { version, data }).unwrap_err();
    assert!(!guest.active());
    error.to_string()
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let queue = |field: &'static str, value: u64| {
        refusal(move |state| state["registers"]["queues"][0][field] = value.into())
    };
    let queue_does_not_fit =
        "the saved state of device probe does not fit: a queue is ready that cannot be";
    assert_eq!(queue("size", 3), queue_does_not_fit);
    assert_eq!(queue("size", 128), queue_does_not_fit);
    assert_eq!(queue("descriptors", 1 << 40), queue_does_not_fit);
    assert_eq!(queue("available", 0x2001), queue_does_not_fit);
    assert!(refusal(|state| state["registers"]["wanted"] = (1u64 << 50).into()).contains("offer"));
    assert!(refusal(|state| state["registers"]["device_id"] = 2.into()).contains("another kind"));
    assert!(refusal(|state| state["registers"]["status"] = 0.into()).contains("queue is ready"));
    assert!(refusal(|state| state["registers"]["status"] = 5.into()).contains("status"));
    assert!(refusal(|state| state["interrupt"]["status"] = 4.into()).contains("interrupt"));
    assert!(refusal(|state| state["active"] = false.into()).contains("has queues"));
    assert!(refusal(|state| state["queues"][1]["next_avail"] = 999.into()).contains("under way"));
    assert!(refusal(|state| state["queues"] = serde_json::json!([])).contains("another set"));
    assert!(refusal(|state| state["more"] = 1.into()).contains("cannot be read"));
}

#[test]
fn the_state_of_another_version_is_refused() {
    let mut guest = Guest::new();
    let Saved { version, data } = guest.transport.save().unwrap();
    let error = guest.transport.restore(&Saved { version: version + 1, data }).unwrap_err();
    assert!(matches!(error, StateError::Version { device: "probe", .. }));
}

/// A line, and kicks for both queues.
fn revive(guest: &Guest) -> (bool, Vec<bool>) {
    let kicks: Vec<_> = (0..2).map(|_| Arc::new(EventFd::new(EFD_NONBLOCK).unwrap())).collect();
    let _ = guest.line.read();
    guest.transport.revive(&kicks);
    (guest.line.read().is_ok(), kicks.iter().map(|kick| kick.read().is_ok()).collect())
}

#[test]
fn reviving_kicks_all_queues_and_raises_what_is_pending() {
    let mut guest = Guest::new();
    guest.start();
    assert_eq!(revive(&guest), (false, vec![true, true]));
    guest.interrupt.signal_used_ring();
    let saved = guest.transport.save().unwrap();
    let mut clone = Guest::new();
    clone.transport.restore(&saved).unwrap();
    assert_eq!(revive(&clone), (true, vec![true, true]));
}

#[test]
fn reviving_a_device_without_a_driver_does_nothing() {
    assert_eq!(revive(&Guest::new()), (false, vec![false, false]));
}
