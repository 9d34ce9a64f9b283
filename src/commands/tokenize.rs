//! `remesh data tokenize`: the byte-level tokenizer. Ids 0 to 255 are bytes, 256 ends a document.

use crate::output::{Output, count};
use crate::report::Refusal;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use train::data::TokenWriter;

/// Flags of `remesh data tokenize`.
#[derive(Debug, clap::Args)]
pub(crate) struct TokenizeArgs {
    /// Files to read, each one document
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Write PREFIX.bin, PREFIX.idx and PREFIX.tokenizer.json
    #[arg(long, short, value_name = "PREFIX")]
    output: PathBuf,
}

/// What `PREFIX.tokenizer.json` says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tokenizer {
    /// How text becomes ids: `byte`.
    pub(crate) kind: String,
    /// Ids there are.
    pub(crate) vocab_size: usize,
    /// The id that ends a document.
    pub(crate) eod: u32,
    /// Names the mapping, so that two files can be told to agree.
    pub(crate) hash: String,
}

#[derive(Serialize)]
struct Tokenized {
    schema: &'static str,
    prefix: PathBuf,
    documents: usize,
    tokens: u64,
    vocab_size: usize,
}

impl Tokenizer {
    /// Bytes, and 256 for the end of a document.
    pub(crate) fn byte() -> Self {
        let hash = format!("{:016x}", ckpt::fnv1a(b"byte 257 256"));
        Tokenizer { kind: "byte".into(), vocab_size: 257, eod: 256, hash }
    }

    /// `PREFIX.tokenizer.json`.
    pub(crate) fn path(prefix: &Path) -> PathBuf {
        let mut name = prefix.as_os_str().to_owned();
        name.push(".tokenizer.json");
        name.into()
    }

    /// Reads `PREFIX.tokenizer.json`; `None` if there is none.
    pub(crate) fn open(prefix: &Path) -> anyhow::Result<Option<Self>> {
        let path = Tokenizer::path(prefix);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(|| format!("reading `{}`", path.display())),
        };
        let tokenizer = serde_json::from_slice(&text).map_err(|error| {
            let message = format!("`{}` is no tokenizer: {error}", path.display());
            let help = "write it anew with `remesh data tokenize`, or remove it and give --vocab-size";
            Refusal::new("RM1025", message, help)
        })?;
        Ok(Some(tokenizer))
    }
}

/// Writes the documents under `prefix` and returns the number of tokens.
pub(crate) fn write<'a>(
    prefix: &Path,
    documents: impl Iterator<Item = anyhow::Result<Box<dyn Read + 'a>>>,
) -> anyhow::Result<u64> {
    let tokenizer = Tokenizer::byte();
    let writing = || format!("writing `{}`", prefix.display());
    let mut writer = TokenWriter::create(prefix, tokenizer.vocab_size).with_context(writing)?;
    for document in documents {
        let mut failed = None;
        let bytes = BufReader::new(document?).bytes();
        let ids = bytes.map_while(|byte| byte.map(u32::from).map_err(|error| failed = Some(error)).ok());
        writer.add_document(ids.chain([tokenizer.eod])).with_context(writing)?;
        if let Some(error) = failed {
            return Err(error).context("reading a document");
        }
    }
    let tokens = writer.finish().with_context(writing)?;
    let text = serde_json::to_string_pretty(&tokenizer)? + "\n";
    std::fs::write(Tokenizer::path(prefix), text).with_context(writing)?;
    Ok(tokens)
}

/// Tokenizes files.
pub(crate) fn run(args: &TokenizeArgs, output: &Output) -> anyhow::Result<ExitCode> {
    let open = |path: &PathBuf| -> anyhow::Result<Box<dyn Read>> {
        let file = std::fs::File::open(path).with_context(|| format!("opening `{}`", path.display()))?;
        Ok(Box::new(file))
    };
    // Nothing is written over before everything can be read, and never a document itself.
    let written = [".bin", ".idx", ".tokenizer.json"].map(|end| {
        let mut path = args.output.clone().into_os_string();
        path.push(end);
        std::fs::canonicalize(path).ok()
    });
    for path in &args.files {
        open(path)?;
        let own = std::fs::canonicalize(path).with_context(|| format!("opening `{}`", path.display()))?;
        if written.contains(&Some(own)) {
            let message = format!("`{}` is a document, and would be written over", path.display());
            return Err(Refusal::new("RM7004", message, "give -o another prefix").into());
        }
    }
    let tokens = write(&args.output, args.files.iter().map(open))?;
    output.result(&Tokenized {
        schema: "remesh.tokenize/1",
        prefix: args.output.clone(),
        documents: args.files.len(),
        tokens,
        vocab_size: Tokenizer::byte().vocab_size,
    })?;
    Ok(ExitCode::SUCCESS)
}

impl fmt::Display for Tokenized {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tokenized { prefix, documents, tokens, vocab_size, .. } = self;
        let prefix = prefix.display();
        let (tokens, documents) = (count(*tokens, "token"), count(*documents as u64, "document"));
        writeln!(f, "{tokens} of {documents}, vocabulary {vocab_size}")?;
        write!(f, "wrote {prefix}.bin, {prefix}.idx and {prefix}.tokenizer.json")
    }
}
