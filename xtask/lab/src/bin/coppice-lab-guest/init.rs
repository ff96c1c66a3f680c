//! PID 1 of the nested machine: mounts, modules, network, the idle VM, then reaping.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use coppice_lab::plan::{GUEST_PLAN_PATH, GuestPlan, Share};
use nix::errno::Errno;
use nix::kmod::{ModuleInitFlags, finit_module};
use nix::mount::{MsFlags, mount};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::wait::{WaitStatus, wait};
use nix::unistd::Pid;

use crate::Outcome;

/// Moves from the initramfs to a tmpfs root: `pivot_root`, which jailers use, refuses an initramfs.
pub(crate) fn leave_initramfs() -> Outcome {
    fs::create_dir_all("/newroot")?;
    mount_at("tmpfs", "tmpfs", "/newroot", MsFlags::empty(), "mode=0755,size=75%")?;
    let copied = Command::new("/bin/busybox")
        .args(["cp", "-a", "/bin", "/etc", "/init", "/lib", "/newroot/"])
        .status()?;
    if !copied.success() {
        return Err("cannot copy the initramfs to the root tmpfs".into());
    }
    Err(Command::new("/bin/busybox")
        .args(["switch_root", "/newroot", "/init", "stage2"])
        .exec()
        .into())
}

/// Makes the machine ready, starts its agent and reaps until the agent ends.
pub(crate) fn run() -> Outcome {
    let plan: GuestPlan = serde_json::from_slice(&fs::read(GUEST_PLAN_PATH)?)?;
    mount_system()?;
    link_applets()?;
    for module in &plan.modules {
        load_module(module)?;
    }
    set_tunables();
    for share in &plan.shares {
        mount_share(share)?;
    }
    bring_network_up()?;

    // KVM patches its code when its first VM appears and its last one goes, and QEMU's
    // translation threads may go on executing the stale instructions. A VM that is never run
    // and never closed keeps the patched state for the machine's whole life.
    let kvm = kvm_ioctls::Kvm::new().map_err(|error| format!("/dev/kvm: {error}"))?;
    let idle_vm = kvm.create_vm()?;
    idle_vm.create_irq_chip()?;
    let idle_vcpu = idle_vm.create_vcpu(0)?;

    leave_first_processor()?;
    let agent = Command::new("/init").arg("serve").spawn()?;
    reap_until(agent.id())?;
    drop((idle_vcpu, idle_vm));
    eprintln!("coppice-lab: the agent ended, powering off");
    reboot(RebootMode::RB_POWER_OFF)?;
    Ok(ExitCode::FAILURE)
}

/// Keeps all that is started from here on off the first of several processors: guests must not
/// run on it (`Description::processors` says why).
fn leave_first_processor() -> Result<(), Errno> {
    let mut allowed = sched_getaffinity(Pid::from_raw(0))?;
    let count = (0..CpuSet::count()).filter(|&cpu| allowed.is_set(cpu) == Ok(true)).count();
    if count > 1 {
        allowed.unset(0)?;
        sched_setaffinity(Pid::from_raw(0), &allowed)?;
    }
    Ok(())
}

