//! Where a run goes on from, and whether it may save where it wants to.

use crate::args::CheckpointArgs;
use crate::location::{Location, is_same_place, local_folder, newest};
use crate::report::Refusal;
use ckpt::{COMMIT_NAME, Checkpoint, LocationError, Store};

/// Where a run starts.
pub(crate) struct Start {
    /// What it goes on from; `None` starts afresh.
    pub(crate) checkpoint: Option<Checkpoint>,
    /// Whether it is the latest because nobody asked for a step, so that an older one may stand in for it.
    pub(crate) is_latest: bool,
    /// Whether it was looked for in `--save`.
    pub(crate) is_in_save: bool,
}

/// Finds the checkpoint: `--load auto`, the default, takes the latest in `--save` or none; another `--load` must be there.
/// Only steps below `below` count for the latest, if damage was found in that one.
///
/// # Errors
/// A checkpoint that was asked for and is not there or not whole; checkpoints none of which is whole, over which no run
/// starts afresh; a store that cannot be read.
pub(crate) fn find(args: &CheckpointArgs, below: Option<u64>) -> anyhow::Result<Start> {
    let is_save = |place: &str| args.save.as_deref().is_some_and(|save| is_same_place(place, save));
    let load = args.load.as_deref().filter(|load| *load != "auto" && !is_save(load));
    let location = match load {
        Some(load) => load.parse::<Location>().unwrap_or_else(|never| match never {}),
        None => Location { run: args.save.clone().unwrap_or_default(), step: None },
    };
    if let (Some(flag), Some(step)) = (args.ckpt_step, location.step)
        && flag != step
    {
        let message =
            format!("`--ckpt-step {flag}` and `--load {}` name two steps", load.unwrap_or_default());
        return Err(Refusal::new("RM6003", message, "leave one of them out").into());
    }
    let step = args.ckpt_step.or(location.step);
    let must_exist = load.is_some()
        || step.is_some()
        || args.exit_on_missing_checkpoint == Some(true)
        || args.finetune == Some(true);
    let is_in_save = is_save(&location.run);
    let start = |checkpoint| Start { checkpoint, is_latest: step.is_none(), is_in_save };
    if load.is_none() && args.save.is_none() {
        return match must_exist {
            true => {
                let message = "there is no checkpoint to go on from: neither --save nor --load is set";
                Err(Refusal::new("RM4012", message, "--load FOLDER names the run to go on from").into())
            }
            false => Ok(start(None)),
        };
    }
    let store = match Store::open(&location.run) {
        Err(LocationError::NoFolder { .. }) if !must_exist => return Ok(start(None)),
        opened => opened?,
    };
    if let Some(step) = step {
        return Ok(start(Some(store.checkpoint(step)?)));
    }
    Ok(start(newest(&store, below, must_exist)?))
}

/// The store of `--save`, made if it is not there.
///
/// # Errors
/// If it is the folder of a step; if it holds whole checkpoints newer than `iteration`, apart from those known as `damaged`, and `--overwrite` does not say
/// that they are to be set aside.
pub(crate) fn destination(
    save: &str,
    iteration: u64,
    damaged: &[u64],
    overwrite: bool,
) -> anyhow::Result<Store> {
    if is_step(save) {
        let message =
            format!("`--save {save}` is the folder of a step, and a run is saved in a folder of its own");
        let help = "give the folder of the run, in which the folders of its steps lie";
        return Err(Refusal::new("RM6003", message, help).into());
    }
    let store = Store::create(save)?;
    if !overwrite {
        store.require_none_after(iteration, damaged)?;
    }
    Ok(store)
}

/// Whether a folder is a step's: by its name, or by what it holds.
fn is_step(place: &str) -> bool {
    let named =
        !place.contains('@') && place.parse::<Location>().is_ok_and(|location| location.step.is_some());
    named || local_folder(place).is_some_and(|folder| folder.join(COMMIT_NAME).exists())
}
