//! Prepared machines without content, so that those of a daemon that died are found.

use super::{Error, Registry};
use crate::store::Id;

impl Registry {
    /// Adds a shell. It is one until a sandbox with its ID is added.
    ///
    /// # Errors
    /// SQLite's.
    pub fn put_shell(&self, id: &Id) -> Result<(), Error> {
        let connection = self.connection();
        let mut put = connection.prepare_cached("INSERT INTO shells (id) VALUES (?1)")?;
        put.execute([id.as_str()])?;
        Ok(())
    }

    /// Removes a shell; no error when it is not there.
    ///
    /// # Errors
    /// SQLite's.
    pub fn remove_shell(&self, id: &Id) -> Result<(), Error> {
        let connection = self.connection();
        let mut remove = connection.prepare_cached("DELETE FROM shells WHERE id = ?1")?;
        remove.execute([id.as_str()])?;
        Ok(())
    }

    /// All shells.
    ///
    /// # Errors
    /// SQLite's.
    pub fn shells(&self) -> Result<Vec<Id>, Error> {
        let connection = self.connection();
        let mut all = connection.prepare("SELECT id FROM shells")?;
        let ids = all.query_map([], |row| row.get::<_, String>(0))?;
        let ids = ids.collect::<Result<Vec<_>, _>>()?;
        Ok(ids.iter().filter_map(|id| Id::parse(id)).collect())
    }
}