fn reap_until(pid: u32) -> Result<(), Errno> {
    loop {
        match wait() {
            Ok(WaitStatus::Exited(ended, _) | WaitStatus::Signaled(ended, _, _))
                if u32::try_from(ended.as_raw()) == Ok(pid) =>
            {
                return Ok(());
            }
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
}

fn mount_at(
    source: &str,
    kind: &str,
    target: &str,
    flags: MsFlags,
    options: &str,
) -> Result<(), Box<dyn std::error::Error>> {
    fs::create_dir_all(target)?;
    mount(Some(source), target, Some(kind), flags, Some(options))
        .map_err(|error| format!("cannot mount {kind} on {target}: {error}").into())
}

fn mount_system() -> Result<(), Box<dyn std::error::Error>> {
    let quiet = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount_at("proc", "proc", "/proc", quiet, "")?;
    mount_at("sysfs", "sysfs", "/sys", quiet, "")?;
    mount_at("devtmpfs", "devtmpfs", "/dev", MsFlags::MS_NOSUID, "mode=0755")?;
    mount_at("devpts", "devpts", "/dev/pts", MsFlags::MS_NOSUID, "mode=0620,ptmxmode=0666")?;
    mount_at("tmpfs", "tmpfs", "/dev/shm", quiet, "mode=1777")?;
    mount_at("tmpfs", "tmpfs", "/run", quiet, "mode=0755")?;
    mount_at("tmpfs", "tmpfs", "/tmp", quiet, "mode=1777,size=75%")?;
    mount_at("debugfs", "debugfs", "/sys/kernel/debug", quiet, "")?;
    mount_at("cgroup2", "cgroup2", "/sys/fs/cgroup", quiet, "")?;
    fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+cpu +io +memory +pids")?;
    for link in [("/proc/self/fd", "/dev/fd"), ("/proc/self/mounts", "/etc/mtab")] {
        std::os::unix::fs::symlink(link.0, link.1)?;
    }
    fs::create_dir_all("/root")?;
    fs::create_dir_all("/var/tmp")?;
    Ok(())
}

/// Gives every busybox applet its usual name, below `/bin` and `/sbin`.
fn link_applets() -> Result<(), Box<dyn std::error::Error>> {
    for directory in ["/sbin", "/usr/bin", "/usr/sbin"] {
        fs::create_dir_all(directory)?;
    }
    let linked = Command::new("/bin/busybox").args(["--install", "-s"]).status()?;
    if linked.success() { Ok(()) } else { Err("busybox --install failed".into()) }
}

fn load_module(path: &str) -> Result<(), Box<dyn std::error::Error>> {
    let file = fs::File::open(path).map_err(|error| format!("{path}: {error}"))?;
    match finit_module(&file, c"", ModuleInitFlags::empty()) {
        Ok(()) | Err(Errno::EEXIST) => Ok(()),
        Err(error) => Err(format!("cannot load {path}: {error}").into()),
    }
}

/// Settings that tests and measurements count on; one that this kernel lacks is reported.
fn set_tunables() {
    let settings = [
        // Huge pages move heap figures in 2 MiB jumps; a test that wants them says so.
        ("/sys/kernel/mm/transparent_hugepage/enabled", "never"),
        ("/proc/sys/kernel/hostname", "coppice-lab"),
        ("/proc/sys/vm/overcommit_memory", "1"),
        ("/proc/sys/vm/unprivileged_userfaultfd", "1"),
    ];
    for (path, value) in settings {
        if let Err(error) = fs::write(path, value) {
            eprintln!("coppice-lab: cannot set {path}: {error}");
        }
    }
    if let Err(error) =
        fs::set_permissions("/dev/kvm", std::os::unix::fs::PermissionsExt::from_mode(0o666))
    {
        eprintln!("coppice-lab: /dev/kvm: {error}");
    }
}

fn mount_share(share: &Share) -> Result<(), Box<dyn std::error::Error>> {
    let target = share.mount_at.as_ref().unwrap_or(&share.path);
    let target = target.to_str().ok_or("a share's path is not UTF-8")?;
    let cache = if share.immutable { "loose" } else { "mmap" };
    let options = format!("trans=virtio,version=9p2000.L,msize=524288,cache={cache}");
    let flags = if share.writable { MsFlags::empty() } else { MsFlags::MS_RDONLY };
    mount_at(&share.tag, "9p", target, flags, &options)
}

/// Addresses of QEMU's user-mode network.
fn bring_network_up() -> Result<(), Box<dyn std::error::Error>> {
    let script = "ip link set lo up && ip addr add 10.0.2.15/24 dev eth0 && \
                  ip link set eth0 up && ip route add default via 10.0.2.2";
    fs::write("/etc/resolv.conf", "nameserver 10.0.2.3\n")?;
    if !Path::new("/sys/class/net/eth0").exists() {
        return Err("the machine has no network device".into());
    }
    let done = Command::new("/bin/busybox").args(["sh", "-c", script]).status()?;
    if done.success() { Ok(()) } else { Err("cannot bring the network up".into()) }
}
