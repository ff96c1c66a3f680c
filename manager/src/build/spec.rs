//! What is asked for, as clients write it: where a build begins, its steps, its commands.

use thiserror::Error;

/// The most steps of a build.
const MAX_STEPS: usize = 500;
/// The most characters of a hash of files.
const MAX_HASH: usize = 128;
/// The image that stands for the built-in template, with any tag.
const BASE_IMAGE: &str = "e2bdev/base";

/// Why a build is not one.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SpecError {
    /// It begins nowhere or at two places.
    #[error("a build begins either from a template or from an image: set one of both")]
    From,
    /// It begins with an image that cannot be had.
    #[error(
        "OCI images such as '{0}' are not supported yet: begin from the image '{BASE_IMAGE}' or \
         from a template"
    )]
    Image(String),
    /// There are too many steps.
    #[error("a build has at most {MAX_STEPS} steps")]
    Steps,
    /// A step is wrong.
    #[error("step {number} ({kind}) is wrong: {reason}")]
    Step {
        /// Which one, from 1.
        number: usize,
        /// What it calls itself.
        kind: String,
        /// What it has to be.
        reason: &'static str,
    },
}

/// Where a build begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Parent {
    /// At the built-in template.
    Base,
    /// At a template or snapshot: its ID or name.
    Template(String),
}

/// A step as it was sent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RawStep {
    /// What it does.
    pub kind: String,
    /// With what.
    pub args: Vec<String>,
    /// Which uploaded files it is about.
    pub files_hash: Option<String>,
}

/// A step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Runs a shell command.
    Run {
        /// The command.
        command: String,
        /// Who runs it; the user set before when absent.
        user: Option<String>,
    },
    /// Copies uploaded files.
    Copy(Copy),
    /// Sets variables.
    Env(Vec<(String, String)>),
    /// Changes to a directory, which is made if it is not there.
    Workdir(String),
    /// Changes the user.
    User(String),
}

/// What is copied, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copy {
    /// Which of the uploaded files: a relative path, perhaps with `*`; it stays below its top.
    pub source: String,
    /// Where to.
    pub destination: String,
    /// Whose they will be, with a group if there is a colon; the user's that was set before when
    /// absent.
    pub owner: Option<String>,
    /// Permissions that they will have; their own when absent.
    pub mode: Option<u32>,
    /// The upload.
    pub hash: String,
}

/// A build that can be tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Where it begins.
    pub from: Parent,
    /// What is done, in order.
    pub steps: Vec<Step>,
    /// A shell command that is started and runs on in every sandbox.
    pub start: Option<String>,
    /// A shell command that is run until it succeeds.
    pub ready: Option<String>,
}

impl Parent {
    /// The beginning that a template or an image means.
    ///
    /// # Errors
    /// [`SpecError::From`] or [`SpecError::Image`].
    pub fn new(template: Option<String>, image: Option<String>) -> Result<Self, SpecError> {
        let given = |text: &String| !text.is_empty();
        match (template.filter(given), image.filter(given)) {
            (Some(template), None) => Ok(Self::Template(template)),
            (None, Some(image)) if is_base(&image) => Ok(Self::Base),
            (None, Some(image)) => Err(SpecError::Image(image)),
            (None, None) | (Some(_), Some(_)) => Err(SpecError::From),
        }
    }
}

fn is_base(image: &str) -> bool {
    let image = image.strip_prefix("docker.io/").unwrap_or(image);
    let rest = image.strip_prefix(BASE_IMAGE);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with([':', '@']))
}

impl Step {
    /// All steps, checked.
    ///
    /// # Errors
    /// [`SpecError::Steps`] or [`SpecError::Step`].
    pub fn all(raw: Vec<RawStep>) -> Result<Vec<Self>, SpecError> {
        if raw.len() > MAX_STEPS {
            return Err(SpecError::Steps);
        }
        let steps = raw.into_iter().enumerate().map(|(place, raw)| {
            let kind: String = raw.kind.chars().take(20).collect();
            let number = place + 1;
            Self::new(raw).map_err(|reason| SpecError::Step { number, kind, reason })
        });
        steps.collect()
    }

