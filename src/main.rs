//! The command line: `remesh train | config | data | inspect | ls | plan | verify | digest | diff | doctor | env | demo | explain |
//! completions | man`.
//!
//! A command's result goes to stdout, everything else to stderr; the exit codes are listed in `docs/cli.md`.

mod args;
mod bar;
mod commands;
mod device;
mod documents;
mod encoder;
mod location;
mod memory;
mod metrics;
mod output;
mod report;
mod slabs;
mod start;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser, Subcommand};
use output::{OutputArgs, complain};
use std::ffi::OsString;
use std::io::IsTerminal;
use std::process::ExitCode;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Train on one mesh, resume on another.
#[derive(Debug, Parser)]
#[command(name = "remesh", version, disable_help_subcommand = true, infer_long_args = false)]
struct Cli {
    #[command(flatten)]
    output: OutputArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train, and go on from the newest checkpoint in --save under whatever layout
    // As in Megatron, the last of several counts: scripts put changes behind a common list.
    #[command(args_override_self = true)]
    Train(Box<commands::train::TrainCommand>),
    /// Say what a resume under another layout moves and changes, before it is done
    Plan(Box<commands::plan::PlanArgs>),
    /// Show or check the settings of a run
    #[command(subcommand)]
    Config(commands::config::ConfigCommand),
    /// Prepare data
    #[command(subcommand)]
    Data(DataCommand),
    /// Show what a checkpoint holds
    Inspect(commands::inspect::InspectArgs),
    /// List the steps of a run, whole or not
    Ls(commands::ls::LsArgs),
    /// Check a checkpoint; exit code 1 if anything is wrong with it
    Verify(commands::verify::VerifyArgs),
    /// Print the SHA-256 of every whole tensor of model and optimizer, the same under every layout
    Digest(commands::digest::DigestArgs),
    /// Say what two checkpoints have in common, under whatever layouts; exit code 1 if tensors differ
    Diff(commands::diff::DiffArgs),
    /// Say which GPUs and libraries of CUDA are found, and what a missing one disables
    Doctor,
    /// Print program, machine and libraries, to paste into a report
    Env,
    /// Train a small model, resume it under three other layouts, and compare every loss
    Demo(commands::demo::DemoArgs),
    /// Say what an error's code means
    Explain(commands::explain::ExplainArgs),
    /// Print a script that completes commands and flags in a shell
    Completions(commands::completions::CompletionsArgs),
    /// Print a page of the manual, or write all of them
    Man(commands::completions::ManArgs),
}

#[derive(Debug, Subcommand)]
enum DataCommand {
    /// Write text as token ids: of files, lines or JSON lines, by bytes or a tokenizer.json
    Tokenize(commands::tokenize::TokenizeArgs),
}

fn main() -> ExitCode {
    let cli = match parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(error) => return report::usage(&error),
    };
    log_to_stderr();
    let as_json = cli.output.output().is_json();
    execute(cli).unwrap_or_else(|error| report::report(&error, as_json))
}

/// Parses the command line. Flags may be written with underscores, as launchers and Megatron's own code write some of them,
/// and a negative number is the value of the flag before it, to be refused as one.
fn parse(args: impl Iterator<Item = OsString>) -> Result<Cli, clap::Error> {
    let mut said: Vec<OsString> = Vec::new();
    let mut are_flags = true;
    for arg in args {
        are_flags &= arg != "--";
        match arg.to_str().filter(|_| are_flags) {
            Some(text) if text.starts_with("--") => {
                let (name, value) = text.split_at(text.find('=').unwrap_or(text.len()));
                said.push((name.replace('_', "-") + value).into());
            }
            Some(text) if text.starts_with('-') && text.parse::<f64>().is_ok() => match said.last_mut() {
                Some(flag)
                    if flag.to_str().is_some_and(|flag| flag.starts_with("--") && !flag.contains('=')) =>
                {
                    flag.push(format!("={text}"));
                }
                _ => said.push(arg),
            },
            _ => said.push(arg),
        }
    }
    Cli::try_parse_from(&said).map_err(|error| with_all_unknown(error, said))
}

/// The error, with all further arguments that are not known: a long script is mended in one go.
fn with_all_unknown(error: clap::Error, mut said: Vec<OsString>) -> clap::Error {
    let unknown = |error: &clap::Error| match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(arg)) if error.kind() == ErrorKind::UnknownArgument => Some(arg.clone()),
        _ => None,
    };
    let mut flags: Vec<String> = Vec::new();
    let mut next = unknown(&error);
    while let Some(arg) = next.take() {
        let is_it = |said: &OsString| said.to_str().is_some_and(|said| said.split('=').next() == Some(&arg));
        let Some(at) = said.iter().position(is_it) else { break };
        said.remove(at);
        // What follows an unknown flag may be its value.
        if arg.starts_with('-') {
            flags.push(arg);
        }
        next = Cli::try_parse_from(&said).err().as_ref().and_then(unknown);
    }
    match &flags[..] {
        [] | [_] => error,
        flags => Cli::command().error(
            ErrorKind::UnknownArgument,
            format!("these flags are not known: {}\n\nFor more information, try '--help'.", flags.join(" ")),
        ),
    }
}

fn execute(cli: Cli) -> anyhow::Result<ExitCode> {
    let output = cli.output.output();
    match cli.command {
        Command::Train(command) => commands::train::run(*command, &output),
        Command::Config(command) => commands::config::run(command, &output),
        Command::Plan(args) => commands::plan::run(&args, &output),
        Command::Data(DataCommand::Tokenize(args)) => commands::tokenize::run(&args, &output),
        Command::Inspect(args) => commands::inspect::run(&args, &output),
        Command::Ls(args) => commands::ls::run(&args, &output),
        Command::Verify(args) => commands::verify::run(&args, &output),
        Command::Digest(args) => commands::digest::run(&args, &output),
        Command::Diff(args) => commands::diff::run(&args, &output),
        Command::Doctor => commands::doctor::run(&output),
        Command::Env => commands::env::run(&output),
        Command::Demo(args) => commands::demo::run(&args, &output),
        Command::Explain(args) => commands::explain::run(&args, &output),
        Command::Completions(args) => commands::completions::completions::<Cli>(&args),
        Command::Man(args) => commands::completions::man::<Cli>(&args),
    }
}

/// Warnings of the libraries go to stderr; `RUST_LOG` asks for more, or less.
fn log_to_stderr() {
    let warnings = || Targets::new().with_default(LevelFilter::WARN);
    let filter = match std::env::var("RUST_LOG") {
        Ok(directives) => directives.parse().unwrap_or_else(|error| {
            complain(format!("RUST_LOG `{directives}` is not understood ({error}); warnings are logged"));
            warnings()
        }),
        Err(_) => warnings(),
    };
    // Its colours obey NO_COLOR, as long as they are not asked for.
    let mut lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    if !std::io::stderr().is_terminal() {
        lines = lines.with_ansi(false);
    }
    tracing_subscriber::registry().with(lines).with(filter).init();
}
