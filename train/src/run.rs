//! A run: resume, step, log, save, stop. Ranks are threads of this process, or processes of their own.
//!
//! What happens is told to an observer as values; nothing here prints, and no file but the token file is opened here.
//! An *iteration* is what checkpoints count: a step that was made, or skipped, or whose batch was passed over.

mod trainable;

pub use ckpt::RunName;
pub use trainable::Trainable;

use crate::backend::Device;
use crate::comm::CommError;
use crate::comm::nccl::Links;
use crate::comm::processes::{self, Launch};
use crate::comm::threads::{RankContext, RankFailure, Reason, World, WorldError, WorldOptions};
use crate::config::ConfigError;
use crate::data::TokenFileError;
use crate::data::sampler::{RankReader, SamplerError};
use crate::evaluate::{Evaluated, Evaluator};
use crate::parallel::{Comms, StepError};
use crate::resume::{ALGORITHM, ResumeError, Resumed, SchedulerState, load};
use crate::state::{RunState, Streams};
use crate::step::{BuildError, StepOutcome, StepSettings, Trainer};
use ckpt::{Counters, Header, Random, Readers, RunRecord, SaveError, SaveReport, Saver, Snapshot};
use mesh::{BatchError, GroupKind, GroupTable, ProcessGroups, Rank, Schedule, ScheduleError};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A run that is about to start.
pub struct Job<'a> {
    /// What to train, and where to go on from.
    pub run: Trainable<'a>,
    /// On what.
    pub device: Device,
    /// Where and when to save; `None` saves nothing.
    pub save: Option<SavePolicy<'a>>,
    /// How long a rank waits for another one that is busy, be it computing or writing, before the run is given up.
    pub timeout: Duration,
    /// Set from outside to end the run after the step in hand, with a save.
    pub stop: &'a AtomicBool,
    /// Is told what happens, on the first rank's thread; an error ends the run before anything else is done or saved.
    pub observer: &'a (dyn Fn(&Event) -> Result<(), ObserverError> + Sync),
}

impl Job<'_> {
    /// How long ranks wait for each other where nothing else is said.
    pub const TIMEOUT: Duration = Duration::from_secs(600);

    /// Checks that the device has kernels for the model.
    fn check_device(&self) -> Result<(), ConfigError> {
        let config = self.run.config();
        let head_dim = config.model.kv_channels as u64;
        if let Some(max) = self.device.head_dim_max().filter(|max| head_dim > *max) {
            return Err(ConfigError::TooLarge { what: "kv-channels", value: head_dim, max });
        }
        match config.documents.is_some_and(|documents| documents.reset_attention) {
            true if !self.device.hides_documents() => {
                Err(ConfigError::Device { what: "reset-attention-mask" })
            }
            _ => Ok(()),
        }
    }
}

/// Why an observer ends a run.
pub type ObserverError = Box<dyn std::error::Error + Send + Sync>;

/// When to save, and with what.
pub struct SavePolicy<'a> {
    /// Steps from one save to the next; the last step is always saved.
    pub interval: u64,
    /// Makes a rank's saver from the exchange among the model's ranks.
    pub saver: &'a (dyn Fn(ckpt::Exchange) -> Saver + Sync),
    /// What `checkpoint.json` says of who writes.
    pub writer: RunName,
    /// The time of day, RFC 3339.
    pub now: fn() -> String,
}

/// Something that happened.
#[derive(Debug)]
pub enum Event {
    /// State was loaded and proved.
    Resumed(Box<Resumed>),
    /// A step was made, or skipped.
    Step(Step),
    /// The batch of an iteration was passed over, as asked for.
    PassedOver {
        /// Iterations done, this one included.
        iteration: u64,
        /// Samples used so far, this batch included.
        consumed_samples: u64,
    },
    /// The validation loss was computed.
    Evaluated {
        /// Iterations done.
        iteration: u64,
        /// What it came to.
        evaluated: Evaluated,
    },
    /// An epoch ended and left samples unused.
    SamplesDropped {
        /// Which epoch, from 0.
        epoch: u64,
        /// How many.
        samples: u64,
    },
    /// A checkpoint is complete.
    Saved {
        /// Its iteration.
        iteration: u64,
        /// What was written.
        report: SaveReport,
    },
    /// A save failed; training goes on.
    SaveFailed {
        /// Of which iteration.
        iteration: u64,
        /// Why.
        error: SaveError,
    },
    /// The run stops because it was asked to.
    Stopping {
        /// After this iteration.
        iteration: u64,
    },
}

