//! `checkpoint.json`: the commit of a checkpoint, readable by people and sealed.

use crate::encode::crc64;
use crate::fingerprint::Fingerprint;
use mesh::ParallelLayout;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeSet;

/// Name of the commit in a checkpoint's folder.
pub const COMMIT_NAME: &str = "checkpoint.json";

/// What `format` says.
pub const FORMAT: &str = "remesh";

/// The newest version of the format that is read, and the one that is written.
pub const VERSION: u32 = 1;

/// What the caller of a save says about it: everything of the commit that a save does not find out itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// Optimizer iterations done.
    pub iteration: u64,
    /// RFC 3339.
    pub created: String,
    /// Who saves.
    pub writer: RunName,
    /// The state of the run.
    pub run: RunRecord,
    /// Names that an allow list let pass when this run loaded.
    pub partial: Vec<String>,
}

/// Who writes checkpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunName {
    /// An id of this run.
    pub run: String,
    /// The machine.
    pub host: String,
    /// The process.
    pub pid: u32,
    /// Program and version.
    pub program: String,
}

/// What a run says of itself beside its tensors. Values whose meaning belongs to the trainer are kept as they are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    /// What was consumed so far.
    pub counters: Counters,
    /// Where the schedule is.
    pub scheduler: Value,
    /// Parameter groups by name.
    pub groups: Value,
    /// The layout that the state was divided by.
    pub layout: ParallelLayout,
    /// The contract on the order of sums.
    pub numerics: Value,
    /// Every setting, resolved.
    pub config: Value,
    /// Where the random numbers are.
    pub random: Random,
    /// Which samples, and where in them.
    pub data: Value,
}

/// `checkpoint.json`, in the order of its fields.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Commit {
    /// [`FORMAT`].
    pub format: String,
    /// [`VERSION`] at most.
    pub version: u32,
    /// Optimizer iterations done; the number in the folder's name.
    pub iteration: u64,
    /// RFC 3339.
    pub created: String,
    pub writer: Writer,
    /// Its fields stand here among the others.
    #[serde(flatten)]
    pub run: RunRecord,
    /// Of the whole state.
    pub fingerprint: Fingerprint,
    /// Names that an allow list let pass when the run that saved this loaded.
    pub partial: Vec<String>,
    /// Everything that belongs to the checkpoint: tensor table, chunk tables in reading order, packs.
    pub files: Vec<FileEntry>,
}

/// Who saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Writer {
    pub run: String,
    /// 16 hexadecimal digits, another one for each save; part of the name of each of its files.
    pub attempt: String,
    pub host: String,
    pub pid: u32,
    pub program: String,
}

/// What was consumed so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Counters {
    pub consumed_train_samples: u64,
    pub skipped_train_samples: u64,
    pub consumed_valid_samples: u64,
    pub optimizer_steps: u64,
    pub tokens: u64,
}

/// Where the random numbers are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Random {
    /// `philox4x32-10`.
    pub algorithm: String,
    /// Of the run.
    pub seed: u32,
    /// Samples whose numbers were drawn.
    pub ordinal: u64,
}

/// One file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// In the checkpoint's folder.
    pub path: String,
    /// Its length.
    pub bytes: u64,
    /// CRC-64/NVME of its content, 16 hexadecimal digits in the file.
    #[serde(with = "hex64")]
    pub crc64: u64,
}

/// Why a text is no commit.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CommitFault {
    #[error("it has no seal; it was cut short or is no `checkpoint.json`")]
    NoSeal,
    #[error("it was changed or damaged: its seal says {stored}, its text {found:016x}")]
    Seal { stored: String, found: u64 },
    #[error("it is not what `checkpoint.json` must be")]
    Json { source: serde_json::Error },
    #[error("its format is `{found}`, not `{FORMAT}`")]
    Format { found: String },
    #[error("it has version {found}; this program reads versions up to {VERSION}")]
    Version { found: u64 },
    #[error("it lists the file `{path}`, which no checkpoint of this kind has")]
    Path { path: String },
    #[error("it lists the file `{path}` twice")]
    TwiceListed { path: String },
    #[error("it lists {found} tables of tensors, not one")]
    NumTensorTables { found: usize },
}

