//! What a checkpoint keeps of a device: JSON of a structure that only this device knows, and the
//! version of that structure.
//!
//! Saved state comes from a file that anybody may have written. Reading it refuses unknown
//! versions, unknown fields and whatever else does not fit; the device that it is for then checks
//! every value before it takes any.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Most bytes that are read as one device's state; real ones have a few hundred.
const BYTES_MAX: usize = 64 * 1024;

/// The state of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    /// Version of the structure that `data` holds.
    pub version: u16,
    /// The structure as JSON.
    pub data: Vec<u8>,
}

/// Why a device's state cannot be saved or restored. After a failed restore the device is as
/// after a reset by its driver, and the machine must not run on.
#[derive(Debug, Error)]
pub enum StateError {
    /// Another build made it.
    #[error(
        "the saved state of device {device} has version {found} where this build has {known}: \
         restore it with the build that saved it"
    )]
    Version {
        /// The device's name.
        device: &'static str,
        /// The version found.
        found: u16,
        /// The version that can be read.
        known: u16,
    },
    /// It is larger than any device's state.
    #[error("the saved state of device {device} is larger than {BYTES_MAX} bytes")]
    Size {
        /// The device's name.
        device: &'static str,
    },
    /// It is not the structure it should be.
    #[error("the saved state of device {device} cannot be read")]
    Malformed {
        /// The device's name.
        device: &'static str,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
    /// Its values contradict each other or the machine.
    #[error("the saved state of device {device} does not fit: {reason}")]
    Unfit {
        /// The device's name.
        device: &'static str,
        /// What does not fit.
        reason: String,
    },
    /// It cannot be written as JSON.
    #[error("the state of device {device} cannot be saved")]
    Encode {
        /// The device's name.
        device: &'static str,
        /// What is wrong.
        #[source]
        source: serde_json::Error,
    },
}

impl Saved {
    /// Writes down `state` of `device`.
    ///
    /// # Errors
    /// [`StateError::Encode`] for a structure that JSON has no form for.
    pub fn encode(
        device: &'static str,
        version: u16,
        state: &impl Serialize,
    ) -> Result<Self, StateError> {
        let data =
            serde_json::to_vec(state).map_err(|source| StateError::Encode { device, source })?;
        Ok(Self { version, data })
    }

    /// Reads the state of `device`, which has to be of `version`.
    ///
    /// # Errors
    /// [`StateError`] that says what is wrong with it.
    pub fn decode<T: DeserializeOwned>(
        &self,
        device: &'static str,
        version: u16,
    ) -> Result<T, StateError> {
        check_version(device, self.version, version)?;
        if self.data.len() > BYTES_MAX {
            return Err(StateError::Size { device });
        }
        serde_json::from_slice(&self.data)
            .map_err(|source| StateError::Malformed { device, source })
    }
}

/// The state of a device behind a transport, which is a part of the transport's: its version does
/// not depend on the transport's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OwnState {
    version: u16,
    state: serde_json::Value,
}

impl OwnState {
    /// Writes down `state` of `device`.
    ///
    /// # Errors
    /// [`StateError::Encode`] for a structure that JSON has no form for.
    pub fn encode(
        device: &'static str,
        version: u16,
        state: &impl Serialize,
    ) -> Result<Self, StateError> {
        let state =
            serde_json::to_value(state).map_err(|source| StateError::Encode { device, source })?;
        Ok(Self { version, state })
    }

    /// Reads the state of `device`, which has to be of `version`.
    ///
    /// # Errors
    /// [`StateError`] that says what is wrong with it.
    pub fn decode<T: DeserializeOwned>(
        &self,
        device: &'static str,
        version: u16,
    ) -> Result<T, StateError> {
        check_version(device, self.version, version)?;
        T::deserialize(&self.state).map_err(|source| StateError::Malformed { device, source })
    }
}

fn check_version(device: &'static str, found: u16, known: u16) -> Result<(), StateError> {
    if found == known { Ok(()) } else { Err(StateError::Version { device, found, known }) }
}

/// Gives up on a restore when `fits` is false.
pub(super) fn ensure(fits: bool, device: &'static str, reason: &str) -> Result<(), StateError> {
    if fits { Ok(()) } else { Err(StateError::Unfit { device, reason: reason.to_owned() }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Example {
        big: u64,
        small: Option<u8>,
    }

    const EXAMPLE: Example = Example { big: u64::MAX, small: None };

    #[test]
    fn what_is_encoded_decodes() {
        let saved = Saved::encode("example", 3, &EXAMPLE).unwrap();
        assert_eq!(saved.decode::<Example>("example", 3).unwrap(), EXAMPLE);
        let own = OwnState::encode("example", 3, &EXAMPLE).unwrap();
        assert_eq!(own.decode::<Example>("example", 3).unwrap(), EXAMPLE);
    }

    #[test]
    fn another_version_is_refused_by_name() {
        let saved = Saved::encode("example", 3, &EXAMPLE).unwrap();
        let error = saved.decode::<Example>("example", 4).unwrap_err();
        assert!(error.to_string().contains("device example has version 3"), "{error}");
    }

    #[test]
    fn unknown_fields_are_refused() {
        let data = br#"{"big":1,"small":2,"more":3}"#.to_vec();
        let error = Saved { version: 3, data }.decode::<Example>("example", 3).unwrap_err();
        assert!(matches!(error, StateError::Malformed { .. }));
    }

    #[test]
    fn endless_state_is_refused_before_it_is_read() {
        let data = vec![b'['; BYTES_MAX + 1];
        let error = Saved { version: 3, data }.decode::<Example>("example", 3).unwrap_err();
        assert!(matches!(error, StateError::Size { .. }));
    }
}
