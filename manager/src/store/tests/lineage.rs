//! What stands on what: through checkpoints, clones, rollbacks and removal.

use super::*;

#[test]
fn a_checkpoint_stands_on_its_parents_memory_and_the_layers_below_it() {
    let f = Fixture::new();
    let mut sandbox = f.sandbox(None);
    let first_top = sandbox.record().standing.disks[0].layers.clone();
    let a = f.checkpoint(&mut sandbox);
    let b = f.checkpoint(&mut sandbox);
    let meta_a = f.store.checkpoint(&a).unwrap();
    let meta_b = f.store.checkpoint(&b).unwrap();
    assert_eq!(meta_a.standing.parent, None);
    assert_eq!(meta_a.standing.disks[0].layers, first_top);
    assert_eq!(meta_b.standing.parent, Some(a.clone()));
    assert_eq!(meta_b.memory_chain(), [a, b.clone()]);
    assert_eq!(meta_b.standing.disks[0].layers.len(), 2);
    let standing = &sandbox.record().standing;
    assert_eq!(standing.parent, Some(b));
    assert_eq!(standing.disks[0].layers.len(), 3);
    f.assert_clean_with(sandbox);
}

impl Fixture {
    /// As [`Fixture::assert_clean`] with the sandbox's machine gone.
    fn assert_clean_with(&self, sandbox: Sandbox) {
        self.store.remove_sandbox(sandbox).unwrap();
        self.assert_clean();
    }
}

#[test]
fn a_clone_writes_to_a_layer_of_its_own() {
    let f = Fixture::new();
    let mut parent = f.sandbox(None);
    let a = f.checkpoint(&mut parent);
    let (one, two) = (f.sandbox(Some(&a)), f.sandbox(Some(&a)));
    let layers = |sandbox: &Sandbox| sandbox.record().standing.disks[0].layers.clone();
    assert_eq!(layers(&one)[0], layers(&two)[0]);
    let tops: BTreeSet<Id> =
        [&parent, &one, &two].iter().map(|s| layers(s).last().unwrap().clone()).collect();
    assert_eq!(tops.len(), 3);
}

#[test]
fn a_rollback_drops_what_was_written_since() {
    let f = Fixture::new();
    let mut sandbox = f.sandbox(None);
    let a = f.checkpoint(&mut sandbox);
    f.write_disk(&sandbox, 100);
    let dropped = sandbox.record().standing.tops().next().unwrap().clone();
    f.roll_back(&mut sandbox, &a);
    assert!(!f.store.disk_path(&dropped).exists());
    assert_eq!(sandbox.record().standing.parent, Some(a));
    assert_eq!(f.files().len(), 3, "the checkpoint, its layer and the new top: {:?}", f.files());
}

#[test]
fn an_inner_checkpoint_can_go_and_its_children_stay() {
    let f = Fixture::new();
    let mut sandbox = f.sandbox(None);
    let a = f.checkpoint(&mut sandbox);
    let b = f.checkpoint(&mut sandbox);
    let c = f.checkpoint(&mut sandbox);
    f.store.remove_sandbox(sandbox).unwrap();
    f.store.remove_checkpoint(&b).unwrap();
    assert!(matches!(f.store.checkpoint(&b), Err(Error::NotFound { .. })));
    assert_eq!(f.store.checkpoint(&c).unwrap().memory_chain(), [a.clone(), b.clone(), c.clone()]);
    assert!(f.store.memory_path(&b).exists());
    let tree = f.store.tree().unwrap();
    assert_eq!(tree.roots[0].children[0].checkpoint.meta.id, c);
    f.assert_clean();

    f.store.remove_checkpoint(&c).unwrap();
    assert!(!f.store.memory_path(&b).exists(), "nothing stands on it any more");
    f.store.remove_checkpoint(&a).unwrap();
    assert_eq!(f.files(), BTreeSet::new());
}

#[test]
fn what_a_live_sandbox_stands_on_stays() {
    let f = Fixture::new();
    let mut sandbox = f.sandbox(None);
    let a = f.checkpoint(&mut sandbox);
    f.store.remove_checkpoint(&a).unwrap();
    let tree = f.store.tree().unwrap();
    assert!(tree.roots.is_empty());
    assert_eq!(tree.sandboxes.len(), 1);
    let b = f.checkpoint(&mut sandbox);
    assert_eq!(f.store.checkpoint(&b).unwrap().memory_chain(), [a, b]);
    f.assert_clean_with(sandbox);
}

