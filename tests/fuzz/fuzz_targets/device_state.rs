#![no_main]
//! Device state from a checkpoint that nobody trusts.

libfuzzer_sys::fuzz_target!(|data: &[u8]| coppice_fuzz::device_state::run(data));
