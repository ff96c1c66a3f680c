//! Placeholder.
pub mod policy;
pub mod spec;
