//! From text to ids: bytes, or a `tokenizer.json` of Hugging Face.

use crate::documents::{Document, InputFormat};
use crate::report::Refusal;
use anyhow::Context;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use std::io::ErrorKind;
use std::path::Path;
use train::data::Tokenizer;

/// A tokenizer, ready for text.
pub(crate) struct Encoder {
    /// How it is known to who reads the tokens.
    pub(crate) tokenizer: Tokenizer,
    /// None: ids are the bytes.
    huggingface: Option<Box<tokenizers::Tokenizer>>,
    /// Where the text is in an object of JSON.
    json_key: String,
    /// Ends each document.
    end: Option<u32>,
}

impl Encoder {
    /// Bytes, each document with its end token if `append_eod`.
    pub(crate) fn byte(json_key: &str, append_eod: bool) -> Self {
        let tokenizer = Tokenizer::byte();
        let end = tokenizer.eod.filter(|_| append_eod);
        Encoder { tokenizer, huggingface: None, json_key: json_key.into(), end }
    }

    /// The tokenizer of a `tokenizer.json`, as it is: no text is cut or filled up, and no token is added but the end of a document,
    /// which is `eod_token`, or else the `eos_token` of the `tokenizer_config.json` beside it.
    pub(crate) fn huggingface(
        file: &Path,
        eod_token: Option<&str>,
        json_key: &str,
        append_eod: bool,
    ) -> anyhow::Result<Self> {
        let text = std::fs::read(file).with_context(|| format!("reading `{}`", file.display()))?;
        let mut huggingface = tokenizers::Tokenizer::from_bytes(&text).map_err(|error| {
            Refusal::new(
                "RM1027",
                format!("`{}` is no tokenizer of Hugging Face: {error}", file.display()),
                "give the `tokenizer.json` of a model",
            )
        })?;
        huggingface.with_padding(None);
        huggingface.with_truncation(None).expect("without truncation nothing can be wrong with it");
        let eod_token = match eod_token {
            Some(token) => Some(Cow::from(token)),
            None => eos_token(&file.with_file_name("tokenizer_config.json"))?.map(Cow::from),
        };
        let eod = eod_token
            .map(|token| {
                huggingface.token_to_id(&token).ok_or_else(|| {
                    let message = format!("`{token}` is no token of `{}`", file.display());
                    Refusal::new("RM6003", message, "--eod-token names the token that ends a document")
                })
            })
            .transpose()?;
        if append_eod && eod.is_none() {
            let message = format!("`{}` does not say which token ends a document", file.display());
            let help =
                "name it with --eod-token, such as `<|endoftext|>`, or write none with --append-eod=false";
            return Err(Refusal::new("RM6004", message, help).into());
        }
        let vocab_size = huggingface.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        let hash = Sha256::digest(&text).iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Encoder {
            tokenizer: Tokenizer { kind: "huggingface".into(), vocab_size, eod, hash },
            huggingface: Some(Box::new(huggingface)),
            json_key: json_key.into(),
            end: eod.filter(|_| append_eod),
        })
    }

    /// The ids of a document.
    pub(crate) fn encode(&self, document: &Document) -> anyhow::Result<Vec<u32>> {
        let bytes = match document.format {
            InputFormat::Text | InputFormat::Lines | InputFormat::Parquet => Cow::from(&document.bytes),
            InputFormat::Jsonl => Cow::from(self.text_of_json(document)?.into_bytes()),
        };
        let ids: Vec<u32> = match &self.huggingface {
            None => bytes.iter().map(|byte| u32::from(*byte)).collect(),
            Some(tokenizer) => {
                let text = str::from_utf8(&bytes).map_err(|error| {
                    let at = error.valid_up_to();
                    unfit(
                        document,
                        format!("no UTF-8 at byte {at}"),
                        "only the byte tokenizer takes any bytes",
                    )
                })?;
                let encoding = tokenizer
                    .encode_fast(text, false)
                    .map_err(|error| unfit(document, error.to_string(), "the tokenizer has no ids for it"))?;
                encoding.get_ids().to_vec()
            }
        };
        Ok(ids.into_iter().chain(self.end).collect())
    }

    fn text_of_json(&self, document: &Document) -> anyhow::Result<String> {
        let help = "each line is an object of JSON with its text under --json-key";
        let mut object: Map<String, Value> = serde_json::from_slice(&document.bytes)
            .map_err(|error| unfit(document, format!("no object of JSON: {error}"), help))?;
        match object.remove(&self.json_key) {
            Some(Value::String(text)) => Ok(text),
            Some(_) => Err(unfit(document, format!("`{}` is no string", self.json_key), help).into()),
            None => {
                let keys: Vec<String> = object.keys().take(8).map(|key| format!("`{key}`")).collect();
                let message = format!("no key `{}`; there is {}", self.json_key, keys.join(", "));
                Err(unfit(document, message, help).into())
            }
        }
    }
}

/// A document that gives no ids.
fn unfit(document: &Document, reason: String, help: &str) -> Refusal {
    Refusal::new("RM1028", format!("{}: {reason}", document.place), help)
}

/// `eos_token` of a `tokenizer_config.json`; none if there is no such file or it names none.
fn eos_token(file: &Path) -> anyhow::Result<Option<String>> {
    let text = match std::fs::read(file) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("reading `{}`", file.display())),
    };
    let config: Value = serde_json::from_slice(&text).map_err(|error| {
        let message = format!("`{}` is no JSON: {error}", file.display());
        Refusal::new("RM1027", message, "mend it, or give --eod-token")
    })?;
    // A string, or an object that describes the token.
    let token = &config["eos_token"];
    Ok(token.as_str().or(token["content"].as_str()).map(String::from))
}
