//! Length of the run, batch, optimizer, numerics, and what the run needs of the machine. The flags of the learning rate's schedule
//! are declared here and come to one in [`schedule`](super::schedule).

use super::flag::{contrary, named};
use super::resolve::{missing, said_twice};
use super::schedule::{DecayStyle, length};
use crate::output::count;
use crate::report::Refusal;
use mesh::{
    BatchSchedule, BatchStep, LrDecayStyle, ParallelConfig, Ramp, Warmup, WeightDecayStyle, WsdShape,
};
use serde::{Deserialize, Serialize};
use std::num::NonZeroU32;
use std::time::Duration;
use train::config::{
    Canonical, EpochTail, LossAverage, ModelConfig, Numerics, OptimizerConfig, Precision, TrainConfig,
};
use train::evaluate::{Evaluation, EvaluationBatch};
use train::run::Job;

mesh::settings! {
    /// `[training]`; the file has `seq_length` and the batch sizes here, too.
    #[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    #[command(arg = contrary("fp32", "bf16", "Compute in f32 [default: the checkpoint's, else on]"))]
    pub(crate) struct TrainingArgs {
        #[arg(skip)]
        pub(crate) seq_length: Option<u64>,
        #[arg(skip)]
        pub(crate) micro_batch_size: Option<u32>,
        #[arg(skip)]
        pub(crate) global_batch_size: Option<u64>,
        /// Ranks of the job [default: what a launcher says, else one copy of the model, TP × PP × CP × GTP, times DP if that is
        /// said]
        #[arg(long, visible_alias = "world-size", value_name = "RANKS")]
        pub(crate) nproc_per_node: Option<u32>,
        /// What ranks compute on; with cuda rank r on GPU r modulo their number [default: cpu]
        #[arg(long, value_parser = named::<DeviceArg>(), value_name = "DEVICE")]
        pub(crate) device: Option<DeviceArg>,
        /// What ranks are that no launcher has started [default: threads on cpu, processes on cuda]
        #[arg(long, value_parser = named::<RanksAs>(), value_name = "KIND")]
        pub(crate) ranks_as: Option<RanksAs>,
        /// Optimizer steps of the whole run, those before a resume included (required, or --train-samples)
        #[arg(long, value_name = "STEPS", conflicts_with = "train_samples")]
        pub(crate) train_iters: Option<u64>,
        /// Samples of the whole run; a last incomplete global batch is not trained
        #[arg(long, value_name = "SAMPLES")]
        pub(crate) train_samples: Option<u64>,
        /// Let the batch grow: samples of the first step, samples added at each level, samples until --global-batch-size is reached
        /// [default: a constant batch; the end less the start is a multiple of what is added]
        #[arg(long, num_args = 3, value_names = ["START", "ADDED", "SAMPLES"], conflicts_with = "step_batch_size_schedule")]
        pub(crate) rampup_batch_size: Option<Vec<u64>>,
        /// Let the batch change at counts of tokens, such as '0:768 250B:1536'; the last size stands for --global-batch-size
        /// [default: a constant batch]
        #[arg(long, value_name = "TOKENS:BATCH ...", conflicts_with = "global_batch_size")]
        pub(crate) step_batch_size_schedule: Option<String>,
        /// Take fewer samples than --global-batch-size where these do not divide over the ranks; not with a schedule in steps
        /// [default: off]
        #[arg(long)]
        pub(crate) decrease_batch_size_if_needed: Option<bool>,
        /// Iterations whose batch is passed over, each the number of those done before it
        #[arg(long, value_name = "ITERATIONS", num_args = 1.., value_delimiter = ',')]
        pub(crate) iterations_to_skip: Option<Vec<u64>>,
        /// Highest learning rate (required to start a run)
        #[arg(long, value_name = "RATE")]
        pub(crate) lr: Option<f64>,
        /// Lowest learning rate after the warm-up [default: 0]
        #[arg(long, value_name = "RATE")]
        pub(crate) min_lr: Option<f64>,
        /// How the learning rate comes down [default: cosine]
        #[arg(long, value_parser = named::<DecayStyle>(), value_name = "STYLE")]
        pub(crate) lr_decay_style: Option<DecayStyle>,
        /// Steps until the learning rate is down [default: the whole run]
        #[arg(long, value_name = "STEPS", conflicts_with = "lr_decay_samples")]
        pub(crate) lr_decay_iters: Option<u64>,
        /// Samples until the learning rate is down
        #[arg(long, value_name = "SAMPLES")]
        pub(crate) lr_decay_samples: Option<u64>,
        /// Steps in which the learning rate rises first [default: 0]
        #[arg(long, value_name = "STEPS", conflicts_with_all = ["lr_warmup_samples", "lr_warmup_fraction"])]
        pub(crate) lr_warmup_iters: Option<u64>,
        /// Samples in which the learning rate rises first
        #[arg(long, value_name = "SAMPLES", conflicts_with = "lr_warmup_fraction")]
        pub(crate) lr_warmup_samples: Option<u64>,
        /// Part of the decay in which the learning rate rises first, from 0 to below 1
        #[arg(long, value_name = "PART")]
        pub(crate) lr_warmup_fraction: Option<f64>,
        /// Learning rate at the start of the warm-up [default: 0]
        #[arg(long, value_name = "RATE")]
        pub(crate) lr_warmup_init: Option<f64>,
        /// Shape of the last phase of --lr-decay-style WSD [default: exponential]
        #[arg(long, value_parser = named::<WsdShape>(), value_name = "SHAPE")]
        pub(crate) lr_wsd_decay_style: Option<WsdShape>,
        /// Steps of that last phase (required with WSD, or the samples)
        #[arg(long, value_name = "STEPS", conflicts_with = "lr_wsd_decay_samples")]
        pub(crate) lr_wsd_decay_iters: Option<u64>,
        /// Samples of that last phase
        #[arg(long, value_name = "SAMPLES")]
        pub(crate) lr_wsd_decay_samples: Option<u64>,
        /// Leave the checkpoint's schedule alone: all of it comes from these flags and their defaults
        #[arg(long = "override-opt_param-scheduler", alias = "override-opt-param-scheduler")]
        pub(crate) override_opt_param_scheduler: Option<bool>,
        /// Weight decay of matrices [default: 0.01]
        #[arg(long, value_name = "DECAY")]
        pub(crate) weight_decay: Option<f64>,
        /// How the weight decay rises over the run [default: constant, at --weight-decay]
        #[arg(long, value_parser = named::<WeightDecayStyle>(), value_name = "STYLE")]
        pub(crate) weight_decay_incr_style: Option<WeightDecayStyle>,
        /// Weight decay at the start of the run (required with another style than constant)
        #[arg(long, value_name = "DECAY")]
        pub(crate) start_weight_decay: Option<f64>,
        /// Weight decay at the end of the run, at least that at the start (required with another style than constant)
        #[arg(long, value_name = "DECAY")]
        pub(crate) end_weight_decay: Option<f64>,
        /// Decay of the first moment [default: 0.9]
        #[arg(long, value_name = "BETA")]
        pub(crate) adam_beta1: Option<f64>,
        /// Decay of the second moment [default: 0.999]
        #[arg(long, value_name = "BETA")]
        pub(crate) adam_beta2: Option<f64>,
        /// Added to the root of the second moment [default: 1e-8]
        #[arg(long, value_name = "EPSILON")]
        pub(crate) adam_eps: Option<f64>,
        /// Largest gradient norm; 0 clips nothing [default: 1]
        #[arg(long, value_name = "NORM")]
        pub(crate) clip_grad: Option<f64>,
        /// Seed of every random number of the run, below 2³² [default: 1234]
        #[arg(long, value_name = "SEED")]
        pub(crate) seed: Option<u32>,
        /// Order of sums: canonical (the same bits under every layout) or fast [default: the checkpoint's, else canonical]
        #[arg(long, value_parser = named::<NumericsArg>(), value_name = "MODE")]
        pub(crate) numerics: Option<NumericsArg>,
        /// Compute in bf16, with f32 masters of the weights [default: the checkpoint's, else off]
        #[arg(long, default_value_if("fp32", "true", "false"), conflicts_with = "fp32")]
        pub(crate) bf16: Option<bool>,
        /// Consecutive positions whose sum runs in one order, in tokens [default: min(64, max(1, g ÷ 16)), g the largest power of
        /// two that divides the sequence length; it must divide what a rank holds]
        #[arg(long, value_name = "TOKENS")]
        pub(crate) canonical_leaf_tokens: Option<usize>,
        /// Blocks of a sum that TP splits [default: the largest power of two up to 8 that divides query groups and widths]
        #[arg(long, value_name = "LEAVES")]
        pub(crate) canonical_tp_leaves: Option<usize>,
        /// How token losses become the loss of a step [default: token]
        #[arg(long, value_parser = named::<LossAverage>(), value_name = "AVERAGE")]
        pub(crate) loss_average: Option<LossAverage>,
        /// Minutes that ranks wait for one that is busy before the run is given up, at least 1 [default: 10]
        #[arg(long, value_name = "MINUTES")]
        pub(crate) distributed_timeout_minutes: Option<NonZeroU32>,
        /// Steps from one evaluation to the next; the last step is followed by one, too [default: 1000 if --eval-iters is given, else
        /// there are none]
        #[arg(long, value_name = "STEPS")]
        pub(crate) eval_interval: Option<u64>,
        /// Batches of an evaluation, at most all of the validation data; 0 evaluates nothing [default: 100 if --eval-interval is
        /// given]
        #[arg(long, value_name = "BATCHES")]
        pub(crate) eval_iters: Option<u64>,
        /// Samples of a batch of an evaluation [default: the global batch size; a multiple of the evaluation's micro batch size × batch
        /// parallel size]
        #[arg(long, value_name = "SAMPLES")]
        pub(crate) eval_global_batch_size: Option<u64>,
        /// Samples that a rank evaluates at a time [default: the micro batch size]
        #[arg(long, value_name = "SAMPLES")]
        pub(crate) eval_micro_batch_size: Option<u32>,
        /// Skipped steps in a row that end the run [default: 3]
        #[arg(long, value_name = "STEPS")]
        pub(crate) max_skipped_in_a_row: Option<u32>,
    }
}

