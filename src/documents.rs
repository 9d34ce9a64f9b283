//! Files of text as documents: a whole file, its lines, one string of each line of JSON, or a column of a Parquet file; text through
//! gzip or Zstandard where the name says so.

mod parquet;

use crate::report::Refusal;
use anyhow::Context;
use flate2::bufread::MultiGzDecoder;
use parquet::Column;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, IsTerminal, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A document of a token file has at most 2³¹ − 1 tokens, and in bytes it has about as many.
const DOCUMENT_BYTES_MAX: u64 = i32::MAX as u64;

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum InputFormat {
    /// One document.
    Text,
    /// A document a line; empty lines are none.
    Lines,
    /// An object of JSON a line, with the text under --json-key.
    Jsonl,
    /// A row each, with the text in the column --json-key.
    Parquet,
}

/// A document as it was read.
#[derive(Debug)]
pub(crate) struct Document {
    pub(crate) place: Place,
    pub(crate) format: InputFormat,
    /// The text, or the JSON that it is in.
    pub(crate) bytes: Vec<u8>,
}

/// Where a document is, for errors.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    file: Arc<Path>,
    /// A line or a row of it, counted from 1.
    part: Option<(&'static str, u64)>,
}

type Documents = Box<dyn Iterator<Item = anyhow::Result<Document>>>;

/// The documents of `files`, in order; `key` is that of a column. What follows an error is not to be used.
pub(crate) fn read(
    files: &[PathBuf],
    format: Option<InputFormat>,
    key: &str,
) -> impl Iterator<Item = anyhow::Result<Document>> {
    files.iter().flat_map(move |file| {
        documents(file, format, key).unwrap_or_else(|error| Box::new(std::iter::once(Err(error))))
    })
}

/// The path that stands for stdin.
pub(crate) const STDIN: &str = "-";

/// The files that are meant: paths, patterns such as `books/*.txt`, whose files come in alphabetical order, and `-`, which is stdin. All
/// of them can be opened; what may have to be waited for is told to `note`.
pub(crate) fn find(patterns: &[String], note: impl Fn(String)) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for pattern in patterns {
        if pattern == STDIN || Path::new(pattern).exists() || !pattern.contains(['*', '?', '[']) {
            files.push(PathBuf::from(pattern));
            continue;
        }
        let found = glob::glob(pattern).map_err(|error| {
            let message = format!("`{pattern}` is no pattern: {error}");
            Refusal::new("RM6009", message, "`*`, `**`, `?` and `[a-z]` are understood")
        })?;
        let before = files.len();
        for file in found {
            files.push(file.map_err(|error| {
                let path = error.path().display().to_string();
                anyhow::Error::from(io::Error::from(error)).context(format!("reading `{path}`"))
            })?);
        }
        if files.len() == before {
            let refusal = Refusal::new(
                "RM1003",
                format!("`{pattern}` names no file"),
                "check the pattern for a typing error",
            );
            return Err(refusal.into());
        }
    }
    if files.iter().filter(|file| file.as_os_str() == STDIN).count() > 1 {
        let refusal = Refusal::new("RM6003", "`-`, stdin, is named twice", "it can be read once");
        return Err(refusal.into());
    }
    for file in &files {
        if file.as_os_str() == STDIN {
            if io::stdin().is_terminal() {
                note("reading from the terminal, up to Ctrl-D".to_owned());
            }
        } else if is_pipe(file) {
            // Whoever writes into it would see it opened and closed again.
            note(format!("`{}` is a pipe: waiting for what is written into it", file.display()));
        } else {
            open(file)?;
        }
    }
    Ok(files)
}

fn is_pipe(file: &Path) -> bool {
    std::fs::metadata(file).is_ok_and(|metadata| metadata.file_type().is_fifo())
}

