//! The feed-forward block: fused gate and up projection, SwiGLU, down projection.

use super::{LocalShape, Model, params::LayerParams};
use crate::backend::{Buffers, Lifetime, Op, View};
use crate::config::Activation;
use crate::parallel::tensor::sum_blocks;
use crate::parallel::{Cx, StepError};

/// Scratch of the block.
pub(super) struct Mlp {
    /// `[M, f]`; recomputed in backward.
    activation: View,
    d_activation: View,
    /// `[M, 2f]`.
    d_gate_up: View,
}

/// What a layer keeps: gate and up, `[M, 2f]`.
pub(super) struct Saved {
    gate_up: View,
}

impl Saved {
    pub(super) fn new(shape: &LocalShape, layer: usize, buffers: &mut Buffers) -> Self {
        let (name, cols) = (format!("{layer}.gate_up"), 2 * shape.ffn);
        Saved { gate_up: buffers.declare(name, Lifetime::Transient, shape.dtype, shape.tokens, cols) }
    }
}

impl Mlp {
    pub(super) fn new(shape: &LocalShape, buffers: &mut Buffers) -> Self {
        let mut declare =
            |name: &str, cols| buffers.declare(name, Lifetime::Transient, shape.dtype, shape.tokens, cols);
        Mlp {
            activation: declare("activation", shape.ffn),
            d_activation: declare("d_activation", shape.ffn),
            d_gate_up: declare("d_gate_up", 2 * shape.ffn),
        }
    }

    /// From `work.normed_full` to `work.partial`.
    pub(super) fn forward(
        &self,
        cx: &mut Cx,
        model: &Model,
        params: &LayerParams,
        saved: &Saved,
    ) -> Result<(), StepError> {
        let Model { shape, work, .. } = model;
        let w = cx.weights.acquire(cx.be, cx.comms, params.fc1)?;
        cx.run(Op::Linear { x: work.normed_full, w, bias: None, out: saved.gate_up, accumulate: false })?;
        cx.run(Op::Activate { activation: Activation::Swiglu, x: saved.gate_up, out: self.activation })?;
        let w = cx.weights.acquire(cx.be, cx.comms, params.fc2)?;
        let cols = shape.ffn / shape.blocks;
        Ok(sum_blocks(cx.be, 0..shape.blocks, work.partial, &work.tree, &mut |be, block, out| {
            let (lo, hi) = (block * cols, (block + 1) * cols);
            let (x, w) = (self.activation.col_range(lo, hi), w.col_range(lo, hi));
            be.run(Op::Linear { x, w, bias: None, out, accumulate: false })
        })?)
    }

    /// From `work.d_delta_full` to the gradient of gate and up; the down projection's gradient.
    pub(super) fn backward_output(
        &self,
        cx: &mut Cx,
        model: &Model,
        params: &LayerParams,
        saved: &Saved,
    ) -> Result<(), StepError> {
        let Model { shape, work, .. } = model;
        let d_block = work.d_delta_full;
        let w = cx.weights.acquire(cx.be, cx.comms, params.fc2)?;
        cx.run(Op::LinearDx { d_out: d_block, w, d_x: self.d_activation, accumulate: false })?;
        cx.run(Op::Activate { activation: Activation::Swiglu, x: saved.gate_up, out: self.activation })?;
        let (x, add) = (self.activation, shape.add);
        cx.weights.add_grad(cx.be, cx.comms, params.fc2, |acc| Op::LinearDw {
            d_out: d_block,
            x,
            acc,
            add,
        })?;
        let (d_out, gate_up) = (self.d_activation, saved.gate_up);
        Ok(cx.run(Op::ActivateBackward {
            activation: Activation::Swiglu,
            d_out,
            x: gate_up,
            d_x: self.d_gate_up,
        })?)
    }

    /// From there to `work.d_normed_partial`; the fused weight's gradient, with its input in `work.normed_full`.
    pub(super) fn backward_input(
        &self,
        cx: &mut Cx,
        model: &Model,
        params: &LayerParams,
    ) -> Result<(), StepError> {
        let Model { shape, work, .. } = model;
        let w = cx.weights.acquire(cx.be, cx.comms, params.fc1)?;
        let rows = shape.ffn / shape.blocks;
        sum_blocks(cx.be, 0..shape.blocks, work.d_normed_partial, &work.tree, &mut |be, block, d_x| {
            // A block is the same rows of gate and of up, which TP cuts apart.
            for (part, accumulate) in [(0, false), (shape.ffn, true)] {
                let (lo, hi) = (part + block * rows, part + (block + 1) * rows);
                let (d_out, w) = (self.d_gate_up.col_range(lo, hi), w.row_range(lo, hi));
                be.run(Op::LinearDx { d_out, w, d_x, accumulate })?;
            }
            Ok(())
        })?;
        let (d_out, x, add) = (self.d_gate_up, work.normed_full, shape.add);
        cx.weights.add_grad(cx.be, cx.comms, params.fc1, |acc| Op::LinearDw { d_out, x, acc, add })
    }
}
