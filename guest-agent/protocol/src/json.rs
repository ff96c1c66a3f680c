//! Pieces of the proto3 JSON mapping that serde does not do by itself.
//!
//! A writer is strict: padded standard base64, numbers as numbers, 64-bit integers as strings. A
//! reader is lenient, as the mapping demands: base64 in either alphabet with or without padding,
//! 32-bit integers as numbers or strings, `null` for "not set".

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde::de::{Error as _, Unexpected};
use serde::{Deserialize, Deserializer, Serializer};

const LENIENT: GeneralPurposeConfig = GeneralPurposeConfig::new()
    .with_decode_padding_mode(DecodePaddingMode::Indifferent)
    .with_decode_allow_trailing_bits(true);
const STANDARD: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, LENIENT);
const URL_SAFE: GeneralPurpose = GeneralPurpose::new(&alphabet::URL_SAFE, LENIENT);

/// Padded standard base64 of `data`, appended to `out`.
pub fn append_base64(out: &mut Vec<u8>, data: &[u8]) {
    let start = out.len();
    let needed = data.len().div_ceil(3).saturating_mul(4);
    out.resize(start.saturating_add(needed), 0);
    let written = out.get_mut(start..).map_or(0, |dst| {
        // The space is exact, so this cannot fail; a failure would write nothing.
        STANDARD.encode_slice(data, dst).unwrap_or(0)
    });
    out.truncate(start.saturating_add(written));
}

/// The bytes of a base64 text in either alphabet, padded or not.
///
/// # Errors
/// When the text is not base64.
pub fn decode_base64(text: &str) -> Result<Vec<u8>, base64::DecodeError> {
    if text.contains(['-', '_']) { URL_SAFE.decode(text) } else { STANDARD.decode(text) }
}

/// `#[serde(with)]` for a proto `bytes` field.
pub mod bytes {
    use super::{Deserialize, Deserializer, Serializer, decode_base64};
    use base64::Engine as _;
    use serde::de::Error as _;
    use std::borrow::Cow;

    /// Writes padded standard base64.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(data: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&super::STANDARD.encode(data))
    }

    /// Reads base64 in either alphabet; `null` is empty.
    ///
    /// # Errors
    /// When the text is not base64.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        let text: Option<Cow<'_, str>> = Option::deserialize(deserializer)?;
        decode_base64(text.as_deref().unwrap_or_default()).map_err(D::Error::custom)
    }
}

/// A proto `bytes` value on its own, for fields that may be absent.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Blob(#[serde(with = "bytes")] pub Vec<u8>);

/// Any spelling of an integer that proto3 JSON allows.
#[derive(Deserialize)]
#[serde(untagged)]
enum Number {
    Integer(i64),
    Float(f64),
    Text(String),
}

impl Number {
    fn integer(&self) -> Option<i64> {
        match self {
            Self::Integer(value) => Some(*value),
            Self::Float(value) => integral(*value),
            Self::Text(text) => text.parse().ok().or_else(|| text.parse().ok().and_then(integral)),
        }
    }
}

/// The integer a float stands for, when it stands for one of 32 bits.
fn integral(value: f64) -> Option<i64> {
    let in_range = value >= f64::from(i32::MIN) && value <= f64::from(u32::MAX);
    if !in_range || value.fract() != 0.0 {
        return None;
    }
    #[expect(clippy::cast_possible_truncation, reason = "whole and within 32 bits, see above")]
    Some(value as i64)
}

/// A proto `uint32`: a number or a string; `null` is 0.
///
/// # Errors
/// When the value is not an integer of 32 bits without sign.
pub fn uint32<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    integer(deserializer, "an unsigned 32-bit integer")
}

/// A proto `sint32` or `int32`: a number or a string; `null` is 0.
///
/// # Errors
/// When the value is not an integer of 32 bits with sign.
pub fn sint32<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i32, D::Error> {
    integer(deserializer, "a signed 32-bit integer")
}

fn integer<'de, D, T>(deserializer: D, expected: &'static str) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: TryFrom<i64>,
{
    let number: Option<Number> = Option::deserialize(deserializer)?;
    let value = number.map_or(Some(0), |number| number.integer());
    value
        .and_then(|value| T::try_from(value).ok())
        .ok_or_else(|| D::Error::invalid_value(Unexpected::Other("another number"), &expected))
}

/// `#[serde(with)]` for a proto `int64` field: written as a string, since JavaScript's numbers are
/// too short for it.
pub mod int64 {
    use super::{Deserializer, Serializer};

    /// Writes the number as a string.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(value: &i64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    /// Reads a number or a string; `null` is 0.
    ///
    /// # Errors
    /// When the value is not an integer of 64 bits with sign.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
        super::integer(deserializer, "a signed 64-bit integer")
    }
}

/// Writes an enum's value by its name.
pub(crate) fn write_enum<T: Copy + PartialEq, S: Serializer>(
    names: &[(T, &'static str)],
    value: T,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let name = names.iter().find(|(known, _)| *known == value).map_or("", |(_, name)| name);
    serializer.serialize_str(name)
}

/// Reads an enum's value by its name or its number, which is its place among the names. What is
/// not known is the default: a newer peer may have more.
pub(crate) fn read_enum<'de, T: Copy + Default, D: Deserializer<'de>>(
    names: &[(T, &'static str)],
    deserializer: D,
) -> Result<T, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Wire {
        Number(i64),
        Name(String),
    }
    let known = match Wire::deserialize(deserializer)? {
        Wire::Number(number) => usize::try_from(number).ok().and_then(|index| names.get(index)),
        Wire::Name(name) => names.iter().find(|(_, known)| *known == name),
    };
    Ok(known.map(|(value, _)| *value).unwrap_or_default())
}

/// A field whose `null` means its default, as everywhere in proto3 JSON.
///
/// # Errors
/// When the value is neither `null` nor a `T`.
pub fn nullable<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Deserialize)]
    struct Unsigned {
        #[serde(deserialize_with = "uint32")]
        value: u32,
    }

    fn read(text: &str) -> Option<u32> {
        serde_json::from_str::<Unsigned>(text).ok().map(|wrapped| wrapped.value)
    }

    #[test]
    fn integers_are_numbers_or_strings() {
        assert_eq!(read(r#"{"value":80}"#), Some(80));
        assert_eq!(read(r#"{"value":"80"}"#), Some(80));
        assert_eq!(read(r#"{"value":8e1}"#), Some(80));
        assert_eq!(read(r#"{"value":null}"#), Some(0));
    }

    #[test]
    fn integers_out_of_range_are_refused() {
        assert_eq!(read(r#"{"value":-1}"#), None);
        assert_eq!(read(r#"{"value":4294967296}"#), None);
        assert_eq!(read(r#"{"value":1.5}"#), None);
        assert_eq!(read(r#"{"value":"x"}"#), None);
    }

    proptest! {
        #[test]
        fn base64_reads_back_in_each_spelling(data in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut text = Vec::new();
            append_base64(&mut text, &data);
            let text = String::from_utf8(text).unwrap();
            let url_safe = text.replace('+', "-").replace('/', "_");
            prop_assert_eq!(&decode_base64(&text).unwrap(), &data);
            prop_assert_eq!(&decode_base64(text.trim_end_matches('=')).unwrap(), &data);
            prop_assert_eq!(&decode_base64(&url_safe).unwrap(), &data);
        }

        #[test]
        fn any_text_decodes_or_is_refused(text in ".{0,64}") {
            let _ = decode_base64(&text);
        }
    }
}
