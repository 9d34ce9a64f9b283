//! One global order of samples: a permutation keyed by (seed, epoch). A position in it is all that a checkpoint keeps.

use crate::config::{EpochTail, LossAverage, TrainConfig};
use crate::data::tokens::{TokenFile, TokenFileError};
use crate::model::MicroBatch;
use crate::rng::DataOrder;
use mesh::{BatchSchedule, GroupKind, ParallelConfig, ProcessGroups};

/// The order of a data set's samples over a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampler {
    order: DataOrder,
    num_samples: u64,
    batch: BatchSchedule,
    tail: EpochTail,
}

/// One slot of a global batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Position in the run's order; also the sample's ordinal for random numbers.
    pub ordinal: u64,
    /// The sample that lies there.
    pub sample: u64,
    /// Whether it only fills the batch up and has no weight.
    pub is_filler: bool,
}

/// A data set that gives no batch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "an epoch of {num_samples} samples holds no global batch of {global_batch_size}, so `drop` would use none"
)]
pub struct EmptyEpoch {
    /// Samples of the data set.
    pub num_samples: u64,
    /// Samples of a global batch.
    pub global_batch_size: u64,
}

impl EmptyEpoch {
    /// `RM1026`.
    pub fn code(&self) -> &'static str {
        "RM1026"
    }

    /// How to mend it.
    pub fn help(&self) -> &'static str {
        "use --epoch-tail span or pad, or a smaller batch"
    }
}

impl Sampler {
    /// The order of `num_samples` samples under `seed`, handed out in global batches. A tail rule that counts in whole
    /// batches goes with a constant `batch`; [`TrainConfig::check`] refuses another.
    ///
    /// # Errors
    /// If the tail rule would drop everything.
    pub fn new(
        seed: u32,
        num_samples: u64,
        batch: &BatchSchedule,
        tail: EpochTail,
    ) -> Result<Self, EmptyEpoch> {
        let global_batch_size = batch.last_size();
        if tail == EpochTail::Drop && num_samples < global_batch_size {
            return Err(EmptyEpoch { num_samples, global_batch_size });
        }
        Ok(Sampler { order: DataOrder::new(seed, num_samples), num_samples, batch: batch.clone(), tail })
    }

    /// Samples of the data set: of an epoch, before the tail rule.
    pub fn num_samples(&self) -> u64 {
        self.num_samples
    }

    /// Slots of the global batch that starts when `consumed` samples were used.
    pub fn batch_size(&self, consumed: u64) -> u64 {
        self.batch.size_at(consumed)
    }

    /// Samples of an epoch that are used.
    fn epoch_len(&self) -> u64 {
        match self.tail {
            EpochTail::Span | EpochTail::Pad => self.num_samples,
            EpochTail::Drop => self.num_samples - self.num_samples % self.batch.last_size(),
        }
    }

    /// The sample at a position of the run's order: epoch by epoch, each a permutation of its own.
    pub fn sample_at(&self, position: u64) -> u64 {
        let (epoch, index) = (position / self.epoch_len(), position % self.epoch_len());
        self.order.sample(epoch * self.num_samples + index)
    }

    /// Real samples of the global batch that starts when `consumed` samples were used: what the counter advances by.
    pub fn batch_len(&self, consumed: u64) -> u64 {
        match self.tail {
            EpochTail::Span | EpochTail::Drop => self.batch_size(consumed),
            EpochTail::Pad => self.batch_size(consumed).min(self.num_samples - consumed % self.num_samples),
        }
    }

    /// The epoch that ends when `consumed` samples were used, and the samples of it that are never used; `None` if no epoch
    /// ends there or all of it was used.
    pub fn dropped_at(&self, consumed: u64) -> Option<(u64, u64)> {
        let unused = self.num_samples - self.epoch_len();
        let ends = consumed > 0 && consumed.is_multiple_of(self.epoch_len());
        (ends && unused > 0).then(|| (consumed / self.epoch_len() - 1, unused))
    }

    /// The slots of the global batch that starts when `consumed` samples were used, in order.
    pub fn batch(&self, consumed: u64) -> Vec<Slot> {
        let real = self.batch_len(consumed);
        (0..self.batch_size(consumed))
            .map(|slot| {
                let is_filler = slot >= real;
                let position = if is_filler { consumed } else { consumed + slot };
                Slot { ordinal: consumed + slot, sample: self.sample_at(position), is_filler }
            })
            .collect()
    }
}

/// What a rank reads of a data set.
#[derive(Debug)]
pub struct RankReader {
    config: ParallelConfig,
    groups: ProcessGroups,
    /// Positions in a sample that this rank holds, in its order.
    positions: Vec<u64>,
    loss_average: LossAverage,
    vocab_size: usize,
}

