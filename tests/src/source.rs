//! Finds and reads the project's own source files, for the tests that hold its rules.

use std::io;
use std::path::{Path, PathBuf};

/// One Rust source file of the project.
#[derive(Debug)]
pub struct SourceFile {
    /// Path relative to the top of the tree, with forward slashes.
    pub path: String,
    /// Its text.
    pub text: String,
}

impl SourceFile {
    /// Whether the file lies in `dir` (relative to the top, without a slash at the end).
    pub fn is_in(&self, dir: &str) -> bool {
        self.path.strip_prefix(dir).is_some_and(|rest| rest.starts_with('/'))
    }

    /// Lines that are code: comment lines are left out, trailing comments are kept.
    pub fn code_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text
            .lines()
            .enumerate()
            .map(|(index, line)| (index + 1, line))
            .filter(|(_, line)| !line.trim_start().starts_with("//"))
    }
}

/// The top of the source tree.
pub fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Every `.rs` file of the tree, build output left out, in a stable order.
///
/// # Errors
/// When the tree cannot be read.
pub fn rust_files() -> io::Result<Vec<SourceFile>> {
    let top = top();
    let mut files = Vec::new();
    collect(&top, &top, &mut files)?;
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

fn collect(top: &Path, dir: &Path, files: &mut Vec<SourceFile>) -> io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let path = entry.path();
        let name = entry.file_name();
        if entry.file_type()?.is_dir() {
            if name != "target" && !name.as_encoded_bytes().starts_with(b".") {
                collect(top, &path, files)?;
            }
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            let relative = path.strip_prefix(top).unwrap_or(&path).to_string_lossy();
            files.push(SourceFile {
                path: relative.replace('\\', "/"),
                text: std::fs::read_to_string(&path)?,
            });
        }
    }
    Ok(())
}
