//! `Saver`: the blocking handle through which all ranks of a model save together.

use crate::catalog::{Catalog, CatalogFault, StoredChunk, StoredObject, StoredTensor};
use crate::encode::Codec;
use crate::fingerprint::Fingerprint;
use crate::manifest::{Commit, FileEntry, Header, Writer};
use crate::open::{Checkpoint, chain_text, commit_path, folder_of, refuse_link};
use crate::plan::{SavePlan, SavePlanError, plan_save};
use crate::publish::{PublishError, publish};
use crate::retention::{Cleared, Retention};
use crate::statistics::Moments;
use crate::store::Store;
use crate::write::{ReadState, WriteError, Written, remove_failed, write_packs};
use mesh::{ProcessGroups, Rank, StateKind, StateTable, TensorKey};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::error::Error;
use std::fmt;

/// Gathers every rank's bytes on the ranks that read them, in the order of the model's ranks; who reads nothing gets nothing.
/// A single rank gets its own back.
pub type Exchange = Box<dyn Fn(&[u8], Readers) -> Result<Vec<Vec<u8>>, Box<dyn Error + Send + Sync>>>;

/// Which ranks of the model get what was gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readers {
    /// Every rank.
    All,
    /// The first one.
    First,
}

/// Saves a model's checkpoints to one store. Each rank has one, and all call it alike.
pub struct Saver {
    store: Store,
    exchange: Exchange,
    /// Steps whose checkpoints are whole by their commit and damaged all the same.
    damaged: Vec<u64>,
    /// The newest step that is this run's own, where nobody else may save.
    newest_own: Cell<Option<u64>>,
    /// Which older checkpoints stay; all, if there is none.
    retention: Option<Retention>,
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
    /// What became of older checkpoints; why nothing was removed, if that failed.
    pub cleared: Result<Cleared, String>,
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
    /// Whether a commit may be visible, so that no file may be removed.
    may_be_visible: bool,
    /// Whether every later save would fail alike.
    is_final: bool,
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
        }
    }

    /// Whether every later save would fail alike: another run saves here, or the state is spoilt.
    pub fn is_final(&self) -> bool {
        matches!(self, SaveError::Failed(Failure { is_final: true, .. }))
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
    #[error("rank {sender} sent a report that cannot be understood")]
    Report { sender: Rank, source: postcard::Error },
    #[error(
        "another run saves here: step {step}, newer than this run's step {own}, is of run `{}` (process {} on {}, {created})",
        .owner.run, .owner.pid, .owner.host
    )]
    AnotherRun { step: u64, own: u64, owner: Box<Writer>, created: String },
    #[error("{elements} of the {of} elements of `{key}` are not finite")]
    NotFinite { key: TensorKey, elements: u64, of: u64 },
}