/// One iteration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Iterations done, this one included.
    pub iteration: u64,
    /// Learning rate of the update.
    pub lr: f64,
    /// Loss and norm.
    pub outcome: StepOutcome,
    /// Tokens of the global batch per second.
    pub tokens_per_second: f64,
    /// Samples used so far, this batch included.
    pub consumed_samples: u64,
    /// Steps skipped one after another up to this one.
    pub skipped_in_a_row: u32,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunEnd {
    /// Iterations done.
    pub iteration: u64,
    /// Whether it was asked to stop before all was done: the last iteration, and the evaluation after it.
    pub stopped: bool,
}

/// A run that did not come to its end.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The configuration cannot be trained.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The schedule contradicts itself.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// A rank could not be set up.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The state could not be loaded.
    #[error(transparent)]
    Resume(#[from] ResumeError),
    /// Tokens could not be read.
    #[error(transparent)]
    Tokens(#[from] TokenFileError),
    /// A batch size in force does not divide over the ranks.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// The data set gives no order of samples.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// A step failed.
    #[error(transparent)]
    Step(#[from] StepError),
    /// Two saves in a row failed, or the last one.
    #[error("the checkpoint of iteration {iteration} could not be saved")]
    Save {
        /// Of which iteration.
        iteration: u64,
        /// Why.
        source: SaveError,
    },
    /// Too many steps in a row were skipped.
    #[error(
        "{skipped} step{} in a row, up to iteration {iteration}, had values that were not finite or out of range, or no token to learn from",
        if *.skipped == 1 { "" } else { "s" }
    )]
    NotFinite {
        /// How many.
        skipped: u32,
        /// The last of them.
        iteration: u64,
    },
    /// The observer ended the run.
    #[error(transparent)]
    Observer(ObserverError),
    /// Processes were started differently.
    #[error("rank {rank} was started otherwise than rank {first}: {difference}")]
    Start {
        /// The first rank.
        first: Rank,
        /// The first one that differs from it.
        rank: Rank,
        /// In what, with both values.
        difference: String,
    },
    /// Another rank failed.
    #[error(transparent)]
    Comm(#[from] CommError),
}

impl RunError {
    /// Code of the error; that of an observer's is known to the observer alone.
    pub fn code(&self) -> &str {
        match self {
            RunError::Config(error) => error.code(),
            RunError::Schedule(error) => error.code(),
            RunError::Batch(error) => error.code(),
            RunError::Build(error) => error.code(),
            RunError::Resume(error) => error.code(),
            RunError::Tokens(error) => error.code(),
            RunError::Sampler(error) => error.code(),
            RunError::Step(error) => error.code(),
            RunError::Save { source, .. } => source.code(),
            RunError::NotFinite { .. } => "RM3201",
            RunError::Observer(_) => "RM9000",
            RunError::Start { .. } => "RM3207",
            RunError::Comm(error) => error.code(),
        }
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            RunError::Config(error) => error.help(),
            RunError::Schedule(error) => error.help(),
            RunError::Batch(error) => error.help(),
            RunError::Build(error) => error.help().to_owned(),
            RunError::Resume(error) => error.help(),
            RunError::Tokens(error) => error.help(),
            RunError::Sampler(error) => error.help(),
            RunError::Step(error) => error.help().to_owned(),
            RunError::Save { source, .. } => source.help(),
            RunError::NotFinite { .. } => {
                "a lower --lr, a longer warm-up or a smaller --clip-grad may help; the last save is intact"
                    .to_owned()
            }
            RunError::Observer(_) => "the observer's words say why".to_owned(),
            RunError::Start { .. } => {
                "start all processes with the same flags, files and folders; --ckpt-step says which checkpoint is meant"
                    .to_owned()
            }
            RunError::Comm(error) => error.help().to_owned(),
        }
    }
}

