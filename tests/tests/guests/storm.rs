//! Checkpoints, rollbacks and clones of Linux guests under load: processors, memory, disk, vsock
//! and timers busy, and everything checked by the load itself (`guest-load`).

mod agent;
mod clones;
mod load;
mod random;
mod rounds;
