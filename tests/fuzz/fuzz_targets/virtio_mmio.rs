#![no_main]
//! Register accesses, memory writes and kicks against every virtio device.

libfuzzer_sys::fuzz_target!(|data: &[u8]| coppice_fuzz::virtio_mmio::run(data));
