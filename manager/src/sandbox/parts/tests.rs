//! What machines are made of, with real files.

use std::io::Write as _;

use coppice_image::{CpuIdentity, HeaderInfo, Kind, Writer};

use super::*;
use crate::home::Home;
use crate::store::NewSandbox;

/// A store with one checkpoint of a machine without disks.
fn checkpoint() -> (tempfile::TempDir, Store, Meta) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&Home::at(dir.path())).unwrap();
    let machine = Machine {
        vcpus: 1,
        memory_mib: 64,
        kernel: "/vmlinux".into(),
        cmdline: String::new(),
        initrd: None,
        cid: 3,
        rng: false,
        balloon: None,
    };
    let new = NewSandbox { id: None, name: None, machine, disks: Vec::new() };
    let (mut sandbox, _) = store.create_sandbox(new).unwrap();
    let new = store.begin_checkpoint(&mut sandbox, None, Default::default()).unwrap();
    let info = HeaderInfo { cpu: CpuIdentity::default(), build: "test".into(), ram_pages: 64 };
    let mut writer = Writer::new(new.file().try_clone().unwrap(), info).unwrap();
    writer.section(Kind::Meta, 0, 1, true, new.meta_text().unwrap().as_bytes()).unwrap();
    writer.finish().unwrap();
    store.publish_checkpoint(&new).unwrap();
    let meta = store.complete_checkpoint(new, &mut sandbox).unwrap();
    (dir, store, meta)
}

/// The chain that a clone is handed.
fn chain(store: &Store, meta: &Meta) -> ChainSpec {
    let (spec, _) = Parts::of_checkpoint(store, meta, Vec::new()).unwrap().finish();
    let Start::Checkpoint(chain) = spec.start else { panic!("it boots") };
    chain
}

#[test]
fn later_clones_get_the_working_set_that_the_first_one_left() {
    let (_dir, store, meta) = checkpoint();
    assert_eq!(chain(&store, &meta).working_set, None);
    let new = store.begin_working_set(&meta.id).unwrap().unwrap();
    new.file().write_all(b"pages").unwrap();
    assert_eq!(chain(&store, &meta).working_set, None, "it is not complete");
    store.complete_working_set(&new).unwrap();
    let chain = chain(&store, &meta);
    assert_eq!((chain.layers, chain.working_set), (vec![0], Some(1)));
}

#[test]
fn the_first_directory_that_can_hold_it_takes_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    nameless_file(&[&missing, dir.path()]).unwrap();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn the_error_is_about_the_directory_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    let error = nameless_file(&[&missing, &dir.path().join("other")]).unwrap_err();
    assert!(error.to_string().contains(missing.to_str().unwrap()), "{error}");
}

#[test]
fn a_pipe_is_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        Mode::RUSR | Mode::WUSR,
        0,
    )
    .unwrap();
    open_regular(&fifo).unwrap_err();
}

#[test]
fn what_the_user_appends_comes_last() {
    assert!(cmdline(Format::Ext4, Some("quiet=no a")).ends_with(" quiet=no a"));
    assert!(cmdline(Format::Cpio, None).contains("rdinit="));
}
