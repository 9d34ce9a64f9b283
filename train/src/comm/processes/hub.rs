//! The hub: one process keeps the board, and a thread of it acts for each connection of a rank.

use super::wire::{self, Place, Reply, Request};
use crate::comm::CommError;
use crate::comm::board::{Board, GroupIndex, ThreadId};
use crate::comm::error::list;
use crate::comm::threads::{LocalBoard, WorldOptions};
use mesh::Rank;
use std::collections::BTreeSet;
use std::io::{self, BufReader, BufWriter, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How often it looks for new connections, and for ranks that are late.
const INTERVAL: Duration = Duration::from_millis(20);
/// How long ranks of a job that has failed may take to hear of it, and whoever connects to say who it is.
pub(super) const GRACE: Duration = Duration::from_secs(5);

/// What both sides must be to understand each other.
pub(super) const PROGRAM: &str = concat!("remesh ", env!("CARGO_PKG_VERSION"));

/// The place where the ranks of a job meet.
#[derive(Debug)]
pub struct Hub {
    shared: Arc<Shared>,
    address: SocketAddr,
    thread: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    job: String,
    board: Arc<LocalBoard>,
    guests: Mutex<Guests>,
    changed: Condvar,
}

#[derive(Debug)]
struct Guests {
    has_joined: Vec<bool>,
    /// Connections that have not ended.
    num_open: usize,
    is_asked_to_stop: bool,
    is_closing: bool,
}

impl Hub {
    /// Serves the job `job` of `num_ranks` ranks on a listener. Ranks wait for each other up to `timeout`.
    ///
    /// # Errors
    /// What the system says of the listener.
    pub fn serve(listener: TcpListener, job: &str, num_ranks: u32, timeout: Duration) -> io::Result<Hub> {
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let options = WorldOptions { timeout, ..WorldOptions::default() };
        let shared = Arc::new(Shared {
            job: job.to_owned(),
            board: Arc::new(LocalBoard::new(num_ranks, options)),
            guests: Mutex::new(Guests {
                has_joined: vec![false; num_ranks as usize],
                num_open: 0,
                is_asked_to_stop: false,
                is_closing: false,
            }),
            changed: Condvar::new(),
        });
        let accepting = Arc::clone(&shared);
        let thread =
            thread::Builder::new().name("hub".into()).spawn(move || accept(&accepting, &listener))?;
        Ok(Hub { shared, address, thread })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Asks all ranks to stop, as a signal would.
    pub fn ask_to_stop(&self) {
        self.shared.lock().is_asked_to_stop = true;
    }

    /// Ends the job because a rank's process has ended, unless it has failed before: one that had not joined cannot tell.
    pub fn fail(&self, rank: Rank, error: CommError) {
        self.shared.board.fail_with(rank, error);
    }

    /// Why the job failed, and the rank that failed or found it.
    pub fn first_cause(&self) -> Option<(Rank, CommError)> {
        self.shared.board.first_cause()
    }

    /// Waits until all ranks have left; for a short while only where the job has failed.
    pub fn finish(self) {
        let mut failed_at = None;
        let mut guests = self.shared.lock();
        while guests.num_open > 0 {
            if self.shared.board.check().is_err() {
                let failed_at = failed_at.get_or_insert_with(Instant::now);
                if failed_at.elapsed() > GRACE {
                    break;
                }
            }
            guests = self.shared.wait(guests, INTERVAL);
        }
        guests.is_closing = true;
        drop(guests);
        self.thread.join().expect("the hub's thread only accepts");
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Guests> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, guests: MutexGuard<'a, Guests>, at_most: Duration) -> MutexGuard<'a, Guests> {
        self.changed.wait_timeout(guests, at_most).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Whether a rank may take this place; its own is counted as taken from then on.
    fn admit(&self, rank: Rank, num_ranks: u32, place: Place) -> Result<(), String> {
        let of_job = self.board.num_ranks();
        if num_ranks != of_job {
            return Err(format!("rank {rank} is of {num_ranks} ranks, the job has {of_job}"));
        }
        let mut guests = self.lock();
        let Some(has_joined) = guests.has_joined.get_mut(rank.index()) else {
            return Err(format!("there is no rank {rank} among {num_ranks}"));
        };
        match (place, *has_joined) {
            (Place::Rank, true) => return Err(format!("rank {rank} has joined already")),
            (Place::Fork | Place::Pulse, false) => return Err(format!("rank {rank} has not joined yet")),
            _ => *has_joined = true,
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Waits until all ranks have come, or the job has failed.
    fn meet(&self) -> Result<(), String> {
        let mut guests = self.lock();
        let (started, limit) = (Instant::now(), self.board.timeout());
        loop {
            let missing = guests.has_joined.iter().zip(0..).filter(|(has_joined, _)| !**has_joined);
            let missing: Vec<Rank> = missing.map(|(_, rank)| Rank(rank)).collect();
            if missing.is_empty() {
                return Ok(());
            }
            if self.board.check().is_err() {
                return Ok(());
            }
            if started.elapsed() > limit {
                let why = format!("did not join within {limit:?}; missing: {}", list(&missing));
                self.board.fail_with(missing[0], CommError::PeerLost { rank: missing[0], why: why.clone() });
                return Err(format!("rank {} {why}", missing[0]));
            }
            guests = self.wait(guests, INTERVAL);
        }
    }
}

fn accept(shared: &Arc<Shared>, listener: &TcpListener) {
    loop {
        if shared.lock().is_closing {
            return;
        }
        shared.board.expire();
        let Ok((stream, _)) = listener.accept() else {
            thread::sleep(INTERVAL);
            continue;
        };
        shared.lock().num_open += 1;
        let serving = Arc::clone(shared);
        let serve = move || {
            let _ended = Ended(&serving);
            // How a connection fails is the rank's that it belongs to, and told there.
            let _ = Connection::new(&serving, stream).and_then(|connection| connection.serve());
        };
        if thread::Builder::new().name("hub".into()).spawn(serve).is_err() {
            drop(Ended(shared));
        }
    }
}

/// Counts a connection out.
struct Ended<'a>(&'a Shared);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.lock().num_open -= 1;
        self.0.changed.notify_all();
    }
}

struct Connection<'a> {
    shared: &'a Shared,
    reader: BufReader<TcpStream>,
    writer: BufWriter<TcpStream>,
}

/// A rank's place while a connection stands for it: one that ends without a word ends the job.
struct Guest<'a> {
    board: &'a LocalBoard,
    rank: Rank,
    /// `None` for the pulse.
    thread: Option<ThreadId>,
    has_ended: bool,
}

impl Drop for Guest<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            let why = "its process ended, or cannot be reached any more".to_owned();
            self.board.fail_with(self.rank, CommError::PeerLost { rank: self.rank, why });
        }
        if let Some(thread) = self.thread {
            self.board.end_thread(thread);
        }
    }
}

