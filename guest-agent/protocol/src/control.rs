//! Bodies of the private control service on [`crate::CONTROL_PORT`].
//!
//! | Call | Body | Answer |
//! |---|---|---|
//! | `GET /info` | | 200 [`Info`] |
//! | `GET /metrics` | | 200 [`crate::metrics::Metrics`] |
//! | `POST /shutdown` | [`Shutdown`] | 202, then the guest ends |
//! | `POST /time` | [`SetTime`] | 200 [`TimeSet`] |
//! | `POST /identity` | [`Identity`] | 204 |
//! | `POST /init` | [`Init`] | 204 |
//! | `POST /log` | [`ReadLog`] | 200 [`Log`] |
//!
//! Errors have a 4xx or 5xx status and the body of a [`crate::ConnectError`].

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::json::Blob;

/// What an agent says of itself and of its guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Info {
    /// Version of the agent.
    pub version: String,
    /// Release of the guest's kernel, as `uname -r` prints it.
    pub kernel: String,
    /// The kernel's random identity of this boot; empty when `/proc` has none.
    pub boot_id: String,
    /// The guest's host name.
    pub hostname: String,
    /// Whether the agent is the guest's init.
    pub init: bool,
    /// Microseconds of `CLOCK_BOOTTIME` now.
    pub uptime_us: u64,
    /// Microseconds of `CLOCK_BOOTTIME` when the agent's `main` began.
    pub started_us: u64,
    /// Microseconds of `CLOCK_BOOTTIME` when the agent listened.
    pub listening_us: u64,
    /// Microseconds of `CLOCK_BOOTTIME` when the agent had prepared the userland and served.
    pub serving_us: u64,
    /// Nanoseconds since the Unix epoch by the guest's clock.
    pub unix_ns: u64,
    /// Processes started through the agent that run now.
    pub processes: u32,
}

/// Which lines of the agent's log are wanted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadLog {
    /// Those after the one with this number; numbers begin with 1.
    #[serde(default)]
    pub after: u64,
    /// How many milliseconds to wait for one when there is none, at most
    /// [`ReadLog::MAX_WAIT_MS`].
    #[serde(default)]
    pub wait_ms: u32,
}

impl ReadLog {
    /// The longest wait, in milliseconds.
    pub const MAX_WAIT_MS: u32 = 20_000;
}

/// Lines of the agent's log, oldest first. Old ones are dropped.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Log {
    /// The lines.
    pub lines: Vec<LogLine>,
}

/// A line of the agent's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLine {
    /// Its number.
    pub number: u64,
    /// When it was written by the guest's clock, in milliseconds since 1970.
    pub unix_ms: u64,
    /// What it says.
    pub text: String,
}

/// How a guest ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ShutdownMode {
    /// The machine is switched off.
    Poweroff,
    /// The machine is reset.
    Reboot,
}

/// Ends the guest: processes get `SIGTERM`, then `SIGKILL`, file systems are synced and unmounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shutdown {
    /// What happens at the end.
    pub mode: ShutdownMode,
    /// Milliseconds processes have between `SIGTERM` and `SIGKILL`; at most [`Self::MAX_GRACE_MS`].
    #[serde(default = "default_grace_ms")]
    pub grace_ms: u32,
}

impl Shutdown {
    /// Grace when none is asked for.
    pub const DEFAULT_GRACE_MS: u32 = 2_000;
    /// Longer graces are cut to this.
    pub const MAX_GRACE_MS: u32 = 60_000;

    /// The grace to give.
    #[must_use]
    pub fn grace(&self) -> Duration {
        Duration::from_millis(self.grace_ms.min(Self::MAX_GRACE_MS).into())
    }
}

const fn default_grace_ms() -> u32 {
    Shutdown::DEFAULT_GRACE_MS
}

/// Sets the guest's wall clock, which is stale after a resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetTime {
    /// Nanoseconds since the Unix epoch.
    pub unix_ns: u64,
    /// The moment when it was that time, as [`Info::uptime_us`] counts; now, if absent. With it
    /// the clock comes out right however long the request took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uptime_us: Option<u64>,
}

/// Answer to [`SetTime`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeSet {
    /// When the clock was set, as [`Info::uptime_us`] counts.
    pub uptime_us: u64,
}

/// Makes a guest distinct from others of the same image. Absent fields stay as they are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// New host name: 1 to 64 letters, digits, dots or hyphens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// New `/etc/machine-id`: 32 lowercase hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<String>,
    /// 1 to [`Self::MAX_ENTROPY`] secret random bytes, base64. The kernel's generator counts them
    /// as full entropy and reseeds before the call returns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entropy: Option<Blob>,
}

impl Identity {
    /// The most bytes of entropy in one call.
    pub const MAX_ENTROPY: usize = 4_096;
}

/// What a sandbox' owner set for the envd service. Absent fields stay as they are; what is refused
/// changes nothing.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Init {
    /// The token every request but `/health` needs from now on, in `X-Access-Token` or in a file
    /// URL's signature: 1 to [`Self::MAX_TOKEN`] visible ASCII characters. Empty: none is needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_token: Option<String>,
    /// Environment of every process under the request's own, instead of what was set before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envs: Option<BTreeMap<String, String>>,
    /// The user requests act as that name none; it has to exist. Empty: `user` or else `root`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_user: Option<String>,
    /// The absolute path that no path means, so that processes start there which name no directory.
    /// The default user's relative paths start there as well; those of others start at their home.
    /// Empty: the user's home.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_workdir: Option<String>,
}

impl Init {
    /// The most characters of a token.
    pub const MAX_TOKEN: usize = 512;

    /// The most bytes of the whole message.
    pub const MAX_BYTES: usize = 256 * 1024;
}

/// Without the token and the values of the environment, which are secrets.
impl fmt::Debug for Init {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Init")
            .field("access_token", &self.access_token.as_ref().map(|_| ".."))
            .field("envs", &self.envs.as_ref().map(|envs| envs.keys().collect::<Vec<_>>()))
            .field("default_user", &self.default_user)
            .field("default_workdir", &self.default_workdir)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shutdown_has_a_default_grace() {
        let shutdown: Shutdown = serde_json::from_str(r#"{"mode":"poweroff"}"#).unwrap();
        assert_eq!(shutdown, Shutdown { mode: ShutdownMode::Poweroff, grace_ms: 2_000 });
    }

    #[test]
    fn identity_carries_entropy_as_base64() {
        let identity = Identity { entropy: Some(Blob(vec![0, 255])), ..Identity::default() };
        let text = serde_json::to_string(&identity).unwrap();
        assert_eq!(text, r#"{"entropy":"AP8="}"#);
        assert_eq!(serde_json::from_str::<Identity>(&text).unwrap(), identity);
    }

    #[test]
    fn the_debug_form_of_an_init_keeps_its_secrets() {
        let envs = BTreeMap::from([("KEY".to_owned(), "swordfish".to_owned())]);
        let token = Some("swordfish".to_owned());
        let init = Init { access_token: token, envs: Some(envs), ..Init::default() };
        assert!(!format!("{init:?}").contains("swordfish"));
    }
}
