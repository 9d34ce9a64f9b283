//! What must match between the run that saved and the one that goes on.

use crate::config::TrainConfig;
use crate::data::Sampler;
use crate::resume::{ALGORITHM, ResumeError};
use ckpt::{Commit, fnv1a};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A setting that differs between checkpoint and run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Its name, as `--allow-change` takes it.
    pub field: &'static str,
    /// In the checkpoint.
    pub saved: String,
    /// In this run.
    pub wanted: String,
    /// Whether it may change.
    pub overridable: bool,
}

/// Everything that must match between a checkpoint's run and one that goes on from it, and does not.
/// Layout, `train_iters`, intervals and paths may change without a word.
pub fn compare(
    saved: &TrainConfig,
    saved_data: &DataState,
    wanted: &TrainConfig,
    data: &DataState,
) -> Vec<Difference> {
    let (a, b) = (saved, wanted);
    let (m, n) = (&a.model, &b.model);
    let mut differences = Vec::new();
    let mut row = |field, overridable, saved: &dyn ToString, wanted: &dyn ToString| {
        let (saved, wanted) = (saved.to_string(), wanted.to_string());
        if saved != wanted {
            differences.push(Difference { field, saved, wanted, overridable });
        }
    };
    row("num-layers", false, &m.num_layers, &n.num_layers);
    row("hidden-size", false, &m.hidden_size, &n.hidden_size);
    row("ffn-hidden-size", false, &m.ffn_hidden_size, &n.ffn_hidden_size);
    row("num-attention-heads", false, &m.num_attention_heads, &n.num_attention_heads);
    row("num-query-groups", false, &m.num_query_groups, &n.num_query_groups);
    row("kv-channels", false, &m.kv_channels, &n.kv_channels);
    row("vocab-size", false, &m.vocab_size, &n.vocab_size);
    row("tie-embeddings", false, &m.tie_embeddings, &n.tie_embeddings);
    row("normalization", false, &m.normalization, &n.normalization);
    row("position-embedding-type", false, &m.position_embedding, &n.position_embedding);
    row("activation", false, &m.activation, &n.activation);
    row("biases", false, &m.biases, &n.biases);
    row("norm-epsilon", true, &m.norm_epsilon, &n.norm_epsilon);
    row("rotary-base", true, &m.rotary_base, &n.rotary_base);
    row("hidden-dropout", true, &m.hidden_dropout, &n.hidden_dropout);
    row("attention-dropout", true, &m.attention_dropout, &n.attention_dropout);
    row("seq-length", true, &a.parallel.seq_length(), &b.parallel.seq_length());
    row("global-batch-size", true, &a.batch, &b.batch);
    row("seed", true, &a.seed, &b.seed);
    row("data", true, saved_data, data);
    row("epoch-tail", true, &a.epoch_tail, &b.epoch_tail);
    row("loss-average", true, &a.loss_average, &b.loss_average);
    row("optimizer", true, &a.optimizer, &b.optimizer);
    row("numerics", true, &a.numerics, &b.numerics);
    row("precision", false, &a.precision, &b.precision);
    differences
}

/// The run that wrote a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct SavedRun {
    /// Its configuration.
    pub config: TrainConfig,
    /// Its samples.
    pub data: DataState,
    /// Its schedule's counter.
    pub scheduler: SchedulerState,
}

impl SavedRun {
    /// Reads what `checkpoint.json` says of the run.
    ///
    /// # Errors
    /// A field that is not that of a training run.
    pub fn of(commit: &Commit) -> Result<Self, ResumeError> {
        let field = |field| move |source| ResumeError::Field { field, source };
        Ok(SavedRun {
            config: serde_json::from_value(commit.run.config.clone()).map_err(field("config"))?,
            data: serde_json::from_value(commit.run.data.clone()).map_err(field("data"))?,
            scheduler: serde_json::from_value(commit.run.scheduler.clone()).map_err(field("scheduler"))?,
        })
    }
}

/// What a checkpoint's `data` says about the samples.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataState {
    /// Samples of an epoch.
    pub num_samples: u64,
    /// Tokens of a sample.
    pub seq_length: u64,
    /// FNV-1a 64 of the `.idx`, hexadecimal.
    pub index_hash: String,
    /// FNV-1a 64 over the sample ids of the next global batch, hexadecimal.
    pub next_batch: String,
    /// Samples of that batch.
    pub next_batch_size: u64,
}

/// What decides which samples there are.
impl fmt::Display for DataState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} samples of index {}", self.num_samples, self.index_hash)
    }
}

impl DataState {
    /// What `sampler` will give after `consumed` samples.
    pub fn new(
        config: &TrainConfig,
        index_hash: u64,
        sampler: &Sampler,
        num_samples: u64,
        consumed: u64,
    ) -> Self {
        DataState {
            num_samples,
            seq_length: config.parallel.seq_length(),
            index_hash: format!("{index_hash:016x}"),
            next_batch: next_batch_hash(sampler, consumed),
            next_batch_size: sampler.batch_size(consumed),
        }
    }
}

fn next_batch_hash(sampler: &Sampler, consumed: u64) -> String {
    let ids: Vec<u8> = sampler.batch(consumed).iter().flat_map(|slot| slot.sample.to_le_bytes()).collect();
    format!("{:016x}", fnv1a(&ids))
}

/// What a checkpoint's `scheduler` says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SchedulerState {
    /// Samples behind successful updates: what learning rate and weight decay are functions of.
    pub num_steps: u64,
}

/// Why the next global batch is not the one that the saved run would have read; `None` if it is.
pub(super) fn other_samples(saved: &SavedRun, config: &TrainConfig, data: &DataState) -> Option<String> {
    let deciding = ["data", "seq-length", "global-batch-size", "seed", "epoch-tail"];
    let differences = compare(&saved.config, &saved.data, config, data);
    let changed: Vec<_> =
        differences.iter().map(|d| d.field).filter(|field| deciding.contains(field)).collect();
    if !changed.is_empty() {
        return Some(format!("the next samples are others: {} changed", changed.join(", ")));
    }
    let same = data.next_batch == saved.data.next_batch;
    (!same).then(|| "the next samples are not those that the saved run would have read".to_owned())
}

/// Largest count of samples, steps or tokens that a run goes on from; sums of it and a run's own do not overflow.
const COUNT_MAX: u64 = 1 << 56;

/// Checks that the checkpoint's random numbers are ones that this run goes on with.
pub(super) fn check_random(
    commit: &Commit,
    config: &TrainConfig,
    allow_change: &[String],
) -> Result<(), ResumeError> {
    let random = &commit.run.random;
    let seed_may_change = allow_change.iter().any(|field| field == "seed");
    let counters = &commit.run.counters;
    let counted =
        [counters.consumed_train_samples, counters.optimizer_steps, counters.tokens, commit.iteration];
    if let Some(count) = counted.into_iter().find(|count| *count > COUNT_MAX) {
        return Err(ResumeError::Random {
            found: format!("a count of {count}"),
            expected: format!("{COUNT_MAX} at most"),
        });
    }
    let found = format!("{} of seed {} at sample {}", random.algorithm, random.seed, random.ordinal);
    let seed = if seed_may_change { random.seed } else { config.seed };
    let expected =
        format!("{ALGORITHM} of seed {seed} at sample {}", commit.run.counters.consumed_train_samples);
    if found == expected { Ok(()) } else { Err(ResumeError::Random { found, expected }) }
}
