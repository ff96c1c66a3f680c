//! Many machines, one after the other, a third of them ended at a random moment: nothing may be
//! left behind, neither in the process of a machine nor in that of its manager.
//!
//! One test to a process, since it counts what the process has open.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::fs;
use std::os::fd::AsFd;

use coppice_vmm::sys::process::use_one_heap;
use coppice_vmm::sys::signal::install_kick_handler;
use coppice_vmm::vm::Lifecycle;
use coppice_vmm_protocol::{BalloonSpec, ConsoleSpec, MachineSpec, Op, ResultBody};

use coppice_micro::{Code, Vmm, kvm, plain_spec};

const CYCLES: usize = 200;
/// Cycles that run before counting, so that what is made once has been made: the C library keeps
/// the stacks of as many threads as there ever were at once.
const WARM_UP: usize = 40;

/// Numbers from a seed (xorshift64*), to choose moments and shapes.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % limit
    }
}

/// What a process holds: descriptors, threads, mappings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Holdings {
    descriptors: usize,
    threads: usize,
    mappings: usize,
}

fn holdings() -> Holdings {
    let entries = |path| fs::read_dir(path).unwrap().count();
    Holdings {
        descriptors: entries("/proc/self/fd"),
        threads: entries("/proc/self/task"),
        mappings: fs::read_to_string("/proc/self/maps").unwrap().lines().count(),
    }
}

fn shape(random: &mut Random) -> MachineSpec {
    MachineSpec {
        vcpus: u8::try_from(1 + random.below(4)).unwrap(),
        memory_mib: 64 + u32::try_from(random.below(3)).unwrap() * 2048,
        rng: random.below(2) == 0,
        balloon: (random.below(2) == 0)
            .then_some(BalloonSpec { target_mib: 0, free_page_reporting: true }),
        console: Some(ConsoleSpec { input: None, output: Some(1) }),
        ..plain_spec()
    }
}

/// One machine in this very process, ended at a random point of its life.
fn cycle_in_process(random: &mut Random, code: &Code) {
    let (_reader, writer) = std::io::pipe().unwrap();
    let mut lifecycle = Lifecycle::new().unwrap();
    let fds = vec![code.kernel().into(), writer.into()];
    let ops = [
        (Op::Create(Box::new(shape(random))), fds),
        (Op::Start {}, Vec::new()),
        (Op::Pause {}, Vec::new()),
        (Op::Resume {}, Vec::new()),
    ];
    let steps = usize::try_from(1 + random.below(4)).unwrap();
    for (op, fds) in ops.into_iter().take(steps) {
        assert_eq!(lifecycle.request(op, fds), Some(ResultBody::Done));
    }
    if random.below(2) == 0 {
        lifecycle.end();
    }
}

/// One machine in its own process; a third of them are killed at a random moment.
fn cycle_in_own_process(random: &mut Random, code: &Code) {
    let killed = random.below(3) == 0;
    let moment = random.below(6);
    let mut vmm = Vmm::start();
    let kill_at = |step: u64, vmm: &mut Vmm| {
        let now = killed && step == moment;
        if now {
            vmm.child.kill().unwrap();
            vmm.child.wait().unwrap();
        }
        now
    };
    if kill_at(0, &mut vmm) {
        return;
    }
    let (reader, writer) = std::io::pipe().unwrap();
    let create = Op::Create(Box::new(shape(random)));
    vmm.send(create, &[code.kernel().as_fd(), writer.as_fd()]).unwrap();
    drop(writer);
    if kill_at(1, &mut vmm) {
        return;
    }
    assert_eq!(vmm.answer().unwrap(), ResultBody::Done);
    if kill_at(2, &mut vmm) {
        return;
    }
    vmm.done(Op::Start {});
    if kill_at(3, &mut vmm) {
        return;
    }
    coppice_micro::Console { reader }.byte();
    vmm.done(Op::Pause {});
    if kill_at(4, &mut vmm) {
        return;
    }
    vmm.done(Op::Resume {});
    if kill_at(5, &mut vmm) {
        return;
    }
    vmm.done(Op::Stop {});
    assert!(vmm.end().status.success());
}

#[test]
fn machines_come_and_go_without_a_trace() {
    if !kvm() {
        return;
    }
    let seed = 0x00C0_FFEE_u64;
    let random = &mut Random(seed);
    let code = Code::new().print_for_ever(b'x');
    use_one_heap();
    install_kick_handler().unwrap();
    let mut before = holdings();
    for cycle in 0..CYCLES {
        if cycle == WARM_UP {
            before = holdings();
        }
        if cycle % 2 == 0 {
            cycle_in_process(random, &code);
        } else {
            cycle_in_own_process(random, &code);
        }
    }
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    assert_eq!(holdings(), before, "seed {seed:#x}, mappings now:\n{maps}");
    // Every child was waited for: none is left, running or dead.
    let children = format!("/proc/self/task/{}/children", std::process::id());
    let own = fs::read_to_string(children).unwrap_or_default();
    assert_eq!(own, "");
}
