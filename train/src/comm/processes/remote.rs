//! The board as a rank's process sees it: the hub's, over one connection a thread and one for the pulse.

use super::hub::PROGRAM;
use super::launch::{Launch, LaunchError};
use super::wire::{self, Place, Reply, Request};
use crate::comm::board::{Board, Contributions, GroupIndex, ThreadId};
use crate::comm::threads::Payload;
use crate::comm::{CommError, GroupId, Membership, OpSignature};
use mesh::Rank;
use std::io::{self, BufReader, BufWriter, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// From one beat of the pulse to the next; what was announced goes out with it at the latest.
const PULSE: Duration = Duration::from_millis(100);
/// How long a stranger on a port may take to show that it is none of ours, and from one try to the next.
const PATIENCE: Duration = Duration::from_secs(2);
const RETRY: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(super) struct RemoteBoard {
    shared: Arc<Shared>,
    pulse: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    launch: Launch,
    hub: SocketAddr,
    timeout: Duration,
    /// By thread; `None` where it could not be made.
    threads: Mutex<Vec<Option<Arc<Connection>>>>,
    pulse: Connection,
    first_cause: Mutex<Option<(Rank, CommError)>>,
    has_ended: AtomicBool,
    stop: Arc<AtomicBool>,
}

/// Why a rank is not among the others.
#[derive(Debug)]
pub(super) enum NotJoined {
    /// It did not find them, or may not be.
    Refused(LaunchError),
    /// The job failed before all had come; the first cause.
    HasFailed { rank: Rank, error: CommError },
}

#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    ends: Mutex<Ends>,
}

#[derive(Debug)]
struct Ends {
    reader: BufReader<TcpStream>,
    writer: BufWriter<TcpStream>,
    /// Groups that were named, and the number of the next operation in each.
    groups: Vec<(GroupId, u64)>,
}

impl Connection {
    /// A connection to the job's hub at `address`; an inner error if somebody else answers there.
    fn greet(address: SocketAddr, job: &str) -> io::Result<Result<Connection, String>> {
        let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let ends = Ends {
            reader: BufReader::new(stream.try_clone()?),
            writer: BufWriter::new(stream.try_clone()?),
            groups: Vec::new(),
        };
        let connection = Connection { stream, ends: Mutex::new(ends) };
        let hello = Request::Hello { program: PROGRAM.into(), job: job.into() };
        Ok(match connection.ask(&hello)? {
            Reply::Welcome => Ok(connection),
            Reply::Refused { why } => Err(why),
            other => Err(format!("the answer was {other:?}")),
        })
    }

