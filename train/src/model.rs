//! The program of a decoder, Llama's or GPT-2's: explicit forward and backward over planned buffers, with every collective one visible line.
//!
//! Shapes: M local tokens (micro-batch × local sequence, samples one after another), Ms = M / TP under sequence parallelism
//! else M, h hidden, G local query groups, q query heads of a group, d head size, f local feed-forward width, Vl local
//! vocabulary rows.

mod attention;
mod loss;
mod mlp;
pub mod params;

use crate::backend::{Accumulate, Buffers, Center, Dropout, Heads, HiddenSite, Lifetime, Op, View};
use crate::config::{
    Activation, Canonical, Documents, Normalization, Numerics, PositionEmbedding, TrainConfig,
};
use crate::parallel::context::GatheredKv;
use crate::parallel::tensor::{gather_tokens, reduce_tokens};
use crate::parallel::{Machine, StepError};
use attention::Attention;
use loss::Loss;
use mesh::{DType, GroupKind, ProcessGroups};
use mlp::Mlp;
use params::{Affine, LayerParams, ParamId, ParamTable};

/// One micro-batch of this rank: rows in the order of samples, then of its own tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MicroBatch {
    /// Token ids, M.
    pub tokens: Vec<i32>,
    /// The token after each, M.
    pub targets: Vec<i32>,
    /// Weight of each token's loss, M; 0 masks it.
    pub weights: Vec<f32>,
    /// Position of each token in its sample, M.
    pub positions: Vec<i32>,
    /// Position of each token in its document, M; empty where documents are not told apart.
    pub document_positions: Vec<i32>,
    /// Position in its sample of the first token of each token's document, M; empty as well.
    pub document_starts: Vec<i32>,
    /// Ordinal of each token's sample in the run, M.
    pub samples: Vec<i64>,
}

/// A model's buffers on one rank and the program over them.
pub(crate) struct Model {
    sizes: LocalSizes,
    table: ParamTable,
    layers: Vec<Layer>,
    inputs: Inputs,
    work: Work,
    attention: Attention,
    mlp: Mlp,
    loss: Loss,
    final_saved: NormSaved,
}

/// This rank's sizes; see the legend of the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalSizes {
    pub batch: usize,
    pub tokens: usize,
    pub share_tokens: usize,
    pub share_lo: usize,
    pub sequence_parallel: bool,
    pub hidden: usize,
    pub heads: Heads,
    pub first_head: u32,
    pub ffn: usize,
    pub activation: Activation,
    pub vocab: usize,
    pub vocab_first_row: usize,
    /// Columns of the local vocabulary that stand for real tokens.
    pub vocab_valid: usize,
    /// Blocks of TP-split sums on this rank.
    pub blocks: usize,
    /// Element type of activations and weights.
    pub dtype: DType,
    /// How gradients of weights are summed, those of keys and values, and losses.
    pub add: Accumulate,
    pub add_kv: Accumulate,
    pub add_loss: Accumulate,
    /// Query rows that attention takes at a time.
    pub tile: usize,
    pub norm_eps: f32,
    pub seed: u32,
    pub hidden_dropout: f32,
    pub attention_dropout: f32,
}

struct Layer {
    params: LayerParams,
    attention_norm: NormSaved,
    attention: attention::Saved,
    mlp_norm: NormSaved,
    mlp: mlp::Saved,
}

/// What a norm keeps for its backward: the residual stream `[Ms, h]`, and each `[Ms, 1]`; `mean` for LayerNorm.
#[derive(Clone, Copy)]
struct NormSaved {
    sum: View,
    mean: Option<View>,
    rstd: View,
}

pub(crate) struct Inputs {
    pub tokens: View,
    pub targets: View,
    pub weights: View,
    /// Where tokens lie in their sample, and where the model is told they lie.
    pub positions: View,
    told_positions: View,
    pub first_keys: Option<View>,
    pub samples: View,
    rope: Option<Rope>,
}

/// Angles by position, `[T, d]`.
struct Rope {
    table: View,
    values: Vec<f32>,
}

