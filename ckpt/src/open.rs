//! Finding and opening checkpoints: what steps there are, which is the latest, and whether one is whole.

use crate::catalog::{Catalog, CatalogFault, StoredObject};
use crate::encode::crc64;
use crate::fingerprint::Fingerprint;
use crate::manifest::{
    COMMIT_NAME, Commit, CommitFault, FileEntry, TableFault, TableFile, TablesError, VERSION, parse_commit,
    read_tables,
};
use crate::store::{IoClass, Lock, Store, StoreError};
use std::fmt;
use std::sync::Arc;

/// A whole checkpoint: committed, sealed, with all its files at their sizes and tables that were proved to describe
/// every element once. Its data is checked as it is read.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    store: Store,
    folder: String,
    commit: Commit,
    catalog: Catalog,
    /// Keeps it from being removed while this lives, on local disk.
    _lock: Arc<Lock>,
}

/// Why a checkpoint cannot be opened.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum OpenError {
    #[error("no checkpoint of step {step} in `{root}`{}", nearest_text(.nearest))]
    NoStep { root: String, step: u64, nearest: Vec<u64> },
    #[error("no checkpoint in `{root}`")]
    NoCheckpoint { root: String },
    #[error("no checkpoint in `{root}` is whole{}", passed_text(.passed_over))]
    NoneWhole { root: String, passed_over: Vec<PassedOver> },
    #[error("step {step} is incomplete: `{folder}` has no {COMMIT_NAME}")]
    NoCommit { step: u64, folder: String },
    #[error("step {step} was set aside: its commit is `{object}` now")]
    SetAside { step: u64, object: String },
    #[error("step {step} is incomplete: {}", files_text(.files))]
    Files { step: u64, files: Vec<WrongFile> },
    #[error("`{object}` is not whole")]
    Commit { object: String, source: CommitFault },
    #[error("`{object}` has version {found} of the format; this program reads versions up to {VERSION}")]
    Version { object: String, found: u64 },
    #[error("`{object}` is the commit of step {found}; it does not belong in this folder")]
    Iteration { object: String, found: u64 },
    #[error("`{object}` is damaged: its checksum is {found:016x}, not {expected:016x}")]
    Checksum { object: String, expected: u64, found: u64 },
    #[error("`{object}` cannot be read as a table")]
    Table { object: String, source: TableFault },
    #[error("step {step}: its tables contradict each other or its files")]
    Catalog { step: u64, source: CatalogFault },
    #[error("step {step}: its tensors have the fingerprint {found} together, its commit says {expected}")]
    Fingerprint { step: u64, expected: Fingerprint, found: Fingerprint },
    #[error("`{object}` is no file")]
    NotAFile { object: String },
    #[error(
        "`{object}` is a symbolic link, or in a folder that is one; a checkpoint's files must lie in its own folder"
    )]
    Linked { object: String },
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A listed file that is not there as listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongFile {
    /// With the store's name.
    pub object: String,
    /// By the commit, in bytes.
    pub expected: u64,
    /// In the store, in bytes; none if it is missing.
    pub found: Option<u64>,
}

/// A step that was looked at and not taken.
#[derive(Debug)]
pub struct PassedOver {
    /// Its number.
    pub step: u64,
    /// What is wrong with it.
    pub why: OpenError,
}

/// The outcome of a search for the latest checkpoint.
#[derive(Debug)]
pub struct Latest {
    /// The one to resume from, if there is any.
    pub checkpoint: Option<Checkpoint>,
    /// Newer steps that are not whole, the newest first.
    pub passed_over: Vec<PassedOver>,
    /// Names that look like a step's and are none.
    pub strays: Vec<Stray>,
}

/// The steps of a run, and what lies between them.
#[derive(Debug)]
pub struct Listing {
    /// Steps that have a folder, ascending; whether they are whole is another question.
    pub steps: Vec<u64>,
    /// Names that look like a step's and are none, and names that are no plain text; ascending.
    pub strays: Vec<Stray>,
}

/// A name in a run's folder that is passed over.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stray {
    /// The name, with the store's; what is not plain text in it is escaped.
    pub name: String,
    /// Why.
    pub why: String,
}

impl fmt::Display for Stray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is passed over: {}", self.name, self.why)
    }
}

