//! IDs, which are drawn, and names, which users choose.

use std::fmt;
use std::io;

use serde::{Deserialize, Serialize};

use crate::random::random_bytes;

/// Letters of an ID: digits and lower case without those that look alike.
const LETTERS: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
/// Length of an ID: 60 random bits.
const LENGTH: usize = 12;
/// Longest name.
const NAME_MAX: usize = 63;

/// ID of a checkpoint, a sandbox or a layer: 12 letters and digits, for ever unique.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Id(String);

impl Id {
    /// Draws a new one.
    ///
    /// # Errors
    /// The system's, when it has no random bytes.
    pub fn new() -> io::Result<Self> {
        let random = random_bytes::<LENGTH>()?;
        let letters = random.iter().map(|byte| LETTERS.get(usize::from(byte % 32)));
        Ok(Self(letters.flatten().map(|letter| char::from(*letter)).collect()))
    }

    /// The ID that `text` is, if it is one.
    pub fn parse(text: &str) -> Option<Self> {
        let right = text.len() == LENGTH && text.bytes().all(|byte| LETTERS.contains(&byte));
        right.then(|| Self(text.to_owned()))
    }

    /// Its letters.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for Id {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Self::parse(&text).ok_or_else(|| format!("{text:?} is not an ID"))
    }
}

impl From<Id> for String {
    fn from(id: Id) -> Self {
        id.0
    }
}

/// A name: letters, digits, `_`, `.` and `-`, at most 63, the first a letter or digit. One that
/// could be an ID is none.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

impl Name {
    /// Its letters.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for Name {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let letter = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
        if !text.bytes().all(letter) || !text.starts_with(|c: char| c.is_ascii_alphanumeric()) {
            return Err("a name has letters, digits, '_', '.' and '-' and starts with one of the \
                        first two"
                .into());
        }
        if text.len() > NAME_MAX {
            return Err(format!("a name has at most {NAME_MAX} letters"));
        }
        if Id::parse(&text).is_some() {
            return Err("this name could be taken for an ID".into());
        }
        Ok(Self(text))
    }
}

impl std::str::FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.to_owned().try_into()
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn ids_differ_and_read_back() {
        let ids: BTreeSet<Id> = (0..1000).map(|_| Id::new().unwrap()).collect();
        assert_eq!(ids.len(), 1000);
        assert!(ids.iter().all(|id| Id::parse(id.as_str()).as_ref() == Some(id)));
    }

    #[test]
    fn a_path_is_no_id() {
        for text in ["", "../../../etc", "abc", "0123456789ab/", "0123456789AB", "0123456789al"] {
            assert_eq!(Id::parse(text), None, "{text}");
            let json = serde_json::to_string(text).unwrap();
            assert!(serde_json::from_str::<Id>(&json).is_err(), "{text}");
        }
    }

    #[test]
    fn names_are_harmless_in_paths_and_terminals() {
        for text in ["web", "a", "v1.2-rc_3", "7"] {
            assert_eq!(text.parse::<Name>().unwrap().as_str(), text);
        }
        let long = "a".repeat(64);
        for text in ["", ".", "-x", "a/b", "a b", "\u{e9}", "a\x1b[2J", "0123456789ab", &long] {
            text.parse::<Name>().unwrap_err();
        }
    }
}
