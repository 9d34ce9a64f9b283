//! A world of rank threads, a tiny model, and everything that can be compared about a run.

use mesh::{
    BatchSchedule, ConfiguredCp, GroupTable, LayoutSizes, LrDecayStyle, ParallelConfig, ParallelLayout,
    ParallelSettings, ProcessGroups, RankOrder, Schedule, ScheduleConfig, ScheduleUnit, StateKind, Warmup,
    WeightDecayStyle,
};
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use train::backend::Device;
use train::comm::mutate::Mutated;
use train::comm::nccl::Links;
use train::comm::threads::{RankContext, World, WorldOptions};
use train::comm::{Comm, Site};
use train::config::{
    Activation, Biases, Canonical, EpochTail, LossAverage, ModelConfig, Normalization, Numerics,
    OptimizerConfig, PositionEmbedding, Precision, TrainConfig,
};
use train::data::sampler::RankReader;
use train::data::{Blend, Existing, TokenFile, TokenWriter, Tokenizer};
use train::model::MicroBatch;
use train::parallel::{Comms, StepError};
use train::state::{RunState, Streams};
use train::step::{StepOutcome, StepSettings, Trainer};

/// A layout by its free numbers: TP, SP, configured CP, GTP degree, sequence shards inside it, DP, micro-batch size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Layout {
    pub tp: u32,
    pub sp: bool,
    pub cp: u32,
    pub gtp: u32,
    pub nseq: u32,
    pub dp: u32,
    pub mbs: u32,
}

impl Layout {
    pub const SINGLE: Layout = Layout { tp: 1, sp: false, cp: 1, gtp: 1, nseq: 1, dp: 1, mbs: 1 };

    pub fn world_size(self) -> u32 {
        self.tp * self.cp * self.gtp * self.dp
    }

    /// Every layout of `ranks` ranks, whether or not a configuration admits it; SP also off where TP allows the choice.
    pub fn all(ranks: u32, micro_batches: &[u32]) -> Vec<Layout> {
        let divisors = |n: u32| (1..=n).filter(move |d| n.is_multiple_of(*d));
        let mut layouts = Vec::new();
        for tp in divisors(ranks) {
            for cp in divisors(ranks / tp) {
                for gtp in divisors(ranks / tp / cp) {
                    for nseq in divisors(gtp) {
                        for sp in [false, true] {
                            for mbs in micro_batches {
                                let dp = ranks / tp / cp / gtp;
                                layouts.push(Layout { tp, sp, cp, gtp, nseq, dp, mbs: *mbs });
                            }
                        }
                    }
                }
            }
        }
        layouts.retain(|layout| !(layout.sp && layout.tp == 1));
        layouts
    }

    pub fn parallel(
        self,
        seq_length: u64,
        global_batch_size: u64,
    ) -> Result<ParallelConfig, mesh::ParallelError> {
        let layout = ParallelLayout::new(LayoutSizes {
            world_size: self.world_size(),
            rank_offset: 0,
            tp: self.tp,
            pp: 1,
            cp: ConfiguredCp(self.cp),
            gtp: self.gtp,
            gtp_sequence_shards: self.nseq,
            order: RankOrder::GtpInsideCp,
        })
        .expect("divisors make a layout");
        ParallelConfig::new(ParallelSettings {
            layout,
            sequence_parallel: self.sp,
            seq_length,
            micro_batch_size: self.mbs,
            global_batch_size,
        })
    }
}

/// A tiny model that still has every kind of parameter: 2 layers, hidden 32, 8 heads of 8 in `groups` groups.
pub fn tiny_model(groups: usize) -> ModelConfig {
    ModelConfig {
        num_layers: 2,
        hidden_size: 32,
        ffn_hidden_size: 48,
        num_attention_heads: 8,
        num_query_groups: groups,
        kv_channels: 8,
        vocab_size: 257,
        tie_embeddings: false,
        normalization: Normalization::RmsNorm,
        norm_epsilon: 1e-5,
        position_embedding: PositionEmbedding::Rope,
        rotary_base: 10_000.0,
        activation: Activation::Swiglu,
        biases: Biases::None,
        hidden_dropout: 0.1,
        attention_dropout: 0.1,
        init_method_std: 0.02,
    }
}

