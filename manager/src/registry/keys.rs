//! API keys: drawn once, shown once, kept as a hash.

use rusqlite::{OptionalExtension as _, params};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{Error, Registry, now_ms, sql_ms};
use crate::random::{hex, random_bytes};
use crate::store::Name;

/// What every key begins with; E2B's clients look for it.
const PREFIX: &str = "e2b_";
/// Random bytes of a key.
const SECRET: usize = 20;

/// Who a key belongs to. Tenants do not see each other.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Tenant(String);

impl Tenant {
    /// A tenant of this name: as a sandbox's name has to be.
    ///
    /// # Errors
    /// [`Error::Tenant`].
    pub fn new(name: &str) -> Result<Self, Error> {
        let name: Name = name.parse().map_err(|_| Error::Tenant)?;
        Ok(Self(name.into()))
    }

    /// Its name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub(super) fn from_row(name: String) -> Self {
        Self(name)
    }
}

/// A key as it is listed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ApiKey {
    /// What it is called here: 8 letters and digits that say nothing about it.
    pub id: String,
    /// Whose it is.
    pub tenant: Tenant,
    /// When it was made, in milliseconds since 1970.
    pub created_ms: u64,
}

/// A key that was just made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NewKey {
    /// How it is listed.
    #[serde(flatten)]
    pub listed: ApiKey,
    /// The key itself: `e2b_` and 40 hexadecimal digits. It cannot be had again.
    pub key: String,
}

/// A key has 160 random bits, so a plain hash cannot be turned back.
fn hash(key: &str) -> Vec<u8> {
    Sha256::digest(key.as_bytes()).to_vec()
}

impl Registry {
    /// Makes a key for a tenant.
    ///
    /// # Errors
    /// [`Error::Random`], or SQLite's.
    pub fn create_key(&self, tenant: Tenant) -> Result<NewKey, Error> {
        let secret = random_bytes::<SECRET>().map_err(Error::Random)?;
        let id = hex(&random_bytes::<4>().map_err(Error::Random)?);
        let key = format!("{PREFIX}{}", hex(&secret));
        let created_ms = now_ms();
        self.connection().execute(
            "INSERT INTO keys (id, hash, tenant, created_ms) VALUES (?1, ?2, ?3, ?4)",
            params![id, hash(&key), tenant.as_str(), sql_ms(created_ms)],
        )?;
        Ok(NewKey { listed: ApiKey { id, tenant, created_ms }, key })
    }

    /// Whose key this is; nothing when it is nobody's.
    ///
    /// # Errors
    /// SQLite's.
    pub fn tenant_of(&self, key: &str) -> Result<Option<Tenant>, Error> {
        let connection = self.connection();
        let mut find = connection.prepare_cached("SELECT tenant FROM keys WHERE hash = ?1")?;
        let found = find.query_row([hash(key)], |row| row.get(0)).optional()?;
        Ok(found.map(Tenant::from_row))
    }

    /// All keys, oldest first.
    ///
    /// # Errors
    /// SQLite's.
    pub fn keys(&self) -> Result<Vec<ApiKey>, Error> {
        let connection = self.connection();
        let mut all = connection
            .prepare("SELECT id, tenant, created_ms FROM keys ORDER BY created_ms, id")?;
        let keys = all.query_map([], |row| {
            Ok(ApiKey {
                id: row.get(0)?,
                tenant: Tenant::from_row(row.get(1)?),
                created_ms: u64::try_from(row.get::<_, i64>(2)?).unwrap_or_default(),
            })
        })?;
        Ok(keys.collect::<Result<_, _>>()?)
    }

    /// Removes a key; whether there was one.
    ///
    /// # Errors
    /// SQLite's.
    pub fn remove_key(&self, id: &str) -> Result<bool, Error> {
        Ok(self.connection().execute("DELETE FROM keys WHERE id = ?1", [id])? > 0)
    }
}