impl Fault {
    fn code(&self) -> &'static str {
        match self {
            Fault::Plan(error) => error.code(),
            Fault::Write(WriteError::Store(error)) | Fault::Publish(PublishError::Store(error)) => {
                error.code()
            }
            Fault::Publish(PublishError::Unknown { source, .. }) => source.code(),
            Fault::Write(WriteError::State { .. }) => "RM4034",
            Fault::Publish(PublishError::Exists { .. }) | Fault::AnotherRun { .. } => "RM7002",
            Fault::NotFinite { .. } => "RM3205",
            Fault::Publish(PublishError::Open(error)) => error.code(),
            Fault::Publish(PublishError::Files { .. }) => "RM7012",
            Fault::Report { .. } => "RM9001",
            Fault::Attempt(_) => "RM9004",
            Fault::Catalog(_) => "RM9001",
        }
    }

    fn help(&self) -> String {
        match self {
            Fault::Plan(error) => error.help(),
            Fault::Write(WriteError::Store(error)) | Fault::Publish(PublishError::Store(error)) => error.help(),
            Fault::Publish(PublishError::Unknown { source, .. }) => source.help(),
            Fault::Write(WriteError::State { .. }) => {
                "the trainer could not give the bytes that its placement says it holds".to_owned()
            }
            Fault::NotFinite { .. } => {
                "an update made them; a lower --lr or a longer warm-up may help; the checkpoint before is intact".to_owned()
            }
            Fault::Publish(PublishError::Exists { .. }) | Fault::AnotherRun { .. } => {
                "two jobs save to one folder: stop one, or give it another folder; to replace newer steps, resume with \
                 `--overwrite`"
                    .to_owned()
            }
            Fault::Publish(PublishError::Open(error)) => error.help(),
            Fault::Publish(PublishError::Files { .. }) => {
                "something else removes or changes files in this folder while they are written".to_owned()
            }
            Fault::Report { .. } => "all ranks must run the same program".to_owned(),
            Fault::Attempt(_) => "see the system's words; it is safe to run again".to_owned(),
            Fault::Catalog(_) => "this is a fault of the program; please report it".to_owned(),
        }
    }

    fn failure(&self, rank: Rank) -> Failure {
        let may_be_visible = matches!(self, Fault::Publish(error) if error.may_be_visible());
        let is_final = matches!(
            self,
            Fault::Publish(PublishError::Exists { .. }) | Fault::AnotherRun { .. } | Fault::NotFinite { .. }
        );
        let (code, help) = (self.code().to_owned(), self.help());
        Failure { rank, code, text: chain_text(self), help, may_be_visible, is_final }
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
        Saver { store, exchange, damaged: Vec::new(), newest_own: Cell::new(None), retention: None }
    }

    /// Sets the commits of these steps aside when their turn to be saved comes: damage was found in them while they were
    /// read, which their commits do not show.
    pub fn replacing(self, damaged: &[u64]) -> Saver {
        Saver { damaged: damaged.to_vec(), ..self }
    }

    /// Expects to be alone in the store: a later step than `step`, or than its own last one, that another run committed
    /// ends the next save.
    pub fn going_on_from(self, step: u64) -> Saver {
        Saver { newest_own: Cell::new(Some(step)), ..self }
    }

    /// Removes older checkpoints after each save, but for those that `retention` keeps.
    pub fn clearing(self, retention: Option<Retention>) -> Saver {
        Saver { retention, ..self }
    }

    /// Where it saves.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Saves the state as one checkpoint: all ranks write what the plan gives them, then the first one commits. It is
    /// visible and durable when this returns; on an error nothing of it stays, and the previous one is intact.
    ///
    /// Collective: every rank of the model calls it with its own snapshot, and all get the same answer. What each rank wrote
    /// goes to the first one alone, with the checksums of every frame: less than 1 KiB for a chunk of 16 MiB, so that a state
    /// of 1 TiB takes some 60 MiB there for that moment.
    ///
    /// # Errors
    /// See [`SaveError`].
    pub fn save(&self, snapshot: Snapshot<'_>) -> Result<SaveReport, SaveError> {
        let Snapshot { header, table, groups, read } = snapshot;
        let ranks = groups.table().ranks();
        let (rank, folder) = (groups.rank(), folder_of(header.iteration));
        let failure = |fault: Fault| fault.failure(rank);

        let alone = if rank == ranks[0] { self.check_place(&header) } else { Ok(()) };
        let planned = alone.and_then(|()| propose(&header, table, groups)).map_err(failure);
        let proposal = planned.as_ref().map(|(proposal, _)| proposal);
        let proposals = self.gather(&proposal, Readers::All, ranks)?;
        let proposals = told_by_all(proposals, ranks, rank).map_err(SaveError::Failed)?;
        let attempt = agree(&proposals, ranks)?;
        let (_, plan) = planned.expect("a rank whose plan failed has told all of them");

        let written = write_packs(&self.store, &folder, attempt, table, &plan, rank, read)
            .map_err(|error| failure(error.into()));
        let answer = self.gather(&written.as_ref(), Readers::First, ranks).and_then(|reports| {
            let publish = || {
                let parts = told_by_all(reports, ranks, rank)?;
                self.commit(header, table, &plan, attempt, parts).map_err(failure)
            };
            // The others have nothing to say.
            let said = (rank == ranks[0]).then(publish).transpose();
            let answers = self.gather(&said.as_ref(), Readers::All, ranks)?;
            let answers: Vec<Option<SaveReport>> =
                told_by_all(answers, ranks, rank).map_err(SaveError::Failed)?;
            let report = answers.into_iter().flatten().next().expect("the first rank sends the report");
            self.newest_own.set(self.newest_own.get().map(|_| report.iteration));
            Ok(report)
        });
        answer.inspect_err(|error| {
            // What all ranks know not to be published goes.
            let (Ok(written), SaveError::Failed(Failure { may_be_visible: false, .. })) = (&written, error)
            else {
                return;
            };
            remove_failed(&self.store, &folder, &written.packs);
        })
    }

    /// That the step's folder is the store's own, and nobody else saves there.
    fn check_place(&self, header: &Header) -> Result<(), Fault> {
        refuse_link(&self.store, &commit_path(header.iteration)).map_err(PublishError::from)?;
        self.check_alone(header)
    }

    /// That no other run has a whole step after the newest of this one. What is not whole is in nobody's way.
    fn check_alone(&self, header: &Header) -> Result<(), Fault> {
        let Some(own) = self.newest_own.get() else { return Ok(()) };
        let steps = self.store.steps().map_err(PublishError::from)?;
        for step in steps.into_iter().filter(|step| *step > own && !self.damaged.contains(step)) {
            match Checkpoint::open(&self.store, step).map(|found| found.commit().clone()) {
                Ok(Commit { writer, created, .. }) if writer.run != header.writer.run => {
                    return Err(Fault::AnotherRun { step, own, owner: Box::new(writer), created });
                }
                Ok(_) => {}
                Err(error) if error.is_damage() => {}
                Err(error) => return Err(PublishError::from(error).into()),
            }
        }
        Ok(())
    }

    /// Sends `own` to the ranks that read it, and returns what this one gets.
    fn gather(
        &self,
        own: &impl Serialize,
        readers: Readers,
        ranks: &[Rank],
    ) -> Result<Vec<Vec<u8>>, SaveError> {
        let bytes = postcard::to_allocvec(own).expect("a report is plain data");
        let sent = (self.exchange)(&bytes, readers).map_err(|source| SaveError::Exchange { source })?;
        if readers == Readers::All {
            assert_eq!(sent.len(), ranks.len(), "the exchange gathers from every rank of the model");
        }
        Ok(sent)
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
        check_finite(&catalog)?;
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
            cleared: match &self.retention {
                Some(retention) => self
                    .store
                    .clear(commit.iteration, retention, &self.damaged)
                    .map_err(|error| chain_text(&error)),
                None => Ok(Cleared::default()),
            },
        })
    }
}

