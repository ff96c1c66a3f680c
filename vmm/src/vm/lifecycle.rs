//! The life of the one machine in this process: requests in, results and the end out.
//!
//! Only the process's main thread owns a [`Lifecycle`], so nothing here needs a lock.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use coppice_vmm_protocol::{ExitReason, MachineSpec, Op, ResultBody, VmState, VmStatus};

use super::error::VmError;
use super::machine::Machine;
use super::policy::{self, Action};
use super::spec::Spec;
use crate::devices::{GuestSignal, GuestSignals};
use crate::vcpu::Ending;

/// The machine, before, during and after its life.
pub struct Lifecycle {
    state: VmState,
    machine: Option<Machine>,
    signals: GuestSignals,
}

impl Lifecycle {
    /// Nothing was made yet.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self { state: VmState::Empty, machine: None, signals: GuestSignals::new()? })
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

    /// Carries out a request.
    pub fn request(&mut self, op: Op, fds: Vec<OwnedFd>) -> ResultBody {
        match self.carry_out(op, fds) {
            Ok(result) => result,
            Err(error) => {
                tracing::debug!(%error, "a request failed");
                ResultBody::Error(error.to_body())
            }
        }
    }

    fn carry_out(&mut self, op: Op, fds: Vec<OwnedFd>) -> Result<ResultBody, VmError> {
        let next = policy::next(self.state, Action::from(&op))?;
        match op {
            Op::Create(spec) => self.create(*spec, fds)?,
            Op::Start {} | Op::Resume {} => self.with_machine(Machine::run),
            Op::Pause {} => self.with_machine(Machine::pause),
            Op::Stop {} => self.machine = None,
            Op::Status {} => return Ok(ResultBody::Status(self.status())),
            Op::SetBalloon { target_mib } => match &self.machine {
                Some(machine) => machine.set_balloon(target_mib)?,
                None => return Err(VmError::NoBalloon),
            },
        }
        self.state = next;
        Ok(ResultBody::Done)
    }

    fn create(&mut self, wire: MachineSpec, fds: Vec<OwnedFd>) -> Result<(), VmError> {
        let spec = Spec::from_wire(wire, fds)?;
        self.machine = Some(Machine::build(spec, &self.signals)?);
        Ok(())
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
                memory_stats: Default::default(),
            },
        }
    }

    /// Takes what the guest, or a vCPU, reported: the reason why the machine is over, if it is.
    pub fn guest_end(&self) -> Option<ExitReason> {
        let raised = self.signals.take();
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
        self.machine = None;
        self.state = VmState::Exited;
    }
}
