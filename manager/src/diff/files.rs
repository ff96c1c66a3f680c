//! The files of a file system, and how two such lists differ.

use std::collections::BTreeMap;
use std::fmt;

use ext4_view::{Ext4, Ext4Error, Ext4Read, Metadata, PathBuf};
use thiserror::Error;

/// Deepest directory looked into: a path of 4,096 bytes has no more parts.
const MAX_DEPTH: usize = 2048;
/// Most files looked at.
const MAX_FILES: usize = 10_000_000;

/// Why a file system cannot be read.
#[derive(Debug, Error)]
pub enum FilesError {
    /// It is none, or damaged.
    #[error("it is damaged or not ext4")]
    Ext4(#[source] Ext4Error),
    /// It has more files than are looked at, or deeper directories.
    #[error("it has more than {MAX_FILES} files or directories in a loop")]
    TooMany,
}

/// What is looked at of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    kind: String,
    mode: u16,
    owner: (u32, u32),
    /// Not of directories, whose size says nothing.
    size: Option<u64>,
    /// Not of directories, which change when what is in them comes and goes.
    modified: Option<(i64, u32)>,
    target: Option<Vec<u8>>,
}

/// Files by path.
pub(super) type Tree = BTreeMap<Vec<u8>, Entry>;

/// How a file changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// It is new.
    Added,
    /// It is not what it was.
    Modified,
    /// It is gone.
    Deleted,
}

impl Change {
    /// The word for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Added => "added",
            Self::Modified => "modified",
            Self::Deleted => "deleted",
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Added => "A",
            Self::Modified => "M",
            Self::Deleted => "D",
        })
    }
}

/// A file that changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changed {
    /// Position of its disk.
    pub disk: usize,
    /// How.
    pub change: Change,
    /// Its path, from the root of the disk; bytes as the guest wrote them.
    pub path: Vec<u8>,
}

/// Lists all files of a file system.
pub(super) fn read(disk: impl Ext4Read + 'static) -> Result<Tree, FilesError> {
    let fs = Ext4::load(Box::new(disk)).map_err(FilesError::Ext4)?;
    let mut tree = Tree::new();
    let mut waiting = vec![(PathBuf::new("/"), 0)];
    while let Some((directory, depth)) = waiting.pop() {
        for entry in fs.read_dir(&directory).map_err(FilesError::Ext4)? {
            let entry = entry.map_err(FilesError::Ext4)?;
            let name = entry.file_name();
            if name == "." || name == ".." {
                continue;
            }
            let path = entry.path();
            let metadata = fs.symlink_metadata(&path).map_err(FilesError::Ext4)?;
            let target = if metadata.is_symlink() {
                let target = fs.read_link(&path).map_err(FilesError::Ext4)?;
                Some(target.as_ref().to_vec())
            } else {
                None
            };
            tree.insert(path.as_ref().to_vec(), look_at(&metadata, target));
            if tree.len() > MAX_FILES || depth > MAX_DEPTH {
                return Err(FilesError::TooMany);
            }
            if metadata.is_dir() {
                waiting.push((path, depth + 1));
            }
        }
    }
    Ok(tree)
}

fn look_at(metadata: &Metadata, target: Option<Vec<u8>>) -> Entry {
    let content = !metadata.is_dir();
    let modified = metadata.modified();
    Entry {
        kind: format!("{:?}", metadata.file_type()),
        mode: metadata.mode(),
        owner: (metadata.uid(), metadata.gid()),
        size: content.then(|| metadata.len()),
        modified: content.then(|| (modified.seconds(), modified.nanoseconds())),
        target,
    }
}

/// What changed from one list to another, by path.
pub(super) fn compare(disk: usize, before: &Tree, after: &Tree) -> Vec<Changed> {
    let changed = |change, path: &Vec<u8>| Changed { disk, change, path: path.clone() };
    let mut changes: Vec<_> = before
        .iter()
        .filter_map(|(path, entry)| match after.get(path) {
            None => Some(changed(Change::Deleted, path)),
            Some(other) if other != entry => Some(changed(Change::Modified, path)),
            Some(_) => None,
        })
        .collect();
    let added = after.keys().filter(|path| !before.contains_key(*path));
    changes.extend(added.map(|path| changed(Change::Added, path)));
    changes.sort_by(|a, b| a.path.cmp(&b.path));
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(size: u64) -> Entry {
        Entry {
            kind: "Regular".into(),
            mode: 0o644,
            owner: (0, 0),
            size: Some(size),
            modified: Some((1, 2)),
            target: None,
        }
    }

    #[test]
    fn changes_come_in_the_order_of_their_paths() {
        let tree = |files: &[(&str, u64)]| -> Tree {
            files.iter().map(|(path, size)| (path.as_bytes().to_vec(), entry(*size))).collect()
        };
        let before = tree(&[("/a", 1), ("/b", 1), ("/c", 1)]);
        let after = tree(&[("/a", 1), ("/aa", 1), ("/c", 2)]);
        let changes: Vec<_> = compare(0, &before, &after)
            .into_iter()
            .map(|changed| (changed.change, String::from_utf8(changed.path).unwrap()))
            .collect();
        let expected = [
            (Change::Added, "/aa".to_owned()),
            (Change::Deleted, "/b".to_owned()),
            (Change::Modified, "/c".to_owned()),
        ];
        assert_eq!(changes, expected);
    }

    #[test]
    fn what_is_no_file_system_is_an_error() {
        read(vec![0u8; 1 << 20]).unwrap_err();
    }
}
