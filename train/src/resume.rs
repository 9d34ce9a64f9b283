//! Resuming: filling a rank's memory from a checkpoint, and the proof afterwards that it holds what was saved.
//!
//! [`Continuation::new`] says before any rank starts whether the run may go on; `load` is the flow.

mod compare;
mod error;
mod prove;
mod streams;

pub use compare::{
    CHANGEABLE, DataState, Difference, SavedRun, SchedulerState, ValidationState, compare, next_sample,
};
pub use error::ResumeError;
pub use streams::{RngPolicy, StreamCell};

use crate::comm::CommError;
use crate::config::TrainConfig;
use crate::state::{MASTER, RunState, Streams};
use crate::step::{ParamGroups, Trainer};
use ckpt::{
    Commit, Counters, LoadError, OwnShard, StateSource, StoredTensor, Strictness, own_shards, plan_load,
};
use compare::{check_random, compare_meaning, other_samples};
use mesh::{ParallelLayout, ShardedTensor, StateKind, TensorKey};
use prove::prove;
use serde::{Deserialize, Serialize};
use std::rc::Rc;
use std::time::Instant;
use streams::{Continued, load_streams};

/// What `checkpoint.json` calls the random numbers of this program.
pub(crate) const ALGORITHM: &str = "philox4x32-10";

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

/// A checkpoint that a run may go on from.
pub struct Continuation<'a> {
    resume: Resume<'a>,
    /// The run that goes on; `None` where a new one takes only weights.
    saved: Option<SavedRun>,
    /// What is not as it was there, as far as it may differ.
    differences: Vec<Difference>,
}

impl<'a> Continuation<'a> {
    /// Checks that the checkpoint's run may go on as `config`, before any rank starts. A new run that takes only weights may
    /// differ in all but what the weights mean, and the shapes, which the load plan compares. `data` is that at [`next_sample`].
    ///
    /// # Errors
    /// Every difference that is not allowed.
    pub fn new(resume: Resume<'a>, config: &TrainConfig, data: &DataState) -> Result<Self, ResumeError> {
        let commit = resume.source.commit();
        if !resume.selection.counters {
            let saved = SavedRun::config_of(commit)?;
            let differences = allowed(compare_meaning(&saved.model, &config.model), resume.allow_change)?;
            return Ok(Continuation { resume, saved: None, differences });
        }
        let saved = SavedRun::of(commit)?;
        let differences = compare(&saved.config, &saved.data, config, data, commit.iteration);
        let differences = allowed(differences, resume.allow_change)?;
        check_random(commit, config, resume.allow_change)?;
        Ok(Continuation { resume, saved: Some(saved), differences })
    }

    /// What evaluations of the saved run read, if that is not `validation`: their losses are then not of one series.
    pub(crate) fn other_validation(&self, validation: &ValidationState) -> Option<&ValidationState> {
        let saved = self.saved.as_ref().and_then(|saved| saved.data.validation.as_ref());
        saved.filter(|saved| *saved != validation)
    }

    /// What is taken from the checkpoint, and what may differ.
    pub(crate) fn choices(&self) -> serde_json::Value {
        let Resume { selection, allow_missing, allow_extra, rng_policy, allow_change, strict, .. } =
            &self.resume;
        let Selection { optimizer, rng, counters } = selection;
        serde_json::json!({
            "optimizer": optimizer, "rng": rng, "counters": counters, "rng-policy": rng_policy, "strict": strict,
            "allow-missing": allow_missing, "allow-extra": allow_extra, "allow-change": allow_change,
        })
    }

    /// What the checkpoint says of itself.
    pub fn commit(&self) -> &Commit {
        self.resume.source.commit()
    }

    /// The run that goes on; `None` where a new one takes only weights.
    pub fn saved(&self) -> Option<&SavedRun> {
        self.saved.as_ref()
    }

    /// What is not as it was in that run, and may be.
    pub fn differences(&self) -> &[Difference] {
        &self.differences
    }
}

/// The differences, if `allow_change` names all of them and they may be.
///
/// # Errors
/// Those that may not.
pub fn allowed(
    differences: Vec<Difference>,
    allow_change: &[String],
) -> Result<Vec<Difference>, ResumeError> {
    let is_allowed = |d: &Difference| d.overridable && allow_change.iter().any(|field| field == d.field);
    let (allowed, refused): (Vec<_>, Vec<_>) = differences.into_iter().partition(is_allowed);
    if refused.is_empty() { Ok(allowed) } else { Err(ResumeError::Differs { differences: refused }) }
}

