//! `PREFIX.tokenizer.json`: which tokenizer made a token file. The tokenizers themselves are not known here.

use crate::data::tokens::{TokenFileError, with_extension};
use serde::{Deserialize, Serialize};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// What `PREFIX.tokenizer.json` says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tokenizer {
    /// How text becomes ids: `byte` or `huggingface`.
    pub kind: String,
    /// All ids are below this.
    pub vocab_size: usize,
    /// The id that ends a document, if one is known.
    pub eod: Option<u32>,
    /// Names the mapping, so that two files can be told to agree.
    pub hash: String,
}

impl Tokenizer {
    /// Ids 0 to 255 are bytes, and 256 ends a document.
    pub fn byte() -> Self {
        let hash = format!("{:016x}", ckpt::fnv1a(b"byte 257 256"));
        Tokenizer { kind: "byte".into(), vocab_size: 257, eod: Some(256), hash }
    }

    /// Reads `PREFIX.tokenizer.json`; `None` if there is none.
    ///
    /// # Errors
    /// If it cannot be read, or is something else.
    pub fn open(prefix: &Path) -> Result<Option<Self>, TokenFileError> {
        let path = with_extension(prefix, ".tokenizer.json");
        let mut text = Vec::new();
        match ckpt::open_file(&path).and_then(|mut file| file.read_to_end(&mut text)) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(TokenFileError::Io { path, source }),
        };
        let tokenizer: Tokenizer = match serde_json::from_slice(&text) {
            Ok(tokenizer) => tokenizer,
            Err(source) => return Err(TokenFileError::Tokenizer { path, source }),
        };
        match tokenizer.eod {
            Some(eod) if eod as usize >= tokenizer.vocab_size => {
                Err(TokenFileError::EndToken { path, eod, vocab_size: tokenizer.vocab_size })
            }
            _ => Ok(Some(tokenizer)),
        }
    }

    /// The one tokenizer of several token files; `None` if none of them says which.
    ///
    /// # Errors
    /// A description that cannot be read, or two that differ.
    pub fn of_all(prefixes: &[PathBuf]) -> Result<Option<Self>, TokenFileError> {
        let mut found: Option<(Self, &Path)> = None;
        for prefix in prefixes {
            let Some(tokenizer) = Tokenizer::open(prefix)? else { continue };
            match &found {
                Some((first, one)) if *first != tokenizer => {
                    let (one, other) = (one.to_path_buf(), prefix.clone());
                    return Err(TokenFileError::Tokenizers { one, other });
                }
                _ => found = Some((tokenizer, prefix)),
            }
        }
        Ok(found.map(|(tokenizer, _)| tokenizer))
    }
}
