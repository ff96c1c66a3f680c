//! The machine that was measured on, as far as it bears on the figures.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::model::MachineInfo;

/// Describes this machine; `scratch` is where the files lay.
#[must_use]
pub fn describe(scratch: &Path) -> MachineInfo {
    let mut info = BTreeMap::new();
    let mut tell = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            info.insert(name.to_owned(), value);
        }
    };
    let uname = rustix::system::uname();
    tell("kernel", Some(uname.release().to_string_lossy().into_owned()));
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let of = |key: &str| {
        let line = cpus.lines().find(|line| line.split(':').next().map(str::trim) == Some(key))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    tell("cpu", of("model name"));
    tell(
        "cpus",
        Some(cpus.lines().filter(|line| line.starts_with("processor")).count().to_string()),
    );
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    tell(
        "memory",
        memory.lines().next().and_then(|line| Some(line.split_once(':')?.1.trim().into())),
    );
    tell("huge_pages", setting("/sys/kernel/mm/transparent_hugepage/enabled"));
    tell("governor", setting("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"));
    tell("smt", setting("/sys/devices/system/cpu/smt/control"));
    tell("ksm", setting("/sys/kernel/mm/ksm/run"));
    tell(
        "hypervisor",
        of("flags").map(|flags| {
            let inside = flags.split_whitespace().any(|flag| flag == "hypervisor");
            if inside { "runs in a virtual machine" } else { "none seen" }.to_owned()
        }),
    );
    tell("load", setting("/proc/loadavg"));
    tell("files", mount_of(scratch));
    MachineInfo(info)
}

fn setting(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// The kind of file system that a directory is on, and where that is mounted.
fn mount_of(directory: &Path) -> Option<String> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let of = |line: &str| {
        let mut words = line.split_whitespace().skip(1);
        let (at, kind) = (words.next()?.to_owned(), words.next()?.to_owned());
        directory.starts_with(&at).then_some((at, kind))
    };
    let (at, kind) = mounts.lines().filter_map(of).max_by_key(|(at, _)| at.len())?;
    Some(format!("{kind} at {at}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_machine_has_processors_memory_and_a_kernel() {
        let info = describe(Path::new("/proc/self"));
        for name in ["kernel", "cpus", "memory", "load"] {
            assert!(!info.0[name].is_empty(), "{name}");
        }
        assert_eq!(info.0["files"], "proc at /proc");
    }
}
