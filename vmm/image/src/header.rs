//! The fixed header: what any version can read before it decodes anything else, above all whether
//! this host's processor can go on with the machine.

use thiserror::Error;

use crate::{PAGE_BYTES, checksum};

/// Version of the format that this crate writes and reads.
pub const FORMAT_VERSION: u32 = 1;
/// Longest build string in bytes.
pub const BUILD_MAX: usize = 32;
/// Bytes of the header.
pub(crate) const HEADER_BYTES: usize = PAGE_BYTES;

const MAGIC: [u8; 8] = *b"COPPICE\0";
/// ELF's number for x86-64 (`EM_X86_64`).
const ARCHITECTURE: u32 = 62;
/// Most pages of guest RAM: 16 TiB, far above any machine, so that sums cannot overflow.
const MAX_RAM_PAGES: u64 = 1 << 32;
const CHECKSUM_AT: usize = 136;
/// First byte behind the last field.
const FIELDS_END: usize = 144;

/// What a guest saw of its processor, as far as a restore depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuIdentity {
    /// Vendor as CPUID leaf 0 spells it, for example `AuthenticAMD`.
    pub vendor: [u8; 12],
    /// Family, model and stepping as in CPUID leaf 1 EAX; for people, no part of the comparison.
    pub signature: u32,
    /// Feature bits; which CPUID or XCR0 word each is, the VMM decides and never changes.
    pub features: [u32; 8],
}

/// A machine that ran on one processor cannot go on on another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum CpuMismatch {
    /// The vendors differ.
    #[error(
        "the checkpoint was made on a processor of {}, this host has one of {}; restore it on a \
         host of the first kind", vendor_name(.image), vendor_name(.host)
    )]
    Vendor {
        /// Vendor in the checkpoint.
        image: [u8; 12],
        /// Vendor of this host.
        host: [u8; 12],
    },
    /// The host lacks features that the guest may use.
    #[error(
        "this host's processor lacks features the checkpointed machine may use (word {word}, bits \
         {missing:#010x}); restore it on a processor at least as new"
    )]
    Features {
        /// The first feature word with a lack.
        word: usize,
        /// The lacking bits of that word.
        missing: u32,
    },
}

fn vendor_name(vendor: &[u8; 12]) -> String {
    vendor.escape_ascii().to_string()
}

impl CpuIdentity {
    /// Whether a machine that saw this processor can go on on `host`: the vendors are equal and
    /// the host has every feature bit.
    ///
    /// # Errors
    ///
    /// [`CpuMismatch`] names the first difference that matters.
    pub fn fits_on(&self, host: &Self) -> Result<(), CpuMismatch> {
        if self.vendor != host.vendor {
            return Err(CpuMismatch::Vendor { image: self.vendor, host: host.vendor });
        }
        for (word, (image, host)) in self.features.iter().zip(&host.features).enumerate() {
            let missing = image & !host;
            if missing != 0 {
                return Err(CpuMismatch::Features { word, missing });
            }
        }
        Ok(())
    }
}

/// What a header says about the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderInfo {
    /// The processor the guest saw.
    pub cpu: CpuIdentity,
    /// Build of the VMM that wrote the file: printable ASCII, at most [`BUILD_MAX`] bytes.
    pub build: String,
    /// Pages of guest RAM, 1 to 2^32.
    pub ram_pages: u64,
}

/// A header that cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum HeaderError {
    /// The file does not start with the magic; one cut off while it was written does not either.
    #[error("it is not a finished checkpoint (no header at its start)")]
    Magic,
    /// The header was changed after it was written.
    #[error("its header is damaged (wrong checksum)")]
    Checksum,
    /// Another architecture.
    #[error("it was made on another architecture (ELF machine {0}, not {ARCHITECTURE})")]
    Architecture(u32),
    /// A format this version does not know.
    #[error("it has format {0}, this version reads format {FORMAT_VERSION}")]
    Version(u32),
    /// The build string is too long or not printable ASCII.
    #[error("the build string must be printable ASCII of at most {BUILD_MAX} bytes")]
    Build,
    /// The number of RAM pages is out of range.
    #[error("{0} pages of guest RAM is outside 1 to {MAX_RAM_PAGES}")]
    RamPages(u64),
    /// Bytes that must be zero are not.
    #[error("its header has values in reserved fields")]
    Reserved,
}

/// Where the section table is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TablePlace {
    pub(crate) sections: u32,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) checksum: u64,
}

impl HeaderInfo {
    /// Checks what is written as well as what is read.
    pub(crate) fn check(&self) -> Result<(), HeaderError> {
        let printable = self.build.bytes().all(|byte| (b' '..=b'~').contains(&byte));
        if self.build.len() > BUILD_MAX || !printable {
            return Err(HeaderError::Build);
        }
        if !(1..=MAX_RAM_PAGES).contains(&self.ram_pages) {
            return Err(HeaderError::RamPages(self.ram_pages));
        }
        Ok(())
    }

