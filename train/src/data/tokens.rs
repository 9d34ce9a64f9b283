//! Token files in Megatron's indexed form: `PREFIX.bin` holds the ids of all documents one after another, `PREFIX.idx` says
//! where each begins. Little-endian.
//!
//! `.idx`: magic `MMIDIDX\0\0`, version u64 = 1, element type u8 (8: u16, 4: i32), number of sequences u64, number of document
//! borders u64, then each sequence's length i32, its byte offset i64, and the index of each document's first sequence i64
//! (one more than there are documents).

use ckpt::{IoClass, fnv1a};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
const VERSION: u64 = 1;
const HEADER_BYTES: u64 = 9 + 8 + 1 + 8 + 8;
const U16_CODE: u8 = 8;
const I32_CODE: u8 = 4;
/// Vocabularies below this many ids are kept in 16 bits.
const U16_VOCAB_END: usize = 65_500;

/// An opened pair of `.bin` and `.idx`; samples are read when asked for.
#[derive(Debug)]
pub struct TokenFile {
    bin: File,
    path: PathBuf,
    token_bytes: u64,
    num_tokens: u64,
    num_documents: u64,
    index_hash: u64,
}

/// Why a token file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenFileError {
    /// Neither file, or only one, is there or can be read.
    #[error("{}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The index is not what it should be.
    #[error("{}: {reason}; it was not written by `remesh data tokenize` or Megatron's preprocessing", path.display())]
    Index {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
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
        id: i32,
        /// Ids of the model.
        vocab_size: usize,
    },
    /// Too short for one sample.
    #[error("{}: {num_tokens} tokens hold no sample of {seq_length} tokens and the one after", path.display())]
    TooShort {
        /// The `.bin`.
        path: PathBuf,
        /// Tokens in it.
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
            TokenFileError::Id { .. } => {
                "these tokens are of another tokenizer: leave out --vocab-size, or tokenize the text anew".into()
            }
            TokenFileError::TooShort { .. } => "use more text or a smaller --seq-length".into(),
        }
    }
}

fn with_extension(prefix: &Path, extension: &str) -> PathBuf {
    let mut name = prefix.as_os_str().to_owned();
    name.push(extension);
    PathBuf::from(name)
}

impl TokenFile {
    /// Opens `PREFIX.bin` and `PREFIX.idx`.
    ///
    /// # Errors
    /// A missing or unreadable file, or an index that contradicts itself or the tokens.
    pub fn open(prefix: &Path) -> Result<Self, TokenFileError> {
        let index_path = with_extension(prefix, ".idx");
        let path = with_extension(prefix, ".bin");
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| TokenFileError::Io { path, source }
        };
        let index = std::fs::read(&index_path).map_err(io(&index_path))?;
        let bad = |reason: String| TokenFileError::Index { path: index_path.clone(), reason };
        let word = |at: usize| -> Option<u64> {
            Some(u64::from_le_bytes(index.get(at..at + 8)?.try_into().expect("eight bytes")))
        };
        if index.get(..9) != Some(MAGIC) {
            return Err(bad("it does not begin with `MMIDIDX`".into()));
        }
        let (Some(version), Some(code), Some(sequences), Some(borders)) =
            (word(9), index.get(17), word(18), word(26))
        else {
            return Err(bad("it ends inside its header".into()));
        };
        if version != VERSION {
            return Err(bad(format!("version {version} where {VERSION} is supported")));
        }
        let token_bytes = match *code {
            U16_CODE => 2,
            I32_CODE => 4,
            other => return Err(bad(format!("element type {other} where 8 (u16) or 4 (i32) is expected"))),
        };
        let expected = u128::from(HEADER_BYTES) + u128::from(sequences) * 12 + u128::from(borders) * 8;
        if expected != index.len() as u128 {
            return Err(bad(format!("{} bytes where {sequences} sequences need {expected}", index.len())));
        }
        let lengths = &index[HEADER_BYTES as usize..][..sequences as usize * 4];
        let pointers = &index[HEADER_BYTES as usize + lengths.len()..][..sequences as usize * 8];
        let mut num_tokens = 0u64;
        for (length, pointer) in lengths.chunks_exact(4).zip(pointers.chunks_exact(8)) {
            let length = i32::from_le_bytes(length.try_into().expect("four bytes"));
            let pointer = i64::from_le_bytes(pointer.try_into().expect("eight bytes"));
            if length < 0 || pointer != (num_tokens * token_bytes) as i64 {
                return Err(bad(format!("a sequence of {length} tokens at byte {pointer}")));
            }
            num_tokens += length as u64;
        }
        let bin = File::open(&path).map_err(io(&path))?;
        let found = bin.metadata().map_err(io(&path))?.len();
        if found != num_tokens * token_bytes {
            return Err(TokenFileError::Length { path, found, expected: num_tokens * token_bytes });
        }
        let num_documents = borders.saturating_sub(1);
        Ok(TokenFile { bin, path, token_bytes, num_tokens, num_documents, index_hash: fnv1a(&index) })
    }

    /// Tokens of all documents, their end tokens included.
    pub fn num_tokens(&self) -> u64 {
        self.num_tokens
    }

    /// Documents.
    pub fn num_documents(&self) -> u64 {
        self.num_documents
    }

    /// FNV-1a 64 of the `.idx`: what a resume compares.
    pub fn index_hash(&self) -> u64 {
        self.index_hash
    }

    /// Samples of `seq_length` tokens, each with the token after it: ⌊(tokens − 1) / T⌋.
    ///
    /// # Errors
    /// If there is none.
    pub fn num_samples(&self, seq_length: u64) -> Result<u64, TokenFileError> {
        match self.num_tokens.saturating_sub(1) / seq_length {
            0 => Err(TokenFileError::TooShort {
                path: self.path.clone(),
                num_tokens: self.num_tokens,
                seq_length,
            }),
            samples => Ok(samples),
        }
    }

    /// Tokens `[sample · T, sample · T + T + 1)`, each an id below `vocab_size`.
    ///
    /// # Errors
    /// If they cannot be read, or one of them is no such id.
    pub fn read_sample(
        &self,
        sample: u64,
        seq_length: u64,
        vocab_size: usize,
    ) -> Result<Vec<i32>, TokenFileError> {
        let mut bytes = vec![0; ((seq_length + 1) * self.token_bytes) as usize];
        self.bin
            .read_exact_at(&mut bytes, sample * seq_length * self.token_bytes)
            .map_err(|source| TokenFileError::Io { path: self.path.clone(), source })?;
        let tokens: Vec<i32> = match self.token_bytes {
            2 => bytes.chunks_exact(2).map(|b| i32::from(u16::from_le_bytes([b[0], b[1]]))).collect(),
            _ => bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        };
        match tokens.iter().find(|id| usize::try_from(**id).map_or(true, |id| id >= vocab_size)) {
            Some(id) => Err(TokenFileError::Id { path: self.path.clone(), sample, id: *id, vocab_size }),
            None => Ok(tokens),
        }
    }
}

