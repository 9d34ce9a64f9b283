//! Makes an optimizer step for every line on its standard input and answers with the loss: `cpu_step.py` runs it beside PyTorch
//! and reads the CPU clocks of both.
//!
//! Arguments: `llama` or `gpt2`, then `fast`, `canonical` and the tokens of a leaf, or `products` for the matrix products of a
//! fast step alone.

use mesh::{
    BatchSchedule, DType, GroupTable, LrDecayStyle, ParallelConfig, ParallelLayout, ParallelSettings, Rank,
    ScheduleConfig, ScheduleUnit, Warmup, WeightDecayStyle,
};
use std::io::BufRead;
use std::sync::Arc;
use train::backend::cpu::CpuBackend;
use train::backend::{Backend, Buffers, Device, Lifetime, Op, Recorder, View};
use train::comm::threads::{RankContext, World, WorldOptions};
use train::config::{
    Activation, Biases, Canonical, EpochTail, LossAverage, ModelConfig, Normalization, Numerics,
    OptimizerConfig, PositionEmbedding, Precision, TrainConfig,
};
use train::data::sampler::RankBatch;
use train::model::MicroBatch;
use train::parallel::{Comms, StepError};
use train::step::{StepSettings, Trainer};

const SEQ: usize = 256;
const BATCH: usize = 4;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let (model, words) = match words[..] {
        ["llama", ref words @ ..] => (llama(), words),
        ["gpt2", ref words @ ..] => (gpt2(), words),
        _ => panic!("`llama` or `gpt2`: {args:?}"),
    };
    let numerics = match words {
        ["fast"] => Numerics::Fast,
        ["canonical", leaf] => {
            let leaf = leaf.parse().expect("tokens of a leaf");
            Numerics::Canonical(Canonical::new(&model, SEQ, Some(leaf), None))
        }
        ["products"] => return serve_products(&model),
        _ => panic!("`fast`, `canonical` and the tokens of a leaf, or `products`: {args:?}"),
    };
    let config = config(model, numerics);
    config.check().expect("a model that can be trained");
    let table = Arc::new(GroupTable::new("model", config.parallel.layout()));
    World::run(1, WorldOptions::default(), |context| serve(&config, &table, context)).expect("one rank");
}

fn llama() -> ModelConfig {
    ModelConfig {
        num_layers: 4,
        hidden_size: 256,
        ffn_hidden_size: 688,
        num_attention_heads: 4,
        num_query_groups: 4,
        kv_channels: 64,
        vocab_size: 257,
        tie_embeddings: false,
        normalization: Normalization::RmsNorm,
        norm_epsilon: 1e-5,
        position_embedding: PositionEmbedding::Rope,
        rotary_base: 10_000.0,
        activation: Activation::Swiglu,
        biases: Biases::None,
        hidden_dropout: 0.0,
        attention_dropout: 0.0,
        init_method_std: 0.02,
    }
}

fn gpt2() -> ModelConfig {
    ModelConfig {
        ffn_hidden_size: 1024,
        vocab_size: 1024,
        tie_embeddings: true,
        normalization: Normalization::LayerNorm,
        position_embedding: PositionEmbedding::LearnedAbsolute { max_positions: SEQ },
        activation: Activation::GeluTanh,
        biases: Biases::All,
        ..llama()
    }
}

fn config(model: ModelConfig, numerics: Numerics) -> TrainConfig {
    let parallel = ParallelConfig::new(ParallelSettings {
        layout: ParallelLayout::single(),
        sequence_parallel: false,
        seq_length: SEQ as u64,
        micro_batch_size: BATCH as u32,
        global_batch_size: BATCH as u64,
    });
    TrainConfig {
        model,
        parallel: parallel.expect("one rank takes the whole batch"),
        batch: BatchSchedule::constant(BATCH as u64).expect("samples"),
        optimizer: OptimizerConfig { adam_beta1: 0.9, adam_beta2: 0.999, adam_eps: 1e-8, clip_grad: 1.0 },
        schedule: ScheduleConfig {
            unit: ScheduleUnit::Iterations,
            train: 1,
            lr_decay: 1,
            lr_warmup: Warmup::Length(0),
            lr_decay_style: LrDecayStyle::Constant,
            init_lr: 0.0,
            max_lr: 1e-3,
            min_lr: 0.0,
            start_weight_decay: 0.01,
            end_weight_decay: 0.01,
            weight_decay_style: WeightDecayStyle::Constant,
        },
        numerics,
        precision: Precision::Fp32,
        seed: 1234,
        train_iters: 1,
        loss_average: LossAverage::Token,
        epoch_tail: EpochTail::Span,
        max_skipped_in_a_row: 1,
        iterations_to_skip: Default::default(),
        asked_batch: None,
        documents: None,
        evaluation: None,
    }
}

