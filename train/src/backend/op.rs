//! The closed set of operations, with shapes.
//!
//! M: local tokens (rows). h: hidden. f: local feed-forward width. G: local query groups, q query heads in each, d: head
//! size. Vl: local vocabulary rows. T: sequence length. B: samples of the micro-batch.
//! Views are of the program's *compute type* unless noted: F32 or BF16, the same for all such operands of an operation.
//! Arithmetic is f32 either way; what an operation writes is rounded to the type of its view, to nearest, ties to even.
//! Statistics of rows (`rstd`, `lse`, everything of the loss but `logits`) are F32 always. Sums over tokens go into
//! accumulators of the type that [`Accumulate`] says.

use super::View;
use crate::config::Activation;
use bytemuck::{Pod, Zeroable};
use mesh::DType;

/// How an operation adds its sum over rows to an accumulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accumulate {
    /// I64 fixed point: value × 2^`bits`, truncated, added with wrap-around. A *leaf* is `leaf` consecutive rows; the rows are
    /// a multiple of it. Within a leaf sums run in one fixed order in f32; across leaves they are added in fixed point, so
    /// any division of the rows gives the same bits.
    Fixed {
        /// Rows of a leaf.
        leaf: usize,
        /// Fraction bits.
        bits: u32,
    },
    /// F32, over all rows in whatever order is quickest, the same in every run.
    Float,
}

impl Accumulate {
    /// Element type of the accumulators.
    pub const fn dtype(self) -> DType {
        match self {
            Accumulate::Fixed { .. } => DType::I64,
            Accumulate::Float => DType::F32,
        }
    }
}

/// One operation. Outputs are overwritten unless the field says otherwise.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)] // the fields are the operands of the formula above them
pub enum Op {
    /// `dst = 0`, any type.
    Zero { dst: View },
    /// `dst = src`, any type, same shape.
    Copy { src: View, dst: View },
    /// `dst = src`, same shape, each F32 or BF16.
    Cast { src: View, dst: View },
    /// `dst += src`.
    Add { src: View, dst: View },
    /// `dst += src`, I64 with wrap-around.
    AddFixed { src: View, dst: View },
    /// `dst[i] = src[index[i]]`, any type; a negative index gives a row of zeros. `index`: I32 `[n, 1]`.
    GatherRows { src: View, index: View, dst: View },

    /// `out[t] (+)= table[tokens[t] - first_row]`, plus +0; zeros for tokens outside the shard.
    /// `tokens`: I32 `[M, 1]`; `table`: `[Vl, h]`; `out`: `[M, h]`. A table of positions is one, too.
    Embed { tokens: View, table: View, first_row: i32, out: View, accumulate: bool },
    /// `acc[tokens[t] - first_row] += d_out[t]`, token by token: against the range of fixed point a token counts as much as a
    /// whole leaf. `acc`: accumulators `[Vl, h]`.
    EmbedBackward { tokens: View, d_out: View, first_row: i32, acc: View, add: Accumulate },

    /// `sum = x + delta`; `rstd[t] = 1 / sqrt(mean(sum[t]²) + eps)`; `out = sum · rstd · gamma` (RMSNorm), both of `sum` as it
    /// is stored. With `center` (LayerNorm) `mean[t] = mean(sum[t])`, `sum − mean` stands for `sum` in both formulas, and
    /// `beta` is added to `out`.
    /// `x`, `delta`, `sum`, `out`: `[M, h]`; `gamma`: `[1, h]`; `rstd`: F32 `[M, 1]`. `sum` may be `x`.
    AddNorm {
        x: View,
        delta: Option<View>,
        gamma: View,
        center: Option<Center>,
        eps: f32,
        sum: View,
        rstd: View,
        out: View,
    },
    /// The output of `AddNorm` once more, from its `sum`, `rstd` and `mean`.
    NormApply { sum: View, rstd: View, gamma: View, center: Option<Center>, out: View },
    /// Backward of the norm: `d_sum (+)= …`, `d_gamma += Σ d_out · (sum − mean) · rstd`; no `mean` is RMSNorm.
    /// `mean`: F32 `[M, 1]`; `d_gamma`: accumulators `[1, h]`. `accumulate` adds to `d_sum` instead of overwriting it. The
    /// gradient of `beta` is `SumRows` of `d_out`.
    NormBackward {
        d_out: View,
        sum: View,
        mean: Option<View>,
        rstd: View,
        gamma: View,
        d_sum: View,
        accumulate: bool,
        d_gamma: View,
        add: Accumulate,
    },

