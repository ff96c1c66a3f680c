//! Each filter kills the process at a call outside its list: in a child process that really enters
//! it. That calls inside the lists pass is for `vmm/tests/confinement` to say, but for those that
//! only errors and races lead to, which are here.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus, Output};
use std::time::Duration;

use vm_memory::mmap::MmapRegion;

use super::calls::{Check, ROWS, Row};
use super::requests::{KVM_CREATE_VM, KVM_RUN, KVM_SET_CPUID2, KVM_SET_TSC_KHZ};
use super::{Role, confine, confine_process};
use crate::sys::mem;

const ROLES: [Role; 5] = [Role::Control, Role::Vcpu, Role::Disk, Role::Streams, Role::Worker];

/// The process alone, before its threads take their roles, and each role.
fn places() -> impl Iterator<Item = Option<Role>> {
    std::iter::once(None).chain(ROLES.map(Some))
}

/// Runs `work` in a child process that is confined.
fn confined(place: Option<Role>, work: impl FnOnce()) -> ExitStatus {
    let mut status = 0;
    // SAFETY: the child makes no use of what other threads may have been in the middle of: the C
    // library keeps its allocator whole over a fork.
    let child = unsafe { libc::fork() };
    if child == 0 {
        if confine_process().is_ok() {
            place.into_iter().for_each(confine);
            work();
        }
        // By the one call that every list has; a process with one thread ends.
        // SAFETY: ends this thread.
        unsafe { libc::syscall(libc::SYS_exit, 7) };
        std::process::abort();
    }
    assert!(child > 0);
    // SAFETY: `status` has room for what the kernel writes.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    ExitStatus::from_raw(status)
}

/// Makes a call, with zeroes for arguments that are not given.
fn call(number: libc::c_long, arguments: &[u64]) {
    let at = |index: usize| arguments.get(index).copied().unwrap_or(0);
    // SAFETY: the calls here fail, or the process dies before they are made.
    unsafe { libc::syscall(number, at(0), at(1), at(2), at(3), at(4), at(5)) };
}

#[track_caller]
fn assert_killed(place: Option<Role>, number: libc::c_long, arguments: &[u64], what: &str) {
    let status = confined(place, || call(number, arguments));
    assert_eq!(status.signal(), Some(libc::SIGSYS), "{what} in {place:?}: {status}");
}

const INVALID: u64 = u64::MAX;
/// Set in numbers of calls of the x32 interface.
const X32: libc::c_long = 0x4000_0000;

