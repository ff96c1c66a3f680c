//! Looks at everything in the store, says what is wrong, and sets right what can be.

use std::fmt;
use std::fs::File;
use std::path::PathBuf;

use coppice_image::Image;

use super::collect::Orphan;
use super::files;
use super::{Error, Id, Meta, Store};
use crate::failure::chain;

/// Something that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finding {
    /// A checkpoint that cannot be restored. Repair: set aside as `ID.bad`, which keeps its bytes.
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A checkpoint whose base image is not as it was. Not repaired: the image may come back.
    Base {
        /// The checkpoint.
        id: Id,
        /// What is wrong.
        reason: String,
    },
    /// A file that nothing stands on. Repair: removed.
    Orphan {
        /// The file or directory.
        path: PathBuf,
        /// Bytes it takes on disk.
        bytes: u64,
    },
    /// A sandbox whose machine is gone. Repair: removed, with the layers that only it had.
    Ended {
        /// The sandbox.
        id: Id,
    },
    /// A sandbox whose machine runs but whose record is unusable. Not repaired: what it stands on
    /// is not known, so nothing is removed as long as it runs.
    Sandbox {
        /// The sandbox.
        id: Id,
        /// What is wrong.
        reason: String,
    },
    /// A file that is none of the store's. Not repaired.
    Foreign {
        /// The file.
        path: PathBuf,
    },
}

impl Finding {
    /// Whether it is a loss, and not only something to tidy up.
    pub fn is_loss(&self) -> bool {
        matches!(self, Self::Damaged { .. } | Self::Base { .. } | Self::Sandbox { .. })
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Damaged { path, reason } => {
                write!(f, "{} cannot be restored: {reason}", path.display())
            }
            Self::Base { id, reason } => write!(f, "checkpoint {id}: {reason}"),
            Self::Orphan { path, bytes } => {
                write!(f, "{} belongs to nothing and takes {bytes} bytes", path.display())
            }
            Self::Ended { id } => write!(f, "sandbox {id} has no machine any more"),
            Self::Sandbox { id, reason } => write!(f, "running sandbox {id}: {reason}"),
            Self::Foreign { path } => write!(f, "{} is not a file of ours", path.display()),
        }
    }
}

/// What a check found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// Number of checkpoint files looked at.
    pub checkpoints: usize,
    /// What is wrong.
    pub findings: Vec<Finding>,
    /// How many of them were set right.
    pub repaired: usize,
}

impl Store {
    /// Checks the store; with `deep`, every checksum of page data too, which reads all files.
    ///
    /// With `repair`, sets right what can be: see [`Finding`]. Nobody else can change the store
    /// meanwhile.
    ///
    /// # Errors
    /// [`Error::Io`] when the store cannot be read or a repair fails.
    pub fn check(&self, deep: bool, repair: bool) -> Result<Report, Error> {
        let _lock = self.exclusive()?;
        let mut report = Report::default();
        self.check_checkpoints(deep, repair, &mut report)?;
        self.check_sandboxes(repair, &mut report)?;
        let references = self.references()?;
        if references.unreadable.is_empty() {
            let orphans = self.orphans(&references)?;
            report.findings.extend(orphans.into_iter().map(|orphan| {
                let (Orphan::File(path) | Orphan::Directory(path)) = orphan;
                Finding::Orphan { bytes: files::allocated(&path), path }
            }));
            if repair {
                report.repaired += self.collect_locked()?.files;
            }
        }
        self.find_foreign(&mut report)?;
        Ok(report)
    }

    fn check_checkpoints(
        &self,
        deep: bool,
        repair: bool,
        report: &mut Report,
    ) -> Result<(), Error> {
        let directory = self.checkpoints_dir();
        for name in files::names(&directory)? {
            let visible = name.strip_suffix(".ckpt").and_then(Id::parse);
            let Some(id) = visible.or_else(|| name.strip_suffix(".layer").and_then(Id::parse))
            else {
                continue;
            };
            report.checkpoints += 1;
            let path = directory.join(&name);
            let meta = match self.check_file(&path, &id, deep) {
                Ok(meta) => meta,
                Err(reason) => {
                    if repair {
                        let aside = directory.join(format!("{id}.bad"));
                        files::rename(&path, &aside)?;
                        files::sync_directory(&directory)?;
                        report.repaired += 1;
                    }
                    report.findings.push(Finding::Damaged { path, reason });
                    continue;
                }
            };
            if !name.ends_with(".layer")
                && let Err(error) = self.check_base(&meta)
            {
                report.findings.push(Finding::Base { id, reason: error.to_string() });
            }
        }
        Ok(())
    }

    /// What is wrong with a checkpoint's own file.
    fn check_file(&self, path: &std::path::Path, id: &Id, deep: bool) -> Result<Meta, String> {
        let meta = super::checkpoints::read_meta(path, id).map_err(|error| chain(&error))?;
        let file = File::open(path).map_err(|error| error.to_string())?;
        let image = Image::open(file).map_err(|error| chain(&error))?;
        image.page_index().map_err(|error| chain(&error))?;
        if deep {
            image.verify().map_err(|error| chain(&error))?;
        }
        Ok(meta)
    }

    fn check_sandboxes(&self, repair: bool, report: &mut Report) -> Result<(), Error> {
        for entry in self.read_sandboxes()? {
            match entry.record {
                Err(error) if entry.alive => {
                    let reason = chain(&error);
                    report.findings.push(Finding::Sandbox { id: entry.id, reason });
                }
                Ok(record) if !entry.alive && !record.suspended => {
                    if repair {
                        let directory = self.sandboxes_dir().join(entry.id.as_str());
                        super::sandboxes::remove_directory(&directory)?;
                        report.repaired += 1;
                    }
                    report.findings.push(Finding::Ended { id: entry.id });
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn find_foreign(&self, report: &mut Report) -> Result<(), Error> {
        let checkpoints = self.checkpoints_dir();
        for name in files::names(&checkpoints)? {
            let endings = [".ckpt", ".layer", ".bad", ".tmp", ".ws"];
            let stem = endings.iter().find_map(|ending| name.strip_suffix(ending));
            if stem.and_then(|stem| Id::parse(stem.trim_start_matches('.'))).is_none() {
                report.findings.push(Finding::Foreign { path: checkpoints.join(name) });
            }
        }
        let layers = self.layers_dir();
        for name in files::names(&layers)? {
            let temp = name.strip_prefix('.').and_then(|name| name.strip_suffix(".tmp"));
            let stem =
                name.strip_suffix(".disk").or(name.strip_suffix(super::images::ENDING)).or(temp);
            if stem.and_then(Id::parse).is_none() {
                report.findings.push(Finding::Foreign { path: layers.join(name) });
            }
        }
        Ok(())
    }
}
