//! What needs `unsafe`: instructions that hand work to the device and wait for it, the device
//! file, and the memory that the device reads and writes.

pub mod arena;
pub mod cpu;
pub mod portal;
