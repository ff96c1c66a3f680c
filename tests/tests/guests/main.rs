//! Linux guests, driven as a user or a manager drives them. Every test runs on the best lane of
//! the machine (see `coppice_tests::lane`); the binaries, kernels and images must be built, which
//! `cargo xtask test guests` does.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bad_input;
mod balloon;
mod bench;
mod commands;
mod common;
mod console;
mod containers;
mod cycles;
mod disk;
mod ends;
mod hardware;
mod serve;
mod sessions;
mod storm;
mod streams;
mod terminal;