/// The same, with the head tied to the word embedding.
pub fn tied_model(groups: usize) -> ModelConfig {
    ModelConfig { tie_embeddings: true, ..tiny_model(groups) }
}

/// A tiny GPT-2: LayerNorm, 100 learned positions, GELU by the hyperbolic tangent, biases, a tied head.
pub fn tiny_gpt2(groups: usize) -> ModelConfig {
    ModelConfig {
        normalization: Normalization::LayerNorm,
        position_embedding: PositionEmbedding::LearnedAbsolute { max_positions: 100 },
        activation: Activation::GeluTanh,
        biases: Biases::All,
        ..tied_model(groups)
    }
}

/// What neither Llama nor GPT-2 is: biases with SwiGLU and rotary positions, LayerNorm, a head of its own.
pub fn tiny_mixture(groups: usize) -> ModelConfig {
    ModelConfig { normalization: Normalization::LayerNorm, biases: Biases::All, ..tiny_model(groups) }
}

pub fn config(model: ModelConfig, parallel: ParallelConfig, train_iters: u64) -> TrainConfig {
    let numerics = Numerics::Canonical(Canonical::new(&model, parallel.seq_length() as usize, None, None));
    TrainConfig {
        schedule: schedule(train_iters),
        model,
        parallel,
        optimizer: OptimizerConfig { adam_beta1: 0.9, adam_beta2: 0.999, adam_eps: 1e-8, clip_grad: 1.0 },
        numerics,
        precision: Precision::Fp32,
        seed: 1234,
        train_iters,
        loss_average: LossAverage::Token,
        epoch_tail: EpochTail::Span,
        max_skipped_in_a_row: 3,
        batch: BatchSchedule::constant(parallel.global_batch_size()).unwrap(),
        asked_batch: None,
        iterations_to_skip: Default::default(),
        documents: None,
        evaluation: None,
    }
}

/// Constant decay of 0.01; the learning rate falls by a cosine from 1e-2 to 0.
pub fn schedule(train_iters: u64) -> ScheduleConfig {
    ScheduleConfig {
        unit: ScheduleUnit::Iterations,
        train: train_iters,
        lr_decay: train_iters,
        lr_warmup: Warmup::Length(0),
        lr_decay_style: LrDecayStyle::Cosine,
        init_lr: 0.0,
        max_lr: 1e-2,
        min_lr: 0.0,
        start_weight_decay: 0.01,
        end_weight_decay: 0.01,
        weight_decay_style: WeightDecayStyle::Constant,
    }
}

/// A token file of one document whose token i is `(7i² + 3i + ⌊i/8⌋) mod 251`.
pub fn token_file(folder: &Path, num_tokens: u64) -> Blend {
    let prefix = folder.join("tokens");
    let mut writer = TokenWriter::create(&prefix, Tokenizer::byte(), Existing::Keep).unwrap();
    writer.add_document((0..num_tokens).map(|i| ((i * i * 7 + i * 3 + (i >> 3)) % 251) as u32)).unwrap();
    writer.finish().unwrap();
    TokenFile::open(&prefix).unwrap().into()
}

/// A token file of documents of 1 to 37 tokens, each with an end token behind, 256.
pub fn packed_file(folder: &Path) -> Blend {
    let prefix = folder.join("packed");
    let mut writer = TokenWriter::create(&prefix, Tokenizer::byte(), Existing::Keep).unwrap();
    for document in 0..250u32 {
        let tokens = (0..1 + document * 7 % 37).map(|i| (document * 31 + i * i * 7 + i * 3) % 251);
        writer.add_document(tokens.chain([256])).unwrap();
    }
    writer.finish().unwrap();
    TokenFile::open(&prefix).unwrap().into()
}

