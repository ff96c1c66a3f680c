//! Checkpoints: taking the pages of guest RAM in the pause, writing the file after it.
//!
//! ```text
//! pause:  Selection (which pages) -> Capture (their content, copied or write-protected)
//! after:  Capture + sections -> Job (a thread) -> the checkpoint's file, durable
//! ```
//!
//! This module knows memory and the file format. What the sections hold, and when the machine
//! pauses, is the machine's business above it.

mod capture;
mod job;
mod protect;
mod selection;
mod working_set;

pub use capture::{Capture, CaptureError, Guard, Spare};
pub use job::{Finished, Job, JobError, Order, Part};
pub use selection::Selection;
pub use working_set::{Depth, Prefetch, WorkingSet, record};
