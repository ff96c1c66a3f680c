//! The balloon with a real driver: freed memory goes back to the host, statistics come from it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use coppice_manager::vmm::Vmm;

use crate::common::{Terminal, block_on, on_lane, shell_machine};

/// What the guest takes and gives back, in MiB.
const TAKEN_MIB: u64 = 100;
/// Memory of the machine, in MiB. Linux reports free pages in blocks of 4 MiB, and none while it
/// has less than 32 such blocks free.
const MEMORY_MIB: u64 = 384;
/// Free pages are reported two seconds after they became so; a busy host takes longer.
const PATIENCE: Duration = Duration::from_secs(120);
/// Between two looks at figures that nothing announces.
const PAUSE: Duration = Duration::from_millis(100);

/// Has the guest fill memory with a file.
fn fill(terminal: &mut Terminal) {
    let command = format!(
        "mount -t tmpfs -o size=200m none /tmp && head -c {} /dev/zero > /tmp/file && echo filled",
        TAKEN_MIB << 20
    );
    terminal.type_line(&command);
    terminal.expect_line("filled");
}

/// Guest memory that the host has to hold, in MiB.
fn resident_mib(vmm: &Vmm) -> u64 {
    vmm.memory_use().unwrap().guest_pss_kib / 1024
}

/// The guest's statistics once `wanted` holds for them.
async fn statistics(vmm: &Vmm, wanted: impl Fn(&BTreeMap<String, u64>) -> bool) {
    let due = Instant::now() + PATIENCE;
    loop {
        let seen = vmm.status().await.unwrap().memory_stats;
        if wanted(&seen) {
            return;
        }
        assert!(Instant::now() < due, "{seen:?}");
        tokio::time::sleep(PAUSE).await;
    }
}

#[test]
fn memory_the_guest_frees_goes_back_to_the_host() {
    on_lane!({
        block_on(async {
            let (vmm, mut terminal) = shell_machine(Vec::new()).await;
            fill(&mut terminal);
            let full = resident_mib(&vmm);
            assert!(full >= TAKEN_MIB, "{full} MiB");
            terminal.type_line("rm /tmp/file && echo freed");
            terminal.expect_line("freed");
            let due = Instant::now() + PATIENCE;
            // Nearly all: the allocator keeps small pieces that it does not report.
            while resident_mib(&vmm) > full - TAKEN_MIB * 9 / 10 {
                assert!(Instant::now() < due, "{} of {full} MiB remain", resident_mib(&vmm));
                tokio::time::sleep(PAUSE).await;
            }
            vmm.stop().await;
        });
    });
}

#[test]
fn statistics_follow_what_the_guest_does_with_its_memory() {
    on_lane!({
        block_on(async {
            let mib = |stats: &BTreeMap<String, u64>, name: &str| {
                stats.get(name).map_or(0, |bytes| bytes >> 20)
            };
            let (vmm, mut terminal) = shell_machine(Vec::new()).await;
            statistics(&vmm, |stats| {
                let (total, free) = (mib(stats, "total_memory"), mib(stats, "free_memory"));
                let available = mib(stats, "available_memory");
                (MEMORY_MIB - 32..=MEMORY_MIB).contains(&total)
                    && (total / 2..total).contains(&free)
                    && (total / 2..total).contains(&available)
            })
            .await;
            fill(&mut terminal);
            statistics(&vmm, |stats| {
                mib(stats, "free_memory") < MEMORY_MIB - TAKEN_MIB
                    && mib(stats, "disk_caches") >= TAKEN_MIB
            })
            .await;
            vmm.stop().await;
        });
    });
}
