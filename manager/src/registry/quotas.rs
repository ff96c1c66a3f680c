//! How much tenants may have, where that was said.

use rusqlite::{OptionalExtension as _, params};
use serde::{Deserialize, Serialize};

use super::{Error, Registry, Tenant};

/// How much a tenant may have; what is absent is not limited here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quota {
    /// Sandboxes, running and paused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandboxes: Option<u64>,
    /// Memory in MiB of those that are not paused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// vCPUs of those that are not paused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u64>,
}

impl Quota {
    /// With what another says where this says nothing.
    fn or(self, other: Self) -> Self {
        Self {
            sandboxes: self.sandboxes.or(other.sandboxes),
            memory_mib: self.memory_mib.or(other.memory_mib),
            vcpus: self.vcpus.or(other.vcpus),
        }
    }
}

impl Registry {
    /// What a tenant may have, if anybody said.
    ///
    /// # Errors
    /// SQLite's, or [`Error::Row`].
    pub fn quota_of(&self, tenant: &Tenant) -> Result<Option<Quota>, Error> {
        let connection = self.connection();
        let mut find = connection.prepare_cached("SELECT body FROM quotas WHERE tenant = ?1")?;
        let body: Option<String> =
            find.query_row([tenant.as_str()], |row| row.get(0)).optional()?;
        Ok(body.map(|body| serde_json::from_str(&body)).transpose()?)
    }

    /// Says what a tenant may have; what is absent stays as it is.
    ///
    /// # Errors
    /// SQLite's, or [`Error::Row`].
    pub fn set_quota(&self, tenant: &Tenant, quota: Quota) -> Result<(), Error> {
        let quota = quota.or(self.quota_of(tenant)?.unwrap_or_default());
        self.connection().execute(
            "INSERT OR REPLACE INTO quotas (tenant, body) VALUES (?1, ?2)",
            params![tenant.as_str(), serde_json::to_string(&quota)?],
        )?;
        Ok(())
    }
}
