//! One optimizer step, and the state of a rank that steps.

use crate::backend::{Backend, BackendError, Buffers, Device, Lifetime, MemoryPlan, Op, Recorder, View};
use crate::comm::Reduce;
use crate::comm::record::{CallLog, RecordedComm};
use crate::config::{Numerics, TrainConfig};
use crate::data::sampler::RankBatch;
use crate::model::params::{Init, ParamDecl, ParamTable};
use crate::model::{MicroBatch, Model};
use crate::optim::{Optimizer, Update, WholeGrads};
use crate::parallel::weight::{ParamHome, WeightStore};
use crate::parallel::{Comms, Machine, StepError};
use crate::rng::init_normal;
use crate::state::{RunState, Streams};
use half::bf16;
use mesh::{
    DType, GroupKind, Indivisible, MissingGroups, ParallelConfig, ProcessGroups, Region, TensorKey,
    paired_runs,
};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::rc::Rc;

/// One rank's model, optimizer and memory.
pub struct Trainer {
    config: TrainConfig,
    groups: ProcessGroups,
    comms: Comms,
    be: Box<dyn Backend>,
    program: Program,
    plan: MemoryPlan,
    call_log: CallLog,
}

/// The program of a step over its buffers.
pub(crate) struct Program {
    pub model: Model,
    /// The same program for the micro-batches of evaluations, where these have another size.
    validation: Option<Model>,
    pub weights: WeightStore,
    pub optimizer: Optimizer,
    /// The loss's fixed-point sum and the count it is divided by, I64 `[1, 2]`.
    stats: View,
    loss_bits: u32,
    tp_sum: Reduce,
}

/// A rank cannot be set up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// The collection lacks groups.
    #[error(transparent)]
    Groups(#[from] MissingGroups),
    /// A parameter does not divide.
    #[error(transparent)]
    Placement(#[from] Indivisible),
    /// The device has no room, or fails.
    #[error(transparent)]
    Device(#[from] BackendError),
}

impl BuildError {
    /// Code of the error.
    pub fn code(&self) -> &'static str {
        match self {
            BuildError::Groups(_) => "RM9001",
            BuildError::Placement(_) => "RM2003",
            BuildError::Device(error) => error.code(),
        }
    }

    /// How to mend it.
    pub fn help(&self) -> &'static str {
        match self {
            BuildError::Groups(_) => "this is a fault of the program; please report it",
            BuildError::Placement(_) => "pick a layout that divides the model",
            BuildError::Device(error) => error.help(),
        }
    }
}

/// What a step is given beside its batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepSettings {
    /// Learning rate.
    pub lr: f64,
    /// Weight decay, on matrices.
    pub weight_decay: f64,
    /// Number of the optimizer update that this step makes, from 1.
    pub update: u64,
}

/// What a step came to, equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepOutcome {
    /// Average loss of the global batch.
    pub loss: f64,
    /// Norm of the averaged gradients before clipping, over all parameters.
    pub grad_norm: f64,
    /// False if a value was not finite or left its range: nothing was updated.
    pub applied: bool,
}

/// What the losses of a batch add up to.
pub(crate) struct LossSum {
    /// In units of 2^-(fraction bits of losses).
    pub fixed_point: i64,
    /// What it is divided by.
    pub count: u64,
    /// Whether this rank's losses were finite and their sum cannot have left its range.
    pub in_range: bool,
}

/// The optimizer's groups of parameters, by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParamGroups {
    /// With weight decay.
    pub decay: Vec<TensorKey>,
    /// Without.
    pub no_decay: Vec<TensorKey>,
}

