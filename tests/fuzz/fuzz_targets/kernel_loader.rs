#![no_main]
//! Files that claim to be a kernel.

libfuzzer_sys::fuzz_target!(|data: &[u8]| coppice_fuzz::kernel_loader::run(data));