/// A group as a connection has named it.
struct Named {
    group: GroupIndex,
    position: usize,
    /// Operations that it has posted and not collected.
    open: BTreeSet<u64>,
}

impl<'a> Connection<'a> {
    fn new(shared: &'a Shared, stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        // Strangers do not stay.
        stream.set_read_timeout(Some(GRACE))?;
        Ok(Connection { shared, reader: BufReader::new(stream.try_clone()?), writer: BufWriter::new(stream) })
    }

    fn reply(&mut self, reply: &Reply) -> io::Result<()> {
        wire::write(&mut self.writer, reply)?;
        self.writer.flush()
    }

    fn refuse(&mut self, why: String) -> io::Result<()> {
        self.reply(&Reply::Refused { why })
    }

    fn serve(mut self) -> io::Result<()> {
        let shared = self.shared;
        match wire::read(&mut self.reader)? {
            Request::Hello { program, job } if program == PROGRAM && job == shared.job => {
                self.reply(&Reply::Welcome)?;
            }
            Request::Hello { program, job } => {
                return self.refuse(format!(
                    "job `{}` of {PROGRAM} meets here, not job `{job}` of {program}",
                    shared.job
                ));
            }
            _ => return Ok(()),
        }
        let Request::Join { rank, num_ranks, place } = wire::read(&mut self.reader)? else { return Ok(()) };
        let board = &*shared.board;
        let limit = (place == Place::Pulse).then(|| board.timeout());
        self.writer.get_ref().set_read_timeout(limit)?;
        let admitted = shared.admit(rank, num_ranks, place);
        let met = admitted.and_then(|()| if place == Place::Rank { shared.meet() } else { Ok(()) });
        if let Err(why) = met {
            return self.refuse(why);
        }
        if place != Place::Pulse && board.check().is_err() {
            return self.tell(board);
        }
        let thread = match place {
            Place::Rank => Some(ThreadId(rank.index())),
            Place::Fork => Some(board.start_thread(rank)),
            Place::Pulse => None,
        };
        let mut guest = Guest { board, rank, thread, has_ended: false };
        self.reply(&Reply::Joined)?;
        self.act_for(&mut guest)
    }

