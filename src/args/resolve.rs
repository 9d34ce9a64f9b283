//! From what was said to what holds: the one place where settings get their defaults.

use crate::args::said::Said;
use crate::args::{
    DecayStyle, ModelArgs, NumericsArg, PositionEmbeddingType, TrainArgs, TrainingArgs, WsdStyle,
};
use crate::location::local_folder;
use crate::memory;
use crate::output::count;
use crate::report::Refusal;
use mesh::{
    BatchSchedule, GroupOptions, LrDecayStyle, ParallelArgs, ParallelConfig, Ramp, ScheduleConfig,
    ScheduleError, ScheduleUnit, Source, Warmup, WeightDecayStyle, WsdShape,
};
use train::config::{
    Activation, Biases, Canonical, ConfigError, ModelConfig, Numerics, OptimizerConfig, PositionEmbedding,
    Precision, TrainConfig,
};

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
    let args = said.parallelism.args();
    let world_size = world_size(said.args.training.nproc_per_node, args);
    let Some(batch) = step_schedule(&said.args.training, args.seq_length)? else {
        return Ok(said.parallelism.resolve(world_size, 0)?);
    };
    if args.global_batch_size.is_some() {
        return Err(said_twice("global_batch_size", "step_batch_size_schedule").into());
    }
    let last = ParallelArgs { global_batch_size: Some(batch.last_size()), ..args.clone() };
    Ok(ParallelArgs::merge(&[(Source::ProgramDefault, last)]).resolve(world_size, 0)?)
}

/// The configuration of a run over `parallel`. `vocab_size` is the data's. What goes on from `saved` keeps its schedule and
/// numerics as far as nothing else is said. It is not checked: where it goes on from another run, what differs is said first.
///
/// # Errors
/// A setting that has no default and was not said, or was said twice.
pub(crate) fn config(
    args: &TrainArgs,
    parallel: ParallelConfig,
    vocab_size: Option<usize>,
    saved: Option<&TrainConfig>,
) -> anyhow::Result<TrainConfig> {
    let training = &args.training;
    let batch = batch(training, &parallel)?;
    let model = model(&args.model, vocab_size, parallel.seq_length() as usize)?;
    let numerics =
        numerics(training, &model, parallel.seq_length() as usize, saved.map(|saved| &saved.numerics))?;
    let precision = match training.bf16 {
        Some(true) => Precision::Bf16,
        Some(false) => Precision::Fp32,
        None => saved.map_or(Precision::Fp32, |saved| saved.precision),
    };
    let train_samples =
        length(("train_iters", training.train_iters), ("train_samples", training.train_samples), &batch)?
            .ok_or_else(|| missing("train-iters"))?;
    let train_iters = batch.steps_within(train_samples);
    if train_iters == 0 {
        return Err(Refusal::new(
            "RM6003",
            format!(
                "{} of training, less than a global batch of {}",
                count(train_samples, "sample"),
                batch.size_at(0)
            ),
            "give more --train-samples, or at least one of --train-iters",
        )
        .into());
    }
    let saved_schedule = saved.map(|saved| &saved.schedule);
    let saved_schedule = saved_schedule.filter(|_| training.override_opt_param_scheduler != Some(true));
    Ok(TrainConfig {
        schedule: schedule(training, train_samples, &batch, saved_schedule)?,
        optimizer: optimizer(training),
        numerics,
        precision,
        seed: training.seed.unwrap_or(1234),
        train_iters,
        loss_average: training.loss_average.unwrap_or_default(),
        epoch_tail: args.data.epoch_tail.unwrap_or_default(),
        max_skipped_in_a_row: training.max_skipped_in_a_row.unwrap_or(3),
        iterations_to_skip: training.iterations_to_skip.iter().flatten().copied().collect(),
        model,
        parallel,
        batch,
    })
}

