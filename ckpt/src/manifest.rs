//! What describes a checkpoint: `checkpoint.json`, whose appearance is the commit, and two Arrow tables.

mod commit;
mod tables;

pub(crate) use commit::seal_commit;
pub use commit::{
    COMMIT_NAME, Commit, CommitFault, Counters, FORMAT, FileEntry, Header, Random, RunName, RunRecord,
    VERSION, Writer, parse_commit,
};
pub use tables::{TableFault, TableFile, TablesError, read_tables};
pub(crate) use tables::{encode_chunks, encode_tensors};
