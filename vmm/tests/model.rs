//! Model test: random sequences of what can happen to a tree of machines and checkpoints, against
//! a model that is nothing but the values the guests wrote.
//!
//! Machines are real processes with micro-guests. They are used again from case to case, which
//! begins with a rollback of all of them to one root; after a failure the next case, and so each
//! step of shrinking, begins with new ones.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::fs::File;
use std::sync::Mutex;

use coppice_image::Image;
use coppice_micro::tree::{Machine, Node, memory_file};
use coppice_micro::{Vmm, kvm};
use coppice_vmm_protocol::{Op, ResultBody};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, TestRunner};

/// Guest RAM in MiB.
const MEMORY: u32 = 64;
/// Most machines at a time.
const MACHINES: usize = 2;
/// Cases of one run: some thousands where nothing else says so.
const CASES: u32 = 2000;

/// What the guests write: the first page, and how many pages. Single pages, neighbours, short
/// runs with small gaps, and runs long enough to be dropped instead of copied.
const PLACES: [(u32, u32); 8] = [
    (0x200, 1),
    (0x201, 1),
    (0x210, 3),
    (0x250, 16),
    (0x400, 70),
    (0x446, 1),
    (0x1000, 200),
    (0x3F00, 1),
];

/// The value at each place.
type Content = [u32; PLACES.len()];

/// One thing that happens; machines and checkpoints are chosen among those there are.
#[derive(Debug, Clone)]
enum Step {
    Write {
        machine: Index,
        place: Index,
        value: u32,
    },
    Checkpoint {
        machine: Index,
        background: bool,
        paused: bool,
    },
    /// A background checkpoint, and a write while it is copied.
    WriteMeanwhile {
        machine: Index,
        place: Index,
        value: u32,
    },
    /// A checkpoint whose file may not become as long as it has to.
    CheckpointFails {
        machine: Index,
        background: bool,
        room: u64,
    },
    Clone {
        from: Index,
        warm: bool,
    },
    Rollback {
        machine: Index,
        to: Index,
        paused: bool,
    },
    Delete {
        node: Index,
    },
    /// The process is killed, perhaps while it writes a checkpoint; a clone takes its place.
    Crash {
        machine: Index,
        writing: bool,
        reopen: Index,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let index = any::<Index>;
    let value = 1..1000u32;
    prop_oneof![
        12 => (index(), index(), value.clone())
            .prop_map(|(machine, place, value)| Step::Write { machine, place, value }),
        8 => (index(), any::<bool>(), any::<bool>()).prop_map(|(machine, background, paused)| {
            Step::Checkpoint { machine, background, paused }
        }),
        2 => (index(), index(), value)
            .prop_map(|(machine, place, value)| Step::WriteMeanwhile { machine, place, value }),
        2 => (index(), any::<bool>(), 0..200_000u64).prop_map(|(machine, background, room)| {
            Step::CheckpointFails { machine, background, room }
        }),
        1 => (index(), any::<bool>()).prop_map(|(from, warm)| Step::Clone { from, warm }),
        8 => (index(), index(), any::<bool>())
            .prop_map(|(machine, to, paused)| Step::Rollback { machine, to, paused }),
        2 => index().prop_map(|node| Step::Delete { node }),
        1 => (index(), any::<bool>(), index())
            .prop_map(|(machine, writing, reopen)| Step::Crash { machine, writing, reopen }),
    ]
}

struct World {
    machines: Vec<(Machine, Content)>,
    /// The first one is the root that every case begins with.
    nodes: Vec<(Node, Content)>,
    count: u32,
    /// The one machine that runs: guests that wait for commands poll for them, and take all of a
    /// processor each.
    awake: usize,
}

fn address(place: usize) -> (u32, u32) {
    let (page, count) = PLACES[place];
    (page << 12, count)
}

fn look(machine: &mut Machine) -> Content {
    let places: Vec<_> = (0..PLACES.len()).map(address).collect();
    let sums = machine.guest.sums(&places);
    std::array::from_fn(|place| {
        let count = PLACES[place].1;
        // A remainder would be a mixture of two values.
        if sums[place].is_multiple_of(count) { sums[place] / count } else { u32::MAX }
    })
}

impl World {
    fn new() -> Self {
        let mut machine = Machine::boot(MEMORY);
        let content = std::array::from_fn(|place| {
            let (at, count) = address(place);
            // Some places stay zeroes.
            let value = if place % 3 == 0 { 0 } else { 5 };
            if value > 0 {
                machine.guest.fill(at, value, count);
            }
            value
        });
        let (root, _) = machine.checkpoint_to("root", memory_file(), false);
        Self {
            machines: vec![(machine, content)],
            nodes: vec![(root, content)],
            count: 0,
            awake: 0,
        }
    }

