//! The packet header on the wire (virtio 1.2 section 5.10.6).

use virtio_vsock::packet::PKT_HEADER_SIZE;

/// Length of the header in bytes (44).
pub(crate) const HEADER_SIZE: usize = PKT_HEADER_SIZE;

/// Address of the host (VMADDR_CID_HOST).
pub(crate) const HOST_CID: u64 = 2;
/// `type` of a stream packet, the one kind supported.
pub(crate) const TYPE_STREAM: u16 = 1;
/// Flag of SHUTDOWN: the sender will receive no more data.
pub(crate) const SHUTDOWN_RECEIVE: u32 = 1;
/// Flag of SHUTDOWN: the sender will send no more data.
pub(crate) const SHUTDOWN_SEND: u32 = 2;
/// Both flags of SHUTDOWN.
pub(crate) const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// What a packet asks for (`op`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    /// Connect.
    Request,
    /// The connection is accepted.
    Response,
    /// The connection is refused or aborted, or its end is confirmed.
    Reset,
    /// The sender closes one or both directions.
    Shutdown,
    /// Payload.
    Data,
    /// The sender's `fwd_cnt` and `buf_alloc` changed.
    CreditUpdate,
    /// The sender wants a [`Op::CreditUpdate`].
    CreditRequest,
}

impl Op {
    /// The operation behind a number, if it has one.
    pub(crate) fn from_wire(value: u16) -> Option<Self> {
        Some(match value {
            1 => Self::Request,
            2 => Self::Response,
            3 => Self::Reset,
            4 => Self::Shutdown,
            5 => Self::Data,
            6 => Self::CreditUpdate,
            7 => Self::CreditRequest,
            _ => return None,
        })
    }

    /// Its number on the wire.
    pub(crate) fn to_wire(self) -> u16 {
        match self {
            Self::Request => 1,
            Self::Response => 2,
            Self::Reset => 3,
            Self::Shutdown => 4,
            Self::Data => 5,
            Self::CreditUpdate => 6,
            Self::CreditRequest => 7,
        }
    }
}

/// A decoded header. Any values can come from a guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Header {
    /// Context the packet comes from.
    pub(crate) src_cid: u64,
    /// Context the packet goes to.
    pub(crate) dst_cid: u64,
    /// Sender's port.
    pub(crate) src_port: u32,
    /// Receiver's port.
    pub(crate) dst_port: u32,
    /// Payload length in bytes.
    pub(crate) len: u32,
    /// Kind of socket ([`TYPE_STREAM`]).
    pub(crate) kind: u16,
    /// Operation (see [`Op`]).
    pub(crate) op: u16,
    /// Flags of the operation.
    pub(crate) flags: u32,
    /// Bytes the sender can hold for this connection.
    pub(crate) buf_alloc: u32,
    /// Bytes of this connection that the sender has passed on so far, wrapping.
    pub(crate) fwd_cnt: u32,
}

impl Header {
    /// Decodes a header; every pattern of bytes is one.
    pub(crate) fn from_bytes(bytes: &[u8; HEADER_SIZE]) -> Self {
        fn at<const N: usize>(bytes: &[u8; HEADER_SIZE], offset: usize) -> [u8; N] {
            std::array::from_fn(|index| bytes[offset + index])
        }
        Self {
            src_cid: u64::from_le_bytes(at(bytes, 0)),
            dst_cid: u64::from_le_bytes(at(bytes, 8)),
            src_port: u32::from_le_bytes(at(bytes, 16)),
            dst_port: u32::from_le_bytes(at(bytes, 20)),
            len: u32::from_le_bytes(at(bytes, 24)),
            kind: u16::from_le_bytes(at(bytes, 28)),
            op: u16::from_le_bytes(at(bytes, 30)),
            flags: u32::from_le_bytes(at(bytes, 32)),
            buf_alloc: u32::from_le_bytes(at(bytes, 36)),
            fwd_cnt: u32::from_le_bytes(at(bytes, 40)),
        }
    }

    /// Encodes the header.
    pub(crate) fn to_bytes(self) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        let mut put = |offset: usize, field: &[u8]| {
            bytes[offset..offset + field.len()].copy_from_slice(field);
        };
        put(0, &self.src_cid.to_le_bytes());
        put(8, &self.dst_cid.to_le_bytes());
        put(16, &self.src_port.to_le_bytes());
        put(20, &self.dst_port.to_le_bytes());
        put(24, &self.len.to_le_bytes());
        put(28, &self.kind.to_le_bytes());
        put(30, &self.op.to_le_bytes());
        put(32, &self.flags.to_le_bytes());
        put(36, &self.buf_alloc.to_le_bytes());
        put(40, &self.fwd_cnt.to_le_bytes());
        bytes
    }
}