/// The micro-batches of one rank for one step, and its part of what the loss is divided by.
#[derive(Clone, Debug, PartialEq)]
pub struct RankBatch {
    /// One after another.
    pub micro_batches: Vec<MicroBatch>,
    /// Valid tokens, or under sample averaging valid samples, that this rank counts.
    pub count: u64,
}

impl RankReader {
    /// The reader of the rank behind `groups`: its lane is its position in `dp_gtp_remat`, its tokens those of its position
    /// in `cp`.
    pub fn new(config: &TrainConfig, groups: &ProcessGroups) -> Self {
        RankReader {
            config: config.parallel,
            groups: groups.clone(),
            positions: config.parallel.cp_tokens(groups).into_iter().flatten().collect(),
            loss_average: config.loss_average,
            vocab_size: config.model.vocab_size,
        }
    }

    /// The slots of a global batch that this rank's lane takes, micro-batch by micro-batch.
    pub fn own_slots<'a>(&self, batch: &'a [Slot]) -> impl Iterator<Item = &'a [Slot]> {
        let lanes = u64::from(self.config.layout().batch_parallel_size());
        let num_microbatches = batch.len() as u64 / (u64::from(self.config.micro_batch_size()) * lanes);
        (0..num_microbatches).map(|microbatch| {
            let own = self.config.samples(&self.groups, 0, microbatch);
            &batch[own.start as usize..own.end as usize]
        })
    }

    /// Reads this rank's part of a global batch.
    ///
    /// # Errors
    /// If the tokens cannot be read.
    pub fn read(&self, file: &TokenFile, batch: &[Slot]) -> Result<RankBatch, TokenFileError> {
        let seq_length = self.config.seq_length();
        // Of the ranks that share a sample's tokens, one counts the sample.
        let counts_samples = self.groups.position(GroupKind::Cp).0 == 0;
        let mut count = 0;
        let mut micro_batches = Vec::new();
        for slots in self.own_slots(batch) {
            let mut micro_batch = MicroBatch::default();
            for slot in slots {
                let tokens = file.read_sample(slot.sample, seq_length, self.vocab_size)?;
                let valid = if slot.is_filler { 0 } else { seq_length };
                let weight = match self.loss_average {
                    _ if slot.is_filler => 0.0,
                    LossAverage::Token => 1.0,
                    LossAverage::Sample => 1.0 / valid as f32,
                };
                count += match self.loss_average {
                    _ if slot.is_filler => 0,
                    LossAverage::Token => self.positions.len() as u64,
                    LossAverage::Sample => u64::from(counts_samples),
                };
                for position in &self.positions {
                    let at = *position as usize;
                    micro_batch.tokens.push(tokens[at]);
                    micro_batch.targets.push(tokens[at + 1]);
                    micro_batch.weights.push(weight);
                    micro_batch.positions.push(*position as i32);
                    micro_batch.samples.push(slot.ordinal as i64);
                }
            }
            micro_batches.push(micro_batch);
        }
        Ok(RankBatch { micro_batches, count })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mesh::{ConfiguredCp, GroupTable, LayoutSizes, ParallelLayout, ParallelSettings};
    use std::sync::Arc;

    const SEED: u32 = 1234;

    fn batch(size: u64) -> BatchSchedule {
        BatchSchedule::constant(size).unwrap()
    }

    /// Sample ids of each step's batch, fillers left out, until `steps` are made or `until` samples used; with the counter.
    fn ids(sampler: &Sampler, mut consumed: u64, steps: usize) -> (Vec<Vec<u64>>, u64) {
        let mut all = Vec::new();
        for _ in 0..steps {
            let real = |slot: &Slot| (!slot.is_filler).then_some(slot.sample);
            all.push(sampler.batch(consumed).iter().filter_map(real).collect());
            consumed += sampler.batch_len(consumed);
        }
        (all, consumed)
    }

    fn sorted(mut ids: Vec<u64>) -> Vec<u64> {
        ids.sort_unstable();
        ids
    }

    #[test]
    fn a_run_that_stops_inside_an_epoch_goes_on_where_it_was() {
        let sampler = Sampler::new(SEED, 20, &batch(4), EpochTail::Span).unwrap();
        let (straight, _) = ids(&sampler, 0, 15);
        let (first, consumed) = ids(&sampler, 0, 3);
        assert_eq!(consumed, 12);
        let (second, _) = ids(&sampler, consumed, 12);
        assert_eq!([first, second].concat(), straight);
        for epoch in straight.concat().chunks(20) {
            assert_eq!(sorted(epoch.to_vec()), (0..20).collect::<Vec<_>>());
        }
        assert_eq!(straight[0], [2, 0, 19, 18], "the order that is written down for seed 1234");
    }

    #[test]
    fn every_step_of_three_epochs_can_be_resumed_from() {
        let sampler = Sampler::new(SEED, 10, &batch(2), EpochTail::Span).unwrap();
        let (straight, _) = ids(&sampler, 0, 15);
        for at in 0..15 {
            assert_eq!(ids(&sampler, 2 * at as u64, 15 - at).0, straight[at..], "from step {at}");
        }
        assert_ne!(straight[..5], straight[5..10], "each epoch has an order of its own");
    }

    #[test]
    fn a_tail_is_dropped_filled_or_spanned() {
        let of = |tail| Sampler::new(SEED, 10, &batch(6), tail).unwrap();
        let (dropped, consumed) = ids(&of(EpochTail::Drop), 0, 3);
        assert_eq!((consumed, dropped.iter().map(Vec::len).collect::<Vec<_>>()), (18, vec![6, 6, 6]));
        assert_eq!(
            of(EpochTail::Drop).dropped_at(6),
            Some((0, 4)),
            "4 of the first epoch's samples are not used"
        );
        assert_eq!(of(EpochTail::Drop).dropped_at(3), None);

        let (padded, consumed) = ids(&of(EpochTail::Pad), 0, 6);
        assert_eq!((consumed, padded.iter().map(Vec::len).collect::<Vec<_>>()), (30, vec![6, 4, 6, 4, 6, 4]));
        let fillers = of(EpochTail::Pad).batch(6).iter().filter(|slot| slot.is_filler).count();
        assert_eq!(fillers, 2);

        let (spanned, consumed) = ids(&of(EpochTail::Span), 0, 5);
        assert_eq!(consumed, 30);
        let three_times: Vec<u64> = (0..10).flat_map(|id| [id; 3]).collect();
        assert_eq!(sorted(spanned.concat()), three_times);
        for epoch in
            [dropped.concat().chunks(6).collect::<Vec<_>>(), padded.concat().chunks(10).collect()].concat()
        {
            let mut distinct = sorted(epoch.to_vec());
            distinct.dedup();
            assert_eq!(distinct.len(), epoch.len(), "no sample twice in an epoch");
        }
    }

    #[test]
    fn a_rule_that_would_drop_everything_is_refused() {
        let error = Sampler::new(SEED, 5, &batch(6), EpochTail::Drop).unwrap_err();
        assert_eq!(error, EmptyEpoch { num_samples: 5, global_batch_size: 6 });
    }

    /// The ids that all lanes of a layout read in one step.
    fn lanes(slots: &[Slot], dp: u32, micro_batch_size: u32, cp: u32) -> Vec<Vec<u64>> {
        let layout = ParallelLayout::new(LayoutSizes {
            world_size: dp * cp,
            cp: ConfiguredCp(cp),
            ..ParallelLayout::single().sizes()
        })
        .unwrap();
        let parallel = ParallelConfig::new(ParallelSettings {
            layout,
            sequence_parallel: false,
            seq_length: 8,
            micro_batch_size,
            global_batch_size: slots.len() as u64,
        })
        .unwrap();
        let config = crate::config::tests::tiny(parallel);
        let table = Arc::new(GroupTable::new("model", &layout));
        let read = |rank: &mesh::Rank| {
            let reader = RankReader::new(&config, &table.for_rank(*rank));
            reader.own_slots(slots).flatten().map(|slot| slot.sample).collect()
        };
        table.ranks().iter().map(read).collect()
    }

    #[test]
    fn a_global_batch_is_the_same_set_however_it_is_divided() {
        let sampler = Sampler::new(SEED, 48, &batch(8), EpochTail::Span).unwrap();
        for step in 0..6 {
            let slots = sampler.batch(step * 8);
            let expected = sorted(slots.iter().map(|slot| slot.sample).collect());
            for (dp, micro_batch_size) in [(2, 2), (4, 1), (1, 8), (8, 1)] {
                let read = lanes(&slots, dp, micro_batch_size, 1);
                assert_eq!(sorted(read.concat()), expected, "DP {dp}, micro-batch {micro_batch_size}");
            }
            // Context parallel peers share a lane.
            let read = lanes(&slots, 2, 2, 2);
            assert_eq!(read[0], read[1]);
            assert_eq!(sorted([read[0].clone(), read[2].clone()].concat()), expected);
        }
    }
}
