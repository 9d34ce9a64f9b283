//! What must match between the run that saved and the one that goes on.

use crate::config::{ModelConfig, TrainConfig};
use crate::data::{Blend, Sampler, TokenFileError};
use crate::evaluate::Evaluation;
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

/// Settings that may change where it is allowed by name. The others are shapes.
pub const CHANGEABLE: [&str; 14] = [
    "norm-epsilon",
    "rotary-base",
    "hidden-dropout",
    "attention-dropout",
    "seq-length",
    "global-batch-size",
    "seed",
    "data",
    "epoch-tail",
    "documents",
    "iterations-to-skip",
    "loss-average",
    "optimizer",
    "numerics",
];

/// Everything that must match between a checkpoint's run and one that goes on from it, and does not.
/// `iteration` of them are done. Layout, `train_iters`, intervals and paths may change without a word.
pub fn compare(
    saved: &TrainConfig,
    saved_data: &DataState,
    wanted: &TrainConfig,
    data: &DataState,
    iteration: u64,
) -> Vec<Difference> {
    let (a, b) = (saved, wanted);
    let (m, n) = (&a.model, &b.model);
    let mut rows = Rows::default();
    rows.compare("num-layers", &m.num_layers, &n.num_layers);
    rows.compare("hidden-size", &m.hidden_size, &n.hidden_size);
    rows.compare("ffn-hidden-size", &m.ffn_hidden_size, &n.ffn_hidden_size);
    rows.compare("num-attention-heads", &m.num_attention_heads, &n.num_attention_heads);
    rows.compare("num-query-groups", &m.num_query_groups, &n.num_query_groups);
    rows.compare("kv-channels", &m.kv_channels, &n.kv_channels);
    rows.compare("vocab-size", &m.vocab_size, &n.vocab_size);
    rows.compare("tie-embeddings", &m.tie_embeddings, &n.tie_embeddings);
    rows.compare("normalization", &m.normalization, &n.normalization);
    rows.compare("position-embedding-type", &m.position_embedding, &n.position_embedding);
    rows.compare("activation", &m.activation, &n.activation);
    rows.compare("biases", &m.biases, &n.biases);
    rows.compare("norm-epsilon", &m.norm_epsilon, &n.norm_epsilon);
    rows.compare("rotary-base", &m.rotary_base, &n.rotary_base);
    rows.compare("hidden-dropout", &m.hidden_dropout, &n.hidden_dropout);
    rows.compare("attention-dropout", &m.attention_dropout, &n.attention_dropout);
    rows.compare("seq-length", &a.parallel.seq_length(), &b.parallel.seq_length());
    let asked = |config: &TrainConfig| config.asked_batch.as_ref().unwrap_or(&config.batch).clone();
    rows.compare("global-batch-size", &asked(a), &asked(b));
    rows.compare("seed", &a.seed, &b.seed);
    // Other batches have other tokens.
    let with_tokens = a.parallel.seq_length() == b.parallel.seq_length()
        && a.batch == b.batch
        && (a.seed, a.epoch_tail) == (b.seed, b.epoch_tail);
    rows.compare("data", &saved_data.samples(with_tokens), &data.samples(with_tokens));
    rows.compare("epoch-tail", &a.epoch_tail, &b.epoch_tail);
    let documents =
        |config: &TrainConfig| config.documents.map_or("not told apart".into(), |d| d.to_string());
    rows.compare("documents", &documents(a), &documents(b));
    let left = |config: &TrainConfig| Left(config.iterations_to_skip.range(iteration..).copied().collect());
    rows.compare("iterations-to-skip", &left(a), &left(b));
    rows.compare("loss-average", &a.loss_average, &b.loss_average);
    rows.compare("optimizer", &a.optimizer, &b.optimizer);
    rows.compare("numerics", &a.numerics, &b.numerics);
    rows.compare("precision", &a.precision, &b.precision);
    rows.differences
}

/// What decides how rows and columns of weights are meant where shapes alone do not tell, and does not match: weights that are
/// taken into another model than theirs would be scrambled without a word.
pub(super) fn compare_meaning(saved: &ModelConfig, wanted: &ModelConfig) -> Vec<Difference> {
    let (m, n) = (saved, wanted);
    let mut rows = Rows::default();
    rows.compare("num-attention-heads", &m.num_attention_heads, &n.num_attention_heads);
    rows.compare("num-query-groups", &m.num_query_groups, &n.num_query_groups);
    rows.compare("kv-channels", &m.kv_channels, &n.kv_channels);
    rows.compare("activation", &m.activation, &n.activation);
    rows.compare("norm-epsilon", &m.norm_epsilon, &n.norm_epsilon);
    rows.compare("rotary-base", &m.rotary_base, &n.rotary_base);
    rows.differences
}

