//! Checkpoints, clones and rollbacks of micro-guests, over the real control socket.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::os::fd::AsFd;
use std::sync::Arc;

use coppice_micro::tree::{Machine, memory_file};
use coppice_micro::{Vmm, kvm};
use coppice_vmm_protocol::{CheckpointSpec, Op, ResultBody, VmState};

macro_rules! needs_kvm {
    () => {
        if !kvm() {
            return;
        }
    };
}

/// Where the guest keeps what the tests look at: above its code, and far apart.
const A: u32 = 0x20_0000;
const B: u32 = 0x123_4000;
const C: u32 = 0x300_0000;

/// Guest RAM in MiB.
const MEMORY: u32 = 64;

#[test]
fn a_machine_runs_on_after_a_checkpoint() {
    needs_kvm!();
    let mut machine = Machine::boot(MEMORY);
    machine.guest.write(A, 1);
    let (_, info) = machine.checkpoint("one", false);
    assert!((1..100).contains(&info.pages), "{info:?}");
    machine.guest.write(A, 2);
    assert_eq!(machine.guest.read(A), 2);
    let status = machine.vmm.status();
    assert_eq!((status.state, status.checkpoint), (VmState::Running, Some("one".into())));
}

#[test]
fn a_clone_has_the_memory_of_its_checkpoint() {
    needs_kvm!();
    let mut parent = Machine::boot(MEMORY);
    parent.guest.write(A, 1);
    let (node, _) = parent.checkpoint("one", false);
    parent.guest.write(A, 2);
    let mut child = Machine::clone_of(&node);
    assert_eq!(child.guest.read(A), 1);
    child.guest.write(A, 3);
    assert_eq!((parent.guest.read(A), child.guest.read(A)), (2, 3));
}

#[test]
fn a_prepared_process_makes_a_clone_too() {
    needs_kvm!();
    let mut parent = Machine::boot(MEMORY);
    parent.guest.write(B, 7);
    let (node, _) = parent.checkpoint("one", false);
    let mut vmm = Vmm::start();
    vmm.done(Op::Prepare { vcpus: 1, memory_mib: 64 });
    let mut child = Machine::clone_in(vmm, &node);
    assert_eq!(child.guest.read(B), 7);
}

#[test]
fn a_clone_that_knows_what_the_first_one_used_starts_like_it() {
    needs_kvm!();
    let mut parent = Machine::boot(MEMORY);
    parent.guest.write(A, 1);
    parent.guest.write(B, 2);
    let (mut node, _) = parent.checkpoint("one", false);
    let mut first = Machine::clone_of(&node);
    first.guest.write(A, 3);
    let record = memory_file();
    let op = Op::RecordWorkingSet { file: 0 };
    assert_eq!(first.vmm.request_with(op, &[record.as_fd()]), ResultBody::Done);
    node.working_set = Some(Arc::new(record));
    let mut second = Machine::clone_of(&node);
    assert_eq!((second.guest.read(A), second.guest.read(B)), (1, 2));
    second.guest.write(A, 4);
    assert_eq!((first.guest.read(A), second.guest.read(A)), (3, 4));
}

#[test]
fn a_record_has_the_pages_that_a_clone_wrote() {
    needs_kvm!();
    let mut parent = Machine::boot(MEMORY);
    parent.guest.write(A, 1);
    let (node, _) = parent.checkpoint("one", false);
    let mut clone = Machine::clone_of(&node);
    clone.guest.write(A, 2);
    let mut record = memory_file();
    let op = Op::RecordWorkingSet { file: 0 };
    assert_eq!(clone.vmm.request_with(op, &[record.as_fd()]), ResultBody::Done);
    let mut bytes = Vec::new();
    record.rewind().unwrap();
    record.read_to_end(&mut bytes).unwrap();
    let (words, _) = bytes.as_chunks::<8>();
    let (runs, _) = words[1..].as_chunks::<2>();
    let page = u64::from(A) / 4096;
    let written = |[first, count]: &[[u8; 8]; 2]| {
        let (first, count) = (u64::from_le_bytes(*first), u64::from_le_bytes(*count));
        count >> 63 == 1 && (first..first + (count << 1 >> 1)).contains(&page)
    };
    assert!(runs.iter().any(written), "{runs:?}");
}

#[test]
fn later_checkpoints_hold_only_what_was_written_since() {
    needs_kvm!();
    let mut machine = Machine::boot(MEMORY);
    machine.guest.fill(A, 1, 1000);
    let (_, first) = machine.checkpoint("one", false);
    machine.guest.fill(B, 2, 20);
    let (node, second) = machine.checkpoint("two", false);
    assert!(first.pages >= 1000 && (20..40).contains(&second.pages), "{first:?} {second:?}");
    let mut child = Machine::clone_of(&node);
    assert_eq!((child.guest.sum(A, 1000), child.guest.sum(B, 20)), (1000, 40));
}

#[test]
fn a_rollback_brings_memory_back() {
    needs_kvm!();
    let mut machine = Machine::boot(MEMORY);
    machine.guest.fill(A, 1, 300);
    let (node, _) = machine.checkpoint("one", false);
    machine.guest.fill(A, 2, 300);
    machine.guest.fill(C, 9, 5);
    machine.roll_back(&node);
    assert_eq!((machine.guest.sum(A, 300), machine.guest.sum(C, 5)), (300, 0));
}

