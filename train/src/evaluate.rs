//! The validation loss: when it is computed, over which samples, and how.
//!
//! The samples are the first of the validation data's own order, the same every time: losses can be compared over a run, and between
//! runs of one seed. Of the run's state only the weights take part: no dropout, no gradients, no random streams.

use crate::config::{EpochTail, TrainConfig};
use crate::data::Blend;
use crate::data::sampler::{RankReader, Sampler, SamplerError};
use crate::run::RunError;
use crate::step::Trainer;
use mesh::{BatchSchedule, ParallelConfig, ParallelError, ParallelSettings, ProcessGroups};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, Ordering};

/// When evaluations are made, and over how much.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Iterations from one to the next; the last iteration is followed by one, too.
    pub interval: u64,
    /// Batches of each, at most.
    pub iters: u64,
    /// How much of it a batch is. A layout that stood here, too, is left out.
    #[serde(alias = "parallel")]
    pub batch: EvaluationBatch,
}

/// The batch of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvaluationBatch {
    /// Samples that a rank evaluates at a time.
    pub micro_batch_size: u32,
    /// Samples of a batch.
    pub global_batch_size: u64,
}

impl Evaluation {
    /// A run's layout with the batch of its evaluations.
    ///
    /// # Errors
    /// A batch that does not divide over the ranks.
    pub fn parallel(&self, run: &ParallelConfig) -> Result<ParallelConfig, ParallelError> {
        let EvaluationBatch { micro_batch_size, global_batch_size } = self.batch;
        let settings = ParallelSettings::from(*run);
        ParallelConfig::new(ParallelSettings { micro_batch_size, global_batch_size, ..settings })
    }

    /// Whether one follows iteration `iteration` of `train_iters`.
    pub fn is_due(&self, iteration: u64, train_iters: u64) -> bool {
        iteration > 0 && (iteration.is_multiple_of(self.interval) || iteration == train_iters)
    }

    /// Samples of one, of `tokens` in the order of `sampler`.
    pub(crate) fn num_samples(&self, tokens: &Blend, sampler: &Sampler) -> u64 {
        let asked = self.iters.saturating_mul(self.batch.global_batch_size);
        if tokens.has_shares() { asked } else { asked.min(sampler.num_samples()) }
    }

    /// The order in which evaluations of `validation` read it. Files without shares are read once at most: the last batch of all their
    /// samples is filled up with samples of no weight.
    ///
    /// # Errors
    /// Files without a sample.
    pub(crate) fn sampler(&self, config: &TrainConfig, validation: &Blend) -> Result<Sampler, SamplerError> {
        let tail = if validation.has_shares() { EpochTail::Span } else { EpochTail::Pad };
        let batch = BatchSchedule::constant(self.batch.global_batch_size).expect("a batch size is above 0");
        validation.sampler_of(config.parallel.seq_length(), config.seed, &batch, tail)
    }
}

/// What an evaluation came to, equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluated {
    /// Average loss; not a number if a loss was not finite or out of range, or no token has a weight.
    pub loss: f64,
    /// Samples that it is of.
    pub samples: u64,
}

/// One rank's part of a run's evaluations.
pub(crate) struct Evaluator<'a> {
    settings: Evaluation,
    parallel: ParallelConfig,
    /// Samples of an evaluation.
    num_samples: u64,
    loss_bits: u32,
    tokens: &'a Blend,
    sampler: Sampler,
    reader: RankReader,
}

impl<'a> Evaluator<'a> {
    /// Evaluations of `config` over `tokens`, in the order of [`Evaluation::sampler`], on the rank behind `groups`.
    pub(crate) fn new(
        config: &TrainConfig,
        settings: Evaluation,
        tokens: &'a Blend,
        sampler: Sampler,
        groups: &ProcessGroups,
    ) -> Self {
        let num_samples = settings.num_samples(tokens, &sampler);
        let parallel = settings.parallel(&config.parallel).expect("the configuration was checked");
        let of_evaluations = TrainConfig { parallel, ..config.clone() };
        let (_, loss_bits) = config.numerics.loss();
        let reader = RankReader::new(&of_evaluations, groups);
        Evaluator { settings, parallel, num_samples, loss_bits, tokens, sampler, reader }
    }

    /// Whether one follows iteration `iteration` of `train_iters`.
    pub(crate) fn is_due(&self, iteration: u64, train_iters: u64) -> bool {
        self.settings.is_due(iteration, train_iters)
    }

    /// Computes the loss; `None` if any rank was asked to stop meanwhile. Collective.
    ///
    /// # Errors
    /// A failed rank or device, or unreadable tokens.
    pub(crate) fn run(
        &self,
        trainer: &mut Trainer,
        stop: &AtomicBool,
    ) -> Result<Option<Evaluated>, RunError> {
        // Sums of batches are exact, so that their sum does not depend on how the samples are divided.
        let (mut sum, mut count, mut samples) = (0i128, 0u64, 0u64);
        let mut in_range = true;
        while samples < self.num_samples {
            let slots = self.sampler.batch(samples);
            let batch = self.reader.read(self.tokens, &slots)?;
            let part = trainer.evaluate(&batch, &self.parallel)?;
            sum += i128::from(part.fixed_point);
            count += part.count;
            samples += self.sampler.batch_len(samples);
            let own = [u8::from(stop.load(Ordering::Relaxed)), u8::from(part.in_range)];
            let all = trainer.comms().tp_dp_cp.gather_bytes("evaluate.agree", &own)?;
            if all.iter().any(|rank| rank[0] == 1) {
                return Ok(None);
            }
            in_range &= all.iter().all(|rank| rank[1] == 1);
        }
        let mean = sum as f64 / (1u64 << self.loss_bits) as f64 / count as f64;
        Ok(Some(Evaluated { loss: if in_range { mean } else { f64::NAN }, samples }))
    }
}