/// Iterations that are left to be passed over.
#[derive(PartialEq)]
struct Left(Vec<u64>);

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.is_empty() {
            true => f.write_str("none"),
            false => write!(f, "{}", self.0.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")),
        }
    }
}

/// Settings, compared one after another.
#[derive(Default)]
struct Rows {
    differences: Vec<Difference>,
}

impl Rows {
    fn compare<T: PartialEq + fmt::Display>(&mut self, field: &'static str, saved: &T, wanted: &T) {
        if saved != wanted {
            let overridable = CHANGEABLE.contains(&field);
            let (saved, wanted) = (saved.to_string(), wanted.to_string());
            self.differences.push(Difference { field, saved, wanted, overridable });
        }
    }
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
            config: SavedRun::config_of(commit)?,
            data: serde_json::from_value(commit.run.data.clone()).map_err(field("data"))?,
            scheduler: serde_json::from_value(commit.run.scheduler.clone()).map_err(field("scheduler"))?,
        })
    }

    /// Its configuration alone.
    ///
    /// # Errors
    /// See [`of`](Self::of).
    pub fn config_of(commit: &Commit) -> Result<TrainConfig, ResumeError> {
        serde_json::from_value(commit.run.config.clone())
            .map_err(|source| ResumeError::Field { field: "config", source })
    }
}

/// What a checkpoint's `data` says about the samples.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataState {
    /// Samples of an epoch.
    pub num_samples: u64,
    /// Tokens of a sample.
    pub seq_length: u64,
    /// Which token files, in which shares and parts: [`Blend::identity`]. It was called `index_hash` when it was that alone.
    #[serde(alias = "index_hash")]
    pub files: String,
    /// FNV-1a 64 over that of each sample of the next global batch, of its id and its tokens, hexadecimal: what is read
    /// next, and not only its name.
    pub next_batch: String,
    /// Samples of that batch.
    pub next_batch_size: u64,
    /// What evaluations read; `None` if there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<ValidationState>,
}

/// What a checkpoint's `data` says about evaluations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValidationState {
    /// Which token files, in which shares and parts: [`Blend::identity`].
    pub files: String,
    /// Samples of an evaluation.
    pub num_samples: u64,
    /// As [`DataState::next_batch`], of the first samples, 16 at most.
    pub first_samples: String,
}

impl ValidationState {
    /// What `evaluation` reads of `tokens` in the order of `sampler`; reads the first samples.
    ///
    /// # Errors
    /// If the tokens cannot be read.
    pub(crate) fn new(
        config: &TrainConfig,
        evaluation: &Evaluation,
        tokens: &Blend,
        sampler: &Sampler,
    ) -> Result<Self, TokenFileError> {
        const FIRST: usize = 16;
        let num_samples = evaluation.num_samples(tokens, sampler);
        let mut first = Vec::new();
        let mut position = 0;
        while first.len() < FIRST && position < num_samples {
            first.extend(sampler.batch(position).iter().take(FIRST - first.len()).map(|slot| slot.sample));
            position += sampler.batch_len(position);
        }
        let first_samples = hash_of_samples(config, tokens, first)?;
        Ok(ValidationState { files: tokens.identity(), num_samples, first_samples })
    }
}

impl fmt::Display for ValidationState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ValidationState { files, num_samples, first_samples } = self;
        write!(f, "{num_samples} samples of index {files}, which begin with the tokens {first_samples}")
    }
}

/// FNV-1a 64 over that of each sample, of its id and its tokens, hexadecimal.
fn hash_of_samples(
    config: &TrainConfig,
    tokens: &Blend,
    samples: impl IntoIterator<Item = u64>,
) -> Result<String, TokenFileError> {
    let mut hashes = Vec::new();
    for sample in samples {
        let ids = tokens.read_sample(sample, config.parallel.seq_length(), config.model.vocab_size)?;
        let ids = ids.into_iter().flat_map(i32::to_le_bytes);
        let bytes: Vec<u8> = sample.to_le_bytes().into_iter().chain(ids).collect();
        hashes.extend(fnv1a(&bytes).to_le_bytes());
    }
    Ok(format!("{:016x}", fnv1a(&hashes)))
}

/// What decides which samples there are, and which tokens come next where both runs read on alike.
#[derive(PartialEq)]
struct Samples<'a> {
    num_samples: u64,
    files: &'a str,
    next_batch: Option<&'a str>,
}

