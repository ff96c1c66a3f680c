//! The lists: each call, with which arguments, by which threads, and why.
//!
//! A call with several rows passes if one of them holds. A test follows whole lives of machines and
//! fails for a row that no thread of its list uses.

use super::Role;
use super::requests::*;

/// Sets of threads.
type Threads = u8;

/// Those of [`Role`].
const CONTROL: Threads = 1;
const VCPU: Threads = 1 << 1;
const DISK: Threads = 1 << 2;
const STREAMS: Threads = 1 << 3;
const WORKER: Threads = 1 << 4;
/// Any thread from its start until it takes its role.
const START: Threads = 1 << 5;
/// All that takes part in building a machine, before its guest runs.
const BUILD: Threads = 1 << 6;
/// The control thread when it makes a machine of what was prepared: what is left of building then.
const ASSEMBLE: Threads = 1 << 7;

/// What looks after devices.
const IO: Threads = DISK | STREAMS;
/// All threads of a machine that runs.
const ALL: Threads = CONTROL | VCPU | IO | WORKER;

/// What an argument, counted from 0, has to be; 32 bits of it count, as with all these calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    /// Anything.
    Any,
    /// This value.
    Is(u8, u32),
    /// A value without any of these bits.
    Without(u8, u32),
    /// The process ID of this very process.
    ThisProcess(u8),
}
use Check::{Any, Is, ThisProcess, Without};

/// A call that passes.
#[derive(Debug)]
pub struct Row {
    /// Its number.
    pub call: libc::c_long,
    /// What holds of its arguments.
    pub checks: [Check; 3],
    threads: Threads,
}

impl Row {
    /// Whether a thread with this role may make the call. Whoever starts threads is confined with
    /// them until they take their role, so it has what they need.
    pub fn is_for(&self, role: Role) -> bool {
        let threads = match role {
            Role::Control => CONTROL | ASSEMBLE | WORKER | START,
            Role::Vcpu => VCPU,
            Role::Disk => DISK,
            Role::Streams => STREAMS,
            Role::Worker => WORKER,
        };
        self.threads & threads != 0
    }

    /// Whether it is in the list for this very role: what it does itself.
    pub fn is_of(&self, role: Role) -> bool {
        let own = match role {
            Role::Control => CONTROL | ASSEMBLE,
            _ => return self.is_for(role),
        };
        self.threads & own != 0
    }

    /// Whether this is needed by threads that start, or while a machine is built.
    pub fn is_of_building(&self) -> bool {
        self.threads & (START | BUILD) != 0
    }
}

const fn check(checks: &[Check], at: usize) -> Check {
    if at < checks.len() { checks[at] } else { Any }
}

macro_rules! rows {
    ($($call:ident $([$($check:expr),*])? => $threads:expr;)*) => {
        &[$(Row {
            call: libc::$call,
            checks: {
                const CHECKS: &[Check] = &[$($($check),*)?];
                [check(CHECKS, 0), check(CHECKS, 1), check(CHECKS, 2)]
            },
            threads: $threads,
        }),*]
    };
}

const PRIVATE: u32 = libc::FUTEX_PRIVATE_FLAG.cast_unsigned();
const WAIT: u32 = libc::FUTEX_WAIT.cast_unsigned();
const WAIT_UNTIL: u32 = libc::FUTEX_WAIT_BITSET.cast_unsigned();
const WAKE: u32 = libc::FUTEX_WAKE.cast_unsigned();
const REAL_TIME: u32 = libc::FUTEX_CLOCK_REALTIME.cast_unsigned();
const EXEC: u32 = libc::PROT_EXEC.cast_unsigned();
const EMPTY_PATH: u32 = libc::AT_EMPTY_PATH.cast_unsigned();
const FREE: u32 = (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE).cast_unsigned();
const ZERO: u32 = (libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE).cast_unsigned();
const UNIX: u32 = libc::AF_UNIX.cast_unsigned();
const STREAM: u32 = (libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC).cast_unsigned();
const SOCKET: u32 = libc::SOL_SOCKET.cast_unsigned();
/// The signal that kicks a vCPU: the first that the C library leaves to programs.
const KICK: u32 = 34;
/// The signal by which the C library has all threads change their user.
const INTERNAL: u32 = 33;
const ABORT: u32 = libc::SIGABRT.cast_unsigned();
const FAULT: u32 = libc::SIGSEGV.cast_unsigned();
const BUS: u32 = libc::SIGBUS.cast_unsigned();
const NAME: u32 = libc::PR_SET_NAME.cast_unsigned();
const NO_NEW_PRIVS: u32 = libc::PR_SET_NO_NEW_PRIVS.cast_unsigned();
/// What the C library starts a thread with: everything shared but registers and stack.
const THREAD: u32 = (libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID)
    .cast_unsigned();

