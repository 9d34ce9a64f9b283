//! Resuming: what must match, which boxes this rank wants, filling its memory, and the proof afterwards that memory holds what
//! the checkpoint says.

use crate::comm::CommError;
use crate::config::TrainConfig;
use crate::data::Sampler;
use crate::rng::{InvalidStream, StreamName};
use crate::state::{RunState, Streams};
use crate::step::Trainer;
use ckpt::{
    BadGlob, Commit, Counters, Fingerprint, LoadPlanError, Mismatch, OwnShard, StateSource, StoredTensor,
    Strictness, fnv1a, own_shards, plan_load,
};
use mesh::{
    DType, GroupKind, ParallelLayout, ProcessGroups, Region, ReplicaId, Shape, ShardedTensor, StateKind,
    TensorKey,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Instant;

/// What `checkpoint.json` calls the random numbers of this program.
pub(crate) const ALGORITHM: &str = "philox4x32-10";

/// Largest count of samples, steps or tokens that a run goes on from; sums of it and a run's own do not overflow.
const COUNT_MAX: u64 = 1 << 56;

/// Where a run goes on from, and what it takes from there.
pub struct Resume<'a> {
    /// The opened checkpoint.
    pub source: &'a (dyn StateSource + Sync),
    /// What is loaded.
    pub selection: Selection,
    /// Globs of keys that the model wants and the checkpoint may lack.
    pub allow_missing: &'a [String],
    /// Globs of keys that the checkpoint has and the model may not want.
    pub allow_extra: &'a [String],
    /// What becomes of streams under another layout.
    pub rng_policy: RngPolicy,
    /// Fields of [`compare`] that may differ.
    pub allow_change: &'a [String],
    /// Whether less than level L2 is an error.
    pub strict: bool,
}

/// What is taken from a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Moments and schedule.
    pub optimizer: bool,
    /// Random streams.
    pub rng: bool,
    /// Counters; without them the run starts at iteration 0.
    pub counters: bool,
}

impl Selection {
    /// All of it.
    pub const ALL: Selection = Selection { optimizer: true, rng: true, counters: true };
    /// Model weights alone, for a new run.
    pub const FINETUNE: Selection = Selection { optimizer: false, rng: false, counters: false };
}

/// What becomes of random streams whose coordinates are not those of the checkpoint. One rule for all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RngPolicy {
    /// Every rank derives its streams from seed, coordinate and iteration.
    #[default]
    Derive,
    /// Ranks whose coordinates exist in the checkpoint keep their streams, the others derive.
    Existing,
    /// Refuse.
    Strict,
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
            next_batch_size: config.parallel.global_batch_size(),
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

/// How far a resume was proved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Level {
    /// Every tensor's fingerprint, recomputed from memory, and the counters are those of the checkpoint.
    L0,
    /// And the next global batch has the same samples.
    L1,
    /// And every random stream continues, or none was ever drawn from.
    L2,
}

/// What a resume came to; equal on all ranks.
#[derive(Clone, Debug)]
pub struct Resumed {
    /// The layout it was saved in.
    pub saved_layout: ParallelLayout,
    /// Iteration, samples and so on to go on from.
    pub counters: Counters,
    /// Iteration to go on from.
    pub iteration: u64,
    /// Samples behind successful updates.
    pub scheduler_samples: u64,
    /// Tensors that were loaded.
    pub num_tensors: usize,
    /// Bytes that all ranks read.
    pub bytes_read: u64,
    /// From the start of planning to the end of the proof.
    pub seconds: f64,
    /// What was proved; `None` if not everything was taken from the checkpoint.
    pub level: Option<Level>,
    /// Why not more.
    pub notes: Vec<String>,
    /// Names that an allow list let pass.
    pub partial: Vec<String>,
}

