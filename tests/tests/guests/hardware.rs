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

/// The guest has nearly all the memory it was given (the kernel keeps some for itself), and data
/// that it puts there stays as it is.
fn sees_memory(mib: u64) {
    let script = "cat /proc/meminfo; cd /dev/shm; head -c 4000000 /dev/zero | tr '\\0' x > f; \
                  sha256sum f";
    let mut command = tiny(&["--memory", &mib.to_string()], &["sh", "-c", script]);
    let out = stdout(&mut command);
    let total = out.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let kib: u64 = total.trim().strip_suffix(" kB").unwrap().trim().parse().unwrap();
    let given = mib * 1024;
    assert!(kib <= given && kib >= given - given / 8 - 16 * 1024, "{kib} KiB of {given}");
    let digest = format!("{}  f", crate::streams::sha256_hex(&vec![b'x'; 4_000_000]));
    assert_eq!(out.lines().last(), Some(digest.as_str()));
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
fn memory_above_the_hole() {
    on_lane!({ sees_memory(5120) });
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
