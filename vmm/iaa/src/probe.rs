//! A known vector through a work queue: what `coppice doctor` runs.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::discover::Traits;
use crate::engine::{Chunk, ChunkError, Engine, Reason, Settings, system_clock};
use crate::queue::{DeviceQueue, Queue, QueueError};
use crate::sys::arena::Arena;
use crate::sys::cpu::features;

/// Bytes of the block that is compressed.
const BLOCK: usize = 4096;
/// Bytes of a slot, more than the block takes at worst.
const SLOT: usize = 8192;
/// How long the device may take for one descriptor.
const DEADLINE: Duration = Duration::from_secs(1);

/// Why a work queue failed its test.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// No memory for the test.
    #[error("no memory for the test")]
    Memory(#[source] std::io::Error),
    /// The queue cannot be opened.
    #[error("cannot be used")]
    Queue(#[from] QueueError),
    /// The codec failed, and so did software.
    #[error("the known block failed")]
    Chunk(#[from] ChunkError),
    /// The block came back changed.
    #[error("the known block came back changed")]
    Changed,
    /// The device did not do it.
    #[error("the device did not do the known block: {0}")]
    FellBack(Reason),
}

/// Compresses a known block on the queue whose device file is `path`, decompresses it there, and
/// compares. Returns how descriptors reached the device.
///
/// # Errors
/// [`ProbeError`]: the queue cannot be opened, or anything at all had to be done by software.
pub fn device(path: &Path, traits: &Traits) -> Result<&'static str, ProbeError> {
    let arena = Arc::new(Arena::new(1, SLOT).map_err(ProbeError::Memory)?);
    let queue = DeviceQueue::open(path, traits, features(), Arc::clone(&arena))?;
    let way = queue.way();
    run(Box::new(queue), arena, traits)?;
    Ok(way)
}

fn run(queue: Box<dyn Queue>, arena: Arc<Arena>, traits: &Traits) -> Result<(), ProbeError> {
    let settings = Settings {
        block_on_fault: traits.block_on_fault,
        max_transfer: traits.max_transfer,
        verify: true,
        deadline: DEADLINE,
        failures: 1,
        rest: DEADLINE,
    };
    let mut engine = Engine::new(queue, arena, settings, system_clock());
    let block = known_block();
    let packed = engine.run_one(Chunk::Compress(&block))?;
    let plain = engine.run_one(Chunk::Decompress(&packed, block.len()))?;
    if plain != block {
        return Err(ProbeError::Changed);
    }
    match engine.health().fallbacks.keys().next() {
        Some(reason) => Err(ProbeError::FellBack(*reason)),
        None => Ok(()),
    }
}

/// Text that repeats, with numbers in it.
fn known_block() -> Vec<u8> {
    let lines = (0_u32..).flat_map(|n| format!("line {n} of the known block\n").into_bytes());
    lines.take(BLOCK).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Status;
    use crate::discover::{self, Mode};
    use crate::model::{Behaviour, ModelQueue, Script};
    use crate::queue::DEVICES;

    fn on_the_model(script: &[Behaviour]) -> Result<(), ProbeError> {
        let (mode, max_transfer) = (Mode::Shared, 2 << 20);
        let traits = Traits { mode, size: 1, threshold: 1, block_on_fault: false, max_transfer };
        let arena = Arc::new(Arena::new(1, SLOT).unwrap());
        let script = Script::of(script);
        let queue = ModelQueue::new(1, max_transfer, Arc::clone(&arena), script).unwrap();
        run(Box::new(queue), arena, &traits)
    }

    #[test]
    fn a_queue_that_works_passes() {
        on_the_model(&[]).unwrap();
    }

    #[test]
    fn a_queue_that_needs_software_does_not_pass() {
        let error = on_the_model(&[Behaviour::Work, Behaviour::Fail(0x24)]).unwrap_err();
        let expected = Reason::Status(Status::Watchdog);
        assert!(matches!(error, ProbeError::FellBack(reason) if reason == expected), "{error}");
    }

    #[test]
    fn the_queues_of_this_machine_pass() {
        let mut tested = 0;
        for queue in discover::devices(Path::new(discover::SYSFS)).iter().flat_map(|d| &d.queues) {
            let Ok(traits) = &queue.traits else { continue };
            device(&Path::new(DEVICES).join(&queue.name), traits).unwrap();
            tested += 1;
        }
        if tested == 0 {
            eprintln!("skipped: this machine has no usable IAA work queue");
        }
    }
}