/// Scratch that every layer uses in turn.
pub(crate) struct Work {
    /// A norm's output, `[Ms, h]`, and for all local tokens, `[M, h]`.
    pub normed: View,
    pub normed_full: View,
    /// A block's partial output over TP, `[M, h]`, and its sum, `[Ms, h]`.
    pub partial: View,
    pub delta: View,
    /// One `[M, h]` for each level of the tree of TP-split sums.
    pub tree: Vec<View>,
    /// Gradient of the residual stream, `[Ms, h]`.
    pub d_residual: View,
    /// Gradient of a block's output, `[Ms, h]` and `[M, h]`.
    pub d_delta: View,
    pub d_delta_full: View,
    /// Gradient of a norm's output, partial over TP `[M, h]`, and summed `[Ms, h]`.
    pub d_normed_partial: View,
    pub d_normed: View,
}

impl LocalSizes {
    fn new(config: &TrainConfig, groups: &ProcessGroups) -> Self {
        let model = &config.model;
        let tp = groups.size(GroupKind::Tp) as usize;
        let tp_rank = groups.position(GroupKind::Tp).index();
        let batch = config.parallel.micro_batch_size() as usize;
        let tokens = batch * (config.parallel.seq_length() as usize / groups.size(GroupKind::Cp) as usize);
        let sequence_parallel = config.parallel.sequence_parallel() && tp > 1;
        let share_tokens = if sequence_parallel { tokens / tp } else { tokens };
        let heads = Heads {
            groups: model.num_query_groups / tp,
            queries_per_group: model.queries_per_group(),
            head_dim: model.kv_channels,
        };
        let blocks = config.numerics.tp_blocks(tp);
        let vocab = params::padded_vocab(model.vocab_size, blocks) / tp;
        let (add, add_kv, tile) = match &config.numerics {
            Numerics::Canonical(Canonical { leaf_tokens: leaf, grad_bits, kv_bits, .. }) => {
                let fixed = |bits| Accumulate::Fixed { leaf: *leaf, bits };
                (fixed(*grad_bits), fixed(*kv_bits), *leaf)
            }
            Numerics::Fast => (Accumulate::Float, Accumulate::Float, fast_tile(config, groups)),
        };
        let (leaf, bits) = config.numerics.loss();
        LocalSizes {
            batch,
            tokens,
            share_tokens,
            share_lo: if sequence_parallel { tp_rank * share_tokens } else { 0 },
            sequence_parallel,
            hidden: model.hidden_size,
            heads,
            first_head: (tp_rank * heads.num_queries()) as u32,
            ffn: model.ffn_hidden_size / tp,
            activation: model.activation,
            vocab,
            vocab_first_row: tp_rank * vocab,
            vocab_valid: model.vocab_size.saturating_sub(tp_rank * vocab).min(vocab),
            blocks: blocks / tp,
            dtype: config.precision.dtype(),
            add,
            add_kv,
            add_loss: Accumulate::Fixed { leaf, bits },
            tile,
            norm_eps: model.norm_epsilon,
            seed: config.seed,
            hidden_dropout: model.hidden_dropout,
            attention_dropout: model.attention_dropout,
        }
    }

    /// This rank's share of rows of an `[M, …]` view under sequence parallelism.
    fn share(&self, rows: View) -> View {
        rows.row_range(self.share_lo, self.share_lo + self.share_tokens)
    }
}

/// The most query rows, up to 64, that divide every run of positions that a rank holds.
fn fast_tile(config: &TrainConfig, groups: &ProcessGroups) -> usize {
    let seq = config.parallel.seq_length() as usize;
    let run = match groups.size(GroupKind::Cp) as usize {
        1 => seq,
        cp => seq / (2 * cp),
    };
    (1..=run.min(64)).rev().find(|tile| run.is_multiple_of(*tile)).expect("1 divides all")
}

