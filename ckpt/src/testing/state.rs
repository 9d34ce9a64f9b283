//! Ranks as threads, with buffers whose every element is a function of its place in the whole tensor.

use crate::manifest::{Counters, Header, Random, RunName, RunRecord};
use crate::open::Checkpoint;
use crate::plan::{LoadPlan, Strictness, own_shards, plan_load};
use crate::saver::{Exchange, Readers, SaveError, SaveReport, Saver, Snapshot};
use crate::scatter::{BoxIn, copy_box};
use crate::source::{LoadError, StateSource};
use crate::store::Store;
use mesh::{DType, GroupTable, ParallelLayout, ProcessGroups, Region, Shape, StateTable};
use serde_json::json;
use std::collections::VecDeque;
use std::error::Error;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// The ranks of one model, as threads that can tell each other something.
pub struct Ranks {
    table: Arc<GroupTable>,
    inboxes: Arc<Inboxes>,
}

/// What ranks sent and others have not taken yet, by receiver and sender, both as positions among the ranks.
struct Inboxes {
    sent: Mutex<Vec<Vec<VecDeque<Vec<u8>>>>>,
    arrived: Condvar,
}

impl Ranks {
    /// The ranks of `table`.
    pub fn new(table: GroupTable) -> Ranks {
        let num_ranks = table.ranks().len();
        let sent = Mutex::new(vec![vec![VecDeque::new(); num_ranks]; num_ranks]);
        Ranks { table: Arc::new(table), inboxes: Arc::new(Inboxes { sent, arrived: Condvar::new() }) }
    }

    /// The exchange of the rank with this position among the model's ranks. Fails where another rank ended, or takes more
    /// than a minute.
    pub fn exchange(&self, position: usize) -> Exchange {
        let inboxes = Arc::clone(&self.inboxes);
        Box::new(move |bytes, readers| {
            let mut sent = inboxes.sent.lock().map_err(|_| "a rank panicked")?;
            let num_readers = if readers == Readers::All { sent.len() } else { 1 };
            sent[..num_readers].iter_mut().for_each(|inbox| inbox[position].push_back(bytes.to_vec()));
            inboxes.arrived.notify_all();
            if position >= num_readers {
                return Ok(Vec::new());
            }
            let waits =
                |sent: &mut Vec<Vec<VecDeque<Vec<u8>>>>| sent[position].iter().any(VecDeque::is_empty);
            let (mut sent, _) = (inboxes.arrived.wait_timeout_while(sent, Duration::from_mins(1), waits))
                .map_err(|_| "a rank panicked")?;
            let all = sent[position].iter_mut().map(VecDeque::pop_front).collect::<Option<Vec<_>>>();
            all.ok_or_else(|| "a rank did not send anything for a minute".into())
        })
    }

    /// What `body` returns on each rank, in the order of ranks; it gets the rank's groups and its exchange.
    pub fn run<T: Send>(&self, body: impl Fn(ProcessGroups, Exchange) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let spawn = |(position, rank): (usize, &mesh::Rank)| {
                let (groups, body) = (self.table.for_rank(*rank), &body);
                scope.spawn(move || body(groups, self.exchange(position)))
            };
            let threads: Vec<_> = self.table.ranks().iter().enumerate().map(spawn).collect();
            threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
        })
    }
}

/// A header of `iteration` whose other values are plain.
pub fn header(iteration: u64, layout: ParallelLayout) -> Header {
    Header {
        iteration,
        created: "2026-01-01T00:00:00Z".to_owned(),
        writer: RunName {
            run: "run-1".to_owned(),
            host: "host-1".to_owned(),
            pid: 4711,
            program: "test".to_owned(),
        },
        run: RunRecord {
            counters: Counters {
                consumed_train_samples: 8 * iteration,
                optimizer_steps: iteration,
                ..Counters::default()
            },
            scheduler: json!({ "lr": 0.1 }),
            groups: json!({}),
            layout,
            numerics: json!({}),
            config: json!({}),
            random: Random { algorithm: "philox4x32-10".to_owned(), seed: 1234, ordinal: 8 * iteration },
            data: json!({}),
        },
        partial: Vec::new(),
    }
}

