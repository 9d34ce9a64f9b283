//! `remesh config`: what the settings of a run come to, and who said each.

use crate::args::{RunArgs, Said, TrainArgs, resolve};
use crate::memory;
use crate::output::Output;
use crate::report::Refusal;
use mesh::Source;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::process::ExitCode;
use train::config::TrainConfig;
use train::data::Blend;

/// Subcommands of `remesh config`.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum ConfigCommand {
    /// Print every setting of a run with its origin, as a file that --config takes
    #[command(args_override_self = true)]
    Show(Box<RunArgs>),
    /// Check the settings of a run; exit code 2 with all that is wrong
    #[command(args_override_self = true)]
    Check(Box<RunArgs>),
}

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
    }
    Ok(ExitCode::SUCCESS)
}

fn resolve(said: &Said) -> anyhow::Result<TrainConfig> {
    let parallel = resolve::parallel(said)?;
    let args = said.args();
    let tokenizer = args.data.tokenizer()?;
    if let Some(files) = args.data.files()? {
        Blend::open_parts(&files.training, &files.split)?;
        files.validation.as_ref().map(Blend::open).transpose()?;
    }
    let config = resolve::config(args, parallel, tokenizer.as_ref(), None)?;
    config.check()?;
    memory::check(&config, args.training.device.unwrap_or_default())?;
    Ok(config)
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
    let mut faults: Vec<anyhow::Error> = Vec::new();
    let missing = resolve::require(said.args());
    let is_complete = missing.is_ok();
    faults.extend(missing.err().map(Into::into));
    match resolve::parallel(said) {
        Ok(_) if is_complete => faults.extend(resolve(said).err()),
        // A number that was not said is among the missing.
        Ok(_) => {}
        Err(error) if matches!(error.downcast_ref(), Some(mesh::ParallelError::Missing { .. })) => {}
        Err(error) => faults.push(error),
    }
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

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Display for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the settings make a run")
    }
}
