//! Packets in the guest's memory: the header's fields, and the pieces of memory behind a
//! descriptor chain.
//!
//! A driver may cut header and payload into descriptors as it likes (virtio 1.2 section 2.7.4),
//! and Linux does: one or two for a usual packet, up to 18 for one that it sends from user pages.
//! So nothing here assumes a layout.

mod chain;
mod header;
#[cfg(test)]
mod tests;

pub(crate) use chain::{RxPacket, TxPacket};
#[cfg(test)]
pub(crate) use header::HEADER_SIZE;
pub(crate) use header::{
    HOST_CID, Header, Op, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, TYPE_STREAM,
};
