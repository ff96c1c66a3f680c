//! What there is at a path.

use std::fs::{FileType as StdFileType, Metadata as StdMetadata};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use coppice_agent_protocol::filesystem::{EntryInfo, FileType};
use coppice_agent_protocol::timestamp::Timestamp;

use super::Metadata;
use crate::users::Names;

/// Describes what is at `path`; a link is described, not followed.
pub(crate) fn describe(path: &Path, names: &Names) -> io::Result<EntryInfo> {
    let own = path.symlink_metadata()?;
    let is_symlink = own.file_type().is_symlink();
    let (kind, mode, symlink_target) = if is_symlink { follow(path) } else { plain(&own) };
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    // The kernel counts the nanoseconds from 0 to 999,999,999.
    let nanos = u32::try_from(own.mtime_nsec()).unwrap_or(0);
    Ok(EntryInfo {
        name,
        kind,
        path: path.to_string_lossy().into_owned(),
        size: i64::try_from(own.len()).unwrap_or(i64::MAX),
        mode,
        permissions: permissions(&own),
        owner: names.user(own.uid()),
        group: names.group(own.gid()),
        modified_time: Some(Timestamp::from_unix(own.mtime(), nanos)),
        symlink_target,
        metadata: Metadata::of(path).into_map(),
        is_symlink,
    })
}

fn plain(own: &StdMetadata) -> (FileType, u32, Option<String>) {
    (kind(own.file_type()), own.mode() & 0o777, None)
}

/// The type and mode of what a link leads to, and where that is.
fn follow(path: &Path) -> (FileType, u32, Option<String>) {
    let target = std::fs::canonicalize(path);
    match target.and_then(|target| Ok((target.metadata()?, target))) {
        Ok((metadata, target)) => {
            let (kind, mode, _) = plain(&metadata);
            (kind, mode, Some(target.to_string_lossy().into_owned()))
        }
        Err(_) => (FileType::Symlink, 0, Some(path.to_string_lossy().into_owned())),
    }
}

fn kind(file_type: StdFileType) -> FileType {
    if file_type.is_file() {
        FileType::File
    } else if file_type.is_dir() {
        FileType::Directory
    } else {
        FileType::Unspecified
    }
}

/// Type and permissions in the form of Go's `fs.FileMode`, which the SDKs show: letters for what is
/// not a regular file, or a hyphen, then nine for the permissions.
fn permissions(metadata: &StdMetadata) -> String {
    let (mode, file_type) = (metadata.mode(), metadata.file_type());
    let letters = [
        ('d', file_type.is_dir()),
        ('L', file_type.is_symlink()),
        ('D', file_type.is_block_device() || file_type.is_char_device()),
        ('p', file_type.is_fifo()),
        ('S', file_type.is_socket()),
        ('u', mode & 0o4000 != 0),
        ('g', mode & 0o2000 != 0),
        ('c', file_type.is_char_device()),
        ('t', mode & 0o1000 != 0),
    ];
    let mut text: String =
        letters.iter().filter(|(_, holds)| *holds).map(|(letter, _)| letter).collect();
    if text.is_empty() {
        text.push('-');
    }
    for (index, letter) in "rwxrwxrwx".chars().enumerate() {
        text.push(if mode & (0o400 >> index) != 0 { letter } else { '-' });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    fn text(path: &Path, mode: u32) -> String {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        permissions(&path.symlink_metadata().unwrap())
    }

    #[test]
    fn permissions_have_the_letters_the_sdks_show() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert_eq!(text(&file, 0o640), "-rw-r-----");
        assert_eq!(text(&file, 0o4755), "urwxr-xr-x");
        assert_eq!(text(dir.path(), 0o1777), "dtrwxrwxrwx");
        let device = permissions(&Path::new("/dev/null").metadata().unwrap());
        assert!(device.starts_with("Dcrw"), "{device}");
    }

    #[test]
    fn a_link_that_leads_nowhere_is_still_there() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        symlink("nowhere", &link).unwrap();
        let entry = describe(&link, &Names::default()).unwrap();
        assert_eq!((entry.kind, entry.is_symlink, entry.mode), (FileType::Symlink, true, 0));
    }
}
