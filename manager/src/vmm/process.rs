//! A VMM process that was started by somebody else: whether it is still the same one, and its end
//! by force.

use std::io;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::sys;

/// Position of the start time among the fields of `/proc/PID/stat` behind the program's name
/// (proc(5): field 22, the name being field 2).
const START_TIME: usize = 19;

/// A process, told from later ones with the same number by the time it was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessId {
    /// Its number.
    pub pid: u32,
    /// When it was started, in clock ticks since the host's boot.
    pub started: u64,
}

impl ProcessId {
    /// The process with this number now.
    ///
    /// # Errors
    /// When there is none.
    pub fn of(pid: u32) -> io::Result<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // The name may hold anything, even parentheses.
        let fields = stat.rsplit_once(") ").map(|(_, fields)| fields).unwrap_or_default();
        let started = fields.split(' ').nth(START_TIME).and_then(|field| field.parse().ok());
        let started = started.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
        Ok(Self { pid, started })
    }

    /// A descriptor of the process; nothing when it is gone.
    fn open(self) -> io::Result<Option<OwnedFd>> {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else {
            return Ok(None);
        };
        let fd = match pidfd_open(pid, PidfdFlags::NONBLOCK) {
            Ok(fd) => fd,
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        // Looked at after it was opened: the descriptor is of this process or of none.
        Ok((Self::of(self.pid).ok() == Some(self)).then_some(fd))
    }

    /// Waits until the process is gone.
    ///
    /// # Errors
    /// When it cannot be watched.
    pub async fn gone(self) -> io::Result<()> {
        let Some(fd) = self.open()? else { return Ok(()) };
        sys::watch_readable(fd)?.readable().await.map(drop)
    }

    /// Ends the process at once, and waits until it is gone.
    ///
    /// # Errors
    /// When it may not be ended.
    pub async fn kill(self) -> io::Result<()> {
        let Some(fd) = self.open()? else { return Ok(()) };
        match pidfd_send_signal(&fd, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(errno) => return Err(errno.into()),
        }
        sys::watch_readable(fd)?.readable().await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    #[tokio::test]
    async fn a_process_is_ended_and_waited_for() {
        let mut child = tokio::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let id = ProcessId::of(child.id().unwrap()).unwrap();
        id.kill().await.unwrap();
        assert_eq!(child.wait().await.unwrap().signal(), Some(9));
        id.gone().await.unwrap();
    }

    #[tokio::test]
    async fn another_process_with_the_number_is_left_alone() {
        let mut child = tokio::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let id = ProcessId::of(child.id().unwrap()).unwrap();
        ProcessId { started: id.started - 1, ..id }.kill().await.unwrap();
        assert_eq!(child.try_wait().unwrap(), None);
        child.kill().await.unwrap();
    }
}
