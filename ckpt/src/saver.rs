//! `Saver`: the blocking handle through which all ranks of a model save together.

use crate::catalog::{Catalog, CatalogFault, StoredChunk, StoredObject, StoredTensor};
use crate::encode::Codec;
use crate::fingerprint::Fingerprint;
use crate::manifest::{FileEntry, Header};
use crate::open::{chain_text, folder_of};
use crate::plan::{SavePlan, SavePlanError, plan_save};
use crate::publish::{PublishError, publish};
use crate::statistics::Moments;
use crate::store::{Store, StoreError};
use crate::write::{ReadState, WriteError, Written, remove_files, write_packs};
use mesh::{ProcessGroups, Rank, StateTable};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::error::Error;
use std::fmt;

/// Gathers every rank's bytes on every rank, in the order of the model's ranks. A single rank gives its own back.
pub type Exchange = Box<dyn Fn(&[u8]) -> Result<Vec<Vec<u8>>, Box<dyn Error + Send + Sync>>>;

/// Saves a model's checkpoints to one store. Each rank has one, and all call it alike.
pub struct Saver {
    store: Store,
    exchange: Exchange,
    /// Steps whose checkpoints are whole by their commit and damaged all the same.
    damaged: Vec<u64>,
}

/// The state at one instant, as one rank sees it.
pub struct Snapshot<'a> {
    /// What the commit says beside the state; apart from who and when, equal on all ranks. The first rank's is written.
    pub header: Header,
    /// Everything that is saved; equal on all ranks.
    pub table: &'a StateTable,
    /// The model's groups as this rank sees them.
    pub groups: &'a ProcessGroups,
    /// This rank's bytes.
    pub read: &'a mut ReadState<'a>,
}

/// What was saved; equal on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveReport {
    /// Optimizer iterations done.
    pub iteration: u64,
    /// The checkpoint's folder, with the store's name.
    pub folder: String,
    /// Part of its files' names.
    pub attempt: String,
    /// Of the whole state.
    pub fingerprint: Fingerprint,
    /// Number of stored boxes.
    pub num_chunks: usize,
    /// Raw bytes of the state.
    pub raw_bytes: u64,
    /// Bytes of all files but the commit.
    pub file_bytes: u64,
}

/// Why nothing was saved; equal on all ranks, apart from `Exchange`.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// A rank failed. If it is several, the first.
    #[error(transparent)]
    Failed(Failure),
    /// Ranks were about to save different things.
    #[error("rank {rank} was about to save another {what} than rank {first}")]
    Disagree {
        /// What differs: `plan`, `step` or `header`.
        what: &'static str,
        /// The first rank of the model.
        first: Rank,
        /// The first one that differs from it.
        rank: Rank,
    },
    /// The ranks could not talk. Whether the save was published is not known where it happens after the writing.
    #[error("the ranks could not agree on the save")]
    Exchange {
        /// The transport's words.
        source: Box<dyn Error + Send + Sync>,
    },
    /// A rank sent what no rank of this program sends.
    #[error("rank {rank} sent a report that cannot be understood")]
    Report {
        /// Who.
        rank: Rank,
        /// What is wrong with it.
        source: serde_json::Error,
    },
}

/// What went wrong on one rank, told to all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Where.
    pub rank: Rank,
    /// The error's number.
    pub code: String,
    /// The error with its causes.
    pub text: String,
    /// How to mend it.
    pub help: String,
    /// The process's exit code.
    pub exit_code: u8,
    /// Whether a commit may be visible, so that no file may be removed.
    may_be_visible: bool,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the save failed on rank {}: {}", self.rank, self.text)
    }
}

impl Error for Failure {}

impl SaveError {
    /// The error's number.
    pub fn code(&self) -> &str {
        match self {
            SaveError::Failed(failure) => &failure.code,
            SaveError::Disagree { .. } => "RM7010",
            SaveError::Exchange { .. } => "RM7011",
            SaveError::Report { .. } => "RM9001",
        }
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            SaveError::Failed(failure) => failure.help.clone(),
            SaveError::Disagree { .. } => {
                "all ranks must run the same program with the same settings; nothing was written".to_owned()
            }
            SaveError::Exchange { .. } => {
                "see why the other rank ended; the previous checkpoint is intact".to_owned()
            }
            SaveError::Report { .. } => "all ranks must run the same program".to_owned(),
        }
    }

    /// The process's exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            SaveError::Failed(failure) => failure.exit_code,
            SaveError::Disagree { .. } => 2,
            SaveError::Exchange { .. } => 5,
            SaveError::Report { .. } => 70,
        }
    }
}