impl fmt::Display for Samples<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} samples of index {}", self.num_samples, self.files)?;
        self.next_batch.map_or(Ok(()), |hash| write!(f, " with the next tokens {hash}"))
    }
}

impl DataState {
    /// What `sampler` will give of `tokens` after `consumed` samples; reads one global batch.
    ///
    /// # Errors
    /// If the tokens cannot be read.
    pub fn new(
        config: &TrainConfig,
        tokens: &Blend,
        sampler: &Sampler,
        consumed: u64,
    ) -> Result<Self, TokenFileError> {
        let next = sampler.batch(consumed).into_iter().map(|slot| slot.sample);
        Ok(DataState {
            num_samples: sampler.num_samples(),
            seq_length: config.parallel.seq_length(),
            files: tokens.identity(),
            next_batch: hash_of_samples(config, tokens, next)?,
            next_batch_size: sampler.batch_size(consumed),
            validation: None,
        })
    }

    fn samples(&self, with_tokens: bool) -> Samples<'_> {
        Samples {
            num_samples: self.num_samples,
            files: &self.files,
            next_batch: with_tokens.then_some(self.next_batch.as_str()),
        }
    }
}

/// What a checkpoint's `scheduler` says: how far the schedules are.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SchedulerState {
    /// Samples behind successful updates: what learning rate and weight decay are functions of.
    pub num_steps: u64,
    /// Iterations done at the last evaluation.
    #[serde(default)]
    pub evaluated: u64,
}

/// Why the next global batch is not the one that the saved run would have read; `None` if it is. `is_same_batch`: whether the layout
/// takes as much of the batch that was asked for.
pub(super) fn other_samples(differences: &[Difference], is_same_batch: bool) -> Option<String> {
    let deciding = ["data", "seq-length", "global-batch-size", "seed", "epoch-tail", "iterations-to-skip"];
    let mut changed: Vec<_> =
        differences.iter().map(|d| d.field).filter(|field| deciding.contains(field)).collect();
    if changed.is_empty() && !is_same_batch {
        changed.push("what the layout takes of the global batch");
    }
    (!changed.is_empty()).then(|| format!("the next samples are others: {} changed", changed.join(", ")))
}

/// Largest count of samples, steps or tokens that a run goes on from; sums of it and a run's own do not overflow.
const COUNT_MAX: u64 = 1 << 56;

/// The position in the order of samples at which the checkpoint's run would read on.
///
/// # Errors
/// Counters that no run can go on from.
pub fn next_sample(commit: &Commit, sampler: &Sampler) -> Result<u64, ResumeError> {
    let counters = &commit.run.counters;
    let consumed = counters.consumed_train_samples;
    let scheduled = commit.run.scheduler.get("num_steps").and_then(serde_json::Value::as_u64).unwrap_or(0);
    let counted = [
        consumed,
        counters.skipped_train_samples,
        counters.consumed_valid_samples,
        counters.optimizer_steps,
        counters.tokens,
        commit.iteration,
        scheduled,
    ];
    let refused = |found, expected| Err(ResumeError::Random { found, expected });
    if let Some(count) = counted.into_iter().find(|count| *count > COUNT_MAX) {
        return refused(format!("a count of {count}"), format!("{COUNT_MAX} at most"));
    }
    if counters.optimizer_steps > commit.iteration {
        let found = format!("{} updates in {} iterations", counters.optimizer_steps, commit.iteration);
        return refused(found, "no more updates than iterations".to_owned());
    }
    if (counters.optimizer_steps == 0) != (scheduled == 0) {
        let found = format!("{} updates by {scheduled} samples", counters.optimizer_steps);
        return refused(found, "both or neither above 0".to_owned());
    }
    if sampler.epochs_within(consumed) > u32::MAX.into() {
        return refused(
            format!("{consumed} samples used of {}", sampler.num_samples()),
            "fewer than 2³² epochs".to_owned(),
        );
    }
    Ok(consumed)
}

/// Checks that the checkpoint's random numbers are ones that this run goes on with.
pub(super) fn check_random(
    commit: &Commit,
    config: &TrainConfig,
    allow_change: &[String],
) -> Result<(), ResumeError> {
    let random = &commit.run.random;
    let seed_may_change = allow_change.iter().any(|field| field == "seed");
    let found = format!("{} of seed {} at sample {}", random.algorithm, random.seed, random.ordinal);
    let seed = if seed_may_change { random.seed } else { config.seed };
    let expected =
        format!("{ALGORITHM} of seed {seed} at sample {}", commit.run.counters.consumed_train_samples);
    if found == expected { Ok(()) } else { Err(ResumeError::Random { found, expected }) }
}