/// Calls that no thread of a machine has a use for, with arguments that would do something.
#[rustfmt::skip]
const NOBODYS: &[(&str, libc::c_long, &[u64])] = &[
    ("open", libc::SYS_open, &[]),
    ("openat", libc::SYS_openat, &[]),
    ("openat2", libc::SYS_openat2, &[]),
    ("open_by_handle_at", libc::SYS_open_by_handle_at, &[]),
    ("open of x32", libc::SYS_open | X32, &[]),
    ("creat", libc::SYS_creat, &[]),
    ("execve", libc::SYS_execve, &[]),
    ("execveat", libc::SYS_execveat, &[]),
    ("fork", libc::SYS_fork, &[]),
    ("vfork", libc::SYS_vfork, &[]),
    ("clone of a process", libc::SYS_clone, &[17]),
    ("clone into a user namespace", libc::SYS_clone, &[0x1000_0000]),
    ("ptrace", libc::SYS_ptrace, &[]),
    ("process_vm_readv", libc::SYS_process_vm_readv, &[1]),
    ("process_vm_writev", libc::SYS_process_vm_writev, &[1]),
    ("socket of the internet", libc::SYS_socket, &[2, 1]),
    ("socket of packets", libc::SYS_socket, &[1, 5]),
    ("socket of netlink", libc::SYS_socket, &[16, 3]),
    ("bind", libc::SYS_bind, &[INVALID]),
    ("listen", libc::SYS_listen, &[INVALID]),
    ("socketpair", libc::SYS_socketpair, &[1, 1]),
    ("executable mmap", libc::SYS_mmap, &[0, 4096, 7, 0x22, INVALID]),
    ("executable mprotect", libc::SYS_mprotect, &[0, 4096, 5]),
    ("pkey_mprotect", libc::SYS_pkey_mprotect, &[0, 4096, 4]),
    ("memfd_create", libc::SYS_memfd_create, &[]),
    ("ioctl that types for a terminal", libc::SYS_ioctl, &[0, 0x5412]),
    ("ioctl KVM_CREATE_DEVICE", libc::SYS_ioctl, &[INVALID, 0xC00C_AEE0]),
    ("ioctl without a number", libc::SYS_ioctl, &[INVALID]),
    ("prctl PR_SET_DUMPABLE", libc::SYS_prctl, &[4, 1]),
    ("prctl PR_SET_MM", libc::SYS_prctl, &[35]),
    ("seccomp, strict", libc::SYS_seccomp, &[0]),
    ("seccomp, what there is", libc::SYS_seccomp, &[2]),
    ("kill", libc::SYS_kill, &[1]),
    ("tgkill of another process", libc::SYS_tgkill, &[1, 1, 6]),
    ("tkill", libc::SYS_tkill, &[1]),
    ("pidfd_open", libc::SYS_pidfd_open, &[1]),
    ("pidfd_send_signal", libc::SYS_pidfd_send_signal, &[INVALID]),
    ("unshare", libc::SYS_unshare, &[]),
    ("setns", libc::SYS_setns, &[INVALID]),
    ("mount", libc::SYS_mount, &[]),
    ("pivot_root", libc::SYS_pivot_root, &[]),
    ("chroot", libc::SYS_chroot, &[]),
    ("chdir", libc::SYS_chdir, &[]),
    ("fchdir", libc::SYS_fchdir, &[INVALID]),
    ("bpf", libc::SYS_bpf, &[]),
    ("perf_event_open", libc::SYS_perf_event_open, &[]),
    ("io_uring_setup", libc::SYS_io_uring_setup, &[]),
    ("userfaultfd", libc::SYS_userfaultfd, &[]),
    ("keyctl", libc::SYS_keyctl, &[]),
    ("add_key", libc::SYS_add_key, &[]),
    ("setuid", libc::SYS_setuid, &[]),
    ("setresuid", libc::SYS_setresuid, &[]),
    ("capset", libc::SYS_capset, &[]),
    ("prlimit64", libc::SYS_prlimit64, &[]),
    ("rename", libc::SYS_rename, &[]),
    ("unlinkat", libc::SYS_unlinkat, &[INVALID]),
    ("linkat", libc::SYS_linkat, &[INVALID]),
    ("symlink", libc::SYS_symlink, &[]),
    ("mkdirat", libc::SYS_mkdirat, &[INVALID]),
    ("mknodat", libc::SYS_mknodat, &[INVALID]),
    ("chmod", libc::SYS_chmod, &[]),
    ("fchmod", libc::SYS_fchmod, &[INVALID]),
    ("fchown", libc::SYS_fchown, &[INVALID]),
    ("dup2", libc::SYS_dup2, &[INVALID]),
    ("pipe2", libc::SYS_pipe2, &[]),
    ("fcntl F_SETLEASE", libc::SYS_fcntl, &[INVALID, 1024]),
    ("inotify_init1", libc::SYS_inotify_init1, &[]),
    ("personality", libc::SYS_personality, &[]),
    ("modify_ldt", libc::SYS_modify_ldt, &[]),
    ("init_module", libc::SYS_init_module, &[]),
    ("kexec_load", libc::SYS_kexec_load, &[]),
    ("reboot", libc::SYS_reboot, &[]),
    ("sched_setaffinity", libc::SYS_sched_setaffinity, &[INVALID]),
    ("setpriority", libc::SYS_setpriority, &[INVALID]),
    ("rt_sigaction of SIGSYS", libc::SYS_rt_sigaction, &[31]),
    ("rt_sigqueueinfo", libc::SYS_rt_sigqueueinfo, &[1]),
    ("futex that requeues", libc::SYS_futex, &[0, 3]),
    ("futex with priorities", libc::SYS_futex, &[0, 6]),
    ("madvise MADV_HWPOISON", libc::SYS_madvise, &[0, 0, 100]),
    ("statx of a path", libc::SYS_statx, &[INVALID, 0, 0]),
    ("newfstatat of a path", libc::SYS_newfstatat, &[INVALID, 0, 0, 0]),
    ("no call", 100_000, &[]),
];