impl Model {
    /// Declares the buffers of the program for the rank behind `groups`.
    pub(crate) fn new(config: &TrainConfig, groups: &ProcessGroups, buffers: &mut Buffers) -> Self {
        let sizes = LocalSizes::new(config, groups);
        let table = ParamTable::new(config);
        let seq = config.parallel.seq_length() as usize;
        let held: Vec<Vec<u64>> = (groups.members(GroupKind::Cp).iter())
            .map(|peer| config.parallel.cp_tokens(peer).into_iter().flatten().collect())
            .collect();
        let mut declare =
            |name: &str, dtype, rows, cols| buffers.declare(name, Lifetime::Transient, dtype, rows, cols);
        let dtype = sizes.dtype;
        let (m, ms, h) = (sizes.tokens, sizes.share_tokens, sizes.hidden);
        let d = sizes.heads.head_dim;
        let positions = declare("positions", DType::I32, m, 1);
        let documents = config.documents;
        let reset = |is_on: fn(&Documents) -> bool| documents.is_some_and(|documents| is_on(&documents));
        let inputs = Inputs {
            tokens: declare("tokens", DType::I32, m, 1),
            targets: declare("targets", DType::I32, m, 1),
            weights: declare("loss_weights", DType::F32, m, 1),
            positions,
            told_positions: match reset(|documents| documents.reset_positions) {
                true => declare("document_positions", DType::I32, m, 1),
                false => positions,
            },
            first_keys: reset(|documents| documents.reset_attention)
                .then(|| declare("document_starts", DType::I32, m, 1)),
            samples: declare("samples", DType::I64, m, 1),
            rope: (config.model.position_embedding == PositionEmbedding::Rope).then(|| Rope {
                table: declare("rope_table", DType::F32, seq, d),
                values: rope_table(seq, d, config.model.rotary_base),
            }),
        };
        let mut of_share = |share: &str, full: &str| {
            let full = declare(full, dtype, m, h);
            let share = if sizes.sequence_parallel { declare(share, dtype, ms, h) } else { full };
            (share, full)
        };
        let (normed, normed_full) = of_share("normed", "normed_full");
        let (delta, partial) = of_share("delta", "partial");
        let (d_delta, d_delta_full) = of_share("d_delta", "d_delta_full");
        let (d_normed, d_normed_partial) = of_share("d_normed", "d_normed_partial");
        let work = Work {
            normed,
            normed_full,
            partial,
            delta,
            tree: (0..sizes.blocks.ilog2())
                .map(|level| declare(&format!("tree.{level}"), dtype, m, h))
                .collect(),
            d_residual: declare("d_residual", dtype, ms, h),
            d_delta,
            d_delta_full,
            d_normed_partial,
            d_normed,
        };
        let has_mean = config.model.normalization == Normalization::LayerNorm;
        let mut norm = |name: String| NormSaved {
            sum: declare(&format!("{name}.residual"), dtype, ms, h),
            mean: has_mean.then(|| declare(&format!("{name}.mean"), DType::F32, ms, 1)),
            rstd: declare(&format!("{name}.rstd"), DType::F32, ms, 1),
        };
        let norms: Vec<[NormSaved; 2]> = (0..table.layers.len())
            .map(|layer| [norm(format!("{layer}.attention")), norm(format!("{layer}.mlp"))])
            .collect();
        let final_saved = norm("final".into());
        let layers = (table.layers.iter().zip(norms).enumerate())
            .map(|(at, (params, [attention_norm, mlp_norm]))| Layer {
                params: *params,
                attention_norm,
                attention: attention::Saved::new(&sizes, at, buffers),
                mlp_norm,
                mlp: mlp::Saved::new(&sizes, at, buffers),
            })
            .collect();
        let kv = GatheredKv::new(buffers, sizes.batch, &held, sizes.heads.kv_cols(), dtype, sizes.add_kv);
        let attention = Attention::new(&sizes, kv, buffers);
        let mlp = Mlp::new(&sizes, buffers);
        let loss = Loss::new(&sizes, buffers);
        Model { sizes, table, layers, inputs, work, attention, mlp, loss, final_saved }
    }

    /// This rank's sizes.
    pub(crate) fn sizes(&self) -> &LocalSizes {
        &self.sizes
    }

    /// The parameters.
    pub(crate) fn table(&self) -> &ParamTable {
        &self.table
    }

    /// Forward and backward of one micro-batch: adds to every gradient and to `loss_sum`, I64 `[1, 1]`.
    pub(crate) fn run(
        &self,
        machine: &mut Machine,
        batch: &MicroBatch,
        loss_sum: View,
    ) -> Result<(), StepError> {
        self.upload(machine, batch)?;
        self.forward(machine)?;
        self.loss.run(machine, self, loss_sum)?;
        self.backward(machine)?;
        machine.weights.drain(machine.be, machine.comms)
    }

