//! vCPUs: one thread each, driven by commands.
//!
//! ```text
//!            Run              Finish, or the guest ended
//!  Paused <------> Running ------------------------------> Finished
//!            Pause
//! ```
//!
//! A vCPU starts [`State::Paused`]. The machine gives a [`Command`] and, where it matters, waits
//! for the state that follows. What an exit means is in [`exit`]; this module only runs the loop.

pub mod exit;
pub mod state;

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use kvm_ioctls::VcpuFd;
use thiserror::Error;
use vm_memory::bitmap::AtomicBitmap;
use vmm_sys_util::signal::Killable;

pub use self::exit::{Buses, Ending};
use crate::devices::GuestSignals;
use crate::sys::jail::{self, Role};
use crate::sys::kvm::{RunPage, VmWithRam, pre_fault};
use crate::sys::signal::kick_signal;
use crate::sys::thread::{Begun, SpareThread};

/// Enough for the deepest device call, with room for unoptimised builds; only the pages used
/// cost memory.
const STACK_SIZE: usize = 128 << 10;

/// What a vCPU is told to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Stay out of the guest.
    Pause,
    /// Run the guest.
    Run,
    /// End the thread.
    Finish,
}

/// What a vCPU is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Out of the guest, with no I/O half done.
    Paused,
    /// Running the guest or serving one of its exits.
    Running,
    /// The thread has ended, by itself if there is an [`Ending`].
    Finished(Option<Ending>),
}

/// Why a vCPU could not be started.
#[derive(Debug, Error)]
#[error("vCPU {index} cannot be started")]
pub struct StartError {
    /// The vCPU's number.
    pub index: u8,
    /// What the host said.
    #[source]
    pub source: io::Error,
}

/// A thread for a vCPU to come.
pub struct SpareVcpu {
    index: u8,
    thread: SpareThread,
    confined: Option<Begun<()>>,
}

impl SpareVcpu {
    /// Waits until the thread has taken its role.
    ///
    /// # Errors
    /// Never in practice: the thread is gone.
    pub fn make_ready(&mut self) -> Result<(), StartError> {
        let confined = self.confined.take().map_or(Ok(()), Begun::wait);
        confined.map_err(|source| StartError { index: self.index, source })
    }
}

/// A running vCPU thread; dropping it ends the thread.
pub struct Vcpu {
    /// Held by the thread while it runs the guest, and by whoever looks at a stopped vCPU.
    fd: Arc<Mutex<VcpuFd>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    control: Mutex<Control>,
    changed: Condvar,
    exits: AtomicU64,
    run_page: RunPage,
}

#[derive(Debug)]
struct Control {
    command: Command,
    state: State,
    /// What KVM is to fill page tables for before the guest runs.
    ahead: Vec<Range<u64>>,
}

impl fmt::Debug for Vcpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vcpu").field("control", &*self.shared.lock()).finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Vcpu {
    /// Makes a thread for vCPU `index` of a machine to come.
    ///
    /// # Errors
    /// When the host has no room for another thread.
    pub fn spare(index: u8) -> Result<SpareVcpu, StartError> {
        let thread = SpareThread::new(&format!("vcpu{index}"), STACK_SIZE)
            .map_err(|source| StartError { index, source })?;
        let confined = thread.begin(|| jail::confine(Role::Vcpu));
        let confined = Some(confined.map_err(|source| StartError { index, source })?);
        Ok(SpareVcpu { index, thread, confined })
    }

    /// Has the thread of `spare` run vCPU `index`, paused at first. `signals` is rung when it ends by itself.
    ///
    /// # Errors
    /// When the host has no room for another thread or mapping.
    pub fn start(
        fd: VcpuFd,
        index: u8,
        vm: Arc<VmWithRam<AtomicBitmap>>,
        buses: Arc<Buses>,
        signals: GuestSignals,
        spare: SpareVcpu,
    ) -> Result<Self, StartError> {
        let failed = |source| StartError { index, source };
        let shared = Arc::new(Shared {
            control: Mutex::new(Control {
                command: Command::Pause,
                state: State::Paused,
                ahead: Vec::new(),
            }),
            changed: Condvar::new(),
            exits: AtomicU64::new(0),
            run_page: RunPage::new(&fd).map_err(failed)?,
        });
        let shared_too = Arc::clone(&shared);
        let fd = Arc::new(Mutex::new(fd));
        let mut runner = Runner { fd: Arc::clone(&fd), index, shared: shared_too, buses, _vm: vm };
        let thread = spare
            .thread
            .run(move || {
                let ending = runner.run();
                let by_itself = ending.is_some();
                runner.enter(State::Finished(ending));
                if by_itself {
                    signals.ring();
                }
            })
            .map_err(failed)?;
        Ok(Self { fd, shared, thread: Some(thread) })
    }

    /// Has the thread fill KVM's page tables for parts of the guest's memory, when it is told to
    /// run and where KVM can (`KVM_PRE_FAULT_MEMORY`): cheaper than an exit for each page.
    pub fn fault_ahead(&self, addresses: Vec<Range<u64>>) {
        self.shared.lock().ahead = addresses;
    }

    /// Gives a command; returns at once.
    pub fn command(&self, command: Command) {
        self.shared.lock().command = command;
        self.shared.changed.notify_all();
        if command != Command::Run {
            self.kick();
        }
    }

    /// Waits until the vCPU is no longer running and tells what it is instead.
    pub fn wait_stopped(&self) -> State {
        let control = self.shared.lock();
        let control = self
            .shared
            .changed
            .wait_while(control, |control| control.state == State::Running)
            .unwrap_or_else(PoisonError::into_inner);
        control.state.clone()
    }

    /// The vCPU itself, for reading and setting the state of one that is stopped; a running one
    /// would be waited for.
    pub fn fd(&self) -> MutexGuard<'_, VcpuFd> {
        self.fd.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why the vCPU ended by itself, if it did.
    pub fn ending(&self) -> Option<Ending> {
        match &self.shared.lock().state {
            State::Finished(ending) => ending.clone(),
            State::Paused | State::Running => None,
        }
    }

    /// Exits from the guest to this process so far.
    pub fn exits(&self) -> u64 {
        self.shared.exits.load(Ordering::Relaxed)
    }

    /// Gets the thread out of `KVM_RUN`, or keeps it from going in once more.
    fn kick(&self) {
        // The order matters, see `RunPage`.
        self.shared.run_page.set_immediate_exit(true);
        if let Some(thread) = &self.thread {
            // It fails only for a thread that is gone, which needs no kick.
            let _ = thread.kill(kick_signal());
        }
    }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        self.command(Command::Finish);
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has nothing more to tell.
            let _ = thread.join();
        }
    }
}