/// What is said goes over what was saved, and that over the defaults of canonical numerics.
fn numerics(
    args: &TrainingArgs,
    model: &ModelConfig,
    seq_length: usize,
    saved: Option<&Numerics>,
) -> Result<Numerics, Refusal> {
    let (leaf, tp_leaves) = (args.canonical_leaf_tokens, args.canonical_tp_leaves);
    match (args.numerics, saved) {
        (Some(NumericsArg::Fast), _) | (None, Some(Numerics::Fast))
            if leaf.is_some() || tp_leaves.is_some() =>
        {
            let message = "leaves and blocks are set, which fast numerics do not have";
            let help =
                "leave out --canonical-leaf-tokens and --canonical-tp-leaves, or say --numerics canonical";
            Err(Refusal::new("RM6003", message, help))
        }
        (Some(NumericsArg::Fast), _) | (None, Some(Numerics::Fast)) => Ok(Numerics::Fast),
        (_, Some(Numerics::Canonical(saved))) => Ok(Numerics::Canonical(Canonical {
            leaf_tokens: leaf.unwrap_or(saved.leaf_tokens),
            tp_leaves: tp_leaves.unwrap_or(saved.tp_leaves),
            ..saved.clone()
        })),
        _ => Ok(Numerics::Canonical(Canonical::new(model, seq_length, leaf, tp_leaves))),
    }
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

/// Samples of each step, where `parallel` has the size that holds in the end.
fn batch(args: &TrainingArgs, parallel: &ParallelConfig) -> anyhow::Result<BatchSchedule> {
    let end = parallel.global_batch_size();
    if let Some(schedule) = step_schedule(args, Some(parallel.seq_length()))? {
        return Ok(schedule);
    }
    Ok(match args.rampup_batch_size.as_deref() {
        None => BatchSchedule::constant(end)?,
        Some([start, increment, samples]) => {
            BatchSchedule::ramp(Ramp { start: *start, increment: *increment, samples: *samples, end })?
        }
        Some(other) => {
            let message = format!("`rampup_batch_size` has {} numbers", other.len());
            let help =
                "give three: samples of the first step, samples added at each level, samples until the end";
            return Err(Refusal::new("RM6003", message, help).into());
        }
    })
}

/// The schedule of batch sizes in steps, if one was said.
///
/// # Errors
/// A text that is none, and a batch size that is said beside it.
pub(crate) fn step_schedule(
    args: &TrainingArgs,
    seq_length: Option<u64>,
) -> anyhow::Result<Option<BatchSchedule>> {
    let Some(text) = &args.step_batch_size_schedule else { return Ok(None) };
    if args.rampup_batch_size.is_some() {
        return Err(said_twice("step_batch_size_schedule", "rampup_batch_size").into());
    }
    Ok(Some(BatchSchedule::parse(text, seq_length)?))
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

fn missing(flag: &str) -> Refusal {
    let key = flag.replace('-', "_");
    Refusal::new(
        "RM6004",
        format!("`--{flag}` is not set"),
        format!("give it, or `{key}` in the configuration file"),
    )
}

fn model(args: &ModelArgs, vocab_size: Option<usize>, seq_length: usize) -> anyhow::Result<ModelConfig> {
    let hidden_size = args.hidden_size.ok_or_else(|| missing("hidden-size"))?;
    let heads = args.num_attention_heads.ok_or_else(|| missing("num-attention-heads"))?;
    if args.group_query_attention == Some(true) && args.num_query_groups.is_none() {
        return Err(missing("num-query-groups").into());
    }
    if args.kv_channels.is_none() && !hidden_size.is_multiple_of(heads.max(1)) {
        let (what, by) = ("hidden-size", "num-attention-heads");
        return Err(ConfigError::Indivisible { what, value: hidden_size, by, divisor: heads }.into());
    }
    if let (Some(said), Some(ids)) = (args.vocab_size, vocab_size)
        && said < ids
    {
        return Err(Refusal::new(
            "RM6003",
            format!("`--vocab-size` {said} is less than the {ids} ids of the data's tokenizer"),
            "leave it out, or give at least that",
        )
        .into());
    }
    let vocab_size = args.vocab_size.or(vocab_size);
    let activation = match (args.swiglu, args.openai_gelu) {
        (Some(true), Some(true)) => return Err(said_twice("swiglu", "openai_gelu").into()),
        (_, Some(true)) => Activation::GeluTanh,
        (Some(false), _) => Activation::Gelu,
        _ => Activation::Swiglu,
    };
    let default_ffn = match activation {
        Activation::Swiglu => (hidden_size.saturating_mul(8) / 3 / 64).max(1) * 64,
        Activation::Gelu | Activation::GeluTanh => hidden_size.saturating_mul(4),
    };
    Ok(ModelConfig {
        num_layers: args.num_layers.ok_or_else(|| missing("num-layers"))?,
        hidden_size,
        ffn_hidden_size: args.ffn_hidden_size.unwrap_or(default_ffn),
        num_attention_heads: heads,
        num_query_groups: args.num_query_groups.unwrap_or(heads),
        kv_channels: args.kv_channels.unwrap_or(hidden_size / heads.max(1)),
        vocab_size: vocab_size.ok_or_else(|| missing("vocab-size"))?,
        tie_embeddings: args.tie_embeddings.unwrap_or(false),
        normalization: args.normalization.unwrap_or_default(),
        position_embedding: match args.position_embedding_type {
            None | Some(PositionEmbeddingType::Rope) => PositionEmbedding::Rope,
            Some(PositionEmbeddingType::LearnedAbsolute) => PositionEmbedding::LearnedAbsolute {
                max_positions: args.max_position_embeddings.unwrap_or(seq_length),
            },
        },
        activation,
        biases: match (args.add_bias_linear, args.add_qkv_bias) {
            (Some(true), _) => Biases::All,
            (_, Some(true)) => Biases::Qkv,
            _ => Biases::None,
        },
        norm_epsilon: args.norm_epsilon.unwrap_or(1e-5),
        rotary_base: args.rotary_base.unwrap_or(10_000.0),
        hidden_dropout: args.hidden_dropout.unwrap_or(0.0),
        attention_dropout: args.attention_dropout.unwrap_or(0.0),
        init_method_std: args.init_method_std.unwrap_or(0.02),
    })
}

fn optimizer(args: &TrainingArgs) -> OptimizerConfig {
    OptimizerConfig {
        adam_beta1: args.adam_beta1.unwrap_or(0.9),
        adam_beta2: args.adam_beta2.unwrap_or(0.999),
        adam_eps: args.adam_eps.unwrap_or(1e-8),
        clip_grad: args.clip_grad.unwrap_or(1.0),
    }
}

/// The schedule in samples, so that it does not change with the batch size.
fn schedule(
    args: &TrainingArgs,
    train_samples: u64,
    batch: &BatchSchedule,
    saved: Option<&ScheduleConfig>,
) -> anyhow::Result<ScheduleConfig> {
    let mut schedule = match saved {
        Some(saved) => saved.clone(),
        None => ScheduleConfig {
            unit: ScheduleUnit::Samples,
            train: train_samples,
            lr_decay: train_samples,
            lr_warmup: Warmup::Length(0),
            lr_decay_style: LrDecayStyle::Cosine,
            init_lr: 0.0,
            max_lr: args.lr.ok_or_else(|| missing("lr"))?,
            min_lr: 0.0,
            start_weight_decay: 0.01,
            end_weight_decay: 0.01,
            weight_decay_style: WeightDecayStyle::Constant,
        },
    };
    let in_samples = |iters, samples| length(iters, samples, batch);
    let decay =
        in_samples(("lr_decay_iters", args.lr_decay_iters), ("lr_decay_samples", args.lr_decay_samples))?;
    let warmup =
        in_samples(("lr_warmup_iters", args.lr_warmup_iters), ("lr_warmup_samples", args.lr_warmup_samples))?;
    let warmup = match (warmup, args.lr_warmup_fraction) {
        (Some(_), Some(_)) => {
            return Err(said_twice("lr_warmup_fraction", "another length of the warm-up").into());
        }
        (length, fraction) => length.map(Warmup::Length).or(fraction.map(Warmup::Fraction)),
    };
    schedule.lr_decay = decay.unwrap_or(schedule.lr_decay);
    schedule.lr_warmup = warmup.unwrap_or(schedule.lr_warmup);
    schedule.init_lr = args.lr_warmup_init.unwrap_or(schedule.init_lr);
    schedule.max_lr = args.lr.unwrap_or(schedule.max_lr);
    schedule.min_lr = args.min_lr.unwrap_or(schedule.min_lr);
    if let Some(decay) = args.weight_decay {
        (schedule.start_weight_decay, schedule.end_weight_decay) = (decay, decay);
        schedule.weight_decay_style = WeightDecayStyle::Constant;
    }
    let last_phase = in_samples(
        ("lr_wsd_decay_iters", args.lr_wsd_decay_iters),
        ("lr_wsd_decay_samples", args.lr_wsd_decay_samples),
    )?;
    // Iterations of the last phase are the last ones of the decay, where the batch may have grown.
    let before =
        args.lr_wsd_decay_iters.and_then(|last| batch.steps_within(schedule.lr_decay).checked_sub(last));
    let before = before.and_then(|iterations| batch.samples_after(iterations));
    let last_phase = before.map(|before| schedule.lr_decay - before).or(last_phase);
    schedule.lr_decay_style = decay_style(args, schedule.lr_decay_style, last_phase)?;
    Ok(mesh::Schedule::new(schedule, batch)?.into())
}

fn decay_style(
    args: &TrainingArgs,
    default: LrDecayStyle,
    last_phase: Option<u64>,
) -> Result<LrDecayStyle, Refusal> {
    let default_is_wsd = matches!(default, LrDecayStyle::Wsd { .. });
    Ok(match args.lr_decay_style {
        None if !default_is_wsd => default,
        Some(DecayStyle::Constant) => LrDecayStyle::Constant,
        Some(DecayStyle::Linear) => LrDecayStyle::Linear,
        Some(DecayStyle::Cosine) => LrDecayStyle::Cosine,
        Some(DecayStyle::InverseSquareRoot) => LrDecayStyle::InverseSquareRoot,
        None | Some(DecayStyle::Wsd) => {
            let (length, shape) = match default {
                LrDecayStyle::Wsd { length, shape } => (Some(length), shape),
                _ => (None, WsdShape::Exponential),
            };
            let shape = match args.lr_wsd_decay_style {
                None => shape,
                Some(WsdStyle::Exponential) => WsdShape::Exponential,
                Some(WsdStyle::Linear) => WsdShape::Linear,
                Some(WsdStyle::Cosine) => WsdShape::Cosine,
                Some(WsdStyle::MinusSqrt) => WsdShape::MinusSqrt,
            };
            let length = last_phase.or(length).ok_or_else(|| missing("lr-wsd-decay-iters"))?;
            LrDecayStyle::Wsd { length, shape }
        }
    })
}

/// A length in samples that was said in steps or in samples.
fn length(
    (iters_key, iters): (&str, Option<u64>),
    (samples_key, samples): (&str, Option<u64>),
    batch: &BatchSchedule,
) -> anyhow::Result<Option<u64>> {
    Ok(match (iters, samples) {
        (Some(_), Some(_)) => return Err(said_twice(iters_key, samples_key).into()),
        (Some(iterations), None) => {
            let too_long = || ScheduleError::TooLong { iterations, batch: batch.clone() };
            Some(batch.samples_after(iterations).ok_or_else(too_long)?)
        }
        (None, samples) => samples,
    })
}

/// Two settings of one thing.
pub(crate) fn said_twice(key: &str, other: &str) -> Refusal {
    Refusal::new("RM6003", format!("`{key}` and `{other}` are both set"), "leave one of them out")
}
