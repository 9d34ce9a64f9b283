//! What was said about a run, by flags and by `remesh.toml`: one struct for both, `None` where nothing was said.
//!
//! Layers of it are merged by [`said`], field by field, before anything is derived; [`resolve`] then makes the configuration.
//! A new flag is a field of a table here, its default in [`resolve`], and its value in [`said`].

pub(crate) mod file;
pub(crate) mod megatron;
pub(crate) mod resolve;
pub(crate) mod said;

use crate::output::Output;
use megatron::MegatronFlags;
use mesh::{Merged, ParallelArgs, Source};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::num::NonZeroU32;
use std::path::PathBuf;
use train::config::{EpochTail, LossAverage, Normalization};
use train::resume::RngPolicy;

/// Everything that can be said about a run: the flags of `train` and `config`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct RunArgs {
    /// Read settings from FILE, too; flags go over it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    args: TrainArgs,
    #[command(flatten)]
    megatron: MegatronFlags,
}

/// Every setting of a run; each field but `parallelism` is a table of `remesh.toml`, too.
#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
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

/// Declares a table: its struct, the names of its fields, and how layers of it are merged.
macro_rules! table {
    ($(#[$meta:meta])* struct $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty,)* }) => {
        #[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        $(#[$meta])*
        pub(crate) struct $name { $($(#[$field_meta])* pub(crate) $field: Option<$type>,)* }

        impl $name {
            /// Keys of `remesh.toml`.
            pub(crate) const NAMES: &[&str] = &[$(stringify!($field)),*];

            /// Each value from the strongest of the layers that says it.
            pub(crate) fn merge(layers: &[(Source, Self)]) -> Merged<Self> {
                mesh::merge_layers! { $name, layers, $($field)* }
            }
        }
    };
}

table! {
    /// `[model]`
    #[command(arg = clap::Arg::new("untie_embeddings_and_output_weights")
        .long("untie-embeddings-and-output-weights")
        .help("Keep the output layer apart from the word embedding")
        .action(clap::ArgAction::SetTrue)
        .overrides_with("tie_embeddings"))]
    #[command(arg = clap::Arg::new("no_swiglu")
        .long("no-swiglu")
        .help("Plain feed-forward blocks: GELU by the error function")
        .action(clap::ArgAction::SetTrue)
        .overrides_with("swiglu"))]
    #[command(arg = clap::Arg::new("disable_bias_linear")
        .long("disable-bias-linear")
        .help("Leave projections without biases")
        .action(clap::ArgAction::SetTrue)
        .overrides_with("add_bias_linear"))]
    struct ModelArgs {
        /// Decoder layers (required)
        #[arg(long, value_name = "LAYERS")]
        num_layers: usize,
        /// Hidden size (required)
        #[arg(long, value_name = "SIZE")]
        hidden_size: usize,
        /// Width of the feed-forward blocks, for SwiGLU that of gate and of up [default: ⌊8 × hidden size ÷ 3 ÷ 64⌋ × 64, as
        /// Megatron's for SwiGLU; else 4 × hidden size]
        #[arg(long, value_name = "SIZE")]
        ffn_hidden_size: usize,
        /// Query heads (required; a multiple of the query groups)
        #[arg(long, value_name = "HEADS")]
        num_attention_heads: usize,
        /// Key-value heads [default: query heads; a multiple of TP]
        #[arg(long, value_name = "GROUPS")]
        num_query_groups: usize,
        /// Says that --num-query-groups is meant; that alone is enough
        #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", hide = true)]
        group_query_attention: bool,
        /// Elements of a head [default: hidden size ÷ query heads]
        #[arg(long, value_name = "SIZE")]
        kv_channels: usize,
        /// Token ids there are [default: what PREFIX.tokenizer.json of the data says]
        #[arg(long, value_name = "IDS")]
        vocab_size: usize,
        /// Use the word embedding as output layer [default: off]
        #[arg(
            long,
            num_args = 0..=1,
            require_equals = true,
            default_missing_value = "true",
            default_value_if("untie_embeddings_and_output_weights", "true", "false"),
            overrides_with = "untie_embeddings_and_output_weights"
        )]
        tie_embeddings: bool,
        /// Kind of the norms: RMSNorm, LayerNorm [default: RMSNorm]
        #[arg(long, value_parser = named::<Normalization>, value_name = "KIND")]
        normalization: Normalization,
        /// ε of the norms [default: 1e-5]
        #[arg(long, value_name = "EPSILON")]
        norm_epsilon: f32,
        /// Where positions come in: rope, learned_absolute [default: rope]
        #[arg(long, value_enum, value_name = "TYPE")]
        position_embedding_type: PositionEmbeddingType,
        /// Rows of the table of learned positions [default: the sequence length; at least that]
        #[arg(long, value_name = "POSITIONS")]
        max_position_embeddings: usize,
        /// Base of the rotary angles [default: 10000]
        #[arg(long, value_name = "BASE")]
        rotary_base: f64,
        /// SwiGLU in the feed-forward blocks [default: on]
        #[arg(
            long,
            num_args = 0..=1,
            require_equals = true,
            default_missing_value = "true",
            default_value_if("no_swiglu", "true", "false"),
            overrides_with = "no_swiglu"
        )]
        swiglu: bool,
        /// GELU by the hyperbolic tangent, as GPT-2 has it, in place of SwiGLU [default: off]
        #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        openai_gelu: bool,
        /// Biases in all projections of a layer [default: off]
        #[arg(
            long,
            num_args = 0..=1,
            require_equals = true,
            default_missing_value = "true",
            default_value_if("disable_bias_linear", "true", "false"),
            overrides_with = "disable_bias_linear"
        )]
        add_bias_linear: bool,
        /// Biases of queries, keys and values, as Qwen2 has them [default: off]
        #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        add_qkv_bias: bool,
        /// Probability of the hidden dropouts, from 0 to below 1 [default: 0]
        #[arg(long, value_name = "P")]
        hidden_dropout: f32,
        /// Probability of the attention dropout, from 0 to below 1 [default: 0]
        #[arg(long, value_name = "P")]
        attention_dropout: f32,
        /// Standard deviation of initial weights [default: 0.02]
        #[arg(long, value_name = "STD")]
        init_method_std: f64,
    }
}

