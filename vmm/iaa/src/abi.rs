//! What the device reads and writes: descriptors and completion records.
//!
//! Layouts and numbers are those of `struct iax_hw_desc`, `struct iax_completion_record` and the
//! enums of Linux's `linux/idxd.h`. The tests compare them with that header.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};

/// Bytes of a descriptor, and of a completion record; both are aligned to it.
pub const RECORD_SIZE: usize = 64;

/// Default of the largest transfer of a work queue, in bytes.
pub const MAX_TRANSFER: u32 = 2 << 20;

/// `IDXD_OP_FLAG_BOF`: block on fault, where the work queue allows it.
pub const FLAG_BLOCK_ON_FAULT: u32 = 0x2;
/// `IDXD_OP_FLAG_CRAV`: the address of the completion record is valid.
pub const FLAG_RECORD_VALID: u32 = 0x4;
/// `IDXD_OP_FLAG_RCR`: a completion record is asked for.
pub const FLAG_REQUEST_RECORD: u32 = 0x8;
/// `IDXD_OP_FLAG_CC`: what is written goes to the processor's cache.
pub const FLAG_CACHE_CONTROL: u32 = 0x100;
/// `IDXD_OP_FLAG_RD_SRC2_AECS`: source 2 is an AECS to be read.
pub const FLAG_READ_AECS: u32 = 0x1_0000;

/// Decompression: flush at the end of input, and stop at a final block's end.
pub const DECOMPRESS_FLAGS: u16 = 0xF;
/// Compression: flush the output, and append the end-of-block symbol.
pub const COMPRESS_FLAGS: u16 = 0x6;

/// What a descriptor asks for (`enum iax_opcode`, those in use here).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Opcode {
    /// `IAX_OPCODE_DECOMPRESS`.
    Decompress = 0x42,
    /// `IAX_OPCODE_COMPRESS`.
    Compress = 0x43,
}

/// A region of this process's memory, as a descriptor names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Virtual address of the first byte.
    pub addr: u64,
    /// Length in bytes.
    pub size: u32,
}

/// `struct iax_hw_desc`: one piece of work. The PASID stays zero; the device takes it from the
/// submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Descriptor {
    pasid_priv: u32,
    flags_opcode: u32,
    completion_addr: u64,
    src1_addr: u64,
    dst_addr: u64,
    src1_size: u32,
    int_handle: u16,
    compr_flags: u16,
    src2_addr: u64,
    max_dst_size: u32,
    src2_size: u32,
    filter_flags: u32,
    num_inputs: u32,
}

impl Descriptor {
    /// Asks to compress `source` into `target` with the AECS given (1568 bytes, 32-aligned). The
    /// completion record is written to `record`, 64-aligned.
    pub fn compress(source: Region, target: Region, aecs: Region, record: u64) -> Self {
        let extra = FLAG_READ_AECS;
        let mut this = Self::new(Opcode::Compress, extra, COMPRESS_FLAGS, source, target, record);
        this.src2_addr = aecs.addr;
        this.src2_size = aecs.size;
        this
    }

    /// Asks to decompress the raw deflate stream `source` into `target`.
    pub fn decompress(source: Region, target: Region, record: u64) -> Self {
        Self::new(Opcode::Decompress, 0, DECOMPRESS_FLAGS, source, target, record)
    }

    fn new(
        opcode: Opcode,
        extra: u32,
        compr_flags: u16,
        source: Region,
        target: Region,
        record: u64,
    ) -> Self {
        let flags = FLAG_RECORD_VALID | FLAG_REQUEST_RECORD | FLAG_CACHE_CONTROL | extra;
        Self {
            pasid_priv: 0,
            flags_opcode: flags | u32::from(opcode as u8) << 24,
            completion_addr: record,
            src1_addr: source.addr,
            dst_addr: target.addr,
            src1_size: source.size,
            int_handle: 0,
            compr_flags,
            src2_addr: 0,
            max_dst_size: target.size,
            src2_size: 0,
            filter_flags: 0,
            num_inputs: 0,
        }
    }

    /// The same with block-on-fault: only for a work queue that allows it.
    #[must_use]
    pub fn blocking_on_fault(mut self) -> Self {
        self.flags_opcode |= FLAG_BLOCK_ON_FAULT;
        self
    }

