//! Random request sequences against a plain vector of bytes.

use coppice_micro::tree::memory_file;
use proptest::prelude::*;

use super::*;

/// Not a multiple of a cluster, with a tail that is not even a sector.
const SECTORS: u64 = 16 * 8 + 3;
pub(super) const BYTES: usize = 512 * 131 + 77;

#[derive(Debug, Clone)]
pub(super) enum Step {
    Read { sector: u64, sectors: usize },
    Write { sector: u64, sectors: usize, fill: u8 },
    Discard { sector: u64, sectors: u32 },
    WriteZeroes { sector: u64, sectors: u32, unmap: bool },
    Flush,
}

pub(super) fn step() -> impl Strategy<Value = Step> {
    let sector = 0..SECTORS + 2;
    let sectors = prop_oneof![3 => 0usize..10, 1 => 0usize..100];
    let short = prop_oneof![3 => 0u32..10, 1 => 0u32..100];
    prop_oneof![
        4 => (sector.clone(), sectors.clone()).prop_map(|(sector, sectors)| Step::Read { sector, sectors }),
        4 => (sector.clone(), sectors, any::<u8>())
            .prop_map(|(sector, sectors, fill)| Step::Write { sector, sectors, fill }),
        1 => (sector.clone(), short.clone()).prop_map(|(sector, sectors)| Step::Discard { sector, sectors }),
        1 => (sector, short, any::<bool>())
            .prop_map(|(sector, sectors, unmap)| Step::WriteZeroes { sector, sectors, unmap }),
        1 => Just(Step::Flush),
    ]
}

/// Descriptor lengths; long enough that a request never needs more than the queue has.
pub(super) fn cuts() -> impl Strategy<Value = Vec<u32>> {
    prop_oneof![
        Just(vec![u32::MAX]),
        prop::collection::vec(500u32..5000, 1..6),
        prop::collection::vec(1u32..40, 1..4).prop_map(|mut short| {
            short.push(8000);
            short
        }),
    ]
}

/// A disk and the bytes that it must have.
pub(super) struct Checked {
    pub(super) guest: Guest,
    pub(super) model: Vec<u8>,
}

impl Checked {
    pub(super) fn new(backend: Box<dyn Backend>, model: Vec<u8>) -> Self {
        Self { guest: Guest::new(backend, false, ALL), model }
    }

    /// Sends a request and compares the answer with the model.
    pub(super) fn apply(&mut self, step: &Step, cuts: &[u32]) {
        let span = |sector: u64, sectors: usize| {
            let start = usize::try_from(sector).unwrap() * 512;
            start..start + sectors * 512
        };
        let capacity = usize::try_from(SECTORS).unwrap() * 512;
        let (range, kind, sent, wanted) = match step {
            Step::Read { sector, sectors } => {
                (span(*sector, *sectors), spec::VIRTIO_BLK_T_IN, vec![], sectors * 512)
            }
            Step::Write { sector, sectors, fill } => {
                (span(*sector, *sectors), spec::VIRTIO_BLK_T_OUT, vec![*fill; sectors * 512], 0)
            }
            Step::Discard { sector, sectors } => (
                span(*sector, usize::try_from(*sectors).unwrap()),
                spec::VIRTIO_BLK_T_DISCARD,
                range_bytes(*sector, *sectors, 0),
                0,
            ),
            Step::WriteZeroes { sector, sectors, unmap } => (
                span(*sector, usize::try_from(*sectors).unwrap()),
                spec::VIRTIO_BLK_T_WRITE_ZEROES,
                range_bytes(*sector, *sectors, u32::from(*unmap)),
                0,
            ),
            Step::Flush => (0..0, spec::VIRTIO_BLK_T_FLUSH, vec![], 0),
        };
        let sector = u64::try_from(range.start / 512).unwrap();
        let answer = self.guest.request(kind, sector, &sent, wanted, cuts);
        if range.end > capacity {
            assert_eq!(answer.status, spec::VIRTIO_BLK_S_IOERR, "{step:?}");
            return;
        }
        assert_eq!(answer.status, spec::VIRTIO_BLK_S_OK, "{step:?}");
        match step {
            Step::Read { .. } => assert!(answer.data == self.model[range], "{step:?}"),
            Step::Write { fill, .. } => self.model[range].fill(*fill),
            Step::Discard { .. } | Step::WriteZeroes { .. } => self.model[range].fill(0),
            Step::Flush => {}
        }
    }

    /// Compares the whole disk with the model.
    pub(super) fn check_whole(&mut self) {
        let mut whole = Vec::new();
        for sector in 0..SECTORS {
            whole.extend(self.guest.simple(spec::VIRTIO_BLK_T_IN, sector, &[], 512).data);
        }
        assert!(whole == self.model[..whole.len()]);
    }
}

/// Runs the steps and compares every answer, and at the end the whole disk, with the model.
fn check(backend: Box<dyn Backend>, model: Vec<u8>, steps: Vec<(Step, Vec<u32>)>) {
    let mut disk = Checked::new(backend, model);
    for (step, cuts) in steps {
        disk.apply(&step, &cuts);
    }
    disk.check_whole();
}

fn overlay_check(top: File, steps: Vec<(Step, Vec<u32>)>) {
    let (base, content) = image(BYTES);
    let backend = Overlay::new(base.try_clone().unwrap(), top).unwrap();
    check(Box::new(backend), content.clone(), steps);
    let mut after = vec![0; BYTES];
    base.read_exact_at(&mut after, 0).unwrap();
    assert!(after == content, "the base was written");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_raw_disk_is_a_vector_of_bytes(steps in prop::collection::vec((step(), cuts()), 1..40)) {
        let (file, content) = image(BYTES);
        check(Box::new(Raw::new(file).unwrap()), content, steps);
    }

    #[test]
    fn a_raw_disk_on_tmpfs_is_one_too(steps in prop::collection::vec((step(), cuts()), 1..40)) {
        let (_, content) = image(BYTES);
        let file = memory_file();
        file.write_all_at(&content, 0).unwrap();
        check(Box::new(Raw::new(file).unwrap()), content, steps);
    }

    #[test]
    fn an_overlay_is_a_vector_of_bytes(steps in prop::collection::vec((step(), cuts()), 1..40)) {
        overlay_check(tempfile::tempfile().unwrap(), steps);
    }

    #[test]
    fn an_overlay_on_tmpfs_is_one_too(steps in prop::collection::vec((step(), cuts()), 1..40)) {
        overlay_check(memory_file(), steps);
    }
}

#[test]
fn an_overlay_takes_room_only_for_what_was_written() {
    use std::os::unix::fs::MetadataExt as _;
    let base = tempfile::tempfile().unwrap();
    base.set_len(1 << 30).unwrap();
    let top = tempfile::tempfile().unwrap();
    let backend = Overlay::new(base, top.try_clone().unwrap()).unwrap();
    let mut guest = Guest::new(Box::new(backend), false, ALL);
    guest.status(spec::VIRTIO_BLK_T_OUT, 1 << 20, &[7; 8192], 0);
    guest.status(spec::VIRTIO_BLK_T_FLUSH, 0, &[], 0);
    let blocks = top.metadata().unwrap().blocks();
    assert!((16..=64).contains(&blocks), "{blocks} blocks of 512 bytes");
}
