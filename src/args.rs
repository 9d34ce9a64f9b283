//! What was said about a run, by flags and by `remesh.toml`: one struct for both, `None` where nothing was said.
//!
//! A setting is a field of a table. Its declaration gives the flag, the key of the file, the name by which `config show` tells
//! who said it, and its place in the merge of layers. Beside the table stand its default, in `resolve`, and where a checkpoint
//! has it, in `of`. [`resolve`] puts the tables together to one configuration.

mod checkpoint;
mod data;
mod file;
mod flag;
mod megatron;
mod model;
pub(crate) mod resolve;
mod schedule;
mod schema;
mod training;

pub(crate) use checkpoint::CheckpointArgs;
pub(crate) use schema::schema;
pub(crate) use training::{DeviceArg, RanksAs, TrainingArgs};

use crate::output::Output;
use crate::report::Refusal;
use crate::start;
use data::DataArgs;
use megatron::MegatronFlags;
use mesh::{Merged, MergedArgs, ParallelArgs, Source};
use model::ModelArgs;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use train::config::TrainConfig;
use train::resume::{RngPolicy, SavedRun};

/// Everything that can be said about a run: the flags of `train` and `config`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct RunArgs {
    /// Read settings from FILE, too; flags go over it
    #[arg(long, value_name = "FILE")]
    config: Vec<PathBuf>,
    #[command(flatten)]
    args: TrainArgs,
    #[command(flatten)]
    megatron: MegatronFlags,
}

mesh::settings! {
    /// Every setting of a run, by table of `remesh.toml`.
    #[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    #[command(mut_args = flag::switch)]
    pub(crate) struct TrainArgs {
        #[command(flatten, next_help_heading = "Model")]
        pub(crate) model: ModelArgs,
        #[command(flatten, next_help_heading = "Layout and batch")]
        pub(crate) parallelism: ParallelArgs,
        #[command(flatten, next_help_heading = "Training")]
        pub(crate) training: TrainingArgs,
        #[command(flatten, next_help_heading = "Data")]
        pub(crate) data: DataArgs,
        #[command(flatten, next_help_heading = "Checkpoints")]
        pub(crate) checkpoint: CheckpointArgs,
        #[command(flatten, next_help_heading = "Logging")]
        pub(crate) logging: LoggingArgs,
    }
}

mesh::settings! {
    /// `[logging]`
    #[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    pub(crate) struct LoggingArgs {
        /// Steps from one printed line to the next [default: 1]
        #[arg(long, value_name = "STEPS")]
        pub(crate) log_interval: Option<u64>,
        /// Folder of metrics.jsonl [default: --save]
        #[arg(long, value_name = "FOLDER")]
        pub(crate) log_dir: Option<PathBuf>,
    }
}

/// What all layers say together, and who says what.
#[derive(Clone, Debug)]
pub(crate) struct Said {
    layers: Vec<(Source, TrainArgs)>,
    merged: Merged<TrainArgs>,
}

impl RunArgs {
    /// What flags and file say, and if they ask for it the checkpoint that the run goes on from; a line names the flags that
    /// make no difference.
    ///
    /// # Errors
    /// Flags that ask for what is not done; a file or a checkpoint that cannot be read or understood.
    pub(crate) fn said(mut self, output: &Output) -> anyhow::Result<Said> {
        let without_effect = self.megatron.check()?;
        self.megatron.put_into(&mut self.args)?;
        if !without_effect.is_empty() {
            output.note(format!("no effect here: {}", without_effect.join(", ")));
        }
        let file = match &self.config[..] {
            [] => TrainArgs::default(),
            [file] => file::read(file)?,
            files => {
                let names: Vec<String> =
                    files.iter().map(|file| format!("`--config {}`", file.display())).collect();
                let help = "put the settings into one file; flags go over it";
                return Err(Refusal::new("RM6003", format!("{} are given", names.join(" and ")), help).into());
            }
        };
        let said = Said::merge(vec![(Source::CommandLine, self.args), (Source::ConfigFile, file)]);
        let other_defaults = self.megatron.other_defaults(said.args());
        if !other_defaults.is_empty() && said.args().checkpoint.use_checkpoint_args != Some(true) {
            output.note(format!("not as by Megatron's defaults, which are {}", other_defaults.join(" ")));
        }
        if said.args().checkpoint.use_checkpoint_args != Some(true) {
            return Ok(said);
        }
        let Some(checkpoint) = start::find(&said.args().checkpoint, None)?.checkpoint else {
            return Ok(said);
        };
        let saved = SavedRun::of(checkpoint.commit())?;
        Ok(said.over(Source::Checkpoint, TrainArgs::of(&saved.config)))
    }
}