/// What can go wrong on one rank.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error(transparent)]
    Plan(#[from] SavePlanError),
    #[error("no random number for the names of the files")]
    Attempt(#[from] getrandom::Error),
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error("what the ranks wrote is not the state")]
    Catalog(#[from] CatalogFault),
    #[error(transparent)]
    Publish(#[from] PublishError),
}

impl Fault {
    fn of_store(error: &StoreError) -> (&'static str, String, u8) {
        (error.code(), error.help(), error.exit_code())
    }

    /// Code, help and exit code.
    fn class(&self) -> (&'static str, String, u8) {
        match self {
            Fault::Plan(error) => (error.code(), error.help(), error.exit_code()),
            Fault::Write(WriteError::Store(error)) | Fault::Publish(PublishError::Store(error)) => {
                Fault::of_store(error)
            }
            Fault::Publish(PublishError::Unknown { source, .. }) => Fault::of_store(source),
            Fault::Write(WriteError::State { .. }) => (
                "RM4034",
                "the trainer could not give the bytes that its placement says it holds".to_owned(),
                70,
            ),
            Fault::Publish(PublishError::Exists { .. }) => {
                let help = "two jobs save to one folder: stop one, or give it another folder; to replace newer steps, \
                            resume with `--overwrite`";
                ("RM7002", help.to_owned(), 7)
            }
            Fault::Publish(PublishError::Open(error)) => (error.code(), error.help(), error.exit_code()),
            Fault::Publish(PublishError::Files { source }) => {
                let help = "something else removes or changes files in this folder while they are written";
                (source.code(), help.to_owned(), 5)
            }
            Fault::Attempt(_) => ("RM9001", "the system gives no random numbers".to_owned(), 70),
            Fault::Catalog(_) => {
                ("RM9001", "this is a fault of the program; please report it".to_owned(), 70)
            }
        }
    }

    fn failure(&self, rank: Rank) -> Failure {
        let (code, help, exit_code) = self.class();
        let may_be_visible = matches!(self, Fault::Publish(error) if error.may_be_visible());
        Failure { rank, code: code.to_owned(), text: chain_text(self), help, exit_code, may_be_visible }
    }
}

/// What a rank is about to save.
#[derive(Serialize, Deserialize)]
struct Proposal {
    plan: String,
    step: u64,
    header: String,
    /// The first rank's counts.
    attempt: String,
}

impl Saver {
    /// For one rank of a model whose ranks talk through `exchange`.
    pub fn new(store: Store, exchange: Exchange) -> Saver {
        Saver { store, exchange, damaged: Vec::new() }
    }

    /// Sets the commits of these steps aside when their turn to be saved comes: damage was found in them while they were
    /// read, which their commits do not show.
    pub fn replacing(self, damaged: &[u64]) -> Saver {
        Saver { damaged: damaged.to_vec(), ..self }
    }

    /// Where it saves.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Saves the state as one checkpoint: all ranks write what the plan gives them, then the first one commits. It is
    /// visible and durable when this returns; on an error nothing of it stays, and the previous one is intact.
    ///
    /// Collective: every rank of the model calls it with its own snapshot, and all get the same answer. What each rank wrote
    /// goes through the exchange to all of them, as JSON with the checksums of every frame: some 3 KiB for 16 MiB of
    /// state, so that a state of 1 TiB takes about 200 MiB on every rank for that moment.
    ///
    /// # Errors
    /// See [`SaveError`].
    pub fn save(&self, snapshot: Snapshot<'_>) -> Result<SaveReport, SaveError> {
        let Snapshot { header, table, groups, read } = snapshot;
        let ranks = groups.table().ranks();
        let (rank, folder) = (groups.rank(), folder_of(header.iteration));

        let planned = propose(&header, table, groups);
        let proposals = self.gather(rank, ranks, planned.as_ref().map(|(proposal, _)| proposal))?;
        let attempt = agree(&proposals, ranks)?;
        let (_, plan) = planned.expect("a rank whose plan failed has told all of them");

        let written =
            write_packs(&self.store, &folder, attempt, table, &plan, rank, read).map_err(Fault::from);
        let parts = match self.gather(rank, ranks, written.as_ref()) {
            Ok(parts) => parts,
            Err(error) => return Err(self.give_up(error, &folder, written.as_ref().ok())),
        };

        let is_first = rank == ranks[0];
        let published = is_first.then(|| self.commit(header, table, &plan, attempt, parts)).transpose();
        match self.gather(rank, ranks, published.as_ref()) {
            Ok(mut reports) => Ok(reports.swap_remove(0).expect("the first rank sends the report")),
            Err(error) => Err(self.give_up(error, &folder, written.as_ref().ok())),
        }
    }

    /// Removes what this rank wrote, if all ranks know that nothing was published.
    fn give_up(&self, error: SaveError, folder: &str, written: Option<&Written>) -> SaveError {
        if let (SaveError::Failed(Failure { may_be_visible: false, .. }), Some(written)) = (&error, written) {
            remove_files(&self.store, folder, &written.packs);
        }
        error
    }

    /// Tells all ranks what this one has; an error of any is an error of all.
    fn gather<T: Serialize + DeserializeOwned>(
        &self,
        rank: Rank,
        ranks: &[Rank],
        own: Result<&T, &Fault>,
    ) -> Result<Vec<T>, SaveError> {
        let own: Result<&T, Failure> = own.map_err(|fault| fault.failure(rank));
        let bytes = serde_json::to_vec(&own).expect("a report is plain data");
        let sent = (self.exchange)(&bytes).map_err(|source| SaveError::Exchange { source })?;
        assert_eq!(sent.len(), ranks.len(), "the exchange gathers from every rank of the model");
        let mut gathered = Vec::with_capacity(sent.len());
        for (bytes, rank) in sent.iter().zip(ranks) {
            let told: Result<T, Failure> =
                serde_json::from_slice(bytes).map_err(|source| SaveError::Report { rank: *rank, source })?;
            gathered.push(told.map_err(SaveError::Failed)?);
        }
        Ok(gathered)
    }

    /// On the first rank: puts the reports of all ranks together and publishes.
    fn commit(
        &self,
        header: Header,
        table: &StateTable,
        plan: &SavePlan,
        attempt: &str,
        parts: Vec<Written>,
    ) -> Result<SaveReport, Fault> {
        let (catalog, packs) = catalog_of(table, plan, parts)?;
        let folder = folder_of(header.iteration);
        let replaces = self.damaged.contains(&header.iteration);
        let commit = publish(&self.store, header, attempt, &catalog, packs, replaces)?;
        Ok(SaveReport {
            iteration: commit.iteration,
            folder: self.store.full_name(&folder),
            attempt: commit.writer.attempt,
            fingerprint: commit.fingerprint,
            num_chunks: plan.chunks.len(),
            raw_bytes: plan.chunks.iter().map(|chunk| chunk.raw_bytes).sum(),
            file_bytes: commit.files.iter().map(|file| file.bytes).sum(),
        })
    }
}

fn propose(
    header: &Header,
    table: &StateTable,
    groups: &ProcessGroups,
) -> Result<(Proposal, SavePlan), Fault> {
    let plan = plan_save(table, groups.table())?;
    let attempt = format!("{:016x}", getrandom::u64()?);
    // Who and when may differ.
    let Header { iteration, created: _, run: _, host: _, pid: _, program: _, counters, .. } = header;
    let Header {
        scheduler, groups: parameter_groups, layout, numerics, config, random, data, partial, ..
    } = header;
    let state = (counters, scheduler, parameter_groups, layout, numerics, config, random, data, partial);
    let state = serde_json::to_vec(&state).expect("a header is plain data");
    let header = blake3::hash(&state).to_string();
    Ok((Proposal { plan: plan.digest(table).to_string(), step: *iteration, header, attempt }, plan))
}

/// The attempt that all ranks take part in.
fn agree<'a>(proposals: &'a [Proposal], ranks: &[Rank]) -> Result<&'a str, SaveError> {
    let own = &proposals[0];
    for (other, rank) in proposals.iter().zip(ranks) {
        let differs = [
            ("step", own.step != other.step),
            ("plan", own.plan != other.plan),
            ("header", own.header != other.header),
        ];
        if let Some((what, _)) = differs.into_iter().find(|(_, differs)| *differs) {
            return Err(SaveError::Disagree { what, first: ranks[0], rank: *rank });
        }
    }
    Ok(&own.attempt)
}

