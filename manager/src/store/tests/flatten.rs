//! Long sessions: whatever is merged on the way, every checkpoint keeps its content, bit for bit.

use coppice_image::{ClusterRun, SealedMap, Source, View, decode_maps, encode_maps};

use super::files::crash;
use super::*;

const CLUSTERS: u64 = 16;
const UNIT: usize = 4096;

/// A sandbox whose machine is a model: what its memory and its disk hold, one byte a page.
struct Session {
    f: Fixture,
    sandbox: Sandbox,
    seed: u64,
    memory: Vec<u8>,
    disk: Vec<u8>,
}

/// A checkpoint and what it must hold.
struct Moment {
    id: Id,
    memory: Vec<u8>,
    disk: Vec<u8>,
}

impl Session {
    fn new() -> Self {
        let f = Fixture::new();
        let sandbox = f.sandbox(None);
        let memory = vec![0; usize::try_from(RAM_PAGES).unwrap()];
        let disk = vec![0; usize::try_from(CLUSTERS).unwrap()];
        Self { f, sandbox, seed: 0xC0FFEE, memory, disk }
    }

    /// A number below `limit` (xorshift64*).
    fn below(&mut self, limit: u64) -> u64 {
        self.seed ^= self.seed >> 12;
        self.seed ^= self.seed << 25;
        self.seed ^= self.seed >> 27;
        (self.seed.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % limit
    }

    /// Changes a few places of `content`; gives them in order. Zero is as likely as it matters.
    fn change(&mut self, memory: bool) -> Vec<(u64, u8)> {
        let places = if memory { RAM_PAGES } else { CLUSTERS };
        let mut changed = std::collections::BTreeMap::new();
        for _ in 0..1 + self.below(4) {
            let value = u8::try_from(self.below(4) * self.below(64)).unwrap();
            changed.insert(self.below(places), value);
        }
        let content = if memory { &mut self.memory } else { &mut self.disk };
        for (place, value) in &changed {
            content[usize::try_from(*place).unwrap()] = *value;
        }
        changed.into_iter().collect()
    }

    /// Changes something and makes a checkpoint, as the VMM and the manager do.
    fn step(&mut self) -> Moment {
        let (pages, clusters) = (self.change(true), self.change(false));
        let top = self.sandbox.record().standing.tops().next().unwrap().clone();
        let file = File::options().write(true).open(self.f.store.disk_path(&top)).unwrap();
        file.set_len(CLUSTERS * PAGE).unwrap();
        for (cluster, value) in &clusters {
            // Of zeroes, the guest discards the cluster: a hole.
            if *value != 0 {
                file.write_all_at(&[*value; UNIT], cluster * PAGE).unwrap();
            }
        }
        if self.f.store.is_deep(&self.sandbox.record().standing) {
            self.f.store.flatten(&mut self.sandbox).unwrap();
        }
        let store = &self.f.store;
        let new = store.begin_checkpoint(&mut self.sandbox, None, BTreeMap::new()).unwrap();
        write(&new, &pages, &clusters);
        store.publish_checkpoint(&new).unwrap();
        let id = store.complete_checkpoint(new, &mut self.sandbox).unwrap().id;
        Moment { id, memory: self.memory.clone(), disk: self.disk.clone() }
    }

    fn assert_restores(&self, moment: &Moment) {
        let meta = self.f.store.checkpoint(&moment.id).unwrap();
        assert!(meta.memory_chain().len() + meta.standing.disk_layers().count() <= 140);
        assert_eq!(restored(&self.f.store, &meta), (moment.memory.clone(), moment.disk.clone()));
    }
}

fn write(new: &NewCheckpoint, pages: &[(u64, u8)], clusters: &[(u64, u8)]) {
    let cpu = CpuIdentity::default();
    let info = HeaderInfo { cpu, build: "test".into(), ram_pages: RAM_PAGES };
    let mut writer = Writer::new(new.file().try_clone().unwrap(), info).unwrap();
    for (page, value) in pages {
        writer.pages(*page, 1, &[*value; UNIT]).unwrap();
    }
    let mut runs: Vec<ClusterRun> = Vec::new();
    for (cluster, _) in clusters {
        match runs.last_mut() {
            Some(run) if run.end() == *cluster => run.count += 1,
            _ => runs.push(ClusterRun { first: *cluster, count: 1 }),
        }
    }
    let maps = encode_maps(&[SealedMap::new(CLUSTERS, runs).unwrap()]);
    writer.section(Kind::DiskMap, 0, 1, true, &maps).unwrap();
    writer.section(Kind::Meta, 0, 1, true, new.meta_text().unwrap().as_bytes()).unwrap();
    writer.finish().unwrap();
}

/// Memory and disk as a machine that starts from the checkpoint gets them.
fn restored(store: &Store, meta: &Meta) -> (Vec<u8>, Vec<u8>) {
    let images: Vec<Image> = meta
        .memory_chain()
        .iter()
        .map(|id| Image::open(File::open(store.memory_path(id)).unwrap()).unwrap())
        .collect();
    let mut view = View::empty(RAM_PAGES);
    let mut maps = Vec::new();
    for (number, image) in (0..).zip(&images) {
        image.verify().unwrap();
        view.push(number, &image.page_index().unwrap()).unwrap();
        let section = image.section(Kind::DiskMap, 0).unwrap().unwrap();
        maps.extend(decode_maps(&section.data).unwrap());
    }
    let unit = |file: &File, at: u64| {
        let mut bytes = [0; UNIT];
        file.read_exact_at(&mut bytes, at * PAGE).unwrap();
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a torn page");
        bytes[0]
    };
    let memory =
        (0..RAM_PAGES).map(|page| match view.runs(page..page + 1).next().unwrap().source {
            Source::Zero => 0,
            Source::Layer { layer, page } => unit(images[usize::from(layer)].file(), page),
        });
    let layers = &meta.standing.disks[0].layers;
    assert_eq!(layers.len(), maps.len(), "each layer has its map");
    let disk = (0..CLUSTERS).map(|cluster| {
        let holds = |map: &SealedMap| map.runs().any(|r| (r.first..r.end()).contains(&cluster));
        match maps.iter().rposition(holds) {
            Some(at) => unit(&File::open(store.disk_path(&layers[at])).unwrap(), cluster),
            None => 0,
        }
    });
    (memory.collect(), disk.collect())
}

#[test]
fn each_of_three_hundred_checkpoints_keeps_its_content() {
    let mut session = Session::new();
    let moments: Vec<Moment> = (0..300).map(|_| session.step()).collect();
    for moment in &moments {
        session.assert_restores(moment);
    }
    session.f.store.remove_sandbox(session.sandbox).unwrap();
    session.f.assert_clean();
}

#[test]
fn what_only_removed_checkpoints_stood_on_goes_with_them() {
    let mut session = Session::new();
    let moments: Vec<Moment> = (0..150).map(|_| session.step()).collect();
    let (last, others) = moments.split_last().unwrap();
    for moment in others {
        session.f.store.remove_checkpoint(&moment.id).unwrap();
    }
    session.assert_restores(last);
    let files = session.f.files().len();
    assert!(files <= 142, "what was merged is not needed any more, but there are {files} files");
    let next = session.step();
    session.assert_restores(&next);
    session.f.store.remove_sandbox(session.sandbox).unwrap();
    for id in [last.id.clone(), next.id] {
        session.f.store.remove_checkpoint(&id).unwrap();
    }
    assert_eq!(session.f.files(), BTreeSet::new());
}

#[test]
fn flattening_survives_death_at_every_step() {
    for step in 0.. {
        let mut session = Session::new();
        let moments: Vec<Moment> = (0..8).map(|_| session.step()).collect();
        let before = session.sandbox.record().standing.clone();
        let flat = crash::before_change(step, || session.f.store.flatten(&mut session.sandbox));
        for moment in &moments {
            session.assert_restores(moment);
        }
        // Its command died: the record on disk tells, not what this process remembers.
        let id = session.sandbox.record().id.clone();
        drop(session.sandbox);
        session.sandbox = session.f.store.lock_sandbox(&id).unwrap();
        if flat.is_err() {
            assert_eq!(session.sandbox.record().standing, before, "step {step}");
        }
        let next = session.step();
        session.assert_restores(&next);
        session.f.store.remove_sandbox(session.sandbox).unwrap();
        session.f.assert_clean();
        if flat.is_ok() {
            assert!(step >= 8, "two files made and named, two directories, the record");
            return;
        }
        assert!(step < 100, "it never lives through");
    }
}

#[test]
fn damage_is_not_merged_into_a_layer_with_good_checksums() {
    let mut session = Session::new();
    let moments: Vec<Moment> = (0..8).map(|_| session.step()).collect();
    let path = session.f.store.memory_path(&moments[2].id);
    // Page data begins on the file's page 16; the first page written may have been zeroes.
    let data = (16..20).find(|page| {
        let mut byte = [0];
        let read = File::open(&path).unwrap().read_exact_at(&mut byte, page * PAGE);
        read.is_ok() && byte[0] != 0
    });
    damage(&path, data.unwrap() * PAGE);
    let error = session.f.store.flatten(&mut session.sandbox).unwrap_err();
    assert!(matches!(error, Error::Flatten { .. }), "{error}");
    session.step();
}