    /// Forward alone, up to the loss: adds to `loss_sum`, I64 `[1, 1]`.
    pub(crate) fn evaluate(
        &self,
        machine: &mut Machine,
        batch: &MicroBatch,
        loss_sum: View,
    ) -> Result<(), StepError> {
        self.upload(machine, batch)?;
        self.forward(machine)?;
        self.loss.forward(machine, self, loss_sum)?;
        machine.weights.rewind(machine.be, machine.comms)
    }

    /// Forward alone: this rank's columns of the logits of its own tokens, `[M, Vl]`, without those that are padding.
    pub(crate) fn logits(&self, machine: &mut Machine, batch: &MicroBatch) -> Result<View, StepError> {
        self.upload(machine, batch)?;
        self.forward(machine)?;
        self.loss.project(machine, self)?;
        machine.weights.rewind(machine.be, machine.comms)?;
        Ok(self.loss.logits.col_range(0, self.sizes.vocab_valid))
    }

    fn upload(&self, machine: &mut Machine, batch: &MicroBatch) -> Result<(), StepError> {
        machine.be.upload(self.inputs.tokens, bytemuck::cast_slice(&batch.tokens))?;
        machine.be.upload(self.inputs.targets, bytemuck::cast_slice(&batch.targets))?;
        machine.be.upload(self.inputs.weights, bytemuck::cast_slice(&batch.weights))?;
        machine.be.upload(self.inputs.positions, bytemuck::cast_slice(&batch.positions))?;
        if self.inputs.told_positions != self.inputs.positions {
            machine.be.upload(self.inputs.told_positions, bytemuck::cast_slice(&batch.document_positions))?;
        }
        if let Some(first_keys) = self.inputs.first_keys {
            machine.be.upload(first_keys, bytemuck::cast_slice(&batch.document_starts))?;
        }
        machine.be.upload(self.inputs.samples, bytemuck::cast_slice(&batch.samples))?;
        if let Some(Rope { table, values }) = &self.inputs.rope {
            machine.be.upload(*table, bytemuck::cast_slice(values))?;
        }
        self.attention.kv.upload(machine)
    }

    /// Up to the final norm's output for all local tokens, in `work.normed_full`.
    fn forward(&self, machine: &mut Machine) -> Result<(), StepError> {
        let work = &self.work;
        let table = machine.weights.acquire(machine.be, machine.comms, self.table.embedding)?;
        let first_row = self.sizes.vocab_first_row as i32;
        machine.run(Op::Embed {
            tokens: self.inputs.tokens,
            table,
            first_row,
            out: work.partial,
            accumulate: false,
        })?;
        reduce_tokens(machine, "embedding.reduce", work.partial, work.delta)?;
        if let Some(positions) = self.table.positions {
            let table = machine.weights.home(positions).weight;
            let tokens = self.sizes.share(self.inputs.told_positions);
            machine.run(Op::Embed { tokens, table, first_row: 0, out: work.delta, accumulate: true })?;
        }
        self.hidden_dropout(machine, work.delta, 0, HiddenSite::Embedding)?;
        let mut residual = None;
        for (at, layer) in self.layers.iter().enumerate() {
            let p = &layer.params;
            self.norm(machine, residual, p.input_norm, &layer.attention_norm, "attention.gather_tokens")?;
            self.attention.forward(machine, self, at as u32, p, &layer.attention)?;
            reduce_tokens(machine, "attention.reduce", work.partial, work.delta)?;
            self.add_bias(machine, p.proj.bias, work.delta)?;
            self.hidden_dropout(machine, work.delta, at, HiddenSite::Attention)?;
            self.norm(
                machine,
                Some(&layer.attention_norm),
                p.mlp_norm,
                &layer.mlp_norm,
                "mlp.gather_tokens",
            )?;
            self.mlp.forward(machine, self, p, &layer.mlp)?;
            reduce_tokens(machine, "mlp.reduce", work.partial, work.delta)?;
            self.add_bias(machine, p.fc2.bias, work.delta)?;
            self.hidden_dropout(machine, work.delta, at, HiddenSite::Mlp)?;
            residual = Some(&layer.mlp_norm);
        }
        self.norm(machine, residual, self.table.final_norm, &self.final_saved, "output.gather_tokens")
    }

