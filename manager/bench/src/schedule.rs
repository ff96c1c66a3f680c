//! The schedule: contenders take turns, round by round, and every sample is kept.
//!
//! ```text
//! for each cache, size of guest and scenario:
//!     prepare every contender
//!     for each round, warm-up rounds first:  A  B  C  A again
//! ```
//!
//! What the host does meanwhile so hits all of them alike, and samples of one round are pairs. The
//! first contender is there twice: the ratio of its two halves is the noise of the machine. A
//! sample that fails is written down and never replaced.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::cache::Cache;
use crate::contender::{Contender, Guest};
use crate::error::Error;
use crate::model::{Failure, Sample, Series};
use crate::scenario::{Context, Found, Kind, Rounds, Stock, Workload};

/// What follows the first contender's name where it is measured against itself.
pub const AGAIN: &str = " (again)";

/// Rounds in a row that may fail before a contender is left out of the rest of a scenario.
const MOST_FAILURES: u32 = 2;

/// What is to be measured.
#[derive(Debug, Clone)]
pub struct Plan {
    /// In this order.
    pub scenarios: Vec<Kind>,
    /// Rounds whose samples count.
    pub rounds: u32,
    /// Rounds before them, whose samples are kept and marked.
    pub warm_up: u32,
    /// The page caches to measure with.
    pub caches: Vec<Cache>,
    /// The guests to measure with; kernel and image are the same in all.
    pub guests: Vec<Guest>,
    /// Amounts of work.
    pub workload: Workload,
    /// Whether the first contender is measured against itself.
    pub noise: bool,
}

/// Who listens while it is measured.
pub trait Journal {
    /// A contender is about to take a round, or to be prepared for the first one.
    fn step(&mut self, step: &Step<'_>);

    /// A contender's round is over, or it failed.
    fn done(&mut self, results: &Results);

    /// Whether to go on.
    fn go_on(&self) -> bool {
        true
    }
}

/// Where a run is.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// The scenario.
    pub scenario: Kind,
    /// The contender.
    pub contender: &'a str,
    /// Memory of the guest in MiB.
    pub memory_mib: u32,
    /// vCPUs of the guest.
    pub vcpus: u8,
    /// The round, warm-up included, from 0; none for preparations.
    pub round: Option<u32>,
    /// How many of them are planned.
    pub rounds: u32,
}

/// What was found so far.
#[derive(Debug, Default)]
pub struct Results {
    /// Samples by scenario, metric, contender and parameters.
    pub series: Vec<Series>,
    /// What went wrong.
    pub failures: Vec<Failure>,
    /// Who was left out of what, and why.
    pub left_out: Vec<Failure>,
}

/// Measures everything.
pub fn run(plan: &Plan, contenders: &[Box<dyn Contender>], journal: &mut dyn Journal) -> Results {
    let mut run =
        Run { plan, contenders, started: Instant::now(), order: 0, results: Results::default() };
    for kind in &plan.scenarios {
        for contender in contenders {
            let part = || kind.gaps(&**contender).map(|why| format!("in part: {why}"));
            let whole = kind.lacking(&**contender).map(str::to_owned);
            if let Some(why) = whole.or_else(part) {
                run.results.left_out.push(failure(*kind, contender.name(), None, why));
            }
        }
    }
    for &cache in &plan.caches {
        for guest in &plan.guests {
            let mut stocks: Vec<Stock> = contenders.iter().map(|_| Stock::default()).collect();
            for &kind in &plan.scenarios {
                if !journal.go_on() {
                    return run.results;
                }
                run.scenario(kind, guest, cache, &mut stocks, journal);
            }
        }
    }
    run.results
}

fn failure(scenario: Kind, contender: &str, round: Option<u32>, message: String) -> Failure {
    Failure {
        contender: contender.to_owned(),
        scenario: scenario.name().to_owned(),
        round,
        message,
    }
}

/// A contender in one scenario.
struct Seat<'a> {
    contender: &'a dyn Contender,
    /// Its place among the contenders.
    index: usize,
    name: String,
    rounds: Option<Box<dyn Rounds>>,
    failed: u32,
}

struct Run<'a> {
    plan: &'a Plan,
    contenders: &'a [Box<dyn Contender>],
    started: Instant,
    order: u64,
    results: Results,
}

