//! Where a kernel's source comes from: a pinned Debian package, its digest always checked.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

use super::Series;
use crate::packages::{self, Indexed};
use crate::{cache, progress};

/// Free space to hold one package while it is downloaded, in bytes.
const PACKAGE_SPACE: u64 = 400 << 20;

/// One entry of `kernel-config/sources.toml`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct Pin {
    package: String,
    version: String,
    sha256: String,
}

/// The source of one kernel, downloaded and verified.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Source {
    /// The Debian package.
    pub(crate) package: String,
    /// Its version.
    pub(crate) version: String,
    /// The SHA-256 digest of the .deb file.
    pub(crate) sha256: String,
    /// Whether this is the version that the project pins.
    pub(crate) pinned: bool,
    /// The .deb file in the cache.
    #[serde(skip)]
    pub(crate) file: PathBuf,
}

fn pins_file() -> PathBuf {
    cache::workspace().join("kernel-config/sources.toml")
}

fn read_pins() -> Result<BTreeMap<String, Pin>> {
    let path = pins_file();
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    toml::from_str(&text).with_context(|| format!("{} is malformed", path.display()))
}

/// Gets the source of `series`: from the cache, else from the Debian archive.
pub(crate) fn fetch(series: Series) -> Result<Source> {
    let pins = read_pins()?;
    let Some(pin) = pins.get(series.name()) else {
        bail!("{} pins no source for {}", pins_file().display(), series.name());
    };
    let pinned = Indexed { version: pin.version.clone(), sha256: pin.sha256.clone() };
    if let Some(file) = cached(&pinned)? {
        return Ok(source(pin, pinned, file));
    }
    match choose_and_download(pin, &pinned) {
        Ok(source) => Ok(source),
        // An index older than the archive names files that are gone by now.
        Err(_) if nix::unistd::geteuid().is_root() => {
            packages::update()?;
            choose_and_download(pin, &pinned)
        }
        Err(error) => Err(error),
    }
}

fn choose_and_download(pin: &Pin, pinned: &Indexed) -> Result<Source> {
    let chosen = choose(pin, &packages::index(&pin.package)?)?;
    if chosen != *pinned {
        progress::note(format_args!(
            "the archive no longer has {} {}; using {} (sha256 {} in apt's signed index); \
             pin it with `cargo xtask kernel --update-pins`",
            pin.package, pin.version, chosen.version, chosen.sha256
        ));
    }
    let file = download(&pin.package, &chosen)?;
    Ok(source(pin, chosen, file))
}

fn source(pin: &Pin, chosen: Indexed, file: PathBuf) -> Source {
    let pinned = chosen.version == pin.version && chosen.sha256 == pin.sha256;
    Source {
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
    let file = cache::root()?.join("kernel-source").join(entry_name(package)).join("source.deb");
    Ok(file.is_file().then_some(file))
}

fn download(name: &str, package: &Indexed) -> Result<PathBuf> {
    let entry = cache::entry("kernel-source", &entry_name(package), name, |dir| {
        cache::check_space(dir, PACKAGE_SPACE, name)?;
        let file = packages::download(name, package, dir)?;
        fs::rename(file, dir.join("source.deb")).context("cannot rename the download")
    })?;
    Ok(entry.join("source.deb"))
}

/// Pins what the archive prefers now, for every series.
pub(crate) fn update_pins() -> Result<()> {
    packages::update()?;
    let mut pins = read_pins()?;
    for (series, pin) in &mut pins {
        let newest = packages::index(&pin.package)?
            .into_iter()
            .next()
            .with_context(|| format!("the archive has no {}", pin.package))?;
        if newest.version == pin.version && newest.sha256 == pin.sha256 {
            progress::step(format_args!("{series}: {} is current", pin.version));
        } else {
            progress::step(format_args!("{series}: {} -> {}", pin.version, newest.version));
        }
        pin.version = newest.version;
        pin.sha256 = newest.sha256;
    }
    let path = pins_file();
    let old = fs::read_to_string(&path).unwrap_or_default();
    write_atomically(&path, &render(&old, &pins))
}

/// The pins as TOML, under the comment that heads the file now.
fn render(old: &str, pins: &BTreeMap<String, Pin>) -> String {
    let head: String =
        old.lines().take_while(|line| line.starts_with('#')).map(|l| format!("{l}\n")).collect();
    pins.iter().fold(head, |text, (series, pin)| {
        // Versions and digests hold no character that TOML would have to escape.
        format!(
            "{text}\n[\"{series}\"]\npackage = \"{}\"\nversion = \"{}\"\nsha256 = \"{}\"\n",
            pin.package, pin.version, pin.sha256
        )
    })
}

fn write_atomically(path: &Path, text: &str) -> Result<()> {
    let context = || format!("cannot write {}", path.display());
    let temporary = path.with_extension("new");
    fs::write(&temporary, text).with_context(context)?;
    fs::rename(&temporary, path).with_context(context)
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
        assert!(!source(&pin(), chosen, PathBuf::new()).pinned);
    }

    #[test]
    fn a_pinned_version_with_another_digest_is_refused() {
        let error = choose(&pin(), &[indexed("9.2", "bb")]).unwrap_err().to_string();
        assert!(error.contains("sha256 aa") && error.contains("says bb"), "{error}");
    }

    #[test]
    fn rendered_pins_read_back_the_same_and_keep_the_comment() {
        let pins = BTreeMap::from([("9".to_owned(), pin())]);
        let text = render("# head\n# more\n\n[\"old\"]\n", &pins);
        assert!(text.starts_with("# head\n# more\n\n[\"9\"]\n"), "{text}");
        assert_eq!(toml::from_str::<BTreeMap<String, Pin>>(&text).unwrap(), pins);
    }

    #[test]
    fn every_series_is_pinned_with_a_full_digest() {
        let pins = read_pins().unwrap();
        for series in [Series::V6_12, Series::V6_1] {
            let pin = &pins[series.name()];
            assert_eq!(pin.sha256.len(), 64);
            assert!(pin.version.starts_with(series.name()), "{pin:?}");
        }
    }
}
