//! Which checkpoints of a run stay, and the removal of the others: the commit first, then what it lists.

use crate::open::{Checkpoint, OpenError, commit_path, folder_of, read_commit};
use crate::store::Store;
use crate::write::remove_files;
use serde::{Deserialize, Serialize};
use std::num::NonZeroU64;

/// Which checkpoints stay when a newer one was saved. The newest whole one always does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// The newest so many, the newest one included.
    pub most_recent: NonZeroU64,
    /// Every step that is a multiple of this.
    pub interval: Option<NonZeroU64>,
    /// The step that the run goes on from.
    pub resumed_from: Option<u64>,
}

/// What a clearing did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cleared {
    /// Steps that were removed, ascending.
    pub removed: Vec<u64>,
    /// Steps that stay for now because somebody reads them, ascending.
    pub in_use: Vec<u64>,
}

impl Store {
    /// Removes the checkpoints that `retention` does not keep, all of them older than `newest`. Steps that are not whole are
    /// left alone and do not count among the most recent, unless so many whole ones are newer.
    ///
    /// # Errors
    /// If `newest` cannot be opened again, whole as it was saved, and nothing was removed; or if the store fails.
    pub fn clear(&self, newest: u64, retention: &Retention) -> Result<Cleared, OpenError> {
        let _newest = self.checkpoint(newest)?;
        let mut kept = 1;
        let mut cleared = Cleared::default();
        for step in self.steps()?.into_iter().rev().filter(|step| *step < newest) {
            if kept < retention.most_recent.get() {
                match Checkpoint::open(self, step) {
                    Ok(_) => kept += 1,
                    Err(why) if why.is_damage() => {}
                    Err(error) => return Err(error),
                }
            } else if retention.resumed_from != Some(step)
                && retention.interval.is_none_or(|interval| step % interval != 0)
            {
                match self.remove(step) {
                    Ok(Removal::Done) => cleared.removed.push(step),
                    Ok(Removal::InUse) => cleared.in_use.push(step),
                    // Not committed, set aside, or of a newer program: not ours to remove.
                    Err(OpenError::Store(error)) => return Err(error.into()),
                    Err(_) => {}
                }
            }
        }
        cleared.removed.reverse();
        cleared.in_use.reverse();
        Ok(cleared)
    }

    /// Removes a checkpoint unless somebody reads it.
    fn remove(&self, step: u64) -> Result<Removal, OpenError> {
        let commit = read_commit(self, step)?;
        let folder = folder_of(step);
        {
            let path = commit_path(step);
            let Some(_alone) = self.lock_alone(&path) else { return Ok(Removal::InUse) };
            self.delete(&path)?;
        }
        remove_files(self, &folder, &commit.files);
        Ok(Removal::Done)
    }
}

enum Removal {
    Done,
    InUse,
}
