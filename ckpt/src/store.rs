//! `Store`: where a run's checkpoints lie. Blocking calls over an object store; the runtime is hidden here.

use bytes::Bytes;
use futures::stream::{StreamExt, TryStreamExt};
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    MultipartUpload, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayloadMut, RenameOptions,
    RenameTargetMode,
};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use tokio::runtime::Runtime;
use tokio::task::{JoinHandle, JoinSet};

/// Bytes of one uploaded part.
const PART_BYTES: usize = 8 << 20;

/// Parts and reads that are under way at once; with their size this bounds the memory of one save or load.
pub(crate) const IN_FLIGHT: usize = 4;

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).thread_name("ckpt-io").build();
    runtime.expect("two threads can be started")
});

/// A root under which checkpoints lie, on local disk or in memory. Cheap to clone; clones share what they hold.
///
/// Calls block, and must not be made from within an async task.
#[derive(Clone, Debug)]
pub struct Store {
    client: Arc<dyn ObjectStore>,
    name: Arc<str>,
    /// The root, if it is a local folder.
    local: Option<Arc<PathBuf>>,
}

/// A location that names no store.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum LocationError {
    #[error("there is no folder `{}`", .path.display())]
    NoFolder { path: PathBuf },
    #[error("a file lies where the folder `{}`, or one above it, should be", .path.display())]
    NotAFolder { path: PathBuf },
    #[error("the folder `{}` cannot be used", .path.display())]
    Folder { path: PathBuf, source: io::Error },
    #[error("`{location}`: no store is called `{scheme}`")]
    Scheme { location: String, scheme: String },
}

impl LocationError {
    fn of_io(path: PathBuf, source: io::Error) -> LocationError {
        match source.kind() {
            io::ErrorKind::NotFound => LocationError::NoFolder { path },
            io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => LocationError::NotAFolder { path },
            _ => LocationError::Folder { path, source },
        }
    }

    /// The error's number.
    pub fn code(&self) -> &'static str {
        match self {
            LocationError::NoFolder { .. } => "RM4012",
            LocationError::NotAFolder { .. } => "RM1006",
            LocationError::Folder { source, .. } => Class::of_io(source.kind()).code(),
            LocationError::Scheme { .. } => "RM1002",
        }
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            LocationError::NoFolder { .. } => "check the path for a typing error".to_owned(),
            LocationError::NotAFolder { .. } => "give the folder that holds a run's steps".to_owned(),
            LocationError::Folder { source, .. } => Class::of_io(source.kind()).help().to_owned(),
            LocationError::Scheme { .. } => "give a folder, `file://…` or `memory://`".to_owned(),
        }
    }

    /// The process's exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            LocationError::NoFolder { .. } | LocationError::NotAFolder { .. } => 3,
            LocationError::Folder { source, .. } => Class::of_io(source.kind()).exit_code(),
            LocationError::Scheme { .. } => 2,
        }
    }
}

/// A call to the store that failed.
#[derive(Debug, thiserror::Error)]
pub struct StoreError {
    /// What was done, such as `writing`.
    pub doing: &'static str,
    /// To which object, with the store's name.
    pub object: String,
    /// Bytes that were to be moved, where that is known.
    pub bytes: Option<u64>,
    /// The store's words.
    pub source: Box<object_store::Error>,
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} `{}`", self.doing, self.object)?;
        if let Some(bytes) = self.bytes {
            write!(f, " ({bytes} bytes)")?;
        }
        write!(f, " failed{}", if self.class() == Class::Full { ": no space is left" } else { "" })
    }
}

/// What kind of trouble a store has; decides code, help and exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Failed,
    NotFound,
    Denied,
    Full,
}

impl Class {
    fn of_io(kind: io::ErrorKind) -> Class {
        match kind {
            io::ErrorKind::NotFound => Class::NotFound,
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Class::Denied,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                Class::Full
            }
            _ => Class::Failed,
        }
    }

    fn code(self) -> &'static str {
        match self {
            Class::Failed => "RM1001",
            Class::NotFound => "RM1003",
            Class::Denied => "RM1004",
            Class::Full => "RM1005",
        }
    }

    fn help(self) -> &'static str {
        match self {
            Class::Failed => "it is safe to run again",
            Class::NotFound => "check the path for a typing error",
            Class::Denied => "check who owns the folder and whether it can be written",
            Class::Full => "free some space or raise the quota, then run again; nothing half-written stays",
        }
    }

    fn exit_code(self) -> u8 {
        match self {
            Class::Failed => 5,
            Class::NotFound => 3,
            Class::Denied => 4,
            Class::Full => 8,
        }
    }
}

