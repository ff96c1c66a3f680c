//! Sandboxes of the daemon: whose they are, in which state, and until when.

use std::collections::BTreeMap;

use rusqlite::params;
use serde::{Deserialize, Serialize};

use super::{Error, Registry, Tenant};
use crate::store::Id;

/// What a sandbox is doing, as far as it was promised. What ends in "ing" is settled when the
/// daemon starts again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It is being made; nobody was told of it.
    Creating,
    /// Its machine runs.
    Running,
    /// It is on its way to [`State::Paused`].
    Pausing,
    /// It is suspended.
    Paused,
    /// It is on its way back.
    Resuming,
    /// It is being removed.
    Killing,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Running => "running",
            Self::Pausing => "pausing",
            Self::Paused => "paused",
            Self::Resuming => "resuming",
            Self::Killing => "killing",
        }
    }
}

/// What happens to a sandbox whose time is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnTimeout {
    /// It is removed.
    Kill,
    /// It is suspended.
    Pause,
}

/// A sandbox of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// Its ID, in the store as well.
    pub id: Id,
    /// Whose it is.
    pub tenant: Tenant,
    /// Its state.
    pub state: State,
    /// The template or snapshot it was made from, as it is known to users.
    pub template: String,
    /// The template's name, if it has one.
    pub alias: Option<String>,
    /// When it began to run, last, in milliseconds since 1970.
    pub started_ms: u64,
    /// When its time is over.
    pub end_ms: u64,
    /// What happens then.
    pub on_timeout: OnTimeout,
    /// Whether a request to it resumes it.
    pub auto_resume: bool,
    /// What its maker wrote on it.
    pub metadata: BTreeMap<String, String>,
    /// The checkpoint it is suspended at.
    pub pause: Option<Id>,
}

impl Registry {
    /// Adds or replaces a sandbox.
    ///
    /// # Errors
    /// SQLite's.
    pub fn put_sandbox(&self, row: &Row) -> Result<(), Error> {
        let body = serde_json::to_string(row)?;
        let connection = self.connection();
        let mut put = connection.prepare_cached(
            "INSERT OR REPLACE INTO sandboxes (id, tenant, state, body) VALUES (?1, ?2, ?3, ?4)",
        )?;
        put.execute(params![row.id.as_str(), row.tenant.as_str(), row.state.name(), body])?;
        Ok(())
    }

    /// Removes a sandbox; no error when it is not there.
    ///
    /// # Errors
    /// SQLite's.
    pub fn remove_sandbox(&self, id: &Id) -> Result<(), Error> {
        let connection = self.connection();
        let mut remove = connection.prepare_cached("DELETE FROM sandboxes WHERE id = ?1")?;
        remove.execute([id.as_str()])?;
        Ok(())
    }

    /// All sandboxes.
    ///
    /// # Errors
    /// SQLite's, or [`Error::Row`].
    pub fn sandboxes(&self) -> Result<Vec<Row>, Error> {
        let connection = self.connection();
        let mut all = connection.prepare("SELECT body FROM sandboxes")?;
        let bodies = all.query_map([], |row| row.get::<_, String>(0))?;
        bodies.map(|body| Ok(serde_json::from_str(&body?)?)).collect()
    }
}
