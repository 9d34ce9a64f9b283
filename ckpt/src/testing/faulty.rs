//! `FaultyStore`: an object store that fails, tears or stops at a given write.

use futures::stream::{BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result, UploadPart,
};
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// What happens to the writes of a [`FaultyStore`]. Writes are numbered from 0: each put, part, completion, removal
/// and renaming is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// None.
    None,
    /// One write fails and does nothing.
    FailAt(usize),
    /// One write takes effect, and its answer is lost.
    LoseAnswerAt(usize),
    /// From this write on none takes effect, as after a crash.
    StopAt(usize),
    /// Writes of objects whose path contains the text fail for lack of space.
    FullFor(&'static str),
}

/// A wrapper around another store; reads go through.
#[derive(Debug)]
pub struct FaultyStore {
    inner: Arc<dyn ObjectStore>,
    plan: Arc<Plan>,
}

#[derive(Debug)]
struct Plan {
    trouble: Mutex<Trouble>,
    writes: AtomicUsize,
}

#[derive(PartialEq, Eq)]
enum Fate {
    Happens,
    Fails,
    LosesAnswer,
}

impl FaultyStore {
    /// `inner`, in trouble.
    pub fn new(inner: Arc<dyn ObjectStore>, trouble: Trouble) -> FaultyStore {
        let plan = Plan { trouble: Mutex::new(trouble), writes: AtomicUsize::new(0) };
        FaultyStore { inner, plan: Arc::new(plan) }
    }

    /// Changes the trouble from now on.
    pub fn set(&self, trouble: Trouble) {
        *self.plan.trouble.lock().expect("no test panics while it holds this") = trouble;
    }

    /// Writes so far, those that failed included.
    pub fn num_writes(&self) -> usize {
        self.plan.writes.load(Ordering::SeqCst)
    }
}

impl Plan {
    fn next(&self, path: &Path, bytes: usize) -> Result<Fate> {
        let write = self.writes.fetch_add(1, Ordering::SeqCst);
        Ok(match *self.trouble.lock().expect("no test panics while it holds this") {
            Trouble::FailAt(at) if write == at => Fate::Fails,
            Trouble::StopAt(at) if write >= at => Fate::Fails,
            Trouble::LoseAnswerAt(at) if write == at => Fate::LosesAnswer,
            Trouble::FullFor(text) if bytes > 0 && path.as_ref().contains(text) => {
                return Err(failure(io::ErrorKind::StorageFull.into()));
            }
            _ => Fate::Happens,
        })
    }

    async fn run<T>(&self, path: &Path, bytes: usize, write: impl Future<Output = Result<T>>) -> Result<T> {
        let fate = self.next(path, bytes)?;
        if fate == Fate::Fails {
            return Err(failure(io::Error::other("this write was to fail")));
        }
        let done = write.await?;
        if fate == Fate::LosesAnswer {
            Err(failure(io::Error::other("the answer got lost")))
        } else {
            Ok(done)
        }
    }
}

fn failure(source: io::Error) -> object_store::Error {
    object_store::Error::Generic { store: "FaultyStore", source: Box::new(source) }
}

impl fmt::Display for FaultyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FaultyStore({})", self.inner)
    }
}

#[async_trait::async_trait]
impl ObjectStore for FaultyStore {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        let bytes = payload.content_length();
        self.plan.run(location, bytes, self.inner.put_opts(location, payload, opts)).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let upload = self.plan.run(location, 0, self.inner.put_multipart_opts(location, opts)).await?;
        Ok(Box::new(FaultyUpload { upload, plan: Arc::clone(&self.plan), location: location.clone() }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.inner.get_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let (inner, plan) = (Arc::clone(&self.inner), Arc::clone(&self.plan));
        locations
            .then(move |location| {
                let (inner, plan) = (Arc::clone(&inner), Arc::clone(&plan));
                async move {
                    let location = location?;
                    plan.run(&location, 0, inner.delete(&location)).await?;
                    Ok(location)
                }
            })
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.plan.run(to, 0, self.inner.copy_opts(from, to, options)).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.plan.run(to, 0, self.inner.rename_opts(from, to, options)).await
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
        let bytes = data.content_length();
        let (plan, location) = (Arc::clone(&self.plan), self.location.clone());
        let part = self.upload.put_part(data);
        Box::pin(async move { plan.run(&location, bytes, part).await })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        self.plan.run(&self.location, 0, self.upload.complete()).await
    }

    async fn abort(&mut self) -> Result<()> {
        self.plan.run(&self.location, 0, self.upload.abort()).await
    }
}
