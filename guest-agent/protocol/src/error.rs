//! Errors as the Connect protocol puts them on the wire.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Error codes of the Connect protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Code {
    /// The call was given up by its caller.
    Canceled,
    /// Anything without a better code, codes this version does not know included.
    Unknown,
    /// The request is malformed or names something impossible.
    InvalidArgument,
    /// The call's time is over.
    DeadlineExceeded,
    /// What the request names does not exist.
    NotFound,
    /// What the request would create exists.
    AlreadyExists,
    /// The caller may not do this.
    PermissionDenied,
    /// A limit was reached.
    ResourceExhausted,
    /// The present state does not allow this.
    FailedPrecondition,
    /// Lost against a concurrent operation.
    Aborted,
    /// Past the end of something.
    OutOfRange,
    /// No such procedure or feature.
    Unimplemented,
    /// The agent failed.
    Internal,
    /// Not now; a retry may help.
    Unavailable,
    /// Data is lost.
    DataLoss,
    /// The caller's name is missing or not known.
    Unauthenticated,
}

impl Code {
    /// Every code, in the order of their numbers in gRPC.
    pub const ALL: [Self; 16] = [
        Self::Canceled,
        Self::Unknown,
        Self::InvalidArgument,
        Self::DeadlineExceeded,
        Self::NotFound,
        Self::AlreadyExists,
        Self::PermissionDenied,
        Self::ResourceExhausted,
        Self::FailedPrecondition,
        Self::Aborted,
        Self::OutOfRange,
        Self::Unimplemented,
        Self::Internal,
        Self::Unavailable,
        Self::DataLoss,
        Self::Unauthenticated,
    ];

    /// The name on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Canceled => "canceled",
            Self::Unknown => "unknown",
            Self::InvalidArgument => "invalid_argument",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::NotFound => "not_found",
            Self::AlreadyExists => "already_exists",
            Self::PermissionDenied => "permission_denied",
            Self::ResourceExhausted => "resource_exhausted",
            Self::FailedPrecondition => "failed_precondition",
            Self::Aborted => "aborted",
            Self::OutOfRange => "out_of_range",
            Self::Unimplemented => "unimplemented",
            Self::Internal => "internal",
            Self::Unavailable => "unavailable",
            Self::DataLoss => "data_loss",
            Self::Unauthenticated => "unauthenticated",
        }
    }

    /// The code of a name on the wire; [`Code::Unknown`] for names this version does not know.
    #[must_use]
    pub fn from_name(name: &str) -> Self {
        Self::ALL.into_iter().find(|code| code.as_str() == name).unwrap_or(Self::Unknown)
    }

    /// The HTTP status of a unary call that fails with this code.
    #[must_use]
    pub const fn http_status(self) -> u16 {
        match self {
            Self::Canceled => 499,
            Self::InvalidArgument | Self::FailedPrecondition | Self::OutOfRange => 400,
            Self::DeadlineExceeded => 504,
            Self::NotFound => 404,
            Self::AlreadyExists | Self::Aborted => 409,
            Self::PermissionDenied => 403,
            Self::ResourceExhausted => 429,
            Self::Unimplemented => 501,
            Self::Unknown | Self::Internal | Self::DataLoss => 500,
            Self::Unavailable => 503,
            Self::Unauthenticated => 401,
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for Code {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for Code {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Ok(Self::from_name(&name))
    }
}

/// Why a call failed: the body of a failed unary call, and `error` in a stream's last frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message} ({code})")]
pub struct ConnectError {
    /// For programs.
    pub code: Code,
    /// For people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

impl ConnectError {
    /// An error with this code and message.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_reads_back_by_its_name() {
        for code in Code::ALL {
            assert_eq!(Code::from_name(code.as_str()), code);
        }
    }

    #[test]
    fn a_code_of_the_future_is_unknown() {
        let error: ConnectError = serde_json::from_str(r#"{"code":"teapot"}"#).unwrap();
        assert_eq!(error, ConnectError::new(Code::Unknown, ""));
    }
}
