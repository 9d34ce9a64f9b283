//! What a run is, resolved: no options, no defaults left to choose. Stored in every checkpoint.

use crate::rng;
use mesh::{BatchError, BatchSchedule, DType, ExpertSizes, ParallelConfig, ScheduleConfig};
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

impl fmt::Display for Normalization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Normalization::RmsNorm => "RMSNorm",
            Normalization::LayerNorm => "LayerNorm",
        })
    }
}

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

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Activation::Swiglu => "swiglu",
            Activation::Gelu => "gelu",
            Activation::GeluTanh => "gelu_tanh",
        })
    }
}

impl fmt::Display for Biases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Biases::None => "none",
            Biases::Qkv => "qkv",
            Biases::All => "all",
        })
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

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Precision::Fp32 => "fp32",
            Precision::Bf16 => "bf16",
        })
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
    /// Experts on several ranks, which the models do not have.
    #[error(
        "expert parallel size {ep}, {weight_shards} expert weight shards: the trainer's models have no experts"
    )]
    Experts {
        /// Expert parallel degree.
        ep: u32,
        /// ETP × EGTP.
        weight_shards: u32,
    },
    /// A tail rule that counts in whole batches, and batches that grow.
    #[error("epoch tail `{tail}` counts in global batches, which grow here: {batch} samples")]
    TailOfSchedule {
        /// The rule.
        tail: EpochTail,
        /// The batches.
        batch: BatchSchedule,
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
    /// More than there are bits to count it, in random numbers or sums.
    #[error("`{what}` {value} is more than {max}")]
    TooLarge {
        /// Which setting.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The largest that fits.
        max: u64,
    },
    /// A number outside its range.
    #[error("`{what}` is {value}")]
    Range {
        /// Which setting.
        what: &'static str,
        /// Its value, as text.
        value: String,
        /// What it can be.
        valid: &'static str,
    },
    /// More than the machine has.
    #[error("this run needs at least {wanted} bytes of memory, and there are {there}")]
    Memory {
        /// Bytes that it needs at least.
        wanted: u64,
        /// Bytes that the machine has.
        there: u64,
    },
}

