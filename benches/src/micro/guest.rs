//! The VMM's part: real `coppice-vmm` processes with micro-guests, over their control sockets.

use std::fs::File;
use std::time::Instant;

use coppice_micro::Vmm;
use coppice_micro::tree::{Machine, Node, memory_file};
use coppice_vmm_protocol::{Op, VmState};

use super::{MEMORY_MIB, RUN, Samples, micros_since, runs};

/// What one page more than all of RAM would be.
const PAGES: u32 = MEMORY_MIB << 8;

/// Offset in a page at which the guest neither keeps code nor a stack.
const QUIET: u32 = 0xF00;

/// Levels of the tree that the long way back spans.
const LEVELS: u32 = 5;

/// The machines that samples are taken of.
pub(super) struct Bench {
    /// A checkpoint of a guest that has written the pattern and prints for ever.
    printing: Node,
    /// A machine over a checkpoint with the pattern; the checkpoint.
    machine: Machine,
    root: Node,
    /// A machine that writes all its RAM; the checkpoint under it.
    full: Machine,
    full_root: Node,
    round: u32,
}

/// A new file where temporary files are: on a disk as a rule, as checkpoints are.
fn disk_file() -> File {
    tempfile::tempfile().unwrap_or_else(|_| memory_file())
}

/// Has the guest write the pattern.
fn dirty(machine: &mut Machine, value: u32) {
    let addresses: Vec<_> = runs().map(|first| first * 4096 + QUIET).collect();
    machine.guest.fill_each(&addresses, value, RUN);
}

fn check(machine: &mut Machine, value: u32) {
    for first in runs().step_by(37) {
        assert_eq!(machine.guest.sum(first * 4096 + QUIET, RUN), value * RUN);
    }
}

impl Bench {
    pub(super) fn new() -> Self {
        let mut parent = Machine::boot(MEMORY_MIB);
        dirty(&mut parent, 1);
        parent.guest.print_for_ever();
        let (printing, _) = parent.checkpoint_to("printing", disk_file(), false);
        parent.vmm.kill();
        let mut machine = Machine::boot(MEMORY_MIB);
        dirty(&mut machine, 1);
        let (root, _) = machine.checkpoint_to("root", disk_file(), false);
        let mut full = Machine::boot(MEMORY_MIB);
        full.guest.fill(QUIET, 1, PAGES);
        let (full_root, _) = full.checkpoint_to("full", memory_file(), false);
        // A guest that waits for commands polls for them, and would take a processor.
        machine.vmm.done(Op::Pause {});
        full.vmm.done(Op::Pause {});
        Self { printing, machine, root, full, full_root, round: 1 }
    }

    /// A clone in a process that knows nothing yet.
    pub(super) fn clone_cold(&self, samples: &mut Samples) {
        let mut vmm = Vmm::start();
        assert_eq!(vmm.status().state, VmState::Empty);
        self.clone(vmm, "clone_cold_first_exit", samples);
    }

    /// A clone in a process that has a machine's KVM parts ready.
    pub(super) fn clone_warm(&self, samples: &mut Samples) {
        let mut vmm = Vmm::start();
        vmm.done(Op::Prepare { vcpus: 1, memory_mib: MEMORY_MIB });
        assert_eq!(vmm.status().state, VmState::Prepared);
        self.clone(vmm, "clone_warm_first_exit", samples);
    }

    /// From the request to the first byte of the clone's console, which its vCPU wrote.
    fn clone(&self, vmm: Vmm, name: &'static str, samples: &mut Samples) {
        let started = Instant::now();
        let mut clone = Machine::begin_clone(vmm, &self.printing);
        assert_eq!(clone.guest.byte(), b'p');
        samples.add(name, micros_since(started));
        // Neither its end nor its processor time shall be part of the next sample.
        clone.vmm.kill();
    }

    /// Checkpoints and rollbacks with the pattern dirty.
    pub(super) fn tree(&mut self, samples: &mut Samples) {
        let Self { machine, root, round, .. } = self;
        *round += 100;
        machine.vmm.done(Op::Resume {});
        dirty(machine, *round);
        let (node, info) = machine.checkpoint_to("plain", disk_file(), false);
        samples.add("checkpoint_pause_7mib", micros(info.pause_us));
        dirty(machine, *round + 1);
        roll_back(machine, &node, "rollback_7mib", samples);
        check(machine, *round);
        dirty(machine, *round + 2);
        let (_, info) = machine.checkpoint_to("clone", disk_file(), true);
        samples.add("clone_from_running_pause", micros(info.pause_us));
        machine.roll_back(root);
        let mut levels = Vec::new();
        for level in 0..LEVELS {
            dirty(machine, *round + level);
            // Kept as a store keeps it: the last one to close a file waits for its end.
            levels.push(machine.checkpoint_to("level", disk_file(), false).0);
        }
        dirty(machine, *round + LEVELS);
        roll_back(machine, root, "rollback_7mib_5_levels_up", samples);
        drop(levels);
        check(machine, 1);
        machine.vmm.done(Op::Pause {});
    }

    /// A background checkpoint with every page dirty.
    pub(super) fn all_dirty(&mut self, samples: &mut Samples) {
        let Self { full, full_root, round, .. } = self;
        full.vmm.done(Op::Resume {});
        full.guest.fill(QUIET, *round, PAGES);
        let (_, info) = full.checkpoint_to("full again", memory_file(), true);
        assert!(info.pages >= u64::from(PAGES), "{info:?}");
        samples.add("checkpoint_pause_256mib_async", micros(info.pause_us));
        full.roll_back(full_root);
        full.vmm.done(Op::Pause {});
    }
}

/// From the request to its answer, when the machine runs again.
fn roll_back(machine: &mut Machine, node: &Node, name: &'static str, samples: &mut Samples) {
    let started = Instant::now();
    let info = machine.roll_back(node);
    samples.add(name, micros_since(started));
    assert!(info.pages >= u64::from(super::RUNS * RUN), "{info:?}");
}

fn micros(us: u64) -> f64 {
    std::time::Duration::from_micros(us).as_secs_f64() * 1e6
}
