//! A thread that sleeps 10 ms at a time, and tells how late it woke at worst. Waking early and a
//! clock that goes back are failures.
//!
//! It goes before everybody else, so that being late means the timer or the processor was, and not
//! that others had their turn.

use std::io;
use std::time::Duration;

use crate::state::{Shared, monotonic_ns};

const NAP: Duration = Duration::from_millis(10);

/// Runs until something fails.
pub(crate) fn run(shared: &Shared, name: &str) -> io::Result<()> {
    // The kernel takes it for the calling thread alone, and stops at the best that there is.
    rustix::process::nice(-40)?;
    let nap_ns = i64::try_from(NAP.as_nanos()).map_err(io::Error::other)?;
    let mut last = monotonic_ns()?;
    loop {
        let began = monotonic_ns()?;
        if began < last {
            shared.fail(name, &format!("the clock went back by {} ns", last - began));
        }
        std::thread::sleep(NAP);
        last = monotonic_ns()?;
        let late = last - began - nap_ns;
        if late < 0 {
            shared.fail(name, &format!("woke {} ns early", -late));
        }
        if let Some(round) = shared.step(name, u64::try_from(late / 1000).unwrap_or_default()) {
            shared.checked(name, round);
        }
    }
}