impl OpenError {
    /// Whether the checkpoint is there and not whole, so that an older one may be taken instead, and a new one made of the
    /// step. One that this program cannot read or must not follow may be whole: it stands in the way.
    pub fn is_damage(&self) -> bool {
        match self {
            OpenError::NoStep { .. }
            | OpenError::NoCheckpoint { .. }
            | OpenError::NoneWhole { .. }
            | OpenError::Version { .. }
            | OpenError::Linked { .. } => false,
            OpenError::NoCommit { .. }
            | OpenError::SetAside { .. }
            | OpenError::Files { .. }
            | OpenError::Commit { .. }
            | OpenError::Iteration { .. }
            | OpenError::NotAFile { .. }
            | OpenError::Checksum { .. }
            | OpenError::Table { .. }
            | OpenError::Catalog { .. }
            | OpenError::Fingerprint { .. } => true,
            OpenError::Store(error) => error.is_not_found(),
        }
    }

    /// The error's number.
    pub fn code(&self) -> &'static str {
        match self {
            OpenError::NoStep { .. } | OpenError::NoCheckpoint { .. } => "RM4012",
            OpenError::NoCommit { .. } | OpenError::Files { .. } => "RM4020",
            OpenError::SetAside { .. } => "RM4025",
            OpenError::Version { .. } => "RM4022",
            OpenError::Commit { .. }
            | OpenError::Iteration { .. }
            | OpenError::NotAFile { .. }
            | OpenError::Checksum { .. }
            | OpenError::Table { .. }
            | OpenError::Catalog { .. }
            | OpenError::Fingerprint { .. } => "RM4021",
            OpenError::NoneWhole { .. } => "RM4024",
            OpenError::Linked { .. } => "RM4023",
            OpenError::Store(error) => error.code(),
        }
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            OpenError::NoStep { .. } => "name one of the steps there are, or `@latest`".to_owned(),
            OpenError::NoCheckpoint { .. } => "check the folder, or start a run that saves there".to_owned(),
            OpenError::NoneWhole { .. } => {
                "`remesh verify RUN@STEP` lists what is lost of a step; to start afresh, save to another folder".to_owned()
            }
            OpenError::Version { .. } => {
                "it was saved by a newer program; update this one, or name an older step".to_owned()
            }
            OpenError::SetAside { .. } => {
                format!("to take it back, rename that file to {COMMIT_NAME} while no run saves there")
            }
            OpenError::Linked { .. } => "copy the files themselves into a folder of the run".to_owned(),
            OpenError::Store(error) => error.help(),
            _ => "use `@latest`, which takes the newest whole step; `remesh verify` lists what is lost"
                .to_owned(),
        }
    }
}

fn nearest_text(nearest: &[u64]) -> String {
    let steps: Vec<String> = nearest.iter().map(|step| format!("{step}")).collect();
    if steps.is_empty() { String::new() } else { format!("; nearest: {}", steps.join(", ")) }
}

fn passed_text(passed_over: &[PassedOver]) -> String {
    let lines: Vec<String> = passed_over.iter().map(PassedOver::to_string).collect();
    if lines.is_empty() { String::new() } else { format!("; {}", lines.join("; ")) }
}

fn files_text(files: &[WrongFile]) -> String {
    const SHOWN: usize = 20;
    let line = |file: &WrongFile| match file.found {
        Some(found) => format!("`{}` has {found} bytes, not {}", file.object, file.expected),
        None => format!("`{}` is missing", file.object),
    };
    let more =
        if files.len() > SHOWN { format!(", and {} more", files.len() - SHOWN) } else { String::new() };
    format!("{}{more}", files.iter().take(SHOWN).map(line).collect::<Vec<_>>().join(", "))
}

impl fmt::Display for PassedOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {} is passed over ({}): {}", self.step, self.why.code(), chain_text(&self.why))
    }
}

/// An error with its causes, for a place that takes one line. A cause that the text has already is not said again.
pub(crate) fn chain_text(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        cause = error.source();
    }
    text
}

impl PassedOver {
    /// Whether it was a checkpoint once, and no save that did not come to its end.
    pub fn was_committed(&self) -> bool {
        !matches!(self.why, OpenError::NoCommit { .. } | OpenError::SetAside { .. })
    }

    /// Whether somebody put it aside who wanted no checkpoint there any more.
    pub fn was_set_aside(&self) -> bool {
        matches!(self.why, OpenError::SetAside { .. })
    }
}

impl Latest {
    /// The checkpoint.
    ///
    /// # Errors
    /// If there is none, with everything that was passed over.
    pub fn require(self, store: &Store) -> Result<Checkpoint, OpenError> {
        let (root, passed_over) = (store.to_string(), self.passed_over);
        self.checkpoint.ok_or_else(|| match passed_over.is_empty() {
            true => OpenError::NoCheckpoint { root },
            false => OpenError::NoneWhole { root, passed_over },
        })
    }
}

