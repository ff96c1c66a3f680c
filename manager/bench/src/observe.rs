//! What can be seen of a running VMM from outside: its memory and its exits.

use std::fs;
use std::path::Path;

use crate::error::{Doing as _, Error};

/// Memory of a process in KiB.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// Proportional set size without guest RAM: what the VMM itself takes.
    pub overhead_pss: u64,
    /// Resident guest RAM.
    pub guest_rss: u64,
    /// Proportional set size of all.
    pub pss: u64,
    /// What this process alone has.
    pub private: u64,
    /// What it has in common with others.
    pub shared: u64,
}

/// Reads a process' memory. A mapping at least half as large as the guest's RAM counts as guest
/// RAM, which holds for every VMM that maps it in one or two pieces.
///
/// # Errors
/// When the process is gone or not ours.
pub fn memory(pid: u32, guest_mib: u32) -> Result<Memory, Error> {
    let path = format!("/proc/{pid}/smaps");
    let text = fs::read_to_string(&path).doing(format!("reading {path}"))?;
    Ok(sum_smaps(&text, u64::from(guest_mib) * 1024 / 2))
}

fn sum_smaps(text: &str, guest_from_kib: u64) -> Memory {
    let mut memory = Memory::default();
    let mut size = 0;
    for line in text.lines() {
        let Some((name, value)) = line.split_once(':') else { continue };
        let kib = value.trim().strip_suffix(" kB").and_then(|v| v.trim().parse::<u64>().ok());
        let Some(kib) = kib else { continue };
        let guest = size >= guest_from_kib;
        match name {
            "Size" => size = kib,
            "Pss" => {
                memory.pss += kib;
                memory.overhead_pss += if guest { 0 } else { kib };
            }
            "Rss" if guest => memory.guest_rss += kib,
            "Private_Clean" | "Private_Dirty" => memory.private += kib,
            "Shared_Clean" | "Shared_Dirty" => memory.shared += kib,
            _ => {}
        }
    }
    memory
}

/// KVM exits of a process' machine so far, as KVM counts them (all vCPUs, all reasons).
///
/// `None` where debugfs is not mounted at `/sys/kernel/debug` or not readable.
#[must_use]
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

/// Memory of this host that can still be had, in MiB.
///
/// # Errors
/// When the kernel does not tell.
pub fn available_mib() -> Result<u64, Error> {
    let text = fs::read_to_string("/proc/meminfo").doing("reading /proc/meminfo")?;
    text.lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok())
        .map(|kib| kib / 1024)
        .ok_or_else(|| Error::Missing("/proc/meminfo has no MemAvailable".into()))
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
Pss:               15000 kB\n\
Shared_Clean:      10000 kB\n\
Private_Dirty:     10000 kB\n\
55aa-55ab r-xp 00000000 fe:00 12 /usr/bin/vmm\n\
Size:               1200 kB\n\
Rss:                 900 kB\n\
Pss:                 450 kB\n\
Shared_Clean:        900 kB\n\
Private_Clean:         0 kB\n";
        let expected = Memory {
            overhead_pss: 450,
            guest_rss: 20000,
            pss: 15450,
            private: 10000,
            shared: 10900,
        };
        assert_eq!(sum_smaps(smaps, 65536), expected);
    }

    #[test]
    fn the_host_tells_what_is_left() {
        assert!(available_mib().unwrap() > 0);
    }
}
