//! The life of the one machine in this process: requests in, results and the end out.
//!
//! Only the process's main thread owns a [`Lifecycle`], so nothing here needs a lock.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use coppice_vmm_protocol::{
    ExitReason, MachineSpec, Op, ResultBody, RollbackInfo, VmState, VmStatus,
};

use super::error::VmError;
use super::host::Host;
use super::machine::{Machine, Running, Written};
use super::policy::{self, Action, Progress};
use super::shell::Shell;
use super::spec::{self, CheckpointOrder, RollbackOrder, Spec};
use super::text::one_line;
use crate::devices::{GuestSignal, GuestSignals};
use crate::vcpu::Ending;

/// The machine, before, during and after its life.
pub struct Lifecycle {
    host: Host,
    state: VmState,
    /// A checkpoint being written; dropped before the machine whose memory it reads.
    writing: Option<Running>,
    /// A checkpoint that waits to be committed.
    written: Option<Written>,
    machine: Option<Machine>,
    shell: Option<Shell>,
    /// Why the machine cannot go on, if a rollback went wrong half-way.
    broken: Option<String>,
    signals: GuestSignals,
}

impl Lifecycle {
    /// Nothing was made yet, but all paths that machines need are opened.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            host: Host::open(),
            state: VmState::Empty,
            writing: None,
            written: None,
            machine: None,
            shell: None,
            broken: None,
            signals: GuestSignals::new()?,
        })
    }

    /// The present state.
    pub fn state(&self) -> VmState {
        self.state
    }

    /// The descriptor that is readable when [`Lifecycle::guest_end`] has something to tell.
    pub fn guest_fd(&self) -> RawFd {
        self.signals.as_raw_fd()
    }

    /// The descriptor that is readable when [`Lifecycle::console_event`] has work, once there is
    /// a machine.
    pub fn console_fd(&self) -> Option<RawFd> {
        self.machine.as_ref().map(Machine::console_fd)
    }

    /// Serves the host's side of the console.
    pub fn console_event(&self) {
        if let Some(machine) = &self.machine {
            machine.console_event();
        }
    }

    /// Carries out a request. There is no answer yet to one that takes its time: it is what
    /// [`Lifecycle::written`] gives.
    pub fn request(&mut self, op: Op, fds: Vec<OwnedFd>) -> Option<ResultBody> {
        match self.carry_out(op, fds) {
            Ok(result) => result,
            Err(error) => Some(failed(&error)),
        }
    }

    /// The descriptor that is readable when [`Lifecycle::written`] has an answer, while a
    /// checkpoint is being written.
    pub fn writing_fd(&self) -> Option<RawFd> {
        self.writing.as_ref().map(|running| running.job.as_raw_fd())
    }

    /// The answer to the request for the checkpoint that was being written; waits for it.
    pub fn written(&mut self) -> Option<ResultBody> {
        let (running, machine) = (self.writing.take()?, self.machine.as_mut()?);
        Some(match machine.finish(running) {
            Ok((written, info)) => {
                self.written = Some(written);
                ResultBody::Checkpoint(info)
            }
            Err(error) => failed(&error),
        })
    }

    /// Whoever asked for the last checkpoint is gone: if it was not committed, it never will be.
    pub fn abandon(&mut self) {
        let _no_longer_awaited = self.written();
        if let (Some(written), Some(machine)) = (self.written.take(), self.machine.as_mut()) {
            machine.abandon(&written);
        }
    }

    fn progress(&self) -> Progress {
        match (&self.writing, &self.written) {
            (Some(_), _) => Progress::Writing,
            (None, Some(_)) => Progress::Written,
            (None, None) => Progress::None,
        }
    }

    fn carry_out(&mut self, op: Op, fds: Vec<OwnedFd>) -> Result<Option<ResultBody>, VmError> {
        let next = policy::next(self.state, self.progress(), Action::from(&op))?;
        let running = self.state == VmState::Running;
        match op {
            Op::Prepare { vcpus, memory_mib } => {
                spec::check_shape(vcpus, memory_mib)?;
                let mut shell = Shell::new(&self.host, vcpus, memory_mib)?;
                shell.rehearse()?;
                self.shell = Some(shell);
            }
            Op::Checkpoint(wire) => {
                let order = CheckpointOrder::from_wire(wire, fds)?;
                let machine = self.machine.as_mut().ok_or(VmError::NoMachine)?;
                self.writing = Some(machine.checkpoint(order, running)?);
                return Ok(None);
            }
            Op::Commit { id } => {
                if let (Some(written), Some(machine)) = (&self.written, self.machine.as_mut()) {
                    machine.commit(written, &id)?;
                    self.written = None;
                }
            }
            Op::Rollback(wire) => {
                let order = RollbackOrder::from_wire(wire, fds)?;
                return self.roll_back(order, running).map(|info| Some(ResultBody::Rollback(info)));
            }
            Op::RecordWorkingSet { file } => {
                let file = spec::take_record(file, fds)?;
                let machine = self.machine.as_ref().ok_or(VmError::NoMachine)?;
                machine.record_working_set(&file)?;
            }
            Op::Create(spec) => self.create(*spec, fds)?,
            Op::Start {} | Op::Resume {} => self.with_machine(Machine::run),
            Op::Pause {} => self.with_machine(Machine::pause),
            Op::Stop {} => self.end(),
            Op::Status {} => return Ok(Some(ResultBody::Status(self.status()))),
            Op::SetBalloon { target_mib } => match &self.machine {
                Some(machine) => machine.set_balloon(target_mib)?,
                None => return Err(VmError::NoBalloon),
            },
        }
        self.state = next;
        Ok(Some(ResultBody::Done))
    }

    fn create(&mut self, wire: MachineSpec, fds: Vec<OwnedFd>) -> Result<(), VmError> {
        let (spec, origin) = Spec::from_wire(wire, fds)?;
        if let Some(shell) = &self.shell {
            shell.check(spec.vcpus, spec.memory_mib)?;
        }
        let shell = self.shell.take();
        self.machine = Some(Machine::build(&self.host, shell, spec, origin, &self.signals)?);
        Ok(())
    }

    fn roll_back(&mut self, order: RollbackOrder, running: bool) -> Result<RollbackInfo, VmError> {
        let machine = self.machine.as_mut().ok_or(VmError::NoMachine)?;
        match machine.roll_back(order, running) {
            Ok(result) => {
                if result.is_ok() {
                    // What the guest asked for after the checkpoint never happened.
                    let _undone = self.signals.take();
                }
                result
            }
            Err(error) => {
                self.broken = Some(format!("a rollback failed: {}", one_line(&error)));
                self.signals.ring();
                Err(error)
            }
        }
    }

    fn with_machine(&self, act: impl FnOnce(&Machine)) {
        if let Some(machine) = &self.machine {
            act(machine);
        }
    }

    fn status(&self) -> VmStatus {
        match &self.machine {
            Some(machine) => machine.status(self.state),
            None => VmStatus {
                state: self.state,
                exits: 0,
                balloon_mib: None,
                disk_layers: Vec::new(),
                checkpoint: None,
                memory_layers: 0,
                memory_stats: Default::default(),
            },
        }
    }

    /// Takes what the guest, or a vCPU, reported: the reason why the machine is over, if it is.
    pub fn guest_end(&mut self) -> Option<ExitReason> {
        let raised = self.signals.take();
        if let Some(message) = self.broken.take() {
            return Some(ExitReason::Failed { message });
        }
        let machine = self.machine.as_ref()?;
        let ending = raised.map(Ending::Guest).or_else(|| machine.ending())?;
        Some(match ending {
            Ending::Failed(message) => ExitReason::Failed { message },
            Ending::Guest(GuestSignal::PowerOff) => ExitReason::PowerOff,
            Ending::Guest(GuestSignal::Panic) => ExitReason::Panic,
            // A kernel without a pvpanic driver resets after it wrote why on the console, by
            // whatever way it was told to.
            Ending::Guest(GuestSignal::Reset) | Ending::TripleFault(_)
                if machine.panic_text().is_some() =>
            {
                ExitReason::Panic
            }
            Ending::Guest(GuestSignal::Reset) => ExitReason::Reset,
            Ending::TripleFault(message) => ExitReason::TripleFault { message },
        })
    }

    /// Takes the machine apart: its vCPUs stop, I/O at hand finishes, all it held is given back.
    pub fn end(&mut self) {
        self.writing = None;
        self.written = None;
        self.machine = None;
        self.shell = None;
        self.state = VmState::Exited;
    }
}

fn failed(error: &VmError) -> ResultBody {
    tracing::debug!(%error, "a request failed");
    ResultBody::Error(error.to_body())
}
