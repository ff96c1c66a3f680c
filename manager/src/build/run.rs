//! The steps of a build, done through the agent of its guest.

use std::path::Path;

use coppice_agent_protocol::control::Init;
use coppice_agent_protocol::process::ProcessConfig;
use thiserror::Error;

use super::log::{Level, Lines, Log};
use super::spec::{Copy, Step};
use crate::agent::{self, Agent, Start};
use crate::store::GuestSettings;
use crate::template::{Channel, follow, keep, said, shell, tail};

/// Who may do everything in a guest.
const ROOT: &str = "root";
/// Where an archive is put in the guest; its `/tmp` is memory.
const ARCHIVE: &str = "/var/tmp/.coppice-upload.tar";
/// Copies files of the archive.
const COPY: &str = include_str!("copy.sh");
/// Tells who runs it, and what a path means to it.
const RESOLVE: &str = r#"id -un && realpath -m -- "$1""#;
/// Makes a directory that is not there, and has it be somebody's.
const MAKE: &str = r#"[ -d "$1" ] || { mkdir -p -- "$1" && chown -- "$2:" "$1"; }"#;
/// The most bytes of an answer that is read as a whole.
const MAX_ANSWER: usize = 64 * 1024;

/// Why a step failed.
#[derive(Debug, Error)]
pub enum Error {
    /// The agent refused something or is gone.
    #[error("the guest's agent failed")]
    Agent(#[from] agent::Error),
    /// A command failed.
    #[error("the command ended with code {code}{}", said(output))]
    Command {
        /// Its exit code, as a shell has it.
        code: u8,
        /// The last of its output.
        output: String,
    },
    /// A program of ours got no sense out of the guest.
    #[error("the guest does not say what '{0}' means in it")]
    Path(String),
    /// The files that were uploaded are not there any more.
    #[error("the uploaded files cannot be read: build again with skip_cache to upload them")]
    Upload(#[source] std::io::Error),
}

/// Does steps in a guest.
#[derive(Debug)]
pub struct Runner<'a> {
    /// The guest's agent.
    pub agent: &'a Agent,
    /// What the guest was told; steps change it, and the guest is told again.
    pub settings: GuestSettings,
    /// Where it is said what happens.
    pub log: &'a Log,
}

impl Runner<'_> {
    /// Does a step, the one of this name in the log. `archive` is where its files are.
    ///
    /// # Errors
    /// [`Error`], with the end of what a command said.
    pub async fn run(
        &mut self,
        name: &str,
        step: &Step,
        archive: Option<&Path>,
    ) -> Result<(), Error> {
        self.log.add(Level::Info, Some(name), &step.said());
        match step {
            Step::Run { command, user } => {
                let mut start = shell(command);
                start.user.clone_from(user);
                start.process.cwd.clone_from(&self.settings.default_workdir);
                self.finish(name, start).await
            }
            Step::Copy(copy) => self.copy(name, copy, archive).await,
            Step::Env(variables) => {
                for (variable, value) in variables {
                    let value = self.expand(value).await?;
                    self.settings.envs.insert(variable.clone(), value);
                }
                self.tell().await
            }
            Step::Workdir(path) => {
                let (user, path) = self.resolve(path).await?;
                self.finish(name, script(MAKE, &[&path, &user])).await?;
                self.settings.default_workdir = Some(path);
                self.tell().await
            }
            Step::User(user) => {
                self.settings.default_user = Some(user.clone());
                self.tell().await
            }
        }
    }

    /// Tells the guest what is set now.
    async fn tell(&self) -> Result<(), Error> {
        let settings = &self.settings;
        let init = Init {
            access_token: None,
            envs: Some(settings.envs.clone()),
            default_user: Some(settings.default_user.clone().unwrap_or_default()),
            default_workdir: Some(settings.default_workdir.clone().unwrap_or_default()),
        };
        Ok(self.agent.init(&init).await?)
    }

    async fn copy(&self, name: &str, copy: &Copy, archive: Option<&Path>) -> Result<(), Error> {
        let gone = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let archive = archive.ok_or_else(|| Error::Upload(gone()))?;
        let file = tokio::fs::File::open(archive).await.map_err(Error::Upload)?;
        self.agent.upload(ARCHIVE, Some(ROOT), file).await?;
        let (user, destination) = self.resolve(&copy.destination).await?;
        let owner = copy.owner.clone().unwrap_or(user);
        let mode = copy.mode.map(|mode| format!("{mode:o}")).unwrap_or_default();
        // A directory that may be read may be searched.
        let directories = copy.mode.map(|mode| format!("{:o}", mode | (mode & 0o444) >> 2));
        let variables = [
            ("TAR", ARCHIVE.to_owned()),
            ("SRC", copy.source.clone()),
            ("DEST", destination),
            ("INTO", if copy.destination.ends_with('/') { "/".into() } else { String::new() }),
            ("OWNER", if owner.contains(':') { owner } else { format!("{owner}:") }),
            ("MODE", mode),
            ("DIRMODE", directories.unwrap_or_default()),
        ];
        let mut start = script(COPY, &[]);
        start.process.envs =
            variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        self.finish(name, start).await
    }

