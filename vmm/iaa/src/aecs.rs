//! The analytics engine configuration and state (AECS) that compression reads: the Huffman codes
//! to write with, and the bits that come first.
//!
//! The codes are deflate's fixed ones (RFC 1951 section 3.2.6), and the first bits the header of
//! one final block, so that what a descriptor writes is a whole raw deflate stream.

/// Bytes of the AECS of compression.
pub const SIZE: usize = 1568;

/// Required alignment in bytes.
pub const ALIGN: usize = 32;

/// Where the count of bits in the accumulator lies: after crc, xor and five reserved words.
const ACCUMULATOR_BITS_AT: usize = 28;
/// Where the accumulator lies.
const ACCUMULATOR_AT: usize = 32;
/// Where the codes of literals and lengths lie: 286 words.
const LITERALS_AT: usize = ACCUMULATOR_AT + 256;
/// Where the codes of distances lie: 30 words, after two reserved ones.
const DISTANCES_AT: usize = LITERALS_AT + 286 * 4 + 8;
/// Bit of an entry where the code's length begins.
const LENGTH_SHIFT: u32 = 15;

/// BFINAL = 1, BTYPE = 01 (fixed codes): the block header, least significant bit first.
const FINAL_FIXED_BLOCK: u8 = 0b011;

/// The fixed code of a literal, a length or the end of block (0 to 285): its length in bits, and
/// its value.
fn fixed_literal(symbol: u32) -> (u32, u32) {
    match symbol {
        0..=143 => (8, 0b0011_0000 + symbol),
        144..=255 => (9, 0b1_1001_0000 + (symbol - 144)),
        256..=279 => (7, symbol - 256),
        _ => (8, 0b1100_0000 + (symbol - 280)),
    }
}

/// The AECS for one final block with fixed codes.
pub fn fixed() -> [u8; SIZE] {
    let mut bytes = [0; SIZE];
    bytes[ACCUMULATOR_BITS_AT] = 3;
    bytes[ACCUMULATOR_AT] = FINAL_FIXED_BLOCK;
    let literals = (0..286).map(fixed_literal);
    let distances = (0..30).map(|symbol| (5, symbol));
    put_codes(&mut bytes[LITERALS_AT..], literals);
    put_codes(&mut bytes[DISTANCES_AT..], distances);
    bytes
}

fn put_codes(to: &mut [u8], codes: impl Iterator<Item = (u32, u32)>) {
    for (entry, (length, code)) in to.chunks_exact_mut(4).zip(codes) {
        entry.copy_from_slice(&(length << LENGTH_SHIFT | code).to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Canonical codes from their lengths, by the algorithm of RFC 1951 section 3.2.2.
    fn canonical(lengths: &[u32]) -> Vec<u32> {
        let mut next = [0_u32; 16];
        let mut code = 0;
        for bits in 1..16_u32 {
            let shorter = lengths.iter().filter(|length| **length == bits - 1 && bits > 1).count();
            code = (code + u32::try_from(shorter).unwrap()) << 1;
            next[bits as usize] = code;
        }
        let assign = |length: &u32| {
            let slot = &mut next[*length as usize];
            *slot += 1;
            *slot - 1
        };
        lengths.iter().map(assign).collect()
    }

    fn word(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn the_codes_are_those_that_rfc_1951_computes() {
        let mut lengths = vec![8_u32; 144];
        lengths.extend([9; 112]);
        lengths.extend([7; 24]);
        lengths.extend([8; 8]);
        let bytes = fixed();
        for (symbol, code) in canonical(&lengths).into_iter().enumerate().take(286) {
            let expected = lengths[symbol] << 15 | code;
            assert_eq!(word(&bytes, 288 + symbol * 4), expected, "literal {symbol}");
        }
        for (symbol, code) in canonical(&[5; 32]).into_iter().enumerate().take(30) {
            assert_eq!(word(&bytes, 1440 + symbol * 4), 5 << 15 | code, "distance {symbol}");
        }
    }

    #[test]
    fn the_block_header_waits_in_the_accumulator() {
        let bytes = fixed();
        assert_eq!((word(&bytes, 28), word(&bytes, 32)), (3, 3));
        assert_eq!(DISTANCES_AT + 30 * 4 + 8, SIZE);
        assert!(bytes[..28].iter().chain(&bytes[33..288]).all(|byte| *byte == 0));
    }
}