/// The processor may remember translations. Those of page tables that were undone must not
/// outlive them, though the guest's control registers are the same before and after.
#[test]
fn a_rollback_undoes_page_tables_too() {
    needs_kvm!();
    const TABLES: u32 = 0x30_0000;
    const LARGE: u32 = 2 << 20;
    const WINDOW: u32 = 0x2000_0000;
    let [directories, pages] = [TABLES + 0x1000, TABLES + 0x2000];
    let large = |number: u32| (number * LARGE) | 0x83; // present, writable, 2 MiB
    let mut machine = Machine::boot(MEMORY);
    machine.guest.write(TABLES, directories | 3);
    machine.guest.write(directories, pages | 3);
    for number in 0..MEMORY / 2 {
        machine.guest.write(pages + 8 * number, large(number));
    }
    let window = pages + 8 * (WINDOW / LARGE);
    machine.guest.write(window, large(8));
    machine.guest.page(TABLES);
    machine.guest.write(8 * LARGE, 8);
    machine.guest.write(9 * LARGE, 9);
    assert_eq!(machine.guest.read(WINDOW), 8);
    let (node, _) = machine.checkpoint("one", false);
    machine.guest.write(window, large(9));
    machine.guest.forget(WINDOW);
    assert_eq!(machine.guest.read(WINDOW), 9);
    machine.roll_back(&node);
    assert_eq!(machine.guest.read(WINDOW), 8);
}

#[test]
fn a_rollback_goes_to_any_node_of_the_tree() {
    needs_kvm!();
    let mut machine = Machine::boot(MEMORY);
    let mut nodes = Vec::new();
    for step in 1..=4u32 {
        machine.guest.fill(A + step * 0x1000, step, 200);
        machine.guest.write(B, step);
        nodes.push((step, machine.checkpoint(&format!("n{step}"), false).0));
    }
    machine.roll_back(&nodes[1].1);
    machine.guest.write(B, 77);
    machine.guest.write(C, 77);
    let (side, _) = machine.checkpoint("side", false);
    machine.roll_back(&nodes[3].1);
    assert_eq!((machine.guest.read(B), machine.guest.read(C)), (4, 0));
    machine.roll_back(&side);
    assert_eq!((machine.guest.read(B), machine.guest.read(C)), (77, 77));
    for (step, node) in &nodes {
        machine.roll_back(node);
        assert_eq!((machine.guest.read(B), machine.guest.read(C)), (*step, 0));
    }
}

#[test]
fn a_clone_can_be_checkpointed_and_rolled_back() {
    needs_kvm!();
    let mut parent = Machine::boot(MEMORY);
    parent.guest.fill(A, 1, 100);
    let (node, _) = parent.checkpoint("one", false);
    let mut child = Machine::clone_of(&node);
    child.guest.fill(A, 2, 100);
    let (second, info) = child.checkpoint("two", false);
    assert!((100..140).contains(&info.pages), "{info:?}");
    child.guest.fill(A, 3, 100);
    child.roll_back(&second);
    assert_eq!(child.guest.sum(A, 100), 200);
    child.roll_back(&node);
    assert_eq!(child.guest.sum(A, 100), 100);
    let mut grandchild = Machine::clone_of(&second);
    assert_eq!(grandchild.guest.sum(A, 100), 200);
}

#[test]
fn a_background_checkpoint_has_the_memory_of_its_moment() {
    needs_kvm!();
    let mut machine = Machine::boot(MEMORY);
    machine.guest.fill(A, 1, 4000);
    machine.checkpoint("one", true);
    machine.guest.fill(A, 2, 4000);
    let spec = CheckpointSpec {
        id: "two".into(),
        file: 0,
        overlays: Vec::new(),
        meta: String::new(),
        background: true,
    };
    let file = tempfile::tempfile().unwrap();
    machine.vmm.send(Op::Checkpoint(spec), &[file.as_fd()]).unwrap();
    // Runs while the copy is under way, or before or after it: the result is the same.
    machine.guest.fill(A, 3, 4000);
    let ResultBody::Checkpoint(_) = machine.vmm.answer().unwrap() else { panic!() };
    machine.commit("two", file);
    let sum = Machine::clone_of(&machine.node).guest.sum(A, 4000);
    assert!((8000..=12000).contains(&sum), "{sum}");
    assert_eq!(machine.guest.sum(A, 4000), 12000);
    let node = machine.node.clone();
    machine.roll_back(&node);
    assert_eq!(machine.guest.sum(A, 4000), sum);
}

#[test]
fn a_checkpoint_that_fails_loses_nothing() {
    needs_kvm!();
    let mut machine = Machine::boot(MEMORY);
    machine.guest.fill(A, 1, 100);
    machine.checkpoint("one", false);
    machine.guest.fill(A, 2, 100);
    let full = File::options().read(true).write(true).open("/dev/full").unwrap();
    assert!(matches!(machine.try_checkpoint("bad", &full, false), ResultBody::Error(_)));
    machine.guest.fill(B, 3, 10);
    let (node, info) = machine.checkpoint("two", false);
    assert!(info.pages >= 110, "{info:?}");
    let mut child = Machine::clone_of(&node);
    assert_eq!((child.guest.sum(A, 100), child.guest.sum(B, 10)), (200, 30));
}

#[test]
fn a_checkpoint_that_is_not_committed_is_not_stood_on() {
    needs_kvm!();
    let mut machine = Machine::boot(MEMORY);
    machine.guest.fill(A, 1, 100);
    let file = tempfile::tempfile().unwrap();
    let ResultBody::Checkpoint(_) = machine.try_checkpoint("one", &file, false) else { panic!() };
    machine.vmm.refused(Op::Commit { id: "other".into() }, &[]);
    assert_eq!(machine.vmm.status().checkpoint, None);
    machine.vmm.done(Op::Commit { id: "one".into() });
    assert_eq!(machine.vmm.status().checkpoint, Some("one".into()));
}