/// `config` with leaves of so many tokens.
pub fn with_leaf(mut config: TrainConfig, leaf_tokens: usize) -> TrainConfig {
    let Numerics::Canonical(canonical) = &mut config.numerics else { panic!("canonical numerics") };
    canonical.leaf_tokens = leaf_tokens;
    config
}

/// Everything about some steps that must not depend on the layout.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// Sample ids of each step's global batch, as the lanes read them, sorted by slot.
    pub samples: Vec<Vec<u64>>,
    pub outcomes: Vec<StepOutcome>,
    /// Bytes of every logical tensor after the last step, by key; random streams are the layout's own.
    pub state: BTreeMap<String, Vec<u8>>,
}

/// What is done to a traced run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tracing {
    pub steps: u64,
    /// A call site that becomes the identity on all ranks.
    pub mutate: Option<Site>,
    /// The ordinal of a sample whose losses are not a number.
    pub poison: Option<u64>,
}

/// Trains from scratch on as many threads as the layout has ranks.
///
/// # Errors
/// If a rank fails, or ranks disagree on what a step came to.
pub fn trace(config: &TrainConfig, tokens: &Blend, tracing: Tracing) -> Result<Trace, String> {
    trace_on(&Device::Cpu, config, tokens, tracing)
}

/// The same on another device.
///
/// # Errors
/// See [`trace`].
pub fn trace_on(
    device: &Device,
    config: &TrainConfig,
    tokens: &Blend,
    tracing: Tracing,
) -> Result<Trace, String> {
    let layout = config.parallel.layout();
    let table = Arc::new(GroupTable::new("model", layout));
    let ranks = World::run(layout.world_size(), WorldOptions::default(), |context| {
        rank_trace(device, config, tokens, tracing, &table, context)
    });
    merge(ranks.map_err(|error| error.to_string())?)
}

/// What one rank saw and holds.
struct RankTrace {
    samples: Vec<Vec<(u64, u64)>>,
    outcomes: Vec<StepOutcome>,
    held: Vec<Held>,
}

fn rank_trace(
    device: &Device,
    config: &TrainConfig,
    tokens: &Blend,
    tracing: Tracing,
    table: &Arc<GroupTable>,
    context: &RankContext,
) -> Result<RankTrace, StepError> {
    let groups = table.for_rank(context.rank());
    let links = Links::connect(context, device, &groups, Comms::NEEDED)?;
    let comms = Comms::new(&groups, |kind| {
        let comm = links.comm(context, &groups, kind);
        match tracing.mutate {
            Some(site) => Rc::new(Mutated::new(comm, site)) as Rc<dyn Comm>,
            None => comm,
        }
    })
    .unwrap();
    let mut trainer = Trainer::new(config, &groups, comms, device).unwrap();
    let sampler = tokens.sampler(config).unwrap();
    let schedule = Schedule::new(config.schedule.clone(), &config.batch).unwrap();
    let reader = RankReader::new(config, &groups);
    let mut samples = Vec::new();
    let mut outcomes = Vec::new();
    let mut consumed = 0;
    for step in 0..tracing.steps {
        let slots = sampler.batch(consumed);
        samples.push(reader.own_slots(&slots).flatten().map(|slot| (slot.ordinal, slot.sample)).collect());
        let mut batch = reader.read(tokens, &slots).unwrap();
        for micro_batch in &mut batch.micro_batches {
            let MicroBatch { samples, weights, .. } = micro_batch;
            let poisoned = samples.iter().map(|sample| tracing.poison == Some(*sample as u64));
            weights
                .iter_mut()
                .zip(poisoned)
                .filter(|(_, poisoned)| *poisoned)
                .for_each(|(w, _)| *w = f32::NAN);
        }
        let settings = StepSettings {
            lr: schedule.lr(step * config.parallel.global_batch_size()),
            weight_decay: schedule.weight_decay(step * config.parallel.global_batch_size()),
            update: step + 1,
        };
        outcomes.push(trainer.step(&batch, &settings)?);
        consumed += sampler.batch_len(consumed);
    }
    Ok(RankTrace { samples, outcomes, held: held(&mut trainer, &groups) })
}

