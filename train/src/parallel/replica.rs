//! Weight replicas (configured CP × DP): gradients are reduce-scattered over them, each owns a part of the rows of every
//! local shard, updates it, and the updated rows are gathered again.
//!
//! All parameters travel in one bucket, packed member by member: for each member its rows of every parameter. Members' parts
//! are ⌈rows/R⌉ rows; where that leaves a member fewer, zeros fill its place.

use super::{Comms, StepError};
use crate::backend::{Backend, Buffers, Lifetime, Op, View};
use crate::comm::Reduce;
use crate::parallel::weight::ParamHome;
use std::ops::Range;

/// The bucket of one rank.
pub(crate) struct ReplicaBucket {
    replicas: usize,
    position: usize,
    params: Vec<Packed>,
    count: usize,
    exchange: Option<Exchange>,
}

/// Buffers that only more than one replica needs: alone, gradients stay where they are and rows are updated in place.
struct Exchange {
    /// Accumulators: every member's part, `[R, count]`, and this one's sum over members.
    grads: View,
    grad_part: View,
    /// Of the compute type: this member's updated rows, and every member's.
    rows_part: View,
    rows: View,
}

/// A parameter in the bucket.
struct Packed {
    weight: View,
    grad: View,
    /// Rows of a member's part, and all rows.
    part_rows: usize,
    rows: usize,
    cols: usize,
    /// First element of the parameter inside a member's part.
    at: usize,
}

impl Packed {
    fn member_rows(&self, member: usize) -> Range<usize> {
        (member * self.part_rows).min(self.rows)..((member + 1) * self.part_rows).min(self.rows)
    }
}

impl ReplicaBucket {
    /// The bucket of member `position` of `replicas`. `rows`: rows of each parameter's local shard, of which `homes` may
    /// hold more as padding; a vector's rows are its elements.
    pub(crate) fn new(
        homes: &[ParamHome],
        rows: &[(usize, usize)],
        replicas: usize,
        position: usize,
        buffers: &mut Buffers,
    ) -> Self {
        let mut count = 0;
        let params = homes
            .iter()
            .zip(rows)
            .map(|(home, (rows, cols))| {
                let part_rows = rows.div_ceil(replicas);
                let view = |whole: View| whole.reshaped(whole.numel() / cols, *cols);
                let packed = Packed {
                    weight: view(home.weight),
                    grad: view(home.grad),
                    part_rows,
                    rows: *rows,
                    cols: *cols,
                    at: count,
                };
                count += part_rows * cols;
                packed
            })
            .collect();
        let mut declare = |name: &str, dtype, rows| {
            buffers.declare(format!("bucket.{name}"), Lifetime::Transient, dtype, rows, count)
        };
        let (acc, compute) = (homes[0].grad.dtype, homes[0].weight.dtype);
        let exchange = (replicas > 1).then(|| Exchange {
            grads: declare("grads", acc, replicas),
            grad_part: declare("grad_part", acc, 1),
            rows_part: declare("rows_part", compute, 1),
            rows: declare("rows", compute, replicas),
        });
        ReplicaBucket { replicas, position, params, count, exchange }
    }

    /// Elements of a member's part.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The rows of parameter `param` that this member owns, as they lie in its weight.
    pub(crate) fn own_rows(&self, param: usize) -> View {
        let packed = &self.params[param];
        packed.member_part(self.position, packed.weight)
    }

    /// The same rows in a view of `count` elements that holds a member's part.
    pub(crate) fn in_part(&self, param: usize, part: View) -> View {
        self.params[param].in_part(self.position, part)
    }

    /// The sums over all replicas of the gradients of these rows: accumulators, after [`ReplicaBucket::reduce_grads`].
    pub(crate) fn own_grads(&self, param: usize) -> View {
        let packed = &self.params[param];
        match &self.exchange {
            Some(exchange) => packed.in_part(self.position, exchange.grad_part),
            None => packed.member_part(self.position, packed.grad),
        }
    }

    /// Sums the gradients over all replicas.
    pub(crate) fn reduce_grads(&self, be: &mut dyn Backend, comms: &Comms) -> Result<(), StepError> {
        let Some(Exchange { grads, grad_part, .. }) = self.exchange else { return Ok(()) };
        be.run(Op::Zero { dst: grads })?;
        for member in 0..self.replicas {
            let part = grads.row_range(member, member + 1);
            for packed in &self.params {
                let src = packed.member_part(member, packed.grad);
                be.run(Op::Copy { src, dst: packed.in_part(member, part) })?;
            }
        }
        let sum = Reduce::of_accumulators(grads.dtype);
        let ticket = comms.dp_cp.reduce_scatter(be, "replica.scatter_grads", sum, grads, grad_part)?;
        Ok(comms.dp_cp.wait(be, ticket)?)
    }

    /// Brings every member's updated rows to every replica.
    pub(crate) fn gather_rows(&self, be: &mut dyn Backend, comms: &Comms) -> Result<(), StepError> {
        let Some(Exchange { rows_part, rows, .. }) = self.exchange else { return Ok(()) };
        be.run(Op::Zero { dst: rows_part })?;
        for (param, packed) in self.params.iter().enumerate() {
            let dst = packed.in_part(self.position, rows_part);
            be.run(Op::Copy { src: self.own_rows(param), dst })?;
        }
        let ticket = comms.dp_cp.all_gather(be, "replica.gather_rows", rows_part, rows)?;
        comms.dp_cp.wait(be, ticket)?;
        for member in (0..self.replicas).filter(|member| *member != self.position) {
            let part = rows.row_range(member, member + 1);
            for packed in &self.params {
                let dst = packed.member_part(member, packed.weight);
                be.run(Op::Copy { src: packed.in_part(member, part), dst })?;
            }
        }
        Ok(())
    }
}

impl Packed {
    /// A member's rows of the weight or the gradient.
    fn member_part(&self, member: usize, whole: View) -> View {
        let rows = self.member_rows(member);
        whole.row_range(rows.start, rows.end)
    }

    fn in_part(&self, member: usize, part: View) -> View {
        let rows = self.member_rows(member).len();
        part.col_range(self.at, self.at + rows * self.cols).reshaped(rows, self.cols)
    }
}
