//! What the daemon knows besides the store: API keys, which sandbox is whose and until when,
//! templates. One SQLite file, `COPPICE_HOME/manager.db`.
//!
//! The store says what a sandbox is and stands on; this says what was promised about it. Every
//! change is one transaction that is on disk before it is acknowledged. The calls take well under
//! a millisecond, so they are made on the daemon's thread.

mod builds;
mod events;
mod idempotency;
mod keys;
mod quotas;
mod sandboxes;
mod shells;
mod templates;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, Transaction};
use rustix::fs::{Mode, OFlags, open};
use thiserror::Error;
use tokio::sync::watch;

pub use builds::{Build, BuildState};
pub use events::{Event, Wanted};
pub use idempotency::Earlier;
pub use keys::{ApiKey, NewKey, Tenant};
pub use quotas::Quota;
pub use sandboxes::{OnTimeout, Row, State};
pub use templates::{DEFAULT_TAG, Template, TemplateKind, is_tag};

/// Version of the tables, kept in `user_version`.
const VERSION: i64 = 4;
/// Name of the file.
const FILE: &str = "manager.db";
/// How long to wait for another process, such as `coppice key`, to finish its change.
const BUSY: Duration = Duration::from_secs(10);

const TABLES: &str = "
    CREATE TABLE keys (
        id TEXT PRIMARY KEY, hash BLOB NOT NULL UNIQUE, tenant TEXT NOT NULL,
        created_ms INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE sandboxes (
        id TEXT PRIMARY KEY, tenant TEXT NOT NULL, state TEXT NOT NULL, body TEXT NOT NULL
    ) STRICT;
    CREATE TABLE shells (id TEXT PRIMARY KEY) STRICT;
    CREATE TABLE templates (
        id TEXT PRIMARY KEY, tenant TEXT, kind TEXT NOT NULL, checkpoint TEXT NOT NULL,
        body TEXT NOT NULL
    ) STRICT;
    CREATE TABLE idempotency (
        tenant TEXT NOT NULL, key TEXT NOT NULL, request BLOB NOT NULL, sandbox TEXT NOT NULL,
        created_ms INTEGER NOT NULL, PRIMARY KEY (tenant, key)
    ) STRICT;
    CREATE TABLE events (
        number INTEGER PRIMARY KEY AUTOINCREMENT, at_ms INTEGER NOT NULL, tenant TEXT NOT NULL,
        sandbox TEXT NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL
    ) STRICT;
    CREATE INDEX events_of_sandboxes ON events (sandbox, number);
";

/// What version 2 has besides.
const BUILDS: &str = "
    CREATE TABLE builds (
        id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created_ms INTEGER NOT NULL, body TEXT NOT NULL
    ) STRICT;
";

/// What version 3 has besides.
const QUOTAS: &str = "
    CREATE TABLE quotas (tenant TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT;
";

/// What version 4 has besides.
const NAMES: &str = "
    CREATE INDEX templates_by_name ON templates (json_extract(body, '$.name'));
";

/// What each version has besides the one before, from the first on.
const STEPS: [&str; 4] = [TABLES, BUILDS, QUOTAS, NAMES];

/// Failures of the registry.
#[derive(Debug, Error)]
pub enum Error {
    /// The file cannot be made or opened.
    #[error("the registry {} cannot be opened", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// SQLite failed.
    #[error("the registry cannot be used")]
    Sqlite(#[from] rusqlite::Error),
    /// The file was made by a later version.
    #[error("the registry has version {found}, and this program knows up to {VERSION}")]
    Version {
        /// As found in the file.
        found: i64,
    },
    /// A row cannot be written or read as JSON.
    #[error("a row of the registry is not as it should be")]
    Row(#[from] serde_json::Error),
    /// The system has no random bytes.
    #[error("no key can be drawn")]
    Random(#[source] io::Error),
    /// A tenant's name is not one.
    #[error("a tenant's name has 1 to 63 letters, digits, '_', '.' and '-'")]
    Tenant,
}

impl Error {
    /// Whether there was no space for what was to be written.
    pub fn is_full(&self) -> bool {
        let Self::Sqlite(error) = self else { return false };
        error.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull)
    }
}

/// The open registry.
#[derive(Debug)]
pub struct Registry {
    connection: Mutex<Connection>,
    /// There are new events.
    changes: watch::Sender<()>,
}

impl Registry {
    /// Opens the registry below a home directory, and makes it when it is not there.
    ///
    /// # Errors
    /// [`Error::Open`], [`Error::Version`], or SQLite's.
    pub fn open(home: &Path) -> Result<Self, Error> {
        let path = home.join(FILE);
        // Made here, so that nobody else can read it from its first byte on.
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        open(&path, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|e| Error::Open { path: path.clone(), source: e.into() })?;
        Self::with(Connection::open(&path)?)
    }

    /// Opens the registry below a home directory if there is one.
    ///
    /// # Errors
    /// As for [`Registry::open`].
    pub fn existing(home: &Path) -> Result<Option<Self>, Error> {
        match home.join(FILE).exists() {
            true => Self::open(home).map(Some),
            false => Ok(None),
        }
    }

    fn with(mut connection: Connection) -> Result<Self, Error> {
        connection.busy_timeout(BUSY)?;
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "FULL")?;
        let change =
            connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
        let found: i64 = change.pragma_query_value(None, "user_version", |row| row.get(0))?;
        let had = usize::try_from(found).map_err(|_| Error::Version { found })?;
        for step in STEPS.get(had..).ok_or(Error::Version { found })? {
            change.execute_batch(step)?;
        }
        change.pragma_update(None, "user_version", VERSION)?;
        change.commit()?;
        Ok(Self { connection: Mutex::new(connection), changes: watch::Sender::default() })
    }

    /// Commits a change that may have events in it, and tells of them.
    fn commit(&self, change: Transaction<'_>) -> Result<(), Error> {
        change.commit()?;
        self.changes.send_replace(());
        Ok(())
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        // A panic cannot leave a change half done: it was rolled back.
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Milliseconds since 1970.
pub fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// Milliseconds as SQLite has them.
fn sql_ms(ms: u64) -> i64 {
    i64::try_from(ms).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
