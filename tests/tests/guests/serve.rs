//! The daemon and its API, with real guests behind it.

mod bench;
mod builds;
mod client;
mod crowd;
mod ends;
mod faults;
mod flood;
mod full;
mod lifecycle;
mod outside;
mod reach;
mod templates;
