//! A VMM whose writes fail, or that dies, during a checkpoint: the store stays whole, everything
//! completed restores, and a machine that lives goes on.
//!
//! Writes fail by the limit on the size of a process's files (`RLIMIT_FSIZE`): the one that
//! crosses it is cut short, the next one is refused. Moved up step by step, it meets every write.

use std::time::Duration;

use coppice_manager::sandbox::{CheckpointRequest, Kept};
use rustix::process::{Pid, Resource, Rlimit, prlimit};

use crate::scene::{Scene, block_on};

/// Step of the limit: half a page, so that writes are also cut inside of one.
const STEP: u64 = 2048;
const PLACE: u32 = 0x20_0000;

fn limit(kept: &Kept, bytes: Option<u64>) {
    let pid = Pid::from_raw(i32::try_from(kept.vmm().pid()).unwrap());
    prlimit(pid, Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
}

#[test]
fn a_checkpoint_that_fails_at_any_write_costs_nothing() {
    if !coppice_micro::kvm() {
        return;
    }
    block_on(async {
        let scene = Scene::new();
        let (id, mut guest) = scene.boot().await;
        let mut made = Vec::new();
        for (step, bytes) in (1..).zip((0..).step_by(usize::try_from(STEP).unwrap())) {
            guest.write(PLACE, step);
            guest.fill(PLACE + 0x10_0000, step, 5);
            let mut kept = Kept::open(&scene.store, &id).await.unwrap();
            limit(&kept, Some(bytes));
            let result = kept.checkpoint(CheckpointRequest::default()).await;
            limit(&kept, None);
            scene.assert_whole();
            if step % 16 == 0 || result.is_ok() {
                // It goes on, and the next one has what the failed one would have had.
                let next = kept.checkpoint(CheckpointRequest::default()).await.unwrap().meta;
                made.push((next, step));
            }
            if let Ok(done) = result {
                made.push((done.meta, step));
                break;
            }
            assert!(step < 1000, "it never succeeds");
        }
        assert!(made.len() > 4, "too few writes to tell anything: {}", made.len());
        for (meta, step) in made {
            let (_vmm, mut guest) = scene.look_into(&meta).await;
            assert_eq!(guest.read(PLACE), step);
            assert_eq!(guest.sum(PLACE + 0x10_0000, 5), 5 * step);
        }
        Kept::remove(&scene.store, &id).await.unwrap();
        assert_eq!(scene.store.check(true, false).unwrap().findings, []);
    });
}

/// Machines that are killed.
const ROUNDS: u64 = 40;
/// Longest time until it happens, in microseconds: about what a checkpoint takes.
const LATEST: u64 = 8000;

#[test]
fn a_vmm_killed_at_any_moment_of_a_checkpoint_leaves_what_was_complete() {
    if !coppice_micro::kvm() {
        return;
    }
    block_on(async {
        let scene = Scene::new();
        let (mut seed, mut deaths) = (0xC0FF_EE00_u64, 0);
        for round in 0..ROUNDS {
            let (id, mut guest) = scene.boot().await;
            let mut kept = Kept::open(&scene.store, &id).await.unwrap();
            guest.write(PLACE, 1);
            let first = kept.checkpoint(CheckpointRequest::default()).await.unwrap().meta;
            guest.fill(PLACE, 2, 500);
            let process = kept.record().process.unwrap();
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let after = Duration::from_micros((seed >> 33) % LATEST);
            let killer = tokio::spawn(async move {
                // The moment is what the test is about, so it is drawn, not waited for.
                tokio::time::sleep(after).await;
                process.kill().await.unwrap();
            });
            let second = kept.checkpoint(CheckpointRequest::default()).await;
            killer.await.unwrap();
            drop(kept);
            deaths += u64::from(second.is_err());
            scene.assert_whole();
            scene.store.check(false, true).unwrap();
            // What is visible is complete, whether or not its command was told so.
            let listed = scene.store.checkpoints().unwrap().checkpoints;
            assert!(listed.len() <= 2 && listed.iter().any(|c| c.meta.id == first.id));
            assert!(second.is_err() || listed.len() == 2, "round {round}");
            for checkpoint in listed {
                let (_vmm, mut look) = scene.look_into(&checkpoint.meta).await;
                match checkpoint.meta.id == first.id {
                    true => assert_eq!(look.read(PLACE), 1, "round {round}"),
                    false => assert_eq!(look.sum(PLACE, 500), 1000, "round {round}"),
                }
            }
            for checkpoint in scene.store.checkpoints().unwrap().checkpoints {
                scene.store.remove_checkpoint(&checkpoint.meta.id).unwrap();
            }
            assert_eq!(scene.files(), Vec::<String>::new(), "round {round}");
        }
        assert!(deaths > 2, "too few died at work to tell anything: {deaths}");
    });
}
