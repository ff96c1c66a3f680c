//! Rollbacks: a machine that went on is brought back to what was saved, in place where the
//! contender can, else by killing it and restoring another.
//!
//! Between, the guest makes a file; that it is gone afterwards is looked at, outside of the time.

use super::{Context, Found, Known, Restored, Rounds, Stock};
use crate::agent::{Command, Question};
use crate::clock::Clock;
use crate::error::Error;

/// What the guest makes that has to be undone.
const MARK: &str = "/dev/shm/coppice-bench-mark";

pub(super) struct Rollbacks {
    known: Known,
    mark: Command,
    unmarked: Command,
}

impl Rollbacks {
    pub(super) fn new(context: &Context<'_>, stock: &mut Stock) -> Result<Self, Error> {
        Ok(Self {
            known: stock.known(context)?,
            mark: Command::shell(&format!(": > {MARK}"))?,
            unmarked: Command::shell(&format!("test ! -e {MARK}"))?,
        })
    }
}

impl Rounds for Rollbacks {
    fn round(&mut self, context: &Context<'_>, found: &mut Vec<Found>) -> Result<(), Error> {
        let from = self.known.best();
        let Context { contender, guest, .. } = *context;
        let Restored { mut vm, .. } = context.restored(from)?;
        vm.run(&self.mark, &mut |_| ())?;
        let place = contender.place(guest, Some(from))?;
        let question = Question::new()?;
        context.chill(Some(from))?;
        let mut clock = Clock::start();
        vm.end()?;
        clock.mark("ended");
        let mut again = contender.restore(guest, from, place, &mut clock)?;
        let killed_ms = question.ask(&*again, &mut clock)?;
        again.run(&self.unmarked, &mut |_| ())?;
        let stages = clock.into_stages();
        let killed = |metric| Found { stages: stages.clone(), ..Found::ms(metric, killed_ms) };
        found.push(killed("kill_restore_first_output_ms"));

        again.run(&self.mark, &mut |_| ())?;
        let question = Question::new()?;
        context.chill(Some(from))?;
        let mut clock = Clock::start();
        match again.roll_back(from)? {
            Some(()) => {
                clock.mark("running");
                let ms = question.ask(&*again, &mut clock)?;
                again.run(&self.unmarked, &mut |_| ())?;
                let rolled = Found::timed("rollback_first_output_ms", ms, clock);
                found.push(rolled.with("method", "in place"));
            }
            None => {
                let rolled = killed("rollback_first_output_ms");
                found.push(rolled.with("method", "kill and restore"));
            }
        }
        again.end()
    }
}
