//! The circuit breaker before a device: after failures in a row it is left alone for a while,
//! then tried with one piece of work.

use std::time::Duration;

/// What the breaker lets through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Everything; so many failures came in a row.
    Closed { failures: u32 },
    /// Nothing until then.
    Open { until: Duration },
    /// One piece of work is on trial.
    Trial,
}

/// A circuit breaker. Times are since any fixed moment, of one clock.
#[derive(Debug)]
pub struct Breaker {
    threshold: u32,
    rest: Duration,
    state: State,
}

impl Breaker {
    /// Opens after `threshold` failures in a row (at least one), for `rest`.
    pub fn new(threshold: u32, rest: Duration) -> Self {
        Self { threshold: threshold.max(1), rest, state: State::Closed { failures: 0 } }
    }

    /// Whether a piece of work may go to the device now. After a rest that is true once, until
    /// that piece's end is told.
    pub fn admits(&mut self, now: Duration) -> bool {
        match self.state {
            State::Closed { .. } => true,
            State::Open { until } if now >= until => {
                self.state = State::Trial;
                true
            }
            State::Open { .. } | State::Trial => false,
        }
    }

    /// The device did a piece of work.
    pub fn succeeded(&mut self) {
        // Work that was under way when it opened proves nothing about after the rest.
        if !self.is_open() {
            self.state = State::Closed { failures: 0 };
        }
    }

    /// The device failed at a piece of work.
    pub fn failed(&mut self, now: Duration) {
        let failures = match self.state {
            State::Closed { failures } => failures.saturating_add(1),
            State::Trial => self.threshold,
            State::Open { .. } => return,
        };
        self.state = if failures >= self.threshold {
            State::Open { until: now.saturating_add(self.rest) }
        } else {
            State::Closed { failures }
        };
    }

    /// Whether the device is being left alone.
    pub fn is_open(&self) -> bool {
        matches!(self.state, State::Open { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn it_opens_after_failures_in_a_row_only() {
        let mut breaker = Breaker::new(2, at(10));
        breaker.failed(at(0));
        breaker.succeeded();
        breaker.failed(at(0));
        assert!(breaker.admits(at(0)));
        breaker.failed(at(0));
        assert!(!breaker.admits(at(9)));
    }

    #[test]
    fn after_a_rest_one_piece_of_work_decides() {
        let mut breaker = Breaker::new(1, at(10));
        breaker.failed(at(0));
        assert!(breaker.admits(at(10)));
        assert!(!breaker.admits(at(10)), "only one");
        breaker.failed(at(11));
        assert!(!breaker.admits(at(20)));
        assert!(breaker.admits(at(21)));
        breaker.succeeded();
        assert!(breaker.admits(at(21)) && breaker.admits(at(21)));
    }
}