/// What the thread owns.
struct Runner {
    fd: Arc<Mutex<VcpuFd>>,
    index: u8,
    shared: Arc<Shared>,
    buses: Arc<Buses>,
    /// Keeps guest memory mapped while the vCPU can reach it.
    _vm: Arc<VmWithRam<AtomicBitmap>>,
}

impl Runner {
    /// Follows commands until the end.
    fn run(&mut self) -> Option<Ending> {
        loop {
            match self.next_command() {
                Command::Finish => return None,
                Command::Pause => {}
                Command::Run => {
                    if let Err(ending) = self.run_guest() {
                        return Some(ending);
                    }
                }
            }
        }
    }

    /// Sleeps while the command is to pause. The state changes under the same lock, so whoever
    /// gives a command and then waits sees the state that follows from it.
    fn next_command(&mut self) -> Command {
        let mut control = self.shared.lock();
        if control.command == Command::Pause {
            control.state = State::Paused;
            self.shared.changed.notify_all();
            control = self
                .shared
                .changed
                .wait_while(control, |control| control.command == Command::Pause)
                .unwrap_or_else(PoisonError::into_inner);
        }
        if control.command == Command::Run {
            control.state = State::Running;
        }
        control.command
    }

    /// Runs the guest until a kick.
    fn run_guest(&mut self) -> Result<(), Ending> {
        let mut fd = self.fd.lock().unwrap_or_else(PoisonError::into_inner);
        // The guest's clock jumped while it did not run; this keeps its watchdogs quiet. A guest
        // that has no paravirtual clock (yet) has none to tell, hence no check.
        let _ = fd.kvmclock_ctrl();
        let ahead = std::mem::take(&mut self.shared.lock().ahead);
        for range in ahead {
            // KVM that cannot, or a kick: the guest's own faults do the rest.
            let len = range.end.saturating_sub(range.start);
            if pre_fault(&fd, range.start, len).ok() != Some(len) {
                break;
            }
        }
        loop {
            match fd.run() {
                Ok(exit) => {
                    // This thread alone writes the counter.
                    let exits = self.shared.exits.load(Ordering::Relaxed);
                    self.shared.exits.store(exits.wrapping_add(1), Ordering::Relaxed);
                    let io_size = self.shared.run_page.port_io_size();
                    exit::handle(exit, io_size, &self.buses)
                        .map_err(|end| located(end, &fd, self.index))?;
                }
                Err(error) if error.errno() == libc::EINTR => {
                    // Cleared before the command is looked at: a later kick sets it again.
                    // KVM has completed the I/O of the last exit by now.
                    self.shared.run_page.set_immediate_exit(false);
                    return Ok(());
                }
                // A processor that waited for its start-up signal; look again.
                Err(error) if error.errno() == libc::EAGAIN => {}
                Err(error) => {
                    return Err(Ending::Failed(format!("KVM cannot run the guest: {error}")));
                }
            }
        }
    }

    fn enter(&self, state: State) {
        self.shared.lock().state = state;
        self.shared.changed.notify_all();
    }
}

/// Adds to a triple fault of vCPU `index` where it happened.
fn located(ending: Ending, fd: &VcpuFd, index: u8) -> Ending {
    match (ending, fd.get_regs(), fd.get_sregs()) {
        (Ending::TripleFault(_), Ok(regs), Ok(sregs)) => {
            Ending::TripleFault(exit::locate(index, &regs, &sregs))
        }
        (Ending::TripleFault(_), ..) => {
            Ending::TripleFault(format!("triple fault on vCPU {index}"))
        }
        (other, ..) => other,
    }
}
