//! The engine over the software model of a work queue.

use proptest::prelude::*;

use super::*;
use crate::model::{Behaviour, ModelQueue, Release, Script};

const LONG: Duration = Duration::from_secs(20);

fn settings(deadline: Duration) -> Settings {
    let (block_on_fault, max_transfer) = (false, 2 << 20);
    let (verify, failures) = (true, 3);
    Settings { block_on_fault, max_transfer, verify, deadline, failures, rest: LONG }
}

struct Rig {
    engine: Engine,
    arena: Arc<Arena>,
    release: Release,
}

fn rig(depth: usize, script: Script, settings: Settings) -> Rig {
    let arena = Arc::new(Arena::new(depth, 128 << 10).unwrap());
    let queue = ModelQueue::new(depth, settings.max_transfer, Arc::clone(&arena), script).unwrap();
    let release = queue.release().unwrap();
    let engine = Engine::new(Box::new(queue), Arc::clone(&arena), settings, system_clock());
    Rig { engine, arena, release }
}

fn engine(script: &[Behaviour]) -> Engine {
    rig(1, Script::of(script), settings(LONG)).engine
}

fn sample() -> Vec<u8> {
    (0..20_000_u32).flat_map(|n| (n / 7).to_le_bytes()).collect()
}

/// Compresses and decompresses the sample, and returns the engine.
fn round_trip(mut engine: Engine) -> Engine {
    let sample = sample();
    let packed = engine.run_one(Chunk::Compress(&sample)).unwrap();
    assert!(packed.len() < sample.len() / 2);
    let back = engine.run_one(Chunk::Decompress(&packed, sample.len())).unwrap();
    assert!(back == sample);
    engine
}

fn only(reason: Reason) -> std::collections::BTreeMap<Reason, u64> {
    [(reason, 1)].into()
}

#[test]
fn the_device_does_all_when_all_is_well() {
    let engine = round_trip(engine(&[]));
    let expected = Health { submitted: 2, completed: 2, ..Health::default() };
    assert_eq!(*engine.health(), expected);
}

#[test]
fn a_page_fault_is_touched_and_tried_again_once() {
    let once = round_trip(engine(&[Behaviour::PageFault]));
    assert_eq!((once.health().retried, once.health().fallbacks.len()), (1, 0));
    let twice = round_trip(engine(&[Behaviour::PageFault, Behaviour::PageFault]));
    assert_eq!(twice.health().retried, 1);
    assert_eq!(twice.health().fallbacks, only(Reason::Status(Status::PageFault)));
}

#[test]
fn a_queue_that_blocks_on_faults_has_none() {
    let settings = Settings { block_on_fault: true, ..settings(LONG) };
    let engine = round_trip(rig(1, Script::of(&[Behaviour::PageFault]), settings).engine);
    assert_eq!((engine.health().retried, engine.health().fallbacks.len()), (0, 0));
}

#[test]
fn output_with_another_checksum_is_not_handed_on() {
    let engine = round_trip(engine(&[Behaviour::Work, Behaviour::Corrupt]));
    assert_eq!(engine.health().fallbacks, only(Reason::WrongChecksum));
}

#[test]
fn compressed_output_that_does_not_come_back_is_not_handed_on() {
    let engine = round_trip(engine(&[Behaviour::Corrupt]));
    assert_eq!(engine.health().fallbacks, only(Reason::WrongOutput));
}

#[test]
fn a_full_queue_is_tried_again() {
    let engine = round_trip(engine(&[Behaviour::Full, Behaviour::Full]));
    assert_eq!(engine.health().busy, 2);
    assert_eq!(engine.health().fallbacks.len(), 0);
}

#[test]
fn failures_in_a_row_open_the_breaker() {
    let mut engine = engine(&[Behaviour::Fail(0x20); 3]);
    for _ in 0..4 {
        engine.run_one(Chunk::Compress(b"abc")).unwrap();
    }
    let status = Reason::Status(Status::HardwareError1);
    assert_eq!(engine.health().fallbacks, [(status, 3), (Reason::BreakerOpen, 1)].into());
    assert_eq!(engine.health().submitted, 3);
}

#[test]
fn a_damaged_chunk_is_an_error_and_no_fault_of_the_device() {
    let mut engine = engine(&[]);
    for _ in 0..5 {
        let error = engine.run_one(Chunk::Decompress(&[0xFF; 40], 100)).unwrap_err();
        assert_eq!(error, ChunkError::Software(CodecError::Corrupt));
    }
    assert_eq!(engine.health().submitted, 5);
}

