//! What the guest uses of its processors, memory and disk.

use std::io;

use coppice_agent_protocol::metrics::Metrics;

use crate::clock;

/// Time the processors spent, in ticks since boot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CpuTime {
    busy: u64,
    total: u64,
}

/// The metrics, with the processors' time until now. `since` is that of the last time. Blocks.
///
/// # Errors
/// When the kernel's files cannot be read.
pub(crate) fn measure(since: CpuTime) -> io::Result<(Metrics, CpuTime)> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    let memory = std::fs::read_to_string("/proc/meminfo")?;
    let disk = rustix::fs::statvfs("/")?;
    let now = cpu_time(&stat).ok_or_else(|| malformed("/proc/stat"))?;
    let total = memory_bytes(&memory, "MemTotal").ok_or_else(|| malformed("/proc/meminfo"))?;
    let available = memory_bytes(&memory, "MemAvailable").unwrap_or(0);
    let cached = memory_bytes(&memory, "Cached").unwrap_or(0);
    let reclaimable = memory_bytes(&memory, "SReclaimable").unwrap_or(0);
    let metrics = Metrics {
        ts: clock::unix_ns() / 1_000_000_000,
        cpu_count: cpu_count(&stat),
        cpu_used_pct: percent(since, now),
        mem_total: total,
        mem_used: total.saturating_sub(available),
        mem_cache: cached.saturating_add(reclaimable),
        disk_used: disk.f_blocks.saturating_sub(disk.f_bavail).saturating_mul(disk.f_frsize),
        disk_total: disk.f_blocks.saturating_mul(disk.f_frsize),
    };
    Ok((metrics, now))
}

fn malformed(path: &str) -> io::Error {
    io::Error::other(format!("{path} is not in the form it should have"))
}

/// The first line is `cpu user nice system idle iowait irq softirq steal guest guest_nice`; the last
/// two are part of the first two.
fn cpu_time(stat: &str) -> Option<CpuTime> {
    let fields = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Option<Vec<u64>> =
        fields.split_whitespace().take(8).map(|field| field.parse().ok()).collect();
    let ticks = ticks?;
    let total = ticks.iter().fold(0_u64, |sum, ticks| sum.saturating_add(*ticks));
    let idle = ticks.get(3)?.saturating_add(*ticks.get(4)?);
    Some(CpuTime { busy: total.saturating_sub(idle), total })
}

fn cpu_count(stat: &str) -> u32 {
    let lines = stat.lines().filter_map(|line| line.strip_prefix("cpu"));
    let count = lines.filter(|rest| rest.starts_with(|digit: char| digit.is_ascii_digit())).count();
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// With two decimals. Without any time between the two, that is 0.
fn percent(since: CpuTime, now: CpuTime) -> f64 {
    let busy = now.busy.saturating_sub(since.busy);
    let total = now.total.saturating_sub(since.total);
    let hundredths = busy.min(total).saturating_mul(10_000).checked_div(total).unwrap_or(0);
    u32::try_from(hundredths).map_or(0.0, |hundredths| f64::from(hundredths) / 100.0)
}

/// A line is `Name:   number kB`.
fn memory_bytes(meminfo: &str, name: &str) -> Option<u64> {
    let value = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    value.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STAT: &str = "cpu  100 0 50 800 50 0 0 0 70 0\ncpu0 50 0 25 400 25 0 0 0 0 0\n\
                        cpu1 50 0 25 400 25 0 0 0 0 0\nintr 5\n";

    #[test]
    fn waiting_is_not_being_busy() {
        assert_eq!(cpu_time(STAT), Some(CpuTime { busy: 150, total: 1000 }));
        assert_eq!(cpu_count(STAT), 2);
    }

    #[test]
    fn the_percentage_is_of_the_time_in_between() {
        let time = |busy, total| CpuTime { busy, total };
        assert_eq!(percent(time(100, 1000), time(133, 1400)), 8.25);
        assert_eq!(percent(time(5, 10), time(5, 10)), 0.0);
        // A clock that ran backwards.
        assert_eq!(percent(time(5, 10), time(4, 9)), 0.0);
    }

    #[test]
    fn memory_is_found_by_its_whole_name() {
        let text = "MemTotal:  100 kB\nSwapCached:  5 kB\nCached:   7 kB\nHuge: 3\n";
        assert_eq!(memory_bytes(text, "Cached"), Some(7 * 1024));
        assert_eq!(memory_bytes(text, "Huge"), None);
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "(cpu|Mem: )?[0-9 a-z:\n]{0,80}") {
            let _ = (cpu_time(&text), cpu_count(&text), memory_bytes(&text, "Mem"));
        }
    }
}