    /// The opcode's number.
    pub fn opcode(&self) -> u8 {
        self.flags_opcode.to_le_bytes()[3]
    }

    /// The 24 bits of flags.
    pub fn flags(&self) -> u32 {
        self.flags_opcode & 0xFF_FFFF
    }

    /// Where the completion record goes.
    pub fn record(&self) -> u64 {
        self.completion_addr
    }

    /// The source.
    pub fn source(&self) -> Region {
        Region { addr: self.src1_addr, size: self.src1_size }
    }

    /// The destination.
    pub fn target(&self) -> Region {
        Region { addr: self.dst_addr, size: self.max_dst_size }
    }

    /// Source 2: the AECS, of size zero when there is none.
    pub fn aecs(&self) -> Region {
        Region { addr: self.src2_addr, size: self.src2_size }
    }

    /// Flags of compression or decompression.
    pub fn codec_flags(&self) -> u16 {
        self.compr_flags
    }

    /// The 64 bytes the device reads.
    pub fn to_bytes(&self) -> [u8; RECORD_SIZE] {
        let mut bytes = [0; RECORD_SIZE];
        let mut rest = bytes.as_mut_slice();
        let mut put = |field: &[u8]| {
            let (head, tail) = std::mem::take(&mut rest).split_at_mut(field.len());
            head.copy_from_slice(field);
            rest = tail;
        };
        put(&self.pasid_priv.to_le_bytes());
        put(&self.flags_opcode.to_le_bytes());
        put(&self.completion_addr.to_le_bytes());
        put(&self.src1_addr.to_le_bytes());
        put(&self.dst_addr.to_le_bytes());
        put(&self.src1_size.to_le_bytes());
        put(&self.int_handle.to_le_bytes());
        put(&self.compr_flags.to_le_bytes());
        put(&self.src2_addr.to_le_bytes());
        put(&self.max_dst_size.to_le_bytes());
        put(&self.src2_size.to_le_bytes());
        put(&self.filter_flags.to_le_bytes());
        put(&self.num_inputs.to_le_bytes());
        bytes
    }
}

/// `struct iax_completion_record` as it lies in memory. The device writes it; only the status may
/// be looked at until that is not zero.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct RawRecord {
    /// Status, zero until the work is over.
    pub status: AtomicU8,
    /// The rest, stable once the status is not zero.
    pub rest: [u8; RECORD_SIZE - 1],
}

/// A completion record, read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// How the work ended.
    pub status: Status,
    /// Whether the access that faulted was a write; means something for page faults only.
    pub fault_was_write: bool,
    /// Details of an error.
    pub error_code: u8,
    /// Bytes of the source that were done.
    pub bytes_completed: u32,
    /// Address that faulted.
    pub fault_addr: u64,
    /// Bytes written to the destination.
    pub output_size: u32,
    /// Bits used of the last byte, 0 for all.
    pub output_bits: u8,
    /// CRC-32 of the uncompressed data.
    pub crc: u32,
}

impl Completion {
    /// Reads a record's 64 bytes; any bytes have a meaning.
    pub fn parse(bytes: &[u8; RECORD_SIZE]) -> Self {
        let word = |at: usize| {
            let mut field = [0; 4];
            field.iter_mut().zip(bytes.iter().skip(at)).for_each(|(to, from)| *to = *from);
            u32::from_le_bytes(field)
        };
        Self {
            status: Status::from_byte(bytes[0]),
            fault_was_write: bytes[0] & 0x80 != 0,
            error_code: bytes[1],
            bytes_completed: word(4),
            fault_addr: u64::from(word(8)) | u64::from(word(12)) << 32,
            output_size: word(24),
            output_bits: bytes[28],
            crc: word(32),
        }
    }

    /// The 64 bytes of a record like this; what the device's model writes.
    pub fn to_bytes(&self) -> [u8; RECORD_SIZE] {
        let mut bytes = [0; RECORD_SIZE];
        let write = if self.fault_was_write { 0x80 } else { 0 };
        bytes[0] = self.status.to_byte() | write;
        bytes[1] = self.error_code;
        bytes[4..8].copy_from_slice(&self.bytes_completed.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.fault_addr.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.output_size.to_le_bytes());
        bytes[28] = self.output_bits;
        bytes[32..36].copy_from_slice(&self.crc.to_le_bytes());
        bytes
    }
}