/// Which [`Numerics`]; what canonical ones depend on are settings of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum NumericsArg {
    Canonical,
    Fast,
}

/// What ranks compute on, as it was said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DeviceArg {
    #[default]
    Cpu,
    Cuda,
}

/// `--ranks-as`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RanksAs {
    Threads,
    Processes,
}

impl TrainingArgs {
    /// The settings of a run, as flags would say them. Lengths are in samples.
    pub(super) fn of(config: &TrainConfig) -> Self {
        let TrainConfig {
            model: _,
            parallel,
            batch,
            asked_batch,
            optimizer,
            schedule,
            numerics,
            precision,
            seed,
            train_iters,
            loss_average,
            epoch_tail: _,
            max_skipped_in_a_row,
            iterations_to_skip,
            documents: _,
            evaluation,
        } = config;
        let batch = asked_batch.as_ref().unwrap_or(batch);
        let entry =
            |step: &BatchStep| format!("{}:{}", step.from.saturating_mul(parallel.seq_length()), step.size);
        let steps = batch.as_steps().map(|steps| steps.iter().map(entry).collect::<Vec<_>>().join(" "));
        let (warmup_samples, warmup_fraction) = match schedule.lr_warmup {
            Warmup::Length(samples) => (Some(samples), None),
            Warmup::Fraction(fraction) => (None, Some(fraction)),
        };
        let last_phase = match schedule.lr_decay_style {
            LrDecayStyle::Wsd { length, shape } => Some((length, shape)),
            _ => None,
        };
        let canonical = match numerics {
            Numerics::Canonical(canonical) => Some(canonical),
            Numerics::Fast => None,
        };
        let rises = schedule.weight_decay_style != WeightDecayStyle::Constant;
        let skipped: Vec<u64> = iterations_to_skip.iter().copied().collect();
        TrainingArgs {
            train_iters: Some(*train_iters),
            rampup_batch_size: batch.as_ramp().map(|ramp| vec![ramp.start, ramp.increment, ramp.samples]),
            step_batch_size_schedule: steps,
            iterations_to_skip: (!skipped.is_empty()).then_some(skipped),
            lr: Some(schedule.max_lr),
            min_lr: Some(schedule.min_lr),
            lr_decay_style: Some(schedule.lr_decay_style.into()),
            lr_decay_samples: Some(schedule.lr_decay),
            lr_warmup_samples: warmup_samples,
            lr_warmup_fraction: warmup_fraction,
            lr_warmup_init: Some(schedule.init_lr),
            lr_wsd_decay_style: last_phase.map(|(_, shape)| shape),
            lr_wsd_decay_samples: last_phase.map(|(length, _)| length),
            weight_decay: (!rises).then_some(schedule.end_weight_decay),
            weight_decay_incr_style: Some(schedule.weight_decay_style),
            start_weight_decay: rises.then_some(schedule.start_weight_decay),
            end_weight_decay: rises.then_some(schedule.end_weight_decay),
            adam_beta1: Some(optimizer.adam_beta1),
            adam_beta2: Some(optimizer.adam_beta2),
            adam_eps: Some(optimizer.adam_eps),
            clip_grad: Some(optimizer.clip_grad),
            seed: Some(*seed),
            numerics: Some(canonical.map_or(NumericsArg::Fast, |_| NumericsArg::Canonical)),
            bf16: Some(*precision == Precision::Bf16),
            canonical_leaf_tokens: canonical.map(|canonical| canonical.leaf_tokens),
            canonical_tp_leaves: canonical.map(|canonical| canonical.tp_leaves),
            loss_average: Some(*loss_average),
            max_skipped_in_a_row: Some(*max_skipped_in_a_row),
            decrease_batch_size_if_needed: Some(asked_batch.is_some()),
            eval_interval: evaluation.map(|evaluation| evaluation.interval),
            eval_iters: evaluation.map(|evaluation| evaluation.iters),
            eval_global_batch_size: evaluation.map(|evaluation| evaluation.batch.global_batch_size),
            eval_micro_batch_size: evaluation.map(|evaluation| evaluation.batch.micro_batch_size),
            ..TrainingArgs::default()
        }
    }

