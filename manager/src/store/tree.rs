//! The tree of checkpoints and live sandboxes, as users see it.
//!
//! A removed checkpoint is not part of it: what stood on it hangs on its nearest ancestor that is
//! still visible.

use std::collections::BTreeMap;

use super::{Checkpoint, Error, Id, SandboxEntry, Standing, Store};

/// A checkpoint and what grew from it.
#[derive(Debug)]
pub struct Node {
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    /// Checkpoints made of machines that stood here, by time.
    pub children: Vec<Node>,
    /// Sandboxes that stand here now.
    pub sandboxes: Vec<SandboxEntry>,
}

/// Everything there is.
#[derive(Debug, Default)]
pub struct Tree {
    /// Checkpoints without a visible ancestor, by time.
    pub roots: Vec<Node>,
    /// Sandboxes that stand on no visible checkpoint.
    pub sandboxes: Vec<SandboxEntry>,
    /// What cannot be read.
    pub damaged: Vec<Error>,
}

impl Store {
    /// Reads the whole tree.
    ///
    /// # Errors
    /// [`Error::Io`] when the store cannot be read; damaged parts are part of the answer.
    pub fn tree(&self) -> Result<Tree, Error> {
        let _lock = self.shared()?;
        let listing = self.read_checkpoints()?;
        let mut tree = Tree { damaged: listing.damaged, ..Tree::default() };

        let visible: Vec<Id> = listing.checkpoints.iter().map(|c| c.meta.id.clone()).collect();
        let stands_on = |standing: &Standing| {
            let ancestors = standing.parent.iter().chain(standing.memory.iter().rev());
            ancestors.into_iter().find(|id| visible.contains(id)).cloned()
        };
        let mut standing_on: BTreeMap<Option<Id>, Vec<SandboxEntry>> = BTreeMap::new();
        for entry in self.read_sandboxes()? {
            match &entry.record {
                Ok(record) => {
                    let place = stands_on(&record.standing);
                    standing_on.entry(place).or_default().push(entry);
                }
                // A directory without a machine and a record is nothing to show.
                Err(_) if entry.alive => tree.sandboxes.push(entry),
                Err(_) => {}
            }
        }
        let mut grown: BTreeMap<Option<Id>, Vec<Checkpoint>> = BTreeMap::new();
        for checkpoint in listing.checkpoints {
            let place = stands_on(&checkpoint.meta.standing);
            grown.entry(place).or_default().push(checkpoint);
        }
        tree.sandboxes.extend(standing_on.remove(&None).unwrap_or_default());
        tree.roots = nodes(None, &mut grown, &mut standing_on);
        // A circle of parents, which only a forged file can make, hangs on nothing.
        let lost = grown.into_values().flatten();
        tree.roots.extend(lost.map(|checkpoint| Node {
            checkpoint,
            children: Vec::new(),
            sandboxes: Vec::new(),
        }));
        Ok(tree)
    }
}

/// The nodes on one place. Depth is bounded by the number of checkpoints, since each is taken out
/// of the map once; the list of nodes is built without recursion for that reason.
fn nodes(
    root: Option<Id>,
    grown: &mut BTreeMap<Option<Id>, Vec<Checkpoint>>,
    standing_on: &mut BTreeMap<Option<Id>, Vec<SandboxEntry>>,
) -> Vec<Node> {
    // Each level: what is done of it, what is left, and the checkpoint whose children it holds.
    let mut level = (Vec::new(), grown.remove(&root).unwrap_or_default().into_iter());
    let mut above: Vec<(Vec<Node>, std::vec::IntoIter<Checkpoint>, Checkpoint)> = Vec::new();
    loop {
        if let Some(checkpoint) = level.1.next() {
            let place = Some(checkpoint.meta.id.clone());
            let children = grown.remove(&place).unwrap_or_default();
            let (done, left) = level;
            above.push((done, left, checkpoint));
            level = (Vec::with_capacity(children.len()), children.into_iter());
            continue;
        }
        let Some((mut done, left, checkpoint)) = above.pop() else { return level.0 };
        let place = Some(checkpoint.meta.id.clone());
        let sandboxes = standing_on.remove(&place).unwrap_or_default();
        done.push(Node { checkpoint, children: level.0, sandboxes });
        level = (done, left);
    }
}