impl Program {
    fn new(config: &TrainConfig, groups: &ProcessGroups, buffers: &mut Buffers) -> Result<Self, BuildError> {
        let model = Model::new(config, groups, buffers);
        let evaluations = config
            .evaluation
            .map(|evaluation| evaluation.parallel(&config.parallel).expect("the configuration was checked"));
        let validation = evaluations
            .filter(|parallel| parallel.micro_batch_size() != config.parallel.micro_batch_size())
            .map(|parallel| Model::new(&TrainConfig { parallel, ..config.clone() }, groups, buffers));
        let (dtype, acc) = (config.precision.dtype(), model.sizes().add.dtype());
        let homes = Homes::new(model.table(), groups, dtype, acc, buffers)?;
        let whole_grads = WholeGrads {
            over_gtp: homes.whole_grads,
            over_tp: homes.tp_whole_grads.filter(|_| config.parallel.sequence_parallel()),
        };
        let optimizer = Optimizer::new(config, model.table(), groups, &homes.params, whole_grads, buffers)?;
        let weights = WeightStore::new(homes.params, groups.size(GroupKind::GtpRemat) as usize, buffers);
        let stats = buffers.declare("stats", Lifetime::Persistent, DType::I64, 1, 2);
        let tp_sum = match config.numerics {
            Numerics::Canonical(_) => Reduce::Tree,
            Numerics::Fast => Reduce::Sum,
        };
        let (_, loss_bits) = config.numerics.loss();
        Ok(Program { model, validation, weights, optimizer, stats, loss_bits, tp_sum })
    }

    fn zero_grads(&mut self, be: &mut dyn Backend) -> Result<(), StepError> {
        for home in self.weights.homes() {
            be.run(Op::Zero { dst: home.grad })?;
        }
        Ok(be.run(Op::Zero { dst: self.stats })?)
    }

    fn micro_batch(
        &mut self,
        be: &mut dyn Backend,
        comms: &Comms,
        batch: &MicroBatch,
    ) -> Result<(), StepError> {
        let loss_sum = self.stats.col_range(0, 1);
        let machine =
            &mut Machine { be, comms, weights: &mut self.weights, tp_sum: self.tp_sum, drops: true };
        self.model.run(machine, batch, loss_sum)
    }

    /// The sum of all weighted token losses, in fixed point, and the count it is divided by.
    fn reduce_loss(&self, be: &mut dyn Backend, comms: &Comms, count: u64) -> Result<(i64, u64), StepError> {
        be.upload(self.stats.col_range(1, 2), &(count as i64).to_le_bytes())?;
        let ticket = comms.dp_cp_gtp_remat.all_reduce(be, "loss.reduce", Reduce::Fixed, self.stats)?;
        comms.dp_cp_gtp_remat.wait(be, ticket)?;
        let mut stats = [0i64; 2];
        be.download(self.stats, bytemuck::cast_slice_mut(&mut stats))?;
        Ok((stats[0], stats[1] as u64))
    }

    /// Runs everything once on a recorder, twice: the first time the weight store learns the order of uses.
    fn record(
        &mut self,
        buffers: &Buffers,
        learning: &Comms,
        recorded: &Comms,
    ) -> Result<MemoryPlan, StepError> {
        self.record_once(&mut Recorder::new(buffers), learning)?;
        self.weights.finish_learning();
        let mut recorder = Recorder::new(buffers);
        self.record_once(&mut recorder, recorded)?;
        if let Some(validation) = &self.validation {
            // Whole, so that each of its buffers has a place; none lives while one of training does.
            let (weights, tp_sum) = (&mut self.weights, self.tp_sum);
            let machine = &mut Machine { be: &mut recorder, comms: learning, weights, tp_sum, drops: true };
            validation.run(machine, &MicroBatch::default(), self.stats.col_range(0, 1))?;
        }
        Ok(recorder.plan())
    }

    fn record_once(&mut self, recorder: &mut Recorder, comms: &Comms) -> Result<(), StepError> {
        self.zero_grads(recorder)?;
        self.micro_batch(recorder, comms, &MicroBatch::default())?;
        self.reduce_loss(recorder, comms, 1)?;
        let update = Update { lr: 0.0, weight_decay: 0.0, step: 1, count: 1, leaves: 1 };
        self.optimizer.reduce(recorder, comms, &update)?;
        self.optimizer.update(recorder, comms, &update, 1.0)
    }
}

/// Where the parameters of a rank live.
struct Homes {
    params: Vec<ParamHome>,
    /// Gradients of all parameters that GTP leaves whole, and of those among them that TP does, too.
    whole_grads: Option<View>,
    tp_whole_grads: Option<View>,
}

