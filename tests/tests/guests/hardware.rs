//! Processors, memory and kernels: every size and format that is promised.

use crate::common::{coppice, home, on_lane, stdout, tiny};

/// A guest with `cpus` vCPUs sees them all and keeps them busy together.
fn sees_cpus(cpus: &str) {
    let script = "nproc; for i in 1 2 3 4; do (n=0; while [ $n -lt 20000 ]; do n=$((n+1)); done) & \
                  done; wait; grep -c ^processor /proc/cpuinfo";
    let out = stdout(&mut tiny(&["--cpus", cpus], &["sh", "-c", script]));
    assert_eq!(out, format!("{cpus}\n{cpus}\n"));
}

#[test]
fn one_vcpu() {
    on_lane!({ sees_cpus("1") });
}

#[test]
fn two_vcpus() {
    on_lane!({ sees_cpus("2") });
}

#[test]
fn four_vcpus() {
    on_lane!({ sees_cpus("4") });
}

/// The guest has nearly all the memory it was given (the kernel keeps some for itself).
fn sees_memory(mib: u64) {
    let mut command = tiny(&["--memory", &mib.to_string()], &["cat", "/proc/meminfo"]);
    let out = stdout(&mut command);
    let total = out.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let kib: u64 = total.trim().strip_suffix(" kB").unwrap().trim().parse().unwrap();
    let given = mib * 1024;
    assert!(kib <= given && kib >= given - given / 8 - 16 * 1024, "{kib} KiB of {given}");
}

#[test]
fn the_least_memory() {
    on_lane!({ sees_memory(64) });
}

#[test]
fn memory_up_to_the_hole() {
    on_lane!({ sees_memory(3072) });
}

#[test]
fn memory_above_the_hole_is_there_and_usable() {
    on_lane!({
        sees_memory(5120);
        // A file in memory larger than what lies below the hole would need too long here; data
        // placed by the kernel's allocator, which starts at the top, is above the hole anyway.
        let script =
            "dd if=/dev/zero of=/dev/shm/f bs=1M count=64 2>/dev/null; sha256sum < /dev/shm/f";
        let mut command = tiny(&["--memory", "5120"], &["sh", "-c", script]);
        let zeroes = vec![0u8; 64 << 20];
        let wanted = format!("{}  -\n", crate::streams::sha256_hex(&zeroes));
        assert_eq!(stdout(&mut command), wanted);
    });
}

#[test]
fn a_bzimage_boots() {
    on_lane!({
        let image = home().path().join("kernels/micro/bzImage");
        let options = ["run", "--image", "tiny", "--memory", "192", "--kernel"];
        let mut command = coppice(&options);
        command.arg(image).args(["--", "echo", "up"]);
        assert_eq!(stdout(&mut command), "up\n");
    });
}

#[test]
fn an_initramfs_boots() {
    on_lane!({
        let image = home().path().join("images/tiny.cpio");
        let options = ["run", "--kernel", "micro", "--memory", "192", "--image"];
        let mut command = coppice(&options);
        command.arg(image).args(["--", "echo", "up"]);
        assert_eq!(stdout(&mut command), "up\n");
    });
}
