//! Learning rate and weight decay as functions of the samples behind them, the same bits on every machine.
//!
//! The formulas, their order of operations and the names are those of Megatron's parameter scheduler.

use crate::batch::BatchSchedule;
use serde::{Deserialize, Serialize};
use std::f64::consts::PI;

/// A schedule as it was said.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScheduleConfig {
    /// What the lengths below count.
    pub unit: ScheduleUnit,
    /// Length of the run; weight decay reaches its end there.
    pub train: u64,
    /// Where the learning rate has come down to its minimum.
    pub lr_decay: u64,
    /// How long the learning rate rises first.
    pub lr_warmup: Warmup,
    /// How it comes down.
    pub lr_decay_style: LrDecayStyle,
    /// Learning rate at the start of the warm-up.
    pub init_lr: f64,
    /// Highest learning rate.
    pub max_lr: f64,
    /// Lowest learning rate after the warm-up.
    pub min_lr: f64,
    /// Weight decay at the start.
    pub start_weight_decay: f64,
    /// Weight decay at the end.
    pub end_weight_decay: f64,
    /// How it gets there.
    pub weight_decay_style: WeightDecayStyle,
}

/// What lengths of a schedule count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleUnit {
    /// Optimizer steps of one global batch each.
    Iterations,
    /// Samples.
    Samples,
}

/// Length of the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Warmup {
    /// In the unit of the schedule.
    Length(u64),
    /// A part of the decay, at least 0 and below 1.
    Fraction(f64),
}

/// How the learning rate comes down after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LrDecayStyle {
    /// It does not.
    Constant,
    /// In a straight line.
    Linear,
    /// In half a cosine wave.
    Cosine,
    /// As 1 ÷ √samples, from the end of the warm-up on.
    InverseSquareRoot,
    /// Warm-up, stable, decay: at the maximum until the last phase.
    Wsd {
        /// Length of the last phase, in the unit of the schedule.
        length: u64,
        /// Its shape.
        shape: WsdShape,
    },
}

/// How the learning rate comes down over the part y of the last phase of [`LrDecayStyle::Wsd`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WsdShape {
    /// 1 − y.
    Linear,
    /// (cos πy + 1) ÷ 2.
    Cosine,
    /// 2 · 0.5^y − 1.
    Exponential,
    /// 1 − √y.
    MinusSqrt,
}

/// How weight decay gets from its start to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightDecayStyle {
    /// Both are the same.
    Constant,
    /// In a straight line.
    Linear,
    /// In half a cosine wave.
    Cosine,
}

/// A checked schedule in samples; what a checkpoint stores.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "ScheduleConfig", into = "ScheduleConfig")]
pub struct Schedule {
    in_samples: ScheduleConfig,
}

/// Why numbers make no schedule.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ScheduleError {
    /// A stored schedule counts iterations, whose size it does not say.
    #[error("the stored schedule counts iterations, not samples")]
    NotInSamples,
    /// The run or the decay has no length.
    #[error("`{name}` is 0; a schedule has a length")]
    NoLength {
        /// Which length.
        name: &'static str,
    },
    /// More samples than can be counted.
    #[error("{iterations} iterations of {batch} samples are too many to count")]
    TooLong {
        /// Iterations asked for.
        iterations: u64,
        /// Samples of each.
        batch: BatchSchedule,
    },
    /// The warm-up does not end before the decay does.
    #[error("the warm-up of {warmup} samples does not end before the decay of {decay} samples does")]
    Warmup {
        /// Samples of the warm-up.
        warmup: f64,
        /// Samples until the end of the decay.
        decay: u64,
    },
    /// The last phase is longer than the whole decay.
    #[error("the last phase of {length} samples is longer than the decay of {decay} samples")]
    Wsd {
        /// Samples of the last phase.
        length: u64,
        /// Samples until the end of the decay.
        decay: u64,
    },
    /// Learning rates out of order.
    #[error("learning rates must be 0 ≤ min {min_lr} ≤ max {max_lr} and 0 ≤ init {init_lr} ≤ max {max_lr}")]
    LearningRates {
        /// At the start of the warm-up.
        init_lr: f64,
        /// Highest.
        max_lr: f64,
        /// Lowest.
        min_lr: f64,
    },
    /// Weight decay that falls, is negative, or changes although it is constant.
    #[error("weight decay must be 0 ≤ start {start} ≤ end {end}, and both the same for a constant one")]
    WeightDecay {
        /// At the start.
        start: f64,
        /// At the end.
        end: f64,
    },
}

impl ScheduleError {
    /// `RM6010`.
    pub fn code(&self) -> &'static str {
        "RM6010"
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            ScheduleError::NotInSamples => {
                "the checkpoint is of another program; `--override-opt_param-scheduler` takes the schedule from flags"
            }
            ScheduleError::NoLength { .. } => "give a run of at least one step",
            ScheduleError::TooLong { .. } => "give fewer iterations, or a smaller global batch",
            ScheduleError::Warmup { .. } => "give a shorter warm-up, or a longer decay",
            ScheduleError::Wsd { .. } => "give a shorter last phase, or a longer decay",
            ScheduleError::LearningRates { .. } => "check `--lr`, `--min-lr` and `--lr-warmup-init`: finite, at least 0",
            ScheduleError::WeightDecay { .. } => "check `--weight-decay`: finite, at least 0",
        }
        .to_owned()
    }
}