const GET_FLAGS: u32 = libc::F_GETFL.cast_unsigned();
const SET_FLAGS: u32 = libc::F_SETFL.cast_unsigned();
const DUPLICATE: u32 = libc::F_DUPFD_CLOEXEC.cast_unsigned();

const DONT_NEED: u32 = libc::MADV_DONTNEED.cast_unsigned();
const WILL_NEED: u32 = libc::MADV_WILLNEED.cast_unsigned();
const DONT_DUMP: u32 = libc::MADV_DONTDUMP.cast_unsigned();
const HUGE_PAGES: u32 = libc::MADV_HUGEPAGE.cast_unsigned();
const POPULATE_READ: u32 = libc::MADV_POPULATE_READ.cast_unsigned();
const POPULATE_WRITE: u32 = libc::MADV_POPULATE_WRITE.cast_unsigned();

/// The calls that are made most come first among those with the same number.
#[rustfmt::skip]
pub static ROWS: &[Row] = rows! {
    // Running the guest. The clock is told of the pause; page tables are filled ahead.
    SYS_ioctl[Is(1, KVM_RUN)] => VCPU;
    SYS_ioctl[Is(1, KVM_KVMCLOCK_CTRL)] => VCPU;
    SYS_ioctl[Is(1, KVM_PRE_FAULT_MEMORY)] => VCPU;
    // Where a triple fault happened, which the vCPU's thread tells itself.
    SYS_ioctl[Is(1, KVM_GET_REGS)] => CONTROL | VCPU;
    SYS_ioctl[Is(1, KVM_GET_SREGS)] => CONTROL | VCPU;

    // The state of vCPUs and machine, for checkpoints and from them.
    SYS_ioctl[Is(1, KVM_GET_MSRS)] => CONTROL;
    SYS_ioctl[Is(1, KVM_SET_MSRS)] => CONTROL;
    SYS_ioctl[Is(1, KVM_SET_REGS)] => CONTROL;
    SYS_ioctl[Is(1, KVM_SET_SREGS)] => CONTROL;
    SYS_ioctl[Is(1, KVM_GET_XSAVE)] => CONTROL;
    SYS_ioctl[Is(1, KVM_SET_XSAVE)] => CONTROL;
    SYS_ioctl[Is(1, KVM_GET_XCRS)] => CONTROL;
    SYS_ioctl[Is(1, KVM_SET_XCRS)] => CONTROL;
    SYS_ioctl[Is(1, KVM_GET_DEBUGREGS)] => CONTROL;
    SYS_ioctl[Is(1, KVM_SET_DEBUGREGS)] => CONTROL;
    SYS_ioctl[Is(1, KVM_GET_LAPIC)] => CONTROL;
    SYS_ioctl[Is(1, KVM_SET_LAPIC)] => CONTROL;
    SYS_ioctl[Is(1, KVM_GET_MP_STATE)] => CONTROL;
    SYS_ioctl[Is(1, KVM_SET_MP_STATE)] => CONTROL;
    SYS_ioctl[Is(1, KVM_GET_VCPU_EVENTS)] => CONTROL;
    SYS_ioctl[Is(1, KVM_SET_VCPU_EVENTS)] => CONTROL;
    SYS_ioctl[Is(1, KVM_GET_CPUID2)] => CONTROL;
    SYS_ioctl[Is(1, KVM_GET_TSC_KHZ)] => CONTROL;
    SYS_ioctl[Is(1, KVM_GET_DEVICE_ATTR)] => CONTROL;
    SYS_ioctl[Is(1, KVM_SET_DEVICE_ATTR)] => CONTROL;
    SYS_ioctl[Is(1, KVM_GET_IRQCHIP)] => CONTROL;
    SYS_ioctl[Is(1, KVM_SET_IRQCHIP)] => CONTROL;
    SYS_ioctl[Is(1, KVM_GET_CLOCK)] => CONTROL;
    SYS_ioctl[Is(1, KVM_SET_CLOCK)] => CONTROL;
    // A checkpoint of a host whose processors count time at another rate: the counter is scaled.
    SYS_ioctl[Is(1, KVM_SET_TSC_KHZ)] => CONTROL;
    // A rollback to where the guest had not turned on a feature that shows in others.
    SYS_ioctl[Is(1, KVM_SET_CPUID2)] => CONTROL | BUILD;
    // Which pages the guest wrote. The flags of memory slots turn the log on.
    SYS_ioctl[Is(1, KVM_GET_DIRTY_LOG)] => CONTROL;
    SYS_ioctl[Is(1, KVM_CLEAR_DIRTY_LOG)] => CONTROL;
    SYS_ioctl[Is(1, KVM_SET_USER_MEMORY_REGION)] => CONTROL;

    // Making a virtual machine, and, at the end, a machine of it.
    SYS_ioctl[Is(1, KVM_CHECK_EXTENSION)] => BUILD;
    SYS_ioctl[Is(1, KVM_CREATE_VM)] => BUILD;
    SYS_ioctl[Is(1, KVM_GET_VCPU_MMAP_SIZE)] => BUILD;
    SYS_ioctl[Is(1, KVM_SET_TSS_ADDR)] => BUILD;
    SYS_ioctl[Is(1, KVM_SET_IDENTITY_MAP_ADDR)] => BUILD;
    SYS_ioctl[Is(1, KVM_CREATE_IRQCHIP)] => BUILD;
    SYS_ioctl[Is(1, KVM_ENABLE_CAP)] => BUILD;
    SYS_ioctl[Is(1, KVM_GET_MSR_INDEX_LIST)] => BUILD;
    SYS_ioctl[Is(1, KVM_GET_SUPPORTED_CPUID)] => BUILD;
    SYS_ioctl[Is(1, KVM_CREATE_VCPU)] => BUILD;
    SYS_ioctl[Is(1, KVM_SET_FPU)] => ASSEMBLE | BUILD;
    SYS_ioctl[Is(1, KVM_IRQFD)] => ASSEMBLE | BUILD;
    SYS_ioctl[Is(1, KVM_IOEVENTFD)] => ASSEMBLE | BUILD;

    // Write-protected pages of a background checkpoint: the control thread protects them in the
    // pause, the thread that writes them and the one that answers writers let go of them.
    SYS_ioctl[Is(1, UFFDIO_WRITEPROTECT)] => CONTROL | WORKER;
    SYS_ioctl[Is(1, UFFDIO_REGISTER)] => CONTROL;
    SYS_ioctl[Is(1, UFFDIO_UNREGISTER)] => WORKER;

    // Who connects to the vsock device is taken in without waiting.
    SYS_ioctl[Is(1, FIONBIO)] => ASSEMBLE | BUILD;
    // Whether the console's output is a terminal.
    SYS_ioctl[Is(1, TCGETS)] => ASSEMBLE | BUILD;

    // Locks and threads that are waited for or woken, by the standard library and, inside its
    // allocator, by the C library (plain WAIT).
    SYS_futex[Is(1, WAIT_UNTIL | PRIVATE)] => ALL;
    SYS_futex[Is(1, WAKE | PRIVATE)] => ALL;
    SYS_futex[Is(1, WAIT | PRIVATE)] => ALL;
    // A thread's end is waited for.
    SYS_futex[Is(1, WAIT_UNTIL | REAL_TIME)] => CONTROL | WORKER | BUILD;
    // A channel's other end is in the middle of its work.
    SYS_sched_yield => ALL | BUILD;
    // A wait with a time limit was interrupted, such as by a stop of the process.
    SYS_restart_syscall => BUILD;

    // Events, signals, faults of protected pages; the console, which vCPUs serve as well.
    SYS_read => ALL;
    SYS_write => ALL;
    SYS_poll => CONTROL | VCPU;
    SYS_epoll_wait => CONTROL | IO | WORKER;
    SYS_epoll_ctl => CONTROL | STREAMS | WORKER | BUILD;
    SYS_epoll_create1 => WORKER | ASSEMBLE | BUILD;
    SYS_eventfd2 => CONTROL | BUILD;
    // Deadlines of vsock connections.
    SYS_timerfd_settime => STREAMS;
    SYS_timerfd_create => ASSEMBLE | BUILD;

    // Files that were passed: disks, checkpoints, kernels.
    SYS_pread64 => CONTROL | DISK | WORKER | BUILD;
    // While a machine is built as well, from a checkpoint of very many pieces.
    SYS_preadv => CONTROL | DISK;
    SYS_pwrite64 => DISK;
    SYS_pwritev => DISK | WORKER;
    SYS_fallocate[Is(1, FREE)] => DISK;
    SYS_fallocate[Is(1, ZERO)] => DISK;
    SYS_fdatasync => DISK | WORKER;
    SYS_fsync => WORKER;
    SYS_ftruncate => CONTROL | BUILD;
    SYS_lseek => ASSEMBLE | BUILD;
    SYS_statx[Is(2, EMPTY_PATH)] => CONTROL | WORKER | BUILD;
    SYS_newfstatat[Is(3, EMPTY_PATH)] => CONTROL | BUILD;
    SYS_fcntl[Is(1, GET_FLAGS)] => CONTROL | BUILD;
    SYS_fcntl[Is(1, SET_FLAGS)] => CONTROL | BUILD;
    SYS_fcntl[Is(1, DUPLICATE)] => CONTROL | WORKER | BUILD;
    SYS_close => ALL;

    // Managers, and connections of the vsock device.
    SYS_accept4 => CONTROL | STREAMS;
    SYS_recvmsg => CONTROL | STREAMS;
    SYS_sendmsg => CONTROL | STREAMS;
    SYS_recvfrom => CONTROL | STREAMS;
    SYS_sendto => STREAMS;
    SYS_shutdown => STREAMS;
    SYS_getsockopt[Is(1, SOCKET)] => ASSEMBLE | BUILD;
    // The guest connects to a socket beside that of its vsock device. No filter sees the path.
    SYS_socket[Is(0, UNIX), Is(1, STREAM), Is(2, 0)] => STREAMS;
    SYS_connect => STREAMS;

    // Memory, never executable: the heap, which grows in whichever thread needs it, stacks, guest
    // RAM.
    SYS_brk => ALL;
    SYS_mmap[Without(2, EXEC)] => ALL | BUILD;
    SYS_mremap => ALL;
    SYS_munmap => ALL | BUILD;
    SYS_mprotect[Without(2, EXEC)] => CONTROL | START;
    // A thread that ends gives its stack back; the balloon, and a rollback, pages of the guest.
    SYS_madvise[Is(2, DONT_NEED)] => ALL;
    SYS_madvise[Is(2, HUGE_PAGES)] => CONTROL | BUILD;
    SYS_madvise[Is(2, POPULATE_WRITE)] => CONTROL | BUILD;
    // Pages that a clone will use; pages to protect, on kernels that protect present ones only.
    SYS_madvise[Is(2, POPULATE_READ)] => CONTROL | WORKER | BUILD;
    SYS_madvise[Is(2, WILL_NEED)] => WORKER;
    SYS_madvise[Is(2, DONT_DUMP)] => BUILD;
    SYS_mincore => BUILD;

    // Threads. The first of the two calls never gets here, see `confine_process`.
    SYS_clone3 => CONTROL | BUILD;
    SYS_clone[Is(0, THREAD)] => CONTROL | BUILD;
    SYS_set_robust_list => START;
    SYS_rseq => START;
    SYS_sched_getaffinity => START;
    SYS_prctl[Is(0, NAME)] => START;
    SYS_prctl[Is(0, NO_NEW_PRIVS)] => START;
    SYS_seccomp[Is(0, libc::SECCOMP_SET_MODE_FILTER)] => START;
    // The C library's own signal, which it handles from its first thread on.
    SYS_rt_sigaction[Is(0, INTERNAL)] => BUILD;
    // The stack on which an overflow of the other one is told; given back at the end.
    SYS_sigaltstack => ALL | START;
    SYS_rt_sigprocmask => ALL | START;
    SYS_exit => VCPU | IO | WORKER;
    SYS_exit_group => CONTROL;

    // A vCPU is kicked. Handlers of signals return: of that one, of a file over its limit, of memory
    // faults.
    SYS_tgkill[ThisProcess(0), Is(2, KICK)] => CONTROL;
    SYS_rt_sigreturn => ALL;
    // A panic ends the process, by this one signal.
    SYS_tgkill[ThisProcess(0), Is(2, ABORT)] => ALL;
    SYS_getpid => ALL;
    SYS_gettid => ALL | START;
    // A memory fault ends it by the signal that it came with.
    SYS_rt_sigaction[Is(0, FAULT)] => ALL;
    SYS_rt_sigaction[Is(0, BUS)] => ALL;

    // The parent may be gone.
    SYS_getppid => CONTROL | BUILD;
    // Keys of tables, of guests' generators, and what the entropy device gives.
    SYS_getrandom => CONTROL | STREAMS | BUILD;
    // Where the host's clock cannot be read without a call.
    SYS_clock_gettime => ALL | BUILD;
};

/// What the standard library adds to a build with debug assertions: it looks whether a descriptor
/// that it closes is open.
#[cfg(debug_assertions)]
pub static DEBUG_ROWS: &[Row] = rows! {
    SYS_fcntl[Is(1, libc::F_GETFD.cast_unsigned())] => ALL | BUILD;
};

/// None.
#[cfg(not(debug_assertions))]
pub static DEBUG_ROWS: &[Row] = &[];
