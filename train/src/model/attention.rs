//! The attention block: `qkv = normed · Wᵀ`, rotation, attention over the keys of whole sequences, output projection.

use super::{LocalShape, Model, params::LayerParams};
use crate::backend::{AttentionInputs, Buffers, Lifetime, Op, View};
use crate::parallel::context::GatheredKv;
use crate::parallel::tensor::sum_blocks;
use crate::parallel::{Cx, StepError};
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
    pub(super) fn new(shape: &LocalShape, layer: usize, buffers: &mut Buffers) -> Self {
        let mut declare = |name: &str, dtype, cols| {
            buffers.declare(format!("{layer}.{name}"), Lifetime::Transient, dtype, shape.tokens, cols)
        };
        Saved {
            qkv: declare("qkv", shape.dtype, shape.heads.qkv_cols()),
            out: declare("attention_out", shape.dtype, shape.heads.out_cols()),
            lse: declare("lse", DType::F32, shape.heads.num_queries()),
        }
    }
}

impl Attention {
    pub(super) fn new(shape: &LocalShape, kv: GatheredKv, buffers: &mut Buffers) -> Self {
        let mut declare =
            |name: &str, cols| buffers.declare(name, Lifetime::Transient, shape.dtype, shape.tokens, cols);
        Attention {
            kv,
            d_out: declare("d_attention_out", shape.heads.out_cols()),
            d_qkv: declare("d_qkv", shape.heads.qkv_cols()),
        }
    }

    /// From `work.normed_full` to `work.partial`.
    pub(super) fn forward(
        &self,
        cx: &mut Cx,
        model: &Model,
        layer: u32,
        params: &LayerParams,
        saved: &Saved,
    ) -> Result<(), StepError> {
        let Model { shape, work, .. } = model;
        let heads = shape.heads;
        let w = cx.weights.acquire(cx.be, cx.comms, params.qkv.weight)?;
        let bias = params.qkv.bias.map(|bias| cx.weights.home(bias).weight);
        cx.run(Op::Linear { x: work.normed_full, w, bias, out: saved.qkv, accumulate: false })?;
        model.rotate(cx, saved.qkv, false)?;
        self.kv.gather(cx, "attention.gather_kv", saved.qkv, heads)?;
        let inputs = self.inputs(cx, model, layer, saved);
        cx.run(Op::Attention { inputs, out: saved.out, lse: saved.lse })?;
        let w = cx.weights.acquire(cx.be, cx.comms, params.proj.weight)?;
        let cols = saved.out.cols / shape.blocks;
        Ok(sum_blocks(cx.be, 0..shape.blocks, work.partial, &work.tree, &mut |be, block, out| {
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
        cx: &mut Cx,
        model: &Model,
        layer: u32,
        params: &LayerParams,
        saved: &Saved,
    ) -> Result<(), StepError> {
        let Model { shape, work, .. } = model;
        let (heads, add) = (shape.heads, shape.add);
        let d_block = work.d_delta_full;
        let w = cx.weights.acquire(cx.be, cx.comms, params.proj.weight)?;
        cx.run(Op::LinearDx { d_out: d_block, w, d_x: self.d_out, accumulate: false })?;
        let x = saved.out;
        cx.weights.add_grad(cx.be, cx.comms, params.proj.weight, |acc| Op::LinearDw {
            d_out: d_block,
            x,
            acc,
            add,
        })?;
        self.kv.gather(cx, "attention.gather_kv_again", saved.qkv, heads)?;
        cx.run(Op::Zero { dst: self.kv.d_in_order })?;
        cx.run(Op::AttentionBackward {
            inputs: self.inputs(cx, model, layer, saved),
            out: saved.out,
            lse: saved.lse,
            d_out: self.d_out,
            d_qkv: self.d_qkv,
            d_kv: self.kv.d_in_order,
            add: shape.add_kv,
        })?;
        self.kv.scatter_grad(cx, self.d_qkv, heads, shape.add_kv)?;
        model.rotate(cx, self.d_qkv, true)?;
        model.bias_grad(cx, params.qkv.bias, self.d_qkv)
    }

    /// From there to `work.d_normed_partial`; the fused weight's gradient, with its input in `work.normed_full`.
    pub(super) fn backward_input(
        &self,
        cx: &mut Cx,
        model: &Model,
        params: &LayerParams,
    ) -> Result<(), StepError> {
        let Model { shape, work, .. } = model;
        let w = cx.weights.acquire(cx.be, cx.comms, params.qkv.weight)?;
        let rows = self.d_qkv.cols / shape.blocks;
        sum_blocks(cx.be, 0..shape.blocks, work.d_normed_partial, &work.tree, &mut |be, block, d_x| {
            let (lo, hi) = (block * rows, (block + 1) * rows);
            let (d_out, w) = (self.d_qkv.col_range(lo, hi), w.row_range(lo, hi));
            be.run(Op::LinearDx { d_out, w, d_x, accumulate: false })
        })?;
        let (d_out, x, add) = (self.d_qkv, work.normed_full, shape.add);
        cx.weights.add_grad(cx.be, cx.comms, params.qkv.weight, |acc| Op::LinearDw { d_out, x, acc, add })
    }

    /// What attention reads, once keys and values are gathered.
    fn inputs(&self, cx: &Cx, model: &Model, layer: u32, saved: &Saved) -> AttentionInputs {
        let Model { shape, inputs, .. } = model;
        let p = shape.attention_dropout;
        AttentionInputs {
            qkv: saved.qkv,
            kv: self.kv.in_order,
            positions: inputs.positions,
            samples: inputs.samples,
            heads: shape.heads,
            batch: shape.batch,
            tile: shape.tile,
            dropout: (cx.drops && p > 0.0).then(|| model.dropout(p, layer)),
            first_head: shape.first_head,
        }
    }
}