table! {
    /// `[training]`; the file has `seq_length` and the batch sizes here, too.
    #[command(arg = clap::Arg::new("fp32")
        .long("fp32")
        .help("Compute in f32 [default: the checkpoint's, else on]")
        .action(clap::ArgAction::SetTrue)
        .overrides_with("bf16"))]
    struct TrainingArgs {
        #[arg(skip)]
        seq_length: u64,
        #[arg(skip)]
        micro_batch_size: u32,
        #[arg(skip)]
        global_batch_size: u64,
        /// Ranks of the job, threads of one process [default: one copy of the model, TP × PP × CP × GTP, times DP if that is said]
        #[arg(long, visible_alias = "world-size", value_name = "RANKS")]
        nproc_per_node: u32,
        /// What ranks compute on: cpu, cuda (the first GPU, which all ranks share) [default: cpu]
        #[arg(long, value_enum, hide_possible_values = true, value_name = "DEVICE")]
        device: DeviceArg,
        /// Optimizer steps of the whole run, those before a resume included (required, or --train-samples)
        #[arg(long, value_name = "STEPS", conflicts_with = "train_samples")]
        train_iters: u64,
        /// Samples of the whole run; a last incomplete global batch is not trained
        #[arg(long, value_name = "SAMPLES")]
        train_samples: u64,
        /// Let the batch grow: samples of the first step, samples added at each level, samples until --global-batch-size is reached
        /// [default: a constant batch; the end less the start is a multiple of what is added]
        #[arg(long, num_args = 3, value_names = ["START", "ADDED", "SAMPLES"], conflicts_with = "step_batch_size_schedule")]
        rampup_batch_size: Vec<u64>,
        /// Let the batch change at counts of tokens, such as '0:768 250B:1536'; the last size stands for --global-batch-size
        /// [default: a constant batch]
        #[arg(long, value_name = "TOKENS:BATCH ...", conflicts_with = "global_batch_size")]
        step_batch_size_schedule: String,
        /// Iterations whose batch is passed over, each the number of those done before it
        #[arg(long, value_name = "ITERATIONS", num_args = 1.., value_delimiter = ',')]
        iterations_to_skip: Vec<u64>,
        /// Highest learning rate (required to start a run)
        #[arg(long, value_name = "RATE")]
        lr: f64,
        /// Lowest learning rate after the warm-up [default: 0]
        #[arg(long, value_name = "RATE")]
        min_lr: f64,
        /// How the learning rate comes down [default: cosine]
        #[arg(long, value_enum, value_name = "STYLE")]
        lr_decay_style: DecayStyle,
        /// Steps until the learning rate is down [default: the whole run]
        #[arg(long, value_name = "STEPS", conflicts_with = "lr_decay_samples")]
        lr_decay_iters: u64,
        /// Samples until the learning rate is down
        #[arg(long, value_name = "SAMPLES")]
        lr_decay_samples: u64,
        /// Steps in which the learning rate rises first [default: 0]
        #[arg(long, value_name = "STEPS", conflicts_with_all = ["lr_warmup_samples", "lr_warmup_fraction"])]
        lr_warmup_iters: u64,
        /// Samples in which the learning rate rises first
        #[arg(long, value_name = "SAMPLES", conflicts_with = "lr_warmup_fraction")]
        lr_warmup_samples: u64,
        /// Part of the decay in which the learning rate rises first, from 0 to below 1
        #[arg(long, value_name = "PART")]
        lr_warmup_fraction: f64,
        /// Learning rate at the start of the warm-up [default: 0]
        #[arg(long, value_name = "RATE")]
        lr_warmup_init: f64,
        /// Shape of the last phase of --lr-decay-style WSD [default: exponential]
        #[arg(long, value_enum, value_name = "SHAPE")]
        lr_wsd_decay_style: WsdStyle,
        /// Steps of that last phase (required with WSD, or the samples)
        #[arg(long, value_name = "STEPS", conflicts_with = "lr_wsd_decay_samples")]
        lr_wsd_decay_iters: u64,
        /// Samples of that last phase
        #[arg(long, value_name = "SAMPLES")]
        lr_wsd_decay_samples: u64,
        /// Leave the checkpoint's schedule alone: all of it comes from these flags and their defaults
        #[arg(long = "override-opt_param-scheduler", alias = "override-opt-param-scheduler", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        #[arg(value_name = "BOOL")]
        override_opt_param_scheduler: bool,
        /// Weight decay of matrices [default: 0.01]
        #[arg(long, value_name = "DECAY")]
        weight_decay: f64,
        /// Decay of the first moment [default: 0.9]
        #[arg(long, value_name = "BETA")]
        adam_beta1: f64,
        /// Decay of the second moment [default: 0.999]
        #[arg(long, value_name = "BETA")]
        adam_beta2: f64,
        /// Added to the root of the second moment [default: 1e-8]
        #[arg(long, value_name = "EPSILON")]
        adam_eps: f64,
        /// Largest gradient norm; 0 clips nothing [default: 1]
        #[arg(long, value_name = "NORM")]
        clip_grad: f64,
        /// Seed of every random number of the run, below 2³² [default: 1234]
        #[arg(long, value_name = "SEED")]
        seed: u32,
        /// Order of sums: canonical (the same bits under every layout) or fast [default: the checkpoint's, else canonical]
        #[arg(long, value_enum, value_name = "MODE")]
        numerics: NumericsArg,
        /// Compute in bf16, with f32 masters of the weights [default: the checkpoint's, else off]
        #[arg(
            long,
            num_args = 0..=1,
            require_equals = true,
            default_missing_value = "true",
            default_value_if("fp32", "true", "false"),
            overrides_with = "fp32"
        )]
        bf16: bool,
        /// Consecutive positions whose sum runs in one order, in tokens [default: min(64, max(1, g ÷ 16)), g the largest power of
        /// two that divides the sequence length; it must divide what a rank holds]
        #[arg(long, value_name = "TOKENS")]
        canonical_leaf_tokens: usize,
        /// Blocks of a sum that TP splits [default: the largest power of two up to 8 that divides query groups and widths]
        #[arg(long, value_name = "LEAVES")]
        canonical_tp_leaves: usize,
        /// How token losses become the loss of a step: token, sample [default: token]
        #[arg(long, value_parser = named::<LossAverage>, value_name = "AVERAGE")]
        loss_average: LossAverage,
        /// Minutes that ranks wait for one that is busy before the run is given up, at least 1 [default: 10]
        #[arg(long, value_name = "MINUTES")]
        distributed_timeout_minutes: NonZeroU32,
        /// Skipped steps in a row that end the run [default: 3]
        #[arg(long, value_name = "STEPS")]
        max_skipped_in_a_row: u32,
    }
}

