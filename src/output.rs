//! What a command prints: its result on stdout, everything else on stderr, and nothing more once a reader has gone.

use crate::bar::Bar;
use ckpt::Commit;
use serde::Serialize;
use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use train::resume::SavedRun;

/// Flags of every command.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct OutputArgs {
    /// How the result is printed on stdout [default: auto, which is human]
    #[arg(long, global = true, value_enum, value_name = "FORMAT")]
    format: Option<Format>,
    /// Short for --format json; errors become JSON on stderr
    #[arg(long, global = true, conflicts_with_all = ["format", "quiet"])]
    json: bool,
    /// Short for --format quiet: errors, and what must not be missed
    #[arg(long, short, global = true, conflicts_with = "format")]
    quiet: bool,
}

/// For whom the result is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// Human.
    Auto,
    /// Text for people, without colour.
    Human,
    /// JSON documents with a schema name, bytes and seconds as numbers.
    Json,
    /// Nothing.
    Quiet,
}

/// Stdout and stderr of a command.
#[derive(Debug)]
pub(crate) struct Output {
    format: Format,
    /// A reader that has gone wants no more lines; the command itself goes on, above all a training run.
    stdout_gone: AtomicBool,
}

impl OutputArgs {
    pub(crate) fn output(self) -> Output {
        let format = match (self.json, self.quiet) {
            (true, _) => Format::Json,
            (_, true) => Format::Quiet,
            _ => self.format.unwrap_or(Format::Auto),
        };
        Output { format, stdout_gone: AtomicBool::new(false) }
    }
}

impl Output {
    pub(crate) fn is_json(&self) -> bool {
        self.format == Format::Json
    }

    pub(crate) fn is_quiet(&self) -> bool {
        self.format == Format::Quiet
    }

    /// The result, as text for people or as one line of JSON.
    pub(crate) fn result(&self, result: &(impl Display + Serialize)) -> anyhow::Result<()> {
        match self.format {
            Format::Auto | Format::Human => self.print(&lines(&result.to_string())),
            Format::Json => self.print(&serde_json::to_string(result)?),
            Format::Quiet => Ok(()),
        }
    }

    /// Leaves it to another process of the job to say what all of them would.
    pub(crate) fn said_elsewhere() -> Self {
        IS_SAID_ELSEWHERE.store(true, Ordering::Relaxed);
        Output { format: Format::Quiet, stdout_gone: AtomicBool::new(false) }
    }

    /// A line that is not the result. What must not be missed, such as a step that was passed over, goes to [`complain`].
    pub(crate) fn note(&self, text: impl Display) {
        if self.format != Format::Quiet {
            complain(text);
        }
    }

    /// A bar for what takes long, of `total` bytes if that is known.
    pub(crate) fn bar(&self, what: &'static str, total: Option<u64>) -> Bar {
        Bar::new(what, total, matches!(self.format, Format::Auto | Format::Human))
    }

    fn print(&self, text: &str) -> anyhow::Result<()> {
        if self.stdout_gone.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut stdout = std::io::stdout().lock();
        let text = text.trim_end_matches('\n');
        match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                self.stdout_gone.store(true, Ordering::Relaxed);
                Ok(())
            }
            written => Ok(written?),
        }
    }
}

/// One line of text: control characters of a name that somebody chose are shown, and neither obeyed by a terminal nor taken for the end
/// of the line.
pub(crate) fn one_line(text: &str) -> String {
    escaped(text, char::is_control)
}

/// The same for text whose lines are meant.
pub(crate) fn lines(text: &str) -> String {
    escaped(text, |c| c.is_control() && c != '\n')
}

fn escaped(text: &str, is_shown: impl Fn(char) -> bool) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match is_shown(c) {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
    }
    shown
}

/// Whether another process says what all of a job's would.
static IS_SAID_ELSEWHERE: AtomicBool = AtomicBool::new(false);

/// A line on stderr. Where nobody reads it, there is nobody to tell.
pub(crate) fn complain(text: impl Display) {
    if !IS_SAID_ELSEWHERE.load(Ordering::Relaxed) {
        complain_for_oneself(lines(&text.to_string()));
    }
}

/// The same where it concerns this process of a job's alone.
pub(crate) fn complain_for_oneself(text: impl Display) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// `1 step`, `2 steps`.
pub(crate) fn count(number: impl Into<u64>, thing: &str) -> String {
    match number.into() {
        1 => format!("1 {thing}"),
        number => format!("{number} {thing}s"),
    }
}

/// `step 4`, `steps 4, 6`.
pub(crate) fn step_list(steps: &[u64]) -> String {
    let numbers: Vec<String> = steps.iter().map(u64::to_string).collect();
    format!("step{} {}", if steps.len() == 1 { "" } else { "s" }, numbers.join(", "))
}

/// `1.5 GiB`, `0 B`.
pub(crate) fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut units = UNITS.iter();
    let mut unit = units.next().expect("there are units");
    while value >= 1023.95
        && let Some(larger) = units.next()
    {
        (value, unit) = (value / 1024.0, larger);
    }
    format!("{value:.1} {unit}")
}

/// The layout of the run that made a checkpoint, with the SP degree if its configuration can be read.
pub(crate) fn saved_layout(commit: &Commit) -> String {
    match SavedRun::of(commit) {
        Ok(saved) => saved.config.parallel.to_string(),
        Err(_) => commit.run.layout.to_string(),
    }
}

/// Rows of columns, each as wide as its widest cell, two spaces apart.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let rows: Vec<Vec<String>> =
        rows.iter().map(|row| row.iter().map(|cell| one_line(cell)).collect()).collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_change_their_unit_before_they_have_four_digits() {
        let texts = [0, 1023, 1024, 1536, (1 << 20) - 1, 1 << 20, 5 << 40].map(human_bytes);
        assert_eq!(texts, ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 MiB", "5.0 TiB"]);
    }
}
