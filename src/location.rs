//! `CKPT` on the command line: `RUN`, `RUN@STEP`, `RUN@latest`, or the folder of one step.

use crate::output::Output;
use ckpt::{Checkpoint, Store};
use std::convert::Infallible;
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
        if let Some((run, step)) = text.rsplit_once('@') {
            if matches!(step, "latest" | "latest-complete") {
                return Ok(Location { run: run.into(), step: None });
            }
            if let Ok(step) = step.parse() {
                return Ok(Location { run: run.into(), step: Some(step) });
            }
        }
        let trimmed = text.trim_end_matches('/');
        let (run, folder) = trimmed.rsplit_once('/').unwrap_or((".", trimmed));
        match folder.strip_prefix("iter_").map(str::parse) {
            Some(Ok(step)) => Ok(Location { run: run.into(), step: Some(step) }),
            _ => Ok(Location { run: text.into(), step: None }),
        }
    }
}

impl Location {
    /// Opens the checkpoint; newer ones that are not whole are passed over with a line each.
    ///
    /// # Errors
    /// If there is none, or the step asked for is not whole.
    pub(crate) fn open(&self, output: &Output) -> anyhow::Result<Checkpoint> {
        let store = Store::open(&self.run)?;
        Ok(match self.step {
            Some(step) => store.checkpoint(step)?,
            None => {
                let latest = store.latest(None)?;
                // Where there is none to take, the error says what was passed over.
                if latest.checkpoint.is_some() {
                    latest.passed_over.iter().for_each(|passed| output.note(passed));
                }
                latest.require(&store)?
            }
        })
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
        ] {
            let expected = Location { run: run.into(), step };
            assert_eq!(text.parse::<Location>().unwrap(), expected, "{text}");
        }
    }
}
