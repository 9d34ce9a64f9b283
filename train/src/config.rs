//! What a run is, resolved: no options, no defaults left to choose. Stored in every checkpoint.

use mesh::{ParallelConfig, ScheduleConfig};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Everything that decides a run's numbers, and its layout.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainConfig {
    /// Shape of the model.
    pub model: ModelConfig,
    /// Layout and batch sizes.
    pub parallel: ParallelConfig,
    /// Optimizer settings.
    pub optimizer: OptimizerConfig,
    /// Learning rate and weight decay over samples.
    pub schedule: ScheduleConfig,
    /// Numerics contract.
    pub numerics: Numerics,
    /// Seed of every random number of the run.
    pub seed: u32,
    /// Iterations of the whole run.
    pub train_iters: u64,
    /// How the losses of a batch are averaged.
    pub loss_average: LossAverage,
    /// What happens where the data set is no multiple of the global batch.
    pub epoch_tail: EpochTail,
    /// Consecutive skipped steps that end the run.
    pub max_skipped_in_a_row: u32,
}

/// A Llama-like model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Decoder layers.
    pub num_layers: usize,
    /// Hidden size.
    pub hidden_size: usize,
    /// Feed-forward width (of gate and of up).
    pub ffn_hidden_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key-value heads.
    pub num_query_groups: usize,
    /// Elements of a head.
    pub kv_channels: usize,
    /// Logical vocabulary size.
    pub vocab_size: usize,
    /// Whether the output layer is the word embedding.
    pub tie_embeddings: bool,
    /// RMSNorm ε.
    pub norm_epsilon: f32,
    /// Base of the rotary angles.
    pub rotary_base: f64,
    /// Probability of the hidden dropouts.
    pub hidden_dropout: f32,
    /// Probability of the attention dropout.
    pub attention_dropout: f32,
    /// Standard deviation of initial weights.
    pub init_method_std: f64,
}

impl ModelConfig {
    /// Query heads of a group.
    pub fn queries_per_group(&self) -> usize {
        self.num_attention_heads / self.num_query_groups
    }
}

/// AdamW and clipping.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OptimizerConfig {
    /// Decay of the first moment.
    pub adam_beta1: f64,
    /// Decay of the second moment.
    pub adam_beta2: f64,
    /// Added to the root of the second moment.
    pub adam_eps: f64,
    /// Largest gradient norm; 0 clips nothing.
    pub clip_grad: f64,
}

/// The contract under which bits do not depend on the layout. A resume takes it from the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Numerics {
    /// `canonical`: the only mode on CPU so far.
    pub mode: NumericsMode,
    /// Consecutive positions of a sample whose sum runs in one fixed order.
    pub leaf_tokens: usize,
    /// Blocks into which every TP-split sum is divided.
    pub tp_leaves: usize,
    /// Fraction bits of fixed-point gradients and losses.
    pub grad_bits: u32,
    /// Fraction bits of fixed-point key and value gradients.
    pub kv_bits: u32,
}

/// How sums are ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NumericsMode {
    /// Bits do not depend on the layout.
    Canonical,
}

/// How token losses become the loss of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LossAverage {
    /// Sum of token losses over the number of valid tokens of the global batch.
    #[default]
    Token,
    /// Mean over samples of each sample's mean.
    Sample,
}

/// What happens where the data set is no multiple of the global batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EpochTail {
    /// Batches cross the border of epochs; every sample is used.
    #[default]
    Span,
    /// The samples of an epoch that fill no batch are not used.
    Drop,
    /// The last batch of an epoch is filled up with samples of no weight.
    Pad,
}

impl fmt::Display for OptimizerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OptimizerConfig { adam_beta1, adam_beta2, adam_eps, clip_grad } = self;
        write!(f, "AdamW (β {adam_beta1} and {adam_beta2}, ε {adam_eps}, clip {clip_grad})")
    }
}

impl fmt::Display for Numerics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Numerics { mode: NumericsMode::Canonical, leaf_tokens, tp_leaves, grad_bits, kv_bits } = self;
        write!(
            f,
            "canonical (leaf {leaf_tokens}, TP blocks {tp_leaves}, fraction bits {grad_bits} and {kv_bits})"
        )
    }
}

impl fmt::Display for LossAverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LossAverage::Token => "token",
            LossAverage::Sample => "sample",
        })
    }
}

impl fmt::Display for EpochTail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EpochTail::Span => "span",
            EpochTail::Drop => "drop",
            EpochTail::Pad => "pad",
        })
    }
}