/// A `checkpoint.json` that is longer is none: one of 100,000 files has some 10 MB.
const COMMIT_BYTES_MAX: u64 = 256 << 20;

/// The name of a step's folder.
pub(crate) fn folder_of(step: u64) -> String {
    format!("iter_{step:07}")
}

/// The path of a step's `checkpoint.json`.
pub(crate) fn commit_path(step: u64) -> String {
    format!("{}/{COMMIT_NAME}", folder_of(step))
}

fn step_of(folder: &str) -> Option<u64> {
    let step = folder.strip_prefix("iter_")?.parse().ok()?;
    (folder_of(step) == folder).then_some(step)
}

impl Store {
    /// The steps that have a folder, and what only looks like one. Other names are not looked at.
    ///
    /// # Errors
    /// If the root cannot be listed.
    pub fn listing(&self) -> Result<Listing, StoreError> {
        let mut listing = Listing { steps: Vec::new(), strays: Vec::new() };
        for entry in self.entries()? {
            let (plain, step) = match entry.name.to_str() {
                Some(name) => (!name.contains(char::is_control), step_of(name)),
                None => (false, None),
            };
            let looks_like_a_step = entry.name.as_encoded_bytes().starts_with(b"iter_");
            let why = match (step, entry.not_a_folder) {
                (Some(step), None) => {
                    listing.steps.push(step);
                    continue;
                }
                (Some(_), Some(why)) => why,
                (None, _) if looks_like_a_step => {
                    "a step is `iter_` and its number in seven digits or more".to_owned()
                }
                (None, _) if !plain => "its name is no plain text".to_owned(),
                (None, _) => continue,
            };
            let name = match entry.name.to_str() {
                Some(name) => name.escape_debug().to_string(),
                None => entry.name.as_encoded_bytes().escape_ascii().to_string(),
            };
            listing.strays.push(Stray { name: self.full_name(&name), why });
        }
        listing.steps.sort_unstable();
        listing.strays.sort();
        Ok(listing)
    }

    /// The steps that have a folder, ascending; whether they are whole is another question.
    ///
    /// # Errors
    /// If the root cannot be listed.
    pub fn steps(&self) -> Result<Vec<u64>, StoreError> {
        Ok(self.listing()?.steps)
    }

    /// Opens the checkpoint of one step.
    ///
    /// # Errors
    /// If there is none, or it is not whole.
    pub fn checkpoint(&self, step: u64) -> Result<Checkpoint, OpenError> {
        let found = Checkpoint::open(self, step);
        if matches!(found, Err(OpenError::NoCommit { .. })) && !self.has_folder(&folder_of(step))? {
            let mut nearest = self.steps()?;
            nearest.sort_by_key(|other| other.abs_diff(step));
            nearest.truncate(2);
            nearest.sort_unstable();
            return Err(OpenError::NoStep { root: self.to_string(), step, nearest });
        }
        found
    }

    /// The whole checkpoint with the highest step, among those below `below` if that is given; to be used when damage
    /// turned up while a newer one was read.
    ///
    /// # Errors
    /// If the store cannot be read, or a step on the way there is refused: it has a newer version of the format, or files
    /// that are links. Steps that are not whole are passed over, and listed.
    pub fn latest(&self, below: Option<u64>) -> Result<Latest, OpenError> {
        let mut passed_over = Vec::new();
        let Listing { steps, strays } = self.listing()?;
        for step in steps.into_iter().rev().filter(|step| below.is_none_or(|below| *step < below)) {
            match Checkpoint::open(self, step) {
                Ok(checkpoint) => return Ok(Latest { checkpoint: Some(checkpoint), passed_over, strays }),
                Err(why) if why.is_damage() => passed_over.push(PassedOver { step, why }),
                Err(error) => return Err(error),
            }
        }
        Ok(Latest { checkpoint: None, passed_over, strays })
    }