#[test]
fn names_are_found_and_given_once() {
    let f = Fixture::new();
    let mut web = f.try_sandbox(None, Some("web")).unwrap();
    let a = f.try_checkpoint(&mut web, Some("ready")).unwrap().id;
    assert_eq!(f.store.find("ready").unwrap(), Found::Checkpoint(a.clone()));
    assert_eq!(f.store.find("web").unwrap(), Found::Sandbox(web.record().id.clone()));
    assert_eq!(f.store.find(&a.as_str()[..8]).unwrap(), Found::Checkpoint(a.clone()));
    assert!(matches!(f.store.find("nobody"), Err(Error::NotFound { .. })));
    assert!(matches!(f.store.find(""), Err(Error::NotFound { .. })));
    for taken in ["web", "ready"] {
        let error = f.try_checkpoint(&mut web, Some(taken)).unwrap_err();
        assert!(matches!(error, Error::NameTaken { .. }), "{error}");
        f.try_sandbox(None, Some(taken)).unwrap_err();
    }
    f.store.remove_checkpoint(&a).unwrap();
    f.try_checkpoint(&mut web, Some("ready")).unwrap();
}

#[test]
fn a_name_that_a_checkpoint_will_have_is_taken() {
    let f = Fixture::new();
    let (mut one, mut two) = (f.sandbox(None), f.sandbox(None));
    let name = || Some("ready".parse().unwrap());
    let _new = f.store.begin_checkpoint(&mut one, name(), BTreeMap::new()).unwrap();
    let second = f.store.begin_checkpoint(&mut two, name(), BTreeMap::new());
    assert!(matches!(second, Err(Error::NameTaken { .. })));
}

#[test]
fn the_beginning_of_two_ids_is_not_guessed_at() {
    let f = Fixture::new();
    let mut sandbox = f.sandbox(None);
    // One more than there are letters, so that two begin alike.
    for _ in 0..33 {
        f.checkpoint(&mut sandbox);
    }
    let letters = "0123456789abcdefghjkmnpqrstvwxyz";
    let ambiguous = letters.chars().any(|letter| {
        matches!(f.store.find(&letter.to_string()), Err(Error::Ambiguous { count: 2.., .. }))
    });
    assert!(ambiguous);
}

#[test]
fn a_running_sandbox_is_not_removed() {
    let f = Fixture::new();
    let sandbox = f.sandbox(None);
    let id = sandbox.record().id.clone();
    let vmm = machine(&sandbox);
    let error = f.store.remove_sandbox(sandbox).unwrap_err();
    assert!(matches!(error, Error::Running { .. }), "{error}");
    assert!(f.store.sandboxes().unwrap()[0].alive);
    drop(vmm);
    assert!(!f.store.sandboxes().unwrap()[0].alive);
    f.store.remove_sandbox(f.store.lock_sandbox(&id).unwrap()).unwrap();
    f.assert_clean();
}

#[test]
fn who_waited_for_a_sandbox_that_was_removed_is_told_so() {
    let f = Fixture::new();
    let sandbox = f.sandbox(None);
    let (store, id) = (f.store.clone(), sandbox.record().id.clone());
    let waiting = std::thread::spawn(move || store.lock_sandbox(&id).map(drop));
    f.store.remove_sandbox(sandbox).unwrap();
    let error = waiting.join().unwrap().unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error}");
}

#[test]
fn a_changed_base_image_is_told_before_a_machine_is_made() {
    let f = Fixture::new();
    let mut sandbox = f.sandbox(None);
    let a = f.checkpoint(&mut sandbox);
    std::fs::write(f.dir.path().join("base.ext4"), b"other").unwrap();
    let error = f.store.checkpoint(&a).unwrap_err();
    assert!(error.to_string().contains("was changed since"), "{error}");
    std::fs::remove_file(f.dir.path().join("base.ext4")).unwrap();
    let error = f.store.checkpoint(&a).unwrap_err();
    assert!(error.to_string().contains("is not there"), "{error}");
}

#[test]
fn sizes_are_those_of_a_checkpoints_own_layers() {
    let f = Fixture::new();
    let mut sandbox = f.sandbox(None);
    f.write_disk(&sandbox, 1 << 20);
    f.checkpoint(&mut sandbox);
    f.checkpoint(&mut sandbox);
    let sizes: Vec<_> = f.store.checkpoints().unwrap().checkpoints;
    assert!(sizes[0].disk_bytes >= 1 << 20);
    assert_eq!(sizes[1].disk_bytes, 0);
    assert!((8192..1 << 18).contains(&sizes[1].memory_bytes), "{}", sizes[1].memory_bytes);
}
