//! The output layer and the cross-entropy over a vocabulary that TP cuts: between its three phases lie a maximum, a sum and
//! the owner's logit over `tp`. Gradients follow the sum convention: they belong to the sum of the weighted token losses.

use super::{LocalSizes, Model};
use crate::backend::{Buffers, Lifetime, Op, View};
use crate::comm::{Reduce, Site};
use crate::parallel::tensor::sum_blocks;
use crate::parallel::{Machine, StepError};
use mesh::DType;

/// Buffers of the loss.
pub(super) struct Loss {
    /// `[M, Vl]`; becomes its own gradient.
    pub(super) logits: View,
    /// Each `[M, 1]`.
    max: View,
    sum: View,
    picked: View,
    loss: View,
}

impl Loss {
    pub(super) fn new(sizes: &LocalSizes, buffers: &mut Buffers) -> Self {
        let mut declare =
            |name: &str, dtype, cols| buffers.declare(name, Lifetime::Transient, dtype, sizes.tokens, cols);
        Loss {
            logits: declare("logits", sizes.dtype, sizes.vocab),
            max: declare("loss.max", DType::F32, 1),
            sum: declare("loss.sum", DType::F32, 1),
            picked: declare("loss.picked", DType::F32, 1),
            loss: declare("loss", DType::F32, 1),
        }
    }

    /// From `work.normed_full` to the logits; gives the output layer's weight.
    pub(super) fn project(&self, machine: &mut Machine, model: &Model) -> Result<View, StepError> {
        let w = machine.weights.acquire(machine.be, machine.comms, model.table.output)?;
        let (x, out) = (model.work.normed_full, self.logits);
        machine.run(Op::Linear { x, w, bias: None, out, accumulate: false })?;
        Ok(w)
    }

    /// From `work.normed_full` to the gradient of the logits, in their place; adds to `loss_sum`, and gives the output layer's weight.
    pub(super) fn forward(
        &self,
        machine: &mut Machine,
        model: &Model,
        loss_sum: View,
    ) -> Result<View, StepError> {
        let Model { sizes, inputs, .. } = model;
        let (logits, valid) = (self.logits, sizes.vocab_valid);
        let (target, first_col) = (inputs.targets, sizes.vocab_first_row as i32);
        let block_rows = sizes.vocab / sizes.blocks;

        let w = self.project(machine, model)?;
        machine.run(Op::CeMax { logits, valid, max: self.max })?;
        over_tp(machine, "loss.max", Reduce::Max, self.max)?;
        let (max, sum, picked) = (self.max, self.sum, self.picked);
        machine.run(Op::CeSum { logits, max, target, first_col, valid, block: block_rows, sum, picked })?;
        over_tp(machine, "loss.sum", machine.tp_sum, sum)?;
        over_tp(machine, "loss.picked", machine.tp_sum, picked)?;
        let (weight, loss) = (inputs.weights, self.loss);
        machine.run(Op::CeGrad { logits, max, sum, picked, target, weight, first_col, valid, loss })?;
        machine.run(Op::SumRows { x: loss, acc: loss_sum, add: sizes.add_loss })?;
        Ok(w)
    }

    /// From `work.normed_full` to `work.d_normed_partial`; adds to the output layer's gradient and to `loss_sum`.
    pub(super) fn run(&self, machine: &mut Machine, model: &Model, loss_sum: View) -> Result<(), StepError> {
        let Model { sizes, work, table, .. } = model;
        let (x, logits, add) = (work.normed_full, self.logits, sizes.add);
        let block_rows = sizes.vocab / sizes.blocks;
        let w = self.forward(machine, model, loss_sum)?;
        sum_blocks(machine.be, 0..sizes.blocks, work.d_normed_partial, &work.tree, &mut |be, block, d_x| {
            let (lo, hi) = (block * block_rows, (block + 1) * block_rows);
            let (d_out, w) = (logits.col_range(lo, hi), w.row_range(lo, hi));
            be.run(Op::LinearDx { d_out, w, d_x, accumulate: false })
        })?;
        machine.weights.add_grad(machine.be, machine.comms, table.output, |acc| Op::LinearDw {
            d_out: logits,
            x,
            acc,
            add,
        })
    }
}

fn over_tp(machine: &mut Machine, site: Site, reduce: Reduce, buf: View) -> Result<(), StepError> {
    let ticket = machine.comms.tp.all_reduce(machine.be, site, reduce, buf)?;
    Ok(machine.comms.tp.wait(machine.be, ticket)?)
}
