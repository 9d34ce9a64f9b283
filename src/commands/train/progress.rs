//! What a run prints and appends to `metrics.jsonl` while it goes on.

use crate::args::TrainArgs;
use crate::location::local_folder;
use crate::metrics::{self, EvalMetrics, Metrics, MetricsFile};
use crate::output::{Output, complain, count, human_bytes, saved_layout};
use crate::report::Refusal;
use crate::start::Start;
use ckpt::Cleared;
use mesh::{ParallelLayout, Schedule};
use serde::Serialize;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use train::config::TrainConfig;
use train::evaluate::Evaluated;
use train::resume::{Level, Resumed};
use train::run::{Event, Step, Trainable};

/// Turns events into lines.
pub(super) struct Progress<'a> {
    output: &'a Output,
    /// The run's name in its lines.
    name: &'a str,
    config: &'a TrainConfig,
    /// Of the run that goes on.
    saved: Option<TrainConfig>,
    log_interval: u64,
    /// Whether a first step that is not the saved run's ends this one.
    strict: bool,
    /// The run and the step that state is taken from.
    loaded_from: Option<LoadedFrom>,
    state: Mutex<State>,
}

struct LoadedFrom {
    run: String,
    step: u64,
    layout: String,
}

struct State {
    metrics: Option<MetricsFile>,
    /// What a run before this one has of the first step after the resume.
    earlier: Option<Metrics>,
    /// Settings that make the first step another one than the saved run's.
    changes: Vec<String>,
    /// Waits for the first step after a resume; why it may differ.
    resumed: Option<Vec<String>>,
}

impl State {
    /// Appends a line to `metrics.jsonl`; what cannot be written is said once.
    fn append(&mut self, metrics: &impl Serialize) {
        let written = self.metrics.as_mut().map_or(Ok(()), |file| file.append(metrics));
        if let Err(error) = written {
            complain(format!("no more metrics are written: {error:#}"));
            self.metrics = None;
        }
    }
}

/// A line with its schema, for `--json`.
#[derive(Serialize)]
struct Document {
    schema: &'static str,
    #[serde(flatten)]
    line: Line,
}

/// One line of output.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Line {
    Fresh { train_iters: u64 },
    Resumed(Box<ResumedLine>),
    L3(L3),
    Step(StepLine),
    Evaluated(EvalMetrics),
    Saved { step: u64, folder: String, bytes: u64, removed: Vec<u64>, in_use: Vec<u64> },
    SaveFailed { step: u64, code: String, message: String, help: String },
    PassedOver { step: u64, consumed_samples: u64 },
    SamplesDropped { epoch: u64, samples: u64 },
    Stopping { step: u64 },
}

#[derive(Debug, Serialize)]
pub(super) struct ResumedLine {
    /// Steps done.
    step: u64,
    from: String,
    /// The step that was saved; another one than `step` for a new run with old weights.
    from_step: u64,
    saved_layout: ParallelLayout,
    layout: ParallelLayout,
    /// For people, SP degree included.
    #[serde(skip)]
    saved_layout_text: String,
    #[serde(skip)]
    layout_text: String,
    tensors: usize,
    bytes: u64,
    seconds: f64,
    level: Option<Level>,
    notes: Vec<String>,
    partial: Vec<String>,
}

/// Whether the first step after a resume is the one that the saved run made.
#[derive(Debug, Serialize)]
pub(super) struct L3 {
    step: u64,
    /// Whether every number is that of the earlier line, bit for bit; `None` if there is no such line.
    identical: Option<bool>,
    found: Numbers,
    earlier: Option<Numbers>,
    /// Why they may differ; empty if they must not.
    not_expected: Vec<String>,
}

/// What a step came to.
#[derive(Debug, Serialize)]
struct Numbers {
    loss: Option<f64>,
    grad_norm: Option<f64>,
    lr: f64,
}

#[derive(Debug, Serialize)]
pub(super) struct StepLine {
    #[serde(flatten)]
    metrics: Metrics,
    train_iters: u64,
    /// False if the step was skipped.
    applied: bool,
}

