//! Runs sandboxes, each a microVM of its own, and speaks with the agents in them.
//!
//! ```text
//! client -> serve -> { api, gateway } -> fleet -> { registry, build -> template -> sandbox }
//! sandbox -> { store, vmm, agent, image, workdir }   diff -> store -> { vmm, home }   doctor -> home
//! ```
//!
//! `vmm` starts a `coppice-vmm` process and asks it things; `agent` speaks with the guest;
//! `sandbox` puts the two together with files and sockets; `store` keeps what outlives a command.
//! `diff` reads the disks of two checkpoints. `serve` is the daemon: `fleet` has the sandboxes
//! that it answers for, `registry` what was promised about them, `api` and `gateway` take requests.
//! `client` is the command line's way to it.
//! Nothing here touches KVM. The code runs on a single-threaded tokio runtime, with what waits for
//! locks of the store beside it; a sandbox costs a few descriptors and one buffer.

pub mod agent;
pub mod api;
pub mod build;
pub mod client;
pub mod diff;
pub mod doctor;
pub mod failure;
pub mod fleet;
pub mod gateway;
pub mod home;
pub mod image;
pub mod listen;
mod random;
pub mod registry;
pub mod rootfs;
pub mod sandbox;
pub mod serve;
pub mod store;
mod sys;
pub mod template;
mod trace;
pub mod vmm;
pub mod workdir;
