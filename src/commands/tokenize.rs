//! `remesh data tokenize`: text to a token file.

use crate::documents::{self, Document, InputFormat, STDIN};
use crate::encoder::Encoder;
use crate::output::{Output, count};
use crate::report::Refusal;
use anyhow::Context;
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use serde::Serialize;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use train::data::{Existing, TokenWriter};

/// Text that is tokenized at once, on all cores.
const BATCH_BYTES: usize = 8 << 20;

/// Flags of `remesh data tokenize`.
#[derive(Debug, clap::Args)]
pub(crate) struct TokenizeArgs {
    /// Files to read, quoted patterns such as 'books/*.jsonl.gz', or - for stdin
    #[arg(required = true, value_name = "FILE")]
    files: Vec<String>,
    /// Write PREFIX.bin, PREFIX.idx and PREFIX.tokenizer.json
    #[arg(long, short, value_name = "PREFIX")]
    output: PathBuf,
    /// The tokenizer.json of a Hugging Face tokenizer [default: ids are bytes, 256 ends a document]
    #[arg(long, value_name = "PATH")]
    tokenizer: Option<PathBuf>,
    /// The token that ends a document [default: eos_token of the tokenizer_config.json beside --tokenizer]
    #[arg(long, value_name = "TOKEN", requires = "tokenizer")]
    eod_token: Option<String>,
    /// Whether each document gets its end token
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true)]
    #[arg(default_value_t = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    append_eod: bool,
    /// What the files hold [default: by the name, jsonl for .jsonl and .ndjson, parquet for .parquet, else text]
    #[arg(long, value_enum, value_name = "FORMAT")]
    input_format: Option<InputFormat>,
    /// Where the text is in an object of JSON, or in which column of a Parquet file
    #[arg(long, value_name = "KEY", default_value = "text")]
    json_key: String,
    /// Replace a token file that is there
    #[arg(long)]
    force: bool,
}

#[derive(Serialize)]
struct Tokenized {
    schema: &'static str,
    prefix: PathBuf,
    documents: usize,
    tokens: u64,
    vocab_size: usize,
}

/// Tokenizes files.
pub(crate) fn run(args: &TokenizeArgs, output: &Output) -> anyhow::Result<ExitCode> {
    let files = documents::find(&args.files, |text| output.note(text))?;
    check_target(&args.output, &files, args.force)?;
    let encoder = match &args.tokenizer {
        None => Encoder::byte(&args.json_key, args.append_eod),
        Some(file) => Encoder::huggingface(file, args.eod_token.as_deref(), &args.json_key, args.append_eod)?,
    };
    let writing = || format!("writing `{}`", args.output.display());
    let existing = if args.force { Existing::Replace } else { Existing::Keep };
    let mut writer =
        TokenWriter::create(&args.output, encoder.tokenizer.clone(), existing).with_context(writing)?;
    let mut read = documents::read(&files, args.input_format, &args.json_key);
    // Of text, which may be packed in the files.
    let bar = output.bar("tokenizing", None);
    let mut num_documents = 0;
    loop {
        let batch = next_batch(&mut read)?;
        if batch.is_empty() {
            break;
        }
        num_documents += batch.len();
        bar.add(batch.iter().map(|document| document.bytes.len() as u64).sum());
        // In the order of the documents, so that the first error is the same in every run.
        let ids: Vec<anyhow::Result<Vec<u32>>> =
            batch.par_iter().map(|document| encoder.encode(document)).collect();
        for ids in ids {
            writer.add_document(ids?).with_context(writing)?;
        }
    }
    drop(bar);
    if num_documents == 0 {
        let message = "there is no document in what was read, only empty lines or nothing";
        let help = "--input-format says what the files hold, where their names do not";
        return Err(Refusal::new("RM1023", message, help).into());
    }
    let tokens = writer.finish().with_context(writing)?;
    output.result(&Tokenized {
        schema: "remesh.tokenize/1",
        prefix: args.output.clone(),
        documents: num_documents,
        tokens,
        vocab_size: encoder.tokenizer.vocab_size,
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Documents of about [`BATCH_BYTES`]; none at the end.
fn next_batch(
    documents: &mut impl Iterator<Item = anyhow::Result<Document>>,
) -> anyhow::Result<Vec<Document>> {
    let (mut batch, mut bytes) = (Vec::new(), 0);
    while bytes < BATCH_BYTES
        && let Some(document) = documents.next().transpose()?
    {
        bytes += document.bytes.len();
        batch.push(document);
    }
    Ok(batch)
}

/// Refuses to write over a document, and without `force` over anything.
fn check_target(prefix: &Path, documents: &[PathBuf], force: bool) -> anyhow::Result<()> {
    let refuse = |message, help| -> anyhow::Result<()> { Err(Refusal::new("RM7004", message, help).into()) };
    let written = [".bin", ".idx", ".tokenizer.json"].map(|end| {
        let mut path = prefix.as_os_str().to_owned();
        path.push(end);
        PathBuf::from(path)
    });
    let there: Vec<PathBuf> = written.iter().filter_map(|path| std::fs::canonicalize(path).ok()).collect();
    for path in documents.iter().filter(|path| path.as_os_str() != STDIN) {
        let own = std::fs::canonicalize(path).with_context(|| format!("opening `{}`", path.display()))?;
        if there.contains(&own) {
            let message = format!("`{}` is a document, and would be written over", path.display());
            return refuse(message, "give -o another prefix");
        }
    }
    match written.iter().find(|path| path.exists()) {
        Some(path) if !force => refuse(
            format!("`{}` is there already", path.display()),
            "give -o another prefix, or replace the token file with --force",
        ),
        _ => Ok(()),
    }
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
