//! What flags, file and checkpoint said about a run, merged, with who said it.

use crate::args::{
    CheckpointArgs, DataArgs, DecayStyle, LoggingArgs, ModelArgs, NumericsArg, PositionEmbeddingType,
    TrainArgs, TrainingArgs, WsdStyle,
};
use mesh::{BatchStep, LrDecayStyle, MergedArgs, ParallelArgs, Source, Warmup, WeightDecayStyle, WsdShape};
use train::config::{
    Activation, Biases, ModelConfig, Numerics, OptimizerConfig, PositionEmbedding, Precision, TrainConfig,
};
use train::resume::RngPolicy;

/// Everything that was said, one value a setting.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Said {
    pub(crate) args: TrainArgs,
    /// The layout and the batch, which `args` holds, too.
    pub(crate) parallelism: MergedArgs,
    sources: Vec<(&'static str, Source)>,
    layers: Vec<(Source, TrainArgs)>,
}

impl Said {
    /// Each value from the strongest of the layers that says it.
    pub(crate) fn merge(mut layers: Vec<(Source, TrainArgs)>) -> Said {
        layers.sort_by_key(|(source, _)| *source);
        for weaker in 1..layers.len() {
            let (stronger, rest) = layers.split_at_mut(weaker);
            stronger.iter().for_each(|(_, args)| args.training.silence(&mut rest[0].1.training));
        }
        let mut said = Said::default();
        macro_rules! tables {
            ($($table:ident: $args:ident)*) => {$(
                let of_table: Vec<_> = layers.iter().map(|(source, args)| (*source, args.$table.clone())).collect();
                let merged = $args::merge(&of_table);
                said.args.$table = merged.args().clone();
                said.sources.extend($args::NAMES.iter().filter_map(|name| Some((*name, merged.source(name)?))));
            )*};
        }
        tables! { model: ModelArgs training: TrainingArgs data: DataArgs checkpoint: CheckpointArgs logging: LoggingArgs }
        let parallelism: Vec<_> =
            layers.iter().map(|(source, args)| (*source, args.parallelism.clone())).collect();
        said.parallelism = ParallelArgs::merge(&parallelism);
        said.args.parallelism = said.parallelism.args().clone();
        said.layers = layers;
        said
    }

    /// The same with one more layer.
    pub(crate) fn over(&self, layer: (Source, TrainArgs)) -> Said {
        let mut layers = self.layers.clone();
        layers.push(layer);
        Said::merge(layers)
    }

    /// Who said the value of this key of `remesh.toml`; `None` if nobody did.
    pub(crate) fn source(&self, key: &str) -> Option<Source> {
        let found = self.sources.iter().find(|(name, _)| *name == key);
        found.map(|(_, source)| *source).or_else(|| self.parallelism.source(key))
    }
}