/// Runs `job` on its ranks and returns when all have ended.
///
/// # Errors
/// A model that the device has no kernels for, before any rank starts; the first rank's failure after that.
pub fn run(job: &Job) -> Result<RunEnd, Box<WorldError<RunError>>> {
    job.check_device().map_err(|error| {
        let first = RankFailure { rank: Rank(0), reason: Reason::Error(error.into()) };
        WorldError { first, followers: Vec::new() }
    })?;
    let layout = job.run.config().parallel.layout();
    let groups = Arc::new(GroupTable::new("model", layout));
    let options = WorldOptions { timeout: job.timeout, ..WorldOptions::default() };
    let run_rank = |context: &RankContext| run_rank(job, &groups.for_rank(context.rank()), "", context);
    let ends = World::run(layout.world_size(), options, run_rank)?;
    Ok(ends[0])
}

/// Runs this process's rank of `job`, of which every other rank is a process with the same job. `stop` is the job's, and is set, too,
/// when the launcher asks for it.
///
/// # Errors
/// As [`run`]; ranks that do not find each other, or were started differently.
pub fn run_process(
    job: &Job,
    launch: &Launch,
    stop: &Arc<AtomicBool>,
) -> Result<RunEnd, Box<WorldError<RunError>>> {
    job.check_device().map_err(|error| {
        let first = RankFailure { rank: launch.rank, reason: Reason::Error(error.into()) };
        WorldError { first, followers: Vec::new() }
    })?;
    let table = Arc::new(GroupTable::new("model", job.run.config().parallel.layout()));
    let run_rank = |context: &RankContext| {
        let groups = table.for_rank(context.rank());
        agree_on_start(job, &groups, context)?;
        run_rank(job, &groups, "", context)
    };
    Ok(processes::run(launch, job.timeout, stop, run_rank)?)
}

/// Ranks that are processes were each told what to train and found data, and where to go on from, by themselves.
fn agree_on_start(job: &Job, groups: &ProcessGroups, context: &RankContext) -> Result<(), RunError> {
    let own = json!({
        "settings": job.run.config(),
        "data": job.run.next(),
        "checkpoint": job.run.from().map(|from| json!({
            "iteration": from.commit().iteration,
            "fingerprint": from.commit().fingerprint,
        })),
        "loads": job.run.from().map(|from| from.choices()),
        "save-interval": job.save.as_ref().map(|policy| policy.interval),
    });
    let comm = context.comm_for("start", groups, GroupKind::TpDpCp);
    let starts = comm.gather_bytes("run.start", own.to_string().as_bytes())?;
    let ranks = groups.table().ranks();
    let Some(other) = starts.iter().position(|start| *start != starts[0]) else { return Ok(()) };
    let [first_start, start] =
        [0, other].map(|rank| serde_json::from_slice::<Value>(&starts[rank]).unwrap_or_default());
    // What was said before what follows from it.
    let parts = ["settings", "data", "checkpoint", "loads", "save-interval"];
    let difference = parts.iter().find_map(|part| first_difference(&first_start[part], &start[part], part));
    let difference = difference.unwrap_or_default();
    Err(RunError::Start { first: ranks[0], rank: ranks[other], difference })
}

/// The first value by which `other` differs from `first`, with its path.
fn first_difference(first: &Value, other: &Value, path: &str) -> Option<String> {
    match (first, other) {
        (Value::Object(first), Value::Object(other)) if first.keys().eq(other.keys()) => {
            let of_field = |(name, first): (&String, &Value)| {
                first_difference(first, &other[name], &format!("{path}.{name}"))
            };
            first.iter().find_map(of_field)
        }
        _ => (first != other).then(|| format!("{path} is {other}, not {first}")),
    }
}