/// Fills the state of this rank from the checkpoint and proves it. Collective.
///
/// # Errors
/// Anything that keeps the state from being what was saved.
pub(crate) fn load(
    from: &Continuation,
    trainer: &mut Trainer,
    state: &RunState,
    streams: &mut Streams,
) -> Result<Resumed, ResumeError> {
    let start = Instant::now();
    let Continuation { resume, saved, differences } = from;
    let commit = resume.source.commit();
    let mut counters = if resume.selection.counters { commit.run.counters } else { Counters::default() };
    if !resume.selection.optimizer {
        // Moments that start anew are corrected for their bias anew.
        counters.optimizer_steps = 0;
    }
    let iteration = if resume.selection.counters { commit.iteration } else { 0 };
    let scheduler = saved.as_ref().map(|saved| saved.scheduler.clone()).unwrap_or_default();
    let scheduler_samples = if resume.selection.optimizer { scheduler.num_steps } else { 0 };

    if resume.selection.optimizer {
        compare_groups(commit, &trainer.param_groups(state.prefix()))?;
    }
    let mut own: Vec<OwnShard> = own_shards(state.table(), trainer.groups())?;
    let cells = own
        .extract_if(.., |own| state.table().entries()[own.entry].kind == StateKind::Rng)
        .collect::<Vec<_>>();
    own.retain(|own| {
        let entry = &state.table().entries()[own.entry];
        // Masters are the weights, with all their digits.
        let is_master = entry.key.as_str().starts_with(&format!("{}{MASTER}", state.prefix()));
        let is_there = || resume.source.catalog().tensor(&entry.key).is_some();
        wants(resume.selection, entry.kind) || (is_master && is_there())
    });
    let loaded = fill(resume, trainer, state, &own)?;
    let (program, be) = trainer.parts();
    let is_lacking = |param: usize| {
        let key = format!("{}{MASTER}{}", state.prefix(), program.model.table().params[param].key);
        resume.source.catalog().tensor(&TensorKey::new(key)).is_none()
    };
    program.optimizer.restart_masters(be, is_lacking).map_err(CommError::from)?;
    *streams = Streams::derive(trainer.config().seed, trainer.groups(), iteration);
    let continued = match resume.selection.rng {
        true => load_streams(resume, trainer, state, streams)?,
        false => Continued { is_whole: false, cells: false, note: None },
    };
    if continued.cells {
        own.extend(cells);
    }
    prove(resume, trainer, state, streams, &own)?;

    let mut other_step = Vec::new();
    let mut level = Level::L0;
    if let Some(saved) = saved {
        match other_samples(differences, saved.config.batch == trainer.config().batch) {
            None => level = Level::L1,
            Some(note) => other_step.push(note),
        }
    }
    if level == Level::L1 && continued.is_whole {
        level = Level::L2;
    }
    let complete = resume.selection == Selection::ALL && loaded.partial.is_empty();
    other_step.extend(not_restored(resume.selection, &loaded.partial));
    // No number of a step depends on random streams.
    let of_streams = (!resume.selection.rng).then(|| "not restored: random streams".to_owned());
    let notes: Vec<String> = other_step.iter().cloned().chain(continued.note).chain(of_streams).collect();
    let mut partial = loaded.partial;
    if resume.selection.counters && !resume.selection.optimizer {
        partial.push(format!("moments, fresh at step {iteration}"));
    }
    let level = complete.then_some(level);
    if resume.strict && level < Some(Level::L2) {
        let reached = level.map_or("nothing".to_owned(), |level| format!("{level:?}"));
        return Err(ResumeError::NotStrict { reached, notes });
    }
    Ok(Resumed {
        saved_layout: commit.run.layout,
        counters,
        iteration,
        scheduler_samples,
        evaluated: scheduler.evaluated,
        num_tensors: loaded.num_tensors,
        bytes_read: loaded.bytes_read,
        seconds: start.elapsed().as_secs_f64(),
        level,
        notes,
        other_step,
        partial,
    })
}

