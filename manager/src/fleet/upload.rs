//! Files that builds copy: uploaded to an address that cannot be guessed and that is valid for a
//! while, kept as they came, below `COPPICE_HOME/uploads`. They are never unpacked here.
//!
//! A file is called by hashes of its tenant and of what the client calls it, so that nobody gets
//! at another's and no name leads out of the directory. What nobody used for a week is removed.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use sha2::{Digest as _, Sha256};
use tokio::fs::File;
use tokio::io::AsyncWriteExt as _;

use super::create::token;
use super::{Error, Fleet, blocking};
use crate::random::hex;
use crate::registry::Tenant;
use crate::store::Id;

/// The most bytes of an upload.
const MAX_UPLOAD: u64 = 2 << 30;
/// The most bytes of a tenant's uploads.
const MAX_ALL: u64 = 8 << 30;
/// The most uploads of a tenant that are on their way at a time.
const MAX_PARTS: usize = 4;
/// How long an address can be used, and an upload may take.
pub const VALID: Duration = Duration::from_secs(60 * 60);
/// The most addresses of a tenant that are valid at a time.
const MAX_GRANTS: usize = 500;
/// How long what is not used stays.
const UNUSED: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// Ending of what is still on its way.
const PART: &str = "part";

/// The directory of uploads and who may add to it.
#[derive(Debug)]
pub(super) struct Uploads {
    directory: PathBuf,
    grants: Mutex<HashMap<String, Grant>>,
}

#[derive(Debug, Clone)]
struct Grant {
    tenant: Tenant,
    hash: String,
    until: Instant,
}

impl Uploads {
    /// Those of a home directory.
    pub(super) fn below(home: &Path) -> Self {
        Self { directory: home.join("uploads"), grants: Mutex::default() }
    }

    /// A tenant's upload, if it is there.
    pub(super) fn find(&self, tenant: &Tenant, hash: &str) -> Option<PathBuf> {
        let path = self.directory.join(file_name(tenant, hash));
        // That it was used is seen by its time; without that it is only removed earlier.
        let file = fs::File::open(&path).ok()?;
        let _ = file.set_modified(SystemTime::now());
        Some(path)
    }

    fn grant(&self, tenant: &Tenant, hash: &str) -> Result<String, Error> {
        let (token, now) = (token()?, Instant::now());
        let mut grants = self.grants();
        grants.retain(|_, grant| grant.until > now);
        let own = grants.iter().filter(|(_, grant)| grant.tenant == *tenant);
        if own.clone().count() >= MAX_GRANTS {
            let oldest = own.min_by_key(|(_, grant)| grant.until).map(|(token, _)| token.clone());
            oldest.and_then(|oldest| grants.remove(&oldest));
        }
        let until = now + VALID;
        let grant = Grant { tenant: tenant.clone(), hash: hash.into(), until };
        grants.insert(token.clone(), grant);
        Ok(token)
    }

    fn granted(&self, token: &str) -> Option<Grant> {
        let grant = self.grants().get(token).cloned();
        grant.filter(|grant| grant.until > Instant::now())
    }

    fn grants(&self) -> MutexGuard<'_, HashMap<String, Grant>> {
        self.grants.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes what an earlier daemon did not receive to its end.
    pub(super) fn clear_parts(&self) {
        for entry in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            if is_part(&entry.path()) {
                // What stays is removed with what nobody uses.
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    async fn begin(&self, token: &str) -> Result<Upload, Error> {
        let grant = self.granted(token).ok_or(Error::NoUpload)?;
        let (directory, prefix) = (self.directory.clone(), tenant_prefix(&grant.tenant));
        let found = blocking(move || async move { tidy(&directory, &prefix) });
        let Found { bytes, parts } = found.await.map_err(Error::Upload)?;
        if parts >= MAX_PARTS {
            return Err(Error::Uploads { limit: MAX_PARTS });
        }
        let path = self.directory.join(file_name(&grant.tenant, &grant.hash));
        let id = Id::new().map_err(Error::Random)?;
        let part = format!("{}{id}.{PART}", tenant_prefix(&grant.tenant));
        let part = Part(self.directory.join(part));
        let mut options = tokio::fs::OpenOptions::new();
        let opened = options.write(true).create_new(true).mode(0o600).open(&part.0).await;
        let file = opened.map_err(Error::Upload)?;
        let room = MAX_UPLOAD.min(MAX_ALL.saturating_sub(bytes));
        Ok(Upload { file, part, path, room })
    }
}

/// What a tenant has in the directory.
#[derive(Debug, Default)]
struct Found {
    bytes: u64,
    /// Uploads on their way.
    parts: usize,
}

/// Makes the directory, removes what nobody used for long, and looks what there is of a tenant.
fn tidy(directory: &Path, prefix: &str) -> io::Result<Found> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let mut found = Found::default();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        // It may be gone by now.
        let Ok(meta) = entry.metadata() else { continue };
        let age = meta.modified().ok().and_then(|at| at.elapsed().ok()).unwrap_or_default();
        if age > UNUSED {
            fs::remove_file(entry.path())?;
        } else if entry.file_name().to_string_lossy().starts_with(prefix) {
            found.bytes = found.bytes.saturating_add(meta.size());
            found.parts += usize::from(is_part(&entry.path()));
        }
    }
    Ok(found)
}

fn is_part(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == PART)
}

/// The first half of a hash, which is enough to be the only one.
fn short_hash(text: &str) -> String {
    hex(Sha256::digest(text).first_chunk::<16>().unwrap_or(&[0; 16]))
}

fn tenant_prefix(tenant: &Tenant) -> String {
    format!("{}-", short_hash(tenant.as_str()))
}

fn file_name(tenant: &Tenant, hash: &str) -> String {
    format!("{}{}.tar", tenant_prefix(tenant), short_hash(hash))
}

