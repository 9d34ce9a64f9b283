//! What is trained on.

use super::flag::named;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use train::config::EpochTail;
use train::data::{TokenFileError, Tokenizer};

mesh::settings! {
    /// `[data]`
    #[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    pub(crate) struct DataArgs {
        /// Train on PREFIX.bin and PREFIX.idx (required)
        #[arg(long, value_name = "PREFIX")]
        pub(crate) data_path: Option<PathBuf>,
        /// Samples that fill no global batch at the end of an epoch [default: span, the batch crosses into the next epoch]
        #[arg(long, value_parser = named::<EpochTail>(), value_name = "RULE")]
        pub(crate) epoch_tail: Option<EpochTail>,
    }
}

impl DataArgs {
    /// Ids of the data's tokenizer; `None` where there is no data, or nothing says what made its ids.
    ///
    /// # Errors
    /// A description of a tokenizer that cannot be read or is none.
    pub(crate) fn vocab_size(&self) -> Result<Option<usize>, TokenFileError> {
        let tokenizer = self.data_path.as_deref().map(Tokenizer::open).transpose()?.flatten();
        Ok(tokenizer.map(|tokenizer| tokenizer.vocab_size))
    }
}
