//! Raw deflate by the Intel In-Memory Analytics Accelerator (IAA), and by software when there is
//! none or it fails.
//!
//! From the bottom: [`abi`] and [`aecs`] lay out what the device reads and writes, [`discover`]
//! finds work queues in sysfs, [`sys`] holds what needs `unsafe`, [`queue`] hands descriptors to
//! a work queue, and [`engine`] runs chunks through one. [`model`] is a software model of a work
//! queue: it is no device, and serves tests. [`software`] is the codec every failure falls back
//! to, and [`probe`] tests a
//! work queue with a known vector. Nothing here has run on hardware yet: see docs/iaa.md.

pub mod abi;
pub mod aecs;
pub mod breaker;
pub mod discover;
pub mod engine;
pub mod model;
pub mod probe;
pub mod queue;
pub mod software;
pub mod sys;