#[test]
fn a_chunk_beyond_the_limit_is_refused() {
    let mut engine = engine(&[]);
    let limit = engine.max_chunk();
    assert!(engine.run_one(Chunk::Compress(&vec![7; limit])).is_ok());
    let error = engine.run_one(Chunk::Compress(&vec![7; limit + 1])).unwrap_err();
    assert_eq!(error, ChunkError::TooLarge { size: limit + 1, limit });
}

#[test]
fn a_device_that_never_answers_is_given_up_and_its_memory_kept() {
    let script = Script::of(&[Behaviour::Never]);
    let Rig { engine, arena, release } = rig(2, script, settings(Duration::from_millis(20)));
    let engine = round_trip(engine);
    assert!(engine.is_disabled() && arena.is_leaked());
    let expected = [(Reason::Deadline, 1), (Reason::Disabled, 1)].into();
    assert_eq!(engine.health().fallbacks, expected);
    drop(engine);
    // The late write goes where nothing else is.
    release.run();
    assert_eq!(arena.completion(0).status, Status::Success);
}

#[test]
fn zlib_reads_what_the_model_wrote() {
    use std::io::Read as _;
    let packed = engine(&[]).run_one(Chunk::Compress(&sample())).unwrap();
    let mut plain = Vec::new();
    flate2::read::DeflateDecoder::new(packed.as_slice()).read_to_end(&mut plain).unwrap();
    assert!(plain == sample());
}

/// Pages with equal content `distance` bytes apart.
fn repeats(distance: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    let block: Vec<u8> = (0..distance).map(|_| random()).collect();
    [block.clone(), block].concat()
}

#[test]
fn the_model_reads_what_zlib_writes_with_a_window_of_4_kb() {
    let mut engine = engine(&[]);
    let plain = repeats(6000);
    let mut packed = vec![0; bound(plain.len())];
    let size = Codec::new().compress(&plain, &mut packed).unwrap();
    let back = engine.run_one(Chunk::Decompress(&packed[..size], plain.len())).unwrap();
    assert!(back == plain && engine.health().fallbacks.is_empty());
}

#[test]
fn the_model_refuses_what_refers_back_more_than_4_kb() {
    let mut engine = engine(&[]);
    let plain = repeats(6000);
    let mut wide = flate2::Compress::new(flate2::Compression::best(), false);
    let mut packed = Vec::with_capacity(plain.len() * 2);
    wide.compress_vec(&plain, &mut packed, flate2::FlushCompress::Finish).unwrap();
    assert!(packed.len() < plain.len() * 2 / 3, "refers back 6000 bytes");
    let back = engine.run_one(Chunk::Decompress(&packed, plain.len())).unwrap();
    assert!(back == plain);
    assert_eq!(engine.health().fallbacks, only(Reason::Status(Status::AnalyticsError)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn chunks_come_back_as_they_were_whatever_the_device_does(
        seed in any::<u64>(),
        percent in 0..100_u64,
        depth in 1..5_usize,
        chunks in proptest::collection::vec(
            proptest::collection::vec(prop_oneof![Just(0_u8), any::<u8>()], 0..3000), 1..12),
    ) {
        let settings = Settings { failures: 1000, ..settings(LONG) };
        let mut engine = rig(depth, Script::seeded(seed, percent, 60), settings).engine;
        let jobs: Vec<Chunk<'_>> = chunks.iter().map(|chunk| Chunk::Compress(chunk)).collect();
        let mut packed = vec![None; chunks.len()];
        engine.run(&jobs, &mut |index, bytes| packed[index] = Some(bytes.unwrap().to_vec()));
        let packed: Vec<Vec<u8>> = packed.into_iter().map(Option::unwrap).collect();
        let jobs: Vec<Chunk<'_>> = packed
            .iter()
            .zip(&chunks)
            .map(|(packed, chunk)| Chunk::Decompress(packed, chunk.len()))
            .collect();
        let mut seen = 0;
        let mut wrong = Vec::new();
        engine.run(&jobs, &mut |index, bytes| {
            seen += 1;
            if bytes.ok() != Some(&chunks[index]) {
                wrong.push(index);
            }
        });
        prop_assert_eq!(seen, chunks.len());
        prop_assert!(wrong.is_empty(), "{:?}", wrong);
    }
}
