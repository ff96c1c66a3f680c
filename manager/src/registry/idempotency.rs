//! Requests that were answered before: a client that did not hear the answer asks again.

use rusqlite::{OptionalExtension as _, params};
use sha2::{Digest as _, Sha256};

use super::{Error, Registry, Tenant, now_ms, sql_ms};
use crate::store::Id;

/// How long a key is remembered.
const KEPT_MS: u64 = 24 * 60 * 60 * 1000;

/// What is known of an idempotency key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Earlier {
    /// Nothing.
    Nothing,
    /// The same request made this sandbox.
    Made(Id),
    /// Another request came with it.
    Other,
}

impl Registry {
    /// What came of an earlier request with this key.
    ///
    /// # Errors
    /// SQLite's.
    pub fn earlier(&self, tenant: &Tenant, key: &str, request: &[u8]) -> Result<Earlier, Error> {
        let since = sql_ms(now_ms().saturating_sub(KEPT_MS));
        let connection = self.connection();
        let found: Option<(Vec<u8>, String)> = connection
            .query_row(
                "SELECT request, sandbox FROM idempotency
                 WHERE tenant = ?1 AND key = ?2 AND created_ms > ?3",
                params![tenant.as_str(), key, since],
                |row| Ok((row.get(0)?, row.get(1)?)),
            )
            .optional()?;
        Ok(match found {
            None => Earlier::Nothing,
            Some((hash, _)) if hash != Sha256::digest(request).to_vec() => Earlier::Other,
            Some((_, sandbox)) => Id::parse(&sandbox).map_or(Earlier::Nothing, Earlier::Made),
        })
    }

    /// Remembers which sandbox a request with this key made, and forgets old ones.
    ///
    /// # Errors
    /// SQLite's.
    pub fn remember(
        &self,
        tenant: &Tenant,
        key: &str,
        request: &[u8],
        sandbox: &Id,
    ) -> Result<(), Error> {
        let connection = self.connection();
        let now = now_ms();
        connection.execute(
            "DELETE FROM idempotency WHERE created_ms <= ?1",
            [sql_ms(now.saturating_sub(KEPT_MS))],
        )?;
        connection.execute(
            "INSERT OR REPLACE INTO idempotency (tenant, key, request, sandbox, created_ms)
             VALUES (?1, ?2, ?3, ?4, ?5)",
            params![
                tenant.as_str(),
                key,
                Sha256::digest(request).to_vec(),
                sandbox.as_str(),
                sql_ms(now)
            ],
        )?;
        Ok(())
    }
}
