//! The attention block: `qkv = normed · Wᵀ`, rotation, attention over the keys of whole sequences, output projection.

use super::{LocalSizes, Model, params::LayerParams};
use crate::backend::{AttentionInputs, Buffers, Lifetime, Op, View};
use crate::parallel::context::GatheredKv;
use crate::parallel::tensor::sum_blocks;
use crate::parallel::{Machine, StepError};
use mesh::DType;

/// Scratch of the block.
pub(super) struct Attention {
    pub kv: GatheredKv,
    /// `[M, G·q·d]`.
    d_out: View,
    /// `[M, G·(q+2)·d]`.
    d_qkv: View,
}

/// What a layer keeps: `qkv` after rotation `[M, G·(q+2)·d]`, `out` `[M, G·q·d]`, `lse` `[M, G·q]`.
pub(super) struct Saved {
    qkv: View,
    out: View,
    lse: View,
}

impl Saved {
    pub(super) fn new(sizes: &LocalSizes, layer: usize, buffers: &mut Buffers) -> Self {
        let mut declare = |name: &str, dtype, cols| {
            buffers.declare(format!("{layer}.{name}"), Lifetime::Transient, dtype, sizes.tokens, cols)
        };
        Saved {
            qkv: declare("qkv", sizes.dtype, sizes.heads.qkv_cols()),
            out: declare("attention_out", sizes.dtype, sizes.heads.out_cols()),
            lse: declare("lse", DType::F32, sizes.heads.num_queries()),
        }
    }
}

impl Attention {
    pub(super) fn new(sizes: &LocalSizes, kv: GatheredKv, buffers: &mut Buffers) -> Self {
        let mut declare =
            |name: &str, cols| buffers.declare(name, Lifetime::Transient, sizes.dtype, sizes.tokens, cols);
        Attention {
            kv,
            d_out: declare("d_attention_out", sizes.heads.out_cols()),
            d_qkv: declare("d_qkv", sizes.heads.qkv_cols()),
        }
    }

    /// From `work.normed_full` to `work.partial`.
    pub(super) fn forward(
        &self,
        machine: &mut Machine,
        model: &Model,
        layer: u32,
        params: &LayerParams,
        saved: &Saved,
    ) -> Result<(), StepError> {
        let Model { sizes, work, .. } = model;
        let heads = sizes.heads;
        let w = machine.weights.acquire(machine.be, machine.comms, params.qkv.weight)?;
        let bias = params.qkv.bias.map(|bias| machine.weights.home(bias).weight);
        machine.run(Op::Linear { x: work.normed_full, w, bias, out: saved.qkv, accumulate: false })?;
        model.rotate(machine, saved.qkv, false)?;
        self.kv.gather(machine, "attention.gather_kv", saved.qkv, heads)?;
        let inputs = self.inputs(machine, model, layer, saved);
        machine.run(Op::Attention { inputs, out: saved.out, lse: saved.lse })?;
        let w = machine.weights.acquire(machine.be, machine.comms, params.proj.weight)?;
        let cols = saved.out.cols / sizes.blocks;
        Ok(sum_blocks(machine.be, 0..sizes.blocks, work.partial, &work.tree, &mut |be, block, out| {
            let (lo, hi) = (block * cols, (block + 1) * cols);
            be.run(Op::Linear {
                x: saved.out.col_range(lo, hi),
                w: w.col_range(lo, hi),
                bias: None,
                out,
                accumulate: false,
            })
        })?)
    }

    /// From `work.d_delta_full` to the gradient of `qkv` before rotation; the gradients of the projection and
    /// of the bias before rotation.
    pub(super) fn backward_output(
        &self,
        machine: &mut Machine,
        model: &Model,
        layer: u32,
        params: &LayerParams,
        saved: &Saved,
    ) -> Result<(), StepError> {
        let Model { sizes, work, .. } = model;
        let (heads, add) = (sizes.heads, sizes.add);
        let d_block = work.d_delta_full;
        let w = machine.weights.acquire(machine.be, machine.comms, params.proj.weight)?;
        machine.run(Op::LinearDx { d_out: d_block, w, d_x: self.d_out, accumulate: false })?;
        let x = saved.out;
        machine.weights.add_grad(machine.be, machine.comms, params.proj.weight, |acc| Op::LinearDw {
            d_out: d_block,
            x,
            acc,
            add,
        })?;
        self.kv.gather(machine, "attention.gather_kv_again", saved.qkv, heads)?;
        machine.run(Op::Zero { dst: self.kv.d_in_order })?;
        machine.run(Op::AttentionBackward {
            inputs: self.inputs(machine, model, layer, saved),
            out: saved.out,
            lse: saved.lse,
            d_out: self.d_out,
            d_qkv: self.d_qkv,
            d_kv: self.kv.d_in_order,
            add: sizes.add_kv,
        })?;
        self.kv.scatter_grad(machine, self.d_qkv, heads, sizes.add_kv)?;
        model.rotate(machine, self.d_qkv, true)?;
        model.bias_grad(machine, params.qkv.bias, self.d_qkv)
    }

    /// From there to `work.d_normed_partial`; the fused weight's gradient, with its input in `work.normed_full`.
    pub(super) fn backward_input(
        &self,
        machine: &mut Machine,
        model: &Model,
        params: &LayerParams,
    ) -> Result<(), StepError> {
        let Model { sizes, work, .. } = model;
        let w = machine.weights.acquire(machine.be, machine.comms, params.qkv.weight)?;
        let rows = self.d_qkv.cols / sizes.blocks;
        sum_blocks(machine.be, 0..sizes.blocks, work.d_normed_partial, &work.tree, &mut |be, block, d_x| {
            let (lo, hi) = (block * rows, (block + 1) * rows);
            let (d_out, w) = (self.d_qkv.col_range(lo, hi), w.row_range(lo, hi));
            be.run(Op::LinearDx { d_out, w, d_x, accumulate: false })
        })?;
        let (d_out, x, add) = (self.d_qkv, work.normed_full, sizes.add);
        machine.weights.add_grad(machine.be, machine.comms, params.qkv.weight, |acc| Op::LinearDw {
            d_out,
            x,
            acc,
            add,
        })
    }

    /// What attention reads, once keys and values are gathered.
    fn inputs(&self, machine: &Machine, model: &Model, layer: u32, saved: &Saved) -> AttentionInputs {
        let Model { sizes, inputs, .. } = model;
        let p = sizes.attention_dropout;
        AttentionInputs {
            qkv: saved.qkv,
            kv: self.kv.in_order,
            positions: inputs.positions,
            first_keys: inputs.first_keys,
            samples: inputs.samples,
            heads: sizes.heads,
            batch: sizes.batch,
            tile: sizes.tile,
            dropout: (machine.drops && p > 0.0).then(|| model.dropout(p, layer)),
            first_head: sizes.first_head,
        }
    }
}