impl ConfigError {
    /// Code of the error.
    pub fn code(&self) -> &'static str {
        match self {
            ConfigError::QueryGroups { .. } => "RM2003",
            ConfigError::Memory { .. } => "RM2050",
            ConfigError::Leaf { .. } => "RM2030",
            ConfigError::TpLeaves { .. } | ConfigError::TpLeavesOfModel { .. } => "RM2031",
            ConfigError::Pipeline { .. } | ConfigError::Experts { .. } => "RM2032",
            ConfigError::TailOfSchedule { .. }
            | ConfigError::Zero { .. }
            | ConfigError::Indivisible { .. }
            | ConfigError::Range { .. }
            | ConfigError::TooLarge { .. } => "RM6003",
        }
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            ConfigError::QueryGroups { groups, .. } => {
                let sizes: Vec<_> =
                    (1..=(*groups).min(1024)).filter(|tp| groups.is_multiple_of(*tp)).map(|tp| tp.to_string()).collect();
                format!("pick a TP size that divides the query groups: {}", sizes.join(", "))
            }
            ConfigError::Leaf { largest, .. } => format!("the largest leaf that fits is --canonical-leaf-tokens {largest}"),
            ConfigError::TpLeaves { tp_leaves, .. } => {
                let sizes: Vec<_> = (0..=tp_leaves.ilog2()).map(|log| (1 << log).to_string()).collect();
                format!("valid TP sizes: {}; --numerics fast takes others", sizes.join(", "))
            }
            ConfigError::TpLeavesOfModel { .. } => {
                "leave out --canonical-tp-leaves for the largest that fits".to_owned()
            }
            ConfigError::Pipeline { .. } => {
                "leave out --pipeline-model-parallel-size; weights of a large model are spread by --tp and --weight-shards".to_owned()
            }
            ConfigError::Experts { .. } => {
                "leave out --expert-model-parallel-size and --expert-tensor-parallel-num-weight-shards".to_owned()
            }
            ConfigError::TailOfSchedule { .. } => "use --epoch-tail span, or a constant batch size".to_owned(),
            ConfigError::Zero { what } => format!("give `{what}` a value of at least 1"),
            ConfigError::Indivisible { what, by, divisor, .. } => {
                format!("make `{what}` a multiple of `{by}` ({divisor})")
            }
            ConfigError::TooLarge { what, max, .. } => format!("give `{what}` a value up to {max}"),
            ConfigError::Range { what, valid, .. } => format!("give `{what}` {valid}"),
            ConfigError::Memory { .. } => {
                "check the sizes for a typing error; a smaller model, fewer ranks or a smaller batch needs less".to_owned()
            }
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
        ] {
            if value == 0 {
                return Err(ConfigError::Zero { what });
            }
        }
        let rotary_pair = if m.position_embedding == PositionEmbedding::Rope { 2 } else { 1 };
        for (what, value, by, divisor) in [
            ("num-attention-heads", m.num_attention_heads, "num-query-groups", m.num_query_groups),
            ("kv-channels", m.kv_channels, "2 (rotary pairs)", rotary_pair),
        ] {
            if !value.is_multiple_of(divisor) {
                return Err(ConfigError::Indivisible { what, value, by, divisor });
            }
        }
        self.check_numbers()?;
        self.check_counted()?;
        if self.epoch_tail != EpochTail::Span && !self.batch.is_constant() {
            return Err(ConfigError::TailOfSchedule { tail: self.epoch_tail, batch: self.batch.clone() });
        }
        let layout = &self.parallel.layout();
        if layout.pp() != 1 {
            return Err(ConfigError::Pipeline { pp: layout.pp() });
        }
        // Without experts, it is all the same how TP would cut them.
        let ExpertSizes { ep, egtp, .. } = layout.experts();
        if ep.max(egtp) > 1 {
            return Err(ConfigError::Experts { ep, weight_shards: self.parallel.expert_weight_shards() });
        }
        let (tp, groups) = (layout.tp(), m.num_query_groups);
        if !groups.is_multiple_of(tp as usize) {
            return Err(ConfigError::QueryGroups { tp, groups });
        }
        match &self.numerics {
            Numerics::Canonical(canonical) => self.check_canonical(canonical),
            Numerics::Fast if !m.ffn_hidden_size.is_multiple_of(tp as usize) => {
                let (what, by) = ("ffn-hidden-size", "tensor-model-parallel-size");
                Err(ConfigError::Indivisible { what, value: m.ffn_hidden_size, by, divisor: tp as usize })
            }
            Numerics::Fast => Ok(()),
        }
    }

    /// Checks that the batches of all steps that are left after `consumed` samples divide over the ranks. Those before may not:
    /// a run may go on under a layout that its first batches were too small for.
    ///
    /// # Errors
    /// The first size that does not divide.
    pub fn check_batches(&self, consumed: u64) -> Result<(), BatchError> {
        let until = self.batch.samples_after(self.train_iters).unwrap_or(u64::MAX);
        self.batch.check(&self.parallel, consumed, until)
    }

    /// Numbers outside of which an update has no meaning, as the f32 that they are computed in.
    fn check_numbers(&self) -> Result<(), ConfigError> {
        let (m, o, s) = (&self.model, &self.optimizer, &self.schedule);
        let part = (0.0..1.0, "a number from 0 up to, not including, 1");
        let above_0 = (f32::MIN_POSITIVE..f32::INFINITY, "a finite number above 0, from 1.2e-38 on");
        let at_least_0 = (0.0..f32::INFINITY, "a finite number of at least 0");
        for (what, value, (range, valid)) in [
            ("hidden-dropout", m.hidden_dropout.into(), &part),
            ("attention-dropout", m.attention_dropout.into(), &part),
            ("adam-beta1", o.adam_beta1, &part),
            ("adam-beta2", o.adam_beta2, &part),
            ("adam-eps", o.adam_eps, &above_0),
            ("norm-epsilon", m.norm_epsilon.into(), &above_0),
            ("rotary-base", m.rotary_base, &above_0),
            ("init-method-std", m.init_method_std, &at_least_0),
            ("clip-grad", o.clip_grad, &at_least_0),
            ("lr", s.max_lr, &at_least_0),
            ("weight-decay", s.end_weight_decay, &at_least_0),
        ] {
            if !range.contains(&(value as f32)) {
                return Err(ConfigError::Range { what, value: value.to_string(), valid });
            }
        }
        Ok(())
    }

    /// Checks that the run can fit in `there` bytes of memory, which its ranks share.
    ///
    /// # Errors
    /// If it needs more, whatever else it may need.
    pub fn check_memory(&self, there: u64) -> Result<(), ConfigError> {
        let wanted = self.bytes_at_least();
        if wanted > there { Err(ConfigError::Memory { wanted, there }) } else { Ok(()) }
    }

    /// Bytes that all ranks together need at least: matrices with their gradients and moments, a micro-batch of hidden
    /// states, the list of a step's samples, and what a thread cannot do without. Sizes that cannot be counted are the largest.
    fn bytes_at_least(&self) -> u64 {
        /// Of a thread.
        const RANK: u64 = 64 << 10;
        /// Of a weight and its gradient in each replica, and of two moments, in the smallest types there are.
        const REPLICATED: u64 = 6;
        const MOMENTS: u64 = 8;
        /// Of one sample's number and position in a list.
        const SAMPLE: u64 = 24;
        let product = |factors: &[u64]| factors.iter().copied().fold(1, u64::saturating_mul);
        let sum = |terms: &[u64]| terms.iter().copied().fold(0, u64::saturating_add);
        let m = &self.model;
        let [layers, hidden, ffn, heads, groups, channels, vocabulary] = [
            m.num_layers,
            m.hidden_size,
            m.ffn_hidden_size,
            m.num_attention_heads,
            m.num_query_groups,
            m.kv_channels,
            m.vocab_size,
        ]
        .map(|size| size as u64);
        let attention = product(&[2, hidden, channels, heads.saturating_add(groups)]);
        let layer = attention.saturating_add(product(&[2, hidden, ffn]));
        let embeddings = if m.tie_embeddings { 1 } else { 2 };
        let weights = sum(&[product(&[embeddings, vocabulary, hidden]), product(&[layers, layer])]);
        let layout = self.parallel.layout();
        let (ranks, batch) = (u64::from(layout.world_size()), self.parallel.global_batch_size());
        let micro_batch = batch / self.parallel.num_microbatches().max(1);
        sum(&[
            product(&[weights, REPLICATED, layout.num_weight_replicas().into()]),
            product(&[weights, MOMENTS]),
            product(&[micro_batch, self.parallel.seq_length(), hidden, 4]),
            product(&[ranks, batch, SAMPLE]),
            product(&[ranks, RANK]),
        ])
    }

    /// What random numbers are keyed by must fit its bits, and positions their table.
    fn check_counted(&self) -> Result<(), ConfigError> {
        let m = &self.model;
        let samples = self.batch.samples_after(self.train_iters).unwrap_or(u64::MAX);
        let seq_length = self.parallel.seq_length();
        let max_positions = match m.position_embedding {
            PositionEmbedding::Rope => seq_length,
            PositionEmbedding::LearnedAbsolute { max_positions } => max_positions as u64,
        };
        let mut counted = vec![
            ("seq-length", seq_length, max_positions),
            ("train-iters", self.train_iters, u64::from(u32::MAX)),
        ];
        if let Numerics::Canonical(Canonical { grad_bits, kv_bits, .. }) = self.numerics {
            counted.push(("numerics.grad_bits", grad_bits.into(), Canonical::FRACTION_BITS_MAX.into()));
            counted.push(("numerics.kv_bits", kv_bits.into(), Canonical::FRACTION_BITS_MAX.into()));
        }
        if m.hidden_dropout > 0.0 {
            counted.push(("num-layers", m.num_layers as u64, rng::MAX_LAYERS.into()));
            counted.push(("train-samples", samples, rng::MAX_ORDINALS_HIDDEN));
        }
        if m.attention_dropout > 0.0 {
            counted.push(("num-layers", m.num_layers as u64, rng::MAX_LAYERS.into()));
            counted.push(("num-attention-heads", m.num_attention_heads as u64, rng::MAX_HEADS.into()));
            counted.push(("train-samples", samples, rng::MAX_ORDINALS_ATTENTION));
        }
        match counted.into_iter().find(|(_, value, max)| value > max) {
            Some((what, value, max)) => Err(ConfigError::TooLarge { what, value, max }),
            None => Ok(()),
        }
    }

    fn check_canonical(&self, canonical: &Canonical) -> Result<(), ConfigError> {
        let Canonical { leaf_tokens: leaf, tp_leaves, .. } = *canonical;
        for (what, value) in [("canonical-leaf-tokens", leaf), ("canonical-tp-leaves", tp_leaves)] {
            if value == 0 {
                return Err(ConfigError::Zero { what });
            }
        }
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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use mesh::{LrDecayStyle, ScheduleUnit, Warmup, WeightDecayStyle};

    /// A tiny model under `parallel`, with dropout.
    pub(crate) fn tiny(parallel: ParallelConfig) -> TrainConfig {
        let model = ModelConfig {
            num_layers: 2,
            hidden_size: 32,
            ffn_hidden_size: 48,
            num_attention_heads: 4,
            num_query_groups: 4,
            kv_channels: 8,
            vocab_size: 257,
            tie_embeddings: false,
            normalization: Normalization::default(),
            norm_epsilon: 1e-5,
            position_embedding: PositionEmbedding::default(),
            rotary_base: 10_000.0,
            activation: Activation::default(),
            biases: Biases::default(),
            hidden_dropout: 0.1,
            attention_dropout: 0.1,
            init_method_std: 0.02,
        };
        TrainConfig {
            numerics: Numerics::Canonical(Canonical::new(&model, parallel.seq_length() as usize, None, None)),
            precision: Precision::Fp32,
            model,
            parallel,
            optimizer: OptimizerConfig { adam_beta1: 0.9, adam_beta2: 0.999, adam_eps: 1e-8, clip_grad: 1.0 },
            schedule: ScheduleConfig {
                unit: ScheduleUnit::Iterations,
                train: 10,
                lr_decay: 10,
                lr_warmup: Warmup::Length(0),
                lr_decay_style: LrDecayStyle::Constant,
                init_lr: 0.0,
                max_lr: 1e-3,
                min_lr: 0.0,
                start_weight_decay: 0.0,
                end_weight_decay: 0.0,
                weight_decay_style: WeightDecayStyle::Constant,
            },
            seed: 1234,
            train_iters: 10,
            loss_average: LossAverage::Token,
            epoch_tail: EpochTail::Span,
            max_skipped_in_a_row: 3,
            batch: BatchSchedule::constant(parallel.global_batch_size()).unwrap(),
            iterations_to_skip: BTreeSet::new(),
        }
    }

    fn tiny_of_one() -> TrainConfig {
        tiny(
            ParallelConfig::new(mesh::ParallelSettings {
                layout: mesh::ParallelLayout::single(),
                sequence_parallel: false,
                seq_length: 32,
                micro_batch_size: 1,
                global_batch_size: 8,
            })
            .unwrap(),
        )
    }

    #[test]
    fn numbers_without_a_meaning_are_refused_with_what_is_valid() {
        type Edit = fn(&mut TrainConfig, f64);
        let edits: [(&str, Edit, &[f64], &[f64]); 6] = [
            (
                "adam-beta1",
                |c, x| c.optimizer.adam_beta1 = x,
                &[0.0, 0.9],
                &[-0.1, 1.0, 0.999_999_999_999, f64::NAN],
            ),
            (
                "adam-eps",
                |c, x| c.optimizer.adam_eps = x,
                &[1e-8, 1e-38 * 1.2],
                &[0.0, -1e-8, 1e-60, f64::INFINITY],
            ),
            ("clip-grad", |c, x| c.optimizer.clip_grad = x, &[0.0, 1.0], &[-1.0, 1e39, f64::NAN]),
            ("rotary-base", |c, x| c.model.rotary_base = x, &[1e4], &[0.0, -1.0, f64::INFINITY]),
            ("lr", |c, x| c.schedule.max_lr = x, &[0.0, 1e30], &[1e39]),
            ("hidden-dropout", |c, x| c.model.hidden_dropout = x as f32, &[0.0, 0.5], &[1.0, -0.1, f64::NAN]),
        ];
        for (name, edit, valid, invalid) in edits {
            for (values, is_valid) in [(valid, true), (invalid, false)] {
                for value in values {
                    let mut config = tiny_of_one();
                    edit(&mut config, *value);
                    match config.check() {
                        Ok(()) => assert!(is_valid, "{name} {value}"),
                        Err(ConfigError::Range { what, .. }) => {
                            assert!(!is_valid && what == name, "{name} {value}")
                        }
                        Err(error) => panic!("{name} {value}: {error}"),
                    }
                }
            }
        }
    }

    #[test]
    fn what_cannot_fit_is_counted_without_overflow() {
        let mut config = tiny_of_one();
        config.check_memory(1 << 30).unwrap();
        let wanted = |config: &TrainConfig| match config.check_memory(0).unwrap_err() {
            ConfigError::Memory { wanted, .. } => wanted,
            error => panic!("{error}"),
        };
        config.model.vocab_size = 100_000_000_000;
        // Two matrices of 32 columns, 6 + 8 bytes an element.
        assert_eq!(wanted(&config) / 100_000_000_000, 2 * 32 * (6 + 8));
        config.model.hidden_size = 1 << 62;
        assert_eq!(wanted(&config), u64::MAX);
    }

    #[test]
    fn what_cannot_be_counted_is_refused_and_not_a_panic_later() {
        let refusal = |edit: &dyn Fn(&mut TrainConfig)| {
            let mut config = tiny_of_one();
            edit(&mut config);
            config.check().unwrap_err().to_string()
        };
        assert_eq!(tiny_of_one().check(), Ok(()));
        let learned = PositionEmbedding::LearnedAbsolute { max_positions: 31 };
        let positions = refusal(&|config| config.model.position_embedding = learned);
        assert_eq!(positions, "`seq-length` 32 is more than 31");
        let layers = refusal(&|config| config.model.num_layers = 1025);
        assert_eq!(layers, "`num-layers` 1025 is more than 1024");
        let heads = refusal(&|config| config.model.num_attention_heads = 260);
        assert_eq!(heads, "`num-attention-heads` 260 is more than 256");
        let iterations = refusal(&|config| config.train_iters = 1 << 32);
        assert_eq!(iterations, "`train-iters` 4294967296 is more than 4294967295");
    }
}
