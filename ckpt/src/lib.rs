//! How state is kept and found again: sharded checkpoints that any layout can load.
//!
//! A checkpoint is a folder of a [`Store`]. [`Saver::save`] makes one out of what all ranks hold; it is visible only
//! when it is whole. [`Store::latest`] and [`Store::checkpoint`] open one; [`plan_load`] says what to read for the
//! shards that a rank wants, under whatever layout, and [`StateSource::read`] reads and checks it. Every load is a
//! reshard; when the divisions are equal the plan is short.
//!
//! This crate knows no devices, no models, and not what a key means.

mod catalog;
mod encode;
mod fingerprint;
mod format;
mod manifest;
mod open;
mod plan;
mod publish;
mod read;
mod retention;
mod saver;
mod scatter;
mod source;
mod statistics;
mod store;
#[cfg(feature = "testing")]
pub mod testing;
mod verify;
mod write;

pub use catalog::{Catalog, CatalogFault, StoredChunk, StoredObject, StoredTensor};
pub use encode::{CHUNK_BYTES_MAX, ChunkChecksums, Codec, FRAME_BYTES, Frame, crc64};
pub use fingerprint::{Fingerprint, NotAFingerprint, fnv1a};
pub use format::{
    ForeignCheckpoint, ForeignError, ForeignFormat, ForeignTensor, PickleError, PickleFault, SafeTensor,
    SafetensorsError, SafetensorsFault, SafetensorsFolder,
};
pub use manifest::{
    COMMIT_NAME, Commit, CommitFault, Counters, FORMAT, FileEntry, Header, Random, RunName, RunRecord,
    TableFault, TableFile, TablesError, VERSION, Writer, parse_commit, read_tables,
};
pub use open::{Checkpoint, Latest, Listing, OpenError, PassedOver, Stray, WrongFile};
pub use plan::{
    BadGlob, Differing, LoadPlan, LoadPlanError, Mismatch, OwnShard, PlanDigest, PlannedChunk, ReadItem,
    SavePlan, SavePlanError, Strictness, own_shards, plan_load, plan_save,
};
pub use publish::DestinationError;
pub use retention::{Cleared, Retention};
pub use saver::{Exchange, Failure, Readers, SaveError, SaveReport, Saver, Snapshot};
pub use scatter::{BoxIn, copy_box};
pub use source::{LoadError, ReadReport, Sink, StateSource};
pub use statistics::{Spread, Statistics};
pub use store::{IoClass, LocationError, Store, StoreError, open_file};
pub use verify::{Fault, VerifyReport};
pub use write::ReadState;