#[test]
fn calls_that_nobody_needs_kill_in_every_place() {
    for place in places() {
        for (name, number, arguments) in NOBODYS {
            assert_killed(place, *number, arguments, name);
        }
    }
}

/// Arguments that pass a row's checks.
fn arguments_of(row: &Row) -> [u64; 6] {
    let mut arguments = [0; 6];
    for check in row.checks {
        if let Check::Is(at, value) = check {
            arguments[usize::from(at)] = value.into();
        }
    }
    arguments
}

#[test]
fn what_only_other_threads_need_kills_each_of_them() {
    for role in ROLES {
        let own: Vec<_> = ROWS.iter().filter(|row| row.is_for(role)).collect();
        let covered = |row: &Row| {
            own.iter().any(|own| {
                own.call == row.call && (own.checks == row.checks || own.checks == [Check::Any; 3])
            })
        };
        let mut killed = 0;
        for row in ROWS.iter().filter(|row| !covered(row)) {
            // The child's own process ID is known to the child only.
            let own_process = row.checks.iter().any(|c| matches!(c, Check::ThisProcess(_)));
            let status = confined(Some(role), || {
                let mut arguments = arguments_of(row);
                if own_process {
                    arguments[0] = std::process::id().into();
                }
                call(row.call, &arguments);
            });
            assert_eq!(status.signal(), Some(libc::SIGSYS), "{role:?}: {row:?}: {status}");
            killed += 1;
        }
        assert!(killed > 20, "{role:?}");
    }
}

#[test]
fn a_confined_process_that_keeps_to_its_list_lives() {
    for place in places() {
        let status = confined(place, || call(libc::SYS_close, &[INVALID]));
        assert_eq!(status.code(), Some(7), "{place:?}: {status}");
    }
}

#[test]
fn a_role_takes_away_what_the_process_had() {
    let allowed = confined(None, || call(libc::SYS_ioctl, &[INVALID, KVM_RUN.into()]));
    assert_eq!(allowed.code(), Some(7), "{allowed}");
    assert_killed(Some(Role::Control), libc::SYS_ioctl, &[INVALID, KVM_RUN.into()], "KVM_RUN");
    assert_killed(Some(Role::Vcpu), libc::SYS_ioctl, &[INVALID, KVM_CREATE_VM.into()], "a VM");
}

#[test]
fn one_filter_is_no_way_out_of_another() {
    let status = confined(Some(Role::Vcpu), || confine(Role::Disk));
    assert_eq!(status.signal(), Some(libc::SIGSYS), "{status}");
}

/// Where this program is told, as a child of itself, in which place to do something.
const PLACE: &str = "COPPICE_TEST_PLACE";

/// Runs one of the tests that do nothing by themselves in a process of its own.
fn child(test: &str, place: usize) -> Output {
    let name = format!("sys::jail::tests::{test}");
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &name, "--nocapture", "--test-threads=1"])
        .env_clear()
        // As `use_one_heap` sees to it before there are threads.
        .env("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
        .env(PLACE, place.to_string())
        .output()
        .unwrap()
}

/// Confines this process as it is told; `false` when it is not one of those that are.
fn enter_place() -> bool {
    let Ok(place) = std::env::var(PLACE) else { return false };
    confine_process().unwrap();
    places().nth(place.parse().unwrap()).unwrap().into_iter().for_each(confine);
    true
}

#[test]
fn panics() {
    if !enter_place() {
        return;
    }
    let _ = std::panic::catch_unwind(|| panic!("the reason of it all"));
    // As in a build that does not unwind.
    std::process::abort();
}

#[test]
fn a_panic_is_told_and_ends_the_process_in_every_place() {
    for (number, place) in places().enumerate() {
        let output = child("panics", number);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{place:?}: {text}");
        assert!(text.contains("the reason of it all"), "{place:?}: {text}");
    }
}

#[test]
fn grows() {
    if !enter_place() {
        return;
    }
    // Small pieces, from the heap's end.
    let pieces: Vec<Vec<u8>> = (0..2000).map(|_| vec![1; 1000]).collect();
    // A large one, with a mapping of its own that becomes larger.
    let mut large = vec![1u8; 1 << 20];
    large.resize(5 << 20, 2);
    std::hint::black_box((&pieces, &large));
    drop((pieces, large));
    let _ = std::io::stderr().write_all(b"grown and shrunk\n");
    std::process::abort();
}

