//! What threads tell: counters, failures, and the round of checks that they have done.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Longest time that all threads together may take to check all they have.
const CHECK_LIMIT: Duration = Duration::from_secs(60);

/// What the threads share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    board: Mutex<Board>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Board {
    /// The round of checks that is asked for.
    round: u64,
    threads: BTreeMap<String, Figures>,
    failures: Vec<String>,
}

/// What a thread says of itself.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Figures {
    /// Steps done since the start.
    pub(crate) steps: u64,
    /// Worst figure of the thread's kind since the last report, in microseconds: how late a timer
    /// was, how long a thread that never rests did not run.
    pub(crate) worst_us: u64,
    /// The last round of checks it has done.
    round: u64,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread begins.
    pub(crate) fn enter(&self, name: &str) {
        self.lock().threads.insert(name.to_owned(), Figures::default());
    }

    /// A step is done; `worst_us` is a figure of it. Returns a round of checks that is asked for
    /// and that the thread has not done.
    pub(crate) fn step(&self, name: &str, worst_us: u64) -> Option<u64> {
        let mut board = self.lock();
        let round = board.round;
        let figures = board.threads.get_mut(name)?;
        figures.steps += 1;
        figures.worst_us = figures.worst_us.max(worst_us);
        (figures.round < round).then_some(round)
    }

    /// A figure of a part of a step.
    pub(crate) fn worst(&self, name: &str, worst_us: u64) {
        if let Some(figures) = self.lock().threads.get_mut(name) {
            figures.worst_us = figures.worst_us.max(worst_us);
        }
    }

    /// A thread has checked all it has.
    pub(crate) fn checked(&self, name: &str, round: u64) {
        if let Some(figures) = self.lock().threads.get_mut(name) {
            figures.round = round;
        }
        self.changed.notify_all();
    }

    /// Something is not as it should be.
    pub(crate) fn fail(&self, name: &str, what: &str) {
        let mut board = self.lock();
        if board.failures.len() < 20 {
            board.failures.push(format!("{name}: {what}"));
        }
    }

    /// Figures and failures as lines, from before threads check anything for it.
    pub(crate) fn figures(&self) -> Vec<String> {
        self.lock().lines()
    }

    /// Has all threads check everything; their figures and all failures as lines.
    pub(crate) fn report(&self) -> Vec<String> {
        let mut board = self.lock();
        board.round += 1;
        let round = board.round;
        let waits = |board: &mut Board| board.threads.values().any(|f| f.round < round);
        let waited = self.changed.wait_timeout_while(board, CHECK_LIMIT, waits);
        let (mut board, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let mut lines = board.lines();
        let idle = board.threads.iter().filter(|(_, figures)| figures.round < round);
        lines.extend(idle.map(|(name, _)| format!("failure={name}: stands still")));
        lines
    }
}

impl Board {
    /// Worst figures are then counted anew.
    fn lines(&mut self) -> Vec<String> {
        let mut lines = Vec::new();
        for (name, figures) in &mut self.threads {
            lines.push(format!("{name}.steps={}", figures.steps));
            lines.push(format!("{name}.worst_us={}", figures.worst_us));
            figures.worst_us = 0;
        }
        lines.extend(self.failures.iter().map(|failure| format!("failure={failure}")));
        lines
    }
}

/// Measures how long a thread that never rests does not run.
#[derive(Debug)]
pub(crate) struct Gaps(Instant);

impl Gaps {
    /// From now on.
    pub(crate) fn new() -> Self {
        Self(Instant::now())
    }

    /// Microseconds since the last call.
    pub(crate) fn next(&mut self) -> u64 {
        let now = Instant::now();
        let gap = now.saturating_duration_since(self.0);
        self.0 = now;
        u64::try_from(gap.as_micros()).unwrap_or(u64::MAX)
    }
}

/// `CLOCK_MONOTONIC` in nanoseconds, as the kernel has it; the standard library hides steps back.
pub(crate) fn monotonic_ns() -> io::Result<i64> {
    let time = clock_gettime(ClockId::Monotonic);
    let ns = time.tv_sec.checked_mul(1_000_000_000).and_then(|ns| ns.checked_add(time.tv_nsec));
    ns.ok_or_else(|| io::Error::other("the clock is out of range"))
}
