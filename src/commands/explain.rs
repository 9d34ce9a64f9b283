//! `remesh explain`: what an error's code means.

use crate::output::{Output, table};
use crate::report::Refusal;
use crate::report::codes::{self, CODES, Code};
use serde::Serialize;
use std::fmt;
use std::process::ExitCode;

/// Flags of `remesh explain`.
#[derive(Debug, clap::Args)]
pub(crate) struct ExplainArgs {
    /// Code of an error, such as RM2003 [default: list all]
    #[arg(value_name = "CODE")]
    code: Option<String>,
}

#[derive(Serialize)]
struct Explained {
    schema: &'static str,
    codes: Vec<Entry>,
}

#[derive(Serialize)]
struct Entry {
    code: &'static str,
    exit: u8,
    means: &'static str,
    text: &'static str,
}

impl From<&'static Code> for Entry {
    fn from(code: &'static Code) -> Self {
        Entry { code: code.code, exit: code.exit, means: code.means, text: code.text }
    }
}

/// Explains a code, or lists all of them.
pub(crate) fn run(args: &ExplainArgs, output: &Output) -> anyhow::Result<ExitCode> {
    let codes = match &args.code {
        None => CODES.iter().map(Entry::from).collect(),
        Some(code) => match codes::find(&code.to_uppercase()) {
            Some(known) => vec![known.into()],
            None => {
                let message = format!("no error has the code `{}`", code.escape_debug());
                return Err(Refusal::new("RM6008", message, "`remesh explain` lists all codes").into());
            }
        },
    };
    output.result(&Explained { schema: "remesh.explain/1", codes })?;
    Ok(ExitCode::SUCCESS)
}

impl fmt::Display for Explained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.codes.as_slice() {
            [Entry { code, exit, means, text }] => {
                write!(f, "{code}: {means}\n\n{text}\n\nexit code {exit}: {}", codes::exit_text(*exit))
            }
            all => {
                let row = |entry: &Entry| {
                    vec![entry.code.to_owned(), format!("exit {}", entry.exit), entry.means.to_owned()]
                };
                f.write_str(&table(&all.iter().map(row).collect::<Vec<_>>()))
            }
        }
    }
}
