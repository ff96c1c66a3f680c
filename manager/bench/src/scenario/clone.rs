//! Clones: several machines of one saved state, asked for at the same moment. Only those count whose
//! vCPU has run and which answered; one that does not fails the round.
//!
//! Memory is that of one more machine beside all of them, right after its restore and after its
//! first command.

use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use super::{Context, Found, Known, Restored, Rounds};
use crate::agent::Question;
use crate::clock::Clock;
use crate::contender::{Feature, Place, Saved};
use crate::error::Error;
use crate::observe;

pub(super) struct Clones {
    known: Known,
}

impl Clones {
    pub(super) fn new(known: Known) -> Self {
        Self { known }
    }
}

impl Rounds for Clones {
    fn round(&mut self, context: &Context<'_>, found: &mut Vec<Found>) -> Result<(), Error> {
        let from = self.known.best();
        let wanted = Wanted::prepare(context, from)?;
        context.chill(Some(from))?;
        let (children, all_ms) = wanted.make(context, from, Instant::now())?;
        let concurrency = context.workload.concurrency;
        let all = Found::ms("clone_all_ms", all_ms);
        found.push(all.with("concurrency", concurrency));
        let mut vms = Vec::new();
        for Restored { vm, clock, ms } in children {
            let child = Found::timed("clone_first_output_ms", ms, clock);
            found.push(child.with("concurrency", concurrency));
            vms.push(vm);
        }
        if context.contender.lacks(Feature::Memory).is_none() {
            memory(context, from, found)?;
        }
        vms.iter_mut().try_for_each(|vm| vm.end())
    }
}

/// The memory of one more machine.
fn memory(context: &Context<'_>, from: &Saved, found: &mut Vec<Found>) -> Result<(), Error> {
    let Context { contender, guest, .. } = *context;
    let place = contender.place(guest, Some(from))?;
    let question = Question::new()?;
    let mut vm = contender.restore(guest, from, place, &mut Clock::start())?;
    let Some(pid) = vm.pid() else { return vm.end() };
    let forked = observe::memory(pid, guest.memory_mib)?;
    question.ask(&*vm, &mut Clock::start())?;
    let used = observe::memory(pid, guest.memory_mib)?;
    let concurrency = context.workload.concurrency;
    for (metric, kib) in [
        ("clone_fork_pss_kib", forked.pss),
        ("clone_fork_private_kib", forked.private),
        ("clone_fork_shared_kib", forked.shared),
        ("clone_exec_pss_kib", used.pss),
        ("clone_exec_private_kib", used.private),
        ("clone_exec_shared_kib", used.shared),
    ] {
        found.push(Found::kib(metric, kib).with("concurrency", concurrency));
    }
    vm.end()
}

/// What the machines need, made ahead of the clock.
pub(super) struct Wanted(Vec<(Place, Question)>);

impl Wanted {
    /// For as many machines as are wanted at a time.
    pub(super) fn prepare(context: &Context<'_>, from: &Saved) -> Result<Self, Error> {
        (0..context.workload.concurrency)
            .map(|_| Ok((context.contender.place(context.guest, Some(from))?, Question::new()?)))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// Makes all machines at once; the clock of each started at `started`. Gives them with the
    /// milliseconds until the last one had answered.
    pub(super) fn make(
        self,
        context: &Context<'_>,
        from: &Saved,
        started: Instant,
    ) -> Result<(Vec<Restored>, f64), Error> {
        let Context { contender, guest, .. } = *context;
        // Nobody starts before every thread is there.
        let barrier = Barrier::new(self.0.len());
        let made: Vec<Result<Restored, Error>> = thread::scope(|scope| {
            let barrier = &barrier;
            let threads: Vec<_> = self
                .0
                .into_iter()
                .map(|(place, question)| {
                    scope.spawn(move || {
                        barrier.wait();
                        let mut clock = Clock::since(started);
                        let vm = contender.restore(guest, from, place, &mut clock)?;
                        let ms = question.ask(&*vm, &mut clock)?;
                        Ok(Restored { vm, clock, ms })
                    })
                })
                .collect();
            let lost = || Err(Error::Missing("a thread of the benchmark failed".into()));
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| lost())).collect()
        });
        let children = made.into_iter().collect::<Result<Vec<_>, _>>()?;
        let last = children.iter().map(|child| child.ms).fold(0.0, f64::max);
        Ok((children, last))
    }
}