    /// The current user's name, and what a path means to it.
    async fn resolve(&self, path: &str) -> Result<(String, String), Error> {
        let mut start = script(RESOLVE, &[path]);
        start.user = None;
        start.process.cwd.clone_from(&self.settings.default_workdir);
        let told = self.answer(start).await?;
        let parts = told
            .split_once('\n')
            .and_then(|(user, rest)| Some((user.to_owned(), rest.strip_suffix('\n')?.to_owned())));
        let parts = parts.filter(|(user, path)| !user.is_empty() && path.starts_with('/'));
        parts.ok_or_else(|| Error::Path(path.to_owned()))
    }

    /// A variable's value with the variables in it filled in, as the guest knows them.
    async fn expand(&self, value: &str) -> Result<String, Error> {
        if !value.contains('$') {
            return Ok(value.to_owned());
        }
        let start = shell(&format!("printf %s \"{}\"", quoted(value)));
        self.answer(start).await
    }

    /// Runs a program to its end, and logs what it says.
    async fn finish(&self, name: &str, start: Start) -> Result<(), Error> {
        let mut stream = self.agent.start(start).await?;
        let (mut out, mut err, mut output) = (Lines::default(), Lines::default(), Vec::new());
        let line = |level: Level| move |text: &str| self.log.add(level, Some(name), text);
        let code = follow(&mut stream, |channel, piece| {
            keep(&mut output, piece);
            match channel {
                Channel::Out => out.push(piece, line(Level::Debug)),
                Channel::Err => err.push(piece, line(Level::Warn)),
            }
        })
        .await?;
        out.end(line(Level::Debug));
        err.end(line(Level::Warn));
        succeeded(code, &output)
    }

    /// Runs a program to its end; what it said on its standard output.
    async fn answer(&self, start: Start) -> Result<String, Error> {
        let mut stream = self.agent.start(start).await?;
        let (mut answer, mut errors) = (Vec::new(), Vec::new());
        let code = follow(&mut stream, |channel, piece| match channel {
            Channel::Out => {
                let room = MAX_ANSWER.saturating_sub(answer.len()).min(piece.len());
                answer.extend(piece.iter().take(room));
            }
            Channel::Err => keep(&mut errors, piece),
        })
        .await?;
        succeeded(code, &errors)?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }
}

fn succeeded(code: u8, output: &[u8]) -> Result<(), Error> {
    match code {
        0 => Ok(()),
        code => Err(Error::Command { code, output: tail(output) }),
    }
}

/// A program of ours, for root.
fn script(text: &str, args: &[&str]) -> Start {
    let mut all = vec!["-c".to_owned(), text.to_owned(), "bash".to_owned()];
    all.extend(args.iter().map(|arg| (*arg).to_owned()));
    let process = ProcessConfig { cmd: "/bin/bash".into(), args: all, ..ProcessConfig::default() };
    Start { process, user: Some(ROOT.into()), ..Start::default() }
}

/// A text for within double quotes, where only `$NAME` and `${NAME}` mean something.
fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len());
    for (place, letter) in text.char_indices() {
        let rest = text.get(place + letter.len_utf8()..).unwrap_or_default();
        let literal = match letter {
            '"' | '\\' | '`' => true,
            '$' => !is_variable(rest),
            _ => false,
        };
        if literal {
            quoted.push('\\');
        }
        quoted.push(letter);
    }
    quoted
}

/// Whether a variable's name follows, perhaps in braces.
fn is_variable(rest: &str) -> bool {
    let first = |byte: &u8| byte.is_ascii_alphabetic() || *byte == b'_';
    let bytes = match rest.strip_prefix('{') {
        Some(inner) => match inner.split_once('}') {
            Some((name, _)) => {
                let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
                return name.as_bytes().first().is_some_and(first) && name.bytes().all(word);
            }
            None => return false,
        },
        None => rest.as_bytes(),
    };
    bytes.first().is_some_and(first)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    fn expanded(text: &str) -> String {
        let command = format!("printf %s \"{}\"", quoted(text));
        let output = Command::new("bash").args(["-c", &command]).env("A", "1").output().unwrap();
        assert!(output.stderr.is_empty(), "{text}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn variables_are_filled_in_and_nothing_else() {
        assert_eq!(expanded("$A:${A}0/$NONE."), "1:10/.");
        for text in ["$(id)", "${A:-x}", "`id`", "$1", "$", "\\$A\\"] {
            let wanted = text.replace("$A", "1");
            assert_eq!(expanded(text), wanted, "{text}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_text_without_variables_stays(text in "[a-z\"'\\\\`(){};&|<>*?!# \n]{0,20}") {
            prop_assert_eq!(expanded(&text), text);
        }
    }
}
