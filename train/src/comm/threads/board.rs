//! What the threads of one world know of each other, under one lock: contributions by group and sequence number, who waits
//! for whom, and the first cause of failure.

use super::WorldOptions;
use super::reduce::Payload;
use crate::comm::board::{Board, Contributions, GroupIndex, ThreadId};
use crate::comm::{Blocked, CommError, Desync, GroupId, Membership, OpSignature};
use mesh::Rank;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The board of one process.
#[derive(Debug)]
pub(in crate::comm) struct LocalBoard {
    num_ranks: u32,
    options: WorldOptions,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    groups: Vec<PostedGroup>,
    threads: Vec<Thread>,
    /// Threads by rank that have not ended.
    live_threads: Vec<u32>,
    first_cause: Option<(Rank, CommError)>,
}

#[derive(Debug)]
struct Thread {
    rank: Rank,
    status: Status,
    wake: Arc<Condvar>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Running,
    /// Until the operation is whole: whoever makes it whole sets the status back to running.
    Blocked {
        group: GroupIndex,
        sequence: u64,
    },
    Ended,
}

#[derive(Debug)]
struct PostedGroup {
    id: GroupId,
    ranks: Vec<Rank>,
    /// Number of the next operation of each member.
    next: Vec<u64>,
    /// Operations that somebody has issued and not everybody has read.
    cells: BTreeMap<u64, Cell>,
}

#[derive(Debug)]
struct Cell {
    signature: OpSignature,
    first: Rank,
    since: Instant,
    posted: Vec<Option<Payload>>,
    whole: Option<Arc<Contributions>>,
    readers: Readers,
    unread: usize,
}

/// Who collects an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Readers {
    All,
    None,
}

impl LocalBoard {
    pub(in crate::comm) fn new(num_ranks: u32, options: WorldOptions) -> Self {
        let thread = |rank| Thread { rank, status: Status::Running, wake: Arc::default() };
        let state = State {
            groups: Vec::new(),
            threads: (0..num_ranks).map(Rank).map(thread).collect(),
            live_threads: vec![1; num_ranks as usize],
            first_cause: None,
        };
        LocalBoard { num_ranks, options, state: Mutex::new(state) }
    }

    fn add(
        &self,
        group: GroupIndex,
        position: usize,
        signature: OpSignature,
        payload: Payload,
        readers: Readers,
    ) -> Result<u64, CommError> {
        let mut state = self.lock();
        state.check()?;
        let posted = &mut state.groups[group.0];
        let rank = posted.ranks[position];
        let sequence = posted.next[position];
        #[cfg(test)]
        let payload = {
            let mut faults = self.options.faults.iter();
            let fault = faults
                .find(|fault| (fault.rank, fault.kind, fault.sequence) == (rank, posted.id.kind, sequence));
            let kept = match fault {
                Some(fault) => fault.effect.on(payload),
                None => Some(payload),
            };
            let Some(payload) = kept else {
                let why = format!("injected at operation {sequence} of {}", posted.id);
                return Err(state.fail(rank, CommError::PeerFailed { rank, why }));
            };
            payload
        };
        posted.next[position] += 1;
        let num_members = posted.ranks.len();
        let cell = posted.cells.entry(sequence).or_insert_with(|| Cell {
            signature,
            first: rank,
            since: Instant::now(),
            posted: (0..num_members).map(|_| None).collect(),
            whole: None,
            readers,
            unread: num_members,
        });
        if cell.readers != readers {
            let why =
                format!("announces operation {sequence} of {} that others post, or posts it", posted.id);
            return Err(state.fail(rank, CommError::PeerFailed { rank, why }));
        }
        if cell.signature != signature {
            let desync = Desync {
                group: posted.id.clone(),
                sequence,
                rank: cell.first,
                issued: cell.signature,
                other: rank,
                other_issued: signature,
            };
            return Err(state.fail(rank, CommError::Desync(Box::new(desync))));
        }
        cell.posted[position] = Some(payload);
        let is_whole = cell.posted.iter().all(Option::is_some);
        match readers {
            Readers::All if is_whole => {
                let payloads = std::mem::take(&mut cell.posted).into_iter().flatten().collect();
                cell.whole = Some(Arc::new(Contributions::of(payloads)));
                state.wake(|status| status == Status::Blocked { group, sequence });
            }
            Readers::None if is_whole => {
                posted.cells.remove(&sequence);
            }
            Readers::All => {}
            // Whoever it waits for may have ended.
            Readers::None => {
                if state.has_ended(state.missing(group, sequence)) {
                    return Err(state.fail_deadlocked(rank));
                }
            }
        }
        Ok(sequence)
    }

