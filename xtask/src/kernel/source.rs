//! Where a kernel's source comes from: a Debian package pinned in `kernel-config/sources.toml`.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};

use super::Series;
use crate::packages::{self, Fetched, Pin};
use crate::{cache, progress};

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
pub(super) fn fetch(series: Series) -> Result<Fetched> {
    let pins = read_pins()?;
    let Some(pin) = pins.get(series.name()) else {
        bail!("{} pins no source for {}", pins_file().display(), series.name());
    };
    packages::fetch(pin, "cargo xtask kernel --update-pins")
}

/// Pins what the archive prefers now, for every series.
pub(super) fn update_pins() -> Result<()> {
    packages::update()?;
    let mut pins = read_pins()?;
    for (series, pin) in &mut pins {
        let newest = packages::newest(&pin.package)?;
        if newest == *pin {
            progress::step(format_args!("{series}: {} is current", pin.version));
        } else {
            progress::step(format_args!("{series}: {} -> {}", pin.version, newest.version));
        }
        *pin = newest;
    }
    let path = pins_file();
    let old = fs::read_to_string(&path).unwrap_or_default();
    cache::write_file(&path, &render(&old, &pins))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rendered_pins_read_back_the_same_and_keep_the_comment() {
        let pin = Pin { package: "p".into(), version: "1:9~2-1".into(), sha256: "aa".into() };
        let pins = BTreeMap::from([("9".to_owned(), pin)]);
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