    /// Does what the rank asks until it ends. What no rank of ours asks for ends the job in its name.
    fn act_for(&mut self, guest: &mut Guest) -> io::Result<()> {
        let (board, rank) = (guest.board, guest.rank);
        let mut groups: Vec<Named> = Vec::new();
        let wrong = |why: String| board.fail_with(rank, CommError::PeerFailed { rank, why });
        let unnamed = |group: usize| wrong(format!("spoke of a group {group} that it had not named"));
        loop {
            // That the job has failed is told where an answer is expected.
            match wire::read(&mut self.reader)? {
                Request::Group { membership } => match board.group_of(rank, &membership) {
                    Ok(group) => {
                        groups.push(Named { group, position: membership.position, open: BTreeSet::new() });
                    }
                    Err(why) => wrong(why),
                },
                Request::Post { group, signature, len } => {
                    let payload = wire::read_payload(&mut self.reader, len)?;
                    match (guest.thread, groups.get_mut(group)) {
                        (Some(thread), Some(Named { group, position, open })) => {
                            open.extend(board.post(thread, *group, *position, signature, payload));
                        }
                        _ => unnamed(group),
                    }
                }
                Request::Announce { group, signature } => match (guest.thread, groups.get(group)) {
                    (Some(thread), Some(Named { group, position, .. })) => {
                        // A job that has failed hears of it elsewhere.
                        let _ = board.announce(thread, *group, *position, signature);
                    }
                    _ => unnamed(group),
                },
                Request::Collect { group, sequence } => {
                    let whole = match (guest.thread, groups.get_mut(group)) {
                        (Some(thread), Some(Named { group, open, .. })) if open.contains(&sequence) => {
                            open.remove(&sequence);
                            board.collect(thread, *group, sequence).ok()
                        }
                        _ => {
                            wrong(format!(
                                "asked for operation {sequence} of group {group} without its part"
                            ));
                            None
                        }
                    };
                    let Some(whole) = whole else {
                        self.tell(board)?;
                        continue;
                    };
                    let lens = whole.payloads.iter().map(|payload| payload.bytes().len() as u64).collect();
                    wire::write(&mut self.writer, &Reply::Whole { lens })?;
                    for payload in &whole.payloads {
                        self.writer.write_all(payload.bytes())?;
                    }
                    self.writer.flush()?;
                }
                Request::Check => self.tell(board)?,
                Request::Fail { error } => board.fail_with(rank, error),
                Request::End => {
                    guest.has_ended = true;
                    return Ok(());
                }
                Request::Hello { .. } | Request::Join { .. } => {
                    wrong("greeted or joined twice on one connection".to_owned());
                }
            }
        }
    }

    /// Tells how the job goes.
    fn tell(&mut self, board: &LocalBoard) -> io::Result<()> {
        let is_asked_to_stop = self.shared.lock().is_asked_to_stop;
        self.reply(&match board.first_cause() {
            Some((rank, error)) => Reply::Failed { rank, error: error.told_by(rank) },
            None => Reply::Fine { is_asked_to_stop },
        })
    }
}
