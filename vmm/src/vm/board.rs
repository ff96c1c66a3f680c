//! The state that belongs to the machine as a whole: interrupt controllers and clocks.

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data, kvm_irqchip,
};
use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::sys::cpu::tsc;
use crate::vcpu::state::TscShift;

const CHIPS: [u32; 3] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

/// Why the state cannot be taken or set.
#[derive(Debug, Error)]
pub enum BoardError {
    /// KVM does not give or take a part.
    #[error("KVM refuses the machine's {what}")]
    Part {
        /// The part.
        what: &'static str,
        /// What KVM said.
        #[source]
        source: kvm_ioctls::Error,
    },
    /// The state cannot be encoded.
    #[error("the {what} cannot be saved")]
    Encode {
        /// The part.
        what: &'static str,
        /// What is wrong.
        #[source]
        source: postcard::Error,
    },
    /// The saved bytes are something else.
    #[error("the saved {what} cannot be decoded")]
    Decode {
        /// The part.
        what: &'static str,
        /// What is wrong.
        #[source]
        source: postcard::Error,
    },
}

fn encode(what: &'static str, value: &impl Serialize) -> Result<Vec<u8>, BoardError> {
    postcard::to_stdvec(value).map_err(|source| BoardError::Encode { what, source })
}

fn part(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> BoardError {
    move |source| BoardError::Part { what, source }
}

/// The two 8259s and the I/O APIC.
#[derive(Serialize, Deserialize)]
pub(super) struct Irqchip([kvm_irqchip; 3]);

impl Irqchip {
    /// Takes the state, with all vCPUs stopped and no interrupt on its way.
    ///
    /// # Errors
    /// When KVM does not give it.
    pub(super) fn save(vm: &VmFd) -> Result<Self, BoardError> {
        let mut chips = [kvm_irqchip::default(); 3];
        for (chip, id) in chips.iter_mut().zip(CHIPS) {
            chip.chip_id = id;
            vm.get_irqchip(chip).map_err(part("interrupt controllers"))?;
        }
        Ok(Self(chips))
    }

    /// Sets the state.
    ///
    /// # Errors
    /// When KVM does not take it.
    pub(super) fn restore(&self, vm: &VmFd) -> Result<(), BoardError> {
        for (chip, id) in self.0.iter().zip(CHIPS) {
            // The position says which one it is, whatever the file says.
            let chip = kvm_irqchip { chip_id: id, ..*chip };
            vm.set_irqchip(&chip).map_err(part("interrupt controllers"))?;
        }
        Ok(())
    }

    /// The state in the form it has in a checkpoint.
    ///
    /// # Errors
    /// Never in practice.
    pub(super) fn encode(&self) -> Result<Vec<u8>, BoardError> {
        encode("interrupt controllers", self)
    }

    /// Reads [`Irqchip::encode`]'s form.
    ///
    /// # Errors
    /// When the bytes are something else.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, BoardError> {
        postcard::from_bytes(bytes)
            .map_err(|source| BoardError::Decode { what: "interrupt controllers", source })
    }
}

/// KVM's paravirtual clock, and the host's time stamp counter when it was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Clock {
    /// Nanoseconds since the machine was made, as its guest counts them.
    ns: u64,
    host_tsc: u64,
}

impl Clock {
    /// Takes the clock, with all vCPUs stopped.
    ///
    /// # Errors
    /// When KVM does not give it.
    pub(super) fn save(vm: &VmFd) -> Result<Self, BoardError> {
        let clock = vm.get_clock().map_err(part("clock"))?;
        Ok(Self { ns: clock.clock, host_tsc: tsc() })
    }

    /// By how much time stamp counters have to be moved back if vCPUs are restored now.
    pub(super) fn shift(&self) -> TscShift {
        TscShift(tsc().wrapping_sub(self.host_tsc))
    }

    /// Sets the clock: it goes on from where it was, as if no time had passed. To be called after
    /// the vCPUs' time stamp counters were set, which it is computed from.
    ///
    /// # Errors
    /// When KVM does not take it.
    pub(super) fn restore(&self, vm: &VmFd) -> Result<(), BoardError> {
        let clock = kvm_clock_data { clock: self.ns, ..Default::default() };
        vm.set_clock(&clock).map_err(part("clock"))
    }

    /// The clock in the form it has in a checkpoint.
    ///
    /// # Errors
    /// Never in practice.
    pub(super) fn encode(&self) -> Result<Vec<u8>, BoardError> {
        encode("clock", self)
    }

    /// Reads [`Clock::encode`]'s form.
    ///
    /// # Errors
    /// When the bytes are something else.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, BoardError> {
        postcard::from_bytes(bytes).map_err(|source| BoardError::Decode { what: "clock", source })
    }
}
