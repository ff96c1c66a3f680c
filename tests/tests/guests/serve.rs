//! The daemon and its API, with real guests behind it.

mod builds;
mod client;
mod faults;
mod lifecycle;
mod templates;