    /// Takes a place; for a rank's own, when all ranks have come.
    fn join(&self, launch: &Launch, place: Place, timeout: Duration) -> io::Result<Result<(), NotJoined>> {
        // The hub itself gives up after the time-out, and says why.
        self.stream.set_read_timeout(Some(timeout + PATIENCE))?;
        let join = Request::Join { rank: launch.rank, num_ranks: launch.num_ranks, place };
        let reply = self.ask(&join)?;
        let limit = (place == Place::Pulse).then_some(timeout + PATIENCE);
        self.stream.set_read_timeout(limit)?;
        Ok(match reply {
            Reply::Joined => Ok(()),
            Reply::Refused { why } => Err(NotJoined::Refused(LaunchError::Refused { why })),
            Reply::Failed { rank, error } => Err(NotJoined::HasFailed { rank, error }),
            other => return Err(unexpected(&other)),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Ends> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, request: &Request) -> io::Result<Reply> {
        let ends = &mut *self.lock();
        wire::write(&mut ends.writer, request)?;
        ends.writer.flush()?;
        wire::read(&mut ends.reader)
    }

    /// Says what needs no answer; it goes out with what does, or with the next beat of the pulse.
    fn say(&self, request: &Request) -> io::Result<()> {
        wire::write(&mut self.lock().writer, request)
    }
}

impl RemoteBoard {
    /// Joins the job where `launch` says that it meets; returns when all ranks have come.
    ///
    /// # Errors
    /// If nobody, or somebody else, is there for as long as `timeout`, the hub refuses the rank, or the job fails meanwhile.
    pub(super) fn join(
        launch: &Launch,
        timeout: Duration,
        stop: Arc<AtomicBool>,
    ) -> Result<RemoteBoard, NotJoined> {
        let (hub, first) = find_hub(launch, timeout).map_err(NotJoined::Refused)?;
        let unreachable =
            |error: io::Error| NotJoined::Refused(launch.unreachable(timeout, &error.to_string()));
        let refused = |why| NotJoined::Refused(LaunchError::Refused { why });
        first.join(launch, Place::Rank, timeout).map_err(unreachable)??;
        // Only now: the hub gives nobody time between greeting and joining, and others may come much later.
        let pulse = Connection::greet(hub, &launch.job).map_err(unreachable)?.map_err(refused)?;
        pulse.join(launch, Place::Pulse, timeout).map_err(unreachable)??;
        let shared = Arc::new(Shared {
            launch: launch.clone(),
            hub,
            timeout,
            threads: Mutex::new(vec![Some(Arc::new(first))]),
            pulse,
            first_cause: Mutex::new(None),
            has_ended: AtomicBool::new(false),
            stop,
        });
        let beating = Arc::clone(&shared);
        let pulse = thread::Builder::new().name("pulse".into()).spawn(move || {
            while !beating.has_ended.load(Ordering::Acquire) {
                beating.beat();
                thread::park_timeout(PULSE);
            }
        });
        let pulse = pulse.map_err(unreachable)?;
        Ok(RemoteBoard { shared, pulse: Some(pulse) })
    }
}

/// Tries the places where the hub may be until it answers.
fn find_hub(launch: &Launch, timeout: Duration) -> Result<(SocketAddr, Connection), LaunchError> {
    let deadline = Instant::now() + timeout;
    let mut last = String::from("no port was tried");
    loop {
        for port in &launch.ports {
            let addresses = match (launch.host.as_str(), *port).to_socket_addrs() {
                Ok(addresses) => addresses,
                Err(error) => {
                    last = error.to_string();
                    continue;
                }
            };
            for address in addresses {
                match Connection::greet(address, &launch.job) {
                    Ok(Ok(connection)) => return Ok((address, connection)),
                    Ok(Err(why)) => last = why,
                    Err(error) => last = error.to_string(),
                }
            }
        }
        if Instant::now() > deadline {
            return Err(launch.unreachable(timeout, &last));
        }
        thread::sleep(RETRY);
    }
}

impl Drop for RemoteBoard {
    fn drop(&mut self) {
        self.shared.has_ended.store(true, Ordering::Release);
        if let Some(pulse) = self.pulse.take() {
            pulse.thread().unpark();
            // A pulse that panicked has stopped, too.
            let _ = pulse.join();
        }
        // A hub that cannot be told has gone.
        let pulse = &self.shared.pulse;
        let _ = pulse.say(&Request::End).and_then(|()| pulse.lock().writer.flush());
    }
}

impl Shared {
    fn cause(&self) -> MutexGuard<'_, Option<(Rank, CommError)>> {
        self.first_cause.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn threads(&self) -> MutexGuard<'_, Vec<Option<Arc<Connection>>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends out what was announced, and hears how the job goes.
    fn beat(&self) {
        for connection in self.threads().iter().flatten() {
            // Who holds it sends it out.
            if let Ok(mut ends) = connection.ends.try_lock() {
                // If it breaks, its thread hears of that at its next call, and the pulse below.
                let _ = ends.writer.flush();
            }
        }
        match self.pulse.ask(&Request::Check) {
            Ok(Reply::Fine { is_asked_to_stop }) => {
                if is_asked_to_stop {
                    self.stop.store(true, Ordering::Relaxed);
                }
            }
            Ok(Reply::Failed { rank, error }) => {
                self.cause().get_or_insert((rank, error));
            }
            Ok(other) => drop(self.lost(&unexpected(&other))),
            Err(error) => drop(self.lost(&error)),
        }
    }

    /// The hub cannot be heard any more: nobody waits for it, and the job has failed.
    fn lost(&self, error: &io::Error) -> CommError {
        let why = format!("the process that the job meets at cannot be reached any more: {error}");
        let cause = {
            let mut cause = self.cause();
            cause.get_or_insert((Rank(0), CommError::PeerLost { rank: Rank(0), why })).1.clone()
        };
        for connection in self.threads().iter().flatten() {
            // One that is shut already is what is wanted.
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
        cause
    }

    fn connection(&self, thread: ThreadId) -> Result<Arc<Connection>, CommError> {
        if let Some((_, error)) = &*self.cause() {
            return Err(error.clone());
        }
        let connection = self.threads()[thread.0].clone();
        connection.ok_or_else(|| self.lost(&io::ErrorKind::NotConnected.into()))
    }
}

fn unexpected(reply: &Reply) -> io::Error {
    io::Error::other(format!("the answer was {reply:?}"))
}

/// Counts an operation.
fn next((_, next): &mut (GroupId, u64)) -> u64 {
    *next += 1;
    *next - 1
}

impl Board for RemoteBoard {
    fn num_ranks(&self) -> u32 {
        self.shared.launch.num_ranks
    }

    fn group(&self, thread: ThreadId, membership: &Membership) -> GroupIndex {
        let Ok(connection) = self.shared.connection(thread) else { return GroupIndex(usize::MAX) };
        let ends = &mut *connection.lock();
        let known = ends.groups.iter().position(|(id, _)| *id == membership.id);
        GroupIndex(known.unwrap_or_else(|| {
            let name = Request::Group { membership: membership.clone() };
            if let Err(error) = wire::write(&mut ends.writer, &name) {
                self.shared.lost(&error);
            }
            ends.groups.push((membership.id.clone(), 0));
            ends.groups.len() - 1
        }))
    }

    fn post(
        &self,
        thread: ThreadId,
        GroupIndex(group): GroupIndex,
        _: usize,
        signature: OpSignature,
        payload: Payload,
    ) -> Result<u64, CommError> {
        let connection = self.shared.connection(thread)?;
        let ends = &mut *connection.lock();
        let bytes = payload.bytes();
        let mut say = || {
            let post = Request::Post { group, signature, len: bytes.len() as u64 };
            wire::write(&mut ends.writer, &post)?;
            ends.writer.write_all(bytes)?;
            ends.writer.flush()
        };
        say().map_err(|error| self.shared.lost(&error))?;
        Ok(next(&mut ends.groups[group]))
    }

    fn announce(
        &self,
        thread: ThreadId,
        GroupIndex(group): GroupIndex,
        _: usize,
        signature: OpSignature,
    ) -> Result<u64, CommError> {
        let connection = self.shared.connection(thread)?;
        let ends = &mut *connection.lock();
        let said = wire::write(&mut ends.writer, &Request::Announce { group, signature });
        said.map_err(|error| self.shared.lost(&error))?;
        Ok(next(&mut ends.groups[group]))
    }

    fn collect(
        &self,
        thread: ThreadId,
        GroupIndex(group): GroupIndex,
        sequence: u64,
    ) -> Result<Arc<Contributions>, CommError> {
        let connection = self.shared.connection(thread)?;
        let ends = &mut *connection.lock();
        let mut collect = || {
            wire::write(&mut ends.writer, &Request::Collect { group, sequence })?;
            ends.writer.flush()?;
            match wire::read(&mut ends.reader)? {
                Reply::Whole { lens } => {
                    let payloads = lens.into_iter().map(|len| wire::read_payload(&mut ends.reader, len));
                    Ok(Ok(payloads.collect::<io::Result<Vec<Payload>>>()?))
                }
                Reply::Failed { rank, error } => Ok(Err((rank, error))),
                other => Err(unexpected(&other)),
            }
        };
        match collect() {
            Ok(Ok(payloads)) => Ok(Arc::new(Contributions::of(payloads))),
            Ok(Err(cause)) => Err(self.shared.cause().get_or_insert(cause).1.clone()),
            Err(error) => Err(self.shared.lost(&error)),
        }
    }

    fn start_thread(&self, _: Rank) -> ThreadId {
        let Shared { launch, hub, timeout, .. } = &*self.shared;
        let connect = || {
            let connection = Connection::greet(*hub, &launch.job)?.map_err(io::Error::other)?;
            connection.join(launch, Place::Fork, *timeout).map(|joined| joined.map(|()| Arc::new(connection)))
        };
        let connection = match connect() {
            Ok(Ok(connection)) => Some(connection),
            Ok(Err(NotJoined::HasFailed { rank, error })) => {
                self.shared.cause().get_or_insert((rank, error));
                None
            }
            Ok(Err(NotJoined::Refused(error))) => {
                self.shared.lost(&io::Error::other(error));
                None
            }
            Err(error) => {
                self.shared.lost(&error);
                None
            }
        };
        let mut threads = self.shared.threads();
        threads.push(connection);
        ThreadId(threads.len() - 1)
    }

    fn end_thread(&self, thread: ThreadId) {
        let Some(connection) = self.shared.threads()[thread.0].take() else { return };
        if let Err(error) = connection.say(&Request::End).and_then(|()| connection.lock().writer.flush()) {
            self.shared.lost(&error);
        }
    }

    fn fail_with(&self, rank: Rank, error: CommError) {
        let pulse = &self.shared.pulse;
        if let Err(error) = pulse.say(&Request::Fail { error: error.told_by(rank) }) {
            self.shared.lost(&error);
        }
        // The answer is the cause that holds.
        self.shared.beat();
    }

    fn first_cause(&self) -> Option<(Rank, CommError)> {
        self.shared.cause().clone()
    }

    /// The hub sees to that.
    fn expire(&self) {}

    #[cfg(test)]
    fn num_operations(&self) -> usize {
        panic!("the hub counts them")
    }

    fn timeout(&self) -> Duration {
        self.shared.timeout
    }
}
