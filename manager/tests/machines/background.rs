//! Checkpoints on a host that does not let memory be write-protected.

use coppice_manager::failure::Class;
use coppice_manager::sandbox::{CheckpointRequest, Kept};

use crate::scene::{Scene, block_on};

const PLACE: u32 = 0x20_0000;

#[test]
fn a_refused_background_copy_changes_nothing() {
    if !coppice_micro::kvm() {
        return;
    }
    block_on(async {
        let scene = Scene::without_write_protection();
        let (id, mut guest) = scene.boot().await;
        guest.write(PLACE, 7);
        let mut kept = Kept::open(&scene.store, &id).await.unwrap();
        let (standing, files) = (kept.record().standing.clone(), scene.files());
        let background = CheckpointRequest { background: true, ..CheckpointRequest::default() };
        let refused = kept.checkpoint(background).await.unwrap_err().failure();
        assert_eq!(refused.class, Class::Host, "{refused}");
        assert!(refused.message.contains("write-protected"), "{refused}");
        assert_eq!(kept.record().standing, standing);
        assert_eq!(scene.files(), files);
        drop(kept);
        Kept::remove(&scene.store, &id).await.unwrap();
    });
}

#[test]
fn a_machine_that_runs_is_checkpointed_without_a_background_copy_then() {
    if !coppice_micro::kvm() {
        return;
    }
    block_on(async {
        let scene = Scene::without_write_protection();
        let (id, mut guest) = scene.boot().await;
        guest.write(PLACE, 7);
        let mut kept = Kept::open(&scene.store, &id).await.unwrap();
        let made = kept.checkpoint_running(CheckpointRequest::default()).await.unwrap();
        drop(kept);
        let (_vmm, mut copy) = scene.look_into(&made.meta).await;
        assert_eq!(copy.read(PLACE), 7);
        Kept::remove(&scene.store, &id).await.unwrap();
    });
}
