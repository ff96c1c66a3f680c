//! Guest RAM: private, copy-on-write mappings over an immutable image.
//!
//! Everything above (boot, devices, vCPUs) sees guest memory only through [`GuestRam`]; writes
//! made by the VMM itself are recorded in its bitmap, because KVM's dirty log does not see them.

pub mod layout;

use vm_memory::bitmap::AtomicBitmap;

/// Guest RAM with a bitmap of the pages that the VMM itself wrote.
pub type GuestRam = vm_memory::GuestMemoryMmap<AtomicBitmap>;
