//! Commands in a running machine: one after another, then several at a time.

use std::thread;
use std::time::Instant;

use super::{Context, Found, Restored, Rounds, Stock};
use crate::agent::Question;
use crate::clock::Clock;
use crate::contender::Vm;
use crate::error::Error;
use crate::model::Unit;

/// Commands that each of those who ask at a time gives.
const EACH: u32 = 4;

pub(super) struct Execs {
    vm: Box<dyn Vm>,
}

impl Execs {
    pub(super) fn new(context: &Context<'_>, stock: &mut Stock) -> Result<Self, Error> {
        let known = stock.known(context)?;
        let Restored { vm, .. } = context.restored(known.best())?;
        Ok(Self { vm })
    }
}

impl Rounds for Execs {
    fn round(&mut self, context: &Context<'_>, found: &mut Vec<Found>) -> Result<(), Error> {
        let question = Question::new()?;
        context.chill(None)?;
        let mut clock = Clock::start();
        let ms = question.ask(&*self.vm, &mut clock)?;
        found.push(Found::timed("exec_first_output_ms", ms, clock));

        let concurrency = context.workload.concurrency;
        let vm = &*self.vm;
        let started = Instant::now();
        thread::scope(|scope| {
            let threads: Vec<_> = (0..concurrency)
                .map(|_| {
                    scope.spawn(|| {
                        (0..EACH).try_for_each(|_| {
                            Question::new()?.ask(vm, &mut Clock::start()).map(drop)
                        })
                    })
                })
                .collect();
            let lost = || Err(Error::Missing("a thread of the benchmark failed".into()));
            threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|_| lost()))
        })?;
        let rate = f64::from(concurrency * EACH) / started.elapsed().as_secs_f64();
        let rate = Found::new("exec_per_s", Unit::PerS, rate);
        found.push(rate.with("concurrency", concurrency));
        Ok(())
    }
}