    /// From the gradient of the final norm's output, partial over TP in `work.d_normed_partial`.
    fn backward(&self, machine: &mut Machine) -> Result<(), StepError> {
        let work = &self.work;
        reduce_tokens(machine, "output.reduce_grad", work.d_normed_partial, work.d_normed)?;
        self.norm_backward(machine, self.table.final_norm, &self.final_saved, false)?;
        for (at, layer) in self.layers.iter().enumerate().rev() {
            let p = &layer.params;
            self.block_grad(machine, at, HiddenSite::Mlp, "mlp.gather_grad")?;
            self.bias_grad(machine, p.fc2.bias, work.d_delta)?;
            self.mlp.backward_output(machine, self, p, &layer.mlp)?;
            self.norm_again(machine, p.mlp_norm, &layer.mlp_norm, "mlp.gather_tokens_again")?;
            self.mlp.backward_input(machine, self, p)?;
            reduce_tokens(machine, "mlp.reduce_grad", work.d_normed_partial, work.d_normed)?;
            self.norm_backward(machine, p.mlp_norm, &layer.mlp_norm, true)?;

            self.block_grad(machine, at, HiddenSite::Attention, "attention.gather_grad")?;
            self.bias_grad(machine, p.proj.bias, work.d_delta)?;
            self.attention.backward_output(machine, self, at as u32, p, &layer.attention)?;
            self.norm_again(machine, p.input_norm, &layer.attention_norm, "attention.gather_tokens_again")?;
            self.attention.backward_input(machine, self, p)?;
            reduce_tokens(machine, "attention.reduce_grad", work.d_normed_partial, work.d_normed)?;
            self.norm_backward(machine, p.input_norm, &layer.attention_norm, true)?;
        }
        self.block_grad(machine, 0, HiddenSite::Embedding, "embedding.gather_grad")?;
        let add = self.sizes.add;
        if let Some(positions) = self.table.positions {
            let (tokens, d_out) = (self.sizes.share(self.inputs.told_positions), work.d_delta);
            let acc = machine.weights.home(positions).grad;
            machine.run(Op::EmbedBackward { tokens, d_out, first_row: 0, acc, add })?;
        }
        let (tokens, d_out) = (self.inputs.tokens, work.d_delta_full);
        let first_row = self.sizes.vocab_first_row as i32;
        machine.weights.add_grad(machine.be, machine.comms, self.table.embedding, |acc| Op::EmbedBackward {
            tokens,
            d_out,
            first_row,
            acc,
            add,
        })
    }

    /// Residual plus `work.delta`, and its norm for all local tokens. Without a residual, `delta` alone is the stream.
    fn norm(
        &self,
        machine: &mut Machine,
        residual: Option<&NormSaved>,
        norm: Affine,
        saved: &NormSaved,
        site: &'static str,
    ) -> Result<(), StepError> {
        let work = &self.work;
        let (x, delta) = match residual {
            Some(residual) => (residual.sum, Some(work.delta)),
            None => (work.delta, None),
        };
        let (gamma, center) = gain_and_center(machine, norm, saved);
        let (sum, rstd) = (saved.sum, saved.rstd);
        machine.run(Op::AddNorm {
            x,
            delta,
            gamma,
            center,
            eps: self.sizes.norm_eps,
            sum,
            rstd,
            out: work.normed,
        })?;
        gather_tokens(machine, site, work.normed, work.normed_full)
    }

    /// The norm's output once more, for the gradient of the weight that read it.
    fn norm_again(
        &self,
        machine: &mut Machine,
        norm: Affine,
        saved: &NormSaved,
        site: &'static str,
    ) -> Result<(), StepError> {
        let (gamma, center) = gain_and_center(machine, norm, saved);
        machine.run(Op::NormApply {
            sum: saved.sum,
            rstd: saved.rstd,
            gamma,
            center,
            out: self.work.normed,
        })?;
        gather_tokens(machine, site, self.work.normed, self.work.normed_full)
    }

