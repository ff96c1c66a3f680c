//! What a check finds, and what a repair does about it.

use super::*;

/// Two checkpoints, one on the other, and no sandbox.
fn two() -> (Fixture, Id, Id) {
    let f = Fixture::new();
    let mut sandbox = f.sandbox(None);
    let a = f.checkpoint(&mut sandbox);
    let b = f.checkpoint(&mut sandbox);
    f.store.remove_sandbox(sandbox).unwrap();
    f.assert_clean();
    (f, a, b)
}

#[test]
fn a_damaged_checkpoint_is_set_aside_and_the_rest_goes_on() {
    let (f, a, b) = two();
    damage(&f.store.memory_path(&b), 100);
    let report = f.store.check(false, false).unwrap();
    assert!(matches!(report.findings.as_slice(), [Finding::Damaged { .. }]), "{report:?}");
    // Until then it blocks removal, since what it stands on is not known.
    assert!(matches!(f.store.collect(), Err(Error::Unclear { count: 1 })));
    assert_eq!(f.store.checkpoints().unwrap().checkpoints.len(), 1);

    f.store.check(false, true).unwrap();
    assert!(f.store.checkpoints_dir().join(format!("{b}.bad")).exists());
    f.store.checkpoint(&a).unwrap();
    f.assert_clean();
}

#[test]
fn damaged_page_data_is_found_by_a_deep_check_only() {
    let (f, _, b) = two();
    damage(&f.store.memory_path(&b), 16 * PAGE + 5);
    f.assert_clean_but_deep();
    let report = f.store.check(true, false).unwrap();
    let [Finding::Damaged { reason, .. }] = report.findings.as_slice() else {
        panic!("{report:?}")
    };
    assert!(reason.contains("pages 3 to 4"), "{reason}");
}

#[test]
fn an_image_of_the_store_is_there_as_long_as_somebody_needs_it() {
    let f = Fixture::new();
    let new = f.store.new_image().unwrap();
    std::fs::write(new.path(), b"image").unwrap();
    assert_eq!(f.store.collect().unwrap().files, 0, "it is being written");
    let image = f.store.keep_image(new).unwrap();
    assert_eq!(f.store.collect().unwrap().files, 0, "it is about to be used");
    let path = image.path().to_owned();
    let mut sandbox = f.sandbox_of(&path);
    drop(image);
    let checkpoint = f.checkpoint(&mut sandbox);
    f.assert_clean();
    f.store.remove_sandbox(sandbox).unwrap();
    assert!(path.exists(), "a checkpoint stands on it");
    f.store.remove_checkpoint(&checkpoint).unwrap();
    assert!(!path.exists());

    drop(f.store.keep_image(f.store.new_image().unwrap()).unwrap());
    assert_eq!(f.store.collect().unwrap().files, 1, "nobody needs it");
}

impl Fixture {
    fn assert_clean_but_deep(&self) {
        assert_eq!(self.store.check(false, false).unwrap().findings, []);
    }
}

#[test]
fn a_missing_layer_is_told_for_each_checkpoint_that_needs_it() {
    let (f, a, b) = two();
    let layer = f.store.checkpoint(&a).unwrap().standing.disks[0].layers[0].clone();
    std::fs::remove_file(f.store.disk_path(&layer)).unwrap();
    let report = f.store.check(false, true).unwrap();
    let ids: BTreeSet<Id> = report
        .findings
        .iter()
        .map(|finding| match finding {
            Finding::Base { id, .. } => id.clone(),
            other => panic!("{other}"),
        })
        .collect();
    assert_eq!(ids, BTreeSet::from([a, b]));
}

#[test]
fn what_belongs_to_nothing_is_found_and_removed() {
    let (f, ..) = two();
    let id = Id::new().unwrap();
    std::fs::write(f.store.disk_path(&id), [0; 5000]).unwrap();
    std::fs::write(f.store.temp_path(&id), b"half").unwrap();
    std::fs::write(f.store.hidden_path(&id), b"half").unwrap();
    std::fs::create_dir(f.store.sandboxes_dir().join(id.as_str())).unwrap();
    let report = f.store.check(false, false).unwrap();
    let orphans = |report: &Report| {
        report.findings.iter().filter(|f| matches!(f, Finding::Orphan { .. })).count()
    };
    assert_eq!(orphans(&report), 4, "{report:?}");
    f.store.check(false, true).unwrap();
    // The one that claims to be a checkpoint's memory but is none was set aside.
    f.assert_clean();
}

#[test]
fn a_file_that_is_not_ours_is_told_and_left_alone() {
    let (f, ..) = two();
    let path = f.store.layers_dir().join("notes.txt");
    std::fs::write(&path, b"mine").unwrap();
    let report = f.store.check(false, true).unwrap();
    assert_eq!(report.findings, [Finding::Foreign { path: path.clone() }]);
    assert!(path.exists());
}

#[test]
fn a_sandbox_without_a_machine_goes_with_its_layers() {
    let (f, a, _) = two();
    let before = f.files();
    drop(f.sandbox(Some(&a)));
    assert!(matches!(
        f.store.check(false, false).unwrap().findings.as_slice(),
        [Finding::Ended { .. }]
    ));
    f.store.check(false, true).unwrap();
    assert_eq!(f.files(), before);
    f.assert_clean();
}

#[test]
fn a_running_machine_with_a_damaged_record_keeps_everything_in_place() {
    let (f, a, _) = two();
    let sandbox = f.sandbox(Some(&a));
    let _vmm = machine(&sandbox);
    std::fs::write(sandbox.directory().join("sandbox.json"), b"{").unwrap();
    drop(sandbox);
    let before = f.files();
    let report = f.store.check(false, true).unwrap();
    assert!(matches!(report.findings.as_slice(), [Finding::Sandbox { .. }]), "{report:?}");
    assert_eq!(f.files(), before);
}

#[test]
fn a_record_of_another_checkpoint_is_not_believed() {
    let (f, a, b) = two();
    let forged = Id::new().unwrap();
    std::fs::copy(f.store.memory_path(&a), f.store.checkpoint_path(&forged)).unwrap();
    let error = f.store.checkpoint(&forged).unwrap_err();
    assert!(matches!(error, Error::Record { .. }), "{error}");
    f.store.checkpoint(&b).unwrap();
}
