//! What is measured. Each scenario prepares what it needs for one contender and one size of guest,
//! and then takes the samples of a round; the schedule alternates the contenders' rounds.
//!
//! Every clock starts when the request is issued. A time to first output stops at the first byte of
//! the answer to a [`Question`]; an answer without this round's token is a failure, not a sample.

mod boot;
mod checkpoint;
mod clone;
mod density;
mod exec;
mod fanout;
mod io;
mod restore;
mod rollback;

use std::path::PathBuf;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::agent::Question;
use crate::cache::Cache;
use crate::clock::Clock;
use crate::contender::{Boot, Contender, Feature, Guest, Saved, Vm};
use crate::error::Error;
use crate::model::{Stage, Unit};

/// The scenarios.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Exec of the VMM to the guest's init, and to the first output of a command.
    Boot,
    /// A saved machine to the first output.
    Restore,
    /// Several machines of one saved state at a time.
    Clone,
    /// Several machines of a running one.
    Fanout,
    /// Back to what was saved.
    Rollback,
    /// Saving all, and saving what changed.
    Checkpoint,
    /// As many machines as memory or a limit allows.
    Density,
    /// Commands in a running machine.
    Exec,
    /// Disk and streams of a running machine.
    Io,
}

impl Kind {
    /// All, in the order they are run.
    pub const ALL: [Self; 9] = [
        Self::Boot,
        Self::Restore,
        Self::Rollback,
        Self::Checkpoint,
        Self::Clone,
        Self::Fanout,
        Self::Exec,
        Self::Io,
        Self::Density,
    ];

    /// Name in reports and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Boot => "boot",
            Self::Restore => "restore",
            Self::Clone => "clone",
            Self::Fanout => "fanout",
            Self::Rollback => "rollback",
            Self::Checkpoint => "checkpoint",
            Self::Density => "density",
            Self::Exec => "exec",
            Self::Io => "io",
        }
    }

    /// Why a contender cannot take part; nothing if it can.
    #[must_use]
    pub fn lacking(self, contender: &dyn Contender) -> Option<&'static str> {
        let saved = || match contender.template() {
            Some(_) => None,
            None => contender.lacks(Feature::Save),
        };
        match self {
            Self::Boot => contender.lacks(Feature::Boot),
            Self::Restore | Self::Exec | Self::Io => saved(),
            Self::Rollback | Self::Checkpoint => contender.lacks(Feature::Save),
            Self::Clone | Self::Density => saved().or_else(|| contender.lacks(Feature::Many)),
            Self::Fanout => {
                contender.lacks(Feature::Save).or_else(|| contender.lacks(Feature::Many))
            }
        }
    }

    /// What of it a contender that takes part leaves out, and why.
    #[must_use]
    pub fn gaps(self, contender: &dyn Contender) -> Option<&'static str> {
        match self {
            Self::Checkpoint => contender.lacks(Feature::Diff),
            Self::Clone | Self::Density => contender.lacks(Feature::Memory),
            Self::Boot => contender.lacks(Feature::Save),
            Self::Restore | Self::Fanout | Self::Rollback | Self::Exec | Self::Io => None,
        }
    }

    /// Prepares a contender, ahead of all clocks.
    pub(crate) fn prepare(
        self,
        context: &Context<'_>,
        stock: &mut Stock,
    ) -> Result<Box<dyn Rounds>, Error> {
        Ok(match self {
            Self::Boot => Box::new(boot::Boots),
            Self::Restore => Box::new(restore::Restores::new(stock.known(context)?)),
            Self::Rollback => Box::new(rollback::Rollbacks::new(context, stock)?),
            Self::Checkpoint => Box::new(checkpoint::Checkpoints),
            Self::Clone => Box::new(clone::Clones::new(stock.known(context)?)),
            Self::Fanout => Box::new(fanout::Fanouts::new(stock.known(context)?)),
            Self::Density => Box::new(density::Density::new(stock.known(context)?)),
            Self::Exec => Box::new(exec::Execs::new(context, stock)?),
            Self::Io => Box::new(io::Transfers::new(context, stock)?),
        })
    }
}

/// Amounts of work, which the report states.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// Machines or commands at a time.
    pub concurrency: u32,
    /// How long a guest has been up when it is saved: one without a past is not what anybody
    /// clones, and its first timers would be special.
    pub age: Duration,
    /// How much memory a guest writes between two checkpoints, in MiB.
    pub dirty_mib: u32,
    /// How much is written, read and streamed, in MiB.
    pub io_mib: u32,
    /// Most machines at a time.
    pub most_vms: u32,
    /// Memory of the host that is left free, in MiB.
    pub reserve_mib: u32,
    /// Pause before every clock.
    pub pause: Duration,
}

/// Who does it, with what.
#[derive(Debug)]
pub(crate) struct Context<'a> {
    pub(crate) contender: &'a dyn Contender,
    pub(crate) guest: &'a Guest,
    pub(crate) workload: &'a Workload,
    pub(crate) cache: Cache,
}

/// One figure that a round found.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) metric: &'static str,
    pub(crate) unit: Unit,
    pub(crate) value: f64,
    pub(crate) stages: Vec<Stage>,
    /// What is to be told of how it came about.
    pub(crate) parameters: Vec<(&'static str, String)>,
}

