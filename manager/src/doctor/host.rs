//! The host apart from KVM: files, memory, control groups.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access, statvfs};

use super::Check;
use crate::failure::{Class, chain};
use crate::home::Home;
use crate::workdir::WorkDir;

/// Memory below which even a few small guests are too many, in MiB.
const LITTLE_MEMORY_MIB: u64 = 512;
/// Disk space below which guests may not be able to write, in MiB.
const LITTLE_SPACE_MIB: u64 = 1024;
/// Controllers that limit a guest's memory, processor time and processes.
const CONTROLLERS: [&str; 3] = ["cpu", "memory", "pids"];
const CGROUPS: &str = "/sys/fs/cgroup";

pub(super) fn home_kernels(home: &Home) -> Check {
    let place = home.path().join("kernels");
    let remedy = "make them with `cargo xtask kernel`, or set COPPICE_HOME";
    listed("kernels", Class::KernelMissing, &place, &home.kernels(), remedy)
}

pub(super) fn home_images(home: &Home) -> Check {
    let place = home.path().join("images");
    let remedy = "make them with `cargo xtask rootfs`, or set COPPICE_HOME";
    listed("images", Class::ImageMissing, &place, &home.images(), remedy)
}

fn listed(name: &'static str, class: Class, place: &Path, names: &[String], remedy: &str) -> Check {
    if names.is_empty() {
        return Check::missing(name, class, format!("none in {}", place.display()), remedy);
    }
    Check::ok(name, format!("{} (in {})", names.join(", "), place.display()))
}

pub(super) fn scratch(home: &Home) -> Check {
    let path = home.path();
    if access(path, Access::WRITE_OK).is_err() {
        return Check::note(
            "scratch space",
            format!("{} cannot be written; guests' writes go to /var/tmp", path.display()),
            "make it writable for this user, or set COPPICE_HOME",
        );
    }
    match statvfs(path) {
        Ok(space) => {
            let mib = space.f_bavail.saturating_mul(space.f_frsize) >> 20;
            let found = format!("{mib} MiB free in {}", path.display());
            if mib < LITTLE_SPACE_MIB {
                return Check::note("scratch space", found, "free some space");
            }
            Check::ok("scratch space", found)
        }
        Err(error) => {
            let found = format!("{} cannot be examined: {error}", path.display());
            Check::note("scratch space", found, "set COPPICE_HOME to another directory")
        }
    }
}

pub(super) fn runtime(base: &Path) -> Check {
    match WorkDir::new(base) {
        Ok(_) => Check::ok("run-time files", format!("in {}", base.display())),
        Err(error) => Check::missing(
            "run-time files",
            Class::Host,
            chain(&error),
            "set XDG_RUNTIME_DIR to a directory that only this user can write",
        ),
    }
}

pub(super) fn memory() -> Check {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let mib = |field| meminfo_kib(&text, field).map(|kib| kib >> 10);
    let (Some(available), Some(total)) = (mib("MemAvailable:"), mib("MemTotal:")) else {
        return Check::note("memory", "/proc/meminfo cannot be read", "mount /proc");
    };
    let found = format!("{available} MiB available of {total} MiB");
    if available < LITTLE_MEMORY_MIB {
        return Check::note("memory", found, "end other programs, or give guests less (--memory)");
    }
    Check::ok("memory", found)
}

fn meminfo_kib(text: &str, field: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(field))?;
    rest.trim().strip_suffix("kB")?.trim().parse().ok()
}

pub(super) fn huge_pages() -> Check {
    let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    let text = text.unwrap_or_default();
    let mode = text.split(['[', ']']).nth(1).unwrap_or("not built in").to_owned();
    let reserved = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let reserved = reserved.lines().find_map(|line| line.strip_prefix("HugePages_Total:"));
    let reserved = reserved.map_or("0", str::trim);
    let found = format!("transparent: {mode}; reserved: {reserved}");
    match mode.as_str() {
        "madvise" | "never" | "always" => Check::ok("huge pages", found),
        _ => Check::note(
            "huge pages",
            found,
            "a kernel with transparent huge pages makes large guests faster; nothing else changes",
        ),
    }
}

pub(super) fn cgroups() -> Check {
    let Ok(root) = fs::read_to_string(Path::new(CGROUPS).join("cgroup.controllers")) else {
        return Check::note(
            "cgroups",
            format!("there is no cgroup v2 at {CGROUPS}"),
            "boot with systemd.unified_cgroup_hierarchy=1, or mount cgroup2 there",
        );
    };
    let own = own_cgroup(&fs::read_to_string("/proc/self/cgroup").unwrap_or_default());
    let has = fs::read_to_string(own.join("cgroup.controllers")).unwrap_or(root);
    let lacking: Vec<&str> = CONTROLLERS
        .into_iter()
        .filter(|wanted| !has.split_whitespace().any(|name| name == *wanted))
        .collect();
    if !lacking.is_empty() {
        return Check::note(
            "cgroups",
            format!("v2, but without the controllers {}", lacking.join(", ")),
            "delegate them: systemd-run --user --scope -p Delegate=yes, or Delegate=yes in the unit",
        );
    }
    if access(&own, Access::WRITE_OK).is_err() {
        return Check::note(
            "cgroups",
            format!("v2, but {} belongs to someone else", own.display()),
            "run in a delegated unit: systemd-run --user --scope -p Delegate=yes",
        );
    }
    Check::ok("cgroups", format!("v2, delegated controllers: {}", has.trim()))
}

/// This process's directory in the v2 hierarchy, from the text of `/proc/self/cgroup`.
fn own_cgroup(text: &str) -> PathBuf {
    let path = text.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/");
    Path::new(CGROUPS).join(path.trim_start_matches('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_home_lacks_kernels_and_images() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::at(dir.path());
        assert_eq!(home_kernels(&home).class, Some(Class::KernelMissing));
        assert_eq!(home_images(&home).class, Some(Class::ImageMissing));
    }

    #[test]
    fn what_is_there_is_named() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("images")).unwrap();
        fs::write(dir.path().join("images/tiny.ext4"), b"").unwrap();
        let check = home_images(&Home::at(dir.path()));
        assert!(check.found.starts_with("tiny ("), "{}", check.found);
    }

    #[test]
    fn the_unified_line_of_a_mixed_hierarchy_counts() {
        let text = "12:memory:/other\n0::/user.slice/x\n";
        assert_eq!(own_cgroup(text), Path::new("/sys/fs/cgroup/user.slice/x"));
    }

    #[test]
    fn memory_is_read_by_its_name() {
        let text = "MemTotal:  2048 kB\nMemAvailable:   1024 kB\n";
        assert_eq!(meminfo_kib(text, "MemAvailable:"), Some(1024));
    }
}
