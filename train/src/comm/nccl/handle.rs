//! A communicator of NCCL that several threads may come to, until one of them ends it.

use super::library::{Communicator, IN_PROGRESS, Nccl, SUCCESS};
use crate::comm::CommError;
use crate::comm::threads::JobHandle;
use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How often a call that is in progress is asked after.
const POLL: Duration = Duration::from_micros(50);
/// How long NCCL's errors wait: where a peer has ended the job hears of that by itself, and it is the cause.
pub(super) const BENEFIT_OF_DOUBT: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Handle {
    nccl: &'static Nccl,
    job: JobHandle,
    alive: Mutex<Option<Alive>>,
}

#[derive(Clone, Copy, Debug)]
struct Alive(Communicator);

// SAFETY: a communicator may be used by any thread that has made its GPU current, by one at a time: it lies in a mutex.
unsafe impl Send for Alive {}

impl Handle {
    pub(super) fn new(nccl: &'static Nccl, job: JobHandle, communicator: Communicator) -> Self {
        Handle { nccl, job, alive: Mutex::new(Some(Alive(communicator))) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Alive>> {
        self.alive.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How far the last call is, or how it failed; `None` once it has ended.
    fn state(&self) -> Option<(c_int, Communicator)> {
        let alive = self.lock();
        alive.map(|Alive(communicator)| (self.nccl.state(communicator), communicator))
    }

    /// Its failure, if it has one.
    pub(super) fn failure(&self) -> Option<CommError> {
        let (code, communicator) = self.state()?;
        let has_failed = ![SUCCESS, IN_PROGRESS].contains(&code);
        has_failed.then(|| self.nccl.failed("a collective", code, communicator))
    }

    /// Makes a call and waits until it is queued: not until it is done.
    pub(super) fn call(
        &self,
        name: &'static str,
        call: impl FnOnce(Communicator) -> c_int,
    ) -> Result<(), CommError> {
        let code = {
            let alive = self.lock();
            match *alive {
                Some(Alive(communicator)) => call(communicator),
                None => return Err(self.ended()),
            }
        };
        self.settle(name, code)
    }

    /// Waits until a call that returned `code` is no longer in progress, for as long as the job runs.
    pub(super) fn settle(&self, call: &'static str, code: c_int) -> Result<(), CommError> {
        let mut code = code;
        let started = Instant::now();
        let mut failed_at = None;
        while code != SUCCESS {
            self.job.check()?;
            let Some((state, communicator)) = self.state() else { return Err(self.ended()) };
            let has_failed = code != IN_PROGRESS;
            let (since, limit) = match has_failed {
                true => (*failed_at.get_or_insert_with(Instant::now), BENEFIT_OF_DOUBT),
                false => (started, self.job.timeout()),
            };
            if since.elapsed() > limit {
                return Err(self.nccl.failed(call, code, communicator));
            }
            if has_failed || state == IN_PROGRESS {
                thread::sleep(POLL);
            }
            code = if has_failed { code } else { state };
        }
        Ok(())
    }

    /// Why there is no communicator any more.
    fn ended(&self) -> CommError {
        self.job.check().expect_err("a communicator is aborted after the job has failed")
    }

    /// Ends it in order, with all peers; at once if the job has failed.
    pub(super) fn end(&self) {
        // SAFETY: it is alive, and nothing runs on it: lanes are synchronized when they go.
        let finalize = |communicator| unsafe { (self.nccl.ncclCommFinalize)(communicator) };
        if self.job.check().is_err() || self.call("ncclCommFinalize", finalize).is_err() {
            return self.abort();
        }
        if let Some(Alive(communicator)) = self.lock().take() {
            // SAFETY: it is finalized, and nobody can come to it any more. That it fails changes nothing: all work is done.
            unsafe { (self.nccl.ncclCommDestroy)(communicator) };
        }
    }

    /// Ends it at once, kernels that wait for a peer included.
    pub(super) fn abort(&self) {
        let mut alive = self.lock();
        if let Some(Alive(communicator)) = alive.take() {
            // SAFETY: it is alive, and nobody can come to it any more. That it fails changes nothing: the job has failed.
            unsafe { (self.nccl.ncclCommAbort)(communicator) };
        }
    }
}