    fn new(raw: RawStep) -> Result<Self, &'static str> {
        if raw.args.iter().any(|arg| arg.contains('\0')) {
            return Err("there is a zero byte in it");
        }
        let mut args = raw.args.iter().map(String::as_str);
        let mut next = || args.next().filter(|arg| !arg.is_empty()).map(str::to_owned);
        match raw.kind.as_str() {
            "RUN" => {
                let command = next().ok_or("it has a command and perhaps a user")?;
                Ok(Self::Run { command, user: next() })
            }
            "COPY" => Copy::new(&raw).map(Self::Copy),
            "ENV" => variables(&raw.args).map(Self::Env),
            "WORKDIR" => next().map(Self::Workdir).ok_or("it has a directory"),
            "USER" => next().map(Self::User).ok_or("it has a user"),
            _ => Err("it is RUN, COPY, ENV, WORKDIR or USER"),
        }
    }

    /// In a few words.
    pub fn said(&self) -> String {
        match self {
            Self::Run { command, .. } => format!("RUN {command}"),
            Self::Copy(copy) => format!("COPY {} {}", copy.source, copy.destination),
            Self::Env(envs) => {
                let names: Vec<&str> = envs.iter().map(|(name, _)| name.as_str()).collect();
                format!("ENV {}", names.join(" "))
            }
            Self::Workdir(path) => format!("WORKDIR {path}"),
            Self::User(user) => format!("USER {user}"),
        }
    }
}

fn variables(args: &[String]) -> Result<Vec<(String, String)>, &'static str> {
    let (pairs, []) = args.as_chunks::<2>() else { return Err("a variable has no value") };
    let pairs = pairs.iter().map(|[name, value]| match is_name(name) {
        true => Ok((name.clone(), value.clone())),
        false => Err("a variable's name has letters, digits and '_', and no digit first"),
    });
    pairs.collect()
}

fn is_name(name: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    !name.is_empty() && !name.starts_with(|c: char| c.is_ascii_digit()) && name.bytes().all(word)
}

impl Copy {
    fn new(raw: &RawStep) -> Result<Self, &'static str> {
        let arg = |place: usize| raw.args.get(place).filter(|arg| !arg.is_empty());
        let (Some(source), Some(destination)) = (arg(0), arg(1)) else {
            return Err("it has a source and a destination");
        };
        let hash = raw.files_hash.clone().filter(|hash| is_hash(hash));
        let owner = arg(2).cloned();
        if owner.as_deref().is_some_and(|owner| !is_owner(owner)) {
            return Err("its owner is a user, or a user and a group with a colon");
        }
        Ok(Self {
            source: below(source).ok_or("its source leaves the directory")?,
            destination: destination.clone(),
            owner,
            mode: arg(3).map(|text| mode(text)).transpose()?,
            hash: hash.ok_or("it has a filesHash of hexadecimal digits")?,
        })
    }
}

/// Whether a text is a hash of files.
pub fn is_hash(text: &str) -> bool {
    (1..=MAX_HASH).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn is_owner(owner: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    let name = |text: &str| !text.is_empty() && !text.starts_with('-') && text.bytes().all(word);
    match owner.split_once(':') {
        Some((user, group)) => name(user) && name(group),
        None => name(owner),
    }
}

fn mode(text: &str) -> Result<u32, &'static str> {
    let digits = (1..=5).contains(&text.len()) && text.bytes().all(|b| (b'0'..=b'7').contains(&b));
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| digits && *mode <= 0o7777);
    mode.ok_or("its mode is an octal number up to 7777")
}

