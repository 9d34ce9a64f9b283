//! Documents that share a sample: with positions, attention and targets of their own each is what it is in a sample of its own.

use crate::support::{self, Layout, tiny_gpt2, tiny_model};
use mesh::{GroupTable, Rank};
use std::sync::Arc;
use train::backend::Device;
use train::comm::threads::{World, WorldOptions};
use train::config::{Documents, ModelConfig, PositionEmbedding, TrainConfig};
use train::data::sampler::{RankBatch, RankReader};
use train::data::{Blend, Existing, TokenFile, TokenWriter, Tokenizer};
use train::parallel::Comms;
use train::step::{StepOutcome, StepSettings, Trainer};

const SEQ_LENGTH: usize = 32;
const END: u32 = 256;
const ALL: Documents =
    Documents { end_token: END, reset_positions: true, reset_attention: true, mask_loss: true };

fn config(model: &ModelConfig, documents: Option<Documents>) -> TrainConfig {
    let parallel = Layout::SINGLE.parallel(SEQ_LENGTH as u64, 1).unwrap();
    let mut model = model.clone();
    (model.hidden_dropout, model.attention_dropout) = (0.0, 0.0);
    TrainConfig { documents, ..support::config(model, parallel, 10) }
}

/// The first sample of a token file of one document.
fn sample(config: &TrainConfig, tokens: &[u32]) -> RankBatch {
    let folder = tempfile::tempdir().unwrap();
    let prefix = folder.path().join("tokens");
    let mut writer = TokenWriter::create(&prefix, Tokenizer::byte(), Existing::Keep).unwrap();
    writer.add_document(tokens.iter().copied()).unwrap();
    writer.finish().unwrap();
    let tokens: Blend = TokenFile::open(&prefix).unwrap().into();
    let table = Arc::new(GroupTable::new("model", config.parallel.layout()));
    let reader = RankReader::new(config, &table.for_rank(Rank(0)));
    reader.read(&tokens, &tokens.sampler(config).unwrap().batch(0)).unwrap()
}

fn step(config: &TrainConfig, batch: &RankBatch) -> StepOutcome {
    let table = Arc::new(GroupTable::new("model", config.parallel.layout()));
    let outcomes = World::run(1, WorldOptions::default(), |context| {
        let groups = table.for_rank(Rank(0));
        let comms = Comms::new(&groups, |kind| context.comm(&groups, kind)).unwrap();
        let mut trainer = Trainer::new(config, &groups, comms, &Device::Cpu).unwrap();
        trainer.step(batch, &StepSettings { lr: 1e-2, weight_decay: 0.0, update: 1 })
    });
    outcomes.map_err(|error| error.first.reason.to_string()).unwrap()[0]
}

/// Tokens of a document, its end token included.
fn document(seed: u32, len: u32) -> Vec<u32> {
    (0..len - 1).map(|at| (seed + at * at * 7 + at * 3) % 251).chain([END]).collect()
}

/// Two documents and the beginning of a third in one sample, and each alone with nothing behind it that counts.
#[test]
fn a_packed_document_has_the_loss_that_it_has_alone() {
    for model in [tiny_model(4), tiny_gpt2(8)] {
        let config = config(&model, Some(ALL));
        let documents = [document(1, 9), document(90, 13), document(170, 12)];
        let packed = sample(&config, &documents.concat());
        // One target less for each end token.
        assert_eq!(packed.count, SEQ_LENGTH as u64 - 2);
        let packed = step(&config, &packed).loss;
        let alone: f64 = (documents.iter().zip([8, 12, 10]))
            .map(|(document, targets)| {
                let padded: Vec<u32> = document.iter().copied().chain([0; 2 * SEQ_LENGTH]).collect();
                let mut batch = sample(&config, &padded[..SEQ_LENGTH + 1]);
                let weights = &mut batch.micro_batches[0].weights;
                weights[targets..].fill(0.0);
                batch.count = targets as u64;
                step(&config, &batch).loss * targets as f64
            })
            .sum();
        // Sums of 30 losses of about 6, of numbers rounded to f32.
        assert!((packed - alone / 30.0).abs() < 1e-6, "{packed} for {}", alone / 30.0);
        // Each of the three matters, but that rotary positions only count between tokens that see each other.
        for one in 0..3 {
            let mut flags = [true; 3];
            flags[one] = false;
            let [reset_positions, reset_attention, mask_loss] = flags;
            let without = Documents { end_token: END, reset_positions, reset_attention, mask_loss };
            let without = TrainConfig { documents: Some(without), ..config.clone() };
            let other = step(&without, &sample(&without, &documents.concat())).loss;
            let matters = reset_positions || model.position_embedding != PositionEmbedding::Rope;
            assert_eq!((packed - other).abs() > 1e-5, matters, "{one}: {packed} and {other}");
        }
    }
}