/// The catalog of what the ranks wrote, proved to be the whole state, and the packs.
fn catalog_of(
    table: &StateTable,
    plan: &SavePlan,
    parts: Vec<Written>,
) -> Result<(Catalog, Vec<FileEntry>), CatalogFault> {
    let mut packs: Vec<FileEntry> = Vec::new();
    let mut chunks = Vec::new();
    for part in parts {
        let first_pack = packs.len();
        packs.extend(part.packs);
        chunks.extend(part.chunks.into_iter().map(|chunk| (first_pack + chunk.pack, chunk)));
    }
    // In the order of the plan, so that sums of statistics do not depend on who wrote what.
    chunks.sort_by_key(|(_, chunk)| chunk.chunk);
    let mut tensors: Vec<StoredTensor> = (table.entries().iter())
        .map(|entry| StoredTensor {
            key: entry.key.clone(),
            kind: entry.kind,
            dtype: entry.dtype,
            shape: entry.placement.shape(),
            placement: Some(entry.placement.clone()),
            fingerprint: Fingerprint::default(),
            statistics: None,
            chunks: Vec::new(),
        })
        .collect();
    let mut moments: Vec<Option<Moments>> =
        table.entries().iter().map(|entry| Moments::of(entry.dtype, &[])).collect();
    for (object, written) in chunks {
        let planned = plan.chunks.get(written.chunk);
        let planned = planned.expect("a rank that agreed on the plan writes only chunks of it");
        let tensor = &mut tensors[planned.entry];
        tensor.fingerprint += written.fingerprint;
        if let (Some(sum), Some(part)) = (&mut moments[planned.entry], written.moments) {
            *sum = sum.join(part);
        }
        tensor.chunks.push(StoredChunk {
            region: planned.region.clone(),
            object,
            offset: written.offset,
            stored_bytes: planned.raw_bytes,
            codec: Codec::Raw,
            checksums: written.checksums,
        });
    }
    for (tensor, moments) in tensors.iter_mut().zip(moments) {
        tensor.statistics = moments.map(Moments::statistics);
    }
    let objects =
        packs.iter().map(|pack| StoredObject { path: pack.path.clone(), bytes: pack.bytes }).collect();
    Ok((Catalog::new(tensors, objects)?, packs))
}