impl StoreError {
    fn class(&self) -> Class {
        match *self.source {
            object_store::Error::NotFound { .. } => return Class::NotFound,
            object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
                return Class::Denied;
            }
            _ => {}
        }
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&*self.source);
        while let Some(error) = cause {
            if let Some(io) = error.downcast_ref::<io::Error>() {
                return Class::of_io(io.kind());
            }
            cause = error.source();
        }
        Class::Failed
    }

    /// Whether the object is not there.
    pub fn is_not_found(&self) -> bool {
        self.class() == Class::NotFound
    }

    /// Whether an object was to be created that is there already.
    pub(crate) fn is_already_there(&self) -> bool {
        matches!(*self.source, object_store::Error::AlreadyExists { .. })
    }

    /// The error's number.
    pub fn code(&self) -> &'static str {
        self.class().code()
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        self.class().help().to_owned()
    }

    /// The process's exit code.
    pub fn exit_code(&self) -> u8 {
        self.class().exit_code()
    }
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name)
    }
}

impl Store {
    /// The store at `location`: a folder, `file://…`, or `memory://` for a new empty one. The folder must exist.
    ///
    /// # Errors
    /// See [`LocationError`].
    pub fn open(location: &str) -> Result<Store, LocationError> {
        match location.split_once("://") {
            Some(("memory", _)) => Ok(Store::of_client(Arc::new(InMemory::new()), "memory://")),
            Some(("file", path)) => Store::open_folder(PathBuf::from(path)),
            Some((scheme, _)) => {
                Err(LocationError::Scheme { location: location.to_owned(), scheme: scheme.to_owned() })
            }
            None => Store::open_folder(PathBuf::from(location)),
        }
    }

    /// Like [`Store::open`], and makes the folder, durably, if there is none.
    ///
    /// # Errors
    /// See [`LocationError`].
    pub fn create(location: &str) -> Result<Store, LocationError> {
        let path = match location.split_once("://") {
            Some(("file", path)) => path,
            Some(_) => return Store::open(location),
            None => location,
        };
        let path = std::path::absolute(path)
            .map_err(|source| LocationError::Folder { path: PathBuf::from(path), source })?;
        make_folder(&path).map_err(|source| LocationError::of_io(path.clone(), source))?;
        Store::open_folder(path)
    }

    /// A store behind any client, called `name` in messages.
    pub fn of_client(client: Arc<dyn ObjectStore>, name: &str) -> Store {
        Store { client, name: name.into(), local: None }
    }

    fn open_folder(path: PathBuf) -> Result<Store, LocationError> {
        match std::fs::metadata(&path) {
            Ok(found) if found.is_dir() => {}
            Ok(_) => return Err(LocationError::NotAFolder { path }),
            Err(source) => return Err(LocationError::of_io(path, source)),
        }
        let client = LocalFileSystem::new_with_prefix(&path)
            .map_err(|error| LocationError::Folder { path: path.clone(), source: io::Error::other(error) })?;
        // Syncing is off by default; a folder that removal leaves empty goes too.
        let client = client.with_fsync(true).with_automatic_cleanup(true);
        let name = path.display().to_string();
        Ok(Store { client: Arc::new(client), name: name.into(), local: Some(Arc::new(path)) })
    }

    /// The name of `path` in messages.
    pub(crate) fn full_name(&self, path: &str) -> String {
        let separator = if self.name.ends_with('/') { "" } else { "/" };
        format!("{}{separator}{path}", self.name)
    }

    fn error(
        &self,
        doing: &'static str,
        path: &str,
        bytes: Option<u64>,
    ) -> impl Fn(object_store::Error) -> StoreError {
        let object = self.full_name(path);
        move |source| StoreError { doing, object: object.clone(), bytes, source: Box::new(source) }
    }

