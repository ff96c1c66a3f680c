//! What the host told the agent for requests: the token they need, and defaults.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use coppice_agent_protocol::control::Init;

use crate::users::{DEFAULT_USER, User, UserError};

/// Why settings are refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SettingsError {
    /// A token no header could carry.
    #[error("access_token is 1 to {max} visible ASCII characters", max = Init::MAX_TOKEN)]
    Token,
    /// An environment no process could get.
    #[error("envs have names without '=' and no zero bytes")]
    Envs,
    /// A working directory that says not where it is.
    #[error("default_workdir is an absolute path")]
    Workdir,
    /// A user that cannot be used.
    #[error("default_user cannot be used: {0}")]
    User(UserError),
}

/// The settings; see the module.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    token: Option<Token>,
    envs: BTreeMap<String, String>,
    default_user: Option<String>,
    default_workdir: Option<PathBuf>,
}

impl Settings {
    /// Takes over what is set in `init`, or nothing when a part of it is refused.
    pub(crate) fn apply(&mut self, init: Init) -> Result<(), SettingsError> {
        let Init { access_token, envs, default_user, default_workdir } = init;
        let token = access_token.map(Token::new).transpose()?;
        if envs.iter().flatten().any(|(name, value)| !is_variable(name, value)) {
            return Err(SettingsError::Envs);
        }
        let workdir = default_workdir.map(absolute).transpose()?;
        let user = default_user.map(|name| (!name.is_empty()).then_some(name));
        if let Some(Some(name)) = &user {
            User::find(Some(name)).map_err(SettingsError::User)?;
        }
        self.token = token.unwrap_or_else(|| self.token.take());
        self.envs = envs.unwrap_or_else(|| std::mem::take(&mut self.envs));
        self.default_user = user.unwrap_or_else(|| self.default_user.take());
        self.default_workdir = workdir.unwrap_or_else(|| self.default_workdir.take());
        Ok(())
    }

    /// The user a request means that names this one or none.
    pub(crate) fn user(&self, name: Option<&str>) -> Result<User, UserError> {
        let name = name.filter(|name| !name.is_empty());
        let default = self.default_user.as_deref();
        let user = User::find(name.or(default))?;
        // The directory was chosen for the default user.
        let own = name.is_none_or(|name| name == default.unwrap_or(DEFAULT_USER));
        Ok(match &self.default_workdir {
            Some(workdir) => user.working_in(workdir, own),
            None => user,
        })
    }

    /// The token requests need, if they need one.
    pub(crate) const fn token(&self) -> Option<&Token> {
        self.token.as_ref()
    }

    /// Environment of every process.
    pub(crate) const fn envs(&self) -> &BTreeMap<String, String> {
        &self.envs
    }
}

/// Whether a process can have such a variable.
pub(crate) fn is_variable(name: &str, value: &str) -> bool {
    !name.is_empty() && !name.contains(['\0', '=']) && !value.contains('\0')
}

fn absolute(path: String) -> Result<Option<PathBuf>, SettingsError> {
    if path.is_empty() {
        return Ok(None);
    }
    let usable = Path::new(&path).is_absolute() && !path.contains('\0');
    usable.then(|| Some(path.into())).ok_or(SettingsError::Workdir)
}

/// A secret that requests have to know.
pub(crate) struct Token(String);

impl Token {
    fn new(text: String) -> Result<Option<Self>, SettingsError> {
        if text.is_empty() {
            return Ok(None);
        }
        let usable =
            text.len() <= Init::MAX_TOKEN && text.bytes().all(|byte| byte.is_ascii_graphic());
        usable.then_some(Some(Self(text))).ok_or(SettingsError::Token)
    }

    /// Whether this is the token. Takes the same time wherever a guess is wrong.
    pub(crate) fn is(&self, guess: &[u8]) -> bool {
        same(self.0.as_bytes(), guess)
    }

    /// The secret itself.
    pub(crate) fn text(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Compares in a time that depends on the lengths alone.
pub(crate) fn same(left: &[u8], right: &[u8]) -> bool {
    let differing = left
        .iter()
        .zip(right)
        .fold(0, |differing, (left, right)| std::hint::black_box(differing | (left ^ right)));
    left.len() == right.len() && differing == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(text: &str) -> Init {
        Init { access_token: Some(text.into()), ..Init::default() }
    }

    fn workdir(path: &str) -> Init {
        Init { default_workdir: Some(path.into()), ..Init::default() }
    }

    fn resolved(settings: &Settings, path: &str) -> PathBuf {
        settings.user(None).unwrap().resolve(path)
    }

    #[test]
    fn what_a_message_leaves_out_stays() {
        let mut settings = Settings::default();
        settings.apply(token("secret")).unwrap();
        settings.apply(workdir("/srv")).unwrap();
        settings.apply(Init::default()).unwrap();
        assert!(settings.token().unwrap().is(b"secret"));
        assert_eq!(resolved(&settings, "x"), Path::new("/srv/x"));
    }

    #[test]
    fn empty_texts_take_settings_back() {
        let mut settings = Settings::default();
        settings.apply(Init { access_token: Some("secret".into()), ..workdir("/srv") }).unwrap();
        settings.apply(Init { access_token: Some(String::new()), ..workdir("") }).unwrap();
        assert!(settings.token().is_none());
        let user = settings.user(None).unwrap();
        assert_eq!(user.resolve("x"), user.home.join("x"));
    }

    #[test]
    fn users_other_than_the_default_one_keep_their_home_for_relative_paths() {
        let mut settings = Settings::default();
        let default_user = Some("nobody".to_owned());
        settings.apply(Init { default_user, ..workdir("/srv") }).unwrap();
        let resolved = |name| settings.user(name).unwrap().resolve("x");
        assert_eq!(resolved(None), Path::new("/srv/x"));
        assert_eq!(resolved(Some("nobody")), Path::new("/srv/x"));
        assert_eq!(resolved(Some("root")), Path::new("/root/x"));
    }

    #[test]
    fn what_is_refused_changes_nothing() {
        let mut settings = Settings::default();
        settings.apply(token("secret")).unwrap();
        let envs = BTreeMap::from([("A=B".to_owned(), String::new())]);
        for refused in [
            Init { envs: Some(envs), ..token("other") },
            Init { default_user: Some("no-such-user".into()), ..token("other") },
            Init { default_workdir: Some("relative".into()), ..token("other") },
            token("two words"),
        ] {
            settings.apply(refused).unwrap_err();
        }
        assert!(settings.token().unwrap().is(b"secret"));
    }

    #[test]
    fn only_the_token_itself_passes() {
        let token = Token::new("secret".into()).unwrap().unwrap();
        for guess in ["", "secre", "secrets", "Secret"] {
            assert!(!token.is(guess.as_bytes()), "{guess}");
        }
    }
}