impl<'a> Run<'a> {
    /// Everybody who takes part, the first one twice.
    fn seats(&self, kind: Kind) -> Vec<Seat<'a>> {
        let part = |one: &&(usize, &'a dyn Contender)| kind.lacking(one.1).is_none();
        let all: Vec<(usize, &'a dyn Contender)> =
            self.contenders.iter().map(|contender| &**contender).enumerate().collect();
        let seat = |&(index, contender): &(usize, &'a dyn Contender), again: &str| Seat {
            contender,
            index,
            name: format!("{}{again}", contender.name()),
            rounds: None,
            failed: 0,
        };
        let mut seats: Vec<_> = all.iter().filter(part).map(|one| seat(one, "")).collect();
        let first = all.first().filter(part).filter(|_| self.plan.noise);
        seats.extend(first.map(|one| seat(one, AGAIN)));
        seats
    }

    fn scenario(
        &mut self,
        kind: Kind,
        guest: &Guest,
        cache: Cache,
        stocks: &mut [Stock],
        journal: &mut dyn Journal,
    ) {
        let mut seats = self.seats(kind);
        let rounds = self.plan.warm_up + self.plan.rounds;
        for round in 0..rounds {
            for seat in &mut seats {
                if !journal.go_on() {
                    return;
                }
                if seat.failed >= MOST_FAILURES {
                    continue;
                }
                let context = Context {
                    contender: seat.contender,
                    guest,
                    workload: &self.plan.workload,
                    cache,
                };
                let name = seat.name.clone();
                let mut step = Step {
                    scenario: kind,
                    contender: &name,
                    memory_mib: guest.memory_mib,
                    vcpus: guest.vcpus,
                    round: None,
                    rounds,
                };
                let Some(stock) = stocks.get_mut(seat.index) else { continue };
                let mut found = Vec::new();
                if seat.rounds.is_none() {
                    journal.step(&step);
                }
                let outcome = prepared(seat, kind, &context, stock).and_then(|prepared| {
                    step.round = Some(round);
                    journal.step(&step);
                    prepared.round(&context, &mut found)
                });
                self.keep(seat, kind, round, &context, found);
                self.judge(seat, kind, round, outcome);
                journal.done(&self.results);
            }
        }
    }

    /// Notes whether a round went well. What was prepared for one that did not is not used again.
    fn judge(&mut self, seat: &mut Seat<'_>, kind: Kind, round: u32, outcome: Result<(), Error>) {
        let Err(error) = outcome else {
            seat.failed = 0;
            return;
        };
        seat.failed += 1;
        seat.rounds = None;
        let mut message = error.chain();
        if seat.failed >= MOST_FAILURES {
            message.push_str("; it is left out of the rest of this scenario");
        }
        self.results.failures.push(failure(kind, &seat.name, Some(round), message));
    }

    /// Puts what a round found into its series.
    fn keep(
        &mut self,
        seat: &Seat<'_>,
        kind: Kind,
        round: u32,
        context: &Context<'_>,
        found: Vec<Found>,
    ) {
        let at_ms = self.started.elapsed().as_secs_f64() * 1000.0;
        for Found { metric, unit, value, stages, parameters } in found {
            let mut all = BTreeMap::from([
                ("memory_mib".to_owned(), context.guest.memory_mib.to_string()),
                ("vcpus".to_owned(), context.guest.vcpus.to_string()),
                ("cache".to_owned(), context.cache.name().to_owned()),
            ]);
            all.extend(parameters.into_iter().map(|(name, value)| (name.to_owned(), value)));
            let sample = Sample {
                round,
                order: self.order,
                at_ms,
                value,
                stages,
                warm_up: round < self.plan.warm_up,
            };
            self.order += 1;
            let series = self.results.series.iter_mut().find(|series| {
                series.metric == metric && series.contender == seat.name && series.parameters == all
            });
            match series {
                Some(series) => series.samples.push(sample),
                None => self.results.series.push(Series {
                    scenario: kind.name().to_owned(),
                    metric: metric.to_owned(),
                    unit,
                    contender: seat.name.clone(),
                    parameters: all,
                    samples: vec![sample],
                }),
            }
        }
    }
}

/// What a contender prepared for a scenario; it is done when it is first needed.
fn prepared<'s>(
    seat: &'s mut Seat<'_>,
    kind: Kind,
    context: &Context<'_>,
    stock: &mut Stock,
) -> Result<&'s mut Box<dyn Rounds>, Error> {
    match &mut seat.rounds {
        Some(rounds) => Ok(rounds),
        empty => Ok(empty.insert(kind.prepare(context, stock)?)),
    }
}