    /// Names of the folders directly under the root.
    pub(crate) fn folders(&self) -> Result<Vec<String>, StoreError> {
        if let Some(root) = &self.local {
            // The client lists nothing, and says nothing, where the folder is gone.
            std::fs::read_dir(root.as_path())
                .map_err(|source| self.error("listing", "", None)(of_io(source)))?;
        }
        let listed = RUNTIME
            .block_on(self.client.list_with_delimiter(None))
            .map_err(self.error("listing", "", None))?;
        Ok(listed.common_prefixes.iter().filter_map(|path| path.filename().map(str::to_owned)).collect())
    }

    /// Every object under `folder` with its length, by its path in the folder.
    pub(crate) fn list(&self, folder: &str) -> Result<BTreeMap<String, u64>, StoreError> {
        let prefix = Path::from(folder);
        RUNTIME
            .block_on(async {
                let listed = self.client.list(Some(&prefix));
                let own_path = |location: &Path| {
                    let parts: Vec<_> =
                        location.prefix_match(&prefix)?.map(|part| part.as_ref().to_owned()).collect();
                    Some(parts.join("/"))
                };
                listed
                    .try_filter_map(|meta| {
                        std::future::ready(Ok(own_path(&meta.location).map(|path| (path, meta.size))))
                    })
                    .try_collect()
                    .await
            })
            .map_err(self.error("listing", folder, None))
    }

    /// A whole object.
    pub(crate) fn get(&self, path: &str) -> Result<Bytes, StoreError> {
        let location = Path::from(path);
        RUNTIME
            .block_on(async { self.client.get(&location).await?.bytes().await })
            .map_err(self.error("reading", path, None))
    }

    /// Reads ranges of objects, a few at a time, and hands them to `sink` on this thread in the order given.
    pub(crate) fn get_ranges<E: From<StoreError>>(
        &self,
        ranges: impl Iterator<Item = (String, Range<u64>)>,
        mut sink: impl FnMut(usize, Bytes) -> Result<(), E>,
    ) -> Result<(), E> {
        let read = |(path, range): (String, Range<u64>)| async move {
            let bytes = range.end - range.start;
            let found = self.client.get_range(&Path::from(path.as_str()), range).await;
            let found = found.map_err(self.error("reading", &path, Some(bytes)))?;
            // Stores cut a range short at the end of the object.
            if found.len() as u64 != bytes {
                let source =
                    io::Error::new(io::ErrorKind::UnexpectedEof, format!("{} bytes came", found.len()));
                return Err(self.error("reading", &path, Some(bytes))(of_io(source)));
            }
            Ok(found)
        };
        RUNTIME.block_on(async {
            let mut reads = futures::stream::iter(ranges).map(read).buffered(IN_FLIGHT).enumerate();
            while let Some((at, found)) = reads.next().await {
                sink(at, found?)?;
            }
            Ok(())
        })
    }

    /// Creates an object, durably; an object of that name is left alone and is an error.
    pub(crate) fn create_object(&self, path: &str, bytes: Bytes) -> Result<(), StoreError> {
        let len = bytes.len() as u64;
        let options = PutOptions::from(PutMode::Create);
        let location = Path::from(path);
        RUNTIME
            .block_on(self.client.put_opts(&location, bytes.into(), options))
            .map(|_| ())
            .map_err(self.error("writing", path, Some(len)))
    }

    /// Starts a large object, which appears whole and durable when it is finished.
    pub(crate) fn upload(&self, path: &str) -> Result<Upload, StoreError> {
        let location = Path::from(path);
        let upload = RUNTIME
            .block_on(async { self.client.put_multipart(&location).await })
            .map_err(self.error("writing", path, None))?;
        let buffer = PutPayloadMut::new();
        Ok(Upload { store: self.clone(), path: path.to_owned(), upload, buffer, parts: JoinSet::new() })
    }

    /// Removes an object; one that is not there is fine.
    pub(crate) fn delete(&self, path: &str) -> Result<(), StoreError> {
        match RUNTIME.block_on(async { self.client.delete(&Path::from(path)).await }) {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(source) => Err(self.error("removing", path, None)(source)),
        }
    }

