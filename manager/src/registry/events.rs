//! What happened to sandboxes, for people and for the API's logs.

use rusqlite::{Transaction, params};
use serde::Serialize;

use super::{Error, Registry, Tenant, now_ms, sql_ms};
use crate::store::Id;

/// How many are kept; the oldest go first.
const KEPT: i64 = 10_000;

/// Something that happened to a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Event {
    /// Its number; later ones have higher numbers.
    pub number: i64,
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// Whose sandbox it is.
    pub tenant: Tenant,
    /// The sandbox.
    pub sandbox: String,
    /// What kind of event: a state's name, or `gone`.
    pub kind: String,
    /// More about it, if there is more.
    pub text: String,
}

/// Adds an event as part of a change.
pub(super) fn add(
    change: &Transaction<'_>,
    tenant: &Tenant,
    sandbox: &Id,
    kind: &str,
    text: &str,
) -> rusqlite::Result<()> {
    change
        .prepare_cached(
            "INSERT INTO events (at_ms, tenant, sandbox, kind, text) VALUES (?1, ?2, ?3, ?4, ?5)",
        )?
        .execute(params![sql_ms(now_ms()), tenant.as_str(), sandbox.as_str(), kind, text])?;
    let oldest = change.last_insert_rowid().saturating_sub(KEPT);
    change.prepare_cached("DELETE FROM events WHERE number <= ?1")?.execute([oldest])?;
    Ok(())
}

impl Registry {
    /// Events of a sandbox, oldest first, at most `limit`: the last ones.
    ///
    /// # Errors
    /// SQLite's.
    pub fn events_of(&self, sandbox: &Id, limit: usize) -> Result<Vec<Event>, Error> {
        let connection = self.connection();
        let mut find = connection.prepare_cached(
            "SELECT number, at_ms, tenant, sandbox, kind, text FROM events
             WHERE sandbox = ?1 ORDER BY number DESC LIMIT ?2",
        )?;
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let found = find.query_map(params![sandbox.as_str(), limit], event)?;
        let mut events = found.collect::<Result<Vec<_>, _>>()?;
        events.reverse();
        Ok(events)
    }

    /// Events of all sandboxes after the one with this number, oldest first, at most `limit`.
    ///
    /// # Errors
    /// SQLite's.
    pub fn events_after(&self, number: i64, limit: usize) -> Result<Vec<Event>, Error> {
        let connection = self.connection();
        let mut find = connection.prepare_cached(
            "SELECT number, at_ms, tenant, sandbox, kind, text FROM events
             WHERE number > ?1 ORDER BY number LIMIT ?2",
        )?;
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let found = find.query_map(params![number, limit], event)?;
        Ok(found.collect::<Result<_, _>>()?)
    }
}

fn event(row: &rusqlite::Row<'_>) -> rusqlite::Result<Event> {
    Ok(Event {
        number: row.get(0)?,
        at_ms: u64::try_from(row.get::<_, i64>(1)?).unwrap_or_default(),
        tenant: Tenant::from_row(row.get(2)?),
        sandbox: row.get(3)?,
        kind: row.get(4)?,
        text: row.get(5)?,
    })
}
