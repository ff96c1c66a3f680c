#![no_main]
//! Vsock packets and queues of a hostile guest.

libfuzzer_sys::fuzz_target!(|data: &[u8]| coppice_fuzz::vsock_packet::run(data));
