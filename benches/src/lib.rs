//! Benchmarks of Coppice and of peers beside it. They measure and assert nothing.
//!
//! The measuring program `coppice-bench` runs on the machine whose `/dev/kvm` boots Linux (this
//! host or the nested lab); `cargo xtask bench` takes it there. Peers get the same kernel, root
//! file system, memory and vCPUs, are driven by their public interfaces, and alternate with
//! Coppice sample by sample.

#[path = "../../manager/bench/src/scenario/boot.rs"]
pub mod boot;
#[path = "../../manager/bench/src/contender/mod.rs"]
pub mod machine;
pub mod micro;
#[path = "../../manager/bench/src/observe.rs"]
pub mod observe;
#[path = "../../manager/bench/src/scenario/restore.rs"]
pub mod restore;
pub mod stats;
pub mod sys;
