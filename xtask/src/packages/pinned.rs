//! Packages pinned by version and digest, downloaded once into the cache.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

use super::{Indexed, download, index, update};
use crate::{cache, progress};

/// Free space to hold one package while it is downloaded, in bytes.
const PACKAGE_SPACE: u64 = 400 << 20;

/// A package in the version that the project expects.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(crate) struct Pin {
    /// The Debian package.
    pub(crate) package: String,
    /// Its version.
    pub(crate) version: String,
    /// The SHA-256 digest of the .deb file, in hexadecimal.
    pub(crate) sha256: String,
}

/// A package that is downloaded and verified.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Fetched {
    /// The Debian package.
    pub(crate) package: String,
    /// Its version.
    pub(crate) version: String,
    /// The SHA-256 digest of the .deb file.
    pub(crate) sha256: String,
    /// Whether this is the pinned version.
    pub(crate) pinned: bool,
    /// The .deb file in the cache.
    #[serde(skip)]
    pub(crate) file: PathBuf,
}

/// Gets the pinned package from the cache or the archive; when the archive has moved on, its
/// preferred version with the digest of apt's signed index, and says so.
///
/// `repin` is the command that pins the newer version.
pub(crate) fn fetch(pin: &Pin, repin: &str) -> Result<Fetched> {
    let pinned = Indexed { version: pin.version.clone(), sha256: pin.sha256.clone() };
    if let Some(file) = cached(&pinned)? {
        return Ok(fetched(pin, pinned, file));
    }
    match choose_and_download(pin, &pinned, repin) {
        Ok(fetched) => Ok(fetched),
        // An index older than the archive names files that are gone by now.
        Err(_) if nix::unistd::geteuid().is_root() => {
            update()?;
            choose_and_download(pin, &pinned, repin)
        }
        Err(error) => Err(error),
    }
}

/// The archive's preferred version of `package` as a pin.
pub(crate) fn newest(package: &str) -> Result<Pin> {
    let first = index(package)?.into_iter().next();
    let Indexed { version, sha256 } =
        first.with_context(|| format!("the archive has no {package}"))?;
    Ok(Pin { package: package.to_owned(), version, sha256 })
}

fn choose_and_download(pin: &Pin, pinned: &Indexed, repin: &str) -> Result<Fetched> {
    let chosen = choose(pin, &index(&pin.package)?)?;
    if chosen != *pinned {
        progress::note(format_args!(
            "the archive no longer has {} {}; using {} (sha256 {} in apt's signed index); \
             pin it with `{repin}`",
            pin.package, pin.version, chosen.version, chosen.sha256
        ));
    }
    let name = &pin.package;
    let entry = cache::entry("package", &entry_name(&chosen), name, |dir| {
        cache::check_space(dir, PACKAGE_SPACE, name)?;
        let file = download(name, &chosen, dir)?;
        std::fs::rename(file, dir.join("package.deb")).context("cannot rename the download")
    })?;
    Ok(fetched(pin, chosen, entry.join("package.deb")))
}

fn fetched(pin: &Pin, chosen: Indexed, file: PathBuf) -> Fetched {
    let pinned = chosen.version == pin.version && chosen.sha256 == pin.sha256;
    Fetched {
        package: pin.package.clone(),
        version: chosen.version,
        sha256: chosen.sha256,
        pinned,
        file,
    }
}

/// The pinned version when the archive has it, else the archive's preferred one.
fn choose(pin: &Pin, index: &[Indexed]) -> Result<Indexed> {
    if let Some(found) = index.iter().find(|entry| entry.version == pin.version) {
        if found.sha256 != pin.sha256 {
            bail!(
                "{} {} is pinned with sha256 {}, but apt's index says {}; \
                 one of the two is not what it was, so neither is used",
                pin.package,
                pin.version,
                pin.sha256,
                found.sha256
            );
        }
        return Ok(found.clone());
    }
    index.first().cloned().with_context(|| format!("the archive has no {}", pin.package))
}

fn entry_name(package: &Indexed) -> String {
    package.sha256.chars().take(32).collect()
}

fn cached(package: &Indexed) -> Result<Option<PathBuf>> {
    let file = cache::root()?.join("package").join(entry_name(package)).join("package.deb");
    Ok(file.is_file().then_some(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pin() -> Pin {
        Pin { package: "linux-source-9".into(), version: "9.2".into(), sha256: "aa".into() }
    }

    fn indexed(version: &str, sha256: &str) -> Indexed {
        Indexed { version: version.into(), sha256: sha256.into() }
    }

    #[test]
    fn the_pinned_version_wins_over_a_newer_one() {
        let index = [indexed("9.3", "cc"), indexed("9.2", "aa")];
        assert_eq!(choose(&pin(), &index).unwrap(), indexed("9.2", "aa"));
    }

    #[test]
    fn a_pin_that_is_gone_gives_way_to_what_the_archive_prefers() {
        let index = [indexed("9.4", "dd"), indexed("9.3", "cc")];
        let chosen = choose(&pin(), &index).unwrap();
        assert_eq!(chosen, indexed("9.4", "dd"));
        assert!(!fetched(&pin(), chosen, PathBuf::new()).pinned);
    }

    #[test]
    fn a_pinned_version_with_another_digest_is_refused() {
        let error = choose(&pin(), &[indexed("9.2", "bb")]).unwrap_err().to_string();
        assert!(error.contains("sha256 aa") && error.contains("says bb"), "{error}");
    }
}
