//! `FaultyStore`: an object store that fails, tears, lies or stops at a given operation.

use crate::store::Store;
use bytes::Bytes;
use futures::stream::{self, BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions,
    Result, UploadPart,
};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex};

/// What happens to the operations of a [`FaultyStore`]. They are numbered from 0: each put, start of an upload, part,
/// completion, abortion, read, question for an object's size, listing, removal, renaming and copy is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// None.
    None,
    /// One operation fails and does nothing.
    FailAt(usize),
    /// One operation does half its work and fails: of bytes and names, half arrive; a renaming only copies. What has no
    /// half does nothing.
    TearAt(usize),
    /// Of one put, part or read only half the bytes arrive, and it says that all is well.
    ShortAt(usize),
    /// One operation takes effect, and its answer is lost.
    LoseAnswerAt(usize),
    /// From this operation on all fail and do nothing, as after a crash.
    StopAt(usize),
    /// One operation takes effect, its answer is lost, and all later ones fail, as after a crash just then.
    StopAfter(usize),
    /// Writes of objects whose path contains the text fail for lack of space.
    FullFor(&'static str),
}

/// A wrapper around the client of a store.
#[derive(Debug)]
pub struct FaultyStore {
    inner: Arc<dyn ObjectStore>,
    plan: Arc<Plan>,
}

#[derive(Debug)]
struct Plan {
    trouble: Mutex<Trouble>,
    /// Operations so far, by kind, those that failed included.
    counts: Mutex<BTreeMap<&'static str, usize>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Happens,
    Fails,
    Tears,
    IsShort,
    LosesAnswer,
}

impl FaultyStore {
    /// `store` once more, in trouble, and what sets the trouble. The first one stays as it is.
    pub fn around(store: &Store, trouble: Trouble) -> (Store, Arc<FaultyStore>) {
        let plan = Plan { trouble: Mutex::new(trouble), counts: Mutex::default() };
        let faulty = Arc::new(FaultyStore { inner: store.client(), plan: Arc::new(plan) });
        (store.with_client(faulty.clone()), faulty)
    }

    /// Changes the trouble from now on.
    pub fn set(&self, trouble: Trouble) {
        *self.plan.trouble.lock().expect("no test panics while it holds this") = trouble;
    }

    /// Operations so far by kind, those that failed included.
    pub fn counts(&self) -> BTreeMap<&'static str, usize> {
        self.plan.counts.lock().expect("no test panics while it holds this").clone()
    }

    /// Operations so far, those that failed included: the number of the next one.
    pub fn num_operations(&self) -> usize {
        self.counts().values().sum()
    }
}

impl Plan {
    fn fate(&self, kind: &'static str) -> Fate {
        let mut counts = self.counts.lock().expect("no test panics while it holds this");
        let now = counts.values().sum::<usize>();
        *counts.entry(kind).or_default() += 1;
        match *self.trouble.lock().expect("no test panics while it holds this") {
            Trouble::FailAt(at) if now == at => Fate::Fails,
            Trouble::TearAt(at) if now == at => Fate::Tears,
            Trouble::ShortAt(at) if now == at => Fate::IsShort,
            Trouble::LoseAnswerAt(at) | Trouble::StopAfter(at) if now == at => Fate::LosesAnswer,
            Trouble::StopAt(at) | Trouble::StopAfter(at) if now >= at => Fate::Fails,
            _ => Fate::Happens,
        }
    }

    fn check_space(&self, path: &Path, bytes: usize) -> Result<()> {
        match *self.trouble.lock().expect("no test panics while it holds this") {
            Trouble::FullFor(text) if bytes > 0 && path.as_ref().contains(text) => {
                Err(failure(io::ErrorKind::StorageFull.into()))
            }
            _ => Ok(()),
        }
    }

    /// Carries out what has no half.
    async fn run<T>(&self, kind: &'static str, operation: impl Future<Output = Result<T>>) -> Result<T> {
        match self.fate(kind) {
            Fate::Fails | Fate::Tears => Err(failed()),
            fate => answer(fate, operation.await?),
        }
    }
}

