#![no_main]
//! Chains of block requests, served by a raw disk and by an overlay alike.

libfuzzer_sys::fuzz_target!(|data: &[u8]| coppice_fuzz::blk_request::run(data));
