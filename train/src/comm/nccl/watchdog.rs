//! A rank's watchdog: it finds that the job, NCCL or a peer has failed while the rank waits for its GPU, and ends what would
//! wait for ever.

use super::handle::{BENEFIT_OF_DOUBT, Handle};
use crate::backend::BackendError;
use crate::backend::cuda::Gpu;
use crate::backend::cuda::lane::Event;
use crate::comm::threads::{JobHandle, RankContext};
use crate::comm::{Blocked, CommError};
use cudarc::driver::sys::CUstream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How often it looks.
const INTERVAL: Duration = Duration::from_millis(100);

/// What a rank's watchdog watches over.
#[derive(Debug, Default)]
pub(super) struct Watch {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    has_ended: bool,
    watched: Vec<Watched>,
}

#[derive(Debug)]
struct Watched {
    handle: Arc<Handle>,
    expected: Option<Expected>,
    failed_since: Option<Instant>,
}

/// The oldest operation that is not known to be done.
#[derive(Debug)]
struct Expected {
    /// The place behind it on its lane.
    event: Event,
    since: Instant,
    /// Who waits for it.
    blocked: Blocked,
}

/// Ends with its rank: in order, or at once where the job has failed.
#[derive(Debug)]
struct Watchdog {
    watch: Arc<Watch>,
    thread: Option<JoinHandle<()>>,
}

/// Watches over the communicators of one rank until that has ended, and ends them then.
pub(super) fn start(context: &RankContext, gpu: &Arc<Gpu>) -> Arc<Watch> {
    let watch = Arc::new(Watch::default());
    let (watching, job, gpu) = (Arc::clone(&watch), context.job(), Arc::clone(gpu));
    let thread = thread::Builder::new()
        .name(format!("watchdog {}", context.rank()))
        .spawn(move || watching.watch(&job, &gpu))
        .expect("the system has room for a thread beside each rank");
    context.keep(Box::new(Watchdog { watch: Arc::clone(&watch), thread: Some(thread) }));
    watch
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.watch.lock().has_ended = true;
        self.watch.ended.notify_one();
        if let Some(thread) = self.thread.take() {
            // A watchdog that panicked has nothing left to watch.
            let _ = thread.join();
        }
        for Watched { handle, .. } in self.watch.lock().watched.drain(..) {
            handle.end();
        }
    }
}

impl Watch {
    /// From now on this communicator is aborted when the job fails, and ended with the rank.
    pub(super) fn add(&self, handle: &Arc<Handle>) {
        let watched = Watched { handle: Arc::clone(handle), expected: None, failed_since: None };
        self.lock().watched.push(watched);
    }

    /// Expects the operation that was just queued on the communicator's lane to be done in the time that ranks wait for each
    /// other.
    pub(super) fn expect(
        &self,
        handle: &Arc<Handle>,
        lane: CUstream,
        blocked: impl FnOnce() -> Blocked,
    ) -> Result<(), CommError> {
        let mut state = self.lock();
        let watched = state.watched.iter_mut().find(|watched| Arc::ptr_eq(&watched.handle, handle));
        let watched = watched.expect("a link is watched while it lives");
        if watched.expected.is_none() {
            let event = Event::on(lane)?;
            watched.expected = Some(Expected { event, since: Instant::now(), blocked: blocked() });
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self, job: &JobHandle, gpu: &Gpu) {
        // Without it a peer that hangs would never be noticed.
        if let Err(error) = gpu.enter() {
            let (operation, reason) = ("watching over NCCL", error.to_string());
            return job.fail(BackendError::Failed { operation, reason }.into());
        }
        let mut state = self.lock();
        while !state.has_ended {
            job.expire();
            let failure = state.watched.iter_mut().find_map(|watched| watched.failure(job.timeout()));
            if let Some(error) = failure {
                job.fail(error);
            }
            if job.check().is_err() {
                let handles: Vec<_> =
                    state.watched.iter().map(|watched| Arc::clone(&watched.handle)).collect();
                // An abort waits for kernels to end.
                drop(state);
                handles.iter().for_each(|handle| handle.abort());
                state = self.lock();
            }
            state = self.ended.wait_timeout(state, INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Watched {
    /// Why the job cannot go on.
    fn failure(&mut self, limit: Duration) -> Option<CommError> {
        if let Some(error) = self.handle.failure() {
            let since = self.failed_since.get_or_insert_with(Instant::now);
            return (since.elapsed() > BENEFIT_OF_DOUBT).then_some(error);
        }
        self.expected.take_if(|expected| expected.event.is_reached());
        let Expected { since, blocked, .. } = self.expected.as_ref()?;
        (since.elapsed() > limit).then(|| CommError::TimedOut { limit, blocked: vec![blocked.clone()] })
    }
}