impl Schedule {
    /// The schedule of `config` where the global batches have the sizes of `batch`: a length in iterations is the samples
    /// behind the run when they are done, so that the rate gets to its end however the batch grows.
    ///
    /// # Errors
    /// Lengths that are zero, cannot be counted or do not fit into one another, and rates out of order.
    pub fn new(config: ScheduleConfig, batch: &BatchSchedule) -> Result<Self, ScheduleError> {
        let in_samples = |length: u64| match config.unit {
            ScheduleUnit::Samples => Ok(length),
            ScheduleUnit::Iterations => (batch.samples_after(length))
                .ok_or_else(|| ScheduleError::TooLong { iterations: length, batch: batch.clone() }),
        };
        let lr_decay = in_samples(config.lr_decay)?;
        Schedule::try_from(ScheduleConfig {
            unit: ScheduleUnit::Samples,
            train: in_samples(config.train)?,
            lr_decay,
            lr_warmup: match config.lr_warmup {
                Warmup::Length(length) => Warmup::Length(in_samples(length)?),
                fraction => fraction,
            },
            lr_decay_style: match config.lr_decay_style {
                LrDecayStyle::Wsd { length, shape } => {
                    // The last phase counts back from the end; one that is longer than all stays so, and is refused.
                    let length = match config.lr_decay.checked_sub(length) {
                        Some(before) => lr_decay - in_samples(before)?,
                        None => in_samples(length)?,
                    };
                    LrDecayStyle::Wsd { length, shape }
                }
                style => style,
            },
            ..config
        })
    }

    /// The learning rate of a step, from the `samples` of all successful steps before it.
    pub fn lr(&self, samples: u64) -> f64 {
        let ScheduleConfig { init_lr, max_lr, min_lr, lr_decay, .. } = self.in_samples;
        let at = samples as f64;
        let warmup = warmup_samples(&self.in_samples);
        if warmup > 0.0 && at <= warmup {
            return init_lr + (max_lr - init_lr) * at / warmup;
        }
        let decayed = (at - warmup) / (lr_decay as f64 - warmup);
        let coefficient = match self.in_samples.lr_decay_style {
            LrDecayStyle::Constant => return max_lr,
            _ if samples > lr_decay => return min_lr,
            LrDecayStyle::InverseSquareRoot => {
                return min_lr.max(max_lr * warmup.max(1.0).sqrt() / at.max(1.0).sqrt());
            }
            LrDecayStyle::Linear => 1.0 - decayed,
            LrDecayStyle::Cosine => half_cosine(decayed),
            LrDecayStyle::Wsd { length, .. } if samples <= lr_decay - length => 1.0,
            LrDecayStyle::Wsd { length, shape } => {
                let decayed = (samples - (lr_decay - length)) as f64 / length as f64;
                match shape {
                    WsdShape::Linear => 1.0 - decayed,
                    WsdShape::Cosine => half_cosine(decayed),
                    WsdShape::Exponential => 2.0 * libm::pow(0.5, decayed) - 1.0,
                    WsdShape::MinusSqrt => 1.0 - decayed.sqrt(),
                }
            }
        };
        min_lr + coefficient * (max_lr - min_lr)
    }

    /// The weight decay of a step, from the `samples` of all successful steps before it.
    pub fn weight_decay(&self, samples: u64) -> f64 {
        let ScheduleConfig { train, start_weight_decay: start, end_weight_decay: end, .. } = self.in_samples;
        if samples > train {
            return end;
        }
        let done = samples as f64 / train as f64;
        let coefficient = match self.in_samples.weight_decay_style {
            WeightDecayStyle::Constant => return end,
            WeightDecayStyle::Linear => done,
            WeightDecayStyle::Cosine => half_cosine(1.0 - done),
        };
        start + coefficient * (end - start)
    }
}

/// From 1 at 0 to 0 at 1. The crate's cosine, because the system's differs from machine to machine in the last bit.
fn half_cosine(x: f64) -> f64 {
    0.5 * (libm::cos(PI * x) + 1.0)
}

fn warmup_samples(in_samples: &ScheduleConfig) -> f64 {
    match in_samples.lr_warmup {
        Warmup::Length(length) => length as f64,
        Warmup::Fraction(fraction) => fraction * in_samples.lr_decay as f64,
    }
}

impl TryFrom<ScheduleConfig> for Schedule {
    type Error = ScheduleError;

    fn try_from(config: ScheduleConfig) -> Result<Self, ScheduleError> {
        let ScheduleConfig { unit, train, lr_decay: decay, init_lr, max_lr, min_lr, .. } = config;
        if unit != ScheduleUnit::Samples {
            return Err(ScheduleError::NotInSamples);
        }
        if let Some((name, _)) = [("train", train), ("lr_decay", decay)].into_iter().find(|(_, n)| *n == 0) {
            return Err(ScheduleError::NoLength { name });
        }
        // What is not a number fails each of these comparisons.
        let warmup = warmup_samples(&config);
        if !(0.0 <= warmup && warmup < decay as f64) {
            return Err(ScheduleError::Warmup { warmup, decay });
        }
        if let LrDecayStyle::Wsd { length, .. } = config.lr_decay_style
            && length > decay
        {
            return Err(ScheduleError::Wsd { length, decay });
        }
        if !(0.0 <= min_lr && min_lr <= max_lr && 0.0 <= init_lr && init_lr <= max_lr && max_lr.is_finite()) {
            return Err(ScheduleError::LearningRates { init_lr, max_lr, min_lr });
        }
        let (start, end) = (config.start_weight_decay, config.end_weight_decay);
        let may_change = config.weight_decay_style != WeightDecayStyle::Constant;
        if !(0.0 <= start && start <= end && end.is_finite() && (may_change || start == end)) {
            return Err(ScheduleError::WeightDecay { start, end });
        }
        Ok(Schedule { in_samples: config })
    }
}

impl From<Schedule> for ScheduleConfig {
    fn from(schedule: Schedule) -> ScheduleConfig {
        schedule.in_samples
    }
}
