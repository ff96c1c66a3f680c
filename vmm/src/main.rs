//! The `coppice-vmm` process: one machine, or one look at the host.
fn main() {
    println!("{}", serde_json::to_string(&coppice_vmm::vm::probe::probe()).unwrap());
}
