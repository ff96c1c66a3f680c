//! Benchmarks of Coppice's parts. They measure and assert nothing.
//!
//! The measuring program `coppice-bench` takes micro-guests, which any `/dev/kvm` runs, through
//! clones, checkpoints and rollbacks. Linux guests, and peers beside them, are `coppice bench`'s.

pub mod micro;
pub mod stats;
pub mod sys;
