//! Bodies of the fuzz targets: each takes bytes nobody trusts and drives the real code with them.
//!
//! A body fails by panicking: in the code under test, or in a check of its own that holds for
//! every input.

pub mod blk_request;
pub mod control_message;
pub mod device_state;
pub mod image;
pub mod kernel_loader;
pub mod virtio_mmio;
pub mod vsock_packet;

mod guest;
mod input;
#[cfg(test)]
mod smoke;
