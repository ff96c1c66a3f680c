//! Templates, and snapshots of sandboxes: checkpoints that sandboxes are made from.

use rusqlite::{OptionalExtension as _, params};
use serde::{Deserialize, Serialize};

use super::{Error, Registry, Tenant};
use crate::store::{GuestSettings, Id};

/// The tag that a template without one has, and that a name without one means.
pub const DEFAULT_TAG: &str = "default";

/// The most characters of a tag.
const MAX_TAG: usize = 128;

/// Templates that a tenant may use and that have an ID or one of two names, by indices.
pub(super) const ALIKE: &str = "
    SELECT body FROM templates WHERE id = ?2 AND (tenant = ?1 OR tenant IS NULL)
    UNION ALL
    SELECT body FROM templates
    WHERE json_extract(body, '$.name') IN (?2, ?3) AND (tenant = ?1 OR tenant IS NULL)
";

/// Whether a text can be a tag: letters, digits, `_`, `.` and `-`, the last two not at its
/// beginning.
pub fn is_tag(text: &str) -> bool {
    let letter = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    let begins = text.bytes().next().is_some_and(|byte| !b".-".contains(&byte));
    begins && text.len() <= MAX_TAG && text.bytes().all(letter)
}

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
    /// Which of those with its name it is: at least one tag.
    #[serde(default = "default_tags")]
    pub tags: Vec<String>,
    /// What guests of sandboxes made from it are told, under what their makers say.
    #[serde(default, skip_serializing_if = "GuestSettings::is_empty")]
    pub defaults: GuestSettings,
    /// When it was made, in milliseconds since 1970.
    pub created_ms: u64,
}

fn default_tags() -> Vec<String> {
    vec![DEFAULT_TAG.into()]
}

impl Template {
    /// Whether a reference means it: its ID, its name, or its name and one of its tags.
    pub fn is_meant_by(&self, reference: &str) -> bool {
        let Some(name) = &self.name else { return self.id == reference };
        let tag = reference.strip_prefix(name.as_str()).and_then(|rest| rest.strip_prefix(':'));
        self.id == reference
            || name == reference
            || tag.is_some_and(|tag| self.tags.iter().any(|own| own == tag))
    }

    /// The order of those with a name: the last is what the name means. While one is replaced
    /// there are two.
    pub fn rank(&self) -> (bool, u64) {
        (self.tags.iter().any(|tag| tag == DEFAULT_TAG), self.created_ms)
    }
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

    /// Adds a template, and takes its tags from those of its owner with its name; those that have
    /// no tag then are removed and returned.
    ///
    /// # Errors
    /// SQLite's, or [`Error::Row`].
    pub fn replace_template(&self, template: &Template) -> Result<Vec<Template>, Error> {
        let mut replaced = Vec::new();
        // The new one first: there is always one with the name.
        self.put_template(template)?;
        for old in self.all_templates()? {
            let same = (old.kind, &old.tenant, &old.name)
                == (template.kind, &template.tenant, &template.name);
            if !same || old.id == template.id {
                continue;
            }
            let tags = old.tags.iter().filter(|tag| !template.tags.contains(tag)).cloned();
            let tags: Vec<String> = tags.collect();
            if tags.is_empty() {
                self.drop_template(&old.id)?;
                replaced.push(old);
            } else if tags.len() < old.tags.len() {
                self.put_template(&Template { tags, ..old })?;
            }
        }
        Ok(replaced)
    }

    /// All templates of a tenant's that share the name of the one that a reference means, or the
    /// one without a name; oldest first. Of everybody's, and of snapshots, none.
    ///
    /// # Errors
    /// SQLite's, or [`Error::Row`].
    pub fn versions(&self, tenant: &Tenant, reference: &str) -> Result<Vec<Template>, Error> {
        let meant = self.template(tenant, reference)?.filter(|template| {
            template.kind == TemplateKind::Template && template.tenant.as_ref() == Some(tenant)
        });
        let Some(meant) = meant else { return Ok(Vec::new()) };
        let mut all = self.all_templates()?;
        all.retain(|template| {
            template.id == meant.id
                || meant.name.is_some()
                    && (template.kind, &template.tenant, &template.name)
                        == (meant.kind, &meant.tenant, &meant.name)
        });
        Ok(all)
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

    /// The template with this ID, name or `name:tag` that a tenant may use; its own go before everybody's.
    ///
    /// # Errors
    /// SQLite's, or [`Error::Row`].
    pub fn template(&self, tenant: &Tenant, reference: &str) -> Result<Option<Template>, Error> {
        // No tag has a colon.
        let name = reference.rsplit_once(':').map_or(reference, |(name, _)| name);
        let connection = self.connection();
        let mut alike = connection.prepare_cached(ALIKE)?;
        let bodies = alike
            .query_map([tenant.as_str(), reference, name], |row| row.get::<_, String>(0))?
            .map(|body| Ok(serde_json::from_str(&body?)?));
        let mut meant = bodies.collect::<Result<Vec<Template>, Error>>()?;
        meant.retain(|template| template.is_meant_by(reference));
        Ok(meant.into_iter().max_by_key(|found| (found.tenant.is_some(), found.rank())))
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