impl Numerics {
    /// Largest number of TP blocks.
    const TP_LEAVES_MAX: usize = 8;
    /// Largest leaf that is chosen by default, in tokens.
    const LEAF_TOKENS_MAX: usize = 64;

    /// The canonical contract of a model and sequence length, with the leaf sizes given or the default ones.
    /// Both defaults depend on the model and the sequence length alone, never on the layout.
    pub fn canonical(
        model: &ModelConfig,
        seq_length: usize,
        leaf_tokens: Option<usize>,
        tp_leaves: Option<usize>,
    ) -> Self {
        let largest_power_of_two = |n: usize| 1usize << n.trailing_zeros();
        let default_leaf = (largest_power_of_two(seq_length) / 16).clamp(1, Self::LEAF_TOKENS_MAX);
        let default_tp = [Self::TP_LEAVES_MAX, model.num_query_groups, model.ffn_hidden_size]
            .map(largest_power_of_two)
            .into_iter()
            .min()
            .expect("three widths");
        Numerics {
            mode: NumericsMode::Canonical,
            leaf_tokens: leaf_tokens.unwrap_or(default_leaf),
            tp_leaves: tp_leaves.unwrap_or(default_tp),
            grad_bits: 36,
            kv_bits: 40,
        }
    }
}

/// A configuration that cannot be trained.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Something must be at least one.
    #[error("`{what}` is 0")]
    Zero {
        /// Which setting.
        what: &'static str,
    },
    /// A division that must be exact.
    #[error("`{what}` {value} is no multiple of `{by}` {divisor}")]
    Indivisible {
        /// What is divided.
        what: &'static str,
        /// Its value.
        value: usize,
        /// By what.
        by: &'static str,
        /// Its value.
        divisor: usize,
    },
    /// TP does not divide the query groups.
    #[error(
        "TP {tp} does not divide the {groups} query groups: {groups} % {tp} != 0 (`decoder.layers.*.self_attention.linear_qkv.weight`)"
    )]
    QueryGroups {
        /// Tensor parallel degree.
        tp: u32,
        /// Query groups.
        groups: usize,
    },
    /// A pipeline, which the trainer does not run.
    #[error("pipeline parallel size {pp}: the trainer runs one stage")]
    Pipeline {
        /// Pipeline parallel degree.
        pp: u32,
    },
    /// The leaf does not divide what a rank holds.
    #[error("a leaf of {leaf} tokens does not divide {formula} = {part}")]
    Leaf {
        /// Tokens of a leaf.
        leaf: usize,
        /// What must be a multiple, as a formula.
        formula: String,
        /// Its value.
        part: usize,
        /// The largest leaf that fits.
        largest: usize,
    },
    /// TP does not fit the canonical tree.
    #[error("canonical numerics need TP 1, 2, 4 … up to {tp_leaves} here, found {tp}")]
    TpLeaves {
        /// Tensor parallel degree.
        tp: u32,
        /// Blocks of TP-split sums.
        tp_leaves: usize,
    },
    /// The number of TP blocks does not fit the model.
    #[error(
        "{tp_leaves} TP blocks: a power of two that divides the {groups} query groups and the feed-forward width {ffn} is needed"
    )]
    TpLeavesOfModel {
        /// Blocks of TP-split sums.
        tp_leaves: usize,
        /// Query groups.
        groups: usize,
        /// Feed-forward width.
        ffn: usize,
    },
    /// A probability outside `0..1`.
    #[error("`{what}` {value} is not in 0..1")]
    Probability {
        /// Which setting.
        what: &'static str,
        /// Its value, as text.
        value: String,
    },
}

impl ConfigError {
    /// Code of the error.
    pub fn code(&self) -> &'static str {
        match self {
            ConfigError::QueryGroups { .. } => "RM2003",
            ConfigError::Leaf { .. } => "RM2030",
            ConfigError::TpLeaves { .. } | ConfigError::TpLeavesOfModel { .. } => "RM2031",
            ConfigError::Pipeline { .. } => "RM2032",
            ConfigError::Zero { .. } | ConfigError::Indivisible { .. } | ConfigError::Probability { .. } => {
                "RM6003"
            }
        }
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            ConfigError::QueryGroups { groups, .. } => {
                let sizes: Vec<_> =
                    (1..=*groups).filter(|tp| groups.is_multiple_of(*tp)).map(|tp| tp.to_string()).collect();
                format!("pick a TP size that divides the query groups: {}", sizes.join(", "))
            }
            ConfigError::Leaf { largest, .. } => format!("the largest leaf that fits is --canonical-leaf-tokens {largest}"),
            ConfigError::TpLeaves { tp_leaves, .. } => {
                let sizes: Vec<_> = (0..=tp_leaves.ilog2()).map(|log| (1 << log).to_string()).collect();
                format!("valid TP sizes: {}", sizes.join(", "))
            }
            ConfigError::TpLeavesOfModel { .. } => {
                "leave out --canonical-tp-leaves for the largest that fits".to_owned()
            }
            ConfigError::Pipeline { .. } => {
                "leave out --pipeline-model-parallel-size; weights of a large model are spread by --tp and --weight-shards".to_owned()
            }
            ConfigError::Zero { what } => format!("give `{what}` a value of at least 1"),
            ConfigError::Indivisible { what, by, divisor, .. } => {
                format!("make `{what}` a multiple of `{by}` ({divisor})")
            }
            ConfigError::Probability { what, .. } => format!("give `{what}` a value from 0 up to, not including, 1"),
        }
    }
}

