//! Clocks of the guest.

use nix::time::{ClockId, clock_gettime};

/// Microseconds since boot, time suspended included.
pub(crate) fn boottime_us() -> u64 {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(0, |time| {
        let seconds = u64::try_from(time.tv_sec()).unwrap_or(0);
        let micros = u64::try_from(time.tv_nsec()).unwrap_or(0) / 1_000;
        seconds.saturating_mul(1_000_000).saturating_add(micros)
    })
}

/// Nanoseconds since the Unix epoch; 0 when the clock is before it.
pub(crate) fn unix_ns() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}