/// Whether the work of this record is over. What the device wrote before is visible then.
pub fn is_complete(status: &AtomicU8) -> bool {
    status.load(Ordering::Acquire) != 0
}

macro_rules! statuses {
    ($($name:ident = $value:literal, $header:literal;)*) => {
        /// How a piece of work ended (`enum iax_completion_status`).
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Status {
            $(#[doc = concat!("`", $header, "`.")] $name,)*
            /// A number that the header does not name.
            Unknown(u8),
        }

        impl Status {
            /// All that have a name, with their numbers and their names in the header.
            pub const NAMED: &[(Self, u8, &str)] = &[$((Self::$name, $value, $header),)*];

            /// From a record's status byte, whose top bit tells of the access that faulted.
            pub fn from_byte(byte: u8) -> Self {
                match byte & 0x7F {
                    $($value => Self::$name,)*
                    other => Self::Unknown(other),
                }
            }

            /// The number, without the top bit.
            pub fn to_byte(self) -> u8 {
                match self {
                    $(Self::$name => $value,)*
                    Self::Unknown(byte) => byte & 0x7F,
                }
            }
        }
    };
}

statuses! {
    Pending = 0x00, "IAX_COMP_NONE";
    Success = 0x01, "IAX_COMP_SUCCESS";
    PageFault = 0x04, "IAX_COMP_PAGE_FAULT_IR";
    AnalyticsError = 0x0A, "IAX_COMP_ANALYTICS_ERROR";
    OutputOverflow = 0x0B, "IAX_COMP_OUTBUF_OVERFLOW";
    BadOpcode = 0x10, "IAX_COMP_BAD_OPCODE";
    InvalidFlags = 0x11, "IAX_COMP_INVALID_FLAGS";
    ReservedNotZero = 0x12, "IAX_COMP_NOZERO_RESERVE";
    InvalidSize = 0x13, "IAX_COMP_INVALID_SIZE";
    OverlappingBuffers = 0x16, "IAX_COMP_OVERLAP_BUFFERS";
    InvalidInterruptHandle = 0x19, "IAX_COMP_INT_HANDLE_INVAL";
    RecordTranslation = 0x1A, "IAX_COMP_CRA_XLAT";
    RecordAlignment = 0x1B, "IAX_COMP_CRA_ALIGN";
    AddressAlignment = 0x1C, "IAX_COMP_ADDR_ALIGN";
    BadPrivilege = 0x1D, "IAX_COMP_PRIV_BAD";
    TrafficClass = 0x1E, "IAX_COMP_TRAFFIC_CLASS_CONF";
    ReadbackPageFault = 0x1F, "IAX_COMP_PFAULT_RDBA";
    HardwareError1 = 0x20, "IAX_COMP_HW_ERR1";
    HardwareErrorReadback = 0x21, "IAX_COMP_HW_ERR_DRB";
    TranslationFailed = 0x22, "IAX_COMP_TRANSLATION_FAIL";
    PageRequestTimeout = 0x23, "IAX_COMP_PRS_TIMEOUT";
    Watchdog = 0x24, "IAX_COMP_WATCHDOG";
    InvalidCompressionFlag = 0x30, "IAX_COMP_INVALID_COMP_FLAG";
    InvalidFilterFlag = 0x31, "IAX_COMP_INVALID_FILTER_FLAG";
    InvalidInputSize = 0x32, "IAX_COMP_INVALID_INPUT_SIZE";
    InvalidElementCount = 0x33, "IAX_COMP_INVALID_NUM_ELEMS";
    InvalidSourceWidth = 0x34, "IAX_COMP_INVALID_SRC1_WIDTH";
    InvalidInvertOutput = 0x35, "IAX_COMP_INVALID_INVERT_OUT";
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::NAMED.iter().find(|(status, ..)| status == self) {
            Some((_, number, name)) => write!(f, "{name} ({number:#04x})"),
            None => write!(f, "unknown status {:#04x}", self.to_byte()),
        }
    }
}

#[cfg(test)]
mod tests;
