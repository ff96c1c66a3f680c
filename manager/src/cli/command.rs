//! How a command is run in a guest: what `coppice run` and `coppice exec` have in common.

use std::collections::BTreeMap;
use std::time::Duration;

use coppice_manager::failure::{Class, Failure};

use super::session::Request;

/// Arguments about the command.
#[derive(Debug, clap::Args)]
pub(super) struct CommandArgs {
    /// Set an environment variable; KEY alone copies it from here
    #[arg(short, long, value_name = "KEY[=VALUE]")]
    env: Vec<String>,
    /// Working directory in the guest
    #[arg(long, value_name = "DIR")]
    cwd: Option<String>,
    /// Guest user to run as
    #[arg(short, long, value_name = "USER")]
    user: Option<String>,
    /// End the command after this many seconds, with exit code 124
    #[arg(long, value_name = "SECS", value_parser = seconds)]
    timeout: Option<Duration>,
    /// Pass standard input on to the command
    #[arg(short, long)]
    interactive: bool,
    /// Run the command on a terminal
    #[arg(short, long)]
    tty: bool,
    /// Print one JSON event per line instead of the command's plain output
    #[arg(long)]
    pub(super) json: bool,
}

/// A number of seconds, fractions allowed, that is more than none.
pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err("not a positive number of seconds".into()),
    }
}

impl CommandArgs {
    /// What to run.
    pub(super) fn request(&self, command: &[String]) -> Result<Request, Failure> {
        let mut envs = BTreeMap::new();
        if self.tty
            && let Ok(term) = std::env::var("TERM")
        {
            envs.insert("TERM".to_owned(), term);
        }
        for entry in &self.env {
            let (key, value) = match entry.split_once('=') {
                Some((key, value)) => (key, Some(value.to_owned())),
                None => (entry.as_str(), std::env::var(entry).ok()),
            };
            if key.is_empty() {
                let message = format!("--env {entry} has no name");
                return Err(Failure::new(Class::Usage, message, "write KEY=VALUE or KEY"));
            }
            if let Some(value) = value {
                envs.insert(key.to_owned(), value);
            }
        }
        let mut command = command.iter().cloned();
        Ok(Request {
            program: command.next().unwrap_or_default(),
            args: command.collect(),
            envs,
            cwd: self.cwd.clone(),
            user: self.user.clone(),
            timeout: self.timeout,
            interactive: self.interactive,
            tty: self.tty,
        })
    }
}
