//! Learning rate and weight decay over samples, as the flags of `[training]` and a saved schedule say together.

use super::resolve::{missing, said_twice};
use super::training::TrainingArgs;
use crate::report::Refusal;
use mesh::{
    BatchSchedule, LrDecayStyle, ScheduleConfig, ScheduleError, ScheduleUnit, Warmup, WeightDecayStyle,
    WsdShape,
};
use serde::{Deserialize, Serialize};

/// Which [`LrDecayStyle`]; length and shape of the last phase are settings of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DecayStyle {
    Constant,
    Linear,
    Cosine,
    InverseSquareRoot,
    #[serde(rename = "WSD")]
    Wsd,
}

impl From<LrDecayStyle> for DecayStyle {
    fn from(style: LrDecayStyle) -> Self {
        match style {
            LrDecayStyle::Constant => DecayStyle::Constant,
            LrDecayStyle::Linear => DecayStyle::Linear,
            LrDecayStyle::Cosine => DecayStyle::Cosine,
            LrDecayStyle::InverseSquareRoot => DecayStyle::InverseSquareRoot,
            LrDecayStyle::Wsd { .. } => DecayStyle::Wsd,
        }
    }
}

impl TrainingArgs {
    /// The schedule in samples, so that it does not change with the batch size.
    pub(super) fn schedule(
        &self,
        train_samples: u64,
        batch: &BatchSchedule,
        saved: Option<&ScheduleConfig>,
    ) -> anyhow::Result<ScheduleConfig> {
        let mut schedule = match saved {
            Some(saved) => saved.clone(),
            None => ScheduleConfig {
                unit: ScheduleUnit::Samples,
                train: train_samples,
                lr_decay: train_samples,
                lr_warmup: Warmup::Length(0),
                lr_decay_style: LrDecayStyle::Cosine,
                init_lr: 0.0,
                max_lr: self.lr.ok_or_else(|| missing("lr"))?,
                min_lr: 0.0,
                start_weight_decay: 0.01,
                end_weight_decay: 0.01,
                weight_decay_style: WeightDecayStyle::Constant,
            },
        };
        let in_samples = |iters, samples| length(iters, samples, batch);
        let decay =
            in_samples(("lr_decay_iters", self.lr_decay_iters), ("lr_decay_samples", self.lr_decay_samples))?;
        let warmup = in_samples(
            ("lr_warmup_iters", self.lr_warmup_iters),
            ("lr_warmup_samples", self.lr_warmup_samples),
        )?;
        let warmup = match (warmup, self.lr_warmup_fraction) {
            (Some(_), Some(_)) => {
                return Err(said_twice("lr_warmup_fraction", "another length of the warm-up").into());
            }
            (length, fraction) => length.map(Warmup::Length).or(fraction.map(Warmup::Fraction)),
        };
        schedule.lr_decay = decay.unwrap_or(schedule.lr_decay);
        schedule.lr_warmup = warmup.unwrap_or(schedule.lr_warmup);
        schedule.init_lr = self.lr_warmup_init.unwrap_or(schedule.init_lr);
        schedule.max_lr = self.lr.unwrap_or(schedule.max_lr);
        schedule.min_lr = self.min_lr.unwrap_or(schedule.min_lr);
        self.set_weight_decay(&mut schedule)?;
        let last_phase = in_samples(
            ("lr_wsd_decay_iters", self.lr_wsd_decay_iters),
            ("lr_wsd_decay_samples", self.lr_wsd_decay_samples),
        )?;
        // Iterations of the last phase are the last ones of the decay, where the batch may have grown.
        let before =
            self.lr_wsd_decay_iters.and_then(|last| batch.steps_within(schedule.lr_decay).checked_sub(last));
        let before = before.and_then(|iterations| batch.samples_after(iterations));
        let last_phase = before.map(|before| schedule.lr_decay - before).or(last_phase);
        schedule.lr_decay_style = self.decay_style(schedule.lr_decay_style, last_phase)?;
        Ok(mesh::Schedule::new(schedule, batch)?.into())
    }

    /// What is said of the weight decay, put into `schedule`: one number, or the two between which it rises.
    ///
    /// # Errors
    /// Both, or half of the second where `schedule` does not rise.
    fn set_weight_decay(&self, schedule: &mut ScheduleConfig) -> Result<(), Refusal> {
        let (start, end) = (self.start_weight_decay, self.end_weight_decay);
        let unsaid = if self.weight_decay.is_some() {
            WeightDecayStyle::Constant
        } else {
            schedule.weight_decay_style
        };
        let style = self.weight_decay_incr_style.unwrap_or(unsaid);
        if style == WeightDecayStyle::Constant {
            for (said, key) in [(start, "start_weight_decay"), (end, "end_weight_decay")] {
                if said.is_some() {
                    let message = format!("`{key}` is set, and the weight decay does not rise");
                    let help = "say how it does, --weight-decay-incr-style linear or cosine, or give --weight-decay alone";
                    return Err(Refusal::new("RM6003", message, help));
                }
            }
            let rises = schedule.weight_decay_style != WeightDecayStyle::Constant;
            let stored = (!rises).then_some(schedule.end_weight_decay);
            let decay = self.weight_decay.or(stored).ok_or_else(|| missing("weight-decay"))?;
            (schedule.start_weight_decay, schedule.end_weight_decay) = (decay, decay);
        } else {
            if self.weight_decay.is_some() {
                return Err(said_twice("weight_decay", "weight_decay_incr_style"));
            }
            let rises = schedule.weight_decay_style != WeightDecayStyle::Constant;
            let stored = |decay| rises.then_some(decay);
            let (from, to) = (stored(schedule.start_weight_decay), stored(schedule.end_weight_decay));
            schedule.start_weight_decay = start.or(from).ok_or_else(|| missing("start-weight-decay"))?;
            schedule.end_weight_decay = end.or(to).ok_or_else(|| missing("end-weight-decay"))?;
        }
        schedule.weight_decay_style = style;
        Ok(())
    }

    fn decay_style(&self, default: LrDecayStyle, last_phase: Option<u64>) -> Result<LrDecayStyle, Refusal> {
        let (default_length, default_shape) = match default {
            LrDecayStyle::Wsd { length, shape } => (Some(length), shape),
            _ => (None, WsdShape::Exponential),
        };
        Ok(match self.lr_decay_style.unwrap_or(default.into()) {
            DecayStyle::Constant => LrDecayStyle::Constant,
            DecayStyle::Linear => LrDecayStyle::Linear,
            DecayStyle::Cosine => LrDecayStyle::Cosine,
            DecayStyle::InverseSquareRoot => LrDecayStyle::InverseSquareRoot,
            DecayStyle::Wsd => LrDecayStyle::Wsd {
                length: last_phase.or(default_length).ok_or_else(|| missing("lr-wsd-decay-iters"))?,
                shape: self.lr_wsd_decay_style.unwrap_or(default_shape),
            },
        })
    }
}

/// A length in samples that was said in steps or in samples.
pub(super) fn length(
    (iters_key, iters): (&str, Option<u64>),
    (samples_key, samples): (&str, Option<u64>),
    batch: &BatchSchedule,
) -> anyhow::Result<Option<u64>> {
    Ok(match (iters, samples) {
        (Some(_), Some(_)) => return Err(said_twice(iters_key, samples_key).into()),
        (Some(iterations), None) => {
            let too_long = || ScheduleError::TooLong { iterations, batch: batch.clone() };
            Some(batch.samples_after(iterations).ok_or_else(too_long)?)
        }
        (None, samples) => samples,
    })
}
