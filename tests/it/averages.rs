//! What a step's loss is divided by: valid tokens of the global batch, or samples, however the batch is cut.

use crate::support::{self, Layout, tiny_model};
use mesh::GroupTable;
use std::sync::Arc;
use train::backend::Device;
use train::comm::threads::{World, WorldOptions};
use train::config::{LossAverage, TrainConfig};
use train::data::sampler::RankBatch;
use train::model::MicroBatch;
use train::parallel::Comms;
use train::step::{StepOutcome, StepSettings, Trainer};

const SEQ: usize = 16;

fn config(micro_batch_size: u32) -> TrainConfig {
    let parallel = Layout { mbs: micro_batch_size, ..Layout::SINGLE }.parallel(SEQ as u64, 4).unwrap();
    let mut model = tiny_model(4);
    (model.hidden_dropout, model.attention_dropout) = (0.0, 0.0);
    support::config(model, parallel, 10)
}

/// Samples whose first `valid` tokens count, cut into micro-batches.
fn batch(valid: &[usize], micro_batch_size: usize, average: LossAverage) -> RankBatch {
    let mut count = 0;
    let mut micro_batches = Vec::new();
    for (at, samples) in valid.chunks(micro_batch_size).enumerate() {
        let mut micro_batch = MicroBatch::default();
        for (slot, valid) in samples.iter().enumerate() {
            let sample = at * micro_batch_size + slot;
            for position in 0..SEQ {
                let token = |at: usize| ((sample * 31 + at * 7) % 251) as i32;
                let weight = match average {
                    _ if position >= *valid => 0.0,
                    LossAverage::Token => 1.0,
                    LossAverage::Sample => 1.0 / *valid as f32,
                };
                micro_batch.tokens.push(token(position));
                micro_batch.targets.push(token(position + 1));
                micro_batch.weights.push(weight);
                micro_batch.positions.push(position as i32);
                micro_batch.samples.push(sample as i64);
            }
            count += match average {
                LossAverage::Token => *valid as u64,
                LossAverage::Sample => u64::from(*valid > 0),
            };
        }
        micro_batches.push(micro_batch);
    }
    RankBatch { micro_batches, count }
}

/// One step from scratch on one rank.
fn step(micro_batch_size: u32, batch: &RankBatch) -> StepOutcome {
    step_of(&config(micro_batch_size), std::slice::from_ref(batch))
}

/// One step from scratch on ranks that each have a batch.
fn step_of(config: &TrainConfig, batches: &[RankBatch]) -> StepOutcome {
    let table = Arc::new(GroupTable::new("model", config.parallel.layout()));
    let outcomes = World::run(batches.len() as u32, WorldOptions::default(), |context| {
        let groups = table.for_rank(context.rank());
        let comms = Comms::new(&groups, |kind| context.comm(&groups, kind)).unwrap();
        let mut trainer = Trainer::new(config, &groups, comms, &Device::Cpu).unwrap();
        let batch = &batches[context.rank().0 as usize];
        trainer.step(batch, &StepSettings { lr: 1e-2, weight_decay: 0.01, update: 1 })
    });
    let outcomes = outcomes.map_err(|error| error.first.reason.to_string()).unwrap();
    let bits = |of: &StepOutcome| (of.loss.to_bits(), of.grad_norm.to_bits(), of.applied);
    assert!(outcomes.iter().all(|outcome| bits(outcome) == bits(&outcomes[0])), "{outcomes:?}");
    outcomes[0]
}

/// Two tokens of one sample and six of another weigh as eight tokens, not as two means.
#[test]
fn token_averaging_divides_by_the_valid_tokens_of_the_whole_batch() {
    let of = |valid: &[usize]| step(1, &batch(valid, 1, LossAverage::Token)).loss;
    let (two, six) = (of(&[2, 0, 0, 0]), of(&[0, 6, 0, 0]));
    let both = of(&[2, 6, 0, 0]);
    // Sums in fixed point with 36 fraction bits; each mean is one rounding away from its sum.
    assert!((both - (2.0 * two + 6.0 * six) / 8.0).abs() < 1e-9, "{both} of {two} and {six}");
    assert!((both - (two + six) / 2.0).abs() > 1e-3, "the mean of means is another number: {two}, {six}");
}

#[test]
fn sample_averaging_is_the_mean_of_each_samples_mean() {
    let of = |valid: &[usize]| step(1, &batch(valid, 1, LossAverage::Sample)).loss;
    let (two, six) = (of(&[2, 0, 0, 0]), of(&[0, 6, 0, 0]));
    let both = of(&[2, 6, 0, 0]);
    // The weight 1/6 is rounded to f32.
    assert!((both - (two + six) / 2.0).abs() < 1e-6, "{both} of {two} and {six}");
}

#[test]
fn a_loss_does_not_depend_on_the_micro_batch_and_masked_samples_change_nothing() {
    for average in [LossAverage::Token, LossAverage::Sample] {
        let valid = [2, 6, 16, 0];
        let outcomes = [1, 2, 4].map(|size| step(size, &batch(&valid, size as usize, average)));
        assert_eq!(outcomes, [outcomes[0]; 3], "bits under micro-batches of 1, 2 and 4");
    }
}

/// The count is the global batch's, whoever has which samples, and one without a valid token adds nothing.
#[test]
fn a_rank_without_a_valid_token_adds_nothing_to_the_others() {
    let valid = [2, 0, 16, 6];
    for average in [LossAverage::Token, LossAverage::Sample] {
        let whole = batch(&valid, 1, average);
        let expected = step(1, &whole);
        assert!(expected.loss.is_finite() && expected.grad_norm > 0.0);
        for dp in [2, 4] {
            let parallel = Layout { dp, ..Layout::SINGLE }.parallel(SEQ as u64, 4).unwrap();
            let config = TrainConfig { parallel, ..config(1) };
            // Lanes take turns.
            let of_rank = |rank| {
                let own = whole.micro_batches.iter().skip(rank).step_by(dp as usize);
                let valid = own.clone().map(|own| own.weights.iter().filter(|weight| **weight > 0.0).count());
                let count =
                    valid.map(|valid| if average == LossAverage::Token { valid } else { valid.min(1) });
                RankBatch { count: count.sum::<usize>() as u64, micro_batches: own.cloned().collect() }
            };
            let batches: Vec<RankBatch> = (0..dp as usize).map(of_rank).collect();
            assert_eq!(step_of(&config, &batches), expected, "{average:?} over {dp}");
        }
    }
}

#[test]
fn a_batch_without_a_valid_token_has_no_loss_and_is_skipped() {
    let StepOutcome { loss, grad_norm, applied } = step(1, &batch(&[0, 0, 0, 0], 1, LossAverage::Token));
    assert!(loss.is_nan() && grad_norm.is_nan() && !applied);
}
