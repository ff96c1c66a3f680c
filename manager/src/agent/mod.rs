//! Client of the agent in a guest: processes and files in envd's protocol, and the private
//! control service.
//!
//! Every byte that comes back is the guest's: sizes are bounded before anything is buffered, and
//! a stream is read only as fast as its reader takes it, so that a slow reader holds the guest
//! back instead of filling this process.

mod control;
mod files;
mod ports;
mod process;
mod transport;

use std::io;
use std::path::Path;
use std::time::Duration;

use coppice_agent_protocol::metrics::Metrics;
use coppice_agent_protocol::{CONTROL_PORT, ConnectError, ENVD_PORT, PROXY_PORT};
use http::StatusCode;
use thiserror::Error;

pub use files::Download;
pub use process::{Outcome, ProcessStream, Start};
pub use transport::Endpoint;

use transport::Client;

/// How long the agent may take to answer a call that does not wait for a process.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Failures of calls to the agent.
#[derive(Debug, Error)]
pub enum Error {
    /// The Unix socket of the guest's vsock does not take connections.
    #[error("the guest's socket cannot be reached")]
    Connect(#[source] io::Error),
    /// Nobody listens on the port in the guest.
    #[error("nothing in the guest listens on vsock port {0}")]
    PortClosed(u32),
    /// The connection broke.
    #[error("the connection to the agent broke")]
    Http(#[source] hyper::Error),
    /// The agent said no.
    #[error("the agent refused: {}", .0.message)]
    Refused(ConnectError),
    /// The agent answered something that is not in the protocol.
    #[error("the agent's answer is not in the protocol ({0})")]
    Protocol(String),
    /// The agent does not answer.
    #[error("the agent did not answer within {} s", .0.as_secs())]
    Silent(Duration),
    /// The data to send could not be put into a request.
    #[error("the request to the agent cannot be formed")]
    Request(#[source] http::Error),
}

/// Client of one guest's agent. Cheap: it holds at most two idle connections.
#[derive(Debug)]
pub struct Agent {
    envd: Client,
    control: Client,
    /// Where connections to other ports of the guest are asked for.
    proxy: Endpoint,
}

impl Agent {
    /// The agent behind a guest's vsock socket.
    pub fn over_vsock(socket: &Path) -> Self {
        let at = |port| Endpoint::Vsock { socket: socket.to_owned(), port };
        Self::new(at(ENVD_PORT), at(CONTROL_PORT), at(PROXY_PORT))
    }

    /// An agent whose services are at these places.
    pub fn new(envd: Endpoint, control: Endpoint, proxy: Endpoint) -> Self {
        Self { envd: Client::new(envd), control: Client::new(control), proxy }
    }

    /// The same, with a token that it wants to see.
    #[must_use]
    pub fn with_token(mut self, token: Option<String>) -> Self {
        self.envd.set_token(token);
        self
    }

    /// What the guest uses.
    ///
    /// # Errors
    /// Any of [`Error`].
    pub async fn metrics(&self) -> Result<Metrics, Error> {
        let request = transport::request("GET", "/metrics", None).body(transport::empty());
        let (status, body) = self.envd.call(request.map_err(Error::Request)?).await?;
        transport::check(status, &body, StatusCode::OK)?;
        serde_json::from_slice(&body).map_err(|error| Error::Protocol(error.to_string()))
    }

    /// Asks whether the agent serves.
    ///
    /// # Errors
    /// Any of [`Error`], when it does not.
    pub async fn health(&self) -> Result<(), Error> {
        let request = transport::request("GET", "/health", None).body(transport::empty());
        let (status, body) = self.envd.call(request.map_err(Error::Request)?).await?;
        transport::check(status, &body, StatusCode::NO_CONTENT)
    }
}