/// One rank's part of [`run`], for a model with these process groups whose keys begin with `key_prefix`. Several models may
/// live in one world, each on its own ranks.
///
/// # Errors
/// See [`run`].
pub fn run_rank(
    job: &Job,
    groups: &ProcessGroups,
    key_prefix: &str,
    context: &RankContext,
) -> Result<RunEnd, RunError> {
    let config = job.run.config();
    let mut rank = RankRun::new(job, groups, key_prefix, context)?;
    rank.resume()?;
    // A signal may have come between the step that was saved and its evaluation.
    let mut stopped = rank.evaluate_if_due()?;
    while !stopped && rank.iteration < config.train_iters {
        match config.iterations_to_skip.contains(&rank.iteration) {
            true => rank.pass_over()?,
            false => rank.step()?,
        }
        stopped = rank.is_stopped()? || rank.evaluate_if_due()?;
        if stopped {
            rank.tell(|| Event::Stopping { iteration: rank.iteration })?;
        }
        rank.save_if_due(stopped || rank.iteration == config.train_iters)?;
    }
    Ok(RunEnd {
        iteration: rank.iteration,
        stopped: rank.iteration < config.train_iters || rank.is_evaluation_due(),
    })
}

/// One rank's run, step by step.
pub struct RankRun<'a> {
    job: &'a Job<'a>,
    is_first: bool,
    trainer: Trainer,
    state: RunState,
    streams: Streams,
    reader: RankReader,
    evaluator: Option<Evaluator<'a>>,
    schedule: Schedule,
    saver: Option<Saver>,
    key_prefix: String,
    iteration: u64,
    counters: Counters,
    /// Samples of the last step, fillers included.
    batch_size: u64,
    /// Samples behind successful updates.
    scheduler_samples: u64,
    /// Iterations done at the last evaluation.
    evaluated: u64,
    skipped_in_a_row: u32,
    failed_saves: u32,
    /// What the run's state does not have from where it comes: see [`Resumed::partial`].
    partial: Vec<String>,
}

impl<'a> RankRun<'a> {
    /// A rank that starts from scratch. Collective, as all that follows.
    ///
    /// # Errors
    /// Groups that the model does not divide over, a device without room, a schedule that is none.
    pub fn new(
        job: &'a Job<'a>,
        groups: &ProcessGroups,
        key_prefix: &str,
        context: &RankContext,
    ) -> Result<Self, RunError> {
        let config = job.run.config();
        let links = Links::connect(context, &job.device, groups, Comms::NEEDED)?;
        let comms = Comms::new(groups, |kind| links.comm(context, groups, kind)).map_err(BuildError::from)?;
        let mut trainer = Trainer::new(config, groups, comms, &job.device)?;
        let state = RunState::new(&mut trainer, key_prefix).map_err(BuildError::from)?;
        let saver = job.save.as_ref().map(|policy| {
            let comm = context.comm_for("save", groups, GroupKind::TpDpCp);
            (policy.saver)(Box::new(move |bytes, readers| match readers {
                Readers::All => Ok(comm.gather_bytes("save.agree", bytes)?),
                Readers::First => Ok(comm.gather_bytes_at_first("save.report", bytes)?),
            }))
        });
        Ok(RankRun {
            job,
            is_first: groups.rank() == groups.table().ranks()[0],
            state,
            streams: Streams::derive(config.seed, groups, 0),
            reader: RankReader::new(config, groups),
            evaluator: job.run.evaluator(groups),
            schedule: Schedule::new(config.schedule.clone(), &config.batch)?,
            saver,
            key_prefix: key_prefix.to_owned(),
            trainer,
            iteration: 0,
            counters: Counters::default(),
            batch_size: config.batch.size_at(0),
            scheduler_samples: 0,
            evaluated: 0,
            skipped_in_a_row: 0,
            failed_saves: 0,
            partial: Vec::new(),
        })
    }

    /// The random streams of this rank's coordinates.
    pub fn streams(&mut self) -> &mut Streams {
        &mut self.streams
    }

    fn tell(&self, event: impl FnOnce() -> Event) -> Result<(), RunError> {
        match self.is_first {
            true => (self.job.observer)(&event()).map_err(RunError::Observer),
            false => Ok(()),
        }
    }

