//! Users and groups, from `/etc/passwd` and `/etc/group`.
//!
//! The binary is static, so the C library's lookup (which loads plug-ins) is not used.

use std::collections::HashMap;
use std::ffi::CString;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use nix::unistd::{Gid, Uid};

/// The user processes run as when a request names none and this one exists; else root.
pub(crate) const DEFAULT_USER: &str = "user";

/// Bytes of a file that are read; the files of large sites have less.
const MAX_FILE: u64 = 1024 * 1024;

/// Why a user cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UserError {
    /// No such user.
    #[error("invalid username: '{0}'")]
    Unknown(String),
    /// The files cannot be read.
    #[error("reading {path}")]
    Read {
        /// Which file.
        path: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// A user of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) uid: Uid,
    pub(crate) gid: Gid,
    pub(crate) home: PathBuf,
    pub(crate) shell: String,
    /// What no path means.
    workdir: PathBuf,
    /// Where relative paths start.
    base: PathBuf,
}

impl User {
    /// The user of that name; without a name, the default user. Its paths start at its home.
    ///
    /// # Errors
    /// When there is no such user, or the files cannot be read.
    pub(crate) fn find(name: Option<&str>) -> Result<Self, UserError> {
        let passwd = read("/etc/passwd")?;
        let name = name.filter(|name| !name.is_empty());
        let found = match name {
            Some(name) => lookup(&passwd, name),
            None => lookup(&passwd, DEFAULT_USER).or_else(|| lookup(&passwd, "root")),
        };
        match (found, name) {
            (Some(user), _) => Ok(user),
            // An image without a passwd file still has its superuser.
            (None, None | Some("root")) => Ok(Self::root()),
            (None, Some(name)) => Err(UserError::Unknown(name.to_owned())),
        }
    }

    fn root() -> Self {
        let (uid, gid) = (Uid::from_raw(0), Gid::from_raw(0));
        let (home, shell) = (PathBuf::from("/root"), "/bin/sh".to_owned());
        Self::new("root".to_owned(), uid, gid, home, shell)
    }

    fn new(name: String, uid: Uid, gid: Gid, home: PathBuf, shell: String) -> Self {
        Self { name, uid, gid, workdir: home.clone(), base: home.clone(), home, shell }
    }

    /// The same user with another working directory. Relative paths start there as well if it is
    /// the user's `own`, and not what somebody else chose.
    pub(crate) fn working_in(self, workdir: &Path, own: bool) -> Self {
        let base = if own { workdir.to_owned() } else { self.base };
        Self { workdir: workdir.to_owned(), base, ..self }
    }

    /// All groups the user is in, the primary one first.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(crate) fn groups(&self) -> Result<Vec<Gid>, UserError> {
        Ok(groups_of(&read("/etc/group")?, self))
    }

    /// The absolute path a request means by `path`: nothing means the working directory, `~` is
    /// the user's home, and `.` and `..` are resolved in the text.
    pub(crate) fn resolve(&self, path: &str) -> PathBuf {
        let joined = match path.strip_prefix('~') {
            None if path.is_empty() => self.workdir.clone(),
            Some("") => self.home.clone(),
            Some(rest) if rest.starts_with('/') => self.home.join(rest.trim_start_matches('/')),
            _ => self.base.join(path),
        };
        clean(&joined)
    }
}

/// Names of user and group numbers.
#[derive(Debug, Default)]
pub(crate) struct Names {
    users: HashMap<u32, String>,
    groups: HashMap<u32, String>,
}

impl Names {
    /// Reads all names. Without the files there are none.
    pub(crate) fn read() -> Self {
        let names = |path| names_by_number(&read(path).unwrap_or_default());
        Self { users: names("/etc/passwd"), groups: names("/etc/group") }
    }

    /// The user's name; the number, if it has none.
    pub(crate) fn user(&self, number: u32) -> String {
        self.users.get(&number).cloned().unwrap_or_else(|| number.to_string())
    }

    /// The group's name; the number, if it has none.
    pub(crate) fn group(&self, number: u32) -> String {
        self.groups.get(&number).cloned().unwrap_or_else(|| number.to_string())
    }
}

/// Lines begin with `name:password:number` in both files. The first name of a number counts.
fn names_by_number(text: &str) -> HashMap<u32, String> {
    let mut names = HashMap::new();
    for line in text.lines() {
        let mut fields = line.split(':');
        let (Some(name), Some(number)) = (fields.next(), fields.nth(1)) else { continue };
        if let Ok(number) = number.parse() {
            names.entry(number).or_insert_with(|| name.to_owned());
        }
    }
    names
}

