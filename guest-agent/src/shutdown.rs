//! The orderly end of a guest.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::time::Duration;

use crate::log;
use crate::process::Processes;
use coppice_agent_protocol::control::{Shutdown, ShutdownMode};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Time processes have to vanish after `SIGKILL`; only those stuck in the kernel need it.
const KILL_WAIT: Duration = Duration::from_secs(2);

/// Inode of the initial PID namespace (`PROC_PID_INIT_INO` of linux/proc_ns.h).
const INITIAL_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// Ends all processes of the guest.
pub(crate) async fn end_processes(shutdown: Shutdown, processes: &Processes) {
    signal_all(Signal::SIGTERM);
    // Interactive shells ignore SIGTERM.
    processes.hang_up();
    // Stopped processes act on neither before.
    signal_all(Signal::SIGCONT);
    if wait(processes, shutdown.grace()).await {
        return;
    }
    signal_all(Signal::SIGKILL);
    if !wait(processes, KILL_WAIT).await {
        log::warn(format_args!("some processes survived SIGKILL"));
    }
}

async fn wait(processes: &Processes, limit: Duration) -> bool {
    tokio::time::timeout(limit, processes.all_ended()).await.is_ok()
}

/// To every process but this one. Without any there is nobody to tell.
fn signal_all(signal: Signal) {
    let _ = kill(Pid::from_raw(-1), signal);
}

/// Writes everything to disk, unmounts, and ends the machine. Returns only when that fails.
pub(crate) fn end_machine(mode: ShutdownMode) -> io::Error {
    nix::unistd::sync();
    if owns_file_systems() {
        unmount_all();
    }
    let mode = match mode {
        ShutdownMode::Poweroff => RebootMode::RB_POWER_OFF,
        ShutdownMode::Reboot => RebootMode::RB_AUTOBOOT,
    };
    match reboot(mode) {
        Ok(never) => match never {},
        Err(errno) => errno.into(),
    }
}

/// Whether this is init of the machine. Init of a container shares its file systems with others,
/// who would see them become read-only.
fn owns_file_systems() -> bool {
    fs::metadata("/proc/self/ns/pid")
        .is_ok_and(|namespace| namespace.ino() == INITIAL_PID_NAMESPACE)
}

/// Latest first. What is busy, and the root, becomes read-only, which writes out its journal.
fn unmount_all() {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let targets = mounts.lines().rev().filter_map(|line| line.split(' ').nth(1));
    for target in targets.map(unescape) {
        // Nothing is lost with these, and what follows may need them.
        let of_kernel = ["/proc", "/sys", "/dev"].iter().any(|root| target.starts_with(root));
        if of_kernel || umount2(target.as_str(), MntFlags::empty()).is_ok() {
            continue;
        }
        let flags = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        let none = None::<&str>;
        if let Err(error) = mount(none, target.as_str(), none, flags, none) {
            log::warn(format_args!("remounting {target} read-only: {error}"));
        }
    }
}

/// The kernel writes space, tab, newline and backslash as three octal digits.
fn unescape(text: &str) -> String {
    let escapes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    escapes.iter().fold(text.to_owned(), |text, (escape, meaning)| text.replace(escape, meaning))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_read_as_the_kernel_writes_them() {
        assert_eq!(unescape(r"/a\040b\134c"), r"/a b\c");
    }
}
