//! What the process of a machine may do: the state of its threads as the kernel shows it, and that
//! each system call in the lists is one that a machine needs.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

mod devices;
mod life;
mod record;
mod state;