impl<'a> Progress<'a> {
    /// For a run called `name` that starts at `start` after `done` steps. Without `args` no event will come: another process is told.
    ///
    /// # Errors
    /// If `metrics.jsonl` cannot be read or opened.
    pub(super) fn new(
        args: Option<&TrainArgs>,
        run: &Trainable<'a>,
        start: &Start,
        done: u64,
        name: &'a str,
        output: &'a Output,
    ) -> anyhow::Result<Self> {
        let checkpoint = start.checkpoint.as_ref();
        let loaded_from = checkpoint.map(|checkpoint| LoadedFrom {
            run: checkpoint.store().to_string(),
            step: checkpoint.step(),
            layout: saved_layout(checkpoint.commit()),
        });
        let own = args.and_then(|TrainArgs { logging, checkpoint, .. }| {
            logging.log_dir.clone().or(checkpoint.save.as_deref().and_then(local_folder))
        });
        let loaded_folder = loaded_from.as_ref().and_then(|from| local_folder(&from.run));
        // The first step that is made, numbered from 1 where iterations are from 0.
        let is_skipped = |step: &u64| run.config().iterations_to_skip.contains(&(step - 1));
        let first_step = (done + 1..).find(|step| !is_skipped(step)).expect("some are not passed over");
        // What the run that saved the checkpoint made of the step; others may have gone on from elsewhere.
        let mut earlier = None;
        for (folder, checkpoint) in loaded_folder.iter().chain(&own).zip(checkpoint.iter().cycle()) {
            if earlier.is_none() {
                earlier = metrics::last_of(folder, Some(&checkpoint.commit().writer.run), first_step)?;
            }
        }
        Ok(Progress {
            output,
            name,
            config: run.config(),
            saved: run.saved().map(|saved| saved.config.clone()),
            log_interval: args.and_then(|args| args.logging.log_interval).unwrap_or(1).max(1),
            strict: args.is_some_and(|args| args.checkpoint.strict == Some(true)),
            loaded_from,
            state: Mutex::new(State {
                metrics: own.as_deref().map(MetricsFile::append_to).transpose()?,
                earlier,
                changes: run.changes(),
                resumed: None,
            }),
        })
    }

    /// Prints a line: on stderr what must not be missed, whatever is wanted on stdout. A stdout that cannot be written does
    /// not end a run.
    pub(super) fn line(&self, line: Line) {
        let is_loud = line.is_loud();
        if is_loud {
            complain(&line);
        }
        if is_loud && !self.output.is_json() {
            return;
        }
        if let Err(error) = self.output.result(&Document { schema: "remesh.train/1", line }) {
            complain(format!("stdout cannot be written: {error}"));
        }
    }

    /// Tells of one event.
    ///
    /// # Errors
    /// With `--strict`, a first step that should be the saved run's and is not.
    pub(super) fn observe(&self, event: &Event) -> Result<(), Refusal> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Resumed(resumed) => {
                state.resumed = Some(not_expected(resumed, &state.changes));
                self.line(Line::Resumed(Box::new(self.resumed(resumed))));
                resumed.notes.iter().for_each(complain);
                if let Some(note) =
                    self.saved.as_ref().and_then(|saved| ended_schedule(self.config, saved, resumed))
                {
                    complain(note);
                }
            }
            Event::Step(step) => self.step(step, &mut state)?,
            Event::Evaluated { iteration, evaluated: Evaluated { loss, samples } } => {
                let eval_loss = Some(*loss).filter(|loss| loss.is_finite());
                let (run, step, eval_samples) = (self.name.to_owned(), *iteration, *samples);
                let metrics = EvalMetrics { run, step, eval_loss, eval_samples };
                state.append(&metrics);
                self.line(Line::Evaluated(metrics));
            }
            Event::PassedOver { iteration, consumed_samples } => {
                self.line(Line::PassedOver { step: *iteration, consumed_samples: *consumed_samples });
            }
            Event::SamplesDropped { epoch, samples } => {
                self.line(Line::SamplesDropped { epoch: *epoch, samples: *samples });
            }
            Event::Saved { iteration, report } => {
                let cleared = report.cleared.clone();
                let Cleared { removed, in_use, failed } =
                    cleared.unwrap_or_else(|why| Cleared { failed: Some(why), ..Cleared::default() });
                if let Some(why) = failed {
                    complain(format!("older checkpoints could not all be removed: {why}"));
                }
                let (step, folder, bytes) = (*iteration, report.folder.clone(), report.file_bytes);
                self.line(Line::Saved { step, folder, bytes, removed, in_use });
            }
            Event::SaveFailed { iteration, error } => self.line(Line::SaveFailed {
                step: *iteration,
                code: error.code().to_owned(),
                message: error.to_string(),
                help: error.help(),
            }),
            Event::Stopping { iteration } => self.line(Line::Stopping { step: *iteration }),
        }
        Ok(())
    }

    fn step(&self, step: &Step, state: &mut State) -> Result<(), Refusal> {
        let metrics = Metrics::new(self.name, step);
        let l3 = state.resumed.take().map(|not_expected| l3(&metrics, state.earlier.as_ref(), not_expected));
        if let Some(l3) = l3.as_ref().filter(|l3| self.strict && l3.has_failed()) {
            // The step leaves no line, so that the next attempt is compared with the saved run's, too.
            let help = "leave out --strict to train on; `remesh verify` checks the checkpoint's files";
            return Err(Refusal::new("RM3111", l3.to_string(), help));
        }
        state.append(&metrics);
        let (applied, train_iters) = (step.outcome.applied, self.config.train_iters);
        let is_due = step.iteration.is_multiple_of(self.log_interval) || step.iteration == train_iters;
        if is_due || l3.is_some() || !applied {
            self.line(Line::Step(StepLine { metrics, train_iters, applied }));
        }
        if let Some(l3) = l3 {
            self.line(Line::L3(l3));
        }
        Ok(())
    }

    fn resumed(&self, resumed: &Resumed) -> ResumedLine {
        let from = self.loaded_from.as_ref().expect("only a run that loads resumes");
        ResumedLine {
            step: resumed.iteration,
            from: from.run.clone(),
            from_step: from.step,
            saved_layout: resumed.saved_layout,
            layout: *self.config.parallel.layout(),
            saved_layout_text: from.layout.clone(),
            layout_text: self.config.parallel.to_string(),
            tensors: resumed.num_tensors,
            bytes: resumed.bytes_read,
            seconds: resumed.seconds,
            level: resumed.level,
            notes: resumed.notes.clone(),
            partial: resumed.partial.clone(),
        }
    }
}

