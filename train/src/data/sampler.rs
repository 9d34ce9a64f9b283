//! One global order of samples: a permutation keyed by (seed, epoch). A position in it is all that a checkpoint keeps.

use crate::config::{Documents, EpochTail, LossAverage, TrainConfig};
use crate::data::blend::{Blend, Turns};
use crate::data::tokens::TokenFileError;
use crate::model::MicroBatch;
use crate::rng::DataOrder;
use mesh::{BatchSchedule, GroupKind, ParallelConfig, ProcessGroups};
use std::sync::Arc;

/// The order of a data set's samples over a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampler {
    order: Order,
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

/// A data set that gives no order of samples.
#[derive(Debug, thiserror::Error)]
pub enum SamplerError {
    /// Tokens that hold no sample.
    #[error(transparent)]
    Tokens(#[from] TokenFileError),
    /// `drop` would use nothing.
    #[error(
        "an epoch of {num_samples} samples holds no global batch of {global_batch_size}, so `drop` would use none"
    )]
    EmptyEpoch {
        /// Samples of the data set.
        num_samples: u64,
        /// Samples of a global batch.
        global_batch_size: u64,
    },
    /// Files that are read in shares end their epochs at different times.
    #[error("epoch tail `{0}` counts epochs of all data, and files with weights have an epoch each")]
    TailOfShares(EpochTail),
}

impl SamplerError {
    /// Code of the error.
    pub fn code(&self) -> &'static str {
        match self {
            SamplerError::Tokens(error) => error.code(),
            SamplerError::EmptyEpoch { .. } => "RM1026",
            SamplerError::TailOfShares(_) => "RM6003",
        }
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            SamplerError::Tokens(error) => error.help(),
            SamplerError::EmptyEpoch { .. } => "use --epoch-tail span or pad, or a smaller batch".into(),
            SamplerError::TailOfShares(_) => "use --epoch-tail span, or leave out the weights".into(),
        }
    }
}

/// Which sample lies where.
#[derive(Clone, Debug, PartialEq)]
enum Order {
    /// One permutation of all samples an epoch.
    Joined(DataOrder),
    /// Files take turns; each has its order, and its first sample behind those of the files before it.
    ByTurns { turns: Arc<Turns>, files: Vec<FileOrder> },
}

#[derive(Clone, Debug, PartialEq)]
struct FileOrder {
    first_sample: u64,
    num_samples: u64,
    order: DataOrder,
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
    ) -> Result<Self, SamplerError> {
        let global_batch_size = batch.last_size();
        if tail == EpochTail::Drop && num_samples < global_batch_size {
            return Err(SamplerError::EmptyEpoch { num_samples, global_batch_size });
        }
        let order = Order::Joined(DataOrder::new(seed, num_samples));
        Ok(Sampler { order, num_samples, batch: batch.clone(), tail })
    }

    /// The order of the samples of files of so many samples, by turns: turn j of a file is the sample at position j of the file's
    /// own order, epoch by epoch.
    ///
    /// # Errors
    /// If the tail rule counts epochs.
    pub(super) fn by_turns(
        seed: u32,
        sizes: &[u64],
        turns: Arc<Turns>,
        batch: &BatchSchedule,
        tail: EpochTail,
    ) -> Result<Self, SamplerError> {
        if tail != EpochTail::Span {
            return Err(SamplerError::TailOfShares(tail));
        }
        let mut first_sample = 0;
        let files = sizes.iter().zip(0..).map(|(num_samples, file)| {
            let order = DataOrder::of_file(file, seed, *num_samples);
            first_sample += num_samples;
            FileOrder { first_sample: first_sample - num_samples, num_samples: *num_samples, order }
        });
        let order = Order::ByTurns { files: files.collect(), turns };
        Ok(Sampler { order, num_samples: first_sample, batch: batch.clone(), tail })
    }

    /// Epochs that have ended, or more, when `consumed` samples were used; of files with shares those of any of them.
    pub fn epochs_within(&self, consumed: u64) -> u64 {
        let shortest = match &self.order {
            Order::Joined(_) => Some(self.num_samples),
            Order::ByTurns { files, .. } => files.iter().map(|file| file.num_samples).min(),
        };
        consumed / shortest.expect("at least one file")
    }

    /// Samples of all files: of an epoch, before the tail rule.
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

    /// The sample at a position of the run's order: epoch by epoch, of all data or of each file, each a permutation of its own.
    pub fn sample_at(&self, position: u64) -> u64 {
        match &self.order {
            Order::Joined(order) => {
                let (epoch, index) = (position / self.epoch_len(), position % self.epoch_len());
                order.sample(epoch * self.num_samples + index)
            }
            Order::ByTurns { turns, files } => {
                let (file, turn) = turns.at(position);
                files[file].first_sample + files[file].order.sample(turn)
            }
        }
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
    documents: Option<Documents>,
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
            documents: config.documents,
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

    /// Whether what follows a token is a target.
    fn has_target(&self, token: i32) -> bool {
        self.documents.is_none_or(|documents| !documents.mask_loss || token as u32 != documents.end_token)
    }

    /// Reads this rank's part of a global batch.
    ///
    /// # Errors
    /// If the tokens cannot be read.
    pub fn read(&self, data: &Blend, batch: &[Slot]) -> Result<RankBatch, TokenFileError> {
        let seq_length = self.config.seq_length();
        // Of the ranks that share a sample's tokens, one counts the sample.
        let counts_samples = self.groups.position(GroupKind::Cp).0 == 0;
        let mut count = 0;
        let mut micro_batches = Vec::new();
        for slots in self.own_slots(batch) {
            let mut micro_batch = MicroBatch::default();
            for slot in slots {
                let tokens = data.read_sample(slot.sample, seq_length, self.vocab_size)?;
                let inputs = &tokens[..seq_length as usize];
                let is_target = |at: usize| !slot.is_filler && self.has_target(inputs[at]);
                let weight = match self.loss_average {
                    LossAverage::Token => 1.0,
                    LossAverage::Sample => {
                        let valid = (0..inputs.len()).filter(|at| is_target(*at)).count();
                        count += u64::from(counts_samples && valid > 0);
                        1.0 / valid as f32
                    }
                };
                let starts = self.documents.map(|documents| document_starts(inputs, documents.end_token));
                for position in &self.positions {
                    let at = *position as usize;
                    micro_batch.tokens.push(tokens[at]);
                    micro_batch.targets.push(tokens[at + 1]);
                    micro_batch.weights.push(if is_target(at) { weight } else { 0.0 });
                    micro_batch.positions.push(*position as i32);
                    micro_batch.samples.push(slot.ordinal as i64);
                    if let Some(starts) = &starts {
                        micro_batch.document_positions.push(*position as i32 - starts[at]);
                        micro_batch.document_starts.push(starts[at]);
                    }
                    count += u64::from(self.loss_average == LossAverage::Token && is_target(at));
                }
            }
            micro_batches.push(micro_batch);
        }
        Ok(RankBatch { micro_batches, count })
    }
}

