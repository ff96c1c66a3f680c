//! Fan-out: several machines of one that runs and goes on running. The clock starts before the
//! running machine is saved.

use std::time::Instant;

use super::clone::Wanted;
use super::{Context, Found, Known, Restored, Rounds};
use crate::agent::Question;
use crate::clock::Clock;
use crate::contender::Extent;
use crate::error::Error;

pub(super) struct Fanouts {
    known: Known,
}

impl Fanouts {
    pub(super) fn new(known: Known) -> Self {
        Self { known }
    }
}

impl Rounds for Fanouts {
    fn round(&mut self, context: &Context<'_>, found: &mut Vec<Found>) -> Result<(), Error> {
        let Restored { vm: mut parent, .. } = context.restored(self.known.best())?;
        let concurrency = context.workload.concurrency;
        context.chill(None)?;
        let started = Instant::now();
        let (saved, saving) = parent.save(context.guest, Extent::Full)?;
        // A peer's disks are copied here, of what was just saved: that is part of it.
        let wanted = Wanted::prepare(context, &saved)?;
        let (children, all_ms) = wanted.make(context, &saved, started)?;
        let mut push = |figure: Found| found.push(figure.with("concurrency", concurrency));
        push(Found::ms("fanout_all_ms", all_ms));
        push(Found::ms("fanout_pause_ms", saving.pause_ms));
        let mut vms = Vec::new();
        for Restored { vm, clock, ms } in children {
            push(Found::timed("fanout_first_output_ms", ms, clock));
            vms.push(vm);
        }
        // The parent has to have gone on.
        Question::new()?.ask(&*parent, &mut Clock::start())?;
        vms.iter_mut().try_for_each(|vm| vm.end())?;
        parent.end()
    }
}