/// What is to be said where the checkpoint's schedule has come down before the run ends, which it did not for the saved run,
/// or where it has come down already.
fn ended_schedule(config: &TrainConfig, saved: &TrainConfig, resumed: &Resumed) -> Option<String> {
    let schedule = &config.schedule;
    let lowest = Schedule::new(schedule.clone(), &config.batch).expect("it was checked when it was resolved");
    let lr = lowest.lr(schedule.lr_decay);
    let end = config.batch.steps_within(schedule.lr_decay).max(resumed.iteration);
    let left = config.train_iters.saturating_sub(end);
    let is_meant =
        *schedule != saved.schedule || (end > resumed.iteration && config.train_iters <= saved.train_iters);
    let comes_down = lr == schedule.min_lr && lr < schedule.max_lr;
    (left > 0 && comes_down && !is_meant).then(|| {
        format!(
            "the learning rate is {lr} in the last {}: the checkpoint's schedule comes down in {}; --lr-decay-iters {} spreads \
             it over the whole run",
            count(left, "step"),
            count(config.batch.steps_within(schedule.lr_decay), "step"),
            config.train_iters
        )
    })
}

/// Why the next step may not be the saved run's.
fn not_expected(resumed: &Resumed, changes: &[String]) -> Vec<String> {
    let mut reasons = Vec::new();
    if !changes.is_empty() {
        reasons.push(format!("other {} than in the checkpoint", changes.join(", ")));
    }
    reasons.extend(resumed.other_step.iter().cloned());
    reasons
}

fn l3(metrics: &Metrics, earlier: Option<&Metrics>, not_expected: Vec<String>) -> L3 {
    let found = Numbers::from(metrics);
    let earlier = earlier.map(Numbers::from);
    let identical = earlier.as_ref().map(|earlier| earlier.bits() == found.bits());
    L3 { step: metrics.step, identical, found, earlier, not_expected }
}

impl From<&Metrics> for Numbers {
    fn from(metrics: &Metrics) -> Self {
        Numbers { loss: metrics.loss, grad_norm: metrics.grad_norm, lr: metrics.lr }
    }
}

impl Numbers {
    fn bits(&self) -> [Option<u64>; 3] {
        [self.loss, self.grad_norm, Some(self.lr)].map(|number| number.map(f64::to_bits))
    }
}

