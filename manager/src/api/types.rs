//! Bodies of requests and answers, as E2B's clients write and read them.

use std::collections::BTreeMap;

use axum::body::Bytes;
use coppice_agent_protocol::ENVD_VERSION;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use utoipa::ToSchema;

use super::{Api, ErrorBody, Failure};
use crate::fleet::Shown;
use crate::registry::{OnTimeout, State};

/// What clients want to see as the ID of whoever runs a sandbox.
const CLIENT: &str = "coppice";
/// The longest time a sandbox may be given, in seconds: 30 days.
const MAX_TIMEOUT: u64 = 30 * 24 * 60 * 60;
/// The last second of the year 9999, in milliseconds since 1970.
const LAST_MS: u64 = 253_402_300_799_000;

/// A body of JSON; an empty one stands for `{}`.
pub(super) fn parse<T: DeserializeOwned>(body: &Bytes) -> Result<T, Failure> {
    let text: &[u8] = if body.is_empty() { b"{}" } else { body };
    serde_json::from_slice(text)
        .map_err(|error| Failure::bad(format!("the body is wrong: {error}")))
}

/// Seconds as milliseconds, within what is allowed.
pub(super) fn timeout_ms(seconds: u64) -> Result<u64, Failure> {
    if seconds > MAX_TIMEOUT {
        return Err(Failure::bad(format!("a timeout has at most {MAX_TIMEOUT} seconds")));
    }
    Ok(seconds * 1000)
}

/// Refuses what would need a start without memory.
pub(super) fn with_memory(memory: Option<bool>) -> Result<(), Failure> {
    match memory {
        Some(false) => Err(Failure::bad("memory: false is not supported: leave it out")),
        _ => Ok(()),
    }
}

/// Whether traffic to a paused sandbox resumes it.
#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
pub(super) struct AutoResume {
    #[serde(default)]
    pub(super) enabled: bool,
}

/// A sandbox that is asked for.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct NewSandbox {
    /// A template's or snapshot's ID or name.
    #[serde(rename = "templateID")]
    pub(super) template_id: String,
    /// Seconds it may live.
    pub(super) timeout: Option<u64>,
    /// Whether it is paused when its time is over, and not removed.
    #[serde(default)]
    pub(super) auto_pause: bool,
    /// Has to be true or absent.
    pub(super) auto_pause_memory: Option<bool>,
    pub(super) auto_resume: Option<AutoResume>,
    /// Whether its agent wants to see the token in the answer (first version only; the second
    /// always has it).
    pub(super) secure: Option<bool>,
    pub(super) metadata: Option<BTreeMap<String, String>>,
    /// Variables that every process in it has.
    pub(super) env_vars: Option<BTreeMap<String, String>>,
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub(super) network: serde_json::Value,
    #[serde(default)]
    #[schema(value_type = Option<Vec<Object>>)]
    pub(super) volume_mounts: serde_json::Value,
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub(super) mcp: serde_json::Value,
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub(super) iam: serde_json::Value,
}

/// A sandbox that was made, or that goes on.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Sandbox {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: &'static str,
    envd_version: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    envd_access_token: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    alias: Option<String>,
    domain: String,
}

impl Sandbox {
    pub(super) fn of(shown: Shown, api: &Api) -> Self {
        Self {
            template_id: shown.row.template,
            sandbox_id: shown.row.id.into(),
            client_id: CLIENT,
            envd_version: ENVD_VERSION,
            envd_access_token: shown.token,
            alias: shown.row.alias,
            domain: api.domain.to_string(),
        }
    }
}

/// A sandbox in a list, or asked for by its ID.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Listed {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    alias: Option<String>,
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: &'static str,
    started_at: String,
    end_at: String,
    cpu_count: u8,
    #[serde(rename = "memoryMB")]
    memory_mb: u32,
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u64,
    metadata: BTreeMap<String, String>,
    state: &'static str,
    envd_version: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    envd_access_token: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    domain: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lifecycle: Option<Lifecycle>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pause_mode: Option<&'static str>,
}

/// What happens to a sandbox in time.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Lifecycle {
    auto_resume: bool,
    on_timeout: &'static str,
}

impl Listed {
    /// As in a list.
    pub(super) fn of(shown: Shown) -> Self {
        let row = shown.row;
        Self {
            template_id: row.template,
            alias: row.alias,
            sandbox_id: row.id.into(),
            client_id: CLIENT,
            started_at: rfc3339(row.started_ms),
            end_at: rfc3339(row.end_ms),
            cpu_count: shown.machine.as_ref().map_or(0, |machine| machine.vcpus),
            memory_mb: shown.machine.as_ref().map_or(0, |machine| machine.memory_mib),
            disk_size_mb: shown.disk_bytes >> 20,
            metadata: row.metadata,
            state: state_word(row.state),
            envd_version: ENVD_VERSION,
            envd_access_token: None,
            domain: None,
            lifecycle: None,
            pause_mode: None,
        }
    }