fn documents(file: &Path, format: Option<InputFormat>, key: &str) -> anyhow::Result<Documents> {
    let format = format.unwrap_or_else(|| format_of(file));
    let place = Place { file: file.into(), part: None };
    let document = move |place: Place, bytes: io::Result<Vec<u8>>| -> anyhow::Result<Document> {
        // Bytes that gzip or Zstandard cannot undo are bad data, where the system's word is of a bad name.
        let bytes = bytes.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput | io::ErrorKind::Other => {
                io::Error::new(io::ErrorKind::InvalidData, error)
            }
            _ => error,
        });
        let bytes = bytes.with_context(|| format!("reading {place}"))?;
        if bytes.len() as u64 > DOCUMENT_BYTES_MAX {
            let refusal = Refusal::new(
                "RM1029",
                format!("{place} is a document of more than {DOCUMENT_BYTES_MAX} bytes"),
                "cut it into several; --input-format lines makes a document of each line",
            );
            return Err(refusal.into());
        }
        Ok(Document { place, format, bytes })
    };
    if format == InputFormat::Parquet {
        if file.as_os_str() == STDIN || is_pipe(file) {
            let message = format!("{place} is no file, and a Parquet file is read from its end");
            return Err(Refusal::new("RM1031", message, "write it into a file first").into());
        }
        let rows = (1..).zip(Column::open(file, key)?).map(move |(row, text)| {
            let place = Place { part: Some(("row", row)), ..place.clone() };
            let Some(bytes) = text? else {
                let message = format!("{place} has no text");
                return Err(Refusal::new("RM1028", message, "leave rows without text out of the file").into());
            };
            document(place, Ok(bytes))
        });
        return Ok(Box::new(rows));
    }
    let (mut text, limit) = (open(file)?, DOCUMENT_BYTES_MAX + 1);
    if format == InputFormat::Text {
        let mut bytes = Vec::new();
        let read = text.take(limit).read_to_end(&mut bytes);
        return Ok(Box::new(std::iter::once(document(place, read.map(|_| bytes)))));
    }
    let lines = (1..).map_while(move |line| {
        let mut bytes = Vec::new();
        let read = text.by_ref().take(limit).read_until(b'\n', &mut bytes);
        let is_end = read.as_ref().is_ok_and(|length| *length == 0);
        if bytes.last() == Some(&b'\n') {
            bytes.truncate(bytes.len() - if bytes.ends_with(b"\r\n") { 2 } else { 1 });
        }
        let place = Place { part: Some(("line", line)), ..place.clone() };
        (!is_end).then(|| document(place, read.map(|_| bytes)))
    });
    let is_empty = |document: &Document| document.bytes.iter().all(u8::is_ascii_whitespace);
    Ok(Box::new(lines.filter(move |line| !line.as_ref().is_ok_and(is_empty))))
}

fn open(file: &Path) -> anyhow::Result<Box<dyn BufRead>> {
    if file.as_os_str() == STDIN {
        return Ok(Box::new(io::stdin().lock()));
    }
    let opened = File::open(file).with_context(|| format!("opening `{}`", file.display()))?;
    let bytes = BufReader::new(opened);
    Ok(match extension(file) {
        Some("gz") => Box::new(BufReader::new(MultiGzDecoder::new(bytes))),
        Some("zst") => Box::new(BufReader::new(zstd::Decoder::with_buffer(bytes)?)),
        _ => Box::new(bytes),
    })
}

fn extension(file: &Path) -> Option<&str> {
    file.extension()?.to_str()
}

/// By the name, without what says how it is compressed.
fn format_of(file: &Path) -> InputFormat {
    let is_packed = matches!(extension(file), Some("gz" | "zst"));
    let name = if is_packed { file.with_extension("") } else { file.to_owned() };
    match extension(&name) {
        Some("jsonl" | "ndjson") => InputFormat::Jsonl,
        Some("parquet") => InputFormat::Parquet,
        _ => InputFormat::Text,
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_stdin = self.file.as_os_str() == STDIN;
        let file = if is_stdin { "stdin".to_owned() } else { format!("`{}`", self.file.display()) };
        match self.part {
            Some((part, number)) => write!(f, "{part} {number} of {file}"),
            None => f.write_str(&file),
        }
    }
}