    /// The steps after `step` that are whole, ascending.
    ///
    /// # Errors
    /// If the store cannot be read, or one of the steps is refused, as by [`Store::latest`].
    pub fn whole_steps_after(&self, step: u64) -> Result<Vec<u64>, OpenError> {
        let mut whole = Vec::new();
        for newer in self.steps()?.into_iter().filter(|newer| *newer > step) {
            match Checkpoint::open(self, newer) {
                Ok(_) => whole.push(newer),
                Err(why) if why.is_damage() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(whole)
    }
}

/// Reads, checks and parses the commit of `step`.
pub(crate) fn read_commit(store: &Store, step: u64) -> Result<Commit, OpenError> {
    let path = commit_path(step);
    refuse_link(store, &path)?;
    let text = match store.get_at_most(&path, COMMIT_BYTES_MAX) {
        Ok(text) => text,
        Err(error) if error.is_not_found() => {
            let folder = store.full_name(&folder_of(step));
            return Err(match set_aside(store, step) {
                Some(name) => OpenError::SetAside { step, object: format!("{folder}/{name}") },
                None => OpenError::NoCommit { step, folder },
            });
        }
        Err(error) if error.class() == IoClass::WrongKind => {
            return Err(OpenError::NotAFile { object: store.full_name(&path) });
        }
        Err(error) => return Err(error.into()),
    };
    let object = store.full_name(&path);
    let commit = match parse_commit(&text) {
        Ok(commit) => commit,
        Err(CommitFault::Version { found }) => return Err(OpenError::Version { object, found }),
        Err(source) => return Err(OpenError::Commit { object, source }),
    };
    if commit.iteration != step {
        return Err(OpenError::Iteration { object, found: commit.iteration });
    }
    Ok(commit)
}

/// Checks that neither the object nor its step's folder is a symbolic link: what is behind it may be another run's.
pub(crate) fn refuse_link(store: &Store, path: &str) -> Result<(), OpenError> {
    match store.is_linked("", path) {
        true => Err(OpenError::Linked { object: store.full_name(path) }),
        false => Ok(()),
    }
}

/// The name of the last commit of a step that was set aside.
fn set_aside(store: &Store, step: u64) -> Option<String> {
    let prefix = format!("{COMMIT_NAME}.superseded-");
    // What cannot be listed hides nothing but this.
    let names = store.list(&folder_of(step)).unwrap_or_default().into_keys();
    names.filter(|name| name.starts_with(&prefix)).max()
}

/// Compares the files of a checkpoint with what lies in its folder.
pub(crate) fn check_files(store: &Store, step: u64, files: &[FileEntry]) -> Result<(), OpenError> {
    let folder = folder_of(step);
    if let Some(file) = files.iter().find(|file| store.is_linked(&folder, &file.path)) {
        return Err(OpenError::Linked { object: store.full_name(&format!("{folder}/{}", file.path)) });
    }
    let sizes = store.sizes(&folder, files.iter().map(|file| file.path.as_str()))?;
    let wrong = |(file, found): (&FileEntry, Option<u64>)| {
        let object = store.full_name(&format!("{folder}/{}", file.path));
        (found != Some(file.bytes)).then_some(WrongFile { object, expected: file.bytes, found })
    };
    let wrong: Vec<WrongFile> = files.iter().zip(sizes).filter_map(wrong).collect();
    if wrong.is_empty() { Ok(()) } else { Err(OpenError::Files { step, files: wrong }) }
}

impl Checkpoint {
    pub(crate) fn open(store: &Store, step: u64) -> Result<Checkpoint, OpenError> {
        // First: what is locked is not removed any more.
        let lock = Arc::new(store.lock_shared(&commit_path(step)));
        let commit = read_commit(store, step)?;
        check_files(store, step, &commit.files)?;
        let folder = folder_of(step);
        let read = |file: &FileEntry| -> Result<TableFile, OpenError> {
            let path = format!("{folder}/{}", file.path);
            let (bytes, name) = (store.get(&path)?, store.full_name(&path));
            let (expected, found) = (file.crc64, crc64(&bytes));
            if found != expected {
                return Err(OpenError::Checksum { object: name, expected, found });
            }
            Ok(TableFile { name, bytes })
        };
        let tensors = read(commit.tensor_table())?;
        let chunks = commit.chunk_tables().map(read).collect::<Result<Vec<_>, _>>()?;
        let objects =
            commit.packs().map(|file| StoredObject { path: file.path.clone(), bytes: file.bytes }).collect();
        let catalog = read_tables(tensors, chunks, objects).map_err(|error| match error {
            TablesError::Table { table, source } => OpenError::Table { object: table, source },
            TablesError::Catalog { source } => OpenError::Catalog { step, source },
        })?;
        let (expected, found) = (commit.fingerprint, catalog.fingerprint());
        if found != expected {
            return Err(OpenError::Fingerprint { step, expected, found });
        }
        Ok(Checkpoint { store: store.clone(), folder, commit, catalog, _lock: lock })
    }

    /// Where it lies.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Optimizer iterations done when it was saved.
    pub fn step(&self) -> u64 {
        self.commit.iteration
    }

    /// Its `checkpoint.json`.
    pub fn commit(&self) -> &Commit {
        &self.commit
    }

    /// Its tensors and where their bytes are.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// The path of a file of this checkpoint in its store.
    pub(crate) fn path(&self, file: &str) -> String {
        format!("{}/{file}", self.folder)
    }
}
