//! What is trained on.

use super::flag::named;
use super::resolve::said_twice;
use crate::report::Refusal;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::path::PathBuf;
use train::config::{Documents, EpochTail, TrainConfig};
use train::data::{DataPath, DataPathError, Split, Tokenizer};

mesh::settings! {
    /// `[data]`
    #[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    pub(crate) struct DataArgs {
        /// Train on PREFIX.bin and PREFIX.idx (required). Of several prefixes all samples are one data set; weights before all of
        /// them are their shares in the samples
        #[arg(long, alias = "train-data-path", value_name = "[WEIGHT] PREFIX", num_args = 1..)]
        #[serde(deserialize_with = "word_or_words", serialize_with = "as_word_or_words")]
        pub(crate) data_path: Option<Vec<String>>,
        /// Parts of the documents of each file: training, validation, test [default: 1,0,0, training alone]
        #[arg(long, value_name = "PARTS")]
        pub(crate) split: Option<String>,
        /// Evaluate on these files, said like --data-path [default: the validation part of --split]
        #[arg(long, value_name = "[WEIGHT] PREFIX", num_args = 1..)]
        #[serde(deserialize_with = "word_or_words", serialize_with = "as_word_or_words")]
        pub(crate) valid_data_path: Option<Vec<String>>,
        /// Count positions from 0 again behind each end token of a document [default: off]
        #[arg(long)]
        pub(crate) reset_position_ids: Option<bool>,
        /// Let tokens see those of their own document alone; on CPU [default: off, they see all before them in the sample]
        #[arg(long)]
        pub(crate) reset_attention_mask: Option<bool>,
        /// Leave what follows an end token, the first token of the next document, out of the loss [default: off]
        #[arg(long)]
        pub(crate) eod_mask_loss: Option<bool>,
        /// Samples that fill no global batch at the end of an epoch [default: span, the batch crosses into the next epoch]
        #[arg(long, value_parser = named::<EpochTail>(), value_name = "RULE")]
        pub(crate) epoch_tail: Option<EpochTail>,
    }
}

/// What is read, opened by nobody yet.
pub(crate) struct DataFiles {
    pub(crate) training: DataPath,
    /// Files of their own for evaluations.
    pub(crate) validation: Option<DataPath>,
    pub(crate) split: Split,
}

impl DataArgs {
    /// The settings of a run, as flags would say them, all but its files.
    pub(super) fn of(config: &TrainConfig) -> Self {
        let documents =
            |is_on: fn(&Documents) -> bool| Some(config.documents.is_some_and(|documents| is_on(&documents)));
        DataArgs {
            epoch_tail: Some(config.epoch_tail),
            reset_position_ids: documents(|documents| documents.reset_positions),
            reset_attention_mask: documents(|documents| documents.reset_attention),
            eod_mask_loss: documents(|documents| documents.mask_loss),
            ..DataArgs::default()
        }
    }

    /// Which files are read and how they are divided; `None` if nobody said what is trained on.
    ///
    /// # Errors
    /// Weights that make no shares, a split that is none, and validation documents that are said twice.
    pub(crate) fn files(&self) -> anyhow::Result<Option<DataFiles>> {
        let parse = |words: &Option<Vec<String>>| -> Result<Option<DataPath>, DataPathError> {
            words.as_deref().filter(|words| !words.is_empty()).map(DataPath::parse).transpose()
        };
        let split: Split = self.split.as_deref().map_or(Ok(Split::TRAINING), str::parse)?;
        let validation = parse(&self.valid_data_path)?;
        if split.has_validation() && validation.is_some() {
            return Err(said_twice("split", "valid_data_path").into());
        }
        Ok(parse(&self.data_path)?.map(|training| DataFiles { training, validation, split }))
    }

    /// The data's tokenizer; `None` where there is no data, or nothing says what made its ids.
    ///
    /// # Errors
    /// A description of a tokenizer that cannot be read or is none, or several that differ.
    pub(crate) fn tokenizer(&self) -> anyhow::Result<Option<Tokenizer>> {
        let Some(files) = self.files()? else { return Ok(None) };
        let prefixes: Vec<PathBuf> = [Some(files.training), files.validation]
            .into_iter()
            .flatten()
            .flat_map(|path| path.prefixes)
            .collect();
        Ok(Tokenizer::of_all(&prefixes)?)
    }

    /// What the end tokens of documents mean.
    ///
    /// # Errors
    /// If they mean something, and nothing says which they are.
    pub(super) fn documents(&self, tokenizer: Option<&Tokenizer>) -> Result<Option<Documents>, Refusal> {
        let [reset_positions, reset_attention, mask_loss] =
            [self.reset_position_ids, self.reset_attention_mask, self.eod_mask_loss]
                .map(|flag| flag == Some(true));
        if !(reset_positions || reset_attention || mask_loss) {
            return Ok(None);
        }
        let end_token = tokenizer.and_then(|tokenizer| tokenizer.eod).ok_or_else(|| {
            let message =
                "documents are to be told apart, and no `PREFIX.tokenizer.json` says which token ends one";
            Refusal::new("RM6004", message, "its `eod` does, as `remesh data tokenize` writes it")
        })?;
        Ok(Some(Documents { end_token, reset_positions, reset_attention, mask_loss }))
    }
}

/// A list of words, or a word that stands without a list.
fn word_or_words<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<String>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a string or a list of strings is expected")]
    enum Words {
        One(String),
        Many(Vec<String>),
    }
    let words = Option::<Words>::deserialize(deserializer)?;
    Ok(words.map(|words| match words {
        Words::One(word) => vec![word],
        Words::Many(words) => words,
    }))
}

fn as_word_or_words<S: Serializer>(words: &Option<Vec<String>>, serializer: S) -> Result<S::Ok, S::Error> {
    match words.as_deref() {
        Some([word]) => word.serialize(serializer),
        words => words.serialize(serializer),
    }
}
