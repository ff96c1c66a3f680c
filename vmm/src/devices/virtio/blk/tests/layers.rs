//! Trees of sealed layers: random requests, seals, rollbacks and clones against plain vectors of
//! bytes, and what a layer must not do.

use std::os::unix::fs::MetadataExt as _;

use coppice_micro::tree::memory_file;
use proptest::prelude::*;
use proptest::sample::Index;

use super::model::{BYTES, Checked, Step, cuts, step};
use super::*;
use coppice_image::SealedMap;

/// A point of the past: its layers with their encoded maps, and the disk's content.
#[derive(Clone)]
struct Node {
    layers: Vec<(Arc<File>, Vec<u8>)>,
    content: Vec<u8>,
}

impl Node {
    fn layers(&self) -> Vec<(File, SealedMap)> {
        let open = |(file, map): &(Arc<File>, Vec<u8>)| {
            (file.try_clone().unwrap(), SealedMap::decode(map).unwrap())
        };
        self.layers.iter().map(open).collect()
    }
}

/// A disk whose content and layers are known.
struct Branch {
    disk: Checked,
    base: Node,
}

impl Branch {
    fn from(base_file: &File, node: &Node, top: File) -> Self {
        let base_file = base_file.try_clone().unwrap();
        let overlay = Overlay::with_layers(base_file, node.layers(), top).unwrap();
        let disk = Checked::new(Box::new(overlay), node.content.clone());
        Self { disk, base: node.clone() }
    }

    fn seal(&mut self, top: File) -> Node {
        let SealedLayer { file, map } = self.disk.guest.blk.seal(top).unwrap();
        self.base.layers.push((file, map.encode()));
        self.base.content.clone_from(&self.disk.model);
        self.base.clone()
    }

    fn roll_back(&mut self, node: &Node, top: File) {
        self.disk.guest.blk.replace(node.layers(), top).unwrap();
        self.disk.model.clone_from(&node.content);
        self.base = node.clone();
    }
}

#[derive(Debug, Clone)]
enum Action {
    Request(Step, Vec<u32>),
    Seal,
    Rollback(Index),
    Clone(Index),
}

fn action() -> impl Strategy<Value = (Index, Action)> {
    let action = prop_oneof![
        8 => (step(), cuts()).prop_map(|(step, cuts)| Action::Request(step, cuts)),
        2 => Just(Action::Seal),
        1 => any::<Index>().prop_map(Action::Rollback),
        1 => any::<Index>().prop_map(Action::Clone),
    ];
    (any::<Index>(), action)
}

/// Runs the actions, each on one of the disks alive, and looks at all disks and points at the end.
fn check(new_file: impl Fn() -> File, actions: Vec<(Index, Action)>) {
    let (base, content) = image(BYTES);
    let mut nodes = vec![Node { layers: Vec::new(), content }];
    let mut branches = vec![Branch::from(&base, &nodes[0], new_file())];
    for (which, action) in actions {
        let count = branches.len();
        let branch = &mut branches[which.index(count)];
        match action {
            Action::Request(step, cuts) => branch.disk.apply(&step, &cuts),
            Action::Seal => nodes.push(branch.seal(new_file())),
            Action::Rollback(node) => branch.roll_back(node.get(&nodes), new_file()),
            Action::Clone(node) => {
                branches.push(Branch::from(&base, node.get(&nodes), new_file()));
            }
        }
    }
    branches.iter_mut().for_each(|branch| branch.disk.check_whole());
    for node in &nodes {
        Branch::from(&base, node, new_file()).disk.check_whole();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_disk_of_a_tree_is_a_vector_of_bytes(
        actions in prop::collection::vec(action(), 1..60),
    ) {
        check(|| tempfile::tempfile().unwrap(), actions);
    }

    #[test]
    fn a_tree_on_tmpfs_is_one_too(actions in prop::collection::vec(action(), 1..60)) {
        check(memory_file, actions);
    }
}

fn layered() -> (Guest, File) {
    let (base, _) = image(BYTES);
    let top = tempfile::tempfile().unwrap();
    let overlay = Overlay::new(base, top.try_clone().unwrap()).unwrap();
    (Guest::new(Box::new(overlay), false, ALL), top)
}

#[test]
fn a_layer_sealed_right_after_another_holds_nothing() {
    let (mut guest, _) = layered();
    guest.status(spec::VIRTIO_BLK_T_OUT, 8, &[7; 8192], 0);
    let first = guest.blk.seal(tempfile::tempfile().unwrap()).unwrap();
    let second = guest.blk.seal(tempfile::tempfile().unwrap()).unwrap();
    assert_eq!((first.map.held_clusters(), second.map.held_clusters()), (2, 0));
    assert_eq!(second.file.metadata().unwrap().blocks(), 0);
}

#[test]
fn a_sealed_layer_is_not_written_any_more() {
    let (mut guest, top) = layered();
    guest.status(spec::VIRTIO_BLK_T_OUT, 8, &[7; 4096], 0);
    guest.blk.seal(tempfile::tempfile().unwrap()).unwrap();
    guest.status(spec::VIRTIO_BLK_T_OUT, 9, &[8; 512], 0);
    guest.status(spec::VIRTIO_BLK_T_DISCARD, 0, &range_bytes(8, 8, 0), 0);
    let mut bytes = [0; 4096];
    top.read_exact_at(&mut bytes, 4096).unwrap();
    assert_eq!(bytes, [7; 4096]);
}

#[test]
fn only_disks_that_write_to_an_overlay_have_layers() {
    let raw = |read_only| {
        let backend = Raw::new(image(4096).0).unwrap();
        Blk::new(Box::new(backend), read_only, "").unwrap()
    };
    assert_eq!(raw(true).layering(), Layering::NotNeeded);
    assert_eq!(raw(false).layering(), Layering::Impossible);
    assert_eq!(layered().0.blk.layering(), Layering::Sealed);
    let sealed = raw(false).seal(tempfile::tempfile().unwrap());
    assert!(matches!(sealed, Err(DiskError::NotLayered)));
}

#[test]
fn a_refused_seal_changes_nothing() {
    let (mut guest, top) = layered();
    let refused = guest.blk.seal(image(1).0);
    assert!(matches!(refused, Err(DiskError::OverlayInUse)));
    guest.status(spec::VIRTIO_BLK_T_OUT, 8, &[7; 4096], 0);
    let sealed = guest.blk.seal(tempfile::tempfile().unwrap()).unwrap();
    assert_eq!(sealed.map.held_clusters(), 1);
    assert_eq!(sealed.file.metadata().unwrap().ino(), top.metadata().unwrap().ino());
}

#[test]
fn layers_of_another_disk_are_refused() {
    let (mut guest, _) = layered();
    let sealed = guest.blk.seal(tempfile::tempfile().unwrap()).unwrap();
    let file = || sealed.file.try_clone().unwrap();
    let larger = image(BYTES + 4096).0;
    let other = Overlay::with_layers(
        larger.try_clone().unwrap(),
        vec![(file(), sealed.map.clone())],
        tempfile::tempfile().unwrap(),
    );
    assert!(matches!(other, Err(DiskError::LayerSize { number: 0, .. })));
    let short = vec![(image(4096).0, sealed.map.clone())];
    let refused = guest.blk.replace(short, tempfile::tempfile().unwrap());
    assert!(matches!(refused, Err(DiskError::LayerSize { number: 0, .. })));
}