#[test]
fn the_heap_grows_in_every_place() {
    for (number, place) in places().enumerate() {
        let output = child("grows", number);
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{place:?}: {output:?}");
        assert_eq!(output.stderr, b"grown and shrunk\n");
    }
}

#[test]
fn pages_are_brought_in() {
    let region = MmapRegion::<()>::new(2 << 20).unwrap();
    for role in [Role::Control, Role::Worker] {
        let status = confined(Some(role), || {
            mem::populate(&region, 0, 1 << 20).unwrap();
            mem::read_ahead(&region, 0, 1 << 20).unwrap();
        });
        assert_eq!(status.code(), Some(7), "{role:?}: {status}");
    }
}

#[test]
fn clocks_are_read_by_a_call_in_every_place() {
    for place in places() {
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let now = (&raw mut now).expose_provenance() as u64;
        let status = confined(place, || call(libc::SYS_clock_gettime, &[1, now]));
        assert_eq!(status.code(), Some(7), "{place:?}: {status}");
    }
}

#[test]
fn locks_of_the_c_library_are_waited_for_in_every_place() {
    for place in places() {
        let lock = 1u32;
        let lock = (&raw const lock).expose_provenance() as u64;
        // It has another value by now, so nobody waits.
        let status = confined(place, || call(libc::SYS_futex, &[lock, 128, 2]));
        assert_eq!(status.code(), Some(7), "{place:?}: {status}");
    }
}

/// The requests fail for a descriptor that is none, but are made.
#[test]
fn a_vcpu_is_set_to_the_rate_and_features_it_had() {
    for place in [None, Some(Role::Control)] {
        for request in [KVM_SET_TSC_KHZ, KVM_SET_CPUID2] {
            let status = confined(place, || call(libc::SYS_ioctl, &[INVALID, request.into(), 1]));
            assert_eq!(status.code(), Some(7), "{request:#x} in {place:?}: {status}");
        }
    }
}

#[test]
fn a_wait_goes_on_after_a_stop() {
    let (mut reader, writer) = std::io::pipe().unwrap();
    let stopper = std::thread::spawn(move || {
        let mut id = [0; 4];
        reader.read_exact(&mut id).unwrap();
        let child = i32::from_ne_bytes(id);
        // Some of these meet it in its wait.
        for _ in 0..200 {
            for signal in [libc::SIGSTOP, libc::SIGCONT] {
                // SAFETY: sends a signal to a child of this process, which is not reaped yet.
                unsafe { libc::kill(child, signal) };
            }
            std::thread::yield_now();
        }
    });
    let status = confined(None, || {
        let id = std::process::id().to_ne_bytes();
        let _ = (&writer).write_all(&id);
        let (_keep, never) = std::sync::mpsc::channel::<()>();
        let _ = never.recv_timeout(Duration::from_millis(300));
    });
    assert_eq!(status.code(), Some(7), "{status}");
    stopper.join().unwrap();
}

#[test]
fn a_memory_fault_ends_the_process_by_its_own_signal() {
    for place in places() {
        for (signal, name) in [(libc::SIGSEGV, "SIGSEGV"), (libc::SIGBUS, "SIGBUS")] {
            let file: File = tempfile::tempfile().unwrap();
            let status = confined(place, || {
                // Behind the end of a file for one, nothing at all for the other.
                let protection = if signal == libc::SIGBUS { libc::PROT_READ } else { 0 };
                let (flags, fd) = (libc::MAP_PRIVATE, file.as_raw_fd());
                // SAFETY: a new mapping at an address of the kernel's choice.
                let page =
                    unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, fd, 0) };
                // SAFETY: the page is mapped; the access is meant to fault, which ends the child.
                unsafe { page.cast::<u8>().read_volatile() };
            });
            assert_eq!(status.signal(), Some(signal), "{name} in {place:?}: {status}");
        }
    }
}

#[test]
fn a_channel_may_yield_in_every_place() {
    for place in places() {
        let status = confined(place, std::thread::yield_now);
        assert_eq!(status.code(), Some(7), "{place:?}: {status}");
    }
}
