//! `Store`: where a run's checkpoints lie. Blocking calls over an object store; the runtime is hidden here.

mod error;

use error::MEGATRON_TRACKER;
pub use error::{IoClass, LocationError, StoreError};

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
use std::ffi::OsString;
use std::fmt;
use std::fs::{File, TryLockError};
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

    /// Like [`Store::open`], to save there: makes the folder, durably, if there is none, and refuses that of another program.
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
        if path.join(MEGATRON_TRACKER).exists() {
            return Err(LocationError::Megatron { path });
        }
        make_folder(&path).map_err(|source| LocationError::of_io(path.clone(), source))?;
        Store::open_folder(path)
    }

    /// A store behind a client, called `name` in messages.
    fn of_client(client: Arc<dyn ObjectStore>, name: &str) -> Store {
        Store { client, name: name.into(), local: None }
    }

    #[cfg(feature = "testing")]
    pub(crate) fn client(&self) -> Arc<dyn ObjectStore> {
        Arc::clone(&self.client)
    }

    /// The same place through another client.
    #[cfg(feature = "testing")]
    pub(crate) fn with_client(&self, client: Arc<dyn ObjectStore>) -> Store {
        Store { client, ..self.clone() }
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

    /// What lies directly under the root; of stores that are no local folder, the folders.
    pub(crate) fn entries(&self) -> Result<Vec<Entry>, StoreError> {
        let failed = self.error("listing", "", None);
        let Some(root) = &self.local else {
            let listed = RUNTIME.block_on(self.client.list_with_delimiter(None)).map_err(failed)?;
            let names = listed.common_prefixes.iter().filter_map(|path| path.filename());
            return Ok(names.map(|name| Entry { name: name.into(), not_a_folder: None }).collect());
        };
        // Not by the client: one odd name would fail its whole listing.
        std::fs::read_dir(root.as_path())
            .and_then(|entries| {
                entries
                    .map(|entry| {
                        let entry = entry?;
                        let not_a_folder = match std::fs::metadata(entry.path()) {
                            Ok(found) if found.is_dir() => None,
                            Ok(_) => Some("it is no folder".to_owned()),
                            Err(error) => Some(error.to_string()),
                        };
                        Ok(Entry { name: entry.file_name(), not_a_folder })
                    })
                    .collect()
            })
            .map_err(|source| failed(of_io(source)))
    }

    /// Whether there is a folder of that name directly under the root.
    pub(crate) fn has_folder(&self, folder: &str) -> Result<bool, StoreError> {
        match &self.local {
            Some(root) => Ok(root.join(folder).is_dir()),
            None => Ok(!self.list(folder)?.is_empty()),
        }
    }

    /// The lengths of files in `folder`, in the order of `paths`; `None` for what is missing.
    pub(crate) fn sizes<'a>(
        &self,
        folder: &str,
        paths: impl Iterator<Item = &'a str>,
    ) -> Result<Vec<Option<u64>>, StoreError> {
        let Some(root) = &self.local else {
            let there = self.list(folder)?;
            return Ok(paths.map(|path| there.get(path).copied()).collect());
        };
        // One by one: what else lies there, under whatever name, is nobody's business.
        let size = |path: &str| match std::fs::symlink_metadata(root.join(folder).join(path)) {
            Ok(found) => Ok(Some(if found.is_file() { found.len() } else { 0 })),
            Err(source) => match IoClass::of(&source) {
                IoClass::NotFound | IoClass::WrongKind => Ok(None),
                _ => Err(self.error("looking at", &format!("{folder}/{path}"), None)(of_io(source))),
            },
        };
        paths.map(size).collect()
    }

    /// The length of a file, or why it is none of the root's: links are followed, if they stay below it.
    pub(crate) fn file_within(&self, path: &str) -> Result<Result<u64, &'static str>, StoreError> {
        let Some(root) = &self.local else {
            let found = self.sizes("", std::iter::once(path))?;
            return Ok(found[0].ok_or("it is missing"));
        };
        let found = root.canonicalize().and_then(|root| Ok((root.join(path).canonicalize()?, root)));
        let (real, root) = match found {
            Ok(found) => found,
            Err(error) if IoClass::of(&error) == IoClass::NotFound => return Ok(Err("it is missing")),
            Err(source) => return Err(self.error("looking at", path, None)(of_io(source))),
        };
        if !real.starts_with(root) {
            return Ok(Err("it is a link that leads out of the checkpoint"));
        }
        match std::fs::metadata(real) {
            Ok(found) if found.is_file() => Ok(Ok(found.len())),
            Ok(_) => Ok(Err("it is no file")),
            Err(source) => Err(self.error("looking at", path, None)(of_io(source))),
        }
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
        self.get_at_most(path, u64::MAX)
    }

    /// A whole object; one of more than `bytes_max` bytes is of the wrong kind.
    pub(crate) fn get_at_most(&self, path: &str, bytes_max: u64) -> Result<Bytes, StoreError> {
        let location = Path::from(path);
        let found = self.local.as_ref().and_then(|root| std::fs::metadata(root.join(path)).ok());
        if found.is_some_and(|found| !found.is_file()) {
            // To open a pipe would wait for somebody who writes.
            let source = io::Error::new(io::ErrorKind::IsADirectory, "it is no file");
            return Err(self.error("reading", path, None)(of_io(source)));
        }
        let read = async {
            let found = self.client.get(&location).await?;
            let bytes = found.meta.size;
            if bytes > bytes_max {
                let message = format!("it has {bytes} bytes, and may have {bytes_max}");
                return Err(of_io(io::Error::new(io::ErrorKind::IsADirectory, message)));
            }
            let found = found.bytes().await?;
            expect_len(&found, bytes)?;
            Ok(found)
        };
        RUNTIME.block_on(read).map_err(self.error("reading", path, None))
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
            expect_len(&found, bytes).map_err(self.error("reading", &path, Some(bytes)))?;
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

    /// Removes the folders on the way to `path` that hold nothing; where somebody else just puts something in, they stay.
    fn remove_empty_folders(&self, path: &str) {
        let Some(root) = &self.local else { return };
        let folders = std::path::Path::new(path).ancestors().skip(1);
        let mut below_root = folders.filter(|path| !path.as_os_str().is_empty());
        // The first that holds something ends it, and so would those above.
        let _ = below_root.try_for_each(|folder| std::fs::remove_dir(root.join(folder)));
    }

    /// Says that somebody reads what belongs to this file. Waits for one who has it alone, who is about to remove it.
    pub(crate) fn lock_shared(&self, path: &str) -> Lock {
        Lock { _file: self.local_file(path).filter(|file| file.lock_shared().is_ok()) }
    }

    /// The same for one who removes it; `None` if somebody reads it.
    pub(crate) fn lock_alone(&self, path: &str) -> Option<Lock> {
        let file = self.local_file(path);
        match file.as_ref().map(File::try_lock) {
            Some(Err(TryLockError::WouldBlock)) => None,
            _ => Some(Lock { _file: file }),
        }
    }

    fn local_file(&self, path: &str) -> Option<File> {
        let path = self.local.as_ref()?.join(path);
        open_file(&path).ok()
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

/// Opens a file to read it; what is something else, such as a pipe, is of the wrong kind: to open it could wait for ever.
///
/// # Errors
/// If there is none, or it may not be read.
pub fn open_file(path: &std::path::Path) -> io::Result<File> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is no file"));
    }
    File::open(path)
}

/// A lock on a file for as long as it lives; where files cannot be locked, or there is none, nothing.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: Option<File>,
}

/// Something directly under the root.
pub(crate) struct Entry {
    pub(crate) name: OsString,
    /// Why it cannot be used as a folder.
    pub(crate) not_a_folder: Option<String>,
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
        self.store.remove_empty_folders(&self.path);
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

/// That all bytes came: stores cut a range short at the end of the object, and a connection that ends early may look like it.
fn expect_len(found: &Bytes, bytes: u64) -> object_store::Result<()> {
    if found.len() as u64 == bytes {
        return Ok(());
    }
    Err(of_io(io::Error::new(io::ErrorKind::UnexpectedEof, format!("{} bytes came", found.len()))))
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