    /// Everything back to the root.
    fn reset(&mut self) {
        self.nodes.truncate(1);
        for (machine, content) in &mut self.machines {
            machine.roll_back(&self.nodes[0].0);
            *content = self.nodes[0].1;
        }
    }

    /// Chooses a machine and lets it run instead of the one before.
    fn wake(&mut self, machine: &Index) -> usize {
        self.wake_at(machine.index(self.machines.len()))
    }

    fn wake_at(&mut self, at: usize) -> usize {
        if self.awake != at {
            self.machines[self.awake].0.vmm.done(Op::Pause {});
            self.machines[at].0.vmm.done(Op::Resume {});
            self.awake = at;
        }
        at
    }

    fn name(&mut self) -> String {
        self.count += 1;
        format!("n{}", self.count)
    }

    /// Puts a clone in place of machine `at`, or beside the others.
    fn clone(&mut self, at: usize, from: &Index, vmm: Vmm) -> Result<(), TestCaseError> {
        let (node, content) = from.get(&self.nodes).clone();
        let mut machine = Machine::clone_in(vmm, &node);
        prop_assert_eq!(look(&mut machine), content, "a clone of {}", node.id);
        if self.awake != at {
            self.machines[self.awake].0.vmm.done(Op::Pause {});
            self.awake = at;
        }
        match self.machines.get_mut(at) {
            Some(place) => {
                let (mut old, _) = std::mem::replace(place, (machine, content));
                old.vmm.kill();
            }
            None => self.machines.push((machine, content)),
        }
        Ok(())
    }

    fn checkpoint(&mut self, at: usize, background: bool, write: Option<(usize, u32)>) {
        let name = self.name();
        let (machine, content) = &mut self.machines[at];
        let before = *content;
        let file = memory_file();
        machine.begin_checkpoint(&name, &file, background);
        if let Some((place, value)) = write {
            // Answered when the pause is over.
            machine.vmm.send(Op::Status {}, &[]).unwrap();
            let answers = [machine.vmm.answer_any().unwrap()];
            let (at, count) = address(place);
            machine.guest.fill(at, value, count);
            content[place] = value;
            let answers = [answers[0].clone(), machine.vmm.answer_any().unwrap()];
            let taken = |answer: &ResultBody| matches!(answer, ResultBody::Checkpoint(_));
            assert!(answers.iter().any(taken), "{answers:?}");
        } else {
            let answer = machine.vmm.answer().unwrap();
            assert!(matches!(answer, ResultBody::Checkpoint(_)), "{answer:?}");
        }
        machine.commit(&name, file);
        self.nodes.push((machine.node.clone(), before));
    }