impl Said {
    /// What flags say over a run that goes on, all but its documents: those need the data's tokenizer. A batch of evaluations that was
    /// the run's own stays that, whatever it comes to.
    pub(crate) fn of_saved(flags: TrainArgs, saved: &TrainConfig, with_layout: bool) -> Said {
        let mut args = TrainArgs::of(saved);
        args.data = DataArgs { epoch_tail: args.data.epoch_tail, ..DataArgs::default() };
        let (training, own) = (&mut args.training, &saved.parallel);
        training.eval_global_batch_size =
            training.eval_global_batch_size.filter(|size| *size != own.global_batch_size());
        training.eval_micro_batch_size =
            training.eval_micro_batch_size.filter(|size| *size != own.micro_batch_size());
        if with_layout {
            training.nproc_per_node = Some(own.layout().world_size());
            let batch = args.parallelism;
            args.parallelism =
                ParallelArgs { global_batch_size: batch.global_batch_size, ..ParallelArgs::from(own) };
        }
        Said::merge(vec![(Source::CommandLine, flags), (Source::Checkpoint, args)])
    }

    /// Each value from the strongest of the layers that says it.
    fn merge(mut layers: Vec<(Source, TrainArgs)>) -> Said {
        layers.sort_by_key(|(source, _)| *source);
        let mut merged = Merged::<TrainArgs>::default();
        for (source, args) in &layers {
            let mut args = args.clone();
            merged.args().model.silence(&mut args.model);
            merged.args().training.silence(&mut args.training);
            merged.fill(*source, &args);
        }
        Said { layers, merged }
    }

    /// The same with one more layer.
    pub(crate) fn over(&self, source: Source, args: TrainArgs) -> Said {
        Said::merge([&self.layers[..], &[(source, args)]].concat())
    }

    /// The values, whoever said them.
    pub(crate) fn args(&self) -> &TrainArgs {
        self.merged.args()
    }

    /// The layout and the batch.
    pub(crate) fn parallelism(&self) -> MergedArgs {
        self.merged.table(|args| &args.parallelism)
    }

    /// Who said the value of this key of `remesh.toml`; `None` if nobody did.
    pub(crate) fn source(&self, key: &str) -> Option<Source> {
        self.merged.source(key)
    }
}

impl TrainArgs {
    /// The settings of a run, as flags would say them, all but its layout, paths and intervals.
    fn of(config: &TrainConfig) -> TrainArgs {
        let training = TrainingArgs::of(config);
        let batch = config.asked_batch.as_ref().unwrap_or(&config.batch);
        // A growing batch says its last size itself.
        let constant = training.step_batch_size_schedule.is_none();
        TrainArgs {
            model: ModelArgs::from(&config.model),
            parallelism: ParallelArgs {
                micro_batch_size: Some(config.parallel.micro_batch_size()),
                global_batch_size: constant.then_some(batch.last_size()),
                seq_length: Some(config.parallel.seq_length()),
                ..ParallelArgs::default()
            },
            training,
            data: DataArgs::of(config),
            ..TrainArgs::default()
        }
    }

    /// What holds where nobody said anything: what `config` resolved to, its layout, and the defaults of what no
    /// configuration holds.
    pub(crate) fn resolved(config: &TrainConfig) -> TrainArgs {
        let mut args = TrainArgs::of(config);
        args.parallelism = ParallelArgs::from(&config.parallel);
        args.training.nproc_per_node = Some(config.parallel.layout().world_size());
        args.checkpoint.load = Some("auto".to_owned());
        args.checkpoint.rng_policy = Some(RngPolicy::default());
        args.logging.log_interval = Some(1);
        args
    }
}
