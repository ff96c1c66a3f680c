//! Files that claim to be a kernel.

use std::os::unix::fs::FileExt as _;

use coppice_micro::tree::memory_file;
use coppice_vmm::boot::{self, BootConfig};
use coppice_vmm::memory::GuestRam;
use vm_memory::GuestAddress;

use crate::input::Input;

/// Guest memory: enough for small kernels, too little for what a header may claim.
const MEMORY: usize = 32 << 20;

/// Loads the bytes as a kernel, with an initrd and a command line the bytes choose.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let (initrd_len, cmdline_len) = (u64::from(input.u16()), usize::from(input.u8()));
    let cmdline = String::from_utf8_lossy(input.bytes(cmdline_len));
    let vcpus = 1 + input.u8() % 8;
    let kernel = memory_file();
    kernel.write_all_at(input.0, 0).unwrap();
    let initrd = memory_file();
    initrd.set_len(initrd_len).unwrap();

    let ram = GuestRam::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
    let config = BootConfig {
        kernel: &kernel,
        initrd: (initrd_len > 0).then_some(&initrd),
        cmdline: &cmdline,
        vcpus,
        virtio_devices: 3,
    };
    match boot::load(&ram, &config) {
        Ok(entry) => assert!(entry.address < MEMORY as u64, "the entry is outside guest memory"),
        // A refusal is one line for people.
        Err(error) => assert!(!error.to_string().contains('\n')),
    }
}
