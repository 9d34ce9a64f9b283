//! `remesh.toml`: the tables of [`TrainArgs`]. An unknown key is refused, with its place in the file.

use super::TrainArgs;
use crate::report::{Place, Refusal};
use anyhow::Context;
use std::path::Path;

/// Keys that may be in `[training]`, too: the batch is part of the layout, but people look for it there.
pub(super) const BATCH_KEYS: [&str; 3] = ["seq_length", "micro_batch_size", "global_batch_size"];

/// Reads and checks a configuration file.
///
/// # Errors
/// If it cannot be read, is no TOML, has a key that is not known, or a value of the wrong type or said twice.
pub(crate) fn read(path: &Path) -> anyhow::Result<TrainArgs> {
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path).with_context(|| format!("reading `{name}`"))?;
    let mut args: TrainArgs = toml::from_str(&text).map_err(|error| refusal(&error, name.clone(), &text))?;
    let (batch, training) = (&mut args.parallelism, &mut args.training);
    let [seq_length, micro_batch_size, global_batch_size] = BATCH_KEYS;
    move_in(seq_length, &mut batch.seq_length, &mut training.seq_length, &name)?;
    move_in(micro_batch_size, &mut batch.micro_batch_size, &mut training.micro_batch_size, &name)?;
    move_in(global_batch_size, &mut batch.global_batch_size, &mut training.global_batch_size, &name)?;
    Ok(args)
}

fn move_in<T>(key: &str, to: &mut Option<T>, from: &mut Option<T>, file: &str) -> Result<(), Refusal> {
    match from.take() {
        Some(_) if to.is_some() => Err(Refusal::new(
            "RM6003",
            format!("`{key}` is in [training] and in [parallelism] of `{file}`"),
            "leave one of them out",
        )),
        Some(value) => {
            *to = Some(value);
            Ok(())
        }
        None => Ok(()),
    }
}

fn refusal(error: &toml::de::Error, file: String, text: &str) -> Refusal {
    let span = error.span().unwrap_or(0..0);
    let message = error.message();
    let place = |label: &str| {
        Some(Box::new(Place { file, text: text.to_owned(), span: span.clone(), label: label.into() }))
    };
    let Some(unknown) = message.strip_prefix("unknown field `").and_then(|rest| rest.split_once('`')) else {
        let help = "a value has the type that `remesh train --help` tells for the flag of the same name";
        return Refusal { place: place("here"), ..Refusal::new("RM6003", message, help) };
    };
    let (key, known) = (unknown.0, quoted(unknown.1));
    let table = text[..span.start].lines().rev().find_map(|line| line.trim().strip_prefix('['));
    let table = table.filter(|_| !is_header(text, span.start)).and_then(|rest| rest.split(']').next());
    let message = match table {
        Some(table) => format!("unknown key `{key}` in [{table}]"),
        None => format!("unknown table or key `{key}`"),
    };
    let likeness = |known: &&str| (strsim::jaro_winkler(key, known) * 1e6) as u64;
    let help = match known.iter().copied().max_by_key(likeness) {
        Some(nearest) if strsim::jaro_winkler(key, nearest) > 0.85 => format!("did you mean `{nearest}`?"),
        _ => format!("known here: {}", known.join(", ")),
    };
    Refusal { place: place("not a known key"), ..Refusal::new("RM6002", message, help) }
}

/// Whether the line of this byte is a `[table]` line.
fn is_header(text: &str, at: usize) -> bool {
    let start = text[..at].rfind('\n').map_or(0, |end| end + 1);
    text[start..].trim_start().starts_with('[')
}

/// The names in backticks.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}
