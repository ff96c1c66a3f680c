//! The private control service: what the manager alone may ask of an agent.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use coppice_agent_protocol::UNARY_CONTENT_TYPE;
use coppice_agent_protocol::control::{
    Identity, Info, Init, Log, LogLine, ReadLog, SetTime, Shutdown, ShutdownMode, TimeSet,
};
use http::StatusCode;
use serde::Serialize;

use super::transport::{self, check, request};
use super::{Agent, Error};

/// A round trip this short leaves the clock right enough.
const PROMPT: Duration = Duration::from_millis(5);

/// Most readings of the guest's uptime that setting its clock takes.
const TIME_READINGS: usize = 8;

/// A moment by both clocks.
#[derive(Debug)]
struct Reading {
    /// Since the Unix epoch, by the host.
    unix: Duration,
    /// By the guest.
    uptime_us: u64,
    /// What it took; the moment is somewhere within.
    round_trip: Duration,
}

fn unix_time() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

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

    /// Sets the guest's clock to the host's. A guest that is slow to answer is asked again, so
    /// that the clock is right within half of the shortest round trip.
    ///
    /// # Errors
    /// Any of [`Error`].
    pub async fn sync_time(&self) -> Result<(), Error> {
        let mut best: Option<Reading> = None;
        for _ in 0..TIME_READINGS {
            let reading = self.set_time(best.as_ref()).await?;
            let Some(reading) = reading else { return Ok(()) };
            if best.as_ref().is_none_or(|best| reading.round_trip < best.round_trip) {
                let first = best.is_none();
                let prompt = reading.round_trip <= PROMPT;
                best = Some(reading);
                match (first, prompt) {
                    // What was just set is as good.
                    (true, true) => return Ok(()),
                    (false, true) => break,
                    (_, false) => {}
                }
            }
        }
        self.set_time(best.as_ref()).await.map(drop)
    }

    /// Sets the clock by a reading, or roughly; none when the agent does not tell when it did.
    async fn set_time(&self, by: Option<&Reading>) -> Result<Option<Reading>, Error> {
        let sent = unix_time();
        let (time, uptime_us) = match by {
            Some(reading) => (reading.unix, Some(reading.uptime_us)),
            None => (sent, None),
        };
        let unix_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let (status, body) = self.call("/time", &SetTime { unix_ns, uptime_us }).await?;
        // An agent in a checkpoint may be older than the answer.
        if status == StatusCode::NO_CONTENT {
            return Ok(None);
        }
        check(status, &body, StatusCode::OK)?;
        let round_trip = unix_time().saturating_sub(sent);
        let TimeSet { uptime_us } =
            serde_json::from_slice(&body).map_err(|e| Error::Protocol(e.to_string()))?;
        Ok(Some(Reading { unix: sent + round_trip / 2, uptime_us, round_trip }))
    }

    /// Sets what requests to the agent need and processes have; an empty token means none.
    ///
    /// # Errors
    /// [`Error::Refused`] when a value has not the form it must have.
    pub async fn init(&self, init: &Init) -> Result<(), Error> {
        self.post("/init", init, StatusCode::NO_CONTENT).await.map(drop)
    }

    /// Makes the guest distinct from others of the same image.
    ///
    /// # Errors
    /// [`Error::Refused`] when a value has not the form it must have.
    pub async fn set_identity(&self, identity: &Identity) -> Result<(), Error> {
        self.post("/identity", identity, StatusCode::NO_CONTENT).await.map(drop)
    }

    /// Lines of its log after the one with this number, waiting a while for one when there is
    /// none.
    ///
    /// # Errors
    /// Any of [`Error`]; an agent in a checkpoint may be older than its log.
    pub async fn log(&self, after: u64, wait: bool) -> Result<Vec<LogLine>, Error> {
        let wait_ms = if wait { ReadLog::MAX_WAIT_MS } else { 0 };
        let body = self.post("/log", &ReadLog { after, wait_ms }, StatusCode::OK).await?;
        let log: Log = serde_json::from_slice(&body).map_err(|e| Error::Protocol(e.to_string()))?;
        Ok(log.lines)
    }

    async fn post(
        &self,
        path: &str,
        body: &impl Serialize,
        wanted: StatusCode,
    ) -> Result<Bytes, Error> {
        let (status, body) = self.call(path, body).await?;
        check(status, &body, wanted)?;
        Ok(body)
    }

    async fn call(&self, path: &str, body: &impl Serialize) -> Result<(StatusCode, Bytes), Error> {
        let body = serde_json::to_vec(body).map_err(|e| Error::Protocol(e.to_string()))?;
        let request = request("POST", path, None)
            .header("content-type", UNARY_CONTENT_TYPE)
            .body(transport::bytes(body))
            .map_err(Error::Request)?;
        self.control.call(request).await
    }
}