impl Homes {
    /// Weights of type `dtype`, gradients in accumulators of type `acc`.
    fn new(
        table: &ParamTable,
        groups: &ProcessGroups,
        dtype: DType,
        acc: DType,
        buffers: &mut Buffers,
    ) -> Result<Self, BuildError> {
        let gtp = groups.size(GroupKind::GtpRemat) as usize;
        let is_cut = |param: &ParamDecl, kind| param.placement.is_cut_over(kind);
        // Rows and columns of what a rank holds; a vector is one row.
        let extents = |param: &ParamDecl, peer: &ProcessGroups| {
            let shape = param.placement.shard(peer)?.shape;
            let dims: Vec<usize> = shape.dims().iter().map(|extent| *extent as usize).collect();
            Ok::<_, BuildError>(if let [rows, cols] = dims[..] { (rows, cols) } else { (1, dims[0]) })
        };
        // They lie one after another, those that TP cuts last, so that each sum over ranks is one collective.
        let mut whole = Vec::new();
        for (index, param) in table.params.iter().enumerate().filter(|(_, p)| !is_cut(p, GroupKind::GtpRemat))
        {
            let (rows, cols) = extents(param, groups)?;
            whole.push((is_cut(param, GroupKind::Tp), index, rows, cols));
        }
        whole.sort();
        let len = |of: &[(bool, usize, usize, usize)]| of.iter().map(|(.., rows, cols)| rows * cols).sum();
        let whole_len: usize = len(&whole);
        let tp_whole_len: usize = len(&whole[..whole.partition_point(|(is_cut, ..)| !is_cut)]);
        let whole_grads =
            (whole_len > 0).then(|| buffers.declare("grad.whole", Lifetime::Persistent, acc, 1, whole_len));
        let tp_whole_grads =
            whole_grads.filter(|_| tp_whole_len > 0).map(|grads| grads.col_range(0, tp_whole_len));
        let mut places = vec![None; table.params.len()];
        let mut at = 0;
        for (_, index, rows, cols) in whole {
            let grads = whole_grads.expect("declared for parameters like this one");
            places[index] = Some(grads.col_range(at, at + rows * cols).reshaped(rows, cols));
            at += rows * cols;
        }
        let mut params = Vec::new();
        for (param, whole_grad) in table.params.iter().zip(places) {
            let mut declare = |what: &str, dtype, rows, cols| {
                buffers.declare(format!("{what}.{}", param.key), Lifetime::Persistent, dtype, rows, cols)
            };
            if let Some(grad) = whole_grad {
                let weight = declare("weight", dtype, grad.rows, grad.cols);
                params.push(ParamHome { weight, grad, gathered_rows: grad.rows, is_sharded: false });
                continue;
            }
            // Rows of the TP-local weight: the whole of what the GTP peers hold.
            let mut gathered_rows = 0;
            let mut cols = 0;
            for peer in groups.members(GroupKind::GtpRemat) {
                let (rows, peer_cols) = extents(param, &peer)?;
                gathered_rows += rows;
                cols = peer_cols;
            }
            let rows = gathered_rows.div_ceil(gtp);
            params.push(ParamHome {
                weight: declare("weight", dtype, rows, cols),
                grad: declare("grad", acc, rows, cols),
                gathered_rows,
                is_sharded: true,
            });
        }
        Ok(Homes { params, whole_grads, tp_whole_grads })
    }
}

impl Trainer {
    /// A rank on `device` with its initial weights: every element drawn by its global index, so no rank needs another's.
    ///
    /// # Errors
    /// Groups that the collection lacks, a parameter that does not divide, or a device without room.
    pub fn new(
        config: &TrainConfig,
        groups: &ProcessGroups,
        comms: Comms,
        device: &Device,
    ) -> Result<Self, BuildError> {
        let mut buffers = Buffers::default();
        let mut program = Program::new(config, groups, &mut buffers)?;
        let [ignored, call_log] = [(); 2].map(|()| CallLog::default());
        let recorded = |log| Comms::new(groups, |kind| Rc::new(RecordedComm::new(groups, kind, log)));
        let (learning, recorded) = (recorded(&ignored)?, recorded(&call_log)?);
        let plan = program.record(&buffers, &learning, &recorded).expect("a recorder cannot fail");
        let be = device.backend(groups.rank(), plan.clone(), &config.numerics)?;
        let mut trainer =
            Trainer { config: config.clone(), groups: groups.clone(), comms, be, program, plan, call_log };
        trainer.init_weights()?;
        Ok(trainer)
    }