    fn norm_backward(
        &self,
        machine: &mut Machine,
        norm: Affine,
        saved: &NormSaved,
        accumulate: bool,
    ) -> Result<(), StepError> {
        let home = machine.weights.home(norm.weight);
        machine.run(Op::NormBackward {
            d_out: self.work.d_normed,
            sum: saved.sum,
            mean: saved.mean,
            rstd: saved.rstd,
            gamma: home.weight,
            d_sum: self.work.d_residual,
            accumulate,
            d_gamma: home.grad,
            add: self.sizes.add,
        })?;
        self.bias_grad(machine, norm.bias, self.work.d_normed)
    }

    fn add_bias(&self, machine: &mut Machine, bias: Option<ParamId>, x: View) -> Result<(), StepError> {
        let Some(bias) = bias else { return Ok(()) };
        Ok(machine.run(Op::AddBias { bias: machine.weights.home(bias).weight, x })?)
    }

    /// Adds to the gradient of a bias; `d_out` is that of what it was added to.
    fn bias_grad(&self, machine: &mut Machine, bias: Option<ParamId>, d_out: View) -> Result<(), StepError> {
        let Some(bias) = bias else { return Ok(()) };
        let (acc, add) = (machine.weights.home(bias).grad, self.sizes.add);
        Ok(machine.run(Op::SumRows { x: d_out, acc, add })?)
    }

    /// Rotates the queries and keys of `qkv`, or rotates them back, if positions are rotary.
    fn rotate(&self, machine: &mut Machine, qkv: View, inverse: bool) -> Result<(), StepError> {
        let Some(Rope { table, .. }) = &self.inputs.rope else { return Ok(()) };
        let (positions, heads) = (self.inputs.told_positions, self.sizes.heads);
        Ok(machine.run(Op::Rope { qkv, positions, table: *table, heads, inverse })?)
    }

    /// The gradient of a block's output for all local tokens, in `work.d_delta_full`.
    fn block_grad(
        &self,
        machine: &mut Machine,
        layer: usize,
        site: HiddenSite,
        call: &'static str,
    ) -> Result<(), StepError> {
        machine.run(Op::Copy { src: self.work.d_residual, dst: self.work.d_delta })?;
        self.hidden_dropout(machine, self.work.d_delta, layer, site)?;
        gather_tokens(machine, call, self.work.d_delta, self.work.d_delta_full)
    }

    fn hidden_dropout(
        &self,
        machine: &mut Machine,
        x: View,
        layer: usize,
        site: HiddenSite,
    ) -> Result<(), StepError> {
        if self.sizes.hidden_dropout == 0.0 || !machine.drops {
            return Ok(());
        }
        let dropout = self.dropout(self.sizes.hidden_dropout, layer as u32);
        let (samples, positions) =
            (self.sizes.share(self.inputs.samples), self.sizes.share(self.inputs.positions));
        Ok(machine.run(Op::Dropout { x, samples, positions, dropout, site })?)
    }

    fn dropout(&self, p: f32, layer: u32) -> Dropout {
        Dropout { p, seed: self.sizes.seed, layer }
    }
}

/// The gain of a norm, and what it has beside it about the mean.
fn gain_and_center(machine: &Machine, norm: Affine, saved: &NormSaved) -> (View, Option<Center>) {
    let home = |param| machine.weights.home(param).weight;
    let center = norm.bias.zip(saved.mean).map(|(beta, mean)| Center { mean, beta: home(beta) });
    (home(norm.weight), center)
}

/// Cosines then sines of `position · base^(-2i/d)`, `[T, d]`, computed in f64.
fn rope_table(seq: usize, head_dim: usize, base: f64) -> Vec<f32> {
    let half = head_dim / 2;
    let mut table = vec![0.0; seq * head_dim];
    for position in 0..seq {
        for i in 0..half {
            let angle = position as f64 * libm::pow(base, -2.0 * i as f64 / head_dim as f64);
            table[position * head_dim + i] = libm::cos(angle) as f32;
            table[position * head_dim + half + i] = libm::sin(angle) as f32;
        }
    }
    table
}
