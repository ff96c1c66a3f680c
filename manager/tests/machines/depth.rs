//! A session as long as one likes: each of its checkpoints restores, whatever was merged on the
//! way, and the machine itself goes on.

use coppice_manager::sandbox::{CheckpointRequest, Kept};

use crate::scene::{Scene, block_on};

const PLACE: u32 = 0x20_0000;
/// Enough for layers to be merged twice, the second time with what the first one made.
const CHECKPOINTS: u32 = 130;

#[test]
fn checkpoints_in_a_row_all_restore_whatever_was_merged() {
    if !coppice_micro::kvm() {
        return;
    }
    block_on(async {
        let scene = Scene::new();
        let (id, mut guest) = scene.boot().await;
        let mut kept = Kept::open(&scene.store, &id).await.unwrap();
        let mut made = Vec::new();
        for step in 1..=CHECKPOINTS {
            guest.write(PLACE, step);
            // Pages that earlier ones wrote, too, and pages of its own.
            guest.fill(PLACE + 0x10_0000 + (step % 32) * 0x1000, step, 3);
            let sum = guest.sum(PLACE + 0x10_0000, 40);
            let meta = kept.checkpoint(CheckpointRequest::default()).await.unwrap().meta;
            made.push((meta, step, sum));
        }
        let deepest = made.iter().map(|(meta, ..)| meta.memory_chain().len()).max().unwrap();
        assert!(deepest <= 70, "{deepest} layers of memory");
        for (meta, step, sum) in made.iter().filter(|(_, step, _)| step % 10 == 0) {
            let (_vmm, mut look) = scene.look_into(meta).await;
            assert_eq!(look.read(PLACE), *step);
            assert_eq!(look.sum(PLACE + 0x10_0000, 40), *sum, "checkpoint {step}");
        }
        assert_eq!(guest.read(PLACE), CHECKPOINTS);
        drop(kept);
        Kept::remove(&scene.store, &id).await.unwrap();
        assert_eq!(scene.store.check(true, false).unwrap().findings, []);
    });
}
