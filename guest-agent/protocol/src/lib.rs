//! Wire types between the host and the agent inside a guest.
//!
//! The agent listens on three vsock ports. [`ENVD_PORT`] speaks envd's protocol as the E2B SDKs know
//! it: HTTP/1.1 with the Connect protocol for `process.Process` and `filesystem.Filesystem`, and plain
//! HTTP for the content of files.
//! [`CONTROL_PORT`] is private to the manager: HTTP with small JSON bodies. [`PROXY_PORT`] leads to the
//! guest's TCP ports. Once all serve, the
//! agent connects to [`READY_PORT`] of the host and writes one [`ReadyLine`].
//!
//! This crate is a leaf: the manager and the agent use it, and it knows neither of them. It does no
//! input or output; it turns bytes into values and back.

pub mod control;
pub mod envelope;
mod error;
pub mod filesystem;
pub mod json;
pub mod metrics;
pub mod process;
pub mod proxy;
mod ready;
pub mod signal;
pub mod timestamp;

pub use error::{Code, ConnectError};
pub use ready::ReadyLine;

/// The version of envd whose protocol the agent speaks, as the control plane tells SDKs. They use a
/// feature from the version on that brought it: recursive watches (0.1.4), `stdin` of `Start`
/// (0.3.0), the default user (0.4.0), `CloseStdin` (0.5.2), uploads as octet-stream (0.5.7), files'
/// metadata (0.6.2), entries in events (0.6.3), watches on network file systems (0.6.4).
pub const ENVD_VERSION: &str = "0.6.4";

/// Guest vsock port of the envd protocol.
pub const ENVD_PORT: u32 = 49983;

/// Guest vsock port of the private control service; see [`control`].
pub const CONTROL_PORT: u32 = 49982;

/// Guest vsock port that leads to the guest's TCP ports; see [`proxy`].
pub const PROXY_PORT: u32 = 49984;

/// Host vsock port to which the agent reports that it serves; see [`ReadyLine`].
pub const READY_PORT: u32 = 49981;

/// Content type of a unary call of the Connect protocol, and of error bodies.
pub const UNARY_CONTENT_TYPE: &str = "application/json";

/// Content type of a streaming call of the Connect protocol.
pub const STREAM_CONTENT_TYPE: &str = "application/connect+json";

/// Request header (milliseconds, decimal) after which a call ends with
/// [`Code::DeadlineExceeded`]; `Start` also kills its process.
pub const TIMEOUT_HEADER: &str = "connect-timeout-ms";

/// Request header (seconds, decimal) that sets how often an idle stream carries a keepalive.
pub const KEEPALIVE_HEADER: &str = "keepalive-ping-interval";

/// Request header with the access token that [`control::Init`] set.
pub const ACCESS_TOKEN_HEADER: &str = "x-access-token";

/// Seconds between keepalives when [`KEEPALIVE_HEADER`] is absent.
pub const DEFAULT_KEEPALIVE_SECS: u64 = 90;
