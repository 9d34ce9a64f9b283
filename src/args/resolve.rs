//! From what was said to what holds: the tables put together, and what is refused before any file is opened.

use super::{Said, TrainArgs};
use crate::location::local_folder;
use crate::memory;
use crate::report::Refusal;
use mesh::{BatchSchedule, GroupOptions, MergedArgs, ParallelArgs, ParallelConfig, Source};
use train::config::{ConfigError, TrainConfig};
use train::data::Tokenizer;

/// Ranks of the job: as said, or one copy of the model, times DP if that is said.
pub(crate) fn world_size(said: Option<u32>, args: &ParallelArgs) -> u32 {
    let tp = args.tensor_model_parallel_size.unwrap_or(1);
    said.unwrap_or_else(|| {
        [
            args.tensor_parallel_num_weight_shards.unwrap_or(tp),
            args.pipeline_model_parallel_size.unwrap_or(1),
            args.context_parallel_size.unwrap_or(1),
            args.data_parallel_size.unwrap_or(1),
        ]
        .into_iter()
        .fold(1, u32::saturating_mul)
    })
}

/// Checks that everything was said that has no default, and that no checkpoint may give.
///
/// # Errors
/// All that was not.
pub(crate) fn require(args: &TrainArgs) -> Result<(), Refusal> {
    let TrainArgs { model, parallelism, training, data, checkpoint, .. } = args;
    // Where there is nothing to resume, the schedule has to be said.
    let is_there = |save: &String| local_folder(save).is_none_or(|folder| folder.exists());
    let may_resume = checkpoint.load.is_some() || checkpoint.save.as_ref().is_some_and(is_there);
    let said = [
        ("num-layers", model.num_layers.is_some()),
        ("hidden-size", model.hidden_size.is_some()),
        ("num-attention-heads", model.num_attention_heads.is_some()),
        ("seq-length", parallelism.seq_length.is_some()),
        ("micro-batch-size", parallelism.micro_batch_size.is_some()),
        ("train-iters", training.train_iters.is_some() || training.train_samples.is_some()),
        ("lr", training.lr.is_some() || may_resume),
        ("data-path", data.data_path.is_some()),
    ];
    let flags: Vec<&str> = said.iter().filter(|(_, is_said)| !is_said).map(|(flag, _)| *flag).collect();
    let names: Vec<String> = flags.iter().map(|flag| format!("`--{flag}`")).collect();
    Err(match flags[..] {
        [] => return Ok(()),
        ["data-path"] => {
            let help = "`remesh data tokenize FILE -o PREFIX` makes one";
            Refusal::new("RM6004", "`--data-path` is not set", help)
        }
        [flag] => missing(flag),
        _ => {
            let help = "give them, or the same names with underscores in the configuration file; `remesh train --help` \
                        explains each";
            Refusal::new("RM6004", format!("{} are not set", names.join(", ")), help)
        }
    })
}

/// The layout and the batch of a run.
///
/// # Errors
/// A layout that cannot be.
pub(crate) fn parallel(said: &Said) -> anyhow::Result<ParallelConfig> {
    let parallelism = said.parallelism();
    let (args, training) = (parallelism.args(), &said.args().training);
    let world_size = world_size(training.nproc_per_node, args);
    let may_decrease = training.decrease_batch_size_if_needed == Some(true);
    let Some(batch) = training.step_schedule(args.seq_length)? else {
        let (Some(asked), Some(micro_batch_size), true) =
            (args.global_batch_size, args.micro_batch_size, may_decrease)
        else {
            return Ok(parallelism.resolve(world_size, 0)?);
        };
        let lanes = parallelism.resolve_layout(world_size, 0)?.batch_parallel_size();
        let taken = BatchSchedule::constant(asked)?.decreased(micro_batch_size, lanes)?.last_size();
        let last = ParallelArgs { global_batch_size: Some(taken), ..args.clone() };
        return Ok(MergedArgs::of(&[(Source::ProgramDefault, last)]).resolve(world_size, 0)?);
    };
    if may_decrease {
        return Err(said_twice("decrease_batch_size_if_needed", "step_batch_size_schedule").into());
    }
    if args.global_batch_size.is_some() {
        return Err(said_twice("global_batch_size", "step_batch_size_schedule").into());
    }
    let last = ParallelArgs { global_batch_size: Some(batch.last_size()), ..args.clone() };
    Ok(MergedArgs::of(&[(Source::ProgramDefault, last)]).resolve(world_size, 0)?)
}