impl TrainConfig {
    /// Checks everything that the layout rules alone cannot see: the model's widths against TP, and the canonical leaves
    /// against what a rank holds. Pure, so all ranks refuse alike, before any group exists.
    ///
    /// # Errors
    /// The first thing that does not fit, with the numbers.
    pub fn check(&self) -> Result<(), ConfigError> {
        let m = &self.model;
        for (what, value) in [
            ("num-layers", m.num_layers),
            ("hidden-size", m.hidden_size),
            ("ffn-hidden-size", m.ffn_hidden_size),
            ("num-attention-heads", m.num_attention_heads),
            ("num-query-groups", m.num_query_groups),
            ("kv-channels", m.kv_channels),
            ("vocab-size", m.vocab_size),
            ("canonical-leaf-tokens", self.numerics.leaf_tokens),
            ("canonical-tp-leaves", self.numerics.tp_leaves),
        ] {
            if value == 0 {
                return Err(ConfigError::Zero { what });
            }
        }
        for (what, value, by, divisor) in [
            ("num-attention-heads", m.num_attention_heads, "num-query-groups", m.num_query_groups),
            ("kv-channels", m.kv_channels, "2 (rotary pairs)", 2),
        ] {
            if !value.is_multiple_of(divisor) {
                return Err(ConfigError::Indivisible { what, value, by, divisor });
            }
        }
        for (what, value) in
            [("hidden-dropout", m.hidden_dropout), ("attention-dropout", m.attention_dropout)]
        {
            if !(0.0..1.0).contains(&value) {
                return Err(ConfigError::Probability { what, value: value.to_string() });
            }
        }
        let layout = &self.parallel.layout();
        if layout.pp() != 1 {
            return Err(ConfigError::Pipeline { pp: layout.pp() });
        }
        let (tp, groups) = (layout.tp(), m.num_query_groups);
        if !groups.is_multiple_of(tp as usize) {
            return Err(ConfigError::QueryGroups { tp, groups });
        }
        self.check_canonical()
    }

    fn check_canonical(&self) -> Result<(), ConfigError> {
        let Numerics { leaf_tokens: leaf, tp_leaves, .. } = self.numerics;
        let (groups, ffn) = (self.model.num_query_groups, self.model.ffn_hidden_size);
        if !tp_leaves.is_power_of_two() || !groups.is_multiple_of(tp_leaves) || !ffn.is_multiple_of(tp_leaves)
        {
            return Err(ConfigError::TpLeavesOfModel { tp_leaves, groups, ffn });
        }
        let layout = &self.parallel.layout();
        let tp = layout.tp();
        if !tp.is_power_of_two() || tp as usize > tp_leaves {
            return Err(ConfigError::TpLeaves { tp, tp_leaves });
        }
        let seq = self.parallel.seq_length() as usize;
        let cp = layout.runtime_cp().0 as usize;
        // An odd length is only allowed where nothing cuts it.
        let mut parts = match seq.is_multiple_of(2) {
            true => vec![(format!("T/(2·runtime CP) = {seq}/(2·{cp})"), seq / (2 * cp))],
            false => vec![("T".to_owned(), seq)],
        };
        if self.parallel.sequence_parallel() {
            parts.push((format!("T/(runtime CP·TP) = {seq}/({cp}·{tp})"), seq / (cp * tp as usize)));
        }
        let largest = parts.iter().fold(0, |all, (_, part)| gcd(all, *part));
        match parts.into_iter().find(|(_, part)| !part.is_multiple_of(leaf)) {
            Some((formula, part)) => Err(ConfigError::Leaf { leaf, formula, part, largest }),
            None => Ok(()),
        }
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
