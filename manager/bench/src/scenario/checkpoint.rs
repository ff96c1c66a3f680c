//! Checkpoints of a machine that runs: all of it the first time, then what it wrote since.

use super::{Context, Found, Rounds};
use crate::agent::{Command, Question};
use crate::clock::Clock;
use crate::contender::{Extent, Feature};
use crate::error::Error;

/// Nothing is kept: only the first checkpoint of a machine has to save all of it.
pub(super) struct Checkpoints;

impl Rounds for Checkpoints {
    fn round(&mut self, context: &Context<'_>, found: &mut Vec<Found>) -> Result<(), Error> {
        let diff = context.contender.lacks(Feature::Diff).is_none();
        let mib = context.workload.dirty_mib;
        // Bytes that are no zeroes, which contenders may leave out; it fails if they are not there.
        let (bytes, file) = (u64::from(mib) << 20, "/dev/shm/coppice-bench");
        let write = format!(
            "head -c {bytes} /dev/zero | tr '\\0' x > {file} && test $(wc -c < {file}) -eq {bytes}"
        );
        let write = Command::shell(&write)?;
        let mut vm = context.booted(diff)?;
        vm.run(&write, &mut |_| ())?;
        context.chill(None)?;
        let (_full, saving) = vm.save(context.guest, Extent::Full)?;
        found.push(Found::ms("snapshot_full_ms", saving.total_ms));
        found.push(Found::ms("snapshot_full_pause_ms", saving.pause_ms));
        if diff {
            vm.run(&write, &mut |_| ())?;
            context.chill(None)?;
            let (_diff, saving) = vm.save(context.guest, Extent::Diff)?;
            let of = |metric, ms| Found::ms(metric, ms).with("dirty_mib", mib);
            found.push(of("snapshot_diff_ms", saving.total_ms));
            found.push(of("snapshot_diff_pause_ms", saving.pause_ms));
        }
        // It has to have gone on.
        Question::new()?.ask(&*vm, &mut Clock::start())?;
        vm.end()
    }
}