/// A relative path without `.` and `..` in it; none if it leads out of where it begins.
fn below(path: &str) -> Option<String> {
    let mut parts = Vec::new();
    if path.starts_with('/') {
        return None;
    }
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(if parts.is_empty() { ".".into() } else { parts.join("/") })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn step(kind: &str, args: &[&str]) -> Result<Step, &'static str> {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        Step::new(RawStep { kind: kind.into(), args, files_hash: Some("ab12".into()) })
    }

    #[test]
    fn steps_are_read_as_clients_write_them() {
        let run = |user: Option<&str>| Step::Run {
            command: "make && true".into(),
            user: user.map(str::to_owned),
        };
        assert_eq!(step("RUN", &["make && true"]), Ok(run(None)));
        assert_eq!(step("RUN", &["make && true", "root"]), Ok(run(Some("root"))));
        let copy = Copy {
            source: "a/b".into(),
            destination: "/srv/".into(),
            owner: None,
            mode: Some(0o755),
            hash: "ab12".into(),
        };
        let args = ["./a/x/../b", "/srv/", "", "0755"];
        assert_eq!(step("COPY", &args), Ok(Step::Copy(copy)));
        let envs = [("A", "1"), ("B", "")].map(|(n, v)| (n.to_owned(), v.to_owned()));
        assert_eq!(step("ENV", &["A", "1", "B", ""]), Ok(Step::Env(envs.to_vec())));
        assert_eq!(step("WORKDIR", &["/srv"]), Ok(Step::Workdir("/srv".into())));
        assert_eq!(step("USER", &["root"]), Ok(Step::User("root".into())));
    }

    #[test]
    fn steps_that_are_none_are_refused() {
        let cases: [(&str, &[&str]); 14] = [
            ("EXPOSE", &["80"]),
            ("RUN", &[]),
            ("RUN", &["a\0b"]),
            ("USER", &[""]),
            ("WORKDIR", &[]),
            ("ENV", &["A"]),
            ("ENV", &["A-B", "1"]),
            ("ENV", &["", "1"]),
            ("COPY", &["a"]),
            ("COPY", &["/etc", "b"]),
            ("COPY", &["a/../../b", "c"]),
            ("COPY", &["a", "b", "root; reboot"]),
            ("COPY", &["a", "b", "root:"]),
            ("COPY", &["a", "b", "", "0o7"]),
        ];
        for (kind, args) in cases {
            step(kind, args).unwrap_err();
        }
        let files_hash = Some("../../etc".into());
        let raw = RawStep { kind: "COPY".into(), args: vec!["a".into(), "b".into()], files_hash };
        Step::new(raw).unwrap_err();
    }

    #[test]
    fn there_are_not_too_many_steps() {
        let raw = RawStep { kind: "USER".into(), args: vec!["a".into()], files_hash: None };
        assert_eq!(Step::all(vec![raw.clone(); MAX_STEPS]).unwrap().len(), MAX_STEPS);
        assert_eq!(Step::all(vec![raw; MAX_STEPS + 1]), Err(SpecError::Steps));
    }

    #[test]
    fn only_the_base_image_can_be_begun_from() {
        let image = |name: &str| Parent::new(None, Some(name.into()));
        for name in ["e2bdev/base", "e2bdev/base:latest", "docker.io/e2bdev/base:1"] {
            assert_eq!(image(name), Ok(Parent::Base), "{name}");
        }
        for name in ["debian:12", "e2bdev/base-image", "e2bdev/base/x", "evil/e2bdev/base"] {
            assert_eq!(image(name), Err(SpecError::Image(name.into())));
        }
        assert_eq!(Parent::new(None, None), Err(SpecError::From));
        assert_eq!(Parent::new(Some("a".into()), Some("b".into())), Err(SpecError::From));
        assert_eq!(Parent::new(Some("a".into()), None), Ok(Parent::Template("a".into())));
    }

    proptest! {
        #[test]
        fn no_source_leaves_its_top(path in "[a./]{0,12}") {
            if let Some(clean) = below(&path) {
                prop_assert!(!clean.starts_with('/') && !clean.is_empty());
                prop_assert!(clean.split('/').all(|part| !part.is_empty() && part != ".."));
            }
        }

        #[test]
        fn any_step_is_taken_or_refused(
            kind in "RUN|COPY|ENV|WORKDIR|USER|.{0,5}",
            args in prop::collection::vec(".{0,8}", 0..6), hash in prop::option::of(".{0,8}")
        ) {
            let _ = Step::new(RawStep { kind, args, files_hash: hash });
        }
    }
}
