//! One microVM in one process, on KVM.
//!
//! The layers, each of which calls only those below it:
//!
//! ```text
//! control -> vm -> { vcpu, devices, boot } -> memory -> sys
//! ```
//!
//! `control` speaks the protocol of `coppice-vmm-protocol` with the manager. `vm` builds the
//! machine and is the one place that changes its state. This library knows no HTTP, no other
//! machine, and nothing about where its memory image came from.

pub mod boot;
pub mod checkpoint;
pub mod control;
pub mod devices;
pub mod memory;
pub mod sys;
pub mod vcpu;
pub mod vm;
