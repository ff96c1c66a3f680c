//! The private control service: what the manager alone may ask of an agent.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use coppice_agent_protocol::UNARY_CONTENT_TYPE;
use coppice_agent_protocol::control::{Identity, Info, SetTime, Shutdown, ShutdownMode};
use http::StatusCode;
use serde::Serialize;

use super::transport::{self, check, request};
use super::{Agent, Error};

impl Agent {
    /// What the agent says of itself and its guest.
    ///
    /// # Errors
    /// Any of [`Error`].
    pub async fn info(&self) -> Result<Info, Error> {
        let request = request("GET", "/info", None).body(transport::empty());
        let (status, body) = self.control.call(request.map_err(Error::Request)?).await?;
        check(status, &body, StatusCode::OK)?;
        serde_json::from_slice(&body).map_err(|e| Error::Protocol(e.to_string()))
    }

    /// Asks the guest to end in order and switch the machine off; answered before it does.
    ///
    /// # Errors
    /// Any of [`Error`].
    pub async fn shutdown(&self, grace: Duration) -> Result<(), Error> {
        let grace_ms = u32::try_from(grace.as_millis()).unwrap_or(Shutdown::MAX_GRACE_MS);
        let body = Shutdown { mode: ShutdownMode::Poweroff, grace_ms };
        self.post("/shutdown", &body, StatusCode::ACCEPTED).await.map(drop)
    }

    /// Sets the guest's clock to the host's.
    ///
    /// # Errors
    /// Any of [`Error`].
    pub async fn sync_time(&self) -> Result<(), Error> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let unix_ns = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        self.post("/time", &SetTime { unix_ns }, StatusCode::NO_CONTENT).await.map(drop)
    }

    /// Makes the guest distinct from others of the same image.
    ///
    /// # Errors
    /// [`Error::Refused`] when a value has not the form it must have.
    pub async fn set_identity(&self, identity: &Identity) -> Result<(), Error> {
        self.post("/identity", identity, StatusCode::NO_CONTENT).await.map(drop)
    }

    async fn post(
        &self,
        path: &str,
        body: &impl Serialize,
        wanted: StatusCode,
    ) -> Result<Bytes, Error> {
        let body = serde_json::to_vec(body).map_err(|e| Error::Protocol(e.to_string()))?;
        let request = request("POST", path, None)
            .header("content-type", UNARY_CONTENT_TYPE)
            .body(transport::bytes(body))
            .map_err(Error::Request)?;
        let (status, body) = self.control.call(request).await?;
        check(status, &body, wanted)?;
        Ok(body)
    }
}