/// The configuration of a run over `parallel`. `tokenizer` is the data's. What goes on from `saved` keeps its schedule and
/// numerics as far as nothing else is said. It is not checked: where it goes on from another run, what differs is said first.
///
/// # Errors
/// A setting that has no default and was not said, or was said twice.
pub(crate) fn config(
    args: &TrainArgs,
    parallel: ParallelConfig,
    tokenizer: Option<&Tokenizer>,
    saved: Option<&TrainConfig>,
) -> anyhow::Result<TrainConfig> {
    let vocab_size = tokenizer.map(|tokenizer| tokenizer.vocab_size);
    let model = args.model.resolve(vocab_size, parallel.seq_length() as usize)?;
    let asked = args.parallelism.global_batch_size.unwrap_or(parallel.global_batch_size());
    let epoch_tail = args.data.epoch_tail.unwrap_or_default();
    let config = args.training.resolve(model, parallel, asked, epoch_tail, saved)?;
    Ok(TrainConfig { documents: args.data.documents(tokenizer)?, ..config })
}

/// Checks what flags alone decide, before any file is opened; what data or a checkpoint may still say is taken to fit.
///
/// # Errors
/// A model or a layout that cannot be trained, whatever they say.
pub(crate) fn check_flags(args: &TrainArgs, parallel: ParallelConfig) -> Result<(), ConfigError> {
    let may_resume = args.checkpoint.save.is_some() || args.checkpoint.load.is_some();
    let (leaf, tp_leaves) = (args.training.canonical_leaf_tokens, args.training.canonical_tp_leaves);
    let mut args = args.clone();
    args.training.lr.get_or_insert(f32::MAX.into());
    args.model.vocab_size.get_or_insert(1);
    let config = match config(&args, parallel, None, None) {
        Ok(config) => config,
        // What data or a checkpoint may still say.
        Err(error) => return error.downcast().map_or(Ok(()), Err),
    };
    match config.check().and_then(|()| memory::check(&config, args.training.device.unwrap_or_default())).err()
    {
        // A resume takes them from the checkpoint.
        Some(ConfigError::Leaf { .. }) if may_resume && leaf.is_none() => Ok(()),
        Some(ConfigError::TpLeaves { .. } | ConfigError::TpLeavesOfModel { .. })
            if may_resume && tp_leaves.is_none() =>
        {
            Ok(())
        }
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// Checks that the trainer has the process groups that were asked for.
///
/// # Errors
/// Several optimizer instances, or several levels inside runtime CP.
pub(crate) fn check_groups(groups: &GroupOptions) -> Result<(), Refusal> {
    let refused = |flag: &str, reason: &str| {
        Err(Refusal::new("RM6005", format!("`--{flag}`: {reason}"), format!("leave out --{flag}")))
    };
    if groups.num_distributed_optimizer_instances > 1 {
        return refused("num-distributed-optimizer-instances", "the optimizer has one instance so far");
    }
    if groups.hierarchical_context_parallel_sizes.len() > 1 {
        return refused("hierarchical-context-parallel-sizes", "context parallelism has one level so far");
    }
    Ok(())
}

/// A setting that has no default.
pub(super) fn missing(flag: &str) -> Refusal {
    let key = flag.replace('-', "_");
    Refusal::new(
        "RM6004",
        format!("`--{flag}` is not set"),
        format!("give it, or `{key}` in the configuration file"),
    )
}

/// Two settings of one thing.
pub(super) fn said_twice(key: &str, other: &str) -> Refusal {
    Refusal::new("RM6003", format!("`{key}` and `{other}` are both set"), "leave one of them out")
}
