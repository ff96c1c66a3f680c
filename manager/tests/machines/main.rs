//! The store with real machines: micro-guests in real VMM processes, on whatever /dev/kvm opens.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs, reason = "tests")]

mod background;
mod beside;
#[path = "../common/mod.rs"]
mod common;
mod cycles;
mod daemon;
mod depth;
mod faults;
mod inject;
mod process;
mod scene;
