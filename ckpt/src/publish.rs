//! Making a checkpoint visible: tables first, then `checkpoint.json`, created only if there is none. And taking commits
//! out of the way, never away.

use crate::catalog::Catalog;
use crate::encode::crc64;
use crate::manifest::{
    Commit, FORMAT, FileEntry, Header, RunName, VERSION, Writer, encode_chunks, encode_tensors, seal_commit,
};
use crate::open::{OpenError, check_files, commit_path, folder_of, read_commit, refuse_link};
use crate::store::{Store, StoreError};
use crate::write::remove_failed;

/// Why a checkpoint was not published.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PublishError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The commit that is there cannot be judged.
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("the files are not as they were written")]
    Files { source: OpenError },
    #[error(
        "step {step} was saved already, by run `{}` (process {} on {}, {})",
        .owner.run, .owner.pid, .owner.host, .created
    )]
    Exists { step: u64, owner: Box<Writer>, created: String },
    #[error("whether step {step} was published is not known, so its files are kept")]
    Unknown { step: u64, source: StoreError },
}

impl PublishError {
    /// Whether a commit that names the files may be visible.
    pub(crate) fn may_be_visible(&self) -> bool {
        matches!(self, PublishError::Unknown { .. })
    }
}

/// Writes the tables of `catalog`, whose packs are durable, and commits. On an error the tables are removed again,
/// unless the commit may be visible. `replaces` a commit of the same step, which is known as damaged.
pub(crate) fn publish(
    store: &Store,
    header: Header,
    attempt: &str,
    catalog: &Catalog,
    packs: Vec<FileEntry>,
    replaces: bool,
) -> Result<Commit, PublishError> {
    let step = header.iteration;
    let folder = folder_of(step);
    let tables = [
        (format!("tensors-{attempt}.arrow"), encode_tensors(catalog)),
        (format!("chunks-{attempt}.arrow"), encode_chunks(catalog)),
    ];
    let entry = |(path, bytes): &(String, Vec<u8>)| FileEntry {
        path: path.clone(),
        bytes: bytes.len() as u64,
        crc64: crc64(bytes),
    };
    let table_files = tables.each_ref().map(entry);
    let files = table_files.iter().cloned().chain(packs).collect();
    let commit = commit_of(header, attempt, catalog, files);
    let published = tables
        .into_iter()
        .try_for_each(|(path, bytes)| store.create_object(&format!("{folder}/{path}"), bytes.into()))
        .map_err(PublishError::from)
        .and_then(|()| match check_files(store, step, &commit.files) {
            Ok(()) => create_commit(store, &commit, replaces),
            Err(source) => Err(PublishError::Files { source }),
        });
    match published {
        Ok(()) => Ok(commit),
        Err(error) => {
            if !error.may_be_visible() {
                remove_failed(store, &folder, &table_files);
            }
            Err(error)
        }
    }
}

fn commit_of(header: Header, attempt: &str, catalog: &Catalog, files: Vec<FileEntry>) -> Commit {
    let Header { iteration, created, writer: RunName { run: id, host, pid, program }, run, partial } = header;
    Commit {
        format: FORMAT.to_owned(),
        version: VERSION,
        iteration,
        created,
        writer: Writer { run: id, attempt: attempt.to_owned(), host, pid, program },
        run,
        fingerprint: catalog.fingerprint(),
        partial,
        files,
    }
}

/// Creates `checkpoint.json`. One that is there and not whole, or known as damaged (`replaces`), is set aside first; one that
/// cannot be judged stays.
fn create_commit(store: &Store, commit: &Commit, replaces: bool) -> Result<(), PublishError> {
    let step = commit.iteration;
    let path = commit_path(step);
    let text = seal_commit(commit);
    let is_ours = |found: &Commit| found.writer.attempt == commit.writer.attempt;
    loop {
        let created = store.create_object(&path, text.clone().into());
        let found = read_commit(store, step);
        let Err(error) = created else {
            // A store that says so keeps it, unless what it kept is seen to be less.
            return match found {
                Err(source) if source.is_damage() => Err(PublishError::Files { source }),
                _ => Ok(()),
            };
        };
        if error.is_already_there() {
            match found {
                // A call that was repeated after its answer got lost.
                Ok(found) if is_ours(&found) => return Ok(()),
                Ok(_) if replaces => set_commit_aside(store, step, &commit.writer.run)?,
                found => match found.and_then(|found| store.checkpoint(step).map(|_| found)) {
                    Ok(found) => {
                        let (owner, created) = (Box::new(found.writer), found.created);
                        return Err(PublishError::Exists { step, owner, created });
                    }
                    Err(why) if why.is_damage() => set_commit_aside(store, step, &commit.writer.run)?,
                    Err(error) => return Err(error.into()),
                },
            }
        } else {
            // It failed, but it may be there: not durable, or the answer got lost. What may be visible keeps its files.
            return Err(match found {
                Err(OpenError::NoCommit { .. } | OpenError::SetAside { .. }) => error.into(),
                Ok(found) if !is_ours(&found) => error.into(),
                Ok(_) if store.delete(&path).is_ok() => error.into(),
                _ => PublishError::Unknown { step, source: error },
            });
        }
    }
}