/// What all ranks sent, or the failure of the first one that failed; `reader` is this rank.
fn told_by_all<T: DeserializeOwned>(
    sent: Vec<Vec<u8>>,
    ranks: &[Rank],
    reader: Rank,
) -> Result<Vec<T>, Failure> {
    let told = |(bytes, sender): (Vec<u8>, &Rank)| {
        let told: Result<Result<T, Failure>, _> = postcard::from_bytes(&bytes);
        told.unwrap_or_else(|source| Err(Fault::Report { sender: *sender, source }.failure(reader)))
    };
    sent.into_iter().zip(ranks).map(told).collect()
}

fn propose(
    header: &Header,
    table: &StateTable,
    groups: &ProcessGroups,
) -> Result<(Proposal, SavePlan), Fault> {
    let plan = plan_save(table, groups.table())?;
    let attempt = format!("{:016x}", getrandom::u64()?);
    // Who and when may differ.
    let Header { iteration, created: _, writer: _, run, partial } = header;
    let state = serde_json::to_vec(&(run, partial)).expect("a header is plain data");
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

/// That no element of model or optimizer is NaN or infinite: no run could go on from it.
fn check_finite(catalog: &Catalog) -> Result<(), Fault> {
    for tensor in catalog.tensors() {
        let elements = tensor.statistics.map_or(0, |statistics| statistics.nonfinite);
        if elements > 0 && matches!(tensor.kind, StateKind::Model | StateKind::Optimizer) {
            return Err(Fault::NotFinite { key: tensor.key.clone(), elements, of: tensor.shape.numel() });
        }
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encode::CHUNK_BYTES_MAX;
    use crate::testing::{RankMemory, Ranks, header, save};
    use mesh::{ConfiguredCp, DType, GroupTable, LayoutSizes, ParallelLayout, Placement, RankOrder, Shape};
    use mesh::{StateEntry, StateKind};
    use std::sync::{Arc, Mutex};

    fn table(numel: u64) -> StateTable {
        let placement = Placement::replicated(&Shape::new(&[numel]));
        let entry = StateEntry { key: "w".into(), kind: StateKind::Model, dtype: DType::F32, placement };
        StateTable::new(vec![entry]).unwrap()
    }

    fn layout(dp: u32) -> ParallelLayout {
        ParallelLayout::new(LayoutSizes {
            world_size: dp,
            rank_offset: 0,
            tp: 1,
            pp: 1,
            cp: ConfiguredCp(1),
            gtp: 1,
            gtp_sequence_shards: 1,
            order: RankOrder::default(),
        })
        .unwrap()
    }

    /// A fault of the program, never of its input: no checkpoint without that chunk, and no word of it.
    #[test]
    #[should_panic(expected = "a rank that agreed on the plan writes only chunks of it")]
    fn a_report_of_a_chunk_that_nobody_planned_is_never_dropped() {
        let layout = layout(1);
        let groups = Arc::new(GroupTable::new("gpt", &layout)).for_rank(Rank(0));
        let (table, store) = (table(8), Store::open("memory://").unwrap());
        let memory = RankMemory::labelled(&table, &groups);
        let exchange = |bytes: &[u8], readers| {
            if readers == Readers::All {
                return Ok(vec![bytes.to_vec()]);
            }
            let mut report: Result<Written, Failure> = postcard::from_bytes(bytes)?;
            report.as_mut().unwrap().chunks[0].chunk = 7;
            Ok(vec![postcard::to_allocvec(&report)?])
        };
        drop(save(&store, header(1, layout), &table, &groups, Box::new(exchange), &memory));
    }

    /// Whatever the state, all but the first rank hear three small messages; the first one gets less than 1 KiB a chunk.
    #[test]
    fn only_the_first_rank_hears_of_every_chunk_and_in_few_bytes() {
        let layout = layout(2);
        let ranks = Ranks::new(GroupTable::new("gpt", &layout));
        let num_chunks = 3;
        let (table, store) = (table(num_chunks * CHUNK_BYTES_MAX / 4), Store::open("memory://").unwrap());
        let heard = ranks.run(|groups, exchange| {
            let heard = Arc::new(Mutex::new(Vec::new()));
            let listen = Arc::clone(&heard);
            let exchange: Exchange = Box::new(move |bytes, readers| {
                let sent = exchange(bytes, readers)?;
                listen.lock().unwrap().push(sent.iter().map(Vec::len).sum::<usize>());
                Ok(sent)
            });
            let memory = RankMemory::labelled(&table, &groups);
            save(&store, header(1, layout), &table, &groups, exchange, &memory).unwrap();
            Arc::try_unwrap(heard).unwrap().into_inner().unwrap()
        });
        let (first, second) = (&heard[0], &heard[1]);
        assert_eq!((first[0], first[2]), (second[0], second[2]));
        assert!(first[0] + first[2] < 1024, "{heard:?}");
        assert_eq!(second[1], 0);
        assert!(first[1] < 1024 * num_chunks as usize, "{heard:?}");
    }
}