/// A resume that cannot be.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The checkpoint was made by a run of other settings.
    #[error("the checkpoint and this run differ: {}", list(.differences))]
    Differs {
        /// All of them.
        differences: Vec<Difference>,
    },
    /// The checkpoint says nothing, or nonsense, about a run.
    #[error("`{field}` of checkpoint.json is not that of a training run: {source}")]
    Field {
        /// Which field.
        field: &'static str,
        /// Why not.
        source: serde_json::Error,
    },
    /// Keys, shapes or types differ.
    #[error(transparent)]
    Plan(#[from] LoadPlanError),
    /// Bytes could not be read, or were not what was written.
    #[error(transparent)]
    Read(#[from] ckpt::LoadError),
    /// A pattern of an allow list is none.
    #[error(transparent)]
    Glob(#[from] BadGlob),
    /// The streams of this coordinate are not in the checkpoint.
    #[error("random streams: saved under {saved}, but this run is {wanted}{}", first_missing(.missing))]
    MissingStream {
        /// Layout that was saved.
        saved: ParallelLayout,
        /// Layout of this run.
        wanted: ParallelLayout,
        /// The first (PP, TP, position in `dp_cp_gtp_remat`) without a cell; `None` if all have one, that of another rank.
        missing: Option<[u32; 3]>,
    },
    /// The tensor of random streams is not one cell a rank of the layout that saved it.
    #[error("`{key}` has shape {found} in the checkpoint, where its layout makes {expected}")]
    StreamShape {
        /// Its key.
        key: TensorKey,
        /// What is there.
        found: Shape,
        /// One cell of five streams of six words a rank.
        expected: Shape,
    },
    /// Random numbers or counters that this program cannot go on with.
    #[error("checkpoint.json says {found} where this run needs {expected}")]
    Random {
        /// What it says.
        found: String,
        /// What is needed.
        expected: String,
    },
    /// A cell holds no streams.
    #[error(transparent)]
    Stream(#[from] InvalidStream),
    /// Memory does not hold what the checkpoint says.
    #[error("`{key}` has fingerprint {found} in memory (replica {replica}) but {expected} in the checkpoint")]
    Fingerprint {
        /// Which tensor.
        key: TensorKey,
        /// Of what is in memory.
        found: Fingerprint,
        /// Of what was saved.
        expected: Fingerprint,
        /// Which replica of it.
        replica: String,
    },
    /// `--strict` asks for more than was reached.
    #[error("verified {reached} where --strict asks for L2: {}", .notes.join("; "))]
    NotStrict {
        /// What was reached.
        reached: String,
        /// Why not more.
        notes: Vec<String>,
    },
    /// A placement that the groups do not divide.
    #[error(transparent)]
    Placement(#[from] mesh::Indivisible),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
}

fn first_missing(missing: &Option<[u32; 3]>) -> String {
    match missing {
        Some([pp, tp, position]) => {
            format!("; coordinate (pp {pp}, tp {tp}, position {position} of `dp_cp_gtp_remat`) has no cell")
        }
        None => ", where every coordinate is another rank's".to_owned(),
    }
}

fn list(differences: &[Difference]) -> String {
    let line = |d: &Difference| format!("{} is {} in the checkpoint but {} here", d.field, d.saved, d.wanted);
    differences.iter().map(line).collect::<Vec<_>>().join("; ")
}

impl LoadError {
    /// Code of the error.
    pub fn code(&self) -> &'static str {
        match self {
            LoadError::Differs { .. } => "RM3001",
            LoadError::Field { .. } => "RM4040",
            LoadError::Plan(error) => error.code(),
            LoadError::Read(error) => error.code(),
            LoadError::Glob(_) => "RM6004",
            LoadError::MissingStream { .. } => "RM3102",
            LoadError::StreamShape { .. } => "RM3104",
            LoadError::Random { .. } => "RM3105",
            LoadError::Stream(_) => "RM3103",
            LoadError::Fingerprint { .. } => "RM4050",
            LoadError::NotStrict { .. } => "RM3110",
            LoadError::Placement(_) => "RM2003",
            LoadError::Comm(error) => error.code(),
        }
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            LoadError::Differs { differences } => {
                let overridable: Vec<_> =
                    differences.iter().filter(|d| d.overridable).map(|d| d.field).collect();
                match overridable.len() == differences.len() {
                    true => format!("to go on with the new values: --allow-change {}", overridable.join(",")),
                    false => "give this run the checkpoint's values, or another --save; what is a shape cannot change".into(),
                }
            }
            LoadError::Field { .. } => "`remesh inspect` shows what the checkpoint holds".into(),
            LoadError::Plan(error) => error.help(),
            LoadError::Read(error) => error.help(),
            LoadError::Glob(_) => "patterns are globs, such as `decoder.layers.0.*`".into(),
            LoadError::MissingStream { .. } => {
                "--rng-policy derive starts the streams anew on every rank; dropout and data order do not depend on them".into()
            }
            LoadError::StreamShape { .. } => {
                "--no-load-rng starts the streams anew; `remesh inspect` shows the layout it was saved in".into()
            }
            LoadError::Random { .. } => {
                "this checkpoint was written by another program, or changed by hand after it was sealed".into()
            }
            LoadError::Stream(_) => "--rng-policy derive starts the streams anew; `remesh verify` checks the files".into(),
            LoadError::Fingerprint { .. } => {
                "`remesh verify` checks the files; if they are whole, this is a bug or a memory fault".into()
            }
            LoadError::NotStrict { .. } => "leave out --strict, or resume under the layout that was saved".into(),
            LoadError::Placement(_) => "pick a layout that divides the model".into(),
            LoadError::Comm(error) => error.help().into(),
        }
    }
}

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
    let rows: Vec<(&'static str, bool, String, String)> = vec![
        ("num-layers", false, m.num_layers.to_string(), n.num_layers.to_string()),
        ("hidden-size", false, m.hidden_size.to_string(), n.hidden_size.to_string()),
        ("ffn-hidden-size", false, m.ffn_hidden_size.to_string(), n.ffn_hidden_size.to_string()),
        ("num-attention-heads", false, m.num_attention_heads.to_string(), n.num_attention_heads.to_string()),
        ("num-query-groups", false, m.num_query_groups.to_string(), n.num_query_groups.to_string()),
        ("kv-channels", false, m.kv_channels.to_string(), n.kv_channels.to_string()),
        ("vocab-size", false, m.vocab_size.to_string(), n.vocab_size.to_string()),
        ("tie-embeddings", false, m.tie_embeddings.to_string(), n.tie_embeddings.to_string()),
        ("norm-epsilon", true, m.norm_epsilon.to_string(), n.norm_epsilon.to_string()),
        ("rotary-base", true, m.rotary_base.to_string(), n.rotary_base.to_string()),
        ("hidden-dropout", true, m.hidden_dropout.to_string(), n.hidden_dropout.to_string()),
        ("attention-dropout", true, m.attention_dropout.to_string(), n.attention_dropout.to_string()),
        ("seq-length", true, a.parallel.seq_length().to_string(), b.parallel.seq_length().to_string()),
        (
            "global-batch-size",
            true,
            a.parallel.global_batch_size().to_string(),
            b.parallel.global_batch_size().to_string(),
        ),
        ("seed", true, a.seed.to_string(), b.seed.to_string()),
        ("data", true, describe_data(saved_data), describe_data(data)),
        ("epoch-tail", true, a.epoch_tail.to_string(), b.epoch_tail.to_string()),
        ("loss-average", true, a.loss_average.to_string(), b.loss_average.to_string()),
        ("optimizer", true, a.optimizer.to_string(), b.optimizer.to_string()),
        ("numerics", true, a.numerics.to_string(), b.numerics.to_string()),
    ];
    rows.into_iter()
        .filter(|(_, _, saved, wanted)| saved != wanted)
        .map(|(field, overridable, saved, wanted)| Difference { field, saved, wanted, overridable })
        .collect()
}

fn describe_data(data: &DataState) -> String {
    format!("{} samples of index {}", data.num_samples, data.index_hash)
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
    pub fn of(commit: &Commit) -> Result<Self, LoadError> {
        let field = |field| move |source| LoadError::Field { field, source };
        Ok(SavedRun {
            config: serde_json::from_value(commit.config.clone()).map_err(field("config"))?,
            data: serde_json::from_value(commit.data.clone()).map_err(field("data"))?,
            scheduler: serde_json::from_value(commit.scheduler.clone()).map_err(field("scheduler"))?,
        })
    }
}

/// Checks that the checkpoint's run may go on as `config`, before any rank starts. A new run that takes only weights may
/// differ in all but the shapes, which the load plan compares.
///
/// # Errors
/// Every difference that is not allowed.
pub fn check(resume: &Resume, config: &TrainConfig, data: &DataState) -> Result<(), LoadError> {
    if !resume.selection.counters {
        return Ok(());
    }
    let saved = SavedRun::of(resume.source.commit())?;
    let mut differences = compare(&saved.config, &saved.data, config, data);
    differences.retain(|d| !(d.overridable && resume.allow_change.iter().any(|field| field == d.field)));
    if !differences.is_empty() {
        return Err(LoadError::Differs { differences });
    }
    check_random(resume.source.commit(), config, resume.allow_change)
}

/// Fills the state of this rank from the checkpoint and proves it. Collective.
///
/// # Errors
/// Anything that keeps the state from being what was saved.
pub(crate) fn load(
    resume: &Resume,
    trainer: &mut Trainer,
    state: &RunState,
    streams: &mut Streams,
    data: &dyn Fn(&Counters) -> DataState,
) -> Result<Resumed, LoadError> {
    let start = Instant::now();
    let commit = resume.source.commit();
    let mut counters = if resume.selection.counters { commit.counters } else { Counters::default() };
    if !resume.selection.optimizer {
        // Moments that start anew are corrected for their bias anew.
        counters.optimizer_steps = 0;
    }
    let iteration = if resume.selection.counters { commit.iteration } else { 0 };
    let scheduler_samples = match resume.selection {
        Selection { optimizer: true, counters: true, .. } => SavedRun::of(commit)?.scheduler.num_steps,
        _ => 0,
    };

    let mut own: Vec<OwnShard> = own_shards(state.table(), trainer.groups())?;
    let cells = own
        .extract_if(.., |own| state.table().entries()[own.entry].kind == StateKind::Rng)
        .collect::<Vec<_>>();
    own.retain(|own| wants(resume.selection, state.table().entries()[own.entry].kind));
    let loaded = fill(resume, trainer, state, &own)?;
    *streams = Streams::derive(trainer.config().seed, trainer.groups(), iteration);
    let continued = match resume.selection.rng {
        true => load_streams(resume, trainer, state, streams)?,
        false => Continued { level: false, cells: false, note: None },
    };
    if continued.cells {
        own.extend(cells);
    }
    prove(resume, trainer, state, streams, &own)?;

    let mut notes = Vec::new();
    let mut level = Level::L0;
    if resume.selection.counters {
        match other_samples(&SavedRun::of(commit)?, trainer.config(), &data(&counters)) {
            None => level = Level::L1,
            Some(note) => notes.push(note),
        }
    }
    notes.extend(continued.note);
    if level == Level::L1 && continued.level {
        level = Level::L2;
    }
    let complete = resume.selection == Selection::ALL && loaded.partial.is_empty();
    if !complete {
        notes.push(format!("not restored: {}", not_restored(resume.selection, &loaded.partial)));
    }
    let level = complete.then_some(level);
    if resume.strict && level < Some(Level::L2) {
        let reached = level.map_or("nothing".to_owned(), |level| format!("{level:?}"));
        return Err(LoadError::NotStrict { reached, notes });
    }
    Ok(Resumed {
        saved_layout: commit.layout,
        counters,
        iteration,
        scheduler_samples,
        num_tensors: loaded.num_tensors,
        bytes_read: loaded.bytes_read,
        seconds: start.elapsed().as_secs_f64(),
        level,
        notes,
        partial: loaded.partial,
    })
}

/// Why the next global batch is not the one that the saved run would have read; `None` if it is.
fn other_samples(saved: &SavedRun, config: &TrainConfig, data: &DataState) -> Option<String> {
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

/// Checks that the checkpoint's random numbers are ones that this run goes on with.
fn check_random(commit: &Commit, config: &TrainConfig, allow_change: &[String]) -> Result<(), LoadError> {
    let random = &commit.random;
    let seed_may_change = allow_change.iter().any(|field| field == "seed");
    let counters = &commit.counters;
    let counted =
        [counters.consumed_train_samples, counters.optimizer_steps, counters.tokens, commit.iteration];
    if let Some(count) = counted.into_iter().find(|count| *count > COUNT_MAX) {
        return Err(LoadError::Random {
            found: format!("a count of {count}"),
            expected: format!("{COUNT_MAX} at most"),
        });
    }
    let found = format!("{} of seed {} at sample {}", random.algorithm, random.seed, random.ordinal);
    let seed = if seed_may_change { random.seed } else { config.seed };
    let expected = format!("{ALGORITHM} of seed {seed} at sample {}", commit.counters.consumed_train_samples);
    if found == expected { Ok(()) } else { Err(LoadError::Random { found, expected }) }
}

fn wants(selection: Selection, kind: StateKind) -> bool {
    match kind {
        StateKind::Model => true,
        StateKind::Optimizer => selection.optimizer,
        // Streams are loaded by policy, apart from the rest.
        StateKind::Rng | StateKind::Object => false,
    }
}

fn not_restored(selection: Selection, partial: &[String]) -> String {
    let parts = [
        (!selection.optimizer, "optimizer"),
        (!selection.rng, "random streams"),
        (!selection.counters, "counters"),
    ];
    let names = parts.into_iter().filter(|(left_out, _)| *left_out).map(|(_, name)| name.to_owned());
    names.chain(partial.iter().cloned()).collect::<Vec<_>>().join(", ")
}

struct Loaded {
    num_tensors: usize,
    bytes_read: u64,
    partial: Vec<String>,
}

/// Reads the wanted boxes into memory.
fn fill(
    resume: &Resume,
    trainer: &mut Trainer,
    state: &RunState,
    own: &[OwnShard],
) -> Result<Loaded, LoadError> {
    let wanted: Vec<ShardedTensor> = own.iter().map(|own| own.shard.clone()).collect();
    let strictness = Strictness::new(resume.allow_missing, resume.allow_extra)?;
    let in_scope = |stored: &StoredTensor| wants(resume.selection, stored.kind);
    let plan = plan_load(resume.source.catalog(), &wanted, &strictness, &in_scope)?;
    let (_, be) = trainer.parts();
    let report = resume.source.read(&plan, &mut |target, within, bytes| {
        let own = &own[target];
        state.write(be, own.entry, &within.shifted_by(own.local.lo()), bytes).map_err(Into::into)
    })?;
    let missing = plan.missing.iter().chain(&plan.extra).map(|key| key.to_string());
    let bytes = trainer.comms().tp_dp_cp.gather_bytes("load.bytes_read", &report.bytes_read.to_le_bytes())?;
    let bytes_read = bytes.iter().map(|b| u64::from_le_bytes(b[..].try_into().expect("eight bytes"))).sum();
    let mut keys: Vec<_> = own.iter().map(|own| own.entry).collect();
    keys.dedup();
    Ok(Loaded { num_tensors: keys.len() - plan.missing.len(), bytes_read, partial: missing.collect() })
}

struct Continued {
    /// Whether every stream continues, or none was ever drawn from.
    level: bool,
    /// Whether memory holds the checkpoint's cells, all of them.
    cells: bool,
    note: Option<String>,
}

/// Restores this rank's cell of random streams, or applies the policy where the layout changed.
fn load_streams(
    resume: &Resume,
    trainer: &Trainer,
    state: &RunState,
    streams: &mut Streams,
) -> Result<Continued, LoadError> {
    let commit = resume.source.commit();
    let groups = trainer.groups();
    let key = state.rng_key();
    let Some(stored) = resume.source.catalog().tensor(key) else {
        let note = "the checkpoint has no random streams; every rank derived its own".to_owned();
        return Ok(Continued { level: false, cells: false, note: Some(note) });
    };
    let saved = &commit.layout;
    let peers = saved.gtp() * saved.num_weight_replicas();
    let expected = [saved.pp(), saved.tp(), peers, StreamName::ALL.len() as u32, 6].map(u64::from);
    if stored.shape.dims() != expected {
        let (key, found) = (key.clone(), stored.shape.clone());
        return Err(LoadError::StreamShape { key, found, expected: Shape::new(&expected) });
    }
    let coordinate = coordinate_of(groups);
    let same_grid = commit.layout.axis_sizes() == trainer.config().parallel.layout().axis_sizes();
    let exists = |coordinate: &[u32; 3]| {
        coordinate.iter().zip(stored.shape.dims()).all(|(at, extent)| u64::from(*at) < *extent)
    };
    if !same_grid && resume.rng_policy == RngPolicy::Strict {
        // The same on every rank.
        let coordinates = groups.table().ranks().iter().map(|rank| coordinate_of(&groups.of(*rank)));
        let missing = coordinates.into_iter().find(|coordinate| !exists(coordinate));
        let (saved, wanted) = (commit.layout, *trainer.config().parallel.layout());
        return Err(LoadError::MissingStream { saved, wanted, missing });
    }
    let restore = same_grid || (resume.rng_policy == RngPolicy::Existing && exists(&coordinate));
    if restore {
        let lo: Vec<u64> = coordinate.iter().map(|at| u64::from(*at)).collect();
        let hi: Vec<u64> = lo.iter().map(|at| at + 1).collect();
        *streams = Streams::from_words(&read_cells(resume, stored, &lo, &hi)?)?;
    }
    if same_grid {
        return Ok(Continued { level: true, cells: true, note: None });
    }
    // One rank looks through all cells: streams that nobody drew from lose nothing when they are derived.
    let is_first = groups.rank() == groups.table().ranks()[0];
    let drawn = is_first && any_draws(resume, stored)?;
    let told =
        trainer.comms().tp_dp_cp.gather_bytes("load.streams", &[u8::from(restore), u8::from(drawn)])?;
    let drawn = told.iter().any(|told| told[1] == 1);
    let (kept, all) = (told.iter().filter(|told| told[0] == 1).count(), told.len());
    let note = match kept {
        0 => format!("{all} per-rank random streams derived anew: the layout changed"),
        kept => format!("{kept} ranks kept their random streams, {} derived new ones", all - kept),
    };
    Ok(Continued { level: !drawn, cells: false, note: Some(note) })
}

/// Where the cell of a rank's streams lies.
fn coordinate_of(groups: &ProcessGroups) -> [u32; 3] {
    [GroupKind::Pp, GroupKind::Tp, GroupKind::DpCpGtpRemat].map(|kind| groups.position(kind).0)
}

/// Whether any saved stream was ever drawn from.
fn any_draws(resume: &Resume, stored: &StoredTensor) -> Result<bool, LoadError> {
    let words = read_cells(resume, stored, &[0; 3], &stored.shape.dims()[..3])?;
    let mut drawn = false;
    for cell in words.chunks_exact(Streams::WORDS) {
        drawn |= Streams::from_words(cell)?.draws() > 0;
    }
    Ok(drawn)
}

/// The words of the cells between two coordinates.
fn read_cells(resume: &Resume, stored: &StoredTensor, lo: &[u64], hi: &[u64]) -> Result<Vec<u32>, LoadError> {
    let cell = &stored.shape.dims()[3..];
    if stored.dtype != DType::U32 {
        let dtypes = vec![(stored.key.clone(), stored.dtype, DType::U32)];
        return Err(LoadPlanError::Mismatch(Mismatch { dtypes, ..Mismatch::default() }.into()).into());
    }
    let region = Region::new(&[lo, &[0, 0]].concat(), &[hi, cell].concat());
    let mut words = vec![0u32; region.numel() as usize];
    resume.source.read_box(&stored.key, &region, bytemuck::cast_slice_mut(&mut words))?;
    Ok(words)
}

/// Recomputes every fingerprint from what is in memory now and compares it with the checkpoint's: for each replica of each
/// tensor, the sum over the ranks that hold it.
fn prove(
    resume: &Resume,
    trainer: &mut Trainer,
    state: &RunState,
    streams: &Streams,
    own: &[OwnShard],
) -> Result<(), LoadError> {
    #[derive(Serialize, Deserialize)]
    struct Part {
        entry: usize,
        replica: ReplicaId,
        fingerprint: [u8; 16],
    }
    let catalog = resume.source.catalog();
    let mut parts = Vec::new();
    let (_, be) = trainer.parts();
    for own in own {
        let shard = &own.shard;
        let mut bytes = vec![0; shard.region.numel() as usize * shard.dtype.size_bytes()];
        state.read(be, streams, own.entry, &own.local, &mut bytes).map_err(CommError::from)?;
        let fingerprint =
            Fingerprint::of_region(&shard.key, shard.dtype, &shard.global_shape, &shard.region, &bytes);
        parts.push(Part { entry: own.entry, replica: shard.replica, fingerprint: fingerprint.to_bytes() });
    }
    let mine = serde_json::to_vec(&parts).expect("numbers");
    let mut sums: BTreeMap<(usize, ReplicaId), Fingerprint> = BTreeMap::new();
    for theirs in trainer.comms().tp_dp_cp.gather_bytes("load.fingerprints", &mine)? {
        let parts: Vec<Part> = serde_json::from_slice(&theirs).expect("what a rank of this program wrote");
        for part in parts {
            *sums.entry((part.entry, part.replica)).or_default() += Fingerprint::from_bytes(part.fingerprint);
        }
    }
    for ((entry, replica), found) in sums {
        let key = &state.table().entries()[entry].key;
        let Some(stored) = catalog.tensor(key) else { continue };
        if found != stored.fingerprint {
            let (key, replica) =
                (key.clone(), format!("tp {} gtp {} dp {}", replica.tp, replica.gtp, replica.dp));
            return Err(LoadError::Fingerprint { key, found, expected: stored.fingerprint, replica });
        }
    }
    Ok(())
}