    /// `out (+)= x · wᵀ (+ bias)`, the product rounded before the bias is added.
    /// `x`: `[M, K]`; `w`: `[N, K]`; `bias`: `[1, N]`; `out`: `[M, N]`. Views may be strided.
    Linear { x: View, w: View, bias: Option<View>, out: View, accumulate: bool },
    /// `x[t] += bias`. `x`: `[M, N]`; `bias`: `[1, N]`. Its gradient is `SumRows`.
    AddBias { bias: View, x: View },
    /// `d_x (+)= d_out · w`. `d_out`: `[M, N]`; `w`: `[N, K]`; `d_x`: `[M, K]`.
    LinearDx { d_out: View, w: View, d_x: View, accumulate: bool },
    /// `acc += d_outᵀ · x`. `acc`: accumulators `[N, K]`.
    LinearDw { d_out: View, x: View, acc: View, add: Accumulate },

    /// Rotates the query and key heads of `qkv` in place by the angle of each row's position (half-split pairs: element i
    /// with element i + d/2); `inverse` rotates back. `qkv`: `[M, G·(q+2)·d]`; `positions`: I32 `[M, 1]`;
    /// `table`: F32 `[T, d]`, cosines then sines, d/2 each.
    Rope { qkv: View, positions: View, table: View, heads: Heads, inverse: bool },
    /// The key and value heads of `qkv`. `kv`: `[M, G·2·d]`, per group key then value.
    PackKv { qkv: View, kv: View, heads: Heads },
    /// Puts `d_kv` (F32 `[M, G·2·d]`) into the key and value columns of `d_qkv`.
    UnpackKv { d_kv: View, d_qkv: View, heads: Heads },
    /// Causal attention of local queries over all keys of their sample, one tile of query rows at a time: rows see keys of
    /// positions from their first key's up to their own. `out`: `[M, G·q·d]`; `lse`: F32 `[M, G·q]`, log-sum-exp of the scaled scores.
    Attention { inputs: AttentionInputs, out: View, lse: View },
    /// Backward of attention: overwrites the query columns of `d_qkv`, adds to `d_kv`: accumulators `[B·T, G·2·d]`, to which a
    /// tile adds as a leaf does elsewhere; where they are fixed point, tile and leaf are the same.
    AttentionBackward {
        inputs: AttentionInputs,
        out: View,
        lse: View,
        d_out: View,
        d_qkv: View,
        d_kv: View,
        add: Accumulate,
    },

    /// What lies between the two projections of a feed-forward block, by formula of [`Activation`].
    /// `x`: `[M, f]`, or for SwiGLU `[M, 2f]`, gate then up; `out`: `[M, f]`.
    Activate { activation: Activation, x: View, out: View },
    /// Its backward. `d_x`: as `x`.
    ActivateBackward { activation: Activation, d_out: View, x: View, d_x: View },

    /// `max[t]` over the first `valid` columns of `logits[t]`; −∞ if `valid` is 0. `logits`: `[M, Vl]`; `max`: F32 `[M, 1]`.
    CeMax { logits: View, valid: usize, max: View },
    /// `sum[t] = Σ exp(logits − max)` over valid columns, summed block by block of `block` columns and the blocks added
    /// pairwise; `picked[t]` = `logits − max` at the target, or 0 if it lies elsewhere.
    /// `target`: I32 `[M, 1]`; `max`, `sum`, `picked`: F32 `[M, 1]`.
    CeSum {
        logits: View,
        max: View,
        target: View,
        first_col: i32,
        valid: usize,
        block: usize,
        sum: View,
        picked: View,
    },
    /// `loss = weight · (ln(sum) − picked)`, and in place `logits = weight · (softmax − one_hot)`; columns from `valid` on
    /// become 0. A weight of 0 gives exact zeros whatever the logits. `weight`, `loss`: F32 `[M, 1]`.
    CeGrad {
        logits: View,
        max: View,
        sum: View,
        picked: View,
        target: View,
        weight: View,
        first_col: i32,
        valid: usize,
        loss: View,
    },
    /// `acc += Σ x` over rows: sums of losses (`x`: F32), gradients of biases. `x`: `[M, N]`; `acc`: accumulators `[1, N]`.
    SumRows { x: View, acc: View, add: Accumulate },

