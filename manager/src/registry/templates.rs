//! Templates, and snapshots of sandboxes: checkpoints that sandboxes are made from.

use rusqlite::{OptionalExtension as _, params};
use serde::{Deserialize, Serialize};

use super::{Error, Registry, Tenant};
use crate::store::Id;

/// How a template came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TemplateKind {
    /// It was built.
    Template,
    /// It is a snapshot of a sandbox.
    Snapshot,
}

/// A template or snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Template {
    /// Its ID; of a snapshot, that of its checkpoint.
    pub id: String,
    /// Whose it is; everybody's if it is nobody's.
    pub tenant: Option<Tenant>,
    /// How it came about.
    pub kind: TemplateKind,
    /// Its name.
    pub name: Option<String>,
    /// What sandboxes go on from.
    pub checkpoint: Id,
    /// The sandbox it is a snapshot of.
    pub sandbox: Option<Id>,
    /// When it was made, in milliseconds since 1970.
    pub created_ms: u64,
}

impl Registry {
    /// Adds or replaces a template.
    ///
    /// # Errors
    /// SQLite's.
    pub fn put_template(&self, template: &Template) -> Result<(), Error> {
        let body = serde_json::to_string(template)?;
        let kind = match template.kind {
            TemplateKind::Template => "template",
            TemplateKind::Snapshot => "snapshot",
        };
        let tenant = template.tenant.as_ref().map(Tenant::as_str);
        self.connection().execute(
            "INSERT OR REPLACE INTO templates (id, tenant, kind, checkpoint, body)
             VALUES (?1, ?2, ?3, ?4, ?5)",
            params![template.id, tenant, kind, template.checkpoint.as_str(), body],
        )?;
        Ok(())
    }

    /// Adds a template instead of those of its owner with its name, which are returned.
    ///
    /// # Errors
    /// SQLite's, or [`Error::Row`].
    pub fn replace_template(&self, template: &Template) -> Result<Vec<Template>, Error> {
        let mut replaced = self.all_templates()?;
        replaced.retain(|old| {
            (old.kind, &old.tenant, &old.name) == (template.kind, &template.tenant, &template.name)
                && old.id != template.id
        });
        // The new one first: there is always one with the name.
        self.put_template(template)?;
        for old in &replaced {
            self.drop_template(&old.id)?;
        }
        Ok(replaced)
    }

    /// All templates and snapshots, oldest first.
    ///
    /// # Errors
    /// SQLite's, or [`Error::Row`].
    pub fn all_templates(&self) -> Result<Vec<Template>, Error> {
        let connection = self.connection();
        let mut all = connection.prepare_cached("SELECT body FROM templates")?;
        let bodies = all.query_map([], |row| row.get::<_, String>(0))?;
        let read = bodies.map(|body| Ok(serde_json::from_str(&body?)?));
        let mut all = read.collect::<Result<Vec<Template>, Error>>()?;
        all.sort_by(|a, b| (a.created_ms, &a.id).cmp(&(b.created_ms, &b.id)));
        Ok(all)
    }

    /// Removes a template, whoever it belongs to.
    ///
    /// # Errors
    /// SQLite's.
    pub fn drop_template(&self, id: &str) -> Result<(), Error> {
        self.connection().execute("DELETE FROM templates WHERE id = ?1", [id])?;
        Ok(())
    }

    /// The template with this ID or name that a tenant may use; its own go before everybody's.
    ///
    /// # Errors
    /// SQLite's, or [`Error::Row`].
    pub fn template(&self, tenant: &Tenant, reference: &str) -> Result<Option<Template>, Error> {
        let usable = self.templates(tenant)?;
        let is = |template: &&Template| {
            template.id == reference || template.name.as_deref() == Some(reference)
        };
        // The newest of a name: while it is replaced there are two.
        let own = usable.iter().filter(is).filter(|template| template.tenant.is_some());
        let newest = |template: &&Template| template.created_ms;
        let own = own.max_by_key(newest);
        Ok(own.or_else(|| usable.iter().filter(is).max_by_key(newest)).cloned())
    }

    /// The template of this name that is everybody's.
    ///
    /// # Errors
    /// SQLite's, or [`Error::Row`].
    pub fn public_template(&self, name: &str) -> Result<Option<Template>, Error> {
        let connection = self.connection();
        let body: Option<String> = connection
            .query_row(
                "SELECT body FROM templates WHERE id = ?1 AND tenant IS NULL",
                [name],
                |row| row.get(0),
            )
            .optional()?;
        Ok(body.map(|body| serde_json::from_str(&body)).transpose()?)
    }

    /// All templates and snapshots that a tenant may use.
    ///
    /// # Errors
    /// SQLite's, or [`Error::Row`].
    pub fn templates(&self, tenant: &Tenant) -> Result<Vec<Template>, Error> {
        let connection = self.connection();
        let mut all = connection
            .prepare_cached("SELECT body FROM templates WHERE tenant = ?1 OR tenant IS NULL")?;
        let bodies = all.query_map([tenant.as_str()], |row| row.get::<_, String>(0))?;
        bodies.map(|body| Ok(serde_json::from_str(&body?)?)).collect()
    }

    /// Removes a template of a tenant; what it was, if it was there.
    ///
    /// # Errors
    /// SQLite's, or [`Error::Row`].
    pub fn remove_template(&self, tenant: &Tenant, id: &str) -> Result<Option<Template>, Error> {
        let connection = self.connection();
        let body: Option<String> = connection
            .query_row(
                "DELETE FROM templates WHERE id = ?1 AND tenant = ?2 RETURNING body",
                params![id, tenant.as_str()],
                |row| row.get(0),
            )
            .optional()?;
        Ok(body.map(|body| serde_json::from_str(&body)).transpose()?)
    }

    /// Whether a template or snapshot needs this checkpoint.
    ///
    /// # Errors
    /// SQLite's.
    pub fn is_template(&self, checkpoint: &Id) -> Result<bool, Error> {
        let connection = self.connection();
        let mut find =
            connection.prepare_cached("SELECT 1 FROM templates WHERE checkpoint = ?1")?;
        Ok(find.exists([checkpoint.as_str()])?)
    }
}
