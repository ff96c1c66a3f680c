//! Packets on the control socket.

use std::os::fd::OwnedFd;

use coppice_micro::tree::memory_file;
use coppice_vmm::vm::Spec;
use coppice_vmm_protocol::{Incoming, Op, Request};

/// Reads the bytes as either side of the socket would. What can be read can be written again and
/// reads as the same; a machine asked for is checked like any.
pub fn run(data: &[u8]) {
    if let Ok(request) = serde_json::from_slice::<Request>(data) {
        let again = serde_json::to_vec(&request).unwrap();
        assert_eq!(serde_json::from_slice::<Request>(&again).unwrap(), request);
        if let Op::Create(wire) = request.op {
            let fds = (0..6).map(|_| OwnedFd::from(memory_file())).collect();
            if let Err(error) = Spec::from_wire(*wire, fds) {
                assert!(!error.to_string().contains('\n'), "a refusal is one line");
            }
        }
    }
    if let Ok(incoming) = serde_json::from_slice::<Incoming>(data) {
        let again = serde_json::to_vec(&incoming).unwrap();
        assert_eq!(serde_json::from_slice::<Incoming>(&again).unwrap(), incoming);
    }
}
