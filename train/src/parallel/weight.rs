//! GTP_remat: each rank keeps its rows of a weight; the whole TP-local weight is gathered just before use and its gradient
//! reduce-scattered over the same peers.
//!
//! The sequence of uses is known from the program, so the next weight's gather is issued while the present one is used, and
//! a gradient's reduce-scatter is completed only when the next one is issued.

use super::{Comms, StepError};
use crate::backend::{Backend, Buffers, Lifetime, Op, View};
use crate::comm::{Reduce, Ticket};
use crate::model::params::ParamId;
use mesh::DType;

/// Where one parameter lives on this rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ParamHome {
    /// This rank's rows, of the compute type; as many on every GTP peer (the last ones may be padding).
    pub weight: View,
    /// The sum of its gradients, accumulators, the same shape.
    pub grad: View,
    /// Rows of the TP-local weight, over all GTP peers together.
    pub gathered_rows: usize,
    /// Whether GTP cuts it.
    pub is_sharded: bool,
}

/// Weights and gradients of a rank, whole when they are used.
pub(crate) struct WeightStore {
    homes: Vec<ParamHome>,
    gtp: usize,
    /// Two gathered weights: the one in use and the next.
    ring: Vec<View>,
    /// Uses of gathered weights in the order of the program; learnt from its first dry run.
    uses: Vec<ParamId>,
    learning: bool,
    next_use: usize,
    gathering: Option<Ticket>,
    /// Two whole gradients: one is written while the other is reduced.
    staging: Vec<View>,
    scattered: Vec<View>,
    next_staging: usize,
    reducing: Option<(Ticket, usize, ParamId)>,
}

impl WeightStore {
    /// A store for parameters that live at `homes`.
    pub(crate) fn new(homes: Vec<ParamHome>, gtp: usize, buffers: &mut Buffers) -> Self {
        let sharded = || homes.iter().filter(|home| home.is_sharded && gtp > 1);
        let shard_len = sharded().map(|home| home.weight.numel()).max().unwrap_or(0);
        let dtype = |view: fn(&ParamHome) -> View| view(&homes[0]).dtype;
        let mut pair = |name: &str, dtype, len: usize| match len {
            0 => Vec::new(),
            _ => (0..2)
                .map(|at| buffers.declare(format!("{name}.{at}"), Lifetime::Transient, dtype, 1, len))
                .collect(),
        };
        WeightStore {
            ring: pair("weight.gathered", dtype(|home| home.weight), gtp * shard_len),
            staging: pair("grad.staging", dtype(|home| home.grad), gtp * shard_len),
            scattered: pair("grad.scattered", dtype(|home| home.grad), shard_len),
            homes,
            gtp,
            uses: Vec::new(),
            learning: true,
            next_use: 0,
            gathering: None,
            next_staging: 0,
            reducing: None,
        }
    }

    /// Where a parameter lives.
    pub(crate) fn home(&self, param: ParamId) -> ParamHome {
        self.homes[param.0]
    }

    /// All of them, by parameter.
    pub(crate) fn homes(&self) -> &[ParamHome] {
        &self.homes
    }

    /// From here on the program repeats what was learnt.
    pub(crate) fn finish_learning(&mut self) {
        self.learning = false;
        self.next_use = 0;
    }

    fn ring_slot(&self, use_index: usize, param: ParamId) -> View {
        let home = self.homes[param.0];
        let (rows, cols) = (home.weight.rows * self.gtp, home.weight.cols);
        self.ring[use_index % 2].col_range(0, rows * cols).reshaped(rows, cols)
    }

    fn issue_gather(
        &self,
        be: &mut dyn Backend,
        comms: &Comms,
        use_index: usize,
        param: ParamId,
    ) -> Result<Ticket, StepError> {
        let slot = self.ring_slot(use_index, param);
        Ok(comms.gtp_remat.all_gather(be, "weight.gather", self.homes[param.0].weight, slot)?)
    }

    /// The whole TP-local weight, until the next call.
    pub(crate) fn acquire(
        &mut self,
        be: &mut dyn Backend,
        comms: &Comms,
        param: ParamId,
    ) -> Result<View, StepError> {
        let home = self.homes[param.0];
        if !home.is_sharded || self.gtp == 1 {
            return Ok(home.weight.row_range(0, home.gathered_rows));
        }
        let use_index = self.next_use;
        if self.learning {
            self.uses.push(param);
        }
        assert_eq!(self.uses[use_index], param, "the program uses its weights in the order that was learnt");
        let ticket = match self.gathering.take() {
            Some(ticket) => ticket,
            None => self.issue_gather(be, comms, use_index, param)?,
        };
        comms.gtp_remat.wait(be, ticket)?;
        self.next_use += 1;
        if let Some(next) = self.uses.get(self.next_use) {
            self.gathering = Some(self.issue_gather(be, comms, self.next_use, *next)?);
        }
        Ok(self.ring_slot(use_index, param).row_range(0, home.gathered_rows))
    }

    /// Adds to a parameter's gradient: `op` adds its part of the whole TP-local gradient to the view it is given.
    pub(crate) fn add_grad(
        &mut self,
        be: &mut dyn Backend,
        comms: &Comms,
        param: ParamId,
        op: impl FnOnce(View) -> Op,
    ) -> Result<(), StepError> {
        let home = self.homes[param.0];
        if !home.is_sharded || self.gtp == 1 {
            return Ok(be.run(op(home.grad.row_range(0, home.gathered_rows)))?);
        }
        let at = self.next_staging;
        self.next_staging = 1 - at;
        let (rows, cols) = (home.grad.rows, home.grad.cols);
        let staging = self.staging[at].col_range(0, self.gtp * rows * cols).reshaped(self.gtp * rows, cols);
        be.run(Op::Zero { dst: staging })?;
        be.run(op(staging.row_range(0, home.gathered_rows)))?;
        self.complete_reduction(be, comms)?;
        let scattered = self.scattered[at].col_range(0, rows * cols).reshaped(rows, cols);
        let sum = Reduce::of_accumulators(staging.dtype);
        let ticket = comms.gtp_remat.reduce_scatter(be, "weight.grad.scatter", sum, staging, scattered)?;
        self.reducing = Some((ticket, at, param));
        Ok(())
    }

    fn complete_reduction(&mut self, be: &mut dyn Backend, comms: &Comms) -> Result<(), StepError> {
        let Some((ticket, at, param)) = self.reducing.take() else { return Ok(()) };
        comms.gtp_remat.wait(be, ticket)?;
        let grad = self.homes[param.0].grad;
        let src = self.scattered[at].col_range(0, grad.numel()).reshaped(grad.rows, grad.cols);
        Ok(be.run(match grad.dtype {
            DType::I64 => Op::AddFixed { src, dst: grad },
            _ => Op::Add { src, dst: grad },
        })?)
    }

    /// Ends a program that stopped short of its backward: the next one begins with the first weight again.
    pub(crate) fn rewind(&mut self, be: &mut dyn Backend, comms: &Comms) -> Result<(), StepError> {
        if let Some(ticket) = self.gathering.take() {
            comms.gtp_remat.wait(be, ticket)?;
        }
        self.next_use = 0;
        Ok(())
    }

    /// Ends a micro-batch: completes the last reduction, so that nothing reads a stale sum.
    pub(crate) fn drain(&mut self, be: &mut dyn Backend, comms: &Comms) -> Result<(), StepError> {
        self.complete_reduction(be, comms)?;
        assert!(self.gathering.is_none(), "a gathered weight was never used");
        self.next_use = 0;
        Ok(())
    }
}
