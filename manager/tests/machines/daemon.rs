//! What a daemon finds in the store when it starts.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use coppice_manager::sandbox::{CheckpointRequest, Kept};

use crate::scene::{Scene, block_on};

/// Label of checkpoints that daemons make.
const LABEL: &str = "coppice.snapshot";

#[test]
fn a_checkpoint_that_a_dead_daemon_promised_to_nobody_is_removed_and_no_other() {
    if !coppice_micro::kvm() {
        return;
    }
    block_on(async {
        let scene = Scene::new();
        let (id, _guest) = scene.boot().await;
        let mut kept = Kept::open(&scene.store, &id).await.unwrap();
        let of_daemon = BTreeMap::from([(LABEL.to_owned(), id.to_string())]);
        for labels in [of_daemon, BTreeMap::from([("mine".to_owned(), String::new())])] {
            let request = CheckpointRequest { labels, ..CheckpointRequest::default() };
            kept.checkpoint(request).await.unwrap();
        }
        drop(kept);

        let mut daemon = Command::new(env!("CARGO_BIN_EXE_coppice"))
            .args(["serve", "--listen", "127.0.0.1:0"])
            .env("COPPICE_HOME", scene.store.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut line).unwrap();
        daemon.kill().unwrap();
        daemon.wait().unwrap();
        let left = scene.store.checkpoints().unwrap().checkpoints;
        let left: Vec<_> = left.iter().flat_map(|found| found.meta.labels.keys()).collect();
        assert_eq!(left, ["mine"]);
        Kept::remove(&scene.store, &id).await.unwrap();
    });
}
