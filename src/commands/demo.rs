//! `remesh demo`: trains a small model, resumes it from half-way under three other layouts, and compares every loss and the
//! final state with the run that never stopped.

use crate::commands::digest::{self, Digests};
use crate::location::Location;
use crate::metrics::{self, Metrics};
use crate::output::{Output, table};
use crate::report::Refusal;
use anyhow::{Context, ensure};
use clap::Parser;
use serde::Serialize;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// What the model reads: this project's own documents.
const DOCUMENTS: [(&str, &str); 5] = [
    ("README.md", include_str!("../../README.md")),
    ("ARCHITECTURE.md", include_str!("../../ARCHITECTURE.md")),
    ("cli.md", include_str!("../../docs/cli.md")),
    ("format.md", include_str!("../../docs/format.md")),
    ("resume.md", include_str!("../../docs/resume.md")),
];

const MODEL: &str = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --seq-length 128 \
                     --micro-batch-size 1 --global-batch-size 4 --hidden-dropout 0.1 --attention-dropout 0.1 --lr 3e-3 \
                     --train-iters 10";

/// The name of a resumed run, and its layout.
const RESUMED: [(&str, &str); 3] = [
    ("CP 4", "--context-parallel-size 4"),
    ("2 sequence shards", "--weight-shards 2 --seq-shards 2"),
    ("TP 2 + SP", "--tensor-model-parallel-size 2 --sequence-parallel"),
];

/// The step that is resumed from.
const HALF: u64 = 5;

/// Flags of `remesh demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// Work in FOLDER and leave everything there [default: a temporary folder that is removed]
    #[arg(value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

#[derive(Serialize)]
struct Comparison {
    schema: &'static str,
    /// The layouts of the resumed runs.
    layouts: Vec<&'static str>,
    steps: Vec<Row>,
    /// Whether the SHA-256 of each tensor of model and optimizer is the same after the last step.
    state_equal: bool,
    equal: bool,
}

/// One step: the losses of the resumed runs beside that of the run that never stopped.
#[derive(Serialize)]
struct Row {
    step: u64,
    straight: f64,
    resumed: Vec<f64>,
    equal: bool,
}

/// A run that has ended.
struct Trained {
    metrics: Vec<Metrics>,
    digests: Digests,
}

