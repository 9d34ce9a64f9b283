//! `remesh train`: resolves what was said, finds where to go on from, and runs.

mod launcher;
mod progress;

use crate::args::{DeviceArg, RanksAs, RunArgs, Said, TrainArgs, TrainingArgs, resolve};
use crate::device;
use crate::memory;
use crate::output::{Output, complain, count, step_list};
use crate::report::{Refusal, exit_code, failure, is_damage};
use crate::start::{self, Start};
use anyhow::Context;
use ckpt::{Checkpoint, OpenError, Saver};
use mesh::{ParallelConfig, Rank, Source};
use progress::{Line, Progress};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::flag;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use train::comm::CommError;
use train::comm::processes::Launch;
use train::config::TrainConfig;
use train::data::{Blend, Parts, Tokenizer};
use train::resume::SavedRun;
use train::run::{Event, Job, RunName, SavePolicy, Trainable};

/// Flags of `remesh train`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TrainCommand {
    /// Print where every number of the layout comes from
    #[arg(long, short)]
    verbose: bool,
    #[command(flatten)]
    run: RunArgs,
}

/// What was said, merged, with the layout resolved.
struct Prepared {
    args: TrainArgs,
    parallel: ParallelConfig,
    /// The data's.
    tokenizer: Option<Tokenizer>,
    tokens: Blend,
    /// What evaluations read.
    validation: Option<Blend>,
}

/// How a run ended.
struct End {
    /// Whether it was asked to stop before all was done.
    stopped: bool,
    /// Whether `--save` holds what it came to.
    is_saved: bool,
}

/// Trains; exit code 75 if a signal ended the run after a complete save.
pub(crate) fn run(command: TrainCommand, output: &Output) -> anyhow::Result<ExitCode> {
    let signals = Signals::register()?;
    if let Some(launch) = Launch::from_environment(|name| std::env::var(name).ok())? {
        return match launch.is_first() {
            true => run_rank(command, &launch, &signals, output),
            false => run_rank(command, &launch, &signals, &Output::said_elsewhere()),
        };
    }
    let said = prepare(command, None, output)?;
    let num_ranks = said.parallel.layout().world_size();
    if num_ranks > 1 && ranks_as(&said.args.training) == RanksAs::Processes {
        // What is no error is said by rank 0.
        Output::said_elsewhere();
        check_before_ranks_start(&said)?;
        return launcher::run(num_ranks, said.args.training.timeout(), &signals);
    }
    let mut damaged = Vec::new();
    loop {
        let start = start::find(&said.args.checkpoint, damaged.last().copied())?;
        match (train_from(&said, &start, &damaged, None, &signals, output), &start.checkpoint) {
            (Ok(end), _) => return Ok(signals.exit_code(end)),
            // Found while the latest was read: the next older one may be whole.
            (Err(error), Some(checkpoint)) if start.is_latest && is_damage(&error) => {
                complain(format!("step {} is damaged and passed over: {error:#}", checkpoint.step()));
                damaged.push(checkpoint.step());
            }
            (Err(error), _) => return Err(error),
        }
    }
}

/// Trains as one of several processes. A failure is printed where it happened and by rank 0, that of rank 0 by rank 1, and damage in
/// the latest checkpoint ends the job: ranks cannot each go back by themselves.
fn run_rank(
    command: TrainCommand,
    launch: &Launch,
    signals: &Signals,
    output: &Output,
) -> anyhow::Result<ExitCode> {
    let said = prepare(command, Some(launch), output)?;
    let start = start::find(&said.args.checkpoint, None)?;
    match train_from(&said, &start, &[], Some(launch), signals, output) {
        Ok(end) => Ok(signals.exit_code(end)),
        Err(error) => {
            let told_by = match error.downcast_ref::<CommError>() {
                Some(
                    CommError::PeerFailed { rank: Rank(0), .. } | CommError::PeerLost { rank: Rank(0), .. },
                ) => Rank(1),
                Some(_) => Rank(0),
                None => launch.rank,
            };
            if launch.rank == told_by { Err(error) } else { Ok(exit_code(&error)) }
        }
    }
}

/// What ranks are that no launcher has started.
fn ranks_as(args: &TrainingArgs) -> RanksAs {
    args.ranks_as.unwrap_or(match args.device {
        Some(DeviceArg::Cuda) => RanksAs::Processes,
        Some(DeviceArg::Cpu) | None => RanksAs::Threads,
    })
}

