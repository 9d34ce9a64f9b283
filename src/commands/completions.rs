//! `remesh completions` and `remesh man`: what shells and `man` read, made from the same declarations as the commands.

use crate::report::Refusal;
use anyhow::Context;
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Flags of `remesh completions`.
#[derive(Debug, clap::Args)]
pub(crate) struct CompletionsArgs {
    /// For which shell
    shell: Shell,
}

/// Flags of `remesh man`.
#[derive(Debug, clap::Args)]
pub(crate) struct ManArgs {
    /// The command, such as `train` or `data tokenize`; without one, the page of remesh
    #[arg(conflicts_with = "out")]
    command: Vec<String>,
    /// Write the pages of all commands into this folder
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

/// Prints a completion script.
pub(crate) fn completions<C: CommandFactory>(args: &CompletionsArgs) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut C::command(), "remesh", &mut script);
    print(&script)
}

/// Prints a page of the manual, or writes all of them.
pub(crate) fn man<C: CommandFactory>(args: &ManArgs) -> anyhow::Result<ExitCode> {
    let mut remesh = C::command();
    remesh.build();
    if let Some(folder) = &args.out {
        let written = std::fs::create_dir_all(folder).and_then(|()| clap_mangen::generate_to(remesh, folder));
        written.with_context(|| format!("writing manual pages into `{}`", folder.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(find(remesh, &args.command)?).render(&mut page)?;
    print(&page)
}

fn find(remesh: Command, names: &[String]) -> Result<Command, Refusal> {
    names.iter().try_fold(remesh, |command, name| match command.find_subcommand(name) {
        Some(found) => Ok(found.clone()),
        None => {
            let known: Vec<&str> = command.get_subcommands().map(Command::get_name).collect();
            let help = match known.is_empty() {
                true => format!("`{}` has no commands of its own", command.get_name()),
                false => format!("there are {}", known.join(", ")),
            };
            Err(Refusal::new("RM6003", format!("there is no command `{}`", name.escape_debug()), help))
        }
    })
}

fn print(bytes: &[u8]) -> anyhow::Result<ExitCode> {
    match std::io::stdout().lock().write_all(bytes) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(ExitCode::SUCCESS),
    }
}
