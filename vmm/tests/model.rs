//! Model test: random sequences of what can happen to a tree of machines and checkpoints, against
//! a model that is nothing but the values the guests wrote to memory and to their disks.
//!
//! A guest drives its disk itself. The queue's rings and the buffers are in its memory, so memory,
//! device and disk have to come from one moment, or the next request shows it.
//!
//! Machines are real processes with micro-guests. They are used again from case to case, which
//! ends with a rollback of all of them to one root; after a failure the next case, and so each
//! step of shrinking, begins with new ones.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Mutex;

use coppice_image::Image;
use coppice_micro::tree::{Machine, Node, memory_file};
use coppice_micro::{Vmm, kvm};
use coppice_vmm_protocol::{Op, ResultBody};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Guest RAM in MiB.
const MEMORY: u32 = 64;
/// Most machines at a time.
const MACHINES: usize = 2;
/// Cases of one run: some thousands where nothing else says so.
const CASES: u32 = 2000;

/// What the guests write in memory: the first page, and how many pages. Single pages, neighbours,
/// short runs with small gaps, and runs long enough to be dropped instead of copied.
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

/// What they write on the disk: the first sector, and how many. Clusters, parts of clusters, whole
/// runs, and the disk's end.
const DISK_PLACES: [(u32, u32); 5] = [(0, 8), (9, 1), (16, 24), (64, 8), (127, 1)];
const DISK_SECTORS: u32 = 128;
const SECTOR: u32 = 512;
const PAGE: u32 = 4096;

/// Where the guest writes to the disk from, and where it reads the disk to.
const SOURCE: u32 = 0x80_0000;
const TARGET: u32 = 0x90_0000;
/// Where it keeps the list of places to look at.
const TABLE: u32 = 0xA0_0000;

/// Places of both kinds, memory first.
const ALL: usize = PLACES.len() + DISK_PLACES.len();

/// The value at each place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Content {
    memory: [u32; PLACES.len()],
    disk: [u32; DISK_PLACES.len()],
    /// What the disk had when the guest last looked: it is in memory since, where the device put
    /// it.
    seen: [u32; DISK_PLACES.len()],
}

/// Which of those there are, counted around. A small number is soon shrunk, and can be read.
type Pick = u8;

fn pick(which: Pick, count: usize) -> usize {
    usize::from(which) % count
}