    /// The same with a plain schedule, on which nothing else depends.
    pub(crate) fn with_plain_schedule(self) -> Self {
        TrainingArgs {
            lr: Some(0.0),
            min_lr: None,
            lr_decay_style: None,
            lr_decay_iters: None,
            lr_decay_samples: None,
            lr_warmup_iters: None,
            lr_warmup_samples: None,
            lr_warmup_fraction: None,
            lr_warmup_init: None,
            lr_wsd_decay_style: None,
            lr_wsd_decay_iters: None,
            lr_wsd_decay_samples: None,
            weight_decay: None,
            weight_decay_incr_style: None,
            start_weight_decay: None,
            end_weight_decay: None,
            ..self
        }
    }

    /// How long ranks wait for one that is busy.
    pub(crate) fn timeout(&self) -> Duration {
        let minutes = self.distributed_timeout_minutes;
        minutes.map_or(Job::TIMEOUT, |minutes| Duration::from_secs(60 * u64::from(minutes.get())))
    }

    /// Takes out of `weaker` what is said here in other words: a length in steps, in samples or as a part, a weight decay that rises or
    /// does not, and what fast numerics do not have.
    pub(super) fn silence(&self, weaker: &mut Self) {
        if self.train_iters.is_some() || self.train_samples.is_some() {
            (weaker.train_iters, weaker.train_samples) = (None, None);
        }
        if self.lr_decay_iters.is_some() || self.lr_decay_samples.is_some() {
            (weaker.lr_decay_iters, weaker.lr_decay_samples) = (None, None);
        }
        if self.lr_warmup_iters.is_some()
            || self.lr_warmup_samples.is_some()
            || self.lr_warmup_fraction.is_some()
        {
            (weaker.lr_warmup_iters, weaker.lr_warmup_samples, weaker.lr_warmup_fraction) =
                (None, None, None);
        }
        if self.lr_wsd_decay_iters.is_some() || self.lr_wsd_decay_samples.is_some() {
            (weaker.lr_wsd_decay_iters, weaker.lr_wsd_decay_samples) = (None, None);
        }
        if self.weight_decay.is_some() || self.weight_decay_incr_style == Some(WeightDecayStyle::Constant) {
            (weaker.weight_decay_incr_style, weaker.start_weight_decay, weaker.end_weight_decay) =
                (None, None, None);
        } else if self.weight_decay_incr_style.is_some() {
            weaker.weight_decay = None;
        }
        if self.numerics == Some(NumericsArg::Fast) {
            (weaker.canonical_leaf_tokens, weaker.canonical_tp_leaves) = (None, None);
        }
    }