/// LABEL fill: element i of the tensor with ordinal t is t · 65,536 + i, in the tensor's type: exact in F32 below 2²⁴,
/// the low bytes of the number in any other type.
pub fn label_bytes(ordinal: usize, dtype: DType, global_shape: &Shape, region: &Region) -> Vec<u8> {
    let mut bytes = Vec::new();
    for run in region.runs(global_shape) {
        for element in run {
            let label = ordinal as u64 * 65_536 + element;
            match dtype {
                DType::F32 => bytes.extend((label as f32).to_le_bytes()),
                _ => bytes.extend(&u128::from(label).to_le_bytes()[..dtype.size_bytes()]),
            }
        }
    }
    bytes
}

/// One rank's buffers, an entry of the state table each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankMemory {
    /// Row-major, padding included.
    pub buffers: Vec<Vec<u8>>,
    shapes: Vec<Shape>,
}

impl RankMemory {
    /// Buffers of `groups`' rank, every byte `0xEE`.
    pub fn empty(table: &StateTable, groups: &ProcessGroups) -> RankMemory {
        let shape =
            |entry: &mesh::StateEntry| entry.placement.shard(groups).expect("the layout divides").shape;
        let shapes: Vec<Shape> = table.entries().iter().map(shape).collect();
        let bytes = |(entry, shape): (&mesh::StateEntry, &Shape)| {
            vec![0xEE; shape.numel() as usize * entry.dtype.size_bytes()]
        };
        RankMemory { buffers: table.entries().iter().zip(&shapes).map(bytes).collect(), shapes }
    }

    /// The same with LABEL fill where the rank holds elements.
    pub fn labelled(table: &StateTable, groups: &ProcessGroups) -> RankMemory {
        let mut memory = RankMemory::empty(table, groups);
        for own in own_shards(table, groups).expect("the layout divides") {
            let shard = &own.shard;
            let bytes = label_bytes(own.entry, shard.dtype, &shard.global_shape, &shard.region);
            memory.write(table, own.entry, &own.local, &bytes);
        }
        memory
    }

    fn write(&mut self, table: &StateTable, entry: usize, local: &Region, bytes: &[u8]) {
        let (width, shape) = (table.entries()[entry].dtype.size_bytes(), local.shape());
        let whole = Region::whole(&shape);
        let to = BoxIn { shape: &self.shapes[entry], region: local };
        copy_box(bytes, BoxIn { shape: &shape, region: &whole }, &mut self.buffers[entry], to, width);
    }

    fn read(&self, table: &StateTable, entry: usize, local: &Region, bytes: &mut [u8]) {
        let (width, shape) = (table.entries()[entry].dtype.size_bytes(), local.shape());
        let whole = Region::whole(&shape);
        let from = BoxIn { shape: &self.shapes[entry], region: local };
        copy_box(&self.buffers[entry], from, bytes, BoxIn { shape: &shape, region: &whole }, width);
    }
}

/// Saves `memory` as one rank of several.
///
/// # Errors
/// As [`Saver::save`].
pub fn save(
    store: &Store,
    header: Header,
    table: &StateTable,
    groups: &ProcessGroups,
    exchange: Exchange,
    memory: &RankMemory,
) -> Result<SaveReport, SaveError> {
    save_through(&Saver::new(store.clone(), exchange), header, table, groups, memory)
}

/// The same through a saver of the caller's.
///
/// # Errors
/// As [`Saver::save`].
pub fn save_through(
    saver: &Saver,
    header: Header,
    table: &StateTable,
    groups: &ProcessGroups,
    memory: &RankMemory,
) -> Result<SaveReport, SaveError> {
    let mut read =
        |entry: usize, local: &Region, bytes: &mut [u8]| -> Result<(), Box<dyn Error + Send + Sync>> {
            memory.read(table, entry, local, bytes);
            Ok(())
        };
    saver.save(Snapshot { header, table, groups, read: &mut read })
}

/// Fills the memory of one rank from a checkpoint.
///
/// # Errors
/// As [`StateSource::read`].
pub fn load(
    checkpoint: &Checkpoint,
    table: &StateTable,
    groups: &ProcessGroups,
) -> Result<(RankMemory, LoadPlan), LoadError> {
    let own = own_shards(table, groups).expect("the layout divides");
    let wants: Vec<_> = own.iter().map(|own| own.shard.clone()).collect();
    let plan = plan_load(checkpoint.catalog(), &wants, &Strictness::exact(), &|_| true)
        .expect("the state is the one saved");
    let mut memory = RankMemory::empty(table, groups);
    checkpoint.read(&plan, &mut |target, within, bytes| {
        let own = &own[target];
        memory.write(table, own.entry, &within.shifted_by(own.local.lo()), bytes);
        Ok(())
    })?;
    Ok((memory, plan))
}
