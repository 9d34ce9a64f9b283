//! `CKPT` on the command line: `RUN`, `RUN@STEP`, `RUN@latest`, the folder of one step, or what other software left.

use crate::output::complain;
use ckpt::{Checkpoint, ForeignCheckpoint, OpenError, PassedOver, Store};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Where a checkpoint is, as it was said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Location {
    /// The folder of a run, which holds one folder a step.
    pub(crate) run: String,
    /// The step; `None` for the latest whole one.
    pub(crate) step: Option<u64>,
}

impl FromStr for Location {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        // A folder of that very name is what is meant.
        if let Some((run, step)) = text.rsplit_once('@').filter(|_| !Path::new(text).is_dir()) {
            if matches!(step, "latest" | "latest-complete") {
                return Ok(Location { run: run.into(), step: None });
            }
            if let Ok(step) = step.parse() {
                return Ok(Location { run: run.into(), step: Some(step) });
            }
        }
        let trimmed = text.trim_end_matches('/');
        let (run, folder) = trimmed.rsplit_once('/').unwrap_or((".", trimmed));
        let step = folder.strip_prefix("iter_").and_then(|digits| digits.parse::<u64>().ok());
        match step.filter(|step| format!("iter_{step:07}") == folder) {
            Some(step) => Ok(Location { run: run.into(), step: Some(step) }),
            None => Ok(Location { run: text.into(), step: None }),
        }
    }
}

/// A checkpoint of this program or of another one.
pub(crate) enum Opened {
    Native(Box<Checkpoint>),
    Foreign(ForeignCheckpoint),
}

impl Location {
    /// Opens a checkpoint of whatever software, told apart by what lies there.
    ///
    /// # Errors
    /// As of [`Location::open`]; or other software's files that cannot be read.
    pub(crate) fn open_any(&self) -> anyhow::Result<Opened> {
        match ForeignCheckpoint::open(&self.path())? {
            Some(foreign) => Ok(Opened::Foreign(foreign)),
            None => Ok(Opened::Native(Box::new(self.open()?))),
        }
    }

    /// What was named, as a path.
    pub(crate) fn path(&self) -> String {
        match self.step {
            Some(step) => format!("{}/iter_{step:07}", self.run),
            None => self.run.clone(),
        }
    }

    /// Opens the checkpoint; newer ones that are not whole are passed over with a line each.
    ///
    /// # Errors
    /// If there is none, or the step asked for is not whole.
    pub(crate) fn open(&self) -> anyhow::Result<Checkpoint> {
        let store = Store::open(&self.run)?;
        match self.step {
            Some(step) => Ok(store.checkpoint(step)?),
            None => Ok(newest(&store, None, true)?.expect("it must exist")),
        }
    }
}

/// The newest whole checkpoint, below the step `below` if damage was found in that one, with a line for each that is passed
/// over; `None` where none was ever complete, unless it `must_exist`.
///
/// # Errors
/// Checkpoints none of which is whole; none at all, where there must be one; a store that cannot be read.
pub(crate) fn newest(
    store: &Store,
    below: Option<u64>,
    must_exist: bool,
) -> Result<Option<Checkpoint>, OpenError> {
    let latest = store.latest(below)?;
    if below.is_none() {
        latest.strays.iter().for_each(complain);
    }
    if latest.checkpoint.is_none() {
        // The error says what was passed over.
        if below.is_some() || latest.passed_over.iter().any(PassedOver::was_committed) {
            let (root, passed_over) = (store.to_string(), latest.passed_over);
            return Err(OpenError::NoneWhole { root, passed_over });
        }
        if must_exist {
            return latest.require(store).map(Some);
        }
    }
    latest.passed_over.iter().filter(|step| !step.was_set_aside()).for_each(complain);
    Ok(latest.checkpoint)
}

/// The folder that a store's location names, if it is a local one.
pub(crate) fn local_folder(location: &str) -> Option<PathBuf> {
    match location.split_once("://") {
        Some(("file", path)) => Some(path.into()),
        Some(_) => None,
        None => Some(location.into()),
    }
}

/// Whether two locations name the same store, however they are written.
pub(crate) fn is_same_place(one: &str, other: &str) -> bool {
    let place = |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path)).ok();
    match (local_folder(one), local_folder(other)) {
        (Some(one), Some(other)) => place(&one) == place(&other),
        _ => one == other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_named_behind_an_at_sign_or_by_its_folder() {
        for (text, run, step) in [
            ("runs/a", "runs/a", None),
            ("runs/a@latest", "runs/a", None),
            ("runs/a@20", "runs/a", Some(20)),
            ("user@host/a", "user@host/a", None),
            ("runs/a/iter_0000020", "runs/a", Some(20)),
            ("runs/a/iter_0000020/", "runs/a", Some(20)),
            ("iter_0000020", ".", Some(20)),
            ("runs/iter_last", "runs/iter_last", None),
            ("runs/iter_20", "runs/iter_20", None),
            ("runs/iter_12345678", "runs", Some(12_345_678)),
        ] {
            let expected = Location { run: run.into(), step };
            assert_eq!(text.parse::<Location>().unwrap(), expected, "{text}");
        }
    }
}
