//! The end of a step: gradients summed over replicas, the exact norm, clipping, AdamW on owned rows, rows gathered again.
//!
//! Gradients belong to the *sum* of the token losses; the one division by the global count happens here, so it is the same
//! under every layout and micro-batch size.

use crate::backend::{AdamWStep, Backend, BackendError, Buffers, Lifetime, Op, View};
use crate::comm::Reduce;
use crate::config::{Numerics, OptimizerConfig, TrainConfig};
use crate::model::params::ParamTable;
use crate::parallel::replica::ReplicaBucket;
use crate::parallel::weight::ParamHome;
use crate::parallel::{Comms, StepError};
use mesh::{DType, GroupKind, Indivisible, ProcessGroups};

/// The optimizer of one rank: moments of the rows it owns.
pub(crate) struct Optimizer {
    config: OptimizerConfig,
    pub(crate) bucket: ReplicaBucket,
    params: Vec<Owned>,
    whole_grads: WholeGrads,
    /// Gradients of the owned rows as F32, and the fraction bits of the fixed point that they are taken from; `None` where
    /// they are F32 all along.
    taken: Option<(View, u32)>,
    /// F32 masters of weights that are BF16, persistent.
    pub(crate) master: Option<View>,
    /// First and second moments, persistent.
    pub(crate) exp_avg: View,
    pub(crate) exp_avg_sq: View,
    limbs: View,
    peak: View,
}

/// Gradients, in accumulators, that their weights' own reduce-scatter does not sum over ranks with other tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WholeGrads {
    /// Of all parameters that GTP leaves whole, one after another.
    pub over_gtp: Option<View>,
    /// Of those among them that TP leaves whole, if TP peers have other tokens where they are used, as under sequence
    /// parallelism.
    pub over_tp: Option<View>,
}

struct Owned {
    decay: bool,
    /// Whether this rank's copy is the one that the norm counts.
    is_main: bool,
}

/// What an update needs beside the gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Update {
    /// Learning rate.
    pub lr: f64,
    /// Weight decay, on matrices.
    pub weight_decay: f64,
    /// Number of this update, from 1.
    pub step: u64,
    /// What the summed gradients are divided by.
    pub count: u64,
    /// Leaves whose sums are added in fixed point; bounds what one of them may be.
    pub leaves: u64,
}

/// The norm of the averaged gradients, and whether the step may be used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GradNorm {
    /// Over all parameters, each logical element once.
    pub norm: f64,
    /// False if a value left the range of fixed point or was not finite.
    pub in_range: bool,
}

impl Optimizer {
    /// # Errors
    /// If a placement does not fit the groups.
    pub(crate) fn new(
        config: &TrainConfig,
        table: &ParamTable,
        groups: &ProcessGroups,
        homes: &[ParamHome],
        whole_grads: WholeGrads,
        buffers: &mut Buffers,
    ) -> Result<Self, Indivisible> {
        let mut rows = Vec::new();
        let mut params = Vec::new();
        for param in &table.params {
            let shard = param.placement.shard(groups)?;
            let dims: Vec<usize> = shard.shape.dims().iter().map(|extent| *extent as usize).collect();
            rows.push((dims[0], dims[1..].iter().product()));
            let state = param.placement.clone().with_rows_over(GroupKind::DpCp);
            params.push(Owned { decay: param.decay, is_main: state.replica(groups).is_main() });
        }
        let (replicas, position) = (groups.size(GroupKind::DpCp), groups.position(GroupKind::DpCp));
        let bucket = ReplicaBucket::new(homes, &rows, replicas as usize, position.index(), buffers);
        let count = bucket.count();
        let mut declare = |name: &str, lifetime, dtype, cols| buffers.declare(name, lifetime, dtype, 1, cols);
        let taken = match &config.numerics {
            Numerics::Canonical(canonical) => {
                Some((declare("grad", Lifetime::Transient, DType::F32, count), canonical.grad_bits))
            }
            Numerics::Fast => None,
        };
        let has_masters = homes[0].weight.dtype != DType::F32;
        Ok(Optimizer {
            config: config.optimizer.clone(),
            params,
            whole_grads,
            taken,
            master: has_masters.then(|| declare("master", Lifetime::Persistent, DType::F32, count)),
            exp_avg: declare("exp_avg", Lifetime::Persistent, DType::F32, count),
            exp_avg_sq: declare("exp_avg_sq", Lifetime::Persistent, DType::F32, count),
            limbs: declare("grad_norm.limbs", Lifetime::Transient, DType::I64, 6),
            peak: declare("fixed_point_peak", Lifetime::Transient, DType::F32, 1),
            bucket,
        })
    }

    /// The reduced gradient of a parameter's owned rows, F32.
    fn grad(&self, param: usize) -> View {
        match self.taken {
            Some((taken, _)) => self.bucket.in_part(param, taken),
            None => self.bucket.own_grads(param),
        }
    }