    fn init_weights(&mut self) -> Result<(), BuildError> {
        let seed = self.config.seed;
        self.fill_weights(|param, global, out| match param.init {
            Init::Zeros => out.fill(0.0),
            Init::Ones => out.fill(1.0),
            Init::Normal { std } => init_normal(seed, param.key.as_str(), global, std, out),
        })
    }

    /// Replaces the weights, and their masters. `whole` gives the logical tensor of a parameter, row-major; moments stay.
    ///
    /// # Errors
    /// A parameter that does not divide.
    ///
    /// # Panics
    /// If a tensor has not the elements of its parameter.
    pub fn set_weights(&mut self, mut whole: impl FnMut(&ParamDecl) -> Vec<f32>) -> Result<(), BuildError> {
        let mut held: Option<(TensorKey, Vec<f32>)> = None;
        self.fill_weights(|param, global, out| {
            if held.as_ref().is_none_or(|(key, _)| *key != param.key) {
                let tensor = whole(param);
                assert_eq!(
                    tensor.len() as u64,
                    param.placement.shape().numel(),
                    "elements of `{}`",
                    param.key
                );
                held = Some((param.key.clone(), tensor));
            }
            let (_, tensor) = held.as_ref().expect("set above");
            out.copy_from_slice(&tensor[global.start as usize..global.end as usize]);
        })
    }

    /// `fill` writes a run of elements of a parameter, by their indices in its logical tensor. Padding is 0.
    fn fill_weights(
        &mut self,
        mut fill: impl FnMut(&ParamDecl, Range<u64>, &mut [f32]),
    ) -> Result<(), BuildError> {
        for (param, home) in self.program.model.table().params.iter().zip(self.program.weights.homes()) {
            let shard = param.placement.shard(&self.groups)?;
            let mut values = vec![0f32; home.weight.numel()];
            let shape = param.placement.shape();
            for piece in &shard.pieces {
                for (global, local) in paired_runs(&piece.region, &shape, &piece.local, &shard.shape) {
                    fill(param, global, &mut values[local.start as usize..local.end as usize]);
                }
            }
            let bytes: Vec<u8> = match home.weight.dtype {
                DType::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
                _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            };
            self.be.upload(home.weight, &bytes)?;
        }
        self.program.optimizer.restart_masters(self.be.as_mut(), |_| true)?;
        Ok(())
    }

    /// The run's configuration.
    pub fn config(&self) -> &TrainConfig {
        &self.config
    }

    /// The model's process groups, as this rank sees them.
    pub fn groups(&self) -> &ProcessGroups {
        &self.groups
    }

    /// Keys, each behind `prefix`, of the parameters that weight decay applies to, and of the others.
    pub fn param_groups(&self, prefix: &str) -> ParamGroups {
        let params = &self.program.model.table().params;
        let key = |p: &ParamDecl| TensorKey::new(format!("{prefix}{}", p.key));
        let keys = |decay| params.iter().filter(|p| p.decay == decay).map(key).collect();
        ParamGroups { decay: keys(true), no_decay: keys(false) }
    }

    /// The plan of this rank's memory.
    pub fn memory(&self) -> &MemoryPlan {
        &self.plan
    }

    /// The collectives of a step of one micro-batch, in the order of the program.
    pub fn call_log(&self) -> &CallLog {
        &self.call_log
    }

    /// Copies a box of `state`, in this rank's own coordinates, out of memory; row-major.
    ///
    /// # Errors
    /// What the device says.
    pub fn read_state(
        &mut self,
        state: &RunState,
        streams: &Streams,
        entry: usize,
        local: &Region,
        bytes: &mut [u8],
    ) -> Result<(), BackendError> {
        state.read(self.be.as_mut(), streams, entry, local, bytes)
    }

    pub(crate) fn parts(&mut self) -> (&Program, &mut dyn Backend) {
        (&self.program, self.be.as_mut())
    }

    pub(crate) fn comms(&self) -> &Comms {
        &self.comms
    }

