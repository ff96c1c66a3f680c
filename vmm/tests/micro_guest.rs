//! What a guest does, and what its manager sees of it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use coppice_vmm_protocol::{EventBody, ExitReason, Op, VmState};

use coppice_micro::{Code, Vmm, kvm};

macro_rules! needs_kvm {
    () => {
        if !kvm() {
            return;
        }
    };
}

#[test]
fn serial_output_reaches_the_console_and_acpi_powers_off() {
    needs_kvm!();
    let (vmm, console) = Vmm::boot(&Code::new().print("hello").power_off(), |_| {});
    vmm.end().expect(&ExitReason::PowerOff, 0);
    assert_eq!(console.rest(), "hello");
}

#[test]
fn a_repeated_string_output_arrives_whole() {
    needs_kvm!();
    let (vmm, console) = Vmm::boot(&Code::new().print_string("a string").power_off(), |_| {});
    vmm.end().expect(&ExitReason::PowerOff, 0);
    assert_eq!(console.rest(), "a string");
}

#[test]
fn a_virtio_window_answers_and_an_empty_one_reads_ones() {
    needs_kvm!();
    let code = Code::new()
        .print_if_equal(0xC000_0000, 0x7472_6976) // "virt"
        .print_if_equal(0xC000_0008, 4) // an entropy device
        .print_if_equal(0xC000_1000, 0xFFFF_FFFF)
        .power_off();
    let (vmm, console) = Vmm::boot(&code, |spec| spec.rng = true);
    vmm.end().expect(&ExitReason::PowerOff, 0);
    assert_eq!(console.rest(), "YYY");
}

#[test]
fn ram_reaches_up_to_the_hole_and_keeps_what_is_written() {
    needs_kvm!();
    let last = 0xC000_0000 - 4;
    let code = Code::new()
        .print_if_equal(last, 0)
        .store(last, 0x1234_5678)
        .print_if_equal(last, 0x1234_5678)
        .power_off();
    let (vmm, console) = Vmm::boot(&code, |spec| spec.memory_mib = 3072 + 64);
    vmm.end().expect(&ExitReason::PowerOff, 0);
    assert_eq!(console.rest(), "YY");
}

#[test]
fn a_triple_fault_is_told_from_a_reset() {
    needs_kvm!();
    let (vmm, _console) = Vmm::boot(&Code::new().triple_fault(), |_| {});
    let end = vmm.end();
    let ExitReason::TripleFault { message } = end.reason() else { panic!("{:?}", end.events) };
    assert!(message.starts_with("triple fault on vCPU 0"), "{message}");
    assert_eq!(end.status.code(), Some(3));
}

#[test]
fn the_keyboard_controller_resets() {
    needs_kvm!();
    let (vmm, _console) = Vmm::boot(&Code::new().out(0x64, 0xFE).spin(), |_| {});
    vmm.end().expect(&ExitReason::Reset, 0);
}

#[test]
fn the_acpi_reset_register_resets() {
    needs_kvm!();
    let (vmm, _console) = Vmm::boot(&Code::new().out(0x602, 1).spin(), |_| {});
    vmm.end().expect(&ExitReason::Reset, 0);
}

#[test]
fn an_announced_panic_is_told_before_the_end() {
    needs_kvm!();
    let (vmm, _console) = Vmm::boot(&Code::new().out(0x505, 1).spin(), |_| {});
    let end = vmm.end();
    end.expect(&ExitReason::Panic, 3);
    assert_eq!(end.events.first(), Some(&EventBody::Panicked {}));
}

#[test]
fn a_reset_after_a_panic_on_the_console_is_a_panic() {
    needs_kvm!();
    let code = Code::new().print("Kernel panic - not syncing: no init\n").triple_fault();
    let (vmm, _console) = Vmm::boot(&code, |_| {});
    vmm.end().expect(&ExitReason::Panic, 3);
}

#[test]
fn every_processor_runs() {
    needs_kvm!();
    for vcpus in [2, 4] {
        let code = Code::new().start_processors().print_for_ever(b'a');
        let (mut vmm, mut console) = Vmm::boot(&code, |spec| spec.vcpus = vcpus);
        let letters: Vec<u8> = (b'a'..).take(vcpus.into()).collect();
        console.wait_for_all(&letters);
        vmm.done(Op::Stop {});
        vmm.end().expect(&ExitReason::Stopped, 0);
    }
}

#[test]
fn a_paused_machine_stands_still_and_resumes_on_every_processor() {
    needs_kvm!();
    let code = Code::new().start_processors().print_for_ever(b'a');
    let (mut vmm, mut console) = Vmm::boot(&code, |spec| spec.vcpus = 3);
    for _ in 0..20 {
        console.wait_for_all(b"abc");
        vmm.done(Op::Pause {});
        let before = vmm.status();
        assert_eq!(before.state, VmState::Paused);
        assert_eq!(vmm.status().exits, before.exits);
        vmm.done(Op::Resume {});
        // What the pipe held before the pause is not enough for this.
        while vmm.status().exits < before.exits + 70_000 / 20 {
            console.byte();
        }
    }
    vmm.done(Op::Stop {});
    vmm.end().expect(&ExitReason::Stopped, 0);
}

#[test]
fn a_guest_without_exits_can_be_paused_and_stopped() {
    needs_kvm!();
    let (mut vmm, mut console) = Vmm::boot(&Code::new().print("x").spin(), |_| {});
    console.byte();
    vmm.done(Op::Pause {});
    vmm.done(Op::Resume {});
    vmm.done(Op::Stop {});
    vmm.end().expect(&ExitReason::Stopped, 0);
}

#[test]
fn a_halted_guest_can_be_paused_and_stopped() {
    needs_kvm!();
    let (mut vmm, mut console) = Vmm::boot(&Code::new().print("x").halt(), |_| {});
    console.byte();
    vmm.done(Op::Pause {});
    vmm.done(Op::Stop {});
    vmm.end().expect(&ExitReason::Stopped, 0);
}

#[test]
fn processors_that_were_never_started_can_be_paused() {
    needs_kvm!();
    let (mut vmm, mut console) = Vmm::boot(&Code::new().print("x").spin(), |spec| spec.vcpus = 8);
    console.byte();
    vmm.done(Op::Pause {});
    vmm.done(Op::Resume {});
    vmm.done(Op::Stop {});
    vmm.end().expect(&ExitReason::Stopped, 0);
}
