//! `rootfs/packages.lock`: which packages, in which versions, the images are made of.
//!
//! One line per package: image, package, version, architecture, SHA-256 digest of the .deb file.
//! An archive moves on; so a difference is told, and is an error only where asked for.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Context as _, Result, bail};

/// The comment that heads the file.
const HEAD: &str = "\
# The packages of the root file systems: image, package, version, architecture, SHA-256 of the .deb.
# Written by `cargo xtask rootfs --update-lock`.
";

/// One package as it was installed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Package {
    pub(super) version: String,
    pub(super) architecture: String,
    pub(super) sha256: String,
}

/// The packages of one image by name.
pub(super) type Packages = BTreeMap<String, Package>;

/// The packages of all images.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Lock(pub(super) BTreeMap<String, Packages>);

impl Lock {
    /// Reads a lock file's text.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let mut lock = Self::default();
        for (number, line) in (1..).zip(text.lines()) {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let place = || format!("packages.lock, line {number}");
            let fields: Vec<_> = line.split(' ').collect();
            let [image, name, version, architecture, sha256] = fields[..] else {
                return Err(anyhow::anyhow!("five fields are expected")).with_context(place);
            };
            if sha256.len() != 64 || !sha256.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(anyhow::anyhow!("`{sha256}` is no SHA-256 digest")).with_context(place);
            }
            let package = Package {
                version: version.to_owned(),
                architecture: architecture.to_owned(),
                sha256: sha256.to_owned(),
            };
            let packages = lock.0.entry(image.to_owned()).or_default();
            if packages.insert(name.to_owned(), package).is_some() {
                return Err(anyhow::anyhow!("{name} is listed twice")).with_context(place);
            }
        }
        Ok(lock)
    }

    /// The file's text.
    pub(super) fn render(&self) -> String {
        self.0
            .iter()
            .fold(HEAD.to_owned(), |text, (image, packages)| text + &render_image(image, packages))
    }

    /// The packages of one image; none when the lock does not have it yet.
    pub(super) fn image(&self, image: &str) -> Packages {
        self.0.get(image).cloned().unwrap_or_default()
    }
}

/// The lines of one image.
pub(super) fn render_image(image: &str, packages: &Packages) -> String {
    packages.iter().fold(String::new(), |mut text, (name, p)| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{image} {name} {} {} {}", p.version, p.architecture, p.sha256);
        text
    })
}

/// What the packages of a built image are, from what dpkg has installed and what apt's index
/// says of each version.
pub(super) fn manifest(installed: &str, available: &str) -> Result<Packages> {
    let mut digests = BTreeMap::new();
    for stanza in available.split("\n\n") {
        let field = |name: &str| stanza.lines().find_map(|line| line.strip_prefix(name));
        if let (Some(name), Some(version), Some(architecture), Some(sha256)) =
            (field("Package: "), field("Version: "), field("Architecture: "), field("SHA256: "))
        {
            digests.insert((name, version, architecture), sha256);
        }
    }
    let mut packages = Packages::new();
    for line in installed.lines() {
        let fields: Vec<_> = line.split(' ').collect();
        let ["installed", name, version, architecture] = fields[..] else {
            bail!("the image has a package that is not fully installed: {line}");
        };
        // dpkg qualifies the name of a package that exists for several architectures.
        let name = name.split_once(':').map_or(name, |(name, _)| name);
        let sha256 = digests
            .get(&(name, version, architecture))
            .with_context(|| format!("apt's index has no digest for {name} {version}"))?;
        let package = Package {
            version: version.to_owned(),
            architecture: architecture.to_owned(),
            sha256: (*sha256).to_owned(),
        };
        packages.insert(name.to_owned(), package);
    }
    if packages.is_empty() {
        bail!("the image has no packages");
    }
    Ok(packages)
}