impl Found {
    pub(crate) fn new(metric: &'static str, unit: Unit, value: f64) -> Self {
        Self { metric, unit, value, stages: Vec::new(), parameters: Vec::new() }
    }

    fn ms(metric: &'static str, value: f64) -> Self {
        Self::new(metric, Unit::Ms, value)
    }

    fn timed(metric: &'static str, value: f64, clock: Clock) -> Self {
        Self { stages: clock.into_stages(), ..Self::ms(metric, value) }
    }

    fn kib(metric: &'static str, value: u64) -> Self {
        Self::new(metric, Unit::KiB, count(value))
    }

    fn with(mut self, parameter: &'static str, value: impl ToString) -> Self {
        self.parameters.push((parameter, value.to_string()));
        self
    }
}

/// A counter as a figure; those that are measured are far below where that is inexact.
fn count(value: u64) -> f64 {
    u32::try_from(value).map_or(f64::from(u32::MAX), f64::from)
}

/// The rounds of one scenario of one contender.
pub(crate) trait Rounds {
    /// Takes the samples of a round.
    fn round(&mut self, context: &Context<'_>, found: &mut Vec<Found>) -> Result<(), Error>;
}

/// A saved machine of a contender, which several scenarios use.
#[derive(Debug, Default)]
pub(crate) struct Stock {
    known: Option<Known>,
}

/// A saved machine that was restored once.
#[derive(Debug, Clone)]
pub(crate) struct Known {
    /// As it was saved.
    pub(crate) plain: Saved,
    /// With what the first restored machine used, where the contender notes that.
    pub(crate) noted: Option<Saved>,
}

impl Known {
    /// What a later machine is made of.
    pub(crate) fn best(&self) -> &Saved {
        self.noted.as_ref().unwrap_or(&self.plain)
    }
}

impl Stock {
    /// The saved machine; it is made when it is first asked for.
    pub(crate) fn known(&mut self, context: &Context<'_>) -> Result<Known, Error> {
        if let Some(known) = &self.known {
            return Ok(known.clone());
        }
        let plain = match context.contender.template() {
            Some(saved) => saved,
            None => saved_after_its_age(context)?,
        };
        let mut first = context.restored(&plain)?;
        let mut noted = plain.clone();
        let noted = first.vm.note_working_set(&mut noted)?.then_some(noted);
        first.vm.end()?;
        Ok(self.known.insert(Known { plain, noted }).clone())
    }
}

/// Boots a machine, lets it grow older and saves it.
fn saved_after_its_age(context: &Context<'_>) -> Result<Saved, Error> {
    let mut vm = context.booted(false)?;
    let (saved, _) = vm.save(context.guest, crate::contender::Extent::Full)?;
    vm.end()?;
    Ok(saved)
}

/// A machine that answered.
#[derive(Debug)]
pub(crate) struct Restored {
    pub(crate) vm: Box<dyn Vm>,
    pub(crate) clock: Clock,
    /// When the first output was there.
    pub(crate) ms: f64,
}

impl Context<'_> {
    /// A machine that was booted, has its age and ran a command.
    fn booted(&self, diff: bool) -> Result<Box<dyn Vm>, Error> {
        let place = self.contender.place(self.guest, None)?;
        let vm = self.contender.boot(self.guest, Boot { place, diff }, &mut Clock::start())?;
        // What a guest does at first is over then.
        std::thread::sleep(self.workload.age);
        Question::new()?.ask(&*vm, &mut Clock::start())?;
        Ok(vm)
    }

    /// Makes a machine of a saved one and times its first answer.
    pub(crate) fn restored(&self, from: &Saved) -> Result<Restored, Error> {
        let place = self.contender.place(self.guest, Some(from))?;
        let question = Question::new()?;
        self.chill(Some(from))?;
        let mut clock = Clock::start();
        let vm = self.contender.restore(self.guest, from, place, &mut clock)?;
        let ms = question.ask(&*vm, &mut clock)?;
        Ok(Restored { vm, clock, ms })
    }

    /// Makes the host as it should be before a clock starts: the page cache, and a pause in which
    /// what the last machine left is cleared away. It ends on a whole multiple of itself: kernels
    /// wait for timer ticks here and there, and every sample begins at the same distance from one.
    fn chill(&self, from: Option<&Saved>) -> Result<(), Error> {
        let mut files: Vec<PathBuf> = from.map(Saved::files).unwrap_or_default();
        files.extend([self.guest.kernel.clone(), self.guest.image.clone()]);
        self.cache.make(&files)?;
        let pause = self.workload.pause.as_nanos();
        let now = clock_gettime(ClockId::Monotonic);
        let now = Duration::try_from(now).map_or(0, |now| now.as_nanos());
        // One that is not whole yet would be too short.
        let until = now.checked_div(pause).unwrap_or(0).saturating_add(2).saturating_mul(pause);
        let left = u64::try_from(until.saturating_sub(now)).unwrap_or(0);
        if pause > 0 {
            std::thread::sleep(Duration::from_nanos(left));
        }
        Ok(())
    }
}
