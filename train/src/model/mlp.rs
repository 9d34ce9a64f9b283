//! The feed-forward block: projection up, for SwiGLU of gate and up fused, activation, projection down.

use super::{LocalSizes, Model, params::LayerParams};
use crate::backend::{Buffers, Lifetime, Op, View};
use crate::parallel::tensor::sum_blocks;
use crate::parallel::{Machine, StepError};

/// Scratch of the block.
pub(super) struct Mlp {
    /// `[M, f]`; recomputed in backward.
    activated: View,
    d_activated: View,
    /// As `Saved::projected`.
    d_projected: View,
}

/// What a layer keeps: the input of the activation, `[M, f]`, or for SwiGLU gate and up, `[M, 2f]`.
pub(super) struct Saved {
    projected: View,
}

impl Saved {
    pub(super) fn new(sizes: &LocalSizes, layer: usize, buffers: &mut Buffers) -> Self {
        let (name, cols) = (format!("{layer}.projected"), sizes.activation.inputs() * sizes.ffn);
        Saved { projected: buffers.declare(name, Lifetime::Transient, sizes.dtype, sizes.tokens, cols) }
    }
}

impl Mlp {
    pub(super) fn new(sizes: &LocalSizes, buffers: &mut Buffers) -> Self {
        let mut declare =
            |name: &str, cols| buffers.declare(name, Lifetime::Transient, sizes.dtype, sizes.tokens, cols);
        Mlp {
            activated: declare("activated", sizes.ffn),
            d_activated: declare("d_activated", sizes.ffn),
            d_projected: declare("d_projected", sizes.activation.inputs() * sizes.ffn),
        }
    }

    /// From `work.normed_full` to `work.partial`.
    pub(super) fn forward(
        &self,
        machine: &mut Machine,
        model: &Model,
        params: &LayerParams,
        saved: &Saved,
    ) -> Result<(), StepError> {
        let Model { sizes, work, .. } = model;
        let w = machine.weights.acquire(machine.be, machine.comms, params.fc1.weight)?;
        let bias = params.fc1.bias.map(|bias| machine.weights.home(bias).weight);
        machine.run(Op::Linear { x: work.normed_full, w, bias, out: saved.projected, accumulate: false })?;
        machine.run(Op::Activate {
            activation: sizes.activation,
            x: saved.projected,
            out: self.activated,
        })?;
        let w = machine.weights.acquire(machine.be, machine.comms, params.fc2.weight)?;
        let cols = sizes.ffn / sizes.blocks;
        Ok(sum_blocks(machine.be, 0..sizes.blocks, work.partial, &work.tree, &mut |be, block, out| {
            let (lo, hi) = (block * cols, (block + 1) * cols);
            let (x, w) = (self.activated.col_range(lo, hi), w.col_range(lo, hi));
            be.run(Op::Linear { x, w, bias: None, out, accumulate: false })
        })?)
    }

    /// From `work.d_delta_full` to the gradient of the activation's input; those of the down projection and of the bias before
    /// the activation.
    pub(super) fn backward_output(
        &self,
        machine: &mut Machine,
        model: &Model,
        params: &LayerParams,
        saved: &Saved,
    ) -> Result<(), StepError> {
        let Model { sizes, work, .. } = model;
        let d_block = work.d_delta_full;
        let w = machine.weights.acquire(machine.be, machine.comms, params.fc2.weight)?;
        machine.run(Op::LinearDx { d_out: d_block, w, d_x: self.d_activated, accumulate: false })?;
        machine.run(Op::Activate {
            activation: sizes.activation,
            x: saved.projected,
            out: self.activated,
        })?;
        let (x, add) = (self.activated, sizes.add);
        machine.weights.add_grad(machine.be, machine.comms, params.fc2.weight, |acc| Op::LinearDw {
            d_out: d_block,
            x,
            acc,
            add,
        })?;
        let (activation, d_out, x) = (sizes.activation, self.d_activated, saved.projected);
        machine.run(Op::ActivateBackward { activation, d_out, x, d_x: self.d_projected })?;
        model.bias_grad(machine, params.fc1.bias, self.d_projected)
    }

    /// From there to `work.d_normed_partial`; the weight's gradient, with its input in `work.normed_full`.
    pub(super) fn backward_input(
        &self,
        machine: &mut Machine,
        model: &Model,
        params: &LayerParams,
    ) -> Result<(), StepError> {
        let Model { sizes, work, .. } = model;
        let w = machine.weights.acquire(machine.be, machine.comms, params.fc1.weight)?;
        let rows = sizes.ffn / sizes.blocks;
        sum_blocks(machine.be, 0..sizes.blocks, work.d_normed_partial, &work.tree, &mut |be, block, d_x| {
            // A block is the same rows of gate and of up, which TP cuts apart.
            for part in 0..sizes.activation.inputs() {
                let (lo, hi) = (part * sizes.ffn + block * rows, part * sizes.ffn + (block + 1) * rows);
                let (d_out, w) = (self.d_projected.col_range(lo, hi), w.row_range(lo, hi));
                be.run(Op::LinearDx { d_out, w, d_x, accumulate: part > 0 })?;
            }
            Ok(())
        })?;
        let (d_out, x, add) = (self.d_projected, work.normed_full, sizes.add);
        machine.weights.add_grad(machine.be, machine.comms, params.fc1.weight, |acc| Op::LinearDw {
            d_out,
            x,
            acc,
            add,
        })
    }
}