fn serve(config: &TrainConfig, table: &Arc<GroupTable>, context: &RankContext) -> Result<(), StepError> {
    let groups = table.for_rank(Rank(0));
    let comms = Comms::new(&groups, |kind| context.comm(&groups, kind)).expect("all groups");
    let mut trainer = Trainer::new(config, &groups, comms, &Device::Cpu).expect("a model that divides");
    let (tokens, vocab) = (SEQ * BATCH, config.model.vocab_size as i32);
    let token = |at: usize| (at * at * 7 + at * 3 + (at >> 3)) as i32 % vocab;
    let batch = RankBatch {
        micro_batches: vec![MicroBatch {
            tokens: (0..tokens).map(token).collect(),
            targets: (1..=tokens).map(token).collect(),
            weights: vec![1.0; tokens],
            positions: (0..tokens).map(|at| (at % SEQ) as i32).collect(),
            samples: (0..tokens).map(|at| (at / SEQ) as i64).collect(),
            ..MicroBatch::default()
        }],
        count: tokens as u64,
    };
    println!("remesh");
    for (step, _) in std::io::stdin().lock().lines().enumerate() {
        let settings = StepSettings { lr: 1e-3, weight_decay: 0.01, update: step as u64 + 1 };
        println!("{}", trainer.step(&batch, &settings)?.loss);
    }
    Ok(())
}

/// Makes the matrix products of a step, without anything between them, for every line.
fn serve_products(model: &ModelConfig) {
    let (m, h, f) = (SEQ * BATCH, model.hidden_size, model.ffn_hidden_size);
    let (layers, heads, d) = (model.num_layers, model.num_attention_heads, model.kv_channels);
    let (inputs, vocab) = (model.activation.inputs(), model.vocab_size.next_multiple_of(128));
    // How often, and m × k times k × n.
    let mut products = Vec::new();
    for (count, inputs, outputs) in
        [(layers, h, 3 * h), (layers, h, h), (layers, h, inputs * f), (layers, f, h), (1, h, vocab)]
    {
        let of_output_input_and_weight = [(m, inputs, outputs), (m, outputs, inputs), (outputs, m, inputs)];
        products.extend(of_output_input_and_weight.map(|shape| (count, shape)));
    }
    // A tile of queries over the keys that it sees: scores and output; in backward scores again, their gradient, and those of
    // queries, keys and values.
    for keys in (64..=SEQ).step_by(64) {
        let tiles = layers * heads * BATCH;
        products.extend([(3 * tiles, (64, d, keys)), (2 * tiles, (64, keys, d)), (2 * tiles, (keys, 64, d))]);
    }
    let mut buffers = Buffers::default();
    let mut declare = |name: &str, len| buffers.declare(name, Lifetime::Persistent, DType::F32, 1, len);
    let [x, w, out] = ["x", "w", "out"].map(|name| declare(name, m * 2 * f));
    let mut backend = CpuBackend::new(Recorder::new(&buffers).plan());
    println!("remesh");
    for _ in std::io::stdin().lock().lines() {
        for (count, (m, k, n)) in &products {
            let view = |whole: View, rows, cols| whole.col_range(0, rows * cols).reshaped(rows, cols);
            let (x, w, out) = (view(x, *m, *k), view(w, *n, *k), view(out, *m, *n));
            for _ in 0..*count {
                let product = Op::Linear { x, w, bias: None, out, accumulate: false };
                backend.run(product).expect("host memory");
            }
        }
        println!("0");
    }
}
