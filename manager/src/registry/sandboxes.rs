//! Sandboxes of the daemon: whose they are, in which state, and until when.

use std::collections::BTreeMap;

use rusqlite::{OptionalExtension as _, params};
use serde::{Deserialize, Serialize};

use super::{Error, Registry, Tenant, events};
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
    /// All there are.
    pub const ALL: [Self; 6] =
        [Self::Creating, Self::Running, Self::Pausing, Self::Paused, Self::Resuming, Self::Killing];

    /// Its name, as in the registry and in events.
    pub fn name(self) -> &'static str {
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
    /// Adds or replaces a sandbox; a new state is an event.
    ///
    /// # Errors
    /// SQLite's.
    pub fn put_sandbox(&self, row: &Row) -> Result<(), Error> {
        let body = serde_json::to_string(row)?;
        let mut connection = self.connection();
        let change = connection.transaction()?;
        let before: Option<String> = change
            .prepare_cached("SELECT state FROM sandboxes WHERE id = ?1")?
            .query_row([row.id.as_str()], |found| found.get(0))
            .optional()?;
        let state = row.state.name();
        change
            .prepare_cached(
                "INSERT OR REPLACE INTO sandboxes (id, tenant, state, body)
                 VALUES (?1, ?2, ?3, ?4)",
            )?
            .execute(params![row.id.as_str(), row.tenant.as_str(), state, body])?;
        if before.is_none() {
            // It may have been a shell.
            change
                .prepare_cached("DELETE FROM shells WHERE id = ?1")?
                .execute([row.id.as_str()])?;
        }
        if before.as_deref() != Some(state) {
            events::add(&change, &row.tenant, &row.id, state, "")?;
        }
        self.commit(change)
    }

    /// Removes a sandbox, which is an event, for the reason `why`; no error when it is not there.
    ///
    /// # Errors
    /// SQLite's.
    pub fn remove_sandbox(&self, row: &Row, why: &str) -> Result<(), Error> {
        let mut connection = self.connection();
        let change = connection.transaction()?;
        let removed = change
            .prepare_cached("DELETE FROM sandboxes WHERE id = ?1")?
            .execute([row.id.as_str()])?;
        if removed > 0 {
            events::add(&change, &row.tenant, &row.id, "gone", why)?;
        }
        self.commit(change)
    }

    /// A sandbox.
    ///
    /// # Errors
    /// SQLite's, or [`Error::Row`].
    pub fn sandbox(&self, id: &Id) -> Result<Option<Row>, Error> {
        let connection = self.connection();
        let mut find = connection.prepare_cached("SELECT body FROM sandboxes WHERE id = ?1")?;
        let body: Option<String> = find.query_row([id.as_str()], |row| row.get(0)).optional()?;
        Ok(body.map(|body| serde_json::from_str(&body)).transpose()?)
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
