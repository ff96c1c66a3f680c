//! The `coppice-vmm` process.
fn main() {}