    /// Takes the state from the checkpoint that the run goes on from, if there is one, and proves it.
    ///
    /// # Errors
    /// Anything that keeps the state from being what was saved.
    pub fn resume(&mut self) -> Result<Option<Resumed>, RunError> {
        let Some(from) = self.job.run.from() else { return Ok(None) };
        let resumed = load(from, &mut self.trainer, &self.state, &mut self.streams)?;
        self.iteration = resumed.iteration;
        self.counters = resumed.counters;
        self.batch_size = self.job.run.sampler().batch_size(self.counters.consumed_train_samples);
        self.scheduler_samples = resumed.scheduler_samples;
        self.evaluated = resumed.evaluated;
        self.partial = [&from.commit().partial[..], &resumed.partial].concat();
        self.partial.sort();
        self.partial.dedup();
        self.tell(|| Event::Resumed(Box::new(resumed.clone())))?;
        Ok(Some(resumed))
    }

    /// Passes over the batch of the next iteration: its samples are consumed, and nothing is updated.
    fn pass_over(&mut self) -> Result<(), RunError> {
        let used = self.consume();
        self.counters.skipped_train_samples += used;
        self.tell(|| Event::PassedOver {
            iteration: self.iteration,
            consumed_samples: self.counters.consumed_train_samples,
        })?;
        self.tell_dropped()
    }

    /// Counts an iteration and the samples of its batch, which are returned. What was asked for beyond them is skipped.
    fn consume(&mut self) -> u64 {
        let (run, consumed) = (&self.job.run, self.counters.consumed_train_samples);
        let used = run.sampler().batch_len(consumed);
        self.batch_size = run.sampler().batch_size(consumed);
        let asked =
            run.config().asked_batch.as_ref().map_or(self.batch_size, |batch| batch.size_at(consumed));
        self.iteration += 1;
        self.counters.consumed_train_samples += used;
        self.counters.skipped_train_samples += asked - self.batch_size;
        used
    }

    /// Says what an epoch that just ended has left unused.
    fn tell_dropped(&self) -> Result<(), RunError> {
        match self.job.run.sampler().dropped_at(self.counters.consumed_train_samples) {
            Some((epoch, samples)) => self.tell(|| Event::SamplesDropped { epoch, samples }),
            None => Ok(()),
        }
    }

    /// The next iteration.
    ///
    /// # Errors
    /// A failed rank or device, unreadable tokens, or too many skipped steps in a row.
    pub fn step(&mut self) -> Result<(), RunError> {
        let start = Instant::now();
        let consumed = self.counters.consumed_train_samples;
        let slots = self.job.run.sampler().batch(consumed);
        let batch = self.reader.read(self.job.run.tokens(), &slots)?;
        let lr = self.schedule.lr(self.scheduler_samples);
        let settings = StepSettings {
            lr,
            weight_decay: self.schedule.weight_decay(self.scheduler_samples),
            update: self.counters.optimizer_steps + 1,
        };
        let outcome = self.trainer.step(&batch, &settings)?;

        let used = self.consume();
        let seq_length = self.job.run.config().parallel.seq_length();
        self.counters.tokens += used * seq_length;
        if outcome.applied {
            self.counters.optimizer_steps += 1;
            self.scheduler_samples += self.batch_size;
            self.skipped_in_a_row = 0;
        } else {
            self.counters.skipped_train_samples += used;
            self.skipped_in_a_row += 1;
        }
        let seconds = start.elapsed().as_secs_f64();
        self.tell(|| {
            Event::Step(Step {
                iteration: self.iteration,
                lr,
                outcome,
                tokens_per_second: (used * seq_length) as f64 / seconds,
                consumed_samples: self.counters.consumed_train_samples,
                skipped_in_a_row: self.skipped_in_a_row,
            })
        })?;
        self.tell_dropped()?;
        match self.skipped_in_a_row {
            skipped if skipped > 0 && skipped >= self.job.run.config().max_skipped_in_a_row => {
                Err(RunError::NotFinite { skipped, iteration: self.iteration })
            }
            _ => Ok(()),
        }
    }

    /// Computes the validation loss if it is due after this iteration and is not there yet. True if any rank is asked to stop
    /// before it is: it is computed when the run goes on.
    fn evaluate_if_due(&mut self) -> Result<bool, RunError> {
        let iteration = self.iteration;
        let Some(evaluator) = self.evaluator.as_ref().filter(|_| self.is_evaluation_due()) else {
            return Ok(false);
        };
        let Some(evaluated) = evaluator.run(&mut self.trainer, self.job.stop)? else { return Ok(true) };
        self.evaluated = iteration;
        self.counters.consumed_valid_samples += evaluated.samples;
        self.tell(|| Event::Evaluated { iteration, evaluated })?;
        Ok(false)
    }