/// The settings of a run, as flags would say them, all but its layout, data and folders.
pub(crate) fn settings_of(config: &TrainConfig) -> TrainArgs {
    let TrainConfig {
        model,
        parallel,
        optimizer,
        schedule,
        numerics,
        precision,
        seed,
        train_iters,
        loss_average,
        epoch_tail,
        max_skipped_in_a_row,
        batch,
        iterations_to_skip,
    } = config;
    let entry =
        |step: &BatchStep| format!("{}:{}", step.from.saturating_mul(parallel.seq_length()), step.size);
    let steps = batch.as_steps().map(|steps| steps.iter().map(entry).collect::<Vec<_>>().join(" "));
    let OptimizerConfig { adam_beta1, adam_beta2, adam_eps, clip_grad } = optimizer;
    let (decay_style, wsd) = match schedule.lr_decay_style {
        LrDecayStyle::Constant => (DecayStyle::Constant, None),
        LrDecayStyle::Linear => (DecayStyle::Linear, None),
        LrDecayStyle::Cosine => (DecayStyle::Cosine, None),
        LrDecayStyle::InverseSquareRoot => (DecayStyle::InverseSquareRoot, None),
        LrDecayStyle::Wsd { length, shape } => (DecayStyle::Wsd, Some((length, shape))),
    };
    let (warmup_samples, warmup_fraction) = match schedule.lr_warmup {
        Warmup::Length(samples) => (Some(samples), None),
        Warmup::Fraction(fraction) => (None, Some(fraction)),
    };
    let canonical = match numerics {
        Numerics::Canonical(canonical) => Some(canonical),
        Numerics::Fast => None,
    };
    TrainArgs {
        model: model_settings(model),
        parallelism: ParallelArgs {
            micro_batch_size: Some(parallel.micro_batch_size()),
            global_batch_size: steps.is_none().then_some(parallel.global_batch_size()),
            seq_length: Some(parallel.seq_length()),
            ..ParallelArgs::default()
        },
        training: TrainingArgs {
            train_iters: Some(*train_iters),
            lr: Some(schedule.max_lr),
            min_lr: Some(schedule.min_lr),
            lr_decay_style: Some(decay_style),
            lr_decay_samples: Some(schedule.lr_decay),
            lr_warmup_samples: warmup_samples,
            lr_warmup_fraction: warmup_fraction,
            lr_warmup_init: Some(schedule.init_lr),
            lr_wsd_decay_style: wsd.map(|(_, shape)| match shape {
                WsdShape::Exponential => WsdStyle::Exponential,
                WsdShape::Linear => WsdStyle::Linear,
                WsdShape::Cosine => WsdStyle::Cosine,
                WsdShape::MinusSqrt => WsdStyle::MinusSqrt,
            }),
            lr_wsd_decay_samples: wsd.map(|(length, _)| length),
            weight_decay: (schedule.weight_decay_style == WeightDecayStyle::Constant)
                .then_some(schedule.end_weight_decay),
            adam_beta1: Some(*adam_beta1),
            adam_beta2: Some(*adam_beta2),
            adam_eps: Some(*adam_eps),
            clip_grad: Some(*clip_grad),
            seed: Some(*seed),
            numerics: Some(if canonical.is_some() { NumericsArg::Canonical } else { NumericsArg::Fast }),
            bf16: Some(*precision == Precision::Bf16),
            canonical_leaf_tokens: canonical.map(|canonical| canonical.leaf_tokens),
            canonical_tp_leaves: canonical.map(|canonical| canonical.tp_leaves),
            loss_average: Some(*loss_average),
            max_skipped_in_a_row: Some(*max_skipped_in_a_row),
            rampup_batch_size: batch.as_ramp().map(|ramp| vec![ramp.start, ramp.increment, ramp.samples]),
            step_batch_size_schedule: steps,
            iterations_to_skip: Some(iterations_to_skip.iter().copied().collect::<Vec<_>>())
                .filter(|skipped| !skipped.is_empty()),
            ..TrainingArgs::default()
        },
        data: DataArgs { epoch_tail: Some(*epoch_tail), ..DataArgs::default() },
        ..TrainArgs::default()
    }
}

fn model_settings(model: &ModelConfig) -> ModelArgs {
    let ModelConfig {
        num_layers,
        hidden_size,
        ffn_hidden_size,
        num_attention_heads,
        num_query_groups,
        kv_channels,
        vocab_size,
        tie_embeddings,
        normalization,
        norm_epsilon,
        position_embedding,
        rotary_base,
        activation,
        biases,
        hidden_dropout,
        attention_dropout,
        init_method_std,
    } = model;
    let (position_embedding_type, max_position_embeddings) = match position_embedding {
        PositionEmbedding::Rope => (PositionEmbeddingType::Rope, None),
        PositionEmbedding::LearnedAbsolute { max_positions } => {
            (PositionEmbeddingType::LearnedAbsolute, Some(*max_positions))
        }
    };
    ModelArgs {
        num_layers: Some(*num_layers),
        hidden_size: Some(*hidden_size),
        ffn_hidden_size: Some(*ffn_hidden_size),
        num_attention_heads: Some(*num_attention_heads),
        num_query_groups: Some(*num_query_groups),
        group_query_attention: None,
        kv_channels: Some(*kv_channels),
        vocab_size: Some(*vocab_size),
        tie_embeddings: Some(*tie_embeddings),
        normalization: Some(*normalization),
        norm_epsilon: Some(*norm_epsilon),
        position_embedding_type: Some(position_embedding_type),
        max_position_embeddings,
        swiglu: Some(*activation == Activation::Swiglu),
        openai_gelu: Some(*activation == Activation::GeluTanh),
        add_bias_linear: Some(*biases == Biases::All),
        add_qkv_bias: Some(*biases != Biases::None),
        rotary_base: Some(*rotary_base),
        hidden_dropout: Some(*hidden_dropout),
        attention_dropout: Some(*attention_dropout),
        init_method_std: Some(*init_method_std),
    }
}

/// What holds where nobody said anything: what `config` resolved to, its layout, and the defaults of what no configuration
/// holds.
pub(crate) fn resolved(config: &TrainConfig) -> TrainArgs {
    let mut args = settings_of(config);
    args.parallelism = ParallelArgs::from(&config.parallel);
    args.training.nproc_per_node = Some(config.parallel.layout().world_size());
    args.checkpoint.load = Some("auto".to_owned());
    args.checkpoint.rng_policy = Some(RngPolicy::default());
    args.logging.log_interval = Some(1);
    args
}
