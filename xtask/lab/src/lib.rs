//! Placeholder crate root, filled by the first change to this crate.