    /// In place: keeps an element when its random word is ≥ ⌊p·2³²⌋ and scales it by 1/(1 − p), else 0. The same operation
    /// serves backward. `x`: `[M, cols]`; `samples`: I64 `[M, 1]`; `positions`: I32 `[M, 1]`.
    Dropout { x: View, samples: View, positions: View, dropout: Dropout, site: HiddenSite },

    /// `out = acc · 2^-bits`. `acc`: I64; `out`: F32, the same shape.
    FxTake { acc: View, bits: u32, out: View },
    /// `limbs += Σ x²` exactly: squares cut to 192-bit fixed point of unit 2⁻¹⁰⁰, six limbs of 32 bits carried in I64
    /// lanes so that they can be summed over ranks. `x`: F32; `limbs`: I64 `[1, 6]`, lowest first. Elements from 2²⁷ on are left out.
    SquareNorm { x: View, limbs: View },
    /// AdamW on contiguous F32 elements: decoupled weight decay, bias-corrected moments.
    AdamW { w: View, m: View, v: View, g: View, step: AdamWStep },
}

/// What attention reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionInputs {
    /// `[M, G·(q+2)·d]`, M = B · local queries.
    pub qkv: View,
    /// `[B·T, G·2·d]`, in position order.
    pub kv: View,
    /// I32 `[M, 1]`, consecutive inside a tile.
    pub positions: View,
    /// I32 `[M, 1]`, position of the first key that a row sees, none above its own; `None`: 0.
    pub first_keys: Option<View>,
    /// I64 `[M, 1]`, ordinals, for dropout.
    pub samples: View,
    /// How columns are divided.
    pub heads: Heads,
    /// Samples; their queries follow one another, as their keys do.
    pub batch: usize,
    /// Query rows of a tile.
    pub tile: usize,
    /// Of the weights.
    pub dropout: Option<Dropout>,
    /// Global number of the first local query head.
    pub first_head: u32,
}

/// The numbers of one AdamW update; `optimizer.cu` has them in this order, too.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct AdamWStep {
    /// What gradients are multiplied by.
    pub grad_scale: f32,
    /// Learning rate.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Weight decay, before the learning rate.
    pub weight_decay: f32,
    /// `1 - beta1^t`, t counting from 1.
    pub correction1: f32,
    /// `1 - beta2^t`.
    pub correction2: f32,
}

/// What LayerNorm has beside RMSNorm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Center {
    /// Mean of each row, `[M, 1]`: written by `AddNorm`, read by `NormApply`.
    pub mean: View,
    /// Added to the output, `[1, h]`.
    pub beta: View,
}

impl AttentionInputs {
    /// All that is read.
    pub fn views(&self) -> Vec<View> {
        [self.qkv, self.kv, self.positions, self.samples].into_iter().chain(self.first_keys).collect()
    }
}

/// How the columns of `qkv` are divided: per group, q query heads, then a key head, then a value head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Local query groups (key-value heads).
    pub groups: usize,
    /// Query heads of a group.
    pub queries_per_group: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl Heads {
    /// First column of query head `query` of `group`.
    pub fn query(self, group: usize, query: usize) -> usize {
        (group * (self.queries_per_group + 2) + query) * self.head_dim
    }

    /// First column of the key head of `group`.
    pub fn key(self, group: usize) -> usize {
        self.query(group, self.queries_per_group)
    }

    /// First column of the value head of `group`.
    pub fn value(self, group: usize) -> usize {
        self.query(group, self.queries_per_group + 1)
    }

    /// Columns of `qkv`.
    pub fn qkv_cols(self) -> usize {
        self.groups * (self.queries_per_group + 2) * self.head_dim
    }

    /// Columns of `kv`: per group key, then value.
    pub fn kv_cols(self) -> usize {
        self.groups * 2 * self.head_dim
    }

    /// Columns of the attention's output.
    pub fn out_cols(self) -> usize {
        self.num_queries() * self.head_dim
    }

    /// Local query heads.
    pub fn num_queries(self) -> usize {
        self.groups * self.queries_per_group
    }
}

