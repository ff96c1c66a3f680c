//! Handing descriptors to a work queue, so that it is never overfilled.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::abi::Descriptor;
use crate::discover::{Mode, Traits};
use crate::sys::arena::Arena;
use crate::sys::cpu::{Enqcmd, Features, Movdir64b};
use crate::sys::portal::{self, Portal};

/// Where the kernel shows the device files of work queues.
pub const DEVICES: &str = "/dev/iax";

/// What became of a submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Submitted {
    /// The queue has the descriptor.
    Accepted,
    /// The queue is full: try again after a completion.
    Busy,
}

/// Why a queue cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The device file cannot be opened.
    #[error(
        "cannot open the work queue {path:?}: is this user allowed to, and has no one else it?"
    )]
    Open {
        /// The device file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The device takes no descriptor.
    #[error("the work queue took no descriptor")]
    Submit(#[source] io::Error),
    /// The queue's own end is gone.
    #[error("the work queue is gone")]
    Gone,
}

/// A work queue. Descriptors name memory of one [`Arena`] only.
pub trait Queue: Send + std::fmt::Debug {
    /// Descriptors that may be under way at once, at least one.
    fn depth(&self) -> usize;

    /// Hands a descriptor over, without waiting.
    ///
    /// # Errors
    /// A queue that cannot be used any more.
    fn submit(&mut self, descriptor: &Descriptor) -> Result<Submitted, QueueError>;

    /// Tells that a descriptor it accepted is complete.
    fn completed(&mut self);
}

/// Room left in a queue. A dedicated one drops what comes when it is full, so every submission
/// takes a credit first, and its completion gives it back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credits {
    depth: usize,
    free: usize,
}

impl Credits {
    /// Room for `depth` descriptors, at least one.
    pub fn new(depth: usize) -> Self {
        let depth = depth.max(1);
        Self { depth, free: depth }
    }

    /// All of the room.
    pub fn depth(self) -> usize {
        self.depth
    }

    /// Takes one; false when there is none.
    pub fn take(&mut self) -> bool {
        let taken = self.free.checked_sub(1);
        self.free = taken.unwrap_or(0);
        taken.is_some()
    }

    /// Gives one back.
    pub fn give(&mut self) {
        self.free = self.free.saturating_add(1).min(self.depth);
    }
}

/// How a device's queue is reached.
#[derive(Debug)]
enum Way {
    Enqcmd(Enqcmd, Portal),
    Movdir64b(Movdir64b, Portal),
    Write(File),
}

/// The work queue of a device.
#[derive(Debug)]
pub struct DeviceQueue {
    way: Way,
    arena: Arc<Arena>,
    credits: Credits,
}

impl DeviceQueue {
    /// Opens the device file `path` of a queue with these traits, for this process alone. Without
    /// the instruction or the right to map the portal, descriptors go by `write`.
    ///
    /// # Errors
    /// [`QueueError::Open`].
    pub fn open(
        path: &Path,
        traits: &Traits,
        features: Features,
        arena: Arc<Arena>,
    ) -> Result<Self, QueueError> {
        let failed = |source| QueueError::Open { path: path.to_owned(), source };
        let file = portal::open(path).map_err(failed)?;
        let way = match (traits.mode, Enqcmd::new(features), Movdir64b::new(features)) {
            (Mode::Shared, Some(by), _) => mapped(file, |portal| Way::Enqcmd(by, portal)),
            (Mode::Dedicated, _, Some(by)) => mapped(file, |portal| Way::Movdir64b(by, portal)),
            _ => Way::Write(file),
        };
        let depth = usize::try_from(traits.depth()).unwrap_or(1);
        Ok(Self { way, arena, credits: Credits::new(depth) })
    }

    /// How descriptors reach the device: `enqcmd`, `movdir64b` or `write`.
    pub fn way(&self) -> &'static str {
        match self.way {
            Way::Enqcmd(..) => "enqcmd",
            Way::Movdir64b(..) => "movdir64b",
            Way::Write(_) => "write",
        }
    }
}

fn mapped(file: File, way: impl FnOnce(Portal) -> Way) -> Way {
    match Portal::map(file) {
        Ok(portal) => way(portal),
        Err((file, _)) => Way::Write(file),
    }
}

impl Queue for DeviceQueue {
    fn depth(&self) -> usize {
        self.credits.depth()
    }

    fn submit(&mut self, descriptor: &Descriptor) -> Result<Submitted, QueueError> {
        if !self.credits.take() {
            return Ok(Submitted::Busy);
        }
        let accepted = match &mut self.way {
            Way::Enqcmd(by, portal) => Ok(portal.enqueue(*by, descriptor, &self.arena)),
            Way::Movdir64b(by, portal) => Ok(portal.push(*by, descriptor, &self.arena)),
            Way::Write(file) => portal::write(file, descriptor, &self.arena),
        };
        match accepted {
            Ok(true) => return Ok(Submitted::Accepted),
            Ok(false) => self.credits.give(),
            Err(error) => {
                self.credits.give();
                return Err(QueueError::Submit(error));
            }
        }
        Ok(Submitted::Busy)
    }

    fn completed(&mut self) {
        self.credits.give();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_descriptors_are_under_way_than_there_is_room_for() {
        let mut credits = Credits::new(2);
        assert!(credits.take() && credits.take());
        assert!(!credits.take());
        credits.give();
        assert!(credits.take());
        assert!(!credits.take());
    }

    #[test]
    fn without_a_device_file_opening_names_it() {
        let arena = Arc::new(Arena::new(1, 4096).unwrap());
        let (mode, max_transfer) = (Mode::Shared, 1);
        let traits = Traits { mode, size: 1, threshold: 1, block_on_fault: false, max_transfer };
        let features = Features { waitpkg: false, movdir64b: false, enqcmd: false };
        let path = Path::new("/nowhere/wq9.9");
        let error = DeviceQueue::open(path, &traits, features, arena).unwrap_err();
        assert!(error.to_string().contains("/nowhere/wq9.9"), "{error}");
    }
}
