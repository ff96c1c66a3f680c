//! Tags: which of the templates of one name is meant.

use std::sync::{MutexGuard, PoisonError};

use super::{Error, Fleet};
use crate::registry::{Build, Template, Tenant, is_tag};

/// The most tags of a template.
const MAX_TAGS: usize = 20;

/// A template that has tags, and the build it came about by, if that is remembered.
#[derive(Debug, Clone)]
pub struct Tagged {
    /// The template.
    pub template: Template,
    /// Its build.
    pub build: Option<Build>,
}

impl Fleet {
    /// To be held while tags are looked at and changed.
    pub(super) fn tagging(&self) -> MutexGuard<'_, ()> {
        self.tagging.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The templates of the name that a reference means, each with its tags; oldest first.
    ///
    /// # Errors
    /// [`Error::NoTemplate`], or the registry's.
    pub fn tagged(&self, tenant: &Tenant, reference: &str) -> Result<Vec<Tagged>, Error> {
        let templates = self.registry.versions(tenant, reference)?;
        if templates.is_empty() {
            return Err(Error::NoTemplate { reference: reference.into() });
        }
        let builds = self.registry.builds(tenant)?;
        let with_build = |template: Template| {
            let build = builds.iter().find(|build| build.template == template.id).cloned();
            Tagged { template, build }
        };
        Ok(templates.into_iter().map(with_build).collect())
    }

    /// Gives the template that a reference means more tags, which others of its name lose then.
    ///
    /// # Errors
    /// [`Error::NoTemplate`], [`Error::Name`], [`Error::Unbuildable`], [`Error::LastTag`] for a tag
    /// that is another's only one, or the registry's.
    pub fn tag(&self, tenant: &Tenant, target: &str, tags: Vec<String>) -> Result<Tagged, Error> {
        let _one_at_a_time = self.tagging();
        let more = checked_tags(tags.into_iter())?;
        let of_name = self.tagged(tenant, target)?;
        let meant = self.registry.template(tenant, target)?.map(|template| template.id);
        let (meant, others): (Vec<_>, Vec<_>) =
            of_name.into_iter().partition(|tagged| Some(&tagged.template.id) == meant.as_ref());
        let Some(mut meant) = meant.into_iter().next() else {
            return Err(Error::NoTemplate { reference: target.into() });
        };
        for other in &others {
            let tags = &other.template.tags;
            if let (true, Some(tag)) = (tags.iter().all(|tag| more.contains(tag)), tags.first()) {
                return Err(Error::LastTag { tag: tag.clone() });
            }
        }
        let own = std::mem::take(&mut meant.template.tags);
        meant.template.tags = checked_tags(own.into_iter().chain(more))?;
        self.registry.replace_template(&meant.template)?;
        Ok(meant)
    }

    /// Takes tags from the templates of a name. All of them, or none.
    ///
    /// # Errors
    /// [`Error::NoTemplate`] when the name or one of the tags is not there, [`Error::LastTag`], or
    /// the registry's.
    pub fn untag(&self, tenant: &Tenant, name: &str, tags: &[String]) -> Result<(), Error> {
        let _one_at_a_time = self.tagging();
        let mut of_name = self.tagged(tenant, name)?;
        let has = |tag: &String| of_name.iter().any(|tagged| tagged.template.tags.contains(tag));
        if let Some(tag) = tags.iter().find(|tag| !has(tag)) {
            return Err(Error::NoTemplate { reference: format!("{name}:{tag}") });
        }
        for Tagged { template, .. } in &mut of_name {
            let before = template.tags.clone();
            template.tags.retain(|tag| !tags.contains(tag));
            if let (true, Some(tag)) = (template.tags.is_empty(), before.into_iter().next()) {
                return Err(Error::LastTag { tag });
            }
        }
        for tagged in &of_name {
            self.registry.put_template(&tagged.template)?;
        }
        Ok(())
    }
}

/// Tags in order, each once.
///
/// # Errors
/// [`Error::Name`] for what is no tag, [`Error::Unbuildable`] for too many.
pub(super) fn checked_tags(tags: impl Iterator<Item = String>) -> Result<Vec<String>, Error> {
    let mut tags: Vec<String> = tags.collect();
    tags.sort();
    tags.dedup();
    if let Some(tag) = tags.iter().find(|tag| !is_tag(tag)) {
        let reason = "a tag has letters, digits, '_', '.' and '-'".into();
        return Err(Error::Name { name: tag.clone(), reason });
    }
    match tags.len() > MAX_TAGS {
        true => Err(Error::Unbuildable(format!("a template has at most {MAX_TAGS} tags"))),
        false => Ok(tags),
    }
}