impl Line {
    /// Whether it must not be missed.
    fn is_loud(&self) -> bool {
        match self {
            Line::SaveFailed { .. } => true,
            Line::L3(l3) => l3.has_failed(),
            _ => false,
        }
    }
}

impl L3 {
    /// Whether the step should be the earlier one and is not.
    fn has_failed(&self) -> bool {
        self.not_expected.is_empty() && self.identical == Some(false)
    }
}

impl fmt::Display for Document {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.line.fmt(f)
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Line::Fresh { train_iters } => write!(f, "starting afresh, {}", count(*train_iters, "step")),
            Line::Resumed(resumed) => resumed.fmt(f),
            Line::L3(l3) => l3.fmt(f),
            Line::Step(step) => step.fmt(f),
            Line::Evaluated(EvalMetrics { step, eval_loss, eval_samples, .. }) => {
                let loss = eval_loss.map_or_else(|| "not defined".into(), |loss| format!("{loss:.6}"));
                write!(f, "step {step}  validation loss {loss} of {}", count(*eval_samples, "sample"))
            }
            Line::Saved { step, folder, bytes, removed, in_use } => {
                write!(f, "saved step {step} to {folder}, {}", human_bytes(*bytes))?;
                for (steps, fate) in [(removed, "removed"), (in_use, "in use, not removed")] {
                    if !steps.is_empty() {
                        let steps: Vec<_> = steps.iter().map(u64::to_string).collect();
                        write!(f, "; {fate}: {}", steps.join(", "))?;
                    }
                }
                Ok(())
            }
            Line::SaveFailed { step, code, message, help } => {
                write!(f, "step {step} could not be saved ({code}): {message}; {help}")
            }
            Line::PassedOver { step, .. } => write!(f, "step {step} passed over, as asked"),
            Line::SamplesDropped { epoch, samples } => {
                write!(
                    f,
                    "epoch {epoch} ended; {} left unused, too few for a batch",
                    count(*samples, "sample")
                )
            }
            Line::Stopping { step } => write!(f, "stopping after step {step}, as asked"),
        }
    }
}

impl fmt::Display for ResumedLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ResumedLine { step, from, from_step, tensors, seconds, .. } = self;
        let (saved_layout, layout) = (&self.saved_layout_text, &self.layout_text);
        match step == from_step {
            true => write!(f, "resumed step {step} of {from}: {saved_layout} → ")?,
            false => write!(f, "step {step} with weights of step {from_step} of {from}: {saved_layout} → ")?,
        }
        match saved_layout == layout {
            true => f.write_str("the same")?,
            false => f.write_str(layout)?,
        }
        write!(f, ", {}, {} in {seconds:.2} s, ", count(*tensors as u64, "tensor"), human_bytes(self.bytes))?;
        match self.level {
            Some(level) => write!(f, "verified {level:?}"),
            None => f.write_str("verified what was loaded"),
        }
    }
}

impl fmt::Display for L3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "L3 step {}", self.step)?;
        match (self.identical, &self.earlier) {
            _ if !self.not_expected.is_empty() => {
                write!(f, " is not expected to equal the saved run's: {}", self.not_expected.join("; "))
            }
            (Some(false), Some(earlier)) => {
                write!(f, " FAILED: {}, but {} has {earlier}", self.found, metrics::FILE_NAME)
            }
            (Some(_), _) => {
                f.write_str(" equals the saved run's, bit for bit: loss, gradient norm and learning rate")
            }
            (None, _) => write!(
                f,
                " is expected to equal the saved run's; {} has no line of it to compare with",
                metrics::FILE_NAME
            ),
        }
    }
}

impl fmt::Display for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number =
            |value: Option<f64>| value.map_or_else(|| "not finite".into(), |value| value.to_string());
        write!(f, "loss {}, gradient norm {}, lr {}", number(self.loss), number(self.grad_norm), self.lr)
    }
}

impl fmt::Display for StepLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Metrics { step, loss, lr, grad_norm, tokens_per_second, .. } = &self.metrics;
        let number =
            |value: Option<f64>| value.map_or_else(|| "not finite".into(), |value| format!("{value:.6}"));
        write!(f, "step {step}/{}  loss {}  lr {lr:.4e}", self.train_iters, number(*loss))?;
        write!(f, "  grad norm {}  {tokens_per_second:.0} tokens/s", number(*grad_norm))?;
        if self.applied { Ok(()) } else { f.write_str("  skipped, nothing was updated") }
    }
}