/// A file that goes away unless it is given a name.
#[derive(Debug)]
struct Part(PathBuf);

impl Drop for Part {
    fn drop(&mut self) {
        // It has its name by now, or there is nobody to tell.
        let _ = fs::remove_file(&self.0);
    }
}

/// An upload on its way. Dropped before it is finished, nothing stays of it.
#[derive(Debug)]
pub struct Upload {
    file: File,
    part: Part,
    path: PathBuf,
    /// How many bytes it may still have.
    room: u64,
}

impl Upload {
    /// Adds a piece.
    ///
    /// # Errors
    /// [`Error::UploadTooLong`], or [`Error::Upload`].
    pub async fn write(&mut self, piece: &[u8]) -> Result<(), Error> {
        let length = u64::try_from(piece.len()).unwrap_or(u64::MAX);
        let too_long = Error::UploadTooLong { each: MAX_UPLOAD, all: MAX_ALL };
        self.room = self.room.checked_sub(length).ok_or(too_long)?;
        self.file.write_all(piece).await.map_err(Error::Upload)
    }

    /// Keeps it, instead of an earlier one.
    ///
    /// # Errors
    /// [`Error::Upload`].
    pub async fn finish(mut self) -> Result<(), Error> {
        self.file.flush().await.map_err(Error::Upload)?;
        tokio::fs::rename(&self.part.0, &self.path).await.map_err(Error::Upload)
    }
}

impl Fleet {
    /// Whether a tenant's upload is there, and the secret with which it can be (re)placed, for a
    /// build of this template.
    ///
    /// # Errors
    /// [`Error::NoTemplate`], or the registry's.
    pub fn upload_place(
        &self,
        tenant: &Tenant,
        template: &str,
        hash: &str,
    ) -> Result<(bool, String), Error> {
        let builds = self.registry.builds(tenant)?;
        if !builds.iter().any(|build| build.template == template) {
            return Err(Error::NoTemplate { reference: template.into() });
        }
        let present = self.uploads.find(tenant, hash).is_some();
        Ok((present, self.uploads.grant(tenant, hash)?))
    }

    /// Begins to take an upload, by its secret.
    ///
    /// # Errors
    /// [`Error::NoUpload`], or why it cannot be kept.
    pub async fn begin_upload(&self, secret: &str) -> Result<Upload, Error> {
        self.uploads.begin(secret).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str) -> Tenant {
        Tenant::new(name).unwrap()
    }

    fn uploads() -> (tempfile::TempDir, Uploads) {
        let dir = tempfile::tempdir().unwrap();
        let uploads = Uploads::below(dir.path());
        (dir, uploads)
    }

    fn files(dir: &tempfile::TempDir) -> usize {
        fs::read_dir(dir.path().join("uploads")).unwrap().count()
    }

    #[tokio::test]
    async fn an_upload_is_there_for_its_tenant_alone_once_it_is_whole() {
        let (dir, uploads) = uploads();
        let secret = uploads.grant(&tenant("a"), "12").unwrap();
        let mut upload = uploads.begin(&secret).await.unwrap();
        upload.write(b"tar").await.unwrap();
        assert_eq!(uploads.find(&tenant("a"), "12"), None);
        upload.finish().await.unwrap();
        let path = uploads.find(&tenant("a"), "12").unwrap();
        assert_eq!(fs::read(path).unwrap(), b"tar");
        assert_eq!(uploads.find(&tenant("b"), "12"), None);
        assert_eq!(uploads.find(&tenant("a"), "13"), None);
        assert_eq!(files(&dir), 1);
    }

    #[tokio::test]
    async fn nothing_stays_of_an_upload_that_breaks_or_is_too_long() {
        let (dir, uploads) = uploads();
        let secret = uploads.grant(&tenant("a"), "12").unwrap();
        let mut upload = uploads.begin(&secret).await.unwrap();
        upload.room = 2;
        let refused = upload.write(b"tar").await;
        assert!(matches!(refused, Err(Error::UploadTooLong { .. })), "{refused:?}");
        drop(upload);
        assert_eq!(files(&dir), 0);
    }

    #[tokio::test]
    async fn only_who_was_given_an_address_may_upload() {
        let (_dir, uploads) = uploads();
        uploads.grant(&tenant("a"), "12").unwrap();
        for secret in ["", "../12", "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"] {
            assert!(matches!(uploads.begin(secret).await, Err(Error::NoUpload)), "{secret}");
        }
    }

    #[tokio::test]
    async fn a_tenant_uploads_a_few_files_at_a_time() {
        let (_dir, uploads) = uploads();
        let secret = uploads.grant(&tenant("a"), "12").unwrap();
        let mut begun = Vec::new();
        for _ in 0..MAX_PARTS {
            begun.push(uploads.begin(&secret).await.unwrap());
        }
        let refused = uploads.begin(&secret).await;
        assert!(matches!(refused, Err(Error::Uploads { .. })), "{refused:?}");
        let other = uploads.grant(&tenant("b"), "12").unwrap();
        uploads.begin(&other).await.unwrap();
        begun.pop();
        uploads.begin(&secret).await.unwrap();
    }

    #[test]
    fn a_tenant_has_a_limited_number_of_addresses_and_loses_the_oldest() {
        let (_dir, uploads) = uploads();
        let other = uploads.grant(&tenant("b"), "12").unwrap();
        let first = uploads.grant(&tenant("a"), "12").unwrap();
        for _ in 0..MAX_GRANTS {
            uploads.grant(&tenant("a"), "12").unwrap();
        }
        assert!(uploads.granted(&first).is_none());
        assert!(uploads.granted(&other).is_some());
        assert_eq!(uploads.grants().len(), MAX_GRANTS + 1);
    }
}
