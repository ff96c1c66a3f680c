//! What a daemon finds in the store when it starts.

use std::collections::BTreeMap;

use coppice_manager::sandbox::{CheckpointRequest, Kept};

use crate::beside::Home;
use crate::scene::block_on;

/// Label of checkpoints that daemons make.
const LABEL: &str = "coppice.snapshot";

#[test]
fn a_checkpoint_that_a_dead_daemon_promised_to_nobody_is_removed_and_no_other() {
    if !coppice_micro::kvm() {
        return;
    }
    let mut home = Home::new();
    let store = home.scene.store.clone();
    let of_daemon = BTreeMap::from([(LABEL.to_owned(), home.id.to_string())]);
    block_on(async {
        let mut kept = Kept::open(&store, &home.id).await.unwrap();
        for labels in [of_daemon, BTreeMap::from([("mine".to_owned(), String::new())])] {
            let request = CheckpointRequest { labels, ..CheckpointRequest::default() };
            kept.checkpoint(request).await.unwrap();
        }
    });
    home.serve();
    let left = store.checkpoints().unwrap().checkpoints;
    let left: Vec<_> = left.iter().flat_map(|found| found.meta.labels.keys()).collect();
    assert_eq!(left, ["mine"]);
    home.said(&["kill", home.id.as_str()]);
}