    /// The configuration, apart from what other tables say; `asked` samples make a step in the end, or as many of them as divide over
    /// the ranks. What goes on from `saved` keeps its schedule and numerics as far
    /// as nothing else is said.
    ///
    /// # Errors
    /// A setting that has no default and was not said, or was said twice.
    pub(super) fn resolve(
        &self,
        model: ModelConfig,
        parallel: ParallelConfig,
        asked: u64,
        epoch_tail: EpochTail,
        saved: Option<&TrainConfig>,
    ) -> anyhow::Result<TrainConfig> {
        let mut batch = self.batch(&parallel, asked)?;
        let mut asked_batch = None;
        if self.decrease_batch_size_if_needed == Some(true) {
            let lanes = parallel.layout().batch_parallel_size();
            let taken = batch.decreased(parallel.micro_batch_size(), lanes)?;
            asked_batch = Some(std::mem::replace(&mut batch, taken));
        }
        let train_samples =
            length(("train_iters", self.train_iters), ("train_samples", self.train_samples), &batch)?
                .ok_or_else(|| missing("train-iters"))?;
        let train_iters = batch.steps_within(train_samples);
        if train_iters == 0 {
            return Err(Refusal::new(
                "RM6003",
                format!(
                    "{} of training, less than a global batch of {}",
                    count(train_samples, "sample"),
                    batch.size_at(0)
                ),
                "give more --train-samples, or at least one of --train-iters",
            )
            .into());
        }
        let saved_schedule = saved.filter(|_| self.override_opt_param_scheduler != Some(true));
        let saved_schedule = saved_schedule.map(|saved| &saved.schedule);
        Ok(TrainConfig {
            numerics: self.numerics(
                &model,
                parallel.seq_length() as usize,
                saved.map(|saved| &saved.numerics),
            )?,
            schedule: self.schedule(train_samples, &batch, saved_schedule)?,
            optimizer: OptimizerConfig {
                adam_beta1: self.adam_beta1.unwrap_or(0.9),
                adam_beta2: self.adam_beta2.unwrap_or(0.999),
                adam_eps: self.adam_eps.unwrap_or(1e-8),
                clip_grad: self.clip_grad.unwrap_or(1.0),
            },
            precision: match self.bf16 {
                Some(true) => Precision::Bf16,
                Some(false) => Precision::Fp32,
                None => saved.map_or(Precision::Fp32, |saved| saved.precision),
            },
            seed: self.seed.unwrap_or(1234),
            train_iters,
            loss_average: self.loss_average.unwrap_or_default(),
            epoch_tail,
            max_skipped_in_a_row: self.max_skipped_in_a_row.unwrap_or(3),
            iterations_to_skip: self.iterations_to_skip.iter().flatten().copied().collect(),
            documents: None,
            evaluation: self.evaluation(&parallel),
            model,
            parallel,
            batch,
            asked_batch,
        })
    }