/// One thing that happens; machines and checkpoints are chosen among those there are.
#[derive(Debug, Clone)]
enum Step {
    Write {
        machine: Pick,
        place: usize,
        value: u32,
    },
    Checkpoint {
        machine: Pick,
        background: bool,
        paused: bool,
    },
    /// A background checkpoint, and a write while it is copied.
    WriteMeanwhile {
        machine: Pick,
        place: usize,
        value: u32,
    },
    /// A checkpoint whose file may not become as long as it has to.
    CheckpointFails {
        machine: Pick,
        background: bool,
        room: u64,
    },
    Clone {
        from: Pick,
        warm: bool,
    },
    Rollback {
        machine: Pick,
        to: Pick,
        paused: bool,
    },
    Delete {
        node: Pick,
    },
    /// The process is killed, perhaps while it writes a checkpoint; a clone takes its place.
    Crash {
        machine: Pick,
        writing: bool,
        reopen: Pick,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let index = any::<Pick>;
    let value = 1..1000u32;
    // New processes are rare: they take most of the time.
    prop_oneof![
        24 => (index(), 0..ALL, value.clone())
            .prop_map(|(machine, place, value)| Step::Write { machine, place, value }),
        16 => (index(), any::<bool>(), any::<bool>()).prop_map(|(machine, background, paused)| {
            Step::Checkpoint { machine, background, paused }
        }),
        4 => (index(), 0..ALL, value)
            .prop_map(|(machine, place, value)| Step::WriteMeanwhile { machine, place, value }),
        4 => (index(), any::<bool>(), 0..200_000u64).prop_map(|(machine, background, room)| {
            Step::CheckpointFails { machine, background, room }
        }),
        1 => (index(), any::<bool>()).prop_map(|(from, warm)| Step::Clone { from, warm }),
        16 => (index(), index(), any::<bool>())
            .prop_map(|(machine, to, paused)| Step::Rollback { machine, to, paused }),
        4 => index().prop_map(|node| Step::Delete { node }),
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
    /// The machines that something happened to in this case; the others are at the root.
    touched: [bool; MACHINES],
}

fn address(place: usize) -> (u32, u32) {
    let (page, count) = PLACES[place];
    (page << 12, count)
}

/// Where a place of the disk is once it was read, and how many pages with its value.
fn disk_address(place: usize) -> (u32, u32) {
    let (sector, count) = DISK_PLACES[place];
    (TARGET + sector * SECTOR, count.div_ceil(PAGE / SECTOR))
}

/// The values that the sums of some places show.
fn values<const N: usize>(sums: &[u32], place: impl Fn(usize) -> (u32, u32)) -> [u32; N] {
    std::array::from_fn(|number| {
        let count = place(number).1;
        // A remainder would be a mixture of two values.
        if sums[number].is_multiple_of(count) { sums[number] / count } else { u32::MAX }
    })
}

/// Compares memory, then the disk, with what they should have.
fn look(machine: &mut Machine, content: &mut Content, what: &str) -> Result<(), TestCaseError> {
    let sums = machine.guest.sums_of_table(TABLE, ALL);
    let (memory, seen) = (values(&sums, address), values(&sums[PLACES.len()..], disk_address));
    machine.guest.read_disk(0, TARGET, DISK_SECTORS * SECTOR);
    let first = TABLE + 8 * u32::try_from(PLACES.len()).unwrap();
    let sums = machine.guest.sums_of_table(first, DISK_PLACES.len());
    let disk = values(&sums, disk_address);
    prop_assert_eq!(Content { memory, disk, seen }, *content, "{}", what);
    content.seen = disk;
    Ok(())
}

/// Has the guest write a value to a place of either kind.
fn write(machine: &mut Machine, content: &mut Content, place: usize, value: u32) {
    if place < PLACES.len() {
        let (first, count) = address(place);
        machine.guest.fill(first, value, count);
        content.memory[place] = value;
    } else {
        let place = place - PLACES.len();
        let (sector, sectors) = DISK_PLACES[place];
        machine.guest.fill(SOURCE, value, disk_address(place).1);
        machine.guest.write_disk(sector, SOURCE, sectors * SECTOR);
        content.disk[place] = value;
    }
}

/// A disk with a value at the first place and zeroes.
fn base(value: u32) -> File {
    let file = memory_file();
    file.set_len((DISK_SECTORS * SECTOR).into()).unwrap();
    let at = DISK_PLACES[0].0 * SECTOR;
    file.write_all_at(&value.to_le_bytes(), at.into()).unwrap();
    file
}

impl World {
    fn new() -> Self {
        let mut machine = Machine::boot_with_disk(MEMORY, base(5));
        let mut content = Content { memory: [0; _], disk: [0; _], seen: [0; _] };
        content.disk[0] = 5;
        machine.guest.start_disk();
        let places = (0..PLACES.len()).map(address);
        let places: Vec<_> = places.chain((0..DISK_PLACES.len()).map(disk_address)).collect();
        machine.guest.put_table(TABLE, &places);
        // Some places stay zeroes, and the disk's first one what the base has.
        for place in (0..ALL).filter(|place| place % 3 != 0 && *place != PLACES.len()) {
            write(&mut machine, &mut content, place, 5);
        }
        let (root, _) = machine.checkpoint_to("root", memory_file(), false);
        Self {
            machines: vec![(machine, content)],
            nodes: vec![(root, content)],
            count: 0,
            awake: 0,
            touched: [false; MACHINES],
        }
    }

    /// Chooses a machine and lets it run instead of the one before.
    fn wake(&mut self, machine: Pick) -> usize {
        let at = pick(machine, self.machines.len());
        self.touched[at] = true;
        self.wake_at(at)
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
    fn clone(&mut self, at: usize, from: Pick, vmm: Vmm) -> Result<(), TestCaseError> {
        let (node, mut content) = self.nodes[pick(from, self.nodes.len())].clone();
        let mut machine = Machine::clone_in(vmm, &node);
        look(&mut machine, &mut content, &format!("a clone of {}", node.id))?;
        self.touched[at] = true;
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

    fn checkpoint(&mut self, at: usize, background: bool, meanwhile: Option<(usize, u32)>) {
        let name = self.name();
        let (machine, content) = &mut self.machines[at];
        let before = *content;
        let file = memory_file();
        machine.begin_checkpoint(&name, &file, background);
        if let Some((place, value)) = meanwhile {
            // Answered when the pause is over.
            machine.vmm.send(Op::Status {}, &[]).unwrap();
            let answers = [machine.vmm.answer_any().unwrap()];
            write(machine, content, place, value);
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
                let at = self.wake(*machine);
                let (machine, content) = &mut self.machines[at];
                write(machine, content, *place, *value);
            }
            Step::Checkpoint { machine, background, paused } => {
                let at = self.wake(*machine);
                self.paused(at, *paused, |world| world.checkpoint(at, *background, None));
            }
            Step::WriteMeanwhile { machine, place, value } => {
                let at = self.wake(*machine);
                self.checkpoint(at, true, Some((*place, *value)));
            }
            Step::CheckpointFails { machine, background, room } => {
                let at = self.wake(*machine);
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
                self.clone(self.machines.len().min(MACHINES - 1), *from, vmm)?;
            }
            Step::Rollback { machine, to, paused } => {
                let at = self.wake(*machine);
                let (node, content) = self.nodes[pick(*to, self.nodes.len())].clone();
                self.paused(at, *paused, |world| world.machines[at].0.roll_back(&node));
                let (machine, now) = &mut self.machines[at];
                *now = content;
                look(machine, now, &format!("a rollback to {}", node.id))?;
            }
            Step::Delete { node } => {
                // Its file stays while others, or a machine, stand on it. The root stays.
                if self.nodes.len() > 1 {
                    let at = 1 + pick(*node, self.nodes.len() - 1);
                    self.nodes.remove(at);
                }
            }
            Step::Crash { machine, writing, reopen } => {
                let at = self.wake(*machine);
                let file = memory_file();
                let machine = &mut self.machines[at].0;
                if *writing {
                    machine.begin_checkpoint("half", &file, true);
                }
                machine.vmm.kill();
                whole_or_nothing(file);
                self.clone(at, *reopen, Vmm::start())?;
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

    /// Looks at every machine, and brings everything back to the root for the next case.
    fn end(&mut self) -> Result<(), TestCaseError> {
        self.nodes.truncate(1);
        for at in 0..self.machines.len() {
            self.wake_at(at);
            let (machine, content) = &mut self.machines[at];
            look(machine, content, "in the end")?;
            if !std::mem::take(&mut self.touched[at]) {
                continue;
            }
            let (root, before) = &self.nodes[0];
            machine.roll_back(root);
            *content = *before;
            // What was left over would be the fault of this case and not of the next.
            look(machine, content, "back at the root")?;
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
        // A case that panics or fails does not give its machines back.
        let taken = world.lock().unwrap_or_else(|e| e.into_inner()).take();
        let mut now = taken.unwrap_or_else(World::new);
        for step in &steps {
            now.take(step)?;
        }
        now.end()?;
        *world.lock().unwrap_or_else(|e| e.into_inner()) = Some(now);
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}
