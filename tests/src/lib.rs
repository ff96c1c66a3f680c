//! Tests that span crates: the tree's own rules, and Linux guests driven from outside.
//!
//! The tests themselves are under `tests/`; this library holds what several of them share.

pub mod daemon;
mod kvm_trace;
pub mod lane;
pub mod source;
pub mod tools;
mod tunnel;