    /// Sums the gradients over everything that shares them out, and their norm. Collective.
    pub(crate) fn reduce(
        &self,
        be: &mut dyn Backend,
        comms: &Comms,
        update: &Update,
    ) -> Result<GradNorm, StepError> {
        let sum = |grads: View| Reduce::of_accumulators(grads.dtype);
        if let Some(grads) = self.whole_grads.over_gtp {
            let ticket = comms.gtp_remat.all_reduce(be, "whole_grads.reduce_gtp", sum(grads), grads)?;
            comms.gtp_remat.wait(be, ticket)?;
        }
        if let Some(grads) = self.whole_grads.over_tp {
            let ticket = comms.tp.all_reduce(be, "whole_grads.reduce_tp", sum(grads), grads)?;
            comms.tp.wait(be, ticket)?;
        }
        self.bucket.reduce_grads(be, comms)?;
        be.run(Op::Zero { dst: self.limbs })?;
        for (index, owned) in self.params.iter().enumerate() {
            let x = self.grad(index);
            if x.numel() == 0 {
                continue;
            }
            if let Some((_, bits)) = self.taken {
                be.run(Op::FxTake { acc: self.bucket.own_grads(index), bits, out: x })?;
            }
            if owned.is_main {
                be.run(Op::SquareNorm { x, limbs: self.limbs })?;
            }
        }
        let ticket = comms.tp_dp_cp.all_reduce(be, "grad_norm.reduce", Reduce::Fixed, self.limbs)?;
        comms.tp_dp_cp.wait(be, ticket)?;
        let mut limbs = [0i64; 6];
        be.download(self.limbs, bytemuck::cast_slice_mut(&mut limbs))?;

        let peak = be.take_fixed_point_peak()?;
        be.upload(self.peak, bytemuck::bytes_of(&peak))?;
        let ticket = comms.tp_dp_cp.all_reduce(be, "fixed_point_peak.reduce", Reduce::Max, self.peak)?;
        comms.tp_dp_cp.wait(be, ticket)?;
        let mut peak = 0f32;
        be.download(self.peak, bytemuck::bytes_of_mut(&mut peak))?;
        let in_range = f64::from(peak) * update.leaves as f64 <= 1.0;
        Ok(GradNorm { norm: norm_of_limbs(&limbs) / update.count as f64, in_range })
    }

    /// Updates the owned rows with the reduced gradients and gathers everyone's. Collective.
    pub(crate) fn update(
        &self,
        be: &mut dyn Backend,
        comms: &Comms,
        update: &Update,
        norm: f64,
    ) -> Result<(), StepError> {
        let config = &self.config;
        let clip = match config.clip_grad {
            max if max > 0.0 => (max / (norm + 1e-6)).min(1.0),
            _ => 1.0,
        };
        // Of the decay that the device uses: 1 − 0.999 in f32 is another number, off by 1e-5 of itself.
        let correction = |beta: f64| (1.0 - libm::pow(f64::from(beta as f32), update.step as f64)) as f32;
        for (index, owned) in self.params.iter().enumerate() {
            let weight = self.bucket.own_rows(index);
            if weight.numel() == 0 {
                continue;
            }
            let master = self.master.map(|master| self.bucket.in_part(index, master));
            be.run(Op::AdamW {
                w: master.unwrap_or(weight),
                m: self.bucket.in_part(index, self.exp_avg),
                v: self.bucket.in_part(index, self.exp_avg_sq),
                g: self.grad(index),
                step: AdamWStep {
                    grad_scale: (clip / update.count as f64) as f32,
                    lr: update.lr as f32,
                    beta1: config.adam_beta1 as f32,
                    beta2: config.adam_beta2 as f32,
                    eps: config.adam_eps as f32,
                    weight_decay: if owned.decay { update.weight_decay as f32 } else { 0.0 },
                    correction1: correction(config.adam_beta1),
                    correction2: correction(config.adam_beta2),
                },
            })?;
            if let Some(master) = master {
                be.run(Op::Cast { src: master, dst: weight })?;
            }
        }
        self.bucket.gather_rows(be, comms)
    }

    /// Starts the masters of these parameters as their weights are.
    pub(crate) fn restart_masters(
        &self,
        be: &mut dyn Backend,
        is_meant: impl Fn(usize) -> bool,
    ) -> Result<(), BackendError> {
        let Some(master) = self.master else { return Ok(()) };
        for index in (0..self.params.len()).filter(|index| is_meant(*index)) {
            let (src, dst) = (self.bucket.own_rows(index), self.bucket.in_part(index, master));
            be.run(Op::Cast { src, dst })?;
        }
        Ok(())
    }
}

/// The root of what the limbs hold: Σ limb · 2^(32·index − 100), lowest first, carries not yet done.
fn norm_of_limbs(limbs: &[i64; 6]) -> f64 {
    let mut carried = [0.0; 6];
    let mut carry = 0i64;
    for (limb, out) in limbs.iter().zip(&mut carried) {
        let sum = limb + carry;
        carry = sum >> 32;
        *out = (sum & 0xffff_ffff) as f64;
    }
    let top = carry as f64;
    let sum = carried.iter().rev().fold(top, |sum, limb| sum * 4_294_967_296.0 + limb);
    (sum * f64::powi(2.0, -100)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limbs_that_were_summed_over_ranks_carry_into_the_next() {
        // 3 · (2^32 − 1) · 2^(96−100) + 5 · 2^(64−100)
        let value: f64 = 3.0 * 4_294_967_295.0 / 16.0 + 5.0 / f64::powi(2.0, 36);
        assert_eq!(norm_of_limbs(&[0, 0, 5, 3 * 0xffff_ffff, 0, 0]), value.sqrt());
    }
}