    fn take(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match step {
            Step::Write { machine, place, value } => {
                let at = self.wake(machine);
                let (machine, content) = &mut self.machines[at];
                let place = place.index(PLACES.len());
                let (first, count) = address(place);
                machine.guest.fill(first, *value, count);
                content[place] = *value;
            }
            Step::Checkpoint { machine, background, paused } => {
                let at = self.wake(machine);
                self.paused(at, *paused, |world| world.checkpoint(at, *background, None));
            }
            Step::WriteMeanwhile { machine, place, value } => {
                let at = self.wake(machine);
                self.checkpoint(at, true, Some((place.index(PLACES.len()), *value)));
            }
            Step::CheckpointFails { machine, background, room } => {
                let at = self.wake(machine);
                let file = memory_file();
                let (machine, content) = &mut self.machines[at];
                machine.vmm.limit_files(Some(*room));
                let answer = machine.try_checkpoint("none", &file, *background);
                machine.vmm.limit_files(None);
                // With much room it may succeed, and has to be committed then.
                match answer {
                    ResultBody::Error(_) => {}
                    ResultBody::Checkpoint(_) => {
                        machine.commit("none", file);
                        self.nodes.push((machine.node.clone(), *content));
                    }
                    other => panic!("{other:?}"),
                }
            }
            Step::Clone { from, warm } => {
                let mut vmm = Vmm::start();
                if *warm {
                    vmm.done(Op::Prepare { vcpus: 1, memory_mib: MEMORY });
                }
                self.clone(self.machines.len().min(MACHINES - 1), from, vmm)?;
            }
            Step::Rollback { machine, to, paused } => {
                let at = self.wake(machine);
                let (node, content) = to.get(&self.nodes).clone();
                self.paused(at, *paused, |world| world.machines[at].0.roll_back(&node));
                self.machines[at].1 = content;
                let found = look(&mut self.machines[at].0);
                prop_assert_eq!(found, content, "a rollback to {}", node.id);
            }
            Step::Delete { node } => {
                // Its file stays while others, or a machine, stand on it. The root stays.
                if self.nodes.len() > 1 {
                    let at = 1 + node.index(self.nodes.len() - 1);
                    self.nodes.remove(at);
                }
            }
            Step::Crash { machine, writing, reopen } => {
                let at = self.wake(machine);
                let file = memory_file();
                let machine = &mut self.machines[at].0;
                if *writing {
                    machine.begin_checkpoint("half", &file, true);
                }
                machine.vmm.kill();
                whole_or_nothing(file);
                self.clone(at, reopen, Vmm::start())?;
            }
        }
        Ok(())
    }

    fn paused<T>(&mut self, at: usize, paused: bool, act: impl FnOnce(&mut Self) -> T) -> T {
        if paused {
            self.machines[at].0.vmm.done(Op::Pause {});
        }
        let result = act(self);
        if paused {
            self.machines[at].0.vmm.done(Op::Resume {});
        }
        result
    }

    fn check(&mut self) -> Result<(), TestCaseError> {
        for at in 0..self.machines.len() {
            self.wake_at(at);
            let (machine, content) = &mut self.machines[at];
            prop_assert_eq!(look(machine), *content, "in the end");
        }
        Ok(())
    }
}

/// What a killed process leaves behind is a good checkpoint or none.
fn whole_or_nothing(file: File) {
    if let Ok(image) = Image::open(file) {
        image.verify().unwrap();
    }
}

#[test]
fn machines_are_what_their_guests_and_the_tree_made_them() {
    if !kvm() {
        return;
    }
    let world = Mutex::new(None);
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(CASES);
    let config =
        Config { cases, max_shrink_iters: 500, failure_persistence: None, ..Config::default() };
    let steps = proptest::collection::vec(step(), 1..10);
    let result = TestRunner::new(config).run(&steps, |steps| {
        // A case that panics or fails does not put its machines back.
        let taken = world.lock().unwrap_or_else(|e| e.into_inner()).take();
        let mut now = taken.unwrap_or_else(World::new);
        now.reset();
        for step in &steps {
            now.take(step)?;
        }
        now.check()?;
        *world.lock().unwrap_or_else(|e| e.into_inner()) = Some(now);
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}
