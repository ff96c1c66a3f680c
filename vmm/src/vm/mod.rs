//! Placeholder.
pub mod host;
pub mod policy;
pub mod probe;
pub mod spec;
pub mod text;
