//! The console across save and restore.

use super::*;
use crate::devices::{Saved, StateError};

fn unread(console: &mut Console) {
    console.listen();
    console.put(7, 0x5A);
    console.type_in(b"typed");
    let _ = console.line.read();
}

#[test]
fn input_that_the_guest_had_not_read_is_there_again() {
    let mut original = console();
    unread(&mut original);
    let saved = original.serial.save().unwrap();
    assert_eq!(original.receive(), b"typed");
    let mut fresh = console();
    for restored in [&mut fresh, &mut original] {
        restored.serial.restore(&saved).unwrap();
        // An interrupt raised now would be lost when the controllers are restored.
        let _ = restored.line.read();
        restored.serial.revive();
        assert!(restored.line.read().is_ok(), "the interrupt is raised again");
        assert_eq!(restored.get(7), 0x5A);
        assert_eq!(restored.receive(), b"typed");
        restored.type_in(b"more");
        assert_eq!(restored.receive(), b"more");
        restored.put(DATA, b'.');
        assert_eq!(restored.shown(), b".");
    }
}

#[test]
fn input_that_waited_at_the_host_comes_after_that_of_the_checkpoint() {
    let mut console = console();
    console.listen();
    console.type_in(b"in the FIFO");
    let saved = console.serial.save().unwrap();
    console.put(INTERRUPT_ENABLE, 0);
    console.type_in(b", at the host");
    console.serial.restore(&saved).unwrap();
    console.serial.revive();
    assert_eq!(console.receive(), b"in the FIFO, at the host");
}

#[test]
fn a_panic_after_the_checkpoint_is_forgotten() {
    let mut console = console();
    let saved = console.serial.save().unwrap();
    b"Kernel panic - not syncing: x\n".iter().for_each(|byte| console.put(DATA, *byte));
    assert!(console.serial.panic_text().is_some());
    console.serial.restore(&saved).unwrap();
    assert_eq!(console.serial.panic_text(), None);
}

#[test]
fn a_fifo_that_is_too_full_is_refused() {
    let mut console = console();
    let Saved { version, data } = console.serial.save().unwrap();
    let mut state: serde_json::Value = serde_json::from_slice(&data).unwrap();
    state["input"] = vec![0; FIFO + 1].into();
    let data = serde_json::to_vec(&state).unwrap();
    let error = console.serial.restore(&Saved { version, data }).unwrap_err();
    assert!(matches!(error, StateError::Unfit { device: "serial", .. }));
}

proptest! {
    #[test]
    fn hostile_state_is_survived(
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
        accesses in proptest::collection::vec((any::<bool>(), 0..8u64, any::<u8>()), 0..50),
    ) {
        let mut console = console();
        unread(&mut console);
        let mut saved = console.serial.save().unwrap();
        for (at, byte) in changes {
            let at = at.index(saved.data.len());
            // Digits for digits, so that most of it can be read.
            let digit = b'0' + byte % 10;
            saved.data[at] = if saved.data[at].is_ascii_digit() { digit } else { byte };
        }
        let _ = console.serial.restore(&saved);
        console.serial.revive();
        for (write, offset, byte) in accesses {
            if write {
                console.serial.write(offset, &[byte]);
            } else {
                console.serial.read(offset, &mut [byte]);
            }
        }
    }
}
