//! The few fixed devices of a PC that a kernel expects or that end a machine, all on I/O ports
//! except the generation ID, which is a page of guest memory.
//!
//! Each tells the machine's owner what the guest wants through [`super::GuestSignals`].

mod acpi;
mod i8042;
mod pvpanic;
mod serial;
mod vmgenid;

pub use acpi::AcpiRegisters;
pub use i8042::I8042;
pub use pvpanic::PvPanic;
pub use serial::Serial;
pub use vmgenid::{VmGenId, VmGenIdError};
