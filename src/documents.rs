//! Files of text as documents: a whole file, its lines, or one string of each line of JSON; through gzip where the name says so.

use crate::report::Refusal;
use anyhow::Context;
use flate2::bufread::MultiGzDecoder;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
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
    line: Option<u64>,
}

type Documents = Box<dyn Iterator<Item = anyhow::Result<Document>>>;

/// The documents of `files`, in order. What follows an error is not to be used.
pub(crate) fn read(
    files: &[PathBuf],
    format: Option<InputFormat>,
) -> impl Iterator<Item = anyhow::Result<Document>> {
    files.iter().flat_map(move |file| {
        documents(file, format).unwrap_or_else(|error| Box::new(std::iter::once(Err(error))))
    })
}

/// The files that are meant: paths, and patterns such as `books/*.txt`, whose files come in alphabetical order. All of them can
/// be opened.
pub(crate) fn find(patterns: &[String]) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for pattern in patterns {
        if Path::new(pattern).exists() || !pattern.contains(['*', '?', '[']) {
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
    for file in &files {
        open(file)?;
    }
    Ok(files)
}

fn documents(file: &Path, format: Option<InputFormat>) -> anyhow::Result<Documents> {
    let (mut text, format) = (open(file)?, format.unwrap_or_else(|| format_of(file)));
    let place = Place { file: file.into(), line: None };
    let document = move |place: Place, bytes: io::Result<Vec<u8>>| -> anyhow::Result<Document> {
        // Bytes that gzip cannot undo are bad data, where the system's word is of a bad name.
        let bytes = bytes.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput => io::Error::new(io::ErrorKind::InvalidData, error),
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
    let limit = DOCUMENT_BYTES_MAX + 1;
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
        (!is_end).then(|| document(Place { line: Some(line), ..place.clone() }, read.map(|_| bytes)))
    });
    let is_empty = |document: &Document| document.bytes.iter().all(u8::is_ascii_whitespace);
    Ok(Box::new(lines.filter(move |line| !line.as_ref().is_ok_and(is_empty))))
}

fn open(file: &Path) -> anyhow::Result<Box<dyn BufRead>> {
    let opened = File::open(file).with_context(|| format!("opening `{}`", file.display()))?;
    let bytes = BufReader::new(opened);
    Ok(match is_gzip(file) {
        true => Box::new(BufReader::new(MultiGzDecoder::new(bytes))),
        false => Box::new(bytes),
    })
}

fn is_gzip(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "gz")
}

/// By the name, without what says how it is compressed.
fn format_of(file: &Path) -> InputFormat {
    let name = if is_gzip(file) { file.with_extension("") } else { file.to_owned() };
    match name.extension().and_then(|extension| extension.to_str()) {
        Some("jsonl" | "ndjson") => InputFormat::Jsonl,
        _ => InputFormat::Text,
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "line {line} of `{}`", self.file.display()),
            None => write!(f, "`{}`", self.file.display()),
        }
    }
}
