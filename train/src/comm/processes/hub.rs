//! The hub: one process keeps the board, and a thread of it acts for each connection of a rank.

use super::wire::{self, Place, Reply, Request};
use crate::comm::CommError;
use crate::comm::board::{Board, GroupIndex, ThreadId};
use crate::comm::error::list;
use crate::comm::threads::{LocalBoard, WorldOptions};
use mesh::Rank;
use std::io::{self, BufReader, BufWriter, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How often it looks for new connections, and for ranks that are late.
const INTERVAL: Duration = Duration::from_millis(20);
/// How long ranks of a job that has failed may take to hear of it.
const GRACE: Duration = Duration::from_secs(5);

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

    /// Counts a rank in and waits until all have come.
    fn meet(&self, rank: Rank, num_ranks: u32) -> Result<(), String> {
        let of_job = self.board.num_ranks();
        if num_ranks != of_job {
            return Err(format!("rank {rank} is of {num_ranks} ranks, the job has {of_job}"));
        }
        let mut guests = self.lock();
        match guests.has_joined.get_mut(rank.index()) {
            None => return Err(format!("there is no rank {rank} among {num_ranks}")),
            Some(true) => return Err(format!("rank {rank} has joined already")),
            Some(has_joined) => *has_joined = true,
        }
        self.changed.notify_all();
        let (started, limit) = (Instant::now(), self.board.timeout());
        loop {
            let missing = guests.has_joined.iter().zip(0..).filter(|(has_joined, _)| !**has_joined);
            let missing: Vec<Rank> = missing.map(|(_, rank)| Rank(rank)).collect();
            if missing.is_empty() {
                return Ok(());
            }
            self.board.check().map_err(|error| error.to_string())?;
            if started.elapsed() > limit {
                let why = format!("did not join within {limit:?}; missing: {}", list(&missing));
                self.board
                    .fail_with(missing[0], CommError::PeerFailed { rank: missing[0], why: why.clone() });
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
            self.board.fail(self.rank, &"its process ended, or cannot be reached any more");
        }
        if let Some(thread) = self.thread {
            self.board.end_thread(thread);
        }
    }
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
        if place == Place::Rank
            && let Err(why) = shared.meet(rank, num_ranks)
        {
            return self.refuse(why);
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

    /// Does what the rank asks until it ends.
    fn act_for(&mut self, guest: &mut Guest) -> io::Result<()> {
        let (board, rank) = (guest.board, guest.rank);
        let thread = guest.thread.unwrap_or(ThreadId(rank.index()));
        let mut groups: Vec<GroupIndex> = Vec::new();
        let unknown = || io::Error::other("a group that was not named");
        loop {
            // That the job has failed is told where an answer is expected.
            match wire::read(&mut self.reader)? {
                Request::Group { membership } => groups.push(board.group(thread, &membership)),
                Request::Post { group, position, signature, len } => {
                    let group = *groups.get(group).ok_or_else(unknown)?;
                    let payload = wire::read_payload(&mut self.reader, len)?;
                    let _ = board.post(thread, group, position, signature, payload);
                }
                Request::Announce { group, position, signature } => {
                    let group = *groups.get(group).ok_or_else(unknown)?;
                    let _ = board.announce(thread, group, position, signature);
                }
                Request::Collect { group, sequence } => {
                    let group = *groups.get(group).ok_or_else(unknown)?;
                    let Ok(whole) = board.collect(thread, group, sequence) else {
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
                Request::Hello { .. } | Request::Join { .. } => return Err(io::Error::other("said twice")),
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