/// A dropout's probability and the coordinates that do not vary inside an operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Probability that an element is dropped, in `0..1`.
    pub p: f32,
    /// The run's seed.
    pub seed: u32,
    /// Global layer number.
    pub layer: u32,
}

/// Where in a layer a hidden dropout stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HiddenSite {
    /// Output of the attention block.
    Attention = 0,
    /// Output of the feed-forward block.
    Mlp = 1,
    /// The embedding, as of layer 0.
    Embedding = 2,
}

impl Op {
    /// The views that the operation reads, and those that it writes or updates.
    pub fn operands(&self) -> (Vec<View>, Vec<View>) {
        use Op::*;
        match *self {
            Zero { dst } => (vec![], vec![dst]),
            Copy { src, dst } | Cast { src, dst } => (vec![src], vec![dst]),
            Add { src, dst } | AddFixed { src, dst } => (vec![src, dst], vec![dst]),
            GatherRows { src, index, dst } => (vec![src, index], vec![dst]),
            Embed { tokens, table, out, accumulate, .. } => {
                ([tokens, table].into_iter().chain(accumulate.then_some(out)).collect(), vec![out])
            }
            EmbedBackward { tokens, d_out, acc, .. } => (vec![tokens, d_out, acc], vec![acc]),
            AddNorm { x, delta, gamma, center, sum, rstd, out, .. } => {
                let beta = center.map(|center| center.beta);
                let mean = center.map(|center| center.mean);
                let reads = [x, gamma].into_iter().chain(delta).chain(beta);
                (reads.collect(), [sum, rstd, out].into_iter().chain(mean).collect())
            }
            NormApply { sum, rstd, gamma, center, out } => {
                let center = center.map(|Center { mean, beta }| [mean, beta]);
                ([sum, rstd, gamma].into_iter().chain(center.into_iter().flatten()).collect(), vec![out])
            }
            NormBackward { d_out, sum, mean, rstd, gamma, d_sum, accumulate, d_gamma, .. } => {
                let mut reads = vec![d_out, sum, rstd, gamma, d_gamma];
                reads.extend(mean);
                reads.extend(accumulate.then_some(d_sum));
                (reads, vec![d_sum, d_gamma])
            }
            Linear { x, w, bias, out, accumulate } => {
                ([x, w].into_iter().chain(bias).chain(accumulate.then_some(out)).collect(), vec![out])
            }
            AddBias { bias, x } => (vec![bias, x], vec![x]),
            LinearDx { d_out, w, d_x, accumulate } => {
                ([d_out, w].into_iter().chain(accumulate.then_some(d_x)).collect(), vec![d_x])
            }
            LinearDw { d_out, x, acc, .. } => (vec![d_out, x, acc], vec![acc]),
            Rope { qkv, positions, table, .. } => (vec![qkv, positions, table], vec![qkv]),
            PackKv { qkv, kv, .. } => (vec![qkv], vec![kv]),
            UnpackKv { d_kv, d_qkv, .. } => (vec![d_kv], vec![d_qkv]),
            Attention { inputs, out, lse } => (inputs.views(), vec![out, lse]),
            AttentionBackward { inputs, out, lse, d_out, d_qkv, d_kv, .. } => {
                ([&inputs.views()[..], &[out, lse, d_out, d_kv]].concat(), vec![d_qkv, d_kv])
            }
            Activate { x, out, .. } => (vec![x], vec![out]),
            ActivateBackward { d_out, x, d_x, .. } => (vec![d_out, x], vec![d_x]),
            CeMax { logits, max, .. } => (vec![logits], vec![max]),
            CeSum { logits, max, target, sum, picked, .. } => (vec![logits, max, target], vec![sum, picked]),
            CeGrad { logits, max, sum, picked, target, weight, loss, .. } => {
                (vec![logits, max, sum, picked, target, weight], vec![logits, loss])
            }
            SumRows { x, acc, .. } => (vec![x, acc], vec![acc]),
            Dropout { x, samples, positions, .. } => (vec![x, samples, positions], vec![x]),
            FxTake { acc, out, .. } => (vec![acc], vec![out]),
            SquareNorm { x, limbs } => (vec![x, limbs], vec![limbs]),
            AdamW { w, m, v, g, .. } => (vec![w, m, v, g], vec![w, m, v]),
        }
    }
}
