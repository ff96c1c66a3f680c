//! Working sets: made once, gone with their checkpoint, and no trouble to anybody.

use std::io::Write as _;

use super::*;

impl Fixture {
    fn record(&self, id: &Id) {
        let new = self.store.begin_working_set(id).unwrap().unwrap();
        new.file().write_all(b"pages").unwrap();
        self.store.complete_working_set(&new).unwrap();
    }
}

#[test]
fn a_working_set_is_there_once_it_is_complete() {
    let f = Fixture::new();
    let a = f.checkpoint(&mut f.sandbox(None));
    assert!(f.store.working_set(&a).is_none());
    let new = f.store.begin_working_set(&a).unwrap().unwrap();
    assert!(f.store.working_set(&a).is_none());
    f.store.complete_working_set(&new).unwrap();
    assert!(f.store.working_set(&a).is_some());
}

#[test]
fn only_one_makes_a_working_set() {
    let f = Fixture::new();
    let a = f.checkpoint(&mut f.sandbox(None));
    let first = f.store.begin_working_set(&a).unwrap();
    assert!(f.store.begin_working_set(&a).unwrap().is_none(), "somebody is at it");
    f.store.complete_working_set(&first.unwrap()).unwrap();
    assert!(f.store.begin_working_set(&a).unwrap().is_none(), "it is there");
}

#[test]
fn what_a_dead_writer_left_is_in_nobodys_way() {
    let f = Fixture::new();
    let a = f.checkpoint(&mut f.sandbox(None));
    drop(f.store.begin_working_set(&a).unwrap());
    f.record(&a);
    assert!(f.store.working_set(&a).is_some());
}

#[test]
fn a_working_set_goes_with_its_checkpoint() {
    let f = Fixture::new();
    let mut sandbox = f.sandbox(None);
    let (a, b) = (f.checkpoint(&mut sandbox), f.checkpoint(&mut sandbox));
    for id in [&a, &b] {
        f.record(id);
    }
    drop(f.store.begin_working_set(&f.checkpoint(&mut sandbox)).unwrap());
    f.store.remove_sandbox(sandbox).unwrap();
    f.assert_clean();
    f.store.remove_checkpoint(&a).unwrap();
    assert!(f.store.working_set(&a).is_none(), "{a} is not visible any more");
    assert!(f.store.working_set(&b).is_some());
    f.assert_clean();
    assert!(f.store.begin_working_set(&a).unwrap().is_none(), "nothing is made for it again");
}

#[test]
fn a_working_set_without_a_checkpoint_is_found_and_removed() {
    let f = Fixture::new();
    let path = f.store.checkpoints_dir().join(format!("{}.ws", Id::new().unwrap()));
    std::fs::write(&path, b"lost").unwrap();
    let report = f.store.check(false, true).unwrap();
    assert!(matches!(report.findings[..], [Finding::Orphan { .. }]), "{report:?}");
    assert!(!path.exists());
}
