//! Restores: from a saved machine to the first output of a command, in a new process, and in one
//! that was prepared where the contender has such a thing.

use super::{Context, Found, Known, Restored, Rounds};
use crate::agent::Question;
use crate::clock::Clock;
use crate::error::Error;

pub(super) struct Restores {
    known: Known,
}

impl Restores {
    pub(super) fn new(known: Known) -> Self {
        Self { known }
    }
}

impl Rounds for Restores {
    fn round(&mut self, context: &Context<'_>, found: &mut Vec<Found>) -> Result<(), Error> {
        let Restored { mut vm, clock, ms } = context.restored(self.known.best())?;
        vm.end()?;
        found.push(Found::timed("restore_first_output_ms", ms, clock));
        if self.known.noted.is_some() {
            // As the first one of a saved state, of which nothing is known yet.
            let Restored { mut vm, clock, ms } = context.restored(&self.known.plain)?;
            vm.end()?;
            found.push(Found::timed("restore_new_first_output_ms", ms, clock));
        }
        let Some(shell) = context.contender.prepare(context.guest)? else { return Ok(()) };
        let question = Question::new()?;
        let from = self.known.best();
        context.chill(Some(from))?;
        let mut clock = Clock::start();
        let mut vm = shell.restore(context.guest, from, &mut clock)?;
        let ms = question.ask(&*vm, &mut clock)?;
        found.push(Found::timed("restore_prepared_first_output_ms", ms, clock));
        vm.end()
    }
}