/// Checks that each parameter is in the group that it was in: groups are tied to names, whatever their order.
///
/// # Errors
/// The parameters that are not.
fn compare_groups(commit: &Commit, own: &ParamGroups) -> Result<(), ResumeError> {
    let saved: ParamGroups = serde_json::from_value(commit.run.groups.clone())
        .map_err(|source| ResumeError::Field { field: "groups", source })?;
    let moved = |from: &[TensorKey], to: &[TensorKey]| {
        let mut keys = from.iter().filter(|key| to.contains(key));
        let first = keys.next().map(|key| format!("`{key}`"))?;
        let others = keys.count();
        Some(if others == 0 { first } else { format!("{first} and {others} more") })
    };
    let directions = [
        (moved(&saved.decay, &own.no_decay), "with weight decay", "without"),
        (moved(&saved.no_decay, &own.decay), "without weight decay", "with it"),
    ];
    let difference = |(moved, saved, wanted): (Option<String>, &str, &str)| {
        let (saved, wanted) = (format!("{saved} for {}", moved?), wanted.to_owned());
        Some(Difference { field: "parameter group", saved, wanted, overridable: false })
    };
    let differences: Vec<Difference> = directions.into_iter().filter_map(difference).collect();
    if differences.is_empty() { Ok(()) } else { Err(ResumeError::Differs { differences }) }
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
) -> Result<Loaded, ResumeError> {
    let wanted: Vec<ShardedTensor> = own.iter().map(|own| own.shard.clone()).collect();
    let strictness = Strictness::new(resume.allow_missing, resume.allow_extra)?;
    let in_scope = |stored: &StoredTensor| {
        wants(resume.selection, stored.kind) || wanted.iter().any(|shard| shard.key == stored.key)
    };
    let plan = plan_load(resume.source.catalog(), &wanted, &strictness, &in_scope)?;
    let comm = Rc::clone(&trainer.comms().tp_dp_cp);
    let (_, be) = trainer.parts();
    let read = resume.source.read(&plan, &mut |target, within, bytes| {
        // A load may take long, and is of no use once another rank has failed.
        comm.check()?;
        let own = &own[target];
        state.write(be, own.entry, &within.shifted_by(own.local.lo()), bytes).map_err(Into::into)
    });
    let report = read.map_err(|error| match error {
        LoadError::Sink { key, source } => match source.downcast::<CommError>() {
            Ok(failed) => ResumeError::Comm(*failed),
            Err(source) => LoadError::Sink { key, source }.into(),
        },
        error => error.into(),
    })?;
    let missing = plan.missing.iter().chain(&plan.extra).map(|key| key.to_string());
    let bytes = trainer.comms().tp_dp_cp.gather_bytes("load.bytes_read", &report.bytes_read.to_le_bytes())?;
    let bytes_read = bytes.iter().map(|b| u64::from_le_bytes(b[..].try_into().expect("eight bytes"))).sum();
    let mut keys: Vec<_> = own.iter().map(|own| own.entry).collect();
    keys.dedup();
    Ok(Loaded { num_tensors: keys.len() - plan.missing.len(), bytes_read, partial: missing.collect() })
}

fn wants(selection: Selection, kind: StateKind) -> bool {
    match kind {
        StateKind::Model => true,
        StateKind::Optimizer => selection.optimizer,
        // Streams are loaded by policy, apart from the rest.
        StateKind::Rng | StateKind::Object => false,
    }
}

/// What, of that which the next step depends on, was not taken.
fn not_restored(selection: Selection, partial: &[String]) -> Option<String> {
    let parts = [(!selection.optimizer, "optimizer"), (!selection.counters, "counters")];
    let names = parts.into_iter().filter(|(left_out, _)| *left_out).map(|(_, name)| name.to_owned());
    let names: Vec<_> = names.chain(partial.iter().cloned()).collect();
    (!names.is_empty()).then(|| format!("not restored: {}", names.join(", ")))
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
    /// Iterations done at the last evaluation.
    pub evaluated: u64,
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
    /// Those of the notes because of which the next step may be another one than the saved run's.
    pub other_step: Vec<String>,
    /// Names that an allow list let pass, and that moments were left behind.
    pub partial: Vec<String>,
}
