//! What happened to sandboxes, for people and for the API's logs.

use rusqlite::{Transaction, params};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::{Error, Registry, Row, Tenant, now_ms, sql_ms};
use crate::store::Id;

/// How many are kept; the oldest go first.
const KEPT: i64 = 10_000;

/// Something that happened to a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Its number; later ones have higher numbers.
    pub number: i64,
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// Whose sandbox it is.
    pub tenant: Tenant,
    /// The sandbox.
    pub sandbox: String,
    /// What kind of event: a state's name, `checkpoint`, `rollback`, or `gone`.
    pub kind: String,
    /// More about it, if there is more.
    pub text: String,
}

/// Which events are wanted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wanted {
    /// Those after the one with this number.
    #[serde(default)]
    pub after: i64,
    /// Those since then, in milliseconds since 1970.
    #[serde(default)]
    pub since_ms: u64,
    /// Those of this sandbox only.
    pub sandbox: Option<String>,
}

/// Events that were read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// The events, oldest first.
    pub events: Vec<Event>,
    /// How many after [`Wanted::after`], wanted or not, are not kept any more.
    pub dropped: i64,
    /// The number up to which nothing more is wanted: where to go on from.
    pub read_to: i64,
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

    /// Events that are wanted, at most `limit`: the first ones.
    ///
    /// # Errors
    /// SQLite's.
    pub fn events(&self, wanted: &Wanted, limit: usize) -> Result<Page, Error> {
        let mut connection = self.connection();
        // All of it as it was at one moment, whoever writes meanwhile.
        let moment = connection.transaction()?;
        let Wanted { after, since_ms, sandbox } = wanted;
        let mut find = moment.prepare_cached(
            "SELECT number, at_ms, tenant, sandbox, kind, text FROM events
             WHERE number > ?1 AND at_ms >= ?2 AND (?3 IS NULL OR sandbox = ?3)
             ORDER BY number LIMIT ?4",
        )?;
        let most = i64::try_from(limit).unwrap_or(i64::MAX);
        let found = find.query_map(params![after, sql_ms(*since_ms), sandbox, most], event)?;
        let events = found.collect::<Result<Vec<_>, _>>()?;
        let mut kept = moment.prepare_cached("SELECT MIN(number), MAX(number) FROM events")?;
        let (oldest, newest): (Option<i64>, Option<i64>) =
            kept.query_row([], |row| Ok((row.get(0)?, row.get(1)?)))?;
        let dropped = oldest.unwrap_or_default().saturating_sub(*after).saturating_sub(1);
        let read_to = match events.last() {
            Some(last) if events.len() >= limit => last.number,
            // None up to the newest are wanted.
            _ => newest.unwrap_or_default().max(*after),
        };
        Ok(Page { events, dropped: dropped.max(0), read_to })
    }

    /// Tells whenever there are events that were not there before. Only of changes that this
    /// process makes; whoever asks before it reads misses none.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// Adds an event that changes nothing that was promised.
    ///
    /// # Errors
    /// SQLite's.
    pub fn note(&self, row: &Row, kind: &str, text: &str) -> Result<(), Error> {
        let mut connection = self.connection();
        let change = connection.transaction()?;
        add(&change, &row.tenant, &row.id, kind, text)?;
        self.commit(change)
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