/// The answer to an operation that took effect.
fn answer<T>(fate: Fate, done: T) -> Result<T> {
    match fate {
        Fate::LosesAnswer | Fate::Tears => Err(failure(io::Error::other("the answer got lost"))),
        _ => Ok(done),
    }
}

fn failed() -> object_store::Error {
    failure(io::Error::other("this operation was to fail"))
}

fn failure(source: io::Error) -> object_store::Error {
    object_store::Error::Generic { store: "FaultyStore", source: Box::new(source) }
}

/// The first half of the bytes.
fn half(payload: PutPayload) -> PutPayload {
    let bytes = Bytes::from(payload);
    bytes.slice(..bytes.len() / 2).into()
}

impl fmt::Display for FaultyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FaultyStore({})", self.inner)
    }
}

#[async_trait::async_trait]
impl ObjectStore for FaultyStore {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.plan.check_space(location, payload.content_length())?;
        match self.plan.fate("put") {
            Fate::Fails => Err(failed()),
            fate @ (Fate::Tears | Fate::IsShort) => {
                answer(fate, self.inner.put_opts(location, half(payload), opts).await?)
            }
            fate => answer(fate, self.inner.put_opts(location, payload, opts).await?),
        }
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let upload = self.plan.run("upload", self.inner.put_multipart_opts(location, opts)).await?;
        Ok(Box::new(FaultyUpload { upload, plan: Arc::clone(&self.plan), location: location.clone() }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let kind = match &options {
            GetOptions { head: true, .. } => "head",
            GetOptions { range: Some(_), .. } => "get range",
            _ => "get",
        };
        let fate = self.plan.fate(kind);
        if fate == Fate::Fails {
            return Err(failed());
        }
        let mut found = self.inner.get_opts(location, options).await?;
        if matches!(fate, Fate::Tears | Fate::IsShort) {
            let (meta, range) = (found.meta.clone(), found.range.clone());
            let bytes = found.bytes().await?;
            let half = bytes.slice(..bytes.len() / 2);
            let end = if fate == Fate::Tears { Some(Err(failed())) } else { None };
            found = GetResult {
                payload: GetResultPayload::Stream(stream::iter([Ok(half)].into_iter().chain(end)).boxed()),
                meta,
                range,
                attributes: Default::default(),
                extensions: Default::default(),
            };
            return Ok(found);
        }
        answer(fate, found)
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let (inner, plan) = (Arc::clone(&self.inner), Arc::clone(&self.plan));
        locations
            .then(move |location| {
                let (inner, plan) = (Arc::clone(&inner), Arc::clone(&plan));
                async move {
                    let location = location?;
                    plan.run("delete", inner.delete(&location)).await?;
                    Ok(location)
                }
            })
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.plan.fate("list") {
            Fate::Fails | Fate::LosesAnswer => stream::iter([Err(failed())]).boxed(),
            Fate::Tears => self.inner.list(prefix).take(1).chain(stream::iter([Err(failed())])).boxed(),
            _ => self.inner.list(prefix),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.plan.run("list folders", self.inner.list_with_delimiter(prefix)).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.plan.run("copy", self.inner.copy_opts(from, to, options)).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        match self.plan.fate("rename") {
            Fate::Fails => Err(failed()),
            fate @ Fate::Tears => answer(fate, self.inner.copy_if_not_exists(from, to).await?),
            fate => answer(fate, self.inner.rename_opts(from, to, options).await?),
        }
    }
}

#[derive(Debug)]
struct FaultyUpload {
    upload: Box<dyn MultipartUpload>,
    plan: Arc<Plan>,
    location: Path,
}

#[async_trait::async_trait]
impl MultipartUpload for FaultyUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let space = self.plan.check_space(&self.location, data.content_length());
        let fate = if space.is_ok() { self.plan.fate("part") } else { Fate::Fails };
        let part = match fate {
            Fate::Fails => return Box::pin(std::future::ready(space.and(Err(failed())))),
            Fate::Tears | Fate::IsShort => self.upload.put_part(half(data)),
            _ => self.upload.put_part(data),
        };
        Box::pin(async move { answer(fate, part.await?) })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        self.plan.run("complete", self.upload.complete()).await
    }

    async fn abort(&mut self) -> Result<()> {
        self.plan.run("abort", self.upload.abort()).await
    }
}