    /// When a run of `parallel` is evaluated; never where no flag asks for it.
    fn evaluation(&self, parallel: &ParallelConfig) -> Option<Evaluation> {
        if (self.eval_interval, self.eval_iters) == (None, None) || self.eval_iters == Some(0) {
            return None;
        }
        Some(Evaluation {
            interval: self.eval_interval.unwrap_or(1000),
            iters: self.eval_iters.unwrap_or(100),
            batch: EvaluationBatch {
                micro_batch_size: self.eval_micro_batch_size.unwrap_or(parallel.micro_batch_size()),
                global_batch_size: self.eval_global_batch_size.unwrap_or(parallel.global_batch_size()),
            },
        })
    }

    /// What is said goes over what was saved, and that over the defaults of canonical numerics.
    fn numerics(
        &self,
        model: &ModelConfig,
        seq_length: usize,
        saved: Option<&Numerics>,
    ) -> Result<Numerics, Refusal> {
        let (leaf, tp_leaves) = (self.canonical_leaf_tokens, self.canonical_tp_leaves);
        match (self.numerics, saved) {
            (Some(NumericsArg::Fast), _) | (None, Some(Numerics::Fast))
                if leaf.is_some() || tp_leaves.is_some() =>
            {
                let message = "leaves and blocks are set, which fast numerics do not have";
                let help = "leave out --canonical-leaf-tokens and --canonical-tp-leaves, or say --numerics canonical";
                Err(Refusal::new("RM6003", message, help))
            }
            (Some(NumericsArg::Fast), _) | (None, Some(Numerics::Fast)) => Ok(Numerics::Fast),
            (_, Some(Numerics::Canonical(saved))) => Ok(Numerics::Canonical(Canonical {
                leaf_tokens: leaf.unwrap_or(saved.leaf_tokens),
                tp_leaves: tp_leaves.unwrap_or(saved.tp_leaves),
                ..saved.clone()
            })),
            _ => Ok(Numerics::Canonical(Canonical::new(model, seq_length, leaf, tp_leaves))),
        }
    }