/// Renames the commit of a step to `checkpoint.json.superseded-<run>`, with a number behind it if that name is taken.
fn set_commit_aside(store: &Store, step: u64, run: &str) -> Result<(), OpenError> {
    let path = commit_path(step);
    refuse_link(store, &path)?;
    let run: String =
        run.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' }).collect();
    let mut name = format!("{path}.superseded-{run}");
    for number in 2.. {
        match store.rename(&path, &name) {
            Err(error) if error.is_already_there() => {
                name = format!("{path}.superseded-{run}-{number}");
            }
            renamed => return Ok(renamed?),
        }
    }
    unreachable!("some number is free")
}

/// A destination that holds what a save would contradict.
#[derive(Debug, thiserror::Error)]
pub enum DestinationError {
    /// Whole checkpoints are newer than the step that the run goes on from.
    #[error("`{root}` holds whole checkpoints newer than step {step}: {}", steps_text(.newer))]
    Newer {
        /// The store.
        root: String,
        /// The step that the run goes on from.
        step: u64,
        /// The newer steps, ascending.
        newer: Vec<u64>,
    },
    /// The store cannot be read, or a newer step is refused.
    #[error(transparent)]
    Open(#[from] OpenError),
}

impl DestinationError {
    /// The error's number.
    pub fn code(&self) -> &'static str {
        match self {
            DestinationError::Newer { .. } => "RM7003",
            DestinationError::Open(error) => error.code(),
        }
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            DestinationError::Newer { newer, .. } => format!(
                "to go on from step {}, leave out what names another start (--load, --ckpt-step, --finetune); else save to another folder, \
                 or give `--overwrite`: they are set aside, not deleted",
                newer.last().expect("there are newer ones")
            ),
            DestinationError::Open(error) => error.help(),
        }
    }
}

fn steps_text(steps: &[u64]) -> String {
    steps.iter().map(|step| format!("{step}")).collect::<Vec<_>>().join(", ")
}

impl Store {
    /// Checks that a run which goes on from `step` would contradict no newer checkpoint here, apart from those that are known
    /// as `damaged`.
    ///
    /// # Errors
    /// If there are whole checkpoints of later steps, or ones that are refused, or the store cannot be read.
    pub fn require_none_after(&self, step: u64, damaged: &[u64]) -> Result<(), DestinationError> {
        let mut newer = self.whole_steps_after(step)?;
        newer.retain(|step| !damaged.contains(step));
        if newer.is_empty() {
            return Ok(());
        }
        Err(DestinationError::Newer { root: self.to_string(), step, newer })
    }

    /// Renames the commits of all steps after `step` to `checkpoint.json.superseded-<run>`, so that they are no
    /// checkpoints any more; their data stays. Returns the steps, ascending.
    ///
    /// # Errors
    /// If one of them is refused, as by [`Store::latest`], before any is renamed; or if the store fails: commits that were
    /// renamed before stay so.
    pub fn set_aside(&self, after: u64, run: &str) -> Result<Vec<u64>, OpenError> {
        let mut committed = Vec::new();
        for step in self.steps()?.into_iter().filter(|step| *step > after) {
            match read_commit(self, step) {
                Err(OpenError::NoCommit { .. } | OpenError::SetAside { .. }) => {}
                Err(error) if !error.is_damage() => return Err(error),
                _ => committed.push(step),
            }
        }
        let mut renamed = Vec::new();
        // The newest first, so that no half of the work makes an older one the latest.
        for step in committed.into_iter().rev() {
            match set_commit_aside(self, step, run) {
                Ok(()) => renamed.push(step),
                Err(OpenError::Store(error)) if error.is_not_found() => {}
                Err(error) => return Err(error),
            }
        }
        renamed.reverse();
        Ok(renamed)
    }
}
