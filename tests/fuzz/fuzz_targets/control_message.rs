#![no_main]
//! Packets on the control socket.

libfuzzer_sys::fuzz_target!(|data: &[u8]| coppice_fuzz::control_message::run(data));