    /// The logits of this rank's own tokens, `[M, V]`, row-major, without dropout; targets and weights of `batch` are not
    /// looked at. Collective.
    ///
    /// # Errors
    /// A failed collective or device.
    pub fn logits(&mut self, batch: &MicroBatch) -> Result<Vec<f32>, StepError> {
        let Trainer { comms, be, program, .. } = self;
        let (be, weights, tp_sum) = (be.as_mut(), &mut program.weights, program.tp_sum);
        let own = program.model.logits(&mut Machine { be, comms, weights, tp_sum, drops: false }, batch)?;
        let mut bytes = vec![0; own.size_bytes()];
        // A shard of the vocabulary may be nothing but padding.
        if own.numel() > 0 {
            be.download(own, &mut bytes)?;
        }
        let shards = comms.tp.gather_bytes("logits.gather", &bytes)?;
        let mut logits = Vec::new();
        for row in 0..own.rows {
            for shard in &shards {
                let row_bytes = shard.len() / own.rows;
                let row = &shard[row * row_bytes..][..row_bytes];
                match own.dtype {
                    DType::Bf16 => {
                        let elements = row.as_chunks().0.iter();
                        logits.extend(elements.map(|x| bf16::from_le_bytes(*x).to_f32()));
                    }
                    _ => logits.extend(row.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x))),
                }
            }
        }
        Ok(logits)
    }

    /// The sum of the token losses of a batch of which `batch` is this rank's part under `parallel`, without dropout. Gradients and state
    /// stay as they are. Collective.
    ///
    /// # Errors
    /// A failed collective or device.
    pub(crate) fn evaluate(
        &mut self,
        batch: &RankBatch,
        parallel: &ParallelConfig,
    ) -> Result<LossSum, StepError> {
        let Trainer { config, comms, be, program, .. } = self;
        let be = be.as_mut();
        be.run(Op::Zero { dst: program.stats })?;
        let loss_sum = program.stats.col_range(0, 1);
        let model = program.validation.as_ref().unwrap_or(&program.model);
        for micro_batch in &batch.micro_batches {
            let (weights, tp_sum) = (&mut program.weights, program.tp_sum);
            model.evaluate(
                &mut Machine { be, comms, weights, tp_sum, drops: false },
                micro_batch,
                loss_sum,
            )?;
        }
        let (fixed_point, count) = program.reduce_loss(be, comms, batch.count)?;
        let leaves = parallel.global_batch_size() * parallel.seq_length() / config.numerics.loss().0 as u64;
        let in_range = f64::from(be.take_fixed_point_peak()?) * leaves as f64 <= 1.0;
        Ok(LossSum { fixed_point, count, in_range })
    }

    /// One optimizer step over the global batch of which `batch` is this rank's part. Collective.
    ///
    /// # Errors
    /// A failed collective or device. A step whose values are not finite is no error: all ranks alike leave the weights
    /// as they were.
    pub fn step(&mut self, batch: &RankBatch, settings: &StepSettings) -> Result<StepOutcome, StepError> {
        let Trainer { config, comms, be, program, .. } = self;
        let be = be.as_mut();
        program.zero_grads(be)?;
        for micro_batch in &batch.micro_batches {
            program.micro_batch(be, comms, micro_batch)?;
        }
        let (loss_sum, count) = program.reduce_loss(be, comms, batch.count)?;
        let loss_sum = loss_sum as f64 / (1u64 << program.loss_bits) as f64;
        let (micro_batch, lanes) =
            (config.parallel.micro_batch_size(), config.parallel.layout().batch_parallel_size());
        let samples = batch.micro_batches.len() as u64 * u64::from(micro_batch) * u64::from(lanes);
        let tokens = samples * config.parallel.seq_length();
        let update = Update {
            lr: settings.lr,
            weight_decay: settings.weight_decay,
            step: settings.update,
            count: count.max(1),
            leaves: tokens / config.numerics.loss().0 as u64,
        };
        let reduced = program.optimizer.reduce(be, comms, &update)?;
        // An average over no token is none: such a batch changes nothing.
        let is_defined = reduced.in_range && count > 0;
        let applied = is_defined && reduced.norm.is_finite();
        if applied {
            program.optimizer.update(be, comms, &update, reduced.norm)?;
        }
        let loss = if is_defined { loss_sum / count as f64 } else { f64::NAN };
        Ok(StepOutcome { loss, grad_norm: if is_defined { reduced.norm } else { f64::NAN }, applied })
    }
}