/// Writes a pair of `.bin` and `.idx`, one document after another.
#[derive(Debug)]
pub struct TokenWriter {
    bin: BufWriter<File>,
    index_path: PathBuf,
    token_bytes: usize,
    lengths: Vec<u64>,
}

impl TokenWriter {
    /// Creates `PREFIX.bin`, or truncates it; `PREFIX.idx` appears when the writer is finished.
    ///
    /// # Errors
    /// If the file cannot be created.
    pub fn create(prefix: &Path, vocab_size: usize) -> io::Result<Self> {
        Ok(TokenWriter {
            bin: BufWriter::new(File::create(with_extension(prefix, ".bin"))?),
            index_path: with_extension(prefix, ".idx"),
            token_bytes: if vocab_size < U16_VOCAB_END { 2 } else { 4 },
            lengths: Vec::new(),
        })
    }

    /// Adds a document, its end token included.
    ///
    /// # Errors
    /// If it cannot be written, or has more than 2³¹ − 1 tokens.
    pub fn add_document(&mut self, tokens: impl IntoIterator<Item = u32>) -> io::Result<()> {
        let mut length = 0;
        for token in tokens {
            self.bin.write_all(&token.to_le_bytes()[..self.token_bytes])?;
            length += 1;
        }
        if length > i32::MAX as u64 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a document of more than 2³¹ − 1 tokens",
            ));
        }
        self.lengths.push(length);
        Ok(())
    }

    /// Completes both files and returns the number of tokens.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn finish(self) -> io::Result<u64> {
        self.bin.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        let mut index = BufWriter::new(File::create(&self.index_path)?);
        index.write_all(MAGIC)?;
        index.write_all(&VERSION.to_le_bytes())?;
        index.write_all(&[if self.token_bytes == 2 { U16_CODE } else { I32_CODE }])?;
        index.write_all(&(self.lengths.len() as u64).to_le_bytes())?;
        index.write_all(&(self.lengths.len() as u64 + 1).to_le_bytes())?;
        for length in &self.lengths {
            index.write_all(&(*length as i32).to_le_bytes())?;
        }
        let mut tokens = 0;
        for length in &self.lengths {
            index.write_all(&(tokens * self.token_bytes as u64).to_le_bytes())?;
            tokens += length;
        }
        for border in 0..=self.lengths.len() as u64 {
            index.write_all(&border.to_le_bytes())?;
        }
        index.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        Ok(tokens)
    }
}