/// Position of the first token of each token's document, whose end token belongs to it.
fn document_starts(tokens: &[i32], end_token: u32) -> Vec<i32> {
    let mut start = 0;
    let starts = tokens.iter().zip(1..).map(|(token, next)| {
        let own = start;
        if *token as u32 == end_token {
            start = next;
        }
        own
    });
    starts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mesh::{ConfiguredCp, GroupTable, LayoutSizes, ParallelLayout, ParallelSettings};

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
        assert!(matches!(error, SamplerError::EmptyEpoch { num_samples: 5, global_batch_size: 6 }));
    }

    /// What Megatron-Core makes of the same tokens, for each of the three flags.
    #[test]
    fn documents_of_a_sample_have_their_positions_keys_and_targets() {
        let end = 256;
        let tokens = [65, 66, end, 67, 68, end, 69];
        let starts = document_starts(&tokens, end as u32);
        assert_eq!(starts, [0, 0, 0, 3, 3, 3, 6]);
        let positions: Vec<i32> = starts.iter().zip(0..).map(|(start, position)| position - start).collect();
        assert_eq!(positions, [0, 1, 2, 0, 1, 2, 0]);
        assert_eq!(document_starts(&[end, end, 1], end as u32), [0, 1, 2]);
    }

    #[test]
    fn files_with_shares_take_turns_and_each_has_its_epochs() {
        let turns = Arc::new(Turns::new(&[3, 1]));
        let sampler =
            Sampler::by_turns(SEED, &[5, 20], Arc::clone(&turns), &batch(4), EpochTail::Span).unwrap();
        let (straight, consumed) = ids(&sampler, 0, 20);
        assert_eq!((consumed, sampler.epochs_within(consumed)), (80, 16));
        for at in 0..20 {
            assert_eq!(ids(&sampler, 4 * at as u64, 20 - at).0, straight[at..], "from step {at}");
        }
        let (small, large): (Vec<u64>, Vec<u64>) = straight.concat().into_iter().partition(|id| *id < 5);
        assert_eq!(sorted(large.clone()), (5..25).collect::<Vec<_>>(), "20 of 80 turns");
        assert_eq!(small.len(), 60);
        for epoch in small.chunks(5) {
            assert_eq!(sorted(epoch.to_vec()), [0, 1, 2, 3, 4]);
        }
        // As a single file has it, and the other file in an order of its own.
        let alone = Sampler::new(SEED, 5, &batch(4), EpochTail::Span).unwrap();
        assert_eq!(small, (0..60).map(|position| alone.sample_at(position)).collect::<Vec<_>>());
        let alone = Sampler::new(SEED, 20, &batch(4), EpochTail::Span).unwrap();
        assert_ne!(large, (0..20).map(|position| 5 + alone.sample_at(position)).collect::<Vec<_>>());
        for tail in [EpochTail::Drop, EpochTail::Pad] {
            let refused = Sampler::by_turns(SEED, &[5, 20], Arc::clone(&turns), &batch(4), tail);
            assert!(matches!(refused, Err(SamplerError::TailOfShares(_))));
        }
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
