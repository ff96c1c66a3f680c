#![no_main]
//! Files that claim to be a checkpoint.

libfuzzer_sys::fuzz_target!(|data: &[u8]| coppice_fuzz::image::run(data));
