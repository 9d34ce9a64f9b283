//! Token files in Megatron's indexed form: `PREFIX.bin` holds the ids of all documents one after another, `PREFIX.idx` says
//! where each begins. Little-endian.

use crate::data::index::Index;
use crate::data::path::Split;
use ckpt::{IoClass, fnv1a, open_file};
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An opened pair of `.bin` and `.idx`, or some of its documents; samples are read when asked for.
#[derive(Clone, Debug)]
pub struct TokenFile {
    bin: Arc<File>,
    path: PathBuf,
    index: Index,
    index_hash: u64,
    /// Of all documents; a sequence of several is one, as Megatron divides them.
    documents: Range<u64>,
    /// Of the tokens of the file.
    tokens: Range<u64>,
}

/// Why a token file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenFileError {
    /// Neither file, or only one, is there or can be read.
    #[error("`{}` cannot be read", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The index is not what it should be.
    #[error("{}: {reason}; what `remesh data tokenize` and Megatron's preprocessing of text write is read", path.display())]
    Index {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A description of a tokenizer that is none.
    #[error("{} does not describe a tokenizer", path.display())]
    Tokenizer {
        /// Which file.
        path: PathBuf,
        /// The cause.
        source: serde_json::Error,
    },
    /// A tokenizer whose end token is none of its ids.
    #[error("{} says that {eod} ends a document, but all its ids are below {vocab_size}", path.display())]
    EndToken {
        /// Which file.
        path: PathBuf,
        /// The end token.
        eod: u32,
        /// What all ids are below.
        vocab_size: usize,
    },
    /// Token files of one run whose ids do not mean the same.
    #[error("the tokens of `{}` and `{}` are of different tokenizers", one.display(), other.display())]
    Tokenizers {
        /// Prefix of one.
        one: PathBuf,
        /// Prefix of another.
        other: PathBuf,
    },
    /// The index and the tokens do not belong together.
    #[error("{}: found {found} bytes, the index says {expected}", path.display())]
    Length {
        /// The `.bin`.
        path: PathBuf,
        /// Its size.
        found: u64,
        /// What the index says.
        expected: u64,
    },
    /// A token that the model has no row for.
    #[error("{}: token {id} in sample {sample}, but the vocabulary has {vocab_size} ids", path.display())]
    Id {
        /// The `.bin`.
        path: PathBuf,
        /// Which sample.
        sample: u64,
        /// The token.
        id: i64,
        /// Ids of the model.
        vocab_size: usize,
    },
    /// Too short for one sample.
    #[error(
        "{}: the {num_tokens} tokens of documents {} to {} hold no sample of {seq_length} tokens and the one after",
        path.display(), documents.start, documents.end
    )]
    TooShort {
        /// The `.bin`.
        path: PathBuf,
        /// The documents that are meant.
        documents: Range<u64>,
        /// Tokens in them.
        num_tokens: u64,
        /// Tokens of a sample.
        seq_length: u64,
    },
}

impl TokenFileError {
    /// Code of the error.
    pub fn code(&self) -> &'static str {
        match self {
            TokenFileError::Io { source, .. } => IoClass::of(source).code(),
            TokenFileError::Index { .. } => "RM1021",
            TokenFileError::Length { .. } => "RM1022",
            TokenFileError::TooShort { .. } => "RM1023",
            TokenFileError::Id { .. } => "RM1024",
            TokenFileError::Tokenizer { .. } | TokenFileError::EndToken { .. } => "RM1025",
            TokenFileError::Tokenizers { .. } => "RM1030",
        }
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            TokenFileError::Io { source, .. } if source.kind() != io::ErrorKind::NotFound => {
                IoClass::of(source).help().into()
            }
            TokenFileError::Io { .. } => {
                "--data-path names a prefix: PREFIX.bin and PREFIX.idx, as `remesh data tokenize FILE -o PREFIX` writes them".into()
            }
            TokenFileError::Index { .. } | TokenFileError::Length { .. } => {
                "write the pair anew with `remesh data tokenize`".into()
            }
            TokenFileError::Tokenizer { .. } | TokenFileError::EndToken { .. } => {
                "write it anew with `remesh data tokenize`, or remove it and give --vocab-size".into()
            }
            TokenFileError::Tokenizers { .. } => {
                "each PREFIX.tokenizer.json says which; tokenize the text of all with the same `--tokenizer`".into()
            }
            TokenFileError::Id { .. } => {
                "these tokens are of another tokenizer: leave out --vocab-size, or tokenize the text anew".into()
            }
            TokenFileError::TooShort { .. } => {
                "use more text, a smaller --seq-length, or a --split with more documents in this part".into()
            }
        }
    }
}

