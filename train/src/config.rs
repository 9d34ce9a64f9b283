//! What a run is, resolved: no options, no defaults left to choose. Stored in every checkpoint.

mod check;
mod memory;
#[cfg(test)]
pub(crate) mod tests;

pub use check::ConfigError;

use crate::evaluate::Evaluation;
use mesh::{BatchSchedule, DType, ParallelConfig, ScheduleConfig};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// Everything that decides a run's numbers, and its layout.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainConfig {
    /// Shape of the model.
    pub model: ModelConfig,
    /// Layout, micro-batch size and the batch size that holds in the end.
    pub parallel: ParallelConfig,
    /// Samples of each step.
    pub batch: BatchSchedule,
    /// Samples that were asked for, where a step may take fewer so that they divide over the ranks.
    #[serde(default)]
    pub asked_batch: Option<BatchSchedule>,
    /// Optimizer settings.
    pub optimizer: OptimizerConfig,
    /// Learning rate and weight decay over samples.
    pub schedule: ScheduleConfig,
    /// Numerics contract.
    pub numerics: Numerics,
    /// What activations and the weights that meet them are made of.
    #[serde(default)]
    pub precision: Precision,
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
    /// Iterations whose batch is passed over: the numbers of iterations done before them.
    #[serde(default)]
    pub iterations_to_skip: BTreeSet<u64>,
    /// What the end tokens of documents inside a sample mean; `None`: nothing, a sample is one text.
    #[serde(default)]
    pub documents: Option<Documents>,
    /// When the validation loss is computed; `None` is never.
    #[serde(default)]
    pub evaluation: Option<Evaluation>,
}

/// What the end tokens of documents inside a sample mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Documents {
    /// The token that ends a document.
    pub end_token: u32,
    /// Whether the positions of a document count from 0.
    pub reset_positions: bool,
    /// Whether tokens see those of their own document alone.
    pub reset_attention: bool,
    /// Whether what follows an end token is no target: the first token of the next document.
    pub mask_loss: bool,
}

/// A decoder of the kind of Llama or GPT-2. What lacks in an older checkpoint is Llama's.
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
    /// Kind of the norms.
    #[serde(default)]
    pub normalization: Normalization,
    /// ε of the norms.
    pub norm_epsilon: f32,
    /// Where a token's position comes in.
    #[serde(default)]
    pub position_embedding: PositionEmbedding,
    /// Base of the rotary angles; of no use with learned positions.
    pub rotary_base: f64,
    /// What a feed-forward block computes between its projections.
    #[serde(default)]
    pub activation: Activation,
    /// Which projections of a layer have biases.
    #[serde(default)]
    pub biases: Biases,
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

/// Kind of the norms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Normalization {
    /// By the root of the mean square, with a gain.
    #[default]
    #[serde(rename = "RMSNorm")]
    RmsNorm,
    /// About the mean, with a gain and a shift.
    LayerNorm,
}

/// Where a token's position comes in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PositionEmbedding {
    /// Queries and keys are rotated.
    #[default]
    Rope,
    /// A learned row is added to the word embedding.
    LearnedAbsolute {
        /// Rows of the table.
        max_positions: usize,
    },
}

/// Which projections of a layer have biases. The output layer never has one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Biases {
    /// None.
    #[default]
    None,
    /// That to queries, keys and values.
    Qkv,
    /// All four.
    All,
}

/// What a feed-forward block computes between its two projections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `silu(gate) · up` of twice as many inputs: gate, then up.
    #[default]
    Swiglu,
    /// `x · Φ(x)`, Φ the normal distribution: GELU by the error function.
    Gelu,
    /// `x · (1 + tanh(√(2/π) · (x + 0.044715 · x³))) / 2`: GELU as GPT-2 has it.
    GeluTanh,
}

impl Activation {
    /// Inputs of each output.
    pub fn inputs(self) -> usize {
        match self {
            Activation::Swiglu => 2,
            Activation::Gelu | Activation::GeluTanh => 1,
        }
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

/// How sums are ordered. A resume takes it from the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "mode", rename_all = "lowercase")]
pub enum Numerics {
    /// Bits do not depend on the layout.
    Canonical(Canonical),
    /// The quickest order under each layout: the same layout gives the same bits, another one others.
    Fast,
}

/// What the bits of canonical numerics depend on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Canonical {
    /// Consecutive positions of a sample whose sum runs in one fixed order.
    pub leaf_tokens: usize,
    /// Blocks into which every TP-split sum is divided.
    pub tp_leaves: usize,
    /// Fraction bits of fixed-point gradients and losses.
    pub grad_bits: u32,
    /// Fraction bits of fixed-point key and value gradients.
    pub kv_bits: u32,
}

/// What activations, and the copies of the weights that meet them, are made of. Sums, statistics and the optimizer's state
/// are f32 or fixed point in both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// f32: weights are their own masters.
    #[default]
    Fp32,
    /// bf16, with f32 masters of the weights in the optimizer.
    Bf16,
}

