//! Sandboxes that come and go, a thousand times: neither processes, descriptors, mappings nor
//! files are left.

use std::fs;
use std::process::Command;

use coppice_manager::sandbox::{CheckpointRequest, Kept, Shell};

use crate::scene::{Scene, block_on};

const CYCLES: usize = 1000;
/// As many at a time as on a busy host.
const ABREAST: usize = 4;
/// Run before anything is counted, so that what is made once has been made.
const WARM_UP: usize = 20;

/// Set for the process that counts itself, in which nothing else runs.
const ALONE: &str = "COPPICE_TEST_ALONE";

fn entries(path: &str) -> usize {
    fs::read_dir(path).unwrap().count()
}

fn mappings() -> usize {
    fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// Processes this one started that are there, dead ones included.
async fn children() -> String {
    // The runtime buries the dead when it hears of a death.
    assert!(tokio::process::Command::new("true").status().await.unwrap().success());
    let list = format!("/proc/self/task/{}/children", std::process::id());
    fs::read_to_string(list).unwrap().trim().to_owned()
}

#[test]
fn a_thousand_clones_that_come_and_go_leave_nothing() {
    if !coppice_micro::kvm() {
        return;
    }
    if std::env::var_os(ALONE).is_none() {
        let mut alone = Command::new(std::env::current_exe().unwrap());
        alone.args(["--exact", "cycles::a_thousand_clones_that_come_and_go_leave_nothing"]);
        assert!(alone.env(ALONE, "1").status().unwrap().success());
        return;
    }
    block_on(async {
        let scene = Scene::new();
        let (id, _guest) = scene.boot().await;
        let mut kept = Kept::open(&scene.store, &id).await.unwrap();
        let base = kept.checkpoint(CheckpointRequest::default()).await.unwrap().meta.id;
        drop(kept);
        Kept::remove(&scene.store, &id).await.unwrap();
        let files = scene.files();
        let mut before = (0, 0);
        let mut running = tokio::task::JoinSet::new();
        for cycle in 0..CYCLES {
            if cycle == WARM_UP {
                while running.join_next().await.is_some() {}
                before = (entries("/proc/self/fd"), mappings());
            }
            if running.len() == ABREAST {
                running.join_next().await.unwrap().unwrap();
            }
            let (store, program) = (scene.store.clone(), scene.program.clone());
            let base = base.clone();
            running.spawn(async move {
                let shell =
                    Shell::new(&store, &program, Scene::machine(), None, None).await.unwrap();
                match cycle % 10 {
                    // Some never become more than a shell.
                    0 => shell.discard().await.unwrap(),
                    _ => {
                        let kept = shell.start(&base).await.unwrap();
                        let id = kept.record().id.clone();
                        drop(kept);
                        Kept::remove(&store, &id).await.unwrap();
                    }
                }
            });
        }
        while let Some(done) = running.join_next().await {
            done.unwrap();
        }
        assert_eq!(children().await, "");
        assert_eq!(entries("/proc/self/fd"), before.0);
        assert!(mappings() < before.1 + 20, "{} mappings, {} before", mappings(), before.1);
        assert_eq!(scene.files(), files);
    });
}

#[test]
fn a_shell_whose_command_dies_ends() {
    if !coppice_micro::kvm() {
        return;
    }
    block_on(async {
        let scene = Scene::new();
        let shell =
            Shell::new(&scene.store, &scene.program, Scene::machine(), None, None).await.unwrap();
        let record = scene.store.sandboxes().unwrap().remove(0).record.unwrap();
        drop(shell);
        record.process.unwrap().gone().await.unwrap();
        assert_eq!(scene.store.check(false, true).unwrap().repaired, 1);
        assert_eq!(scene.files(), Vec::<String>::new());
    });
}
