//! `remesh config`: what the settings of a run come to, and who said each.

use crate::args::{RunArgs, Said, TrainArgs, resolve, schema};
use crate::memory;
use crate::output::Output;
use crate::report::Refusal;
use mesh::{ScheduleError, Source};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::process::ExitCode;
use train::config::TrainConfig;
use train::data::{Blend, Tokenizer};

/// Subcommands of `remesh config`.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum ConfigCommand {
    /// Print every setting of a run with its origin, as a file that --config takes
    #[command(args_override_self = true)]
    Show(Box<RunArgs>),
    /// Check the settings of a run; exit code 2 with all that is wrong
    #[command(args_override_self = true)]
    Check(Box<RunArgs>),
    /// Print the JSON Schema of remesh.toml, for an editor
    Schema,
}

/// It names its own schema, as any document of its kind does.
#[derive(Serialize)]
#[serde(transparent)]
struct FileSchema(serde_json::Value);

/// Every setting with its origin, by table and key of `remesh.toml`.
#[derive(Serialize)]
struct Shown {
    schema: &'static str,
    settings: BTreeMap<String, BTreeMap<String, Setting>>,
    /// The same as TOML.
    #[serde(skip)]
    text: String,
}

#[derive(Serialize)]
struct Setting {
    value: serde_json::Value,
    origin: Source,
}

#[derive(Serialize)]
struct Checked {
    schema: &'static str,
    faults: Vec<String>,
}

/// Shows or checks what was said.
pub(crate) fn run(command: ConfigCommand, output: &Output) -> anyhow::Result<ExitCode> {
    match command {
        ConfigCommand::Show(run) => {
            let said = run.said(output)?;
            resolve::require(said.args())?;
            output.result(&show(&said, &resolve(&said)?)?)?;
        }
        ConfigCommand::Check(run) => {
            check(&run.said(output)?)?;
            output.result(&Checked { schema: "remesh.config_check/1", faults: Vec::new() })?;
        }
        ConfigCommand::Schema => output.result(&FileSchema(schema()))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn resolve(said: &Said) -> anyhow::Result<TrainConfig> {
    let parallel = resolve::parallel(said)?;
    let args = said.args();
    let tokenizer = open_data(args)?;
    let config = resolve::config(args, parallel, tokenizer.as_ref(), None)?;
    config.check()?;
    memory::check(&config, args.training.device.unwrap_or_default())?;
    Ok(config)
}

/// Opens what is trained and evaluated on, if it was said, and returns its tokenizer, if it has one.
fn open_data(args: &TrainArgs) -> anyhow::Result<Option<Tokenizer>> {
    if let Some(files) = args.data.files()? {
        Blend::open_parts(&files.training, &files.split)?;
        files.validation.as_ref().map(Blend::open).transpose()?;
    }
    args.data.tokenizer()
}

fn show(said: &Said, config: &TrainConfig) -> anyhow::Result<Shown> {
    let all = said.over(Source::BuiltIn, TrainArgs::resolved(config));
    let origin =
        |key: &str| all.source(key).expect("only what somebody said, or the configuration, is there");
    let tables: BTreeMap<String, BTreeMap<String, serde_json::Value>> =
        serde_json::from_value(serde_json::to_value(all.args())?)?;
    let settings = tables.into_iter().map(|(table, values)| {
        let said = values.into_iter().filter(|(_, value)| !value.is_null());
        let with_origin = said.map(|(key, value)| {
            let origin = origin(&key);
            (key, Setting { value, origin })
        });
        (table, with_origin.collect())
    });
    // What nobody said stays a comment, so that the file says no more than was said.
    let line = |line: &str| match line.split_once(" = ") {
        Some((key, _)) if origin(key) == Source::BuiltIn => format!("# {line}  # {}\n", origin(key)),
        Some((key, _)) => format!("{line}  # {}\n", origin(key)),
        None => format!("{line}\n"),
    };
    let text = toml::to_string(all.args())?.lines().map(line).collect();
    Ok(Shown { schema: "remesh.config/1", settings: settings.collect(), text })
}

/// # Errors
/// Everything that is wrong, as far as one fault does not hide another.
fn check(said: &Said) -> anyhow::Result<()> {
    let mut faults = faults(said);
    match faults.len() {
        0 => Ok(()),
        1 => Err(faults.remove(0)),
        _ => {
            let texts: Vec<String> = faults.iter().map(|fault| format!("{fault:#}")).collect();
            let help = "mend one after the other; `remesh config check` says what is left";
            Err(Refusal::new("RM6006", texts.join("; "), help).into())
        }
    }
}

fn faults(said: &Said) -> Vec<anyhow::Error> {
    let mut args = said.args().clone();
    let mut faults: Vec<anyhow::Error> = Vec::new();
    let missing = resolve::require(&args);
    let is_complete = missing.is_ok();
    faults.extend(missing.err().map(Into::into));
    faults.extend(args.checkpoint.faults().into_iter().map(Into::into));
    // What a checkpoint may say, and what data would say that are missing or wrong, is taken to fit.
    args.training.lr.get_or_insert(f32::MAX.into());
    let tokenizer = open_data(&args);
    if tokenizer.is_err() || args.data.data_path.is_none() {
        args.model.vocab_size.get_or_insert(1);
    }
    let tokenizer = tokenizer.unwrap_or_else(|error| {
        faults.push(error);
        None
    });
    let parallel = match resolve::parallel(said) {
        Ok(parallel) => parallel,
        Err(error) => {
            // A number that was not said is among the missing.
            if !matches!(error.downcast_ref(), Some(mesh::ParallelError::Missing { .. })) {
                faults.push(error);
            }
            return faults;
        }
    };
    match said.parallelism().resolve_groups(parallel.layout()) {
        Ok(groups) => faults.extend(resolve::check_groups(&groups).err().map(Into::into)),
        Err(error) => faults.push(error.into()),
    }
    let mut resolved = resolve::config(&args, parallel, tokenizer.as_ref(), None);
    // Numbers that make no schedule hide nothing else.
    if let Some(error) = resolved.as_ref().err().and_then(|error| error.downcast_ref::<ScheduleError>()) {
        faults.push(error.clone().into());
        args.training = args.training.with_plain_schedule();
        resolved = resolve::config(&args, parallel, tokenizer.as_ref(), None);
    }
    match resolved {
        Ok(config) => {
            faults.extend(config.faults().into_iter().map(Into::into));
            faults.extend(config.check_batches(0).err().map(Into::into));
            let device = args.training.device.unwrap_or_default();
            faults.extend(memory::check(&config, device).err().map(Into::into));
        }
        Err(error) => {
            let is_missing = |refusal: &Refusal| refusal.code == "RM6004";
            if is_complete || !error.downcast_ref().is_some_and(is_missing) {
                faults.push(error);
            }
        }
    }
    faults
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Display for FileSchema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#}", self.0)
    }
}

impl fmt::Display for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the settings make a run")
    }
}