    /// Whether an evaluation is due after this iteration and not there yet.
    fn is_evaluation_due(&self) -> bool {
        let (iteration, train_iters) = (self.iteration, self.job.run.config().train_iters);
        let is_due = |evaluator: &Evaluator| evaluator.is_due(iteration, train_iters);
        self.evaluated != iteration && self.evaluator.as_ref().is_some_and(is_due)
    }

    /// Whether any rank was asked to stop: all of them stop after the same step.
    fn is_stopped(&self) -> Result<bool, RunError> {
        let asked = u8::from(self.job.stop.load(Ordering::Relaxed));
        let all = self.trainer.comms().tp_dp_cp.gather_bytes("run.stop", &[asked])?;
        Ok(all.iter().any(|asked| asked[..] == [1]))
    }

    fn save_if_due(&mut self, last: bool) -> Result<(), RunError> {
        let Some(policy) = &self.job.save else { return Ok(()) };
        let is_interval = policy.interval > 0 && self.iteration.is_multiple_of(policy.interval);
        // Before the batch changes, so that what comes then can be tried again.
        let consumed = self.counters.consumed_train_samples;
        let changes = self.job.run.sampler().batch_size(consumed) != self.batch_size;
        match last || is_interval || changes {
            true => self.save(policy, last),
            false => Ok(()),
        }
    }

    /// Saves the state as it is now. A failed save is told and training goes on, unless it is the second in a row or `last`, or
    /// every later one would fail alike.
    ///
    /// # Errors
    /// The save's, if training cannot go on.
    ///
    /// # Panics
    /// If the job saves nothing.
    pub fn save(&mut self, policy: &SavePolicy, last: bool) -> Result<(), RunError> {
        let header = self.header(policy)?;
        let saver = self.saver.as_ref().expect("a run with a policy has a saver");
        let groups = self.trainer.groups().clone();
        let (state, streams) = (&self.state, &self.streams);
        let (_, be) = self.trainer.parts();
        let saved = saver.save(Snapshot {
            table: state.table(),
            groups: &groups,
            header,
            read: &mut |entry, local, bytes| Ok(state.read(be, streams, entry, local, bytes)?),
        });
        let iteration = self.iteration;
        match saved {
            Ok(report) => {
                self.failed_saves = 0;
                self.tell(|| Event::Saved { iteration, report })
            }
            Err(source) if last || self.failed_saves > 0 || source.is_final() => {
                Err(RunError::Save { iteration, source })
            }
            Err(error) => {
                self.failed_saves += 1;
                self.tell(|| Event::SaveFailed { iteration, error })
            }
        }
    }

    /// What `checkpoint.json` says beside what the saver computes.
    fn header(&self, policy: &SavePolicy) -> Result<Header, RunError> {
        let config = self.job.run.config();
        let json = |value: Result<_, serde_json::Error>| value.expect("plain data");
        let scheduler = SchedulerState { num_steps: self.scheduler_samples, evaluated: self.evaluated };
        // One rank reads the next batch for all of them.
        let data = match self.is_first {
            true => serde_json::to_vec(&self.job.run.data(self.counters.consumed_train_samples)?),
            false => Ok(Vec::new()),
        };
        let data = self.trainer.comms().tp_dp_cp.gather_bytes("save.data", &data.expect("plain data"))?;
        Ok(Header {
            iteration: self.iteration,
            created: (policy.now)(),
            writer: policy.writer.clone(),
            run: RunRecord {
                counters: self.counters,
                scheduler: json(serde_json::to_value(scheduler)),
                groups: json(serde_json::to_value(self.trainer.param_groups(&self.key_prefix))),
                layout: *config.parallel.layout(),
                numerics: json(serde_json::to_value(&config.numerics)),
                config: json(serde_json::to_value(config)),
                random: Random {
                    algorithm: ALGORITHM.to_owned(),
                    seed: config.seed,
                    ordinal: self.counters.consumed_train_samples,
                },
                data: json(serde_json::from_slice(&data[0])),
            },
            partial: self.partial.clone(),
        })
    }
}