    /// Samples of each step, `end` in the end.
    fn batch(&self, parallel: &ParallelConfig, end: u64) -> anyhow::Result<BatchSchedule> {
        if let Some(schedule) = self.step_schedule(Some(parallel.seq_length()))? {
            return Ok(schedule);
        }
        Ok(match self.rampup_batch_size.as_deref() {
            None => BatchSchedule::constant(end)?,
            Some([start, increment, samples]) => {
                BatchSchedule::ramp(Ramp { start: *start, increment: *increment, samples: *samples, end })?
            }
            Some(other) => {
                let message = format!("`rampup_batch_size` has {} numbers", other.len());
                let help = "give three: samples of the first step, samples added at each level, samples until the end";
                return Err(Refusal::new("RM6003", message, help).into());
            }
        })
    }

    /// The schedule of batch sizes in steps, if one was said.
    ///
    /// # Errors
    /// A text that is none, and a batch size that is said beside it.
    pub(super) fn step_schedule(&self, seq_length: Option<u64>) -> anyhow::Result<Option<BatchSchedule>> {
        let Some(text) = &self.step_batch_size_schedule else { return Ok(None) };
        if self.rampup_batch_size.is_some() {
            return Err(said_twice("step_batch_size_schedule", "rampup_batch_size").into());
        }
        Ok(Some(BatchSchedule::parse(text, seq_length)?))
    }
}
