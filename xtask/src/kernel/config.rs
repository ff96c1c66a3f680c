//! Configuration fragments: what a kernel must have, and the check that it still has it.
//!
//! Kconfig drops an option without a word when a dependency is missing or the name is gone. So a
//! built configuration is compared with every line of its fragments.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context as _, Result, bail};

/// The options that fragments ask for, by name; `None` asks for an option to be off.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Wanted(BTreeMap<String, Option<String>>);

/// An option that did not survive.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Lost {
    option: String,
    wanted: Option<String>,
    found: Option<String>,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let show = |value: &Option<String>| value.as_deref().unwrap_or("off").to_owned();
        write!(f, "{}: wanted {}, is {}", self.option, show(&self.wanted), show(&self.found))
    }
}

impl Wanted {
    /// Adds one fragment. A later fragment overrides an earlier one; `name` is for errors.
    ///
    /// # Errors
    /// On a line that is neither a comment nor an option, and on an option given twice.
    pub(crate) fn add(&mut self, name: &str, text: &str) -> Result<()> {
        let mut seen = BTreeMap::new();
        for (number, line) in (1..).zip(text.lines()) {
            let place = || format!("{name}, line {number}: `{line}`");
            let Some((option, value)) = parse_line(line).with_context(place)? else { continue };
            if seen.insert(option.to_owned(), ()).is_some() {
                return Err(anyhow::anyhow!("{option} is given twice")).with_context(place);
            }
            self.0.insert(option.to_owned(), value.map(str::to_owned));
        }
        Ok(())
    }

    /// The options as Kconfig reads them.
    pub(crate) fn to_kconfig(&self) -> String {
        let line = |(option, value): (&String, &Option<String>)| match value {
            Some(value) => format!("{option}={value}\n"),
            None => format!("# {option} is not set\n"),
        };
        self.0.iter().map(line).collect()
    }

    /// What of this the finished configuration `config` lacks.
    pub(crate) fn lost(&self, config: &str) -> Vec<Lost> {
        let found: BTreeMap<_, _> = config
            .lines()
            .filter_map(|line| match parse_line(line) {
                Ok(Some((option, Some(value)))) => Some((option, value)),
                _ => None,
            })
            .collect();
        let lost = |(option, wanted): (&String, &Option<String>)| {
            let found = found.get(option.as_str()).map(|&value| value.to_owned());
            (found != *wanted).then(|| Lost {
                option: option.clone(),
                wanted: wanted.clone(),
                found,
            })
        };
        self.0.iter().filter_map(lost).collect()
    }
}

/// One line: an option with its value, an option that is off, or nothing.
fn parse_line(line: &str) -> Result<Option<(&str, Option<&str>)>> {
    let line = line.trim();
    if let Some(option) = line.strip_prefix("# ").and_then(|rest| rest.strip_suffix(" is not set"))
        && is_option(option)
    {
        return Ok(Some((option, None)));
    }
    if line.is_empty() || line.starts_with('#') {
        return Ok(None);
    }
    match line.split_once('=') {
        Some((option, "n")) if is_option(option) => {
            bail!("write `# {option} is not set`, as Kconfig does")
        }
        Some((option, value)) if is_option(option) && !value.is_empty() => {
            Ok(Some((option, Some(value))))
        }
        _ => bail!("neither an option nor a comment"),
    }
}

fn is_option(name: &str) -> bool {
    name.strip_prefix("CONFIG_").is_some_and(|rest| {
        !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(texts: &[&str]) -> Wanted {
        let mut wanted = Wanted::default();
        for text in texts {
            wanted.add("test", text).unwrap();
        }
        wanted
    }

    #[test]
    fn a_configuration_with_everything_loses_nothing() {
        let wanted = wanted(&["CONFIG_A=y\nCONFIG_N=8\nCONFIG_S=\"x=y\"\n# CONFIG_B is not set\n"]);
        // B is absent, which is as good as off.
        assert_eq!(wanted.lost("CONFIG_S=\"x=y\"\nCONFIG_A=y\nCONFIG_N=8\nCONFIG_Z=y\n"), []);
    }

    #[test]
    fn every_lost_option_is_told_with_what_it_became() {
        let wanted =
            wanted(&["CONFIG_A=y\nCONFIG_M=y\nCONFIG_N=8\n# CONFIG_B is not set\nCONFIG_OK=y\n"]);
        let config = "# CONFIG_A is not set\nCONFIG_M=m\nCONFIG_N=9\nCONFIG_B=y\nCONFIG_OK=y\n";
        let lost: Vec<_> = wanted.lost(config).iter().map(ToString::to_string).collect();
        assert_eq!(
            lost,
            [
                "CONFIG_A: wanted y, is off",
                "CONFIG_B: wanted off, is y",
                "CONFIG_M: wanted y, is m",
                "CONFIG_N: wanted 8, is 9",
            ]
        );
    }

    #[test]
    fn a_later_fragment_overrides_an_earlier_one() {
        let wanted = wanted(&["CONFIG_A=y\nCONFIG_B=y\n", "# CONFIG_A is not set\n"]);
        assert_eq!(wanted.to_kconfig(), "# CONFIG_A is not set\nCONFIG_B=y\n");
    }

    #[test]
    fn mistakes_in_a_fragment_name_their_line() {
        for (text, reason) in [
            ("\nCONFIG_A", "neither"),
            ("\nCONFIG_A=", "neither"),
            ("\nA=y", "neither"),
            ("\nCONFIG_A=n", "is not set"),
            ("CONFIG_A=y\nCONFIG_A=y", "twice"),
        ] {
            let error = Wanted::default().add("f.config", text).unwrap_err();
            let text = format!("{error:#}");
            assert!(text.starts_with("f.config, line 2:") && text.contains(reason), "{text}");
        }
    }

    #[test]
    fn the_fragments_of_this_project_parse() {
        let dir = crate::cache::workspace().join("kernel-config");
        let mut files = 0;
        for file in std::fs::read_dir(dir).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "config") {
                let name = path.display().to_string();
                Wanted::default().add(&name, &std::fs::read_to_string(&path).unwrap()).unwrap();
                files += 1;
            }
        }
        assert!(files >= 4, "only {files} fragments found");
    }
}
