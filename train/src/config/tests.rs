use super::*;
use mesh::{LrDecayStyle, ScheduleUnit, Warmup, WeightDecayStyle};

/// A tiny model under `parallel`, with dropout.
pub(crate) fn tiny(parallel: ParallelConfig) -> TrainConfig {
    let model = ModelConfig {
        num_layers: 2,
        hidden_size: 32,
        ffn_hidden_size: 48,
        num_attention_heads: 4,
        num_query_groups: 4,
        kv_channels: 8,
        vocab_size: 257,
        tie_embeddings: false,
        normalization: Normalization::default(),
        norm_epsilon: 1e-5,
        position_embedding: PositionEmbedding::default(),
        rotary_base: 10_000.0,
        activation: Activation::default(),
        biases: Biases::default(),
        hidden_dropout: 0.1,
        attention_dropout: 0.1,
        init_method_std: 0.02,
    };
    TrainConfig {
        numerics: Numerics::Canonical(Canonical::new(&model, parallel.seq_length() as usize, None, None)),
        precision: Precision::Fp32,
        model,
        parallel,
        optimizer: OptimizerConfig { adam_beta1: 0.9, adam_beta2: 0.999, adam_eps: 1e-8, clip_grad: 1.0 },
        schedule: ScheduleConfig {
            unit: ScheduleUnit::Iterations,
            train: 10,
            lr_decay: 10,
            lr_warmup: Warmup::Length(0),
            lr_decay_style: LrDecayStyle::Constant,
            init_lr: 0.0,
            max_lr: 1e-3,
            min_lr: 0.0,
            start_weight_decay: 0.0,
            end_weight_decay: 0.0,
            weight_decay_style: WeightDecayStyle::Constant,
        },
        seed: 1234,
        train_iters: 10,
        loss_average: LossAverage::Token,
        epoch_tail: EpochTail::Span,
        max_skipped_in_a_row: 3,
        batch: BatchSchedule::constant(parallel.global_batch_size()).unwrap(),
        asked_batch: None,
        iterations_to_skip: BTreeSet::new(),
        documents: None,
        evaluation: None,
    }
}

fn tiny_of_one() -> TrainConfig {
    tiny(
        ParallelConfig::new(mesh::ParallelSettings {
            layout: mesh::ParallelLayout::single(),
            sequence_parallel: false,
            seq_length: 32,
            micro_batch_size: 1,
            global_batch_size: 8,
        })
        .unwrap(),
    )
}

#[test]
fn numbers_without_a_meaning_are_refused_with_what_is_valid() {
    type Edit = fn(&mut TrainConfig, f64);
    let edits: [(&str, Edit, &[f64], &[f64]); 6] = [
        (
            "adam-beta1",
            |c, x| c.optimizer.adam_beta1 = x,
            &[0.0, 0.9],
            &[-0.1, 1.0, 0.999_999_999_999, f64::NAN],
        ),
        (
            "adam-eps",
            |c, x| c.optimizer.adam_eps = x,
            &[1e-8, 1e-38 * 1.2],
            &[0.0, -1e-8, 1e-60, f64::INFINITY],
        ),
        ("clip-grad", |c, x| c.optimizer.clip_grad = x, &[0.0, 1.0], &[-1.0, 1e39, f64::NAN]),
        ("rotary-base", |c, x| c.model.rotary_base = x, &[1e4], &[0.0, -1.0, f64::INFINITY]),
        ("lr", |c, x| c.schedule.max_lr = x, &[0.0, 1e30], &[1e39]),
        ("hidden-dropout", |c, x| c.model.hidden_dropout = x as f32, &[0.0, 0.5], &[1.0, -0.1, f64::NAN]),
    ];
    for (name, edit, valid, invalid) in edits {
        for (values, is_valid) in [(valid, true), (invalid, false)] {
            for value in values {
                let mut config = tiny_of_one();
                edit(&mut config, *value);
                match config.check() {
                    Ok(()) => assert!(is_valid, "{name} {value}"),
                    Err(ConfigError::Range { what, .. }) => {
                        assert!(!is_valid && what == name, "{name} {value}")
                    }
                    Err(error) => panic!("{name} {value}: {error}"),
                }
            }
        }
    }
}

#[test]
fn what_cannot_fit_is_counted_without_overflow() {
    let mut config = tiny_of_one();
    config.check_memory(1 << 30).unwrap();
    let wanted = |config: &TrainConfig| match config.check_memory(0).unwrap_err() {
        ConfigError::Memory { wanted, .. } => wanted,
        error => panic!("{error}"),
    };
    config.model.vocab_size = 100_000_000_000;
    // Two matrices of 32 columns, 6 + 8 bytes an element.
    assert_eq!(wanted(&config) / 100_000_000_000, 2 * 32 * (6 + 8));
    config.model.hidden_size = 1 << 62;
    assert_eq!(wanted(&config), u64::MAX);
}

#[test]
fn what_cannot_be_counted_is_refused_and_not_a_panic_later() {
    let refusal = |edit: &dyn Fn(&mut TrainConfig)| {
        let mut config = tiny_of_one();
        edit(&mut config);
        config.check().unwrap_err().to_string()
    };
    assert_eq!(tiny_of_one().check(), Ok(()));
    let learned = PositionEmbedding::LearnedAbsolute { max_positions: 31 };
    let positions = refusal(&|config| config.model.position_embedding = learned);
    assert_eq!(positions, "`seq-length` 32 is more than 31");
    let layers = refusal(&|config| config.model.num_layers = 1025);
    assert_eq!(layers, "`num-layers` 1025 is more than 1024");
    let heads = refusal(&|config| config.model.num_attention_heads = 260);
    assert_eq!(heads, "`num-attention-heads` 260 is more than 256");
    let iterations = refusal(&|config| config.train_iters = 1 << 32);
    assert_eq!(iterations, "`train-iters` 4294967296 is more than 4294967295");
}