    /// With all that only its owner asks for.
    pub(super) fn whole(shown: Shown, api: &Api) -> Self {
        let token = shown.token.clone();
        let on_timeout = match shown.row.on_timeout {
            OnTimeout::Kill => "kill",
            OnTimeout::Pause => "pause",
        };
        let lifecycle = Lifecycle { auto_resume: shown.row.auto_resume, on_timeout };
        let pause_mode = (shown.row.state == State::Paused).then_some("full");
        Self {
            envd_access_token: token,
            domain: Some(api.domain.to_string()),
            lifecycle: Some(lifecycle),
            pause_mode,
            ..Self::of(shown)
        }
    }
}

/// States as clients know them: on the way there is where it was.
pub(super) fn state_word(state: State) -> &'static str {
    match state {
        State::Creating | State::Running | State::Pausing => "running",
        State::Paused | State::Resuming | State::Killing => "paused",
    }
}

/// Seconds that a sandbox has left.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub(super) struct Timeout {
    pub(super) timeout: u64,
}

/// Seconds that a sandbox is to have left at least.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub(super) struct Refresh {
    pub(super) duration: Option<u64>,
}

/// How a sandbox is paused.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub(super) struct Pause {
    /// Has to be true or absent.
    pub(super) memory: Option<bool>,
}

/// How a sandbox goes on.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub(super) struct Resume {
    /// Seconds it has from then on.
    pub(super) timeout: Option<u64>,
    /// Has to be true or absent.
    pub(super) memory: Option<bool>,
}

/// A snapshot that is asked for.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub(super) struct NewSnapshot {
    pub(super) name: Option<String>,
    /// Has to be true or absent.
    pub(super) memory: Option<bool>,
}

/// A snapshot; its ID is a template's.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(super) struct Snapshot {
    #[serde(rename = "snapshotID")]
    pub(super) snapshot_id: String,
    pub(super) names: Vec<String>,
}

/// How a sandbox is forked.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub(super) struct Fork {
    /// Seconds that the new ones have.
    pub(super) timeout: Option<u64>,
    /// How many there will be: 1 to 100.
    pub(super) count: Option<usize>,
}

/// What became of one fork.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) enum Forked {
    Sandbox(Sandbox),
    Error(ErrorBody),
}

/// Where a sandbox goes back to.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub(super) struct Rollback {
    /// A snapshot of its tree: its ID or name.
    #[serde(rename = "snapshotID")]
    pub(super) snapshot_id: String,
}

/// The tree that a sandbox grew in.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Tree {
    /// Snapshots, by time.
    pub(super) snapshots: Vec<Node>,
    /// The one that the sandbox stands on.
    #[serde(rename = "standsOn")]
    pub(super) stands_on: Option<String>,
}

/// A snapshot in a tree.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Node {
    #[serde(rename = "snapshotID")]
    pub(super) snapshot_id: String,
    pub(super) name: Option<String>,
    /// The snapshot it stands on.
    #[serde(rename = "parentID")]
    pub(super) parent_id: Option<String>,
    pub(super) created_at: String,
    pub(super) memory_bytes: u64,
    pub(super) disk_bytes: u64,
}

/// What changed between two states.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Difference {
    /// Files that differ, by disk and path.
    pub(super) files: Vec<ChangedFile>,
    /// Bytes of memory that were written between the two, on either way to where they meet.
    pub(super) memory_bytes: u64,
}

/// A file that differs.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(super) struct ChangedFile {
    /// The disk's position.
    pub(super) disk: usize,
    /// `added`, `modified` or `deleted`.
    pub(super) change: &'static str,
    pub(super) path: String,
}

/// A time in milliseconds since 1970 as RFC 3339 has it, in UTC; what is after the year 9999 as
/// its last second.
pub(super) fn rfc3339(ms: u64) -> String {
    let time = i128::from(ms.min(LAST_MS)) * 1_000_000;
    let time = OffsetDateTime::from_unix_timestamp_nanos(time).ok();
    time.and_then(|time| time.format(&Rfc3339).ok()).unwrap_or_default()
}

/// The other way round; nothing for other texts and for what is before 1970.
pub(super) fn from_rfc3339(text: &str) -> Option<u64> {
    let time = OffsetDateTime::parse(text, &Rfc3339).ok()?;
    u64::try_from(time.unix_timestamp_nanos() / 1_000_000).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_clients_read_them() {
        assert_eq!(rfc3339(951_782_400_123), "2000-02-29T00:00:00.123Z");
        assert_eq!(rfc3339(u64::MAX), "9999-12-31T23:59:59Z");
        assert_eq!(from_rfc3339("2000-02-29T01:00:00.123+01:00"), Some(951_782_400_123));
        assert_eq!(from_rfc3339("yesterday"), None);
    }

    #[test]
    fn an_empty_body_is_an_empty_object() {
        assert!(parse::<Pause>(&Bytes::new()).unwrap().memory.is_none());
        parse::<Timeout>(&Bytes::new()).unwrap_err();
    }
}