impl Precision {
    /// The element type.
    pub const fn dtype(self) -> DType {
        match self {
            Precision::Fp32 => DType::F32,
            Precision::Bf16 => DType::Bf16,
        }
    }
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

impl Numerics {
    /// Blocks of sums that TP splits, over all ranks.
    pub fn tp_blocks(&self, tp: usize) -> usize {
        match self {
            Numerics::Canonical(canonical) => canonical.tp_leaves,
            Numerics::Fast => tp,
        }
    }

    /// Leaf and fraction bits of the sum of the losses, which is in fixed point always.
    pub fn loss(&self) -> (usize, u32) {
        match self {
            Numerics::Canonical(canonical) => (canonical.leaf_tokens, canonical.grad_bits),
            Numerics::Fast => (1, Canonical::GRAD_BITS),
        }
    }
}

impl Canonical {
    /// Fraction bits of gradients and losses, and of key and value gradients, of a new run.
    const GRAD_BITS: u32 = 36;
    const KV_BITS: u32 = 40;
    /// Largest number of TP blocks.
    const TP_LEAVES_MAX: usize = 8;
    /// Most fraction bits of a fixed-point sum; what is left of 64 is its range.
    const FRACTION_BITS_MAX: u32 = 56;
    /// Largest leaf that is chosen by default, in tokens.
    const LEAF_TOKENS_MAX: usize = 64;

    /// The contract of a model and sequence length, with the leaf sizes given or the default ones.
    /// Both defaults depend on the model and the sequence length alone, never on the layout.
    pub fn new(
        model: &ModelConfig,
        seq_length: usize,
        leaf_tokens: Option<usize>,
        tp_leaves: Option<usize>,
    ) -> Self {
        let largest_power_of_two = |n: usize| n & n.wrapping_neg();
        let default_leaf = (largest_power_of_two(seq_length) / 16).clamp(1, Self::LEAF_TOKENS_MAX);
        let default_tp = [Self::TP_LEAVES_MAX, model.num_query_groups, model.ffn_hidden_size]
            .map(largest_power_of_two)
            .into_iter()
            .min()
            .expect("three widths");
        Canonical {
            leaf_tokens: leaf_tokens.unwrap_or(default_leaf),
            tp_leaves: tp_leaves.unwrap_or(default_tp),
            grad_bits: Self::GRAD_BITS,
            kv_bits: Self::KV_BITS,
        }
    }
}

/// Shows a value by the name that it is stored under.
macro_rules! show_as_stored {
    ($($type:ty)*) => {$(
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.serialize(f)
            }
        }
    )*};
}

show_as_stored! { Normalization Activation Biases Precision LossAverage EpochTail }

impl fmt::Display for PositionEmbedding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PositionEmbedding::Rope => f.write_str("rope"),
            PositionEmbedding::LearnedAbsolute { max_positions } => {
                write!(f, "learned_absolute of {max_positions} positions")
            }
        }
    }
}

/// `end token 256 resets positions, resets attention, masks the next target`.
impl fmt::Display for Documents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Documents { end_token, reset_positions, reset_attention, mask_loss } = *self;
        let effects = [
            (reset_positions, "resets positions"),
            (reset_attention, "resets attention"),
            (mask_loss, "masks the next target"),
        ];
        let effects: Vec<&str> =
            effects.into_iter().filter(|(is_on, _)| *is_on).map(|(_, effect)| effect).collect();
        write!(f, "end token {end_token} {}", effects.join(", "))
    }
}

impl fmt::Display for OptimizerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OptimizerConfig { adam_beta1, adam_beta2, adam_eps, clip_grad } = self;
        write!(f, "AdamW (β {adam_beta1} and {adam_beta2}, ε {adam_eps}, clip {clip_grad})")
    }
}

impl fmt::Display for Numerics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Numerics::Canonical(Canonical { leaf_tokens, tp_leaves, grad_bits, kv_bits }) = self else {
            return f.write_str("fast");
        };
        write!(
            f,
            "canonical (leaf {leaf_tokens}, TP blocks {tp_leaves}, fraction bits {grad_bits} and {kv_bits})"
        )
    }
}