/// How `built` differs from `locked`, one line per package.
pub(super) fn differences(locked: &Packages, built: &Packages) -> Vec<String> {
    let gone = locked.iter().filter(|(name, _)| !built.contains_key(*name));
    let gone = gone.map(|(name, old)| format!("{name} {} is not installed", old.version));
    let changed = built.iter().filter_map(|(name, new)| match locked.get(name) {
        None => Some(format!("{name} {} is new", new.version)),
        Some(old) if old.version != new.version => {
            Some(format!("{name} {} instead of {}", new.version, old.version))
        }
        Some(old) if old != new => {
            Some(format!("{name} {} has another digest or architecture", new.version))
        }
        Some(_) => None,
    });
    gone.chain(changed).collect()
}

/// apt preferences that make it install the locked versions where the archive still has them.
pub(super) fn preferences(locked: &Packages) -> String {
    locked.iter().fold(String::new(), |mut text, (name, package)| {
        // A priority above 1000 holds even where that is older than what apt would choose.
        let _ = writeln!(
            text,
            "Package: {name}\nPin: version {}\nPin-Priority: 1001\n",
            package.version
        );
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(letter: char) -> String {
        letter.to_string().repeat(64)
    }

    fn packages(list: &[(&str, &str, char)]) -> Packages {
        let package = |&(name, version, letter): &(&str, &str, char)| {
            let package = Package {
                version: version.to_owned(),
                architecture: "amd64".to_owned(),
                sha256: digest(letter),
            };
            (name.to_owned(), package)
        };
        list.iter().map(package).collect()
    }

    #[test]
    fn a_lock_reads_back_as_it_was_written() {
        let base = packages(&[("bash", "5.2-1+b1", 'a'), ("git", "1:2.39~1", 'b')]);
        let lock = Lock(BTreeMap::from([
            ("base".to_owned(), base),
            ("tiny".to_owned(), packages(&[("busybox-static", "1.35", 'c')])),
        ]));
        assert_eq!(Lock::parse(&lock.render()).unwrap(), lock);
        assert_eq!(lock.image("other"), Packages::new());
    }

    #[test]
    fn mistakes_in_a_lock_name_their_line() {
        let good = format!("base bash 1 amd64 {}\n", digest('a'));
        for (text, reason) in [
            ("base bash 1 amd64\n".to_owned(), "five fields"),
            ("base bash 1 amd64 abc\n".to_owned(), "no SHA-256"),
            (good.clone(), "twice"),
        ] {
            let error = format!("{:#}", Lock::parse(&(good.clone() + &text)).unwrap_err());
            assert!(
                error.starts_with("packages.lock, line 2") && error.contains(reason),
                "{error}"
            );
        }
    }

    #[test]
    fn a_manifest_joins_installed_packages_with_the_digests_of_their_files() {
        let available = format!(
            "Package: libc6\nVersion: 2.36\nArchitecture: amd64\nSHA256: {}\n\n\
             Package: libc6\nVersion: 2.35\nArchitecture: amd64\nSHA256: {}\n",
            digest('a'),
            digest('b')
        );
        assert_eq!(
            manifest("installed libc6:amd64 2.36 amd64\n", &available).unwrap(),
            packages(&[("libc6", "2.36", 'a')])
        );
        for broken in ["half-configured libc6 2.36 amd64\n", "installed libc6 9 amd64\n", ""] {
            assert!(manifest(broken, &available).is_err(), "{broken}");
        }
    }

    #[test]
    fn every_kind_of_difference_is_told_and_equality_is_silent() {
        let locked =
            packages(&[("a", "1", 'a'), ("b", "1", 'b'), ("c", "1", 'c'), ("d", "1", 'd')]);
        let built = packages(&[("a", "1", 'a'), ("b", "2", 'b'), ("c", "1", 'f'), ("e", "1", 'e')]);
        assert_eq!(
            differences(&locked, &built),
            [
                "d 1 is not installed",
                "b 2 instead of 1",
                "c 1 has another digest or architecture",
                "e 1 is new"
            ]
        );
        assert_eq!(differences(&locked, &locked), Vec::<String>::new());
    }

    #[test]
    fn preferences_pin_each_package() {
        let text = preferences(&packages(&[("a", "1:2", 'a')]));
        assert_eq!(text, "Package: a\nPin: version 1:2\nPin-Priority: 1001\n\n");
    }
}
