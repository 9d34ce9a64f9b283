//! Which checkpoints of a run stay, and the removal of the others: the commit first, then what it lists.

use crate::open::{Checkpoint, OpenError, chain_text, commit_path, folder_of, read_commit};
use crate::store::{Store, StoreError};
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
    /// Why it came to no end, and what is left of a step that is no checkpoint any more.
    pub failed: Option<String>,
}

impl Store {
    /// Removes the checkpoints that `retention` does not keep, all of them older than `newest`, until a removal fails. Steps that are
    /// not whole, or known as `damaged`, are left alone and do not count among the most recent, unless so many whole ones are newer.
    ///
    /// # Errors
    /// Nothing was removed: `newest` cannot be opened again, whole as it was saved, or the store cannot be read.
    pub fn clear(&self, newest: u64, retention: &Retention, damaged: &[u64]) -> Result<Cleared, OpenError> {
        let _newest = self.checkpoint(newest)?;
        let mut kept = 1;
        let mut cleared = Cleared::default();
        for step in self.steps()?.into_iter().rev().filter(|step| *step < newest) {
            if kept < retention.most_recent.get() {
                match Checkpoint::open(self, step) {
                    Ok(_) if damaged.contains(&step) => {}
                    Ok(_) => kept += 1,
                    Err(why) if why.is_damage() => {}
                    Err(error) => return Err(error),
                }
            } else if retention.resumed_from != Some(step)
                && retention.interval.is_none_or(|interval| step % interval != 0)
            {
                match self.remove(step) {
                    Ok(Removal::Done { left }) => {
                        cleared.removed.push(step);
                        cleared.failed = left.first().map(|error| {
                            let more = match left.len() {
                                1 => String::new(),
                                files => format!(", and {} more files", files - 1),
                            };
                            format!("of step {step} is left: {}{more}", chain_text(error))
                        });
                    }
                    Ok(Removal::InUse) => cleared.in_use.push(step),
                    Err(OpenError::Store(error)) => {
                        cleared.failed = Some(format!("step {step} stays: {}", chain_text(&error)));
                    }
                    // Not committed, set aside, or of a newer program: not ours to remove.
                    Err(_) => {}
                }
                if cleared.failed.is_some() {
                    break;
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
        Ok(Removal::Done { left: remove_files(self, &folder, &commit.files) })
    }
}

enum Removal {
    Done {
        /// The files that could not be removed.
        left: Vec<StoreError>,
    },
    InUse,
}