fn prepare(command: TrainCommand, launch: Option<&Launch>, output: &Output) -> anyhow::Result<Prepared> {
    let mut said = command.run.said(output)?;
    if let Some(launch) = launch {
        said = of_launch(said, launch)?;
    }
    let (args, parallelism) = (said.args().clone(), said.parallelism());
    resolve::require(&args)?;
    let parallel = resolve::parallel(&said)?;
    resolve::check_groups(&parallelism.resolve_groups(parallel.layout())?)?;
    if command.verbose {
        parallelism.explain(&parallel).iter().for_each(|line| output.note(line));
    }
    resolve::check_flags(&args, parallel)?;
    args.checkpoint.faults().into_iter().next().map_or(Ok(()), Err)?;
    let (tokenizer, files) = (args.data.tokenizer()?, args.data.files()?.expect("it is required"));
    let Parts { training: tokens, validation } = Blend::open_parts(&files.training, &files.split)?;
    let validation = match files.validation {
        Some(files) => Some(Blend::open(&files)?),
        None => validation,
    };
    Ok(Prepared { args, parallel, tokenizer, tokens, validation })
}

/// The same where a launcher says how many ranks there are.
///
/// # Errors
/// If another number is asked for.
fn of_launch(said: Said, launch: &Launch) -> Result<Said, Refusal> {
    match said.args().training.nproc_per_node {
        None => {
            let training = TrainingArgs { nproc_per_node: Some(launch.num_ranks), ..TrainingArgs::default() };
            Ok(said.over(Source::ProgramDefault, TrainArgs { training, ..TrainArgs::default() }))
        }
        Some(ranks) if ranks == launch.num_ranks => Ok(said),
        Some(ranks) => {
            let asked = count(ranks, "rank");
            let message = format!("{asked} are asked for, and a launcher has started {}", launch.num_ranks);
            let help = "leave out --nproc-per-node where a launcher says it";
            Err(Refusal::new("RM6003", message, help))
        }
    }
}

/// What all ranks would refuse is said once, before any of them is there.
fn check_before_ranks_start(said: &Prepared) -> anyhow::Result<()> {
    let args = &said.args.checkpoint;
    let start = start::find(args, None)?;
    let continued = start.checkpoint.as_ref().filter(|_| args.selection().counters);
    trainable(said, &start, &config(said, continued)?)?;
    device::check(said.args.training.device.unwrap_or_default())?;
    if let Some(save) = &args.save {
        let iteration = continued.map_or(0, Checkpoint::step);
        start::destination(save, iteration, &[], args.overwrite == Some(true))?;
    }
    Ok(())
}

/// The configuration of a run that goes on from `continued`.
fn config(said: &Prepared, continued: Option<&Checkpoint>) -> anyhow::Result<TrainConfig> {
    let saved = continued.map(|checkpoint| SavedRun::of(checkpoint.commit())).transpose()?;
    let saved = saved.as_ref().map(|saved| &saved.config);
    resolve::config(&said.args, said.parallel, said.tokenizer.as_ref(), saved)
}

/// A run of `config` that can be trained here, from `start` on.
fn trainable<'a>(
    said: &'a Prepared,
    start: &'a Start,
    config: &'a TrainConfig,
) -> anyhow::Result<Trainable<'a>> {
    memory::check(config, said.args.training.device.unwrap_or_default())?;
    let resume = start.checkpoint.as_ref().map(|checkpoint| said.args.checkpoint.resume(checkpoint));
    let run = Trainable::new(config, &said.tokens, resume)?;
    match &said.validation {
        Some(validation) => Ok(run.evaluated_on(validation)?),
        None if config.evaluation.is_some() => {
            let help = "say --split 969,30,1, or --valid-data-path PREFIX; --eval-iters 0 evaluates nothing";
            Err(Refusal::new("RM6004", "there are no validation data to evaluate on", help).into())
        }
        None => Ok(run),
    }
}