/// Resolves `.` and `..` in the text of an absolute path.
fn clean(path: &Path) -> PathBuf {
    use std::path::Component;
    let mut cleaned = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::Normal(name) => cleaned.push(name),
            Component::ParentDir => {
                cleaned.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    cleaned
}

/// A path for a system call.
///
/// # Errors
/// When it has a zero byte.
pub(crate) fn c_path(path: &Path) -> io::Result<CString> {
    use std::os::unix::ffi::OsStrExt as _;
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn read(path: &'static str) -> Result<String, UserError> {
    let mut text = Vec::new();
    let file = std::fs::File::open(path);
    match file.and_then(|file| file.take(MAX_FILE).read_to_end(&mut text)) {
        Ok(_) => Ok(String::from_utf8_lossy(&text).into_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(source) => Err(UserError::Read { path, source }),
    }
}

/// Lines are `name:password:uid:gid:comment:home:shell`.
fn lookup(passwd: &str, name: &str) -> Option<User> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        if fields.next()? != name {
            return None;
        }
        let mut fields = fields.skip(1);
        let uid = Uid::from_raw(fields.next()?.parse().ok()?);
        let gid = Gid::from_raw(fields.next()?.parse().ok()?);
        let home = fields.nth(1).filter(|home| home.starts_with('/')).unwrap_or("/");
        let shell = fields.next().filter(|shell| !shell.is_empty()).unwrap_or("/bin/sh");
        Some(User::new(name.to_owned(), uid, gid, PathBuf::from(home), shell.to_owned()))
    })
}

/// Lines are `name:password:gid:member,member`.
fn groups_of(group: &str, user: &User) -> Vec<Gid> {
    let mut groups = vec![user.gid];
    for line in group.lines() {
        let mut fields = line.split(':').skip(2);
        let (Some(gid), Some(members)) = (fields.next(), fields.next()) else { continue };
        let Ok(gid) = gid.parse().map(Gid::from_raw) else { continue };
        if members.split(',').any(|member| member == user.name) && !groups.contains(&gid) {
            groups.push(gid);
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\n\
                          bad:x:none:0:::\n\
                          user:x:1000:1001:A user,,,:/home/user:/bin/zsh\n\
                          bare:x:5:5:::\n";

    fn user(name: &str) -> User {
        lookup(PASSWD, name).unwrap()
    }

    #[test]
    fn a_user_has_the_fields_of_its_line() {
        let user = user("user");
        assert_eq!((user.uid.as_raw(), user.gid.as_raw()), (1000, 1001));
        assert_eq!((user.home.to_str(), user.shell.as_str()), (Some("/home/user"), "/bin/zsh"));
    }

    #[test]
    fn empty_fields_get_what_login_would_take() {
        let user = user("bare");
        assert_eq!((user.home.to_str(), user.shell.as_str()), (Some("/"), "/bin/sh"));
    }

    #[test]
    fn malformed_and_missing_lines_are_no_users() {
        assert_eq!(lookup(PASSWD, "bad"), None);
        assert_eq!(lookup(PASSWD, "nobody"), None);
    }

    #[test]
    fn groups_are_the_primary_one_and_the_memberships() {
        let group = "root:x:0:\nuser:x:1001:\nsudo:x:27:a,user\ndocker:x:998:b\nbad:x:y:user\n";
        let groups: Vec<u32> =
            groups_of(group, &user("user")).into_iter().map(Gid::as_raw).collect();
        assert_eq!(groups, [1001, 27]);
    }

    #[test]
    fn relative_paths_start_at_the_working_directory_but_home_stays_home() {
        let user = user("user").working_in(Path::new("/srv"), true);
        let cases = [("", "/srv"), ("a", "/srv/a"), ("~/a", "/home/user/a"), ("/a", "/a")];
        for (path, expected) in cases {
            assert_eq!(user.resolve(path), Path::new(expected), "{path}");
        }
    }

    #[test]
    fn the_directory_of_somebody_else_does_not_move_relative_paths() {
        let user = user("user").working_in(Path::new("/srv"), false);
        assert_eq!(user.resolve(""), Path::new("/srv"));
        assert_eq!(user.resolve("a"), Path::new("/home/user/a"));
    }

    #[test]
    fn numbers_have_the_first_name_that_has_them() {
        let names = names_by_number("a:x:7:\nb:x:7:\nbad:x:y:\n");
        assert_eq!(names, HashMap::from([(7, "a".to_owned())]));
    }

    #[test]
    fn paths_resolve_against_home() {
        let user = user("user");
        let cases = [
            ("", "/home/user"),
            ("~", "/home/user"),
            ("~/a", "/home/user/a"),
            ("a/./b/../c", "/home/user/a/c"),
            ("/etc//x", "/etc/x"),
            ("/../..", "/"),
            ("~other", "/home/user/~other"),
        ];
        for (path, expected) in cases {
            assert_eq!(user.resolve(path), Path::new(expected), "{path}");
        }
    }

    proptest! {
        #[test]
        fn resolved_paths_are_absolute_and_clean(path in "[a~./]{0,20}") {
            let resolved = user("user").resolve(&path);
            prop_assert!(resolved.is_absolute());
            prop_assert!(!resolved.components().any(|part| part == std::path::Component::ParentDir));
        }

        #[test]
        fn resolving_again_changes_nothing(path in ".{0,30}", workdir in "(/[a-z.]{1,3}){0,4}") {
            let user = user("user").working_in(Path::new(&format!("/{workdir}")), true);
            let resolved = user.resolve(&path);
            prop_assume!(resolved.to_str().is_some());
            prop_assert_eq!(user.resolve(resolved.to_str().unwrap()), resolved);
        }

        #[test]
        fn any_file_is_read_or_skipped(text in "[a-z0-9:\n]{0,80}") {
            let _ = lookup(&text, "a");
            let _ = names_by_number(&text);
            let _ = groups_of(&text, &user("user"));
        }
    }
}