table! {
    /// `[data]`
    struct DataArgs {
        /// Train on PREFIX.bin and PREFIX.idx (required)
        #[arg(long, value_name = "PREFIX")]
        data_path: PathBuf,
        /// Samples that fill no global batch at the end of an epoch: span, drop, pad [default: span, the batch crosses into the
        /// next epoch]
        #[arg(long, value_parser = named::<EpochTail>, value_name = "RULE")]
        epoch_tail: EpochTail,
    }
}

table! {
    /// `[checkpoint]`
    struct CheckpointArgs {
        /// Folder of the run's checkpoints; saves at the last step, too [default: save nothing]
        #[arg(long, value_name = "FOLDER")]
        save: String,
        /// Resume from FOLDER, FOLDER@STEP or FOLDER/iter_…; it must be there [default: auto, the newest whole checkpoint in
        /// --save, or a fresh start]
        #[arg(long, value_name = "CKPT")]
        load: String,
        /// Steps from one save to the next [default: only the last step]
        #[arg(long, value_name = "STEPS")]
        save_interval: u64,
        /// Resume from this step
        #[arg(long, value_name = "STEP")]
        ckpt_step: u64,
        /// Take what neither flags nor --config say from the checkpoint: model, training and data order, not the layout
        #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        use_checkpoint_args: bool,
        /// Set checkpoints in --save that are newer than the resumed step aside, once that is loaded
        #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        overwrite: bool,
        /// Leave moments and schedule where they start
        #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        no_load_optim: bool,
        /// Derive random streams anew
        #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        no_load_rng: bool,
        /// Take weights alone, and start at step 0
        #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        finetune: bool,
        /// Refuse to start afresh
        #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        exit_on_missing_checkpoint: bool,
        /// Random streams under another layout: derive, existing, strict [default: derive]
        #[arg(long, value_parser = named::<RngPolicy>, value_name = "POLICY")]
        rng_policy: RngPolicy,
        /// Refuse a resume that is proved less far than L2, or whose first step should be the saved run's and is not
        #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        strict: bool,
        /// Tensors that the checkpoint may lack; they keep their initial values
        #[arg(long, value_name = "GLOB", value_delimiter = ',')]
        allow_missing: Vec<String>,
        /// Tensors of the checkpoint that the model may not want
        #[arg(long, value_name = "GLOB", value_delimiter = ',')]
        allow_extra: Vec<String>,
        /// Settings that may differ from the checkpoint's, as the refusal names them
        #[arg(long, value_name = "FIELD", value_delimiter = ',')]
        allow_change: Vec<String>,
    }
}

