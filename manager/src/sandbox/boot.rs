//! From a started VMM process to an agent that serves.

use std::time::{Duration, Instant};

use coppice_agent_protocol::ReadyLine;
use tokio::io::AsyncReadExt;
use tokio::net::UnixListener;

use super::console::Console;
use super::parts::Parts;
use super::{BootTime, Error, Sandbox, diagnosis};
use crate::vmm::Vmm;

impl Sandbox {
    /// Builds the machine, lets it run, and waits for the agent's report, the end of the machine
    /// or the end of the boot time, whichever comes first. To be called once.
    ///
    /// On failure the machine may still be there: [`Sandbox::stop`] ends it.
    ///
    /// # Errors
    /// What the VMM refused, why the guest ended, or that its agent did not report in time.
    pub async fn boot(&mut self) -> Result<BootTime, Error> {
        let (Some(parts), Some(ready)) = (self.parts.take(), self.ready.take()) else {
            return Err(Error::BootedTwice);
        };
        let booting = Booting {
            vmm: &self.vmm,
            ready: &ready,
            started: self.started,
            limit: self.boot_timeout,
        };
        booting.up(parts, &mut self.console).await
    }
}

/// A machine on its way up.
pub(super) struct Booting<'a> {
    pub(super) vmm: &'a Vmm,
    /// Where its agent reports.
    pub(super) ready: &'a UnixListener,
    pub(super) started: Instant,
    pub(super) limit: Duration,
}

impl Booting<'_> {
    pub(super) async fn up(self, parts: Parts, console: &mut Console) -> Result<BootTime, Error> {
        let names = parts.names();
        let (spec, passed) = parts.finish();
        self.vmm.create(spec, passed).await.map_err(|source| names.refusal(source))?;
        self.vmm.run().await.map_err(|source| names.refusal(source))?;
        let line = tokio::select! {
            line = report(self.ready) => line?,
            end = self.vmm.ended() => {
                let console = console.rest().await;
                return Err(names.failed_boot(diagnosis::explain(&end, &console)));
            }
            () = tokio::time::sleep(self.limit) => {
                let console = console.tail();
                let last_line = diagnosis::last_line(&console).unwrap_or_default().to_owned();
                return Err(Error::NoReport { after: self.limit, last_line });
            }
        };
        Ok(BootTime {
            until_ready: self.started.elapsed(),
            guest_clock: Duration::from_micros(line.uptime_us),
        })
    }
}

/// Waits for the agent's line. Anything else in the guest may connect too: what is not such a
/// line is passed over.
async fn report(listener: &UnixListener) -> Result<ReadyLine, Error> {
    loop {
        let (stream, _) = listener.accept().await.map_err(Error::Socket)?;
        let mut line = Vec::new();
        let limit = u64::try_from(ReadyLine::MAX_LEN).unwrap_or(u64::MAX);
        if stream.take(limit).read_to_end(&mut line).await.is_ok()
            && let Ok(report) = ReadyLine::decode(&line)
        {
            return Ok(report);
        }
    }
}