pub(super) fn with_extension(prefix: &Path, extension: &str) -> PathBuf {
    let mut name = prefix.as_os_str().to_owned();
    name.push(extension);
    PathBuf::from(name)
}

impl TokenFile {
    /// Opens all of `PREFIX.bin` and `PREFIX.idx`.
    ///
    /// # Errors
    /// A missing or unreadable file, or an index that contradicts itself or the tokens.
    pub fn open(prefix: &Path) -> Result<Self, TokenFileError> {
        let [all, _] = TokenFile::open_parts(prefix, &Split::TRAINING)?;
        Ok(all)
    }

    /// Opens `PREFIX.bin` and `PREFIX.idx` and divides their documents: training and validation, each of which may have none.
    ///
    /// # Errors
    /// See [`open`](Self::open).
    pub fn open_parts(prefix: &Path, split: &Split) -> Result<[Self; 2], TokenFileError> {
        let index_path = with_extension(prefix, ".idx");
        let path = with_extension(prefix, ".bin");
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| TokenFileError::Io { path, source }
        };
        let mut bytes = Vec::new();
        let mut file = open_file(&index_path).map_err(io(&index_path))?;
        file.read_to_end(&mut bytes).map_err(io(&index_path))?;
        let index = Index::parse(&bytes)
            .map_err(|reason| TokenFileError::Index { path: index_path.clone(), reason })?;
        let bin = Arc::new(open_file(&path).map_err(io(&path))?);
        let (found, expected) = (bin.metadata().map_err(io(&path))?.len(), index.bin_bytes);
        if found != expected {
            return Err(TokenFileError::Length { path, found, expected });
        }
        let index_hash = fnv1a(&bytes);
        Ok(split.training_and_validation(index.num_sequences).map(|documents| TokenFile {
            bin: Arc::clone(&bin),
            path: path.clone(),
            index,
            index_hash,
            tokens: index.tokens_before(&bytes, documents.start)..index.tokens_before(&bytes, documents.end),
            documents,
        }))
    }

    /// Tokens of these documents, their end tokens included.
    pub fn num_tokens(&self) -> u64 {
        self.tokens.end - self.tokens.start
    }

    /// Documents of the whole file.
    pub fn num_documents(&self) -> u64 {
        self.index.num_documents
    }

    /// FNV-1a 64 of the `.idx`, hexadecimal, behind the documents where these are not all: what a resume compares.
    pub fn identity(&self) -> String {
        let Range { start, end } = self.documents;
        match end - start == self.index.num_sequences {
            true => format!("{:016x}", self.index_hash),
            false => format!("documents {start} to {end} of {:016x}", self.index_hash),
        }
    }

    /// Samples of `seq_length` tokens, each with the token after it: ⌊(tokens − 1) / T⌋.
    ///
    /// # Errors
    /// If there is none.
    pub fn num_samples(&self, seq_length: u64) -> Result<u64, TokenFileError> {
        match self.num_tokens().saturating_sub(1) / seq_length {
            0 => Err(TokenFileError::TooShort {
                path: self.path.clone(),
                documents: self.documents.clone(),
                num_tokens: self.num_tokens(),
                seq_length,
            }),
            samples => Ok(samples),
        }
    }

    /// Tokens `[sample · T, sample · T + T + 1)` of these documents, each an id below `vocab_size`.
    ///
    /// # Errors
    /// If they cannot be read, or one of them is no such id.
    pub fn read_sample(
        &self,
        sample: u64,
        seq_length: u64,
        vocab_size: usize,
    ) -> Result<Vec<i32>, TokenFileError> {
        let Index { element, .. } = self.index;
        let mut bytes = vec![0; ((seq_length + 1) * element.bytes()) as usize];
        self.bin
            .read_exact_at(&mut bytes, (self.tokens.start + sample * seq_length) * element.bytes())
            .map_err(|source| TokenFileError::Io { path: self.path.clone(), source })?;
        let ids = bytes.chunks_exact(element.bytes() as usize).map(|bytes| element.id(bytes));
        ids.map(|id| match usize::try_from(id) {
            Ok(row) if row < vocab_size => Ok(id as i32),
            _ => Err(TokenFileError::Id { path: self.path.clone(), sample, id, vocab_size }),
        })
        .collect()
    }
}
