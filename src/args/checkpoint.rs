//! Where a run saves, what it goes on from, and how.

use super::flag::named;
use crate::report::Refusal;
use ckpt::{Checkpoint, Retention};
use serde::{Deserialize, Serialize};
use std::num::NonZeroU64;
use train::resume::{CHANGEABLE, Resume, RngPolicy, Selection};

mesh::settings! {
    /// `[checkpoint]`
    #[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    pub(crate) struct CheckpointArgs {
        /// Folder of the run's checkpoints; saves at the last step, too [default: save nothing]
        #[arg(long, value_name = "FOLDER")]
        pub(crate) save: Option<String>,
        /// Resume from FOLDER, FOLDER@STEP or FOLDER/iter_…; it must be there [default: auto, the newest whole checkpoint in
        /// --save, or a fresh start]
        #[arg(long, value_name = "CKPT")]
        pub(crate) load: Option<String>,
        /// Steps from one save to the next [default: only the last step]
        #[arg(long, value_name = "STEPS")]
        pub(crate) save_interval: Option<u64>,
        /// Whole checkpoints that stay after a save, the newest ones [default: all; with --save-retain-interval 1]
        #[arg(long, value_name = "NUMBER")]
        pub(crate) most_recent_k: Option<NonZeroU64>,
        /// Steps whose multiples stay, too
        #[arg(long, value_name = "STEPS")]
        pub(crate) save_retain_interval: Option<NonZeroU64>,
        /// Resume from this step
        #[arg(long, value_name = "STEP")]
        pub(crate) ckpt_step: Option<u64>,
        /// Take what neither flags nor --config say from the checkpoint: model, training and data order, not the layout
        #[arg(long)]
        pub(crate) use_checkpoint_args: Option<bool>,
        /// Set checkpoints in --save that are newer than the resumed step aside, once that is loaded
        #[arg(long)]
        pub(crate) overwrite: Option<bool>,
        /// Leave moments and schedule where they start
        #[arg(long)]
        pub(crate) no_load_optim: Option<bool>,
        /// Derive random streams anew
        #[arg(long)]
        pub(crate) no_load_rng: Option<bool>,
        /// Take weights alone, and start at step 0
        #[arg(long)]
        pub(crate) finetune: Option<bool>,
        /// Refuse to start afresh
        #[arg(long)]
        pub(crate) exit_on_missing_checkpoint: Option<bool>,
        /// Random streams under another layout [default: derive]
        #[arg(long, value_parser = named::<RngPolicy>(), value_name = "POLICY")]
        pub(crate) rng_policy: Option<RngPolicy>,
        /// Refuse a resume that is proved less far than L2, or whose first step should be the saved run's and is not
        #[arg(long)]
        pub(crate) strict: Option<bool>,
        /// Tensors that the checkpoint may lack; they keep their initial values
        #[arg(long, value_name = "GLOB", value_delimiter = ',')]
        pub(crate) allow_missing: Option<Vec<String>>,
        /// Tensors of the checkpoint that the model may not want
        #[arg(long, value_name = "GLOB", value_delimiter = ',')]
        pub(crate) allow_extra: Option<Vec<String>>,
        /// Settings that may differ from the checkpoint's, as the refusal names them
        #[arg(long, value_name = "FIELD", value_delimiter = ',')]
        pub(crate) allow_change: Option<Vec<String>>,
    }
}

impl CheckpointArgs {
    /// Names of `--allow-change` that nothing has which may change, and what is said of saves of a run that saves nothing.
    pub(crate) fn faults(&self) -> Vec<Refusal> {
        let unknown =
            self.allow_change.iter().flatten().filter(|field| !CHANGEABLE.contains(&field.as_str()));
        let unknown = unknown.map(|field| {
            let message =
                format!("`--allow-change {}`: no setting of that name may change", field.escape_debug());
            Refusal::new("RM6003", message, format!("these may: {}", CHANGEABLE.join(", ")))
        });
        let of_saves = [
            (self.save_interval.is_some(), "--save-interval"),
            (self.most_recent_k.is_some(), "--most-recent-k"),
            (self.save_retain_interval.is_some(), "--save-retain-interval"),
        ];
        let unsaved = of_saves.into_iter().filter(|(is_said, _)| *is_said && self.save.is_none());
        let unsaved = unsaved.map(|(_, flag)| {
            let message = format!("`{flag}` is set, and `--save` is not: nothing would be saved");
            Refusal::new("RM6003", message, format!("give --save FOLDER, or leave {flag} out"))
        });
        unknown.chain(unsaved).collect()
    }

    /// What is taken from a checkpoint.
    pub(crate) fn selection(&self) -> Selection {
        match self.finetune {
            Some(true) => Selection::FINETUNE,
            _ => Selection {
                optimizer: self.no_load_optim != Some(true),
                rng: self.no_load_rng != Some(true),
                ..Selection::ALL
            },
        }
    }

    /// How a run goes on from `source`.
    pub(crate) fn resume<'a>(&'a self, source: &'a Checkpoint) -> Resume<'a> {
        Resume {
            source,
            selection: self.selection(),
            allow_missing: self.allow_missing.as_deref().unwrap_or_default(),
            allow_extra: self.allow_extra.as_deref().unwrap_or_default(),
            rng_policy: self.rng_policy.unwrap_or_default(),
            allow_change: self.allow_change.as_deref().unwrap_or_default(),
            strict: self.strict == Some(true),
        }
    }

    /// Which older checkpoints stay after a save, if not all.
    pub(crate) fn retention(&self, resumed_from: Option<u64>) -> Option<Retention> {
        let interval = self.save_retain_interval;
        let most_recent = self.most_recent_k.or(interval.map(|_| NonZeroU64::MIN))?;
        Some(Retention { most_recent, interval, resumed_from })
    }
}
