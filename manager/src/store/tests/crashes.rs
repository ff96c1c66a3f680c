//! Death before every single change that an operation makes to the disk: the store opens, every
//! completed checkpoint is whole, and what is left over can be removed.

use super::files::crash;
use super::*;

/// A sandbox on the second of two checkpoints, with a machine that keeps its layers open.
struct Scene {
    f: Fixture,
    a: Id,
    b: Id,
    sandbox: Id,
}

impl Scene {
    fn new() -> Self {
        let f = Fixture::new();
        let mut sandbox = f.sandbox(None);
        let a = f.checkpoint(&mut sandbox);
        let b = f.checkpoint(&mut sandbox);
        let id = sandbox.record().id.clone();
        Self { f, a, b, sandbox: id }
    }

    fn lock(&self) -> Sandbox {
        self.f.store.lock_sandbox(&self.sandbox).unwrap()
    }

    /// The two checkpoints, unless the operation removes one of them, are there with all they
    /// stand on, and so is everything the sandbox's record names.
    fn assert_whole(&self, removed: Option<&Id>) {
        let store = Store::open(&Home::at(self.f.store.path())).unwrap();
        let report = store.check(true, false).unwrap();
        assert!(!report.findings.iter().any(Finding::is_loss), "{report:?}");
        for id in [&self.a, &self.b].into_iter().filter(|id| Some(*id) != removed) {
            let meta = store.checkpoint(id).unwrap();
            let file = File::open(store.memory_path(id)).unwrap();
            Image::open(file).unwrap().verify().unwrap();
            assert_eq!(meta.id, *id);
        }
        let Ok(sandbox) = store.lock_sandbox(&self.sandbox) else { return };
        let record = sandbox.record();
        for layer in record.standing.disk_layers() {
            assert!(store.disk_path(layer).exists(), "the sandbox lost {layer}");
        }
        for layer in &record.standing.memory {
            assert!(store.memory_path(layer).exists(), "the sandbox lost {layer}");
        }
    }

    /// With all machines gone, a repair leaves exactly what the visible checkpoints stand on.
    fn assert_nothing_leaks(&self) {
        self.f.store.check(false, true).unwrap();
        self.f.assert_clean();
        let mut expected = BTreeSet::new();
        for checkpoint in self.f.store.checkpoints().unwrap().checkpoints {
            let meta = checkpoint.meta;
            expected.insert(format!("{}.ckpt", meta.id));
            for id in &meta.standing.memory {
                let path = self.f.store.memory_path(id);
                expected.insert(path.file_name().unwrap().to_str().unwrap().to_owned());
            }
            expected.extend(meta.standing.disk_layers().map(|id| format!("{id}.disk")));
        }
        assert_eq!(self.f.files(), expected);
    }
}

/// Runs an operation that dies before its first change, before its second, and so on until it
/// lives through; `after` says what must hold each time.
fn at_every_step(operation: impl Fn(&Scene) -> Result<(), Error>, after: impl Fn(&Scene, bool)) {
    for step in 0.. {
        let scene = Scene::new();
        let result = crash::before_change(step, || operation(&scene));
        let died = result.is_err();
        after(&scene, died);
        scene.assert_nothing_leaks();
        if !died {
            assert!(step > 0, "an operation that changes nothing is no test");
            return;
        }
        assert!(step < 100, "it never lives through: {result:?}");
    }
}

#[test]
fn a_checkpoint_survives_death_at_every_step() {
    at_every_step(
        |scene| scene.f.try_checkpoint(&mut scene.lock(), None).map(drop),
        |scene, died| {
            scene.assert_whole(None);
            let count = scene.f.store.checkpoints().unwrap().checkpoints.len();
            assert!(count == 3 || count == 2 && died, "{count} checkpoints");
        },
    );
}

