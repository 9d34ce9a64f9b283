//! Writing a token file. Its three files get their names when all of them are complete.

use crate::data::Tokenizer;
use crate::data::index::{Element, Index};
use crate::data::tokens::with_extension;
use std::fs::{File, Permissions};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// What happens to a token file that has the prefix already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// It stays, and writing fails.
    Keep,
    /// It stays until the new one is complete.
    Replace,
}

/// Writes `PREFIX.bin`, `PREFIX.idx` and `PREFIX.tokenizer.json`, one document after another.
#[derive(Debug)]
pub struct TokenWriter {
    prefix: PathBuf,
    tokenizer: Tokenizer,
    existing: Existing,
    element: Element,
    bin: BufWriter<NamedTempFile>,
    /// Tokens of each document.
    lengths: Vec<i32>,
}

impl TokenWriter {
    /// A writer of ids of `tokenizer`. Nothing has the name of `prefix` before it is finished; a writer that is dropped leaves
    /// nothing.
    ///
    /// # Errors
    /// If a file cannot be created in the prefix's folder.
    pub fn create(prefix: &Path, tokenizer: Tokenizer, existing: Existing) -> io::Result<Self> {
        Ok(TokenWriter {
            element: Element::for_vocabulary(tokenizer.vocab_size),
            bin: BufWriter::new(temporary(prefix)?),
            prefix: prefix.to_owned(),
            tokenizer,
            existing,
            lengths: Vec::new(),
        })
    }

    /// Adds a document, its end token included.
    ///
    /// # Errors
    /// If it cannot be written, or has more than 2³¹ − 1 tokens.
    ///
    /// # Panics
    /// If a token is no id of the tokenizer.
    pub fn add_document(&mut self, tokens: impl IntoIterator<Item = u32>) -> io::Result<()> {
        let mut length = 0u64;
        for token in tokens {
            assert!((token as usize) < self.tokenizer.vocab_size, "a tokenizer's ids are below its size");
            self.bin.write_all(&token.to_le_bytes()[..self.element.bytes() as usize])?;
            length += 1;
        }
        let length = i32::try_from(length)
            .map_err(|_| io::Error::new(ErrorKind::InvalidInput, "a document of more than 2³¹ − 1 tokens"))?;
        self.lengths.push(length);
        Ok(())
    }

    /// Completes the three files, gives them their names, the index last, and returns the number of tokens.
    ///
    /// # Errors
    /// If they cannot be written, or one is there and is kept.
    pub fn finish(self) -> io::Result<u64> {
        let bin = self.bin.into_inner().map_err(io::IntoInnerError::into_error)?;
        let mut index = BufWriter::new(temporary(&self.prefix)?);
        Index::write(&mut index, self.element, &self.lengths)?;
        let index = index.into_inner().map_err(io::IntoInnerError::into_error)?;
        let mut tokenizer = temporary(&self.prefix)?;
        serde_json::to_writer_pretty(&mut tokenizer, &self.tokenizer)?;
        writeln!(tokenizer)?;
        for file in [&bin, &index, &tokenizer] {
            file.as_file().sync_all()?;
        }
        if self.existing == Existing::Replace {
            // Without its index no half of an old file is taken for a part of the new one.
            match std::fs::remove_file(with_extension(&self.prefix, ".idx")) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        for (file, extension) in [(tokenizer, ".tokenizer.json"), (bin, ".bin"), (index, ".idx")] {
            let path = with_extension(&self.prefix, extension);
            match self.existing {
                Existing::Keep => file.persist_noclobber(path)?,
                Existing::Replace => file.persist(path)?,
            };
        }
        File::open(folder(&self.prefix))?.sync_all()?;
        Ok(self.lengths.iter().map(|length| *length as u64).sum())
    }
}

fn folder(prefix: &Path) -> &Path {
    prefix.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A file of the prefix's folder that is removed unless it gets a name.
fn temporary(prefix: &Path) -> io::Result<NamedTempFile> {
    // The permissions of an ordinary file: the umask takes away what it does.
    let mode = Permissions::from_mode(0o666);
    tempfile::Builder::new()
        .prefix(".tokens-")
        .suffix(".partial")
        .permissions(mode)
        .tempfile_in(folder(prefix))
}