/// A box of a tensor that a rank holds.
struct Held {
    key: String,
    shape: mesh::Shape,
    region: mesh::Region,
    is_main: bool,
    /// Of one element.
    size_bytes: usize,
    bytes: Vec<u8>,
}

/// Every box that this rank holds, in every replica.
fn held(trainer: &mut Trainer, groups: &ProcessGroups) -> Vec<Held> {
    let state = RunState::new(trainer, "").unwrap();
    let streams = Streams::derive(0, groups, 0);
    let mut all = Vec::new();
    for (index, entry) in state.table().entries().iter().enumerate() {
        if entry.kind == StateKind::Rng {
            continue;
        }
        let (key, shape) = (entry.key.to_string(), entry.placement.shape());
        let shard = state.shard(index);
        for piece in &shard.pieces {
            let mut bytes = vec![0; piece.local.numel() as usize * entry.dtype.size_bytes()];
            trainer.read_state(&state, &streams, index, &piece.local, &mut bytes).unwrap();
            let (region, is_main) = (piece.region.clone(), shard.replica.is_main());
            let size_bytes = entry.dtype.size_bytes();
            all.push(Held { key: key.clone(), shape: shape.clone(), region, is_main, size_bytes, bytes });
        }
    }
    all
}

/// One trace from those of all ranks: logical tensors from their pieces, and outcomes that all ranks must agree on.
fn merge(ranks: Vec<RankTrace>) -> Result<Trace, String> {
    let mut trace = Trace { outcomes: ranks[0].outcomes.clone(), ..Trace::default() };
    for step in 0..ranks[0].samples.len() {
        let mut slots: Vec<(u64, u64)> = ranks.iter().flat_map(|rank| rank.samples[step].clone()).collect();
        slots.sort_unstable();
        slots.dedup();
        trace.samples.push(slots.into_iter().map(|(_, sample)| sample).collect());
    }
    for rank in &ranks {
        let bits = |outcomes: &[StepOutcome]| -> Vec<_> {
            outcomes.iter().map(|o| (o.loss.to_bits(), o.grad_norm.to_bits(), o.applied)).collect()
        };
        if bits(&rank.outcomes) != bits(&trace.outcomes) {
            return Err(format!("ranks disagree: {:?} and {:?}", rank.outcomes, trace.outcomes));
        }
    }
    // Main replicas make up the tensors, and every other replica must be the same.
    let mut held: Vec<Held> = ranks.into_iter().flat_map(|rank| rank.held).collect();
    held.sort_by_key(|held| !held.is_main);
    for Held { key, shape, region, is_main, size_bytes, bytes } in held {
        let len = shape.numel() as usize * size_bytes;
        let whole = trace.state.entry(key.clone()).or_insert_with(|| vec![0; len]);
        let mut at = 0;
        for run in region.runs(&shape) {
            let (own, len) = (&bytes[at..], (run.end - run.start) as usize * size_bytes);
            let place = &mut whole[run.start as usize * size_bytes..][..len];
            if is_main {
                place.copy_from_slice(&own[..len]);
            } else if place != &own[..len] {
                return Err(format!("replicas of `{key}` differ"));
            }
            at += len;
        }
    }
    Ok(trace)
}

/// Where `other` is not `expected`, bit for bit: samples, then losses and norms, then tensors.
pub fn difference(expected: &Trace, other: &Trace) -> Option<String> {
    if other.samples != expected.samples {
        return Some(format!("samples {:?} for {:?}", other.samples, expected.samples));
    }
    for (step, (a, b)) in expected.outcomes.iter().zip(&other.outcomes).enumerate() {
        let bits = |o: &StepOutcome| (o.loss.to_bits(), o.grad_norm.to_bits(), o.applied);
        if bits(a) != bits(b) {
            return Some(format!("step {step}: {b:?} for {a:?}"));
        }
    }
    let tensor = expected.state.iter().find(|(key, bytes)| other.state[*key] != **bytes);
    tensor.map(|(key, _)| format!("`{key}`"))
}
