//! Programs of the host for tests in the nested lab, whose userland has hardly any.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use coppice_lab::paths;

/// A directory below `target` with programs of the host that run in the lab too: each with the
/// libraries it is linked to, started by the host's loader. To be called on the host, and again in
/// the lab, where they are only named.
///
/// # Errors
/// The system's; a program that is not there.
pub fn host_tools(programs: &[&str]) -> io::Result<PathBuf> {
    let directory = paths::target_dir().join("coppice/tools");
    if crate::lane::is_inside() {
        return Ok(directory);
    }
    fs::create_dir_all(&directory)?;
    for program in programs {
        let found = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"]
            .map(|place| Path::new(place).join(program))
            .into_iter()
            .find(|path| path.is_file())
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, *program))?;
        let libraries = Command::new("ldd").arg(&found).output()?.stdout;
        let mut loader = None;
        for word in String::from_utf8_lossy(&libraries).split_whitespace() {
            let path = Path::new(word);
            let Some(name) = path.file_name().filter(|_| path.is_absolute()) else { continue };
            if name.as_encoded_bytes().starts_with(b"ld-linux") {
                loader = Some(directory.join(name));
            }
            put(path, &directory.join(name))?;
        }
        let loader = loader.ok_or_else(|| io::Error::other("ldd names no loader"))?;
        let real = directory.join(format!("{program}.bin"));
        put(&found, &real)?;
        let script = format!(
            "#!/bin/sh\nexec {} --library-path {} {} \"$@\"\n",
            loader.display(),
            directory.display(),
            real.display()
        );
        let temp = directory.join(format!(".{program}.{}", std::process::id()));
        fs::write(&temp, script)?;
        fs::set_permissions(&temp, fs::Permissions::from_mode(0o755))?;
        fs::rename(&temp, directory.join(program))?;
    }
    Ok(directory)
}

/// Copies a file in one step: other tests may do the same at this moment.
fn put(from: &Path, to: &Path) -> io::Result<()> {
    let mut temp = to.as_os_str().to_owned();
    temp.push(format!(".{}", std::process::id()));
    fs::copy(from, &temp)?;
    fs::rename(&temp, to)
}
