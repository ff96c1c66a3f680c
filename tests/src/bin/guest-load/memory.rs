//! A thread that writes blocks of memory and reads them back much later.

use std::io;
use std::time::Duration;

use crate::block::{Places, Stamp, WORDS};
use crate::state::{Gaps, Shared};

/// Blocks of one thread: 1 MiB.
const BLOCKS: usize = 128;

/// Runs until something fails. What it does in a step is short, so the time between two steps
/// tells how long it did not run.
pub(crate) fn run(shared: &Shared, name: &str, pace: Duration) -> io::Result<()> {
    let mut words = vec![0u64; BLOCKS * WORDS];
    let mut stamps = Vec::with_capacity(BLOCKS);
    for block in words.chunks_exact_mut(WORDS) {
        let stamp = Stamp::draw(0)?;
        stamp.fill(block);
        stamps.push(stamp);
    }
    let check = |words: &[u64], stamps: &[Stamp], at: usize| {
        let block = words.chunks_exact(WORDS).nth(at).unwrap_or_default();
        let stamp = stamps.get(at).copied().unwrap_or_default();
        if let Err(what) = stamp.check(block.iter().copied()) {
            shared.fail(name, &format!("block {at}: {what}"));
        }
    };
    let mut places = Places::new(u64::from(std::process::id()) << 8);
    let mut gaps = Gaps::new();
    for number in 1.. {
        let at = places.below(BLOCKS);
        check(&words, &stamps, at);
        let stamp = Stamp::draw(number)?;
        if let (Some(block), Some(kept)) =
            (words.chunks_exact_mut(WORDS).nth(at), stamps.get_mut(at))
        {
            stamp.fill(block);
            *kept = stamp;
        }
        if let Some(round) = shared.step(name, gaps.next()) {
            for at in 0..BLOCKS {
                check(&words, &stamps, at);
                shared.worst(name, gaps.next());
            }
            shared.checked(name, round);
        }
        if !pace.is_zero() {
            std::thread::sleep(pace);
            gaps = Gaps::new();
        }
    }
    Ok(())
}