    /// The header's bytes. `self` was checked.
    pub(crate) fn encode(&self, table: &TablePlace) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.extend(MAGIC);
        bytes.extend(FORMAT_VERSION.to_le_bytes());
        bytes.extend(ARCHITECTURE.to_le_bytes());
        bytes.extend(self.build.bytes());
        bytes.resize(48, 0);
        bytes.extend(self.cpu.vendor);
        bytes.extend(self.cpu.signature.to_le_bytes());
        for word in self.cpu.features {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(self.ram_pages.to_le_bytes());
        bytes.extend(table.sections.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(table.offset.to_le_bytes());
        bytes.extend(table.length.to_le_bytes());
        bytes.extend(table.checksum.to_le_bytes());
        bytes.resize(HEADER_BYTES, 0);
        let sum = checksum::of(&bytes);
        bytes[CHECKSUM_AT..FIELDS_END].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads a header; the table's place is not checked against the file yet.
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<(Self, TablePlace), HeaderError> {
        let mut fields = Fields(bytes);
        if fields.array() != MAGIC {
            return Err(HeaderError::Magic);
        }
        let mut cleared = *bytes;
        let sum = u64::from_le_bytes(Fields(&bytes[CHECKSUM_AT..]).array());
        cleared[CHECKSUM_AT..FIELDS_END].fill(0);
        if checksum::of(&cleared) != sum {
            return Err(HeaderError::Checksum);
        }
        let version = fields.u32();
        if version != FORMAT_VERSION {
            return Err(HeaderError::Version(version));
        }
        let architecture = fields.u32();
        if architecture != ARCHITECTURE {
            return Err(HeaderError::Architecture(architecture));
        }
        let build: [u8; BUILD_MAX] = fields.array();
        let build = build.split(|byte| *byte == 0).next().unwrap_or_default();
        let build = String::from_utf8(build.to_vec()).map_err(|_| HeaderError::Build)?;
        let (vendor, signature) = (fields.array(), fields.u32());
        let features = std::array::from_fn(|_| fields.u32());
        let cpu = CpuIdentity { vendor, signature, features };
        let info = Self { cpu, build, ram_pages: fields.u64() };
        info.check()?;
        let (sections, reserved) = (fields.u32(), fields.u32());
        let (offset, length, checksum) = (fields.u64(), fields.u64(), fields.u64());
        if reserved != 0 || bytes[FIELDS_END..].iter().any(|byte| *byte != 0) {
            return Err(HeaderError::Reserved);
        }
        Ok((info, TablePlace { sections, offset, length, checksum }))
    }
}

/// Reads fields one after the other; zeroes once the bytes end, which callers rule out by giving
/// it as many as there are fields.
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl Fields<'_> {
    pub(crate) fn array<const N: usize>(&mut self) -> [u8; N] {
        let Some((now, later)) = self.0.split_first_chunk::<N>() else { return [0; N] };
        self.0 = later;
        *now
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu() -> CpuIdentity {
        CpuIdentity {
            vendor: *b"AuthenticAMD",
            signature: 0x00A0_0F11,
            features: [1, 3, 7, 0, 0, 0, 0, 0x8000_0000],
        }
    }

    #[test]
    fn a_newer_processor_of_the_vendor_will_do() {
        let mut host = cpu();
        host.features[3] |= 0x10;
        host.signature += 1;
        assert_eq!(cpu().fits_on(&host), Ok(()));
    }

    #[test]
    fn another_vendor_will_not_do() {
        let host = CpuIdentity { vendor: *b"GenuineIntel", ..cpu() };
        let error = cpu().fits_on(&host).unwrap_err();
        assert!(error.to_string().contains("AuthenticAMD"), "{error}");
    }

    #[test]
    fn a_lacking_feature_is_named() {
        let mut host = cpu();
        host.features[7] = 1;
        let error = cpu().fits_on(&host).unwrap_err();
        assert_eq!(error, CpuMismatch::Features { word: 7, missing: 0x8000_0000 });
    }

    #[test]
    fn a_header_of_another_architecture_or_version_is_told_from_a_damaged_one() {
        let info = HeaderInfo { cpu: cpu(), build: "0.1.0".into(), ram_pages: 5 };
        let table = TablePlace { sections: 0, offset: 4096, length: 0, checksum: 0 };
        for (at, expected) in [
            (8, HeaderError::Version(9)),
            (12, HeaderError::Architecture(9)),
            (16, HeaderError::Build),
        ] {
            let mut bytes: [u8; HEADER_BYTES] = info.encode(&table).try_into().unwrap();
            bytes[at] = 9;
            assert_eq!(HeaderInfo::decode(&bytes), Err(HeaderError::Checksum));
            bytes[CHECKSUM_AT..FIELDS_END].fill(0);
            let sum = checksum::of(&bytes);
            bytes[CHECKSUM_AT..FIELDS_END].copy_from_slice(&sum.to_le_bytes());
            assert_eq!(HeaderInfo::decode(&bytes), Err(expected));
        }
    }
}