#[test]
fn a_checkpoint_whose_command_died_is_found_out() {
    // How far the command came, whether the machine writes to its new layer, whether it stands on
    // the checkpoint.
    let cases =
        [(false, false, false), (false, true, false), (true, true, false), (true, true, true)];
    for (published, switched, told) in cases {
        let scene = Scene::new();
        let mut sandbox = scene.lock();
        let before = sandbox.record().standing.clone();
        let new = scene.f.store.begin_checkpoint(&mut sandbox, None, BTreeMap::new()).unwrap();
        let planned = sandbox.record().next.clone().unwrap().standing;
        let id = new.meta().id.clone();
        if published {
            write_image(&new);
            scene.f.store.publish_checkpoint(&new).unwrap();
        }
        let machine: Vec<File> = new.tops().map(|top| top.try_clone().unwrap()).collect();
        if !switched {
            let_go(&machine);
        }
        let_go([new.file()]);
        drop((new, sandbox));

        let mut sandbox = scene.lock();
        let stands_on = if told { &id } else { &scene.b };
        scene.f.store.settle(&mut sandbox, Some(stands_on.as_str())).unwrap();
        let expected = match (told, switched) {
            (true, _) => planned,
            (false, true) => Standing { disks: planned.disks, ..before },
            (false, false) => before,
        };
        assert_eq!(sandbox.record().standing, expected);
        assert_eq!(sandbox.record().next, None);
        assert_eq!(scene.f.store.checkpoint(&id).is_ok(), published);
        assert!(scene.f.files().iter().all(|name| !name.ends_with(".tmp")));
        scene.assert_whole_locked(&sandbox);
        drop((machine, sandbox));
        scene.assert_nothing_leaks();
    }
}

impl Scene {
    fn assert_whole_locked(&self, sandbox: &Sandbox) {
        for layer in sandbox.record().standing.disk_layers() {
            assert!(self.f.store.disk_path(layer).exists(), "the sandbox lost {layer}");
        }
    }
}

/// As a machine does that does not take the files it was handed.
fn let_go<'a>(files: impl IntoIterator<Item = &'a File>) {
    for file in files {
        rustix::fs::flock(file, FlockOperation::Unlock).unwrap();
    }
}

#[test]
fn a_rollback_whose_command_died_is_found_out() {
    for moved in [false, true] {
        let scene = Scene::new();
        let mut sandbox = scene.lock();
        let before = sandbox.record().standing.clone();
        // To where it stands: the checkpoint tells nothing then.
        let (_, tops) = scene.f.store.begin_move(&mut sandbox, &scene.b).unwrap();
        let planned = sandbox.record().next.clone().unwrap().standing;
        drop(sandbox);
        if !moved {
            let_go(&tops);
        }

        let mut sandbox = scene.lock();
        scene.f.store.settle(&mut sandbox, Some(scene.b.as_str())).unwrap();
        let expected = if moved { &planned } else { &before };
        assert_eq!(sandbox.record().standing, *expected);
        drop((tops, sandbox));
        scene.assert_nothing_leaks();
    }
}

#[test]
fn a_clone_survives_death_at_every_step() {
    at_every_step(
        |scene| scene.f.try_sandbox(Some(&scene.a), None).map(drop),
        |scene, _| scene.assert_whole(None),
    );
}

#[test]
fn a_rollback_survives_death_at_every_step() {
    at_every_step(
        |scene| {
            let mut sandbox = scene.lock();
            let _tops = scene.f.store.begin_move(&mut sandbox, &scene.a)?;
            scene.f.store.complete_move(&mut sandbox)
        },
        |scene, _| scene.assert_whole(None),
    );
}

#[test]
fn the_removal_of_a_checkpoint_survives_death_at_every_step() {
    at_every_step(
        |scene| scene.f.store.remove_checkpoint(&scene.a).map(drop),
        |scene, died| {
            scene.assert_whole(Some(&scene.a));
            assert!(died || scene.f.store.checkpoint(&scene.a).is_err());
        },
    );
}

#[test]
fn the_removal_of_a_sandbox_survives_death_at_every_step() {
    at_every_step(
        |scene| scene.f.store.remove_sandbox(scene.lock()),
        |scene, died| {
            scene.assert_whole(None);
            assert!(died || scene.f.store.sandboxes().unwrap().is_empty());
        },
    );
}

#[test]
fn a_repair_survives_death_at_every_step() {
    at_every_step(
        |scene| {
            let orphan = Id::new().unwrap();
            std::fs::write(scene.f.store.disk_path(&orphan), b"x").unwrap();
            scene.f.store.check(false, true).map(drop)
        },
        |scene, _| scene.assert_whole(None),
    );
}