/// Runs the demonstration; exit code 1 if anything differs.
pub(crate) fn run(args: &DemoArgs, output: &Output) -> anyhow::Result<ExitCode> {
    let temporary;
    let folder = match &args.folder {
        Some(folder) => folder,
        None => {
            temporary = tempfile::tempdir().context("making a temporary folder")?;
            &temporary.path().to_owned()
        }
    };
    let comparison = compare(folder, output)?;
    output.result(&comparison)?;
    Ok(if comparison.equal { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn compare(folder: &Path, output: &Output) -> anyhow::Result<Comparison> {
    let at = |name: &str| folder.join(name).display().to_string();
    if folder.join("straight").exists() {
        let help = "give another folder, or remove this one";
        let message = format!("`{}` holds a demonstration already", folder.display());
        return Err(Refusal::new("RM7004", message, help).into());
    }
    std::fs::create_dir_all(folder).with_context(|| format!("making `{}`", folder.display()))?;
    for (name, text) in DOCUMENTS {
        std::fs::write(folder.join(name), text).with_context(|| format!("writing `{}`", at(name)))?;
    }
    let documents = DOCUMENTS.map(|(name, _)| at(name));
    let mut tokenize = vec!["data".into(), "tokenize".into()];
    tokenize.extend(documents);
    tokenize.extend(["-o".into(), at("tokens")]);
    execute(&tokenize, output)?;

    let interval = ["--save-interval".into(), HALF.to_string()];
    let straight = train(folder, "straight", &interval, output)?;
    let from_half = format!("{}@{HALF}", at("straight"));
    let mut resumed = Vec::new();
    for (index, (_, layout)) in RESUMED.iter().enumerate() {
        let layout = layout.split(' ').map(String::from);
        let flags: Vec<String> = layout.chain(["--load".into(), from_half.clone()]).collect();
        resumed.push(train(folder, &format!("resumed-{}", index + 1), &flags, output)?);
    }
    Comparison::of(&straight, &resumed)
}

/// Trains a run of this name and returns what it left.
fn train(folder: &Path, name: &str, flags: &[String], output: &Output) -> anyhow::Result<Trained> {
    let save = folder.join(name);
    let mut words: Vec<String> = vec!["train".into()];
    words.extend(MODEL.split_whitespace().map(String::from));
    words.extend(flags.iter().cloned());
    words.extend(["--data-path".into(), folder.join("tokens").display().to_string()]);
    words.extend(["--save".into(), save.display().to_string()]);
    execute(&words, output)?;
    let location = Location { run: save.display().to_string(), step: None };
    let checkpoint = location.open()?;
    let metrics = (1..=checkpoint.step()).filter_map(|step| metrics::last_of(&save, None, step).transpose());
    let digests = digest::digests(&checkpoint, output)?;
    Ok(Trained { metrics: metrics.collect::<anyhow::Result<_>>()?, digests })
}

/// Says the command and runs it, in this process, without its output.
fn execute(words: &[String], output: &Output) -> anyhow::Result<()> {
    output.note(format!("$ remesh {}", words.join(" ")));
    let words = ["remesh", "--quiet"].map(String::from).into_iter().chain(words.iter().cloned());
    let ended = crate::execute(crate::Cli::try_parse_from(words)?)?;
    ensure!(ended == ExitCode::SUCCESS, "the command was stopped");
    Ok(())
}

impl Comparison {
    fn of(straight: &Trained, resumed: &[Trained]) -> anyhow::Result<Self> {
        let loss = |run: &Trained, step: u64| {
            let line = run.metrics.iter().rfind(|line| line.step == step);
            line.and_then(|line| line.loss).with_context(|| format!("step {step} has no finite loss"))
        };
        let row = |line: &Metrics| -> anyhow::Result<Row> {
            let straight = loss(straight, line.step)?;
            let resumed = match line.step <= HALF {
                true => Vec::new(),
                false => resumed.iter().map(|run| loss(run, line.step)).collect::<anyhow::Result<_>>()?,
            };
            let equal = resumed.iter().all(|resumed| resumed.to_bits() == straight.to_bits());
            Ok(Row { step: line.step, straight, resumed, equal })
        };
        let steps = straight.metrics.iter().map(row).collect::<anyhow::Result<Vec<_>>>()?;
        let state_equal = resumed.iter().all(|run| run.digests == straight.digests);
        let equal = state_equal && steps.iter().all(|row| row.equal);
        let layouts = RESUMED.map(|(name, _)| name).to_vec();
        Ok(Comparison { schema: "remesh.demo/1", layouts, steps, state_equal, equal })
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let heading = ["step", "loss, never stopped"].into_iter().chain(self.layouts.iter().copied());
        let mut rows: Vec<Vec<String>> = vec![heading.map(String::from).collect()];
        for Row { step, straight, resumed, equal } in &self.steps {
            let losses = std::iter::once(straight).chain(resumed).map(f64::to_string);
            let verdict = match (resumed.is_empty(), equal) {
                (true, _) => "",
                (false, true) => "equal, bit for bit",
                (false, false) => "DIFFERENT",
            };
            rows.push(std::iter::once(step.to_string()).chain(losses).chain([verdict.into()]).collect());
        }
        f.write_str(&table(&rows))?;
        match self.state_equal {
            true => {
                writeln!(f, "every tensor of model and optimizer after the last step: equal, by SHA-256")?
            }
            false => writeln!(f, "tensors of model and optimizer after the last step: DIFFERENT")?,
        }
        match self.equal {
            true => write!(f, "saved on one mesh, resumed on three others: the same run"),
            false => write!(f, "the resumed runs are NOT the run that never stopped"),
        }
    }
}
