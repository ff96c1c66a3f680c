//! What the host's memory allows: another machine, or machines that are prepared for later.

/// Share of the last ten seconds, in percent, in which something waited for memory, from which on
/// the host is short of it whatever it says it could free.
const STALLED: f64 = 5.0;

/// The host's memory at a time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct HostMemory {
    /// Bytes that the kernel says could be had without swapping, if it says so.
    available: Option<u64>,
    /// Share of the last ten seconds, in percent, in which something waited for memory; unknown
    /// where the kernel does not measure it.
    stalled: Option<f64>,
}

impl HostMemory {
    /// As it is now.
    pub(super) fn now() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        Self::parse(&read("/proc/meminfo"), &read("/proc/pressure/memory"))
    }

    fn parse(meminfo: &str, pressure: &str) -> Self {
        let available = || {
            let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
            line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
        };
        let stalled = || {
            let line = pressure.lines().find_map(|line| line.strip_prefix("some "))?;
            let field = line.split(' ').find_map(|field| field.strip_prefix("avg10="))?;
            field.parse::<f64>().ok()
        };
        Self { available: available(), stalled: stalled() }
    }

    /// Whether a machine may be started that leaves so much to the host.
    pub(super) fn admits(&self, reserve: u64) -> bool {
        self.available.is_none_or(|available| available >= reserve)
    }

    /// Whether there is room for what is not needed yet: twice as much as must be left, and nothing
    /// that waits for memory.
    pub(super) fn spares(&self, reserve: u64) -> bool {
        self.available.is_none_or(|available| available / 2 >= reserve)
            && self.stalled.is_none_or(|stalled| stalled < STALLED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:  4000 kB\nMemFree:  10 kB\nMemAvailable:   2048 kB\n";

    fn pressure(percent: &str) -> String {
        format!(
            "some avg10={percent} avg60=9.00 avg300=0.00 total=5\n\
             full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
        )
    }

    #[test]
    fn both_files_are_read_and_may_be_missing() {
        let host = HostMemory::parse(MEMINFO, &pressure("1.25"));
        assert_eq!(host, HostMemory { available: Some(2 << 20), stalled: Some(1.25) });
        let host = HostMemory::parse("", "");
        assert_eq!(host, HostMemory { available: None, stalled: None });
        assert!(host.admits(u64::MAX) && host.spares(u64::MAX));
        assert!(HostMemory::now().available.is_some());
    }

    #[test]
    fn what_is_prepared_goes_before_what_is_asked_for_is_refused() {
        let host = HostMemory::parse(MEMINFO, &pressure("0.00"));
        assert!(host.spares(1 << 20) && host.admits(1 << 20));
        assert!(!host.spares((1 << 20) + 1) && host.admits((1 << 20) + 1));
        assert!(!host.admits((2 << 20) + 1));
    }

    #[test]
    fn a_host_that_waits_for_memory_has_none_to_spare() {
        let host = |percent| HostMemory::parse(MEMINFO, &pressure(percent));
        assert!(host("4.99").spares(0));
        assert!(!host("5.00").spares(0) && host("99.00").admits(0));
    }
}