/// The first fields, which say whether the others can be understood.
#[derive(Deserialize)]
struct Preamble {
    format: String,
    version: u64,
    seal: String,
}

/// The text with its seal.
pub(crate) fn seal_commit(commit: &Commit) -> String {
    let text = serde_json::to_string_pretty(commit).expect("a commit is plain data");
    let open = text.strip_suffix("\n}").expect("a pretty object ends with a brace on its own line");
    let sealed = format!("{open},\n  ");
    format!("{sealed}\"seal\": \"{:016x}\"\n}}\n", crc64(sealed.as_bytes()))
}

/// Reads and checks a commit. Fields that are not known are ignored.
///
/// # Errors
/// A broken seal, a newer version, a missing field, or a file list that names what no checkpoint has.
pub fn parse_commit(text: &[u8]) -> Result<Commit, CommitFault> {
    let seal_at = text.windows(6).rposition(|six| six == b"\"seal\"").ok_or(CommitFault::NoSeal)?;
    let preamble: Preamble = serde_json::from_slice(text).map_err(|source| CommitFault::Json { source })?;
    let found = crc64(&text[..seal_at]);
    if preamble.seal != format!("{found:016x}") {
        return Err(CommitFault::Seal { stored: preamble.seal, found });
    }
    if preamble.format != FORMAT {
        return Err(CommitFault::Format { found: preamble.format });
    }
    if preamble.version > u64::from(VERSION) {
        return Err(CommitFault::Version { found: preamble.version });
    }
    let commit: Commit = serde_json::from_slice(text).map_err(|source| CommitFault::Json { source })?;
    let mut seen = BTreeSet::new();
    for file in &commit.files {
        if !is_own_path(&file.path) {
            return Err(CommitFault::Path { path: file.path.clone() });
        }
        if !seen.insert(&file.path) {
            return Err(CommitFault::TwiceListed { path: file.path.clone() });
        }
    }
    match commit.tensor_tables().count() {
        1 => Ok(commit),
        found => Err(CommitFault::NumTensorTables { found }),
    }
}

/// `tensors-….arrow`, `chunks-….arrow` or `data/….pack`: nothing that could lie outside the folder.
fn is_own_path(path: &str) -> bool {
    let plain = |name: &str| {
        !name.is_empty()
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
    };
    let table = path.strip_suffix(".arrow");
    let table = table.and_then(|name| name.strip_prefix("tensors-").or_else(|| name.strip_prefix("chunks-")));
    let pack = path.strip_prefix("data/").and_then(|name| name.strip_suffix(".pack"));
    table.or(pack).is_some_and(plain)
}

impl Commit {
    fn tensor_tables(&self) -> impl Iterator<Item = &FileEntry> {
        self.files.iter().filter(|file| file.path.starts_with("tensors-"))
    }

    /// The tensor table's entry in `files`.
    pub(crate) fn tensor_table(&self) -> &FileEntry {
        self.tensor_tables().next().expect("a commit that was read lists one table of tensors")
    }

    /// The chunk tables' entries in `files`, in reading order.
    pub(crate) fn chunk_tables(&self) -> impl Iterator<Item = &FileEntry> {
        self.files.iter().filter(|file| file.path.starts_with("chunks-"))
    }

    /// The packs' entries in `files`.
    pub(crate) fn packs(&self) -> impl Iterator<Item = &FileEntry> {
        self.files.iter().filter(|file| file.path.starts_with("data/"))
    }
}

mod hex64 {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{value:016x}"))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let text = String::deserialize(deserializer)?;
        let digits = text.len() == 16 && text.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
        let value = u64::from_str_radix(&text, 16).ok().filter(|_| digits);
        value.ok_or_else(|| D::Error::custom(format!("`{text}` is not 16 lower-case hexadecimal digits")))
    }
}
