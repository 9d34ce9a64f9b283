//! The command line: `remesh train | data | inspect | ls | plan | verify | digest | demo`.
//!
//! A command's result goes to stdout, everything else to stderr; the exit codes are listed in `docs/cli.md`.

mod args;
mod commands;
mod location;
mod metrics;
mod output;
mod report;

use clap::{Parser, Subcommand};
use output::OutputArgs;
use std::process::ExitCode;

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
    Train(Box<commands::train::TrainCommand>),
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
}

#[derive(Debug, Subcommand)]
enum DataCommand {
    /// Write files, one document each, as token ids: bytes, then an end token
    Tokenize(commands::tokenize::TokenizeArgs),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return report::usage(&error),
    };
    let output = cli.output.output();
    let done = match cli.command {
        Command::Train(command) => commands::train::run(*command, &output),
        Command::Data(DataCommand::Tokenize(args)) => commands::tokenize::run(&args, &output),
        Command::Inspect(args) => commands::inspect::run(&args, &output),
        Command::Ls(args) => commands::ls::run(&args, &output),
        Command::Verify(args) => commands::verify::run(&args, &output),
        Command::Digest(args) => commands::digest::run(&args, &output),
    };
    done.unwrap_or_else(|error| report::report(&error, output.is_json()))
}
