//! The MODEL's decompressor: deflate (RFC 1951) with a window of exactly 4 KB. zlib does not
//! serve here, since it takes distances beyond the window it was asked for.

/// Farthest that a match may refer back, in bytes.
pub(super) const WINDOW: usize = 4096;

/// Lengths of matches (RFC 1951 section 3.2.5): base and extra bits of symbols 257 to 285.
const LENGTHS: [(u16, u8); 29] = [
    (3, 0),
    (4, 0),
    (5, 0),
    (6, 0),
    (7, 0),
    (8, 0),
    (9, 0),
    (10, 0),
    (11, 1),
    (13, 1),
    (15, 1),
    (17, 1),
    (19, 2),
    (23, 2),
    (27, 2),
    (31, 2),
    (35, 3),
    (43, 3),
    (51, 3),
    (59, 3),
    (67, 4),
    (83, 4),
    (99, 4),
    (115, 4),
    (131, 5),
    (163, 5),
    (195, 5),
    (227, 5),
    (258, 0),
];
/// The order in which the lengths of the code length codes come.
const ORDER: [usize; 19] = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

/// Why a stream was not decompressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InflateError {
    /// It is no stream that the device reads.
    Damaged,
    /// It holds more than there is room for.
    NoRoom,
}

use InflateError::{Damaged, NoRoom};

/// A canonical code: for each length how many symbols, and the symbols in order.
struct Code {
    counts: [u16; 16],
    symbols: Vec<u16>,
}

impl Code {
    fn new(lengths: &[u8]) -> Self {
        let mut counts = [0; 16];
        let mut symbols = Vec::new();
        for (length, count) in (0_u8..).zip(counts.iter_mut()).skip(1) {
            for (symbol, _) in (0_u16..).zip(lengths).filter(|(_, has)| **has == length) {
                symbols.push(symbol);
                *count += 1;
            }
        }
        Self { counts, symbols }
    }
}

struct Bits<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Bits<'_> {
    fn bit(&mut self) -> Result<u16, InflateError> {
        let byte = self.bytes.get(self.at / 8).ok_or(Damaged)?;
        let bit = byte >> (self.at % 8) & 1;
        self.at += 1;
        Ok(u16::from(bit))
    }

    fn number(&mut self, bits: u8) -> Result<u16, InflateError> {
        (0..bits).try_fold(0, |number, at| Ok(number | self.bit()? << at))
    }

    fn symbol(&mut self, code: &Code) -> Result<u16, InflateError> {
        let (mut value, mut first, mut index) = (0_u32, 0_u32, 0_u32);
        for count in code.counts.iter().skip(1) {
            value |= u32::from(self.bit()?);
            let count = u32::from(*count);
            if let Some(place) = value.checked_sub(first).filter(|place| *place < count) {
                let place = usize::try_from(index + place).or(Err(Damaged))?;
                return code.symbols.get(place).copied().ok_or(Damaged);
            }
            index += count;
            first = (first + count) << 1;
            value <<= 1;
        }
        Err(Damaged)
    }
}

/// Decompresses a stream into at most `room` bytes.
pub(super) fn inflate(bytes: &[u8], room: usize) -> Result<Vec<u8>, InflateError> {
    let mut bits = Bits { bytes, at: 0 };
    let mut output = Vec::new();
    loop {
        let last = bits.bit()? == 1;
        match bits.number(2)? {
            0 => stored(&mut bits, &mut output, room)?,
            1 => {
                let mut lengths = [8_u8; 288];
                lengths[144..256].fill(9);
                lengths[256..280].fill(7);
                block(&mut bits, &Code::new(&lengths), &Code::new(&[5; 30]), &mut output, room)?;
            }
            2 => {
                let (literals, distances) = codes(&mut bits)?;
                block(&mut bits, &literals, &distances, &mut output, room)?;
            }
            _ => return Err(Damaged),
        }
        if last {
            return Ok(output);
        }
    }
}

fn stored(bits: &mut Bits<'_>, output: &mut Vec<u8>, room: usize) -> Result<(), InflateError> {
    bits.at = bits.at.next_multiple_of(8);
    let (size, check) = (bits.number(16)?, bits.number(16)?);
    if size != !check {
        return Err(Damaged);
    }
    let (from, size) = (bits.at / 8, usize::from(size));
    let bytes = bits.bytes.get(from..).and_then(|rest| rest.get(..size)).ok_or(Damaged)?;
    if output.len() + size > room {
        return Err(NoRoom);
    }
    output.extend_from_slice(bytes);
    bits.at += size * 8;
    Ok(())
}

/// The codes of a block that brings its own.
fn codes(bits: &mut Bits<'_>) -> Result<(Code, Code), InflateError> {
    let literals = usize::from(bits.number(5)?) + 257;
    let distances = usize::from(bits.number(5)?) + 1;
    let given = usize::from(bits.number(4)?) + 4;
    let mut lengths = [0; 19];
    for place in ORDER.iter().take(given) {
        lengths[*place] = u8::try_from(bits.number(3)?).or(Err(Damaged))?;
    }
    let code = Code::new(&lengths);
    let mut lengths = Vec::new();
    while lengths.len() < literals + distances {
        let (length, times) = match bits.symbol(&code)? {
            16 => (*lengths.last().ok_or(Damaged)?, bits.number(2)? + 3),
            17 => (0, bits.number(3)? + 3),
            18 => (0, bits.number(7)? + 11),
            length => (u8::try_from(length).or(Err(Damaged))?, 1),
        };
        lengths.extend((0..times).map(|_| length));
    }
    let (first, rest) = lengths.split_at_checked(literals).ok_or(Damaged)?;
    Ok((Code::new(first), Code::new(rest.get(..distances).ok_or(Damaged)?)))
}

fn block(
    bits: &mut Bits<'_>,
    literals: &Code,
    distances: &Code,
    output: &mut Vec<u8>,
    room: usize,
) -> Result<(), InflateError> {
    loop {
        let symbol = bits.symbol(literals)?;
        if symbol == 256 {
            return Ok(());
        }
        let (length, distance) = match u8::try_from(symbol) {
            Ok(literal) => {
                output.push(literal);
                (0, 0)
            }
            Err(_) => {
                let (base, extra) =
                    LENGTHS.get(usize::from(symbol) - 257).copied().ok_or(Damaged)?;
                let length = usize::from(base + bits.number(extra)?);
                (length, distance(bits, distances)?)
            }
        };
        if length > 0 && (distance > WINDOW || distance > output.len()) {
            return Err(Damaged);
        }
        for _ in 0..length {
            let byte = output.get(output.len() - distance).copied().ok_or(Damaged)?;
            output.push(byte);
        }
        if output.len() > room {
            return Err(NoRoom);
        }
    }
}

/// A distance: symbols 0 to 3 are 1 to 4, then pairs of symbols have one more extra bit each.
fn distance(bits: &mut Bits<'_>, code: &Code) -> Result<usize, InflateError> {
    let symbol = bits.symbol(code)?;
    if symbol < 4 {
        return Ok(usize::from(symbol) + 1);
    }
    if symbol >= 30 {
        return Err(Damaged);
    }
    let extra = u8::try_from(symbol / 2 - 1).or(Err(Damaged))?;
    let base = (2 + usize::from(symbol % 2)) << extra;
    Ok(base + usize::from(bits.number(extra)?) + 1)
}