    /// Renames an object; an object with the new name is left alone and is an error.
    pub(crate) fn rename(&self, from: &str, to: &str) -> Result<(), StoreError> {
        let options = RenameOptions::new().with_target_mode(RenameTargetMode::Create);
        let (source, target) = (Path::from(from), Path::from(to));
        RUNTIME
            .block_on(async { self.client.rename_opts(&source, &target, options).await })
            .map_err(self.error("renaming", from, None))
    }

    /// Whether `path`, or a folder on the way to it below `folder`, is a symbolic link.
    pub(crate) fn is_linked(&self, folder: &str, path: &str) -> bool {
        let Some(root) = &self.local else { return false };
        let mut at = root.join(folder);
        path.split('/').any(|part| {
            at.push(part);
            std::fs::symlink_metadata(&at).is_ok_and(|found| found.is_symlink())
        })
    }
}

/// A large object that is being written.
pub(crate) struct Upload {
    store: Store,
    path: String,
    upload: Box<dyn MultipartUpload>,
    /// Less than a part.
    buffer: PutPayloadMut,
    parts: JoinSet<object_store::Result<()>>,
}

impl Upload {
    /// Appends bytes; waits while too many parts are under way.
    pub(crate) fn append(&mut self, mut bytes: Bytes) -> Result<(), StoreError> {
        let len = bytes.len() as u64;
        let put = async {
            while self.buffer.content_length() + bytes.len() >= PART_BYTES {
                self.buffer.push(bytes.split_to(PART_BYTES - self.buffer.content_length()));
                let part = std::mem::take(&mut self.buffer);
                self.parts.spawn(self.upload.put_part(part.into()));
                while self.parts.len() > IN_FLIGHT {
                    join_part(&mut self.parts).await?;
                }
            }
            self.buffer.push(bytes);
            Ok(())
        };
        RUNTIME.block_on(put).map_err(self.store.error("writing", &self.path, Some(len)))
    }

    /// Makes the object visible and durable; it has `bytes` bytes by now.
    pub(crate) fn finish(&mut self, bytes: u64) -> Result<(), StoreError> {
        let finish = async {
            let rest = std::mem::take(&mut self.buffer);
            if !rest.is_empty() {
                self.parts.spawn(self.upload.put_part(rest.into()));
            }
            while !self.parts.is_empty() {
                join_part(&mut self.parts).await?;
            }
            self.upload.complete().await
        };
        RUNTIME.block_on(finish).map(|_| ()).map_err(self.store.error("writing", &self.path, Some(bytes)))
    }

    /// Gives up; nothing becomes visible.
    pub(crate) fn abort(mut self) {
        let aborted = RUNTIME.block_on(async {
            self.parts.shutdown().await;
            self.upload.abort().await
        });
        if let Err(error) = aborted {
            tracing::warn!(object = self.store.full_name(&self.path), %error, "an unfinished upload is left over");
        }
    }
}

async fn join_part(parts: &mut JoinSet<object_store::Result<()>>) -> object_store::Result<()> {
    match parts.join_next().await {
        Some(joined) => joined?,
        None => Ok(()),
    }
}

/// Work for a processor, beside the caller.
pub(crate) struct Task<T>(JoinHandle<T>);

impl<T: Send + 'static> Task<T> {
    /// Starts it; the caller bounds how many there are.
    pub(crate) fn spawn(work: impl FnOnce() -> T + Send + 'static) -> Task<T> {
        Task(RUNTIME.spawn_blocking(work))
    }

    /// Its result.
    pub(crate) fn wait(self) -> T {
        RUNTIME.block_on(self.0).expect("the work does not panic, and the runtime outlives it")
    }
}

fn of_io(source: io::Error) -> object_store::Error {
    object_store::Error::Generic { store: "ckpt", source: Box::new(source) }
}

fn make_folder(path: &std::path::Path) -> io::Result<()> {
    let missing: Vec<_> = path.ancestors().take_while(|folder| !folder.exists()).collect();
    std::fs::create_dir_all(path)?;
    // A new folder is durable once the folder it is in is synced.
    missing
        .iter()
        .filter_map(|folder| folder.parent())
        .try_for_each(|parent| std::fs::File::open(parent)?.sync_all())
}
