//! What a VMM process takes from the host, with the guest's RAM left out.

use std::fs::File;
use std::io::{self, BufRead, BufReader};

/// `VmFlags` of a mapping that core dumps leave out, as the VMM asks for guest RAM and nothing else.
const NOT_DUMPED: &str = "dd";
/// `VmFlags` of the kernel's own pages (vDSO data and the like), which dumps leave out as well.
const KERNEL_PAGES: [&str; 2] = ["io", "pf"];

/// Memory of one VMM process, in KiB.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Proportional set size of everything but guest RAM.
    pub pss_kib: u64,
    /// Proportional set size of guest RAM: what the guest has touched and does not share.
    pub guest_pss_kib: u64,
}

/// All memory of one VMM process, guest RAM included, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WholeMemory {
    /// Pages that only it has.
    pub private: u64,
    /// Pages that others have, too: of a checkpoint, or of the program.
    pub shared: u64,
    /// Its proportional set size: each shared page divided by how many share it.
    pub pss: u64,
}

impl WholeMemory {
    /// Of the process with this number.
    ///
    /// # Errors
    /// When the process is gone or not ours to look at.
    pub fn of(pid: u32) -> io::Result<Self> {
        Ok(Self::parse(&std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?))
    }

    fn parse(text: &str) -> Self {
        let kib = |line: &str| {
            let number = line.split_whitespace().nth(1)?;
            number.parse::<u64>().ok()?.checked_mul(1024)
        };
        let sum = |kind: &str| {
            let lines = text.lines().filter(|line| line.starts_with(kind));
            lines.filter_map(kib).fold(0, u64::saturating_add)
        };
        Self { private: sum("Private_"), shared: sum("Shared_"), pss: sum("Pss:") }
    }
}

/// Sums the mappings of a process.
pub(super) fn of_process(pid: u32) -> io::Result<MemoryUse> {
    sum(BufReader::new(File::open(format!("/proc/{pid}/smaps"))?))
}

/// Sums the mappings in the text of a `/proc/PID/smaps` (proc_pid_smaps(5)), where the flags are
/// each mapping's last line.
fn sum(text: impl BufRead) -> io::Result<MemoryUse> {
    let mut total = MemoryUse::default();
    let mut pss = 0u64;
    for line in text.lines() {
        let line = line?;
        if let Some(rest) = line.strip_prefix("Pss:") {
            let kib = rest.trim().strip_suffix("kB").map(str::trim).and_then(|n| n.parse().ok());
            pss = kib.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
        } else if let Some(flags) = line.strip_prefix("VmFlags:") {
            let part =
                if is_guest_ram(flags) { &mut total.guest_pss_kib } else { &mut total.pss_kib };
            *part = part.saturating_add(std::mem::take(&mut pss));
        }
    }
    Ok(total)
}

fn is_guest_ram(flags: &str) -> bool {
    let has = |wanted: &str| flags.split_whitespace().any(|flag| flag == wanted);
    has(NOT_DUMPED) && !KERNEL_PAGES.into_iter().any(has)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0008000000 rw-p 00000000 00:00 0
Size:             131072 kB
Pss:               40000 kB
Pss_Dirty:         40000 kB
VmFlags: rd wr mr mw me ac nr dd 
7f1000000000-7f1000021000 rw-p 00000000 00:00 0          [heap]
Size:                132 kB
Pss:                 100 kB
Pss_Anon:            100 kB
VmFlags: rd wr mr mw me ac 
7f2000000000-7f2000001000 r-xp 00000000 00:00 0          /usr/bin/coppice-vmm
Pss:                  28 kB
VmFlags: rd ex mr mw me 
7ffd00000000-7ffd00004000 r--p 00000000 00:00 0          [vvar]
Pss:                   4 kB
VmFlags: rd mr pf io de dd 
";

    #[test]
    fn guest_ram_is_told_apart_from_the_rest() {
        let use_ = sum(SMAPS.as_bytes()).unwrap();
        assert_eq!(use_, MemoryUse { pss_kib: 132, guest_pss_kib: 40_000 });
    }

    #[test]
    fn our_own_process_can_be_read() {
        assert!(of_process(std::process::id()).unwrap().pss_kib > 0);
    }

    #[test]
    fn a_figure_that_is_none_is_an_error() {
        assert!(sum("1-2 r--p\nPss: many kB\n".as_bytes()).is_err());
    }

    #[test]
    fn all_memory_is_private_or_shared() {
        let text = "Rss: 30 kB\nPss: 12 kB\nPss_Anon: 1 kB\nShared_Clean: 4 kB\nShared_Dirty: 1 kB\nPrivate_Clean: 2 kB\n\
                    Private_Dirty: 8 kB\nPrivate_Hugetlb: 0 kB\n";
        let memory = WholeMemory::parse(text);
        assert_eq!(memory, WholeMemory { private: 10 << 10, shared: 5 << 10, pss: 12 << 10 });
    }
}
