//! Builds of templates: what was asked for, and what came of it.

use rusqlite::{OptionalExtension as _, params};
use serde::{Deserialize, Serialize};

use super::{Error, Registry, Tenant, sql_ms};

/// The most builds of a tenant that are remembered.
const REMEMBERED: i64 = 500;

/// How far a build is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BuildState {
    /// It was asked for and not started: files may be uploaded.
    Waiting,
    /// It is under way.
    Building,
    /// Its template can be used.
    Ready,
    /// It failed.
    Error,
}

/// A build of a template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Build {
    /// Its ID, a UUID.
    pub id: String,
    /// ID that its template has once it is ready.
    pub template: String,
    /// Whose it is.
    pub tenant: Tenant,
    /// Name that its template will have.
    pub name: String,
    /// Tags that its template will have.
    pub tags: Vec<String>,
    /// Number of vCPUs, if it was asked for.
    pub vcpus: Option<u8>,
    /// Memory in MiB, if it was asked for.
    pub memory_mib: Option<u32>,
    /// How far it is.
    pub state: BuildState,
    /// The step that failed.
    pub step: Option<String>,
    /// Why it failed.
    pub reason: Option<String>,
    /// When it was asked for, in milliseconds since 1970.
    pub created_ms: u64,
}

impl Registry {
    /// Adds or replaces a build; the oldest of its tenant are forgotten when there are too many.
    ///
    /// # Errors
    /// SQLite's.
    pub fn put_build(&self, build: &Build) -> Result<(), Error> {
        let body = serde_json::to_string(build)?;
        let mut connection = self.connection();
        let change = connection.transaction()?;
        change.execute(
            "INSERT OR REPLACE INTO builds (id, tenant, created_ms, body) VALUES (?1, ?2, ?3, ?4)",
            params![build.id, build.tenant.as_str(), sql_ms(build.created_ms), body],
        )?;
        change.execute(
            "DELETE FROM builds WHERE tenant = ?1 AND id NOT IN
             (SELECT id FROM builds WHERE tenant = ?1 ORDER BY created_ms DESC, id LIMIT ?2)",
            params![build.tenant.as_str(), REMEMBERED],
        )?;
        Ok(change.commit()?)
    }

    /// A tenant's build.
    ///
    /// # Errors
    /// SQLite's, or [`Error::Row`].
    pub fn build(&self, tenant: &Tenant, id: &str) -> Result<Option<Build>, Error> {
        let connection = self.connection();
        let body: Option<String> = connection
            .query_row(
                "SELECT body FROM builds WHERE id = ?1 AND tenant = ?2",
                params![id, tenant.as_str()],
                |row| row.get(0),
            )
            .optional()?;
        Ok(body.map(|body| serde_json::from_str(&body)).transpose()?)
    }

    /// All builds of a tenant, oldest first.
    ///
    /// # Errors
    /// SQLite's, or [`Error::Row`].
    pub fn builds(&self, tenant: &Tenant) -> Result<Vec<Build>, Error> {
        let connection = self.connection();
        let mut all = connection
            .prepare_cached("SELECT body FROM builds WHERE tenant = ?1 ORDER BY created_ms, id")?;
        let bodies = all.query_map([tenant.as_str()], |row| row.get::<_, String>(0))?;
        bodies.map(|body| Ok(serde_json::from_str(&body?)?)).collect()
    }

    /// Has all builds that are under way be failed ones, for the reason `why`: to be called when
    /// nobody works on them any more.
    ///
    /// # Errors
    /// SQLite's, or [`Error::Row`].
    pub fn interrupt_builds(&self, why: &str) -> Result<(), Error> {
        let mut interrupted = {
            let connection = self.connection();
            let mut all = connection.prepare("SELECT body FROM builds")?;
            let bodies = all.query_map([], |row| row.get::<_, String>(0))?;
            let read = bodies.map(|body| Ok(serde_json::from_str(&body?)?));
            read.collect::<Result<Vec<Build>, Error>>()?
        };
        interrupted.retain(|build| build.state == BuildState::Building);
        for build in interrupted {
            let (state, reason) = (BuildState::Error, Some(why.to_owned()));
            self.put_build(&Build { state, reason, ..build })?;
        }
        Ok(())
    }
}