    fn block_until_whole(
        &self,
        thread: ThreadId,
        group: GroupIndex,
        sequence: u64,
    ) -> Result<MutexGuard<'_, State>, CommError> {
        let deadline = Instant::now() + self.options.timeout;
        let mut state = self.lock();
        let (rank, wake) = (state.threads[thread.0].rank, Arc::clone(&state.threads[thread.0].wake));
        loop {
            // What is whole is taken even if somebody has failed since: all members then know the same.
            let is_kept = state.groups[group.0].cells.contains_key(&sequence);
            if is_kept && state.is_whole(group, sequence) {
                return Ok(state);
            }
            state.check()?;
            if !is_kept {
                return Ok(state);
            }
            state.threads[thread.0].status = Status::Blocked { group, sequence };
            if state.is_stuck() {
                return Err(state.fail_deadlocked(rank));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let blocked = state.blocked();
                return Err(state.fail(rank, CommError::TimedOut { limit: self.options.timeout, blocked }));
            }
            state = wake.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The group of this membership, as `rank` names it.
    ///
    /// # Errors
    /// Why there is no such group.
    pub(in crate::comm) fn group_of(
        &self,
        rank: Rank,
        Membership { id, ranks, position }: &Membership,
    ) -> Result<GroupIndex, String> {
        if let Some(rank) = ranks.iter().find(|rank| rank.0 >= self.num_ranks) {
            return Err(format!("{id} has rank {rank}, the world has {} ranks", self.num_ranks));
        }
        if ranks.get(*position) != Some(&rank) {
            return Err(format!("rank {rank} is not at position {position} of {id}"));
        }
        let mut state = self.lock();
        match state.groups.iter().position(|group| group.id == *id) {
            Some(known) if state.groups[known].ranks == *ranks => Ok(GroupIndex(known)),
            Some(_) => Err(format!("{id} names two different groups: give each model a name of its own")),
            None => {
                let (next, cells) = (vec![0; ranks.len()], BTreeMap::new());
                state.groups.push(PostedGroup { id: id.clone(), ranks: ranks.clone(), next, cells });
                Ok(GroupIndex(state.groups.len() - 1))
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A rank that panics must not take the others' first cause away; the state is valid between any two lines.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Board for LocalBoard {
    fn num_ranks(&self) -> u32 {
        self.num_ranks
    }

    fn group(&self, thread: ThreadId, membership: &Membership) -> GroupIndex {
        let rank = self.lock().threads[thread.0].rank;
        self.group_of(rank, membership).unwrap_or_else(|why| panic!("{why}"))
    }

    fn post(
        &self,
        thread: ThreadId,
        group: GroupIndex,
        position: usize,
        signature: OpSignature,
        payload: Payload,
    ) -> Result<u64, CommError> {
        #[cfg(test)]
        super::faults::delay(self.options.jitter, thread);
        let sequence = self.add(group, position, signature, payload, Readers::All)?;
        // Blocks only if the world bounds incomplete operations.
        if let Some(bound) = self.options.max_incomplete
            && let Some(sequence) = sequence.checked_sub(bound)
        {
            drop(self.block_until_whole(thread, group, sequence)?);
        }
        Ok(sequence)
    }

    fn announce(
        &self,
        _: ThreadId,
        group: GroupIndex,
        position: usize,
        signature: OpSignature,
    ) -> Result<u64, CommError> {
        self.add(group, position, signature, Payload::zeros(0), Readers::None)
    }

    fn collect(
        &self,
        thread: ThreadId,
        group: GroupIndex,
        sequence: u64,
    ) -> Result<Arc<Contributions>, CommError> {
        let mut state = self.block_until_whole(thread, group, sequence)?;
        let cells = &mut state.groups[group.0].cells;
        let cell = cells.get_mut(&sequence).expect("an operation is kept until this member has read it");
        let contributions = Arc::clone(cell.whole.as_ref().expect("it was waited for"));
        cell.unread -= 1;
        if cell.unread == 0 {
            cells.remove(&sequence);
        }
        Ok(contributions)
    }

    fn start_thread(&self, rank: Rank) -> ThreadId {
        let mut state = self.lock();
        state.live_threads[rank.index()] += 1;
        let thread = Thread { rank, status: Status::Running, wake: Arc::default() };
        match state.threads.iter().position(|thread| thread.status == Status::Ended) {
            Some(free) => {
                state.threads[free] = thread;
                ThreadId(free)
            }
            None => {
                state.threads.push(thread);
                ThreadId(state.threads.len() - 1)
            }
        }
    }

    fn end_thread(&self, thread: ThreadId) {
        let mut state = self.lock();
        let rank = state.threads[thread.0].rank;
        state.threads[thread.0].status = Status::Ended;
        state.live_threads[rank.index()] -= 1;
        if state.is_stuck() || state.is_announced_in_vain() {
            state.fail_deadlocked(rank);
        }
    }

    fn fail_with(&self, rank: Rank, error: CommError) {
        self.lock().fail(rank, error);
    }

    fn first_cause(&self) -> Option<(Rank, CommError)> {
        self.lock().first_cause.clone()
    }

    fn expire(&self) {
        let limit = self.options.timeout;
        let mut state = self.lock();
        let mut late = None;
        for (index, group) in state.groups.iter().enumerate() {
            let announced = group.cells.iter().filter(|(_, cell)| cell.readers == Readers::None);
            let mut old = announced.filter(|(_, cell)| cell.since.elapsed() > limit);
            late = late
                .or_else(|| old.next().map(|(sequence, cell)| (GroupIndex(index), *sequence, cell.first)));
        }
        if let Some((group, sequence, rank)) = late {
            let blocked = vec![state.waiting(rank, group, sequence)];
            state.fail(rank, CommError::TimedOut { limit, blocked });
        }
    }

    fn timeout(&self) -> Duration {
        self.options.timeout
    }

    fn check(&self) -> Result<(), CommError> {
        self.lock().check()
    }

    #[cfg(test)]
    fn num_operations(&self) -> usize {
        self.lock().groups.iter().map(|group| group.cells.len()).sum()
    }
}

impl State {
    fn check(&self) -> Result<(), CommError> {
        self.first_cause.as_ref().map_or(Ok(()), |(_, error)| Err(error.clone()))
    }

    /// Ends the job with this cause unless there is an earlier one; returns the cause that holds.
    fn fail(&mut self, rank: Rank, error: CommError) -> CommError {
        let (_, first) = self.first_cause.get_or_insert((rank, error));
        let first = first.clone();
        self.wake(|status| matches!(status, Status::Blocked { .. }));
        first
    }

    fn fail_deadlocked(&mut self, rank: Rank) -> CommError {
        let num_ranks = self.live_threads.len() as u32;
        let ended = (0..num_ranks).map(Rank).filter(|rank| self.live_threads[rank.index()] == 0).collect();
        let blocked = self.blocked();
        self.fail(rank, CommError::Deadlock { blocked, ended })
    }

    fn wake(&mut self, which: impl Fn(Status) -> bool) {
        for thread in self.threads.iter_mut().filter(|thread| which(thread.status)) {
            thread.status = Status::Running;
            thread.wake.notify_one();
        }
    }

    /// Whether every member has posted; an operation that all have read is gone.
    fn is_whole(&self, group: GroupIndex, sequence: u64) -> bool {
        self.groups[group.0].cells.get(&sequence).is_none_or(|cell| cell.whole.is_some())
    }

    /// Members that have not posted an operation of which this thread waits.
    fn missing(&self, group: GroupIndex, sequence: u64) -> impl Iterator<Item = Rank> {
        let group = &self.groups[group.0];
        let posted = &group.cells[&sequence].posted;
        group.ranks.iter().zip(posted).filter(|(_, posted)| posted.is_none()).map(|(rank, _)| *rank)
    }

    fn has_ended(&self, mut ranks: impl Iterator<Item = Rank>) -> bool {
        ranks.any(|rank| self.live_threads[rank.index()] == 0)
    }

    /// Whether somebody who is blocked waits in vain: for a rank that has ended, or because nobody is left that runs.
    fn is_stuck(&self) -> bool {
        let mut runs = false;
        let mut waits = false;
        for thread in &self.threads {
            match thread.status {
                Status::Running => runs = true,
                Status::Ended => {}
                Status::Blocked { group, sequence } => {
                    waits = true;
                    if self.has_ended(self.missing(group, sequence)) {
                        return true;
                    }
                }
            }
        }
        waits && !runs
    }

    /// Whether a member has announced what a rank that has ended never will.
    fn is_announced_in_vain(&self) -> bool {
        self.groups.iter().zip(0..).any(|(group, index)| {
            let mut announced = group.cells.iter().filter(|(_, cell)| cell.readers == Readers::None);
            announced.any(|(sequence, _)| self.has_ended(self.missing(GroupIndex(index), *sequence)))
        })
    }

    /// Everyone who waits: in an operation, or for members that announce what others have announced.
    fn blocked(&self) -> Vec<Blocked> {
        let mut blocked = Vec::new();
        for thread in &self.threads {
            let Status::Blocked { group, sequence } = thread.status else { continue };
            blocked.push(self.waiting(thread.rank, group, sequence));
        }
        for (index, group) in self.groups.iter().enumerate() {
            let announced = group.cells.iter().filter(|(_, cell)| cell.readers == Readers::None);
            blocked.extend(announced.map(|(at, cell)| self.waiting(cell.first, GroupIndex(index), *at)));
        }
        blocked.sort_by_key(|blocked| blocked.rank);
        blocked
    }

    fn waiting(&self, rank: Rank, group: GroupIndex, sequence: u64) -> Blocked {
        Blocked {
            rank,
            group: self.groups[group.0].id.clone(),
            sequence,
            operation: self.groups[group.0].cells[&sequence].signature,
            missing: self.missing(group, sequence).collect(),
        }
    }
}