fn train_from(
    said: &Prepared,
    start: &Start,
    damaged: &[u64],
    launch: Option<&Launch>,
    signals: &Signals,
    output: &Output,
) -> anyhow::Result<End> {
    let args = &said.args.checkpoint;
    let continued = start.checkpoint.as_ref().filter(|_| args.selection().counters);
    let config = config(said, continued)?;
    let device = said.args.training.device.unwrap_or_default();
    let run = trainable(said, start, &config)?;

    let device = match launch {
        Some(launch) => device::open_own(device, launch.local_rank)?,
        None => device::open(device, config.parallel.layout().world_size())?,
    };
    let is_first = launch.is_none_or(Launch::is_first);
    let name = run_name();
    let iteration = continued.map_or(0, |checkpoint| checkpoint.step());
    let damaged = if start.is_in_save { damaged } else { &[] };
    let overwrite = args.overwrite == Some(true);
    let store = args.save.as_deref().map(|save| start::destination(save, iteration, damaged, overwrite));
    let store = store.transpose()?;
    // Only once it is sure what the run goes on from.
    let set_newer_aside = || -> Result<(), OpenError> {
        let Some(store) = store.as_ref().filter(|_| overwrite && is_first) else { return Ok(()) };
        let steps = store.set_aside(iteration, &name.run)?;
        if !steps.is_empty() {
            complain(format!("set aside in {store}, as asked: {}", step_list(&steps)));
        }
        Ok(())
    };
    if is_first {
        run.other_validation().iter().for_each(complain);
    }
    let logs = is_first.then_some(&said.args);
    let progress = Progress::new(logs, &run, start, iteration, &name.run, output)?;
    // The first rank alone is told when training begins.
    if !is_first {
        signals.training_begins();
    }
    if start.checkpoint.is_none() {
        signals.training_begins();
        set_newer_aside()?;
        progress.line(Line::Fresh { train_iters: config.train_iters });
    }
    let saver = store.as_ref().map(|store| {
        let resumed_from = start.checkpoint.as_ref().filter(|_| start.is_in_save).map(Checkpoint::step);
        let retention = args.retention(resumed_from);
        move |exchange| {
            let saver = Saver::new(store.clone(), exchange).replacing(damaged).going_on_from(iteration);
            saver.clearing(retention)
        }
    });
    let job = Job {
        run,
        device,
        save: saver.as_ref().map(|saver| SavePolicy {
            interval: args.save_interval.unwrap_or(0),
            saver,
            writer: name.clone(),
            now,
        }),
        timeout: said.args.training.timeout(),
        stop: &signals.stop,
        observer: &|event| {
            if let Event::Resumed(_) = event {
                signals.training_begins();
                set_newer_aside()?;
            }
            Ok(progress.observe(event)?)
        },
    };
    let end = match launch {
        Some(launch) => train::run::run_process(&job, launch, &signals.stop),
        None => train::run::run(&job),
    };
    let end = end.map_err(|error| failure(*error))?;
    if end.iteration == iteration && iteration >= config.train_iters {
        output.note(format!("nothing to train: {iteration} of {} done", count(config.train_iters, "step")));
    }
    let is_saved = args.save.is_some() && (end.iteration > iteration || start.is_in_save);
    Ok(End { stopped: end.stopped, is_saved })
}

fn run_name() -> RunName {
    let pid = std::process::id();
    let started = jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ");
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname");
    // In containers process numbers are often the same.
    let random = RandomState::new().build_hasher().finish() as u32;
    RunName {
        run: format!("{started}-{pid}-{random:08x}"),
        host: host.map_or_else(|_| "unknown".into(), |host| host.trim().to_owned()),
        pid,
        program: concat!("remesh ", env!("CARGO_PKG_VERSION")).into(),
    }
}

fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// SIGINT, SIGTERM and SIGUSR1: the first asks the run to stop after the step in hand, another one ends the process at once. So
/// does the first while state is still being looked for and loaded: there is nothing to save.
struct Signals {
    /// Whether training has not begun.
    is_starting: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    first: Arc<AtomicUsize>,
}

impl Signals {
    /// What follows the first signal more closely is one request with it: `timeout` signals a process and then its group.
    const ONE_REQUEST: Duration = Duration::from_secs(1);

    fn register() -> anyhow::Result<Self> {
        let is_starting = Arc::new(AtomicBool::new(true));
        let signals = Signals { is_starting, stop: Arc::default(), first: Arc::default() };
        let (is_starting, stop) = (Arc::clone(&signals.is_starting), Arc::clone(&signals.stop));
        let first = Arc::clone(&signals.first);
        let mut received = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGUSR1])
            .context("installing signal handlers")?;
        // A file that may not grow is then an error like a full disk.
        flag::register(SIGXFSZ, Arc::default()).context("installing signal handlers")?;
        let listen = move || {
            let mut asked: Option<Instant> = None;
            for signal in received.forever() {
                match asked {
                    None if !is_starting.load(Ordering::Relaxed) => {
                        asked = Some(Instant::now());
                        first.store(signal as usize, Ordering::Relaxed);
                        stop.store(true, Ordering::Relaxed);
                    }
                    Some(asked) if asked.elapsed() < Self::ONE_REQUEST => {}
                    _ => signal_hook::low_level::exit(128 + signal),
                }
            }
        };
        thread::Builder::new().name("signals".to_owned()).spawn(listen).context("starting a thread")?;
        Ok(signals)
    }

    fn training_begins(&self) {
        self.is_starting.store(false, Ordering::Relaxed);
    }

    fn exit_code(&self, end: End) -> ExitCode {
        match (end.stopped, end.is_saved) {
            (false, _) => ExitCode::SUCCESS,
            (true, true) => ExitCode::from(75),
            (true, false) => self.stopped_code(),
        }
    }

    /// That of a run that was stopped and saved nothing. Where another process of the job had the signal, it is as good as SIGTERM.
    fn stopped_code(&self) -> ExitCode {
        let signal = match self.first.load(Ordering::Relaxed) {
            0 => SIGTERM,
            signal => signal as i32,
        };
        ExitCode::from(128 + signal as u8)
    }
}
