//! Deadlines of many connections on one timer descriptor.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use vmm_sys_util::timerfd::TimerFd;

/// A set of deadlines and a timerfd that expires at the earliest.
pub(crate) struct Deadlines {
    timer: TimerFd,
    set: BTreeSet<(Instant, u64)>,
    /// The deadline the timer is set to.
    armed: Option<Instant>,
}

impl Deadlines {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { timer: TimerFd::new()?, set: BTreeSet::new(), armed: None })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }

    /// Adds a deadline for `id` and returns it.
    pub(crate) fn add(&mut self, id: u64, after: Duration) -> Instant {
        let at = Instant::now() + after;
        self.set.insert((at, id));
        self.arm(false);
        at
    }

    /// Forgets a deadline. The timer may expire for nothing; that costs less than to set it anew
    /// for each connection that goes.
    pub(crate) fn remove(&mut self, id: u64, at: Instant) {
        self.set.remove(&(at, id));
    }

    /// Takes one deadline that has passed.
    pub(crate) fn take_due(&mut self) -> Option<u64> {
        let &(at, id) = self.set.first()?;
        if at > Instant::now() {
            return None;
        }
        self.set.remove(&(at, id));
        Some(id)
    }

    /// Sets the timer to the earliest deadline; `expired` says that it has run out, which setting
    /// it or switching it off also makes unreadable.
    pub(crate) fn arm(&mut self, expired: bool) {
        let first = self.set.first().map(|&(at, _)| at);
        let sooner = first.is_some_and(|at| self.armed.is_none_or(|armed| at < armed));
        if !sooner && !expired {
            return;
        }
        let result = match first {
            Some(at) => {
                // Zero would switch it off.
                let rest = at.saturating_duration_since(Instant::now());
                self.timer.reset(rest.max(Duration::from_micros(1)), None)
            }
            None => self.timer.clear(),
        };
        self.armed = first;
        if let Err(error) = result {
            tracing::error!(%error, "the timer for vsock connections cannot be set");
        }
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

    use super::*;

    #[test]
    fn deadlines_come_due_in_order_and_removed_ones_never() {
        let mut deadlines = Deadlines::new().unwrap();
        let epoll = Epoll::new().unwrap();
        epoll.ctl(ControlOperation::Add, deadlines.fd(), EpollEvent::new(EventSet::IN, 0)).unwrap();
        let late = deadlines.add(3, Duration::from_secs(3600));
        deadlines.add(2, Duration::from_millis(2));
        deadlines.add(1, Duration::from_millis(1));
        let removed = deadlines.add(4, Duration::from_millis(1));
        deadlines.remove(4, removed);

        let mut due = Vec::new();
        let mut events = [EpollEvent::default()];
        while due.len() < 2 {
            assert_eq!(epoll.wait(10_000, &mut events).unwrap(), 1, "the timer never expired");
            while let Some(id) = deadlines.take_due() {
                due.push(id);
            }
            deadlines.arm(true);
        }
        assert_eq!(due, [1, 2]);
        deadlines.remove(3, late);
        deadlines.arm(true);
        assert_eq!(epoll.wait(0, &mut events).unwrap(), 0, "a timer without deadlines is off");
    }
}