table! {
    /// `[logging]`
    struct LoggingArgs {
        /// Steps from one printed line to the next [default: 1]
        #[arg(long, value_name = "STEPS")]
        log_interval: u64,
        /// Folder of metrics.jsonl [default: --save]
        #[arg(long, value_name = "FOLDER")]
        log_dir: PathBuf,
    }
}

/// `--lr-decay-style`
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DecayStyle {
    Constant,
    Linear,
    Cosine,
    InverseSquareRoot,
    #[value(name = "WSD")]
    #[serde(rename = "WSD")]
    Wsd,
}

/// `--lr-wsd-decay-style`
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub(crate) enum WsdStyle {
    Exponential,
    Linear,
    Cosine,
    MinusSqrt,
}

/// `--position-embedding-type`
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub(crate) enum PositionEmbeddingType {
    Rope,
    LearnedAbsolute,
}

/// `--numerics`
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum NumericsArg {
    Canonical,
    Fast,
}

/// `--device`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DeviceArg {
    #[default]
    Cpu,
    Cuda,
}

/// A value by the name that files have for it.
fn named<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_value(text.into()).map_err(|error| error.to_string())
}

impl RunArgs {
    /// What flags and file say; a line names the flags that make no difference.
    ///
    /// # Errors
    /// Flags that ask for what is not done, and a file that cannot be read or understood.
    pub(crate) fn layers(mut self, output: &Output) -> anyhow::Result<Vec<(Source, TrainArgs)>> {
        let without_effect = self.megatron.check()?;
        self.megatron.put_into(&mut self.args)?;
        if !without_effect.is_empty() {
            output.note(format!("no effect here: {}", without_effect.join(", ")));
        }
        let file = self.config.as_deref().map(file::read).transpose()?.unwrap_or_default();
        Ok(vec![(Source::CommandLine, self.args), (Source::ConfigFile, file)])
    }
}

impl TrainingArgs {
    /// Takes out of `weaker` what is said here in other words: a length in steps, in samples or as a part, and what fast
    /// numerics do not have.
    fn silence(&self, weaker: &mut Self) {
        if self.train_iters.is_some() || self.train_samples.is_some() {
            (weaker.train_iters, weaker.train_samples) = (None, None);
        }
        if self.lr_decay_iters.is_some() || self.lr_decay_samples.is_some() {
            (weaker.lr_decay_iters, weaker.lr_decay_samples) = (None, None);
        }
        if self.lr_warmup_iters.is_some()
            || self.lr_warmup_samples.is_some()
            || self.lr_warmup_fraction.is_some()
        {
            (weaker.lr_warmup_iters, weaker.lr_warmup_samples, weaker.lr_warmup_fraction) =
                (None, None, None);
        }
        if self.lr_wsd_decay_iters.is_some() || self.lr_wsd_decay_samples.is_some() {
            (weaker.lr_wsd_decay_iters, weaker.lr_wsd_decay_samples) = (None, None);
        }
        if self.numerics == Some(NumericsArg::Fast) {
            (weaker.canonical_leaf_tokens, weaker.canonical_tp_leaves) = (None, None);
        }
    }
}
