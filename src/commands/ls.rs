//! `remesh ls`: the steps of a run, whole or not.

use crate::location::Location;
use crate::output::{Output, complain, count, human_bytes, one_line, saved_layout, table};
use crate::report::Refusal;
use ckpt::{OpenError, Store};
use mesh::ParallelLayout;
use serde::Serialize;
use std::fmt;
use std::process::ExitCode;

/// Flags of `remesh ls`.
#[derive(Debug, clap::Args)]
pub(crate) struct LsArgs {
    /// Folder of a run
    #[arg(value_name = "RUN")]
    run: String,
}

#[derive(Serialize)]
struct Listing {
    schema: &'static str,
    run: String,
    /// The newest whole step.
    latest: Option<u64>,
    checkpoints: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    step: u64,
    #[serde(flatten)]
    state: State,
}

#[derive(Serialize)]
#[serde(untagged)]
enum State {
    Whole {
        complete: bool,
        created: String,
        bytes: u64,
        consumed_samples: u64,
        layout: ParallelLayout,
        #[serde(skip)]
        layout_text: String,
    },
    Broken {
        complete: bool,
        /// Whether that is what somebody wanted.
        set_aside: bool,
        /// Whether it may be whole all the same: it cannot be read, is of a newer program, or a link.
        unknown: bool,
        code: String,
        reason: String,
    },
}

/// Lists a run.
pub(crate) fn run(args: &LsArgs, output: &Output) -> anyhow::Result<ExitCode> {
    let store = Store::open(&args.run)?;
    let location = args.run.parse::<Location>().unwrap_or_else(|never| match never {});
    if let Some(step) = location.step {
        let message = format!("`{}` is step {step} of a run", args.run);
        let help = format!("`remesh ls {}` lists the run, `remesh inspect` shows the step", location.run);
        return Err(Refusal::new("RM6003", message, help).into());
    }
    let mut checkpoints = Vec::new();
    let listing = store.listing()?;
    listing.strays.iter().for_each(complain);
    for step in listing.steps {
        let state = match store.checkpoint(step) {
            Ok(checkpoint) => {
                let commit = checkpoint.commit();
                State::Whole {
                    complete: true,
                    created: commit.created.clone(),
                    bytes: commit.files.iter().map(|file| file.bytes).sum(),
                    consumed_samples: commit.run.counters.consumed_train_samples,
                    layout: commit.run.layout,
                    layout_text: saved_layout(commit),
                }
            }
            Err(error) => broken(&error),
        };
        checkpoints.push(Row { step, state });
    }
    let whole = checkpoints.iter().filter(|row| matches!(row.state, State::Whole { .. }));
    let latest = whole.map(|row| row.step).next_back();
    output.result(&Listing { schema: "remesh.ls/1", run: args.run.clone(), latest, checkpoints })?;
    Ok(ExitCode::SUCCESS)
}

fn broken(error: &OpenError) -> State {
    let set_aside = matches!(error, OpenError::SetAside { .. });
    let (unknown, code) = (!error.is_damage(), error.code().to_owned());
    State::Broken { complete: false, set_aside, unknown, code, reason: error.to_string() }
}

impl fmt::Display for Listing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.checkpoints.is_empty() {
            return write!(f, "no checkpoints in `{}`", self.run);
        }
        let row = |row: &Row| match &row.state {
            State::Whole { created, bytes, consumed_samples, layout_text, .. } => vec![
                row.step.to_string(),
                "complete".into(),
                human_bytes(*bytes),
                count(*consumed_samples, "sample"),
                created.clone(),
                layout_text.clone(),
            ],
            State::Broken { set_aside, unknown, .. } => {
                let state = match (set_aside, unknown) {
                    (true, _) => "set aside",
                    (_, true) => "cannot be judged",
                    _ => "not whole",
                };
                vec![row.step.to_string(), state.into()]
            }
        };
        let columns = table(&self.checkpoints.iter().map(row).collect::<Vec<_>>());
        // Behind the columns: a reason is far longer than what stands in any of them.
        self.checkpoints.iter().zip(columns.lines()).try_for_each(|(row, line)| match &row.state {
            State::Whole { .. } => writeln!(f, "{line}"),
            State::Broken { code, reason, .. } => writeln!(f, "{line}  {code}: {}", one_line(reason)),
        })
    }
}
