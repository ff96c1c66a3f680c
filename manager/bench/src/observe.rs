//! What can be seen of a running VMM from outside: its memory and its exits.

use std::fs;
use std::path::Path;

use anyhow::Context as _;

/// Memory of a process in KiB, guest RAM left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Proportional set size without guest RAM.
    pub pss_kib: u64,
    /// Resident guest RAM.
    pub guest_rss_kib: u64,
}

/// Reads a process' memory. A mapping at least half as large as the guest's RAM counts as guest
/// RAM, which holds for every VMM that maps it in one or two pieces.
///
/// # Errors
/// When the process is gone or not ours.
pub fn memory(pid: u32, guest_mib: u32) -> anyhow::Result<Memory> {
    let path = format!("/proc/{pid}/smaps");
    let text = fs::read_to_string(&path).with_context(|| format!("{path} cannot be read"))?;
    Ok(sum_smaps(&text, u64::from(guest_mib) * 1024 / 2))
}

fn sum_smaps(text: &str, guest_from_kib: u64) -> Memory {
    let mut memory = Memory { pss_kib: 0, guest_rss_kib: 0 };
    let mut size = 0;
    for line in text.lines() {
        let Some((name, value)) = line.split_once(':') else { continue };
        let kib = value.trim().strip_suffix(" kB").and_then(|v| v.trim().parse::<u64>().ok());
        match (name, kib) {
            ("Size", Some(kib)) => size = kib,
            ("Pss", Some(kib)) if size < guest_from_kib => memory.pss_kib += kib,
            ("Rss", Some(kib)) if size >= guest_from_kib => memory.guest_rss_kib += kib,
            _ => {}
        }
    }
    memory
}

/// KVM exits of a process' machine so far, as KVM counts them (all vCPUs, all reasons).
///
/// `None` where debugfs is not mounted at `/sys/kernel/debug` or not readable.
pub fn kvm_exits(pid: u32) -> Option<u64> {
    let prefix = format!("{pid}-");
    let machine = fs::read_dir("/sys/kernel/debug/kvm")
        .ok()?
        .filter_map(Result::ok)
        .find(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))?;
    read_counter(&machine.path().join("exits"))
}

fn read_counter(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_ram_is_told_from_the_rest_by_its_size() {
        let smaps = "\
7f00-7f01 rw-p 00000000 00:00 0\n\
Size:             131072 kB\n\
Rss:               20000 kB\n\
Pss:               20000 kB\n\
55aa-55ab r-xp 00000000 fe:00 12 /usr/bin/vmm\n\
Size:               1200 kB\n\
Rss:                 900 kB\n\
Pss:                 450 kB\n";
        let memory = sum_smaps(smaps, 65536);
        assert_eq!(memory, Memory { pss_kib: 450, guest_rss_kib: 20000 });
    }
}
