//! What a checkpoint of a run holds, and the way of each box between a rank's memory and the outside.
//!
//! Model weights, both moments of every parameter in the parameter's own coordinates, and one cell of random streams a rank.

use crate::backend::{Backend, BackendError, View};
use crate::config::TrainConfig;
use crate::model::params::ParamTable;
use crate::rng::{InvalidStream, Stream, StreamCoordinates, StreamName};
use crate::step::{Program, Trainer};
use mesh::{
    DType, GroupKind, Indivisible, LocalShard, Placement, ProcessGroups, Region, StateEntry, StateKind,
    StateTable, TensorKey,
};
use std::collections::HashMap;

/// Key of the tensor of random streams.
pub const RNG_STATE: &str = "rng_state";
/// Prefix of the keys of masters, where weights are not f32 themselves.
pub const MASTER: &str = "optimizer.state.param.";
/// Prefix of the keys of first moments.
pub const EXP_AVG: &str = "optimizer.state.exp_avg.";
/// Prefix of the keys of second moments.
pub const EXP_AVG_SQ: &str = "optimizer.state.exp_avg_sq.";

/// A rank's state: the table, equal on all ranks, and where this rank keeps its share of each entry.
#[derive(Debug)]
pub struct RunState {
    table: StateTable,
    locals: Vec<Local>,
    prefix: String,
    rng_key: TensorKey,
}

/// This rank's share of an entry.
#[derive(Debug)]
struct Local {
    shard: LocalShard,
    memory: Memory,
}

#[derive(Debug)]
enum Memory {
    /// Rows and columns on the device; a vector is one column.
    Device(View),
    /// The random streams.
    Streams,
}

/// The random streams of a rank that depend on its coordinates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Streams {
    streams: [Option<Stream>; StreamName::ALL.len()],
}

impl Streams {
    /// Words of a cell: five streams of six words.
    pub(crate) const WORDS: usize = StreamName::ALL.len() * 6;

    /// Streams derived from the seed, this rank's coordinates and the iteration.
    pub fn derive(seed: u32, groups: &ProcessGroups, iteration: u64) -> Self {
        // Where a collection has no groups of a kind, its ranks are at position 0.
        let position = |kind| groups.position(kind).0;
        let shard = |kind| (groups.size(kind) > 1).then(|| position(kind));
        let coordinates = StreamCoordinates {
            pp: position(GroupKind::Pp),
            tp: position(GroupKind::Tp),
            ep: position(GroupKind::Ep),
            etp: position(GroupKind::ExptTp),
            gtp: shard(GroupKind::GtpRemat),
            egtp: shard(GroupKind::ExptGtpRemat),
        };
        let derive = |name| Stream::derive(seed, name, coordinates, iteration as u32);
        Streams { streams: StreamName::ALL.map(derive) }
    }

    /// The stream of a name, if the layout has it.
    pub fn get(&mut self, name: StreamName) -> Option<&mut Stream> {
        self.streams[name as usize].as_mut()
    }

    /// Words drawn from all of them.
    pub fn draws(&self) -> u64 {
        self.streams.iter().flatten().map(|stream| stream.draws()).sum()
    }

    /// Takes those of `saved` that this layout has; one that the saved layout did not have stays as it is.
    pub(crate) fn replace_by(&mut self, saved: Streams) {
        for (stream, saved) in self.streams.iter_mut().zip(saved.streams) {
            *stream = stream.map(|own| saved.unwrap_or(own));
        }
    }

    fn to_words(&self) -> Vec<u32> {
        self.streams.iter().flat_map(|stream| stream.map_or([0; 6], Stream::to_words)).collect()
    }

    /// Streams from the words of a cell.
    ///
    /// # Errors
    /// Words that no stream has.
    pub fn from_words(words: &[u32]) -> Result<Self, InvalidStream> {
        let mut streams = [None; StreamName::ALL.len()];
        for (stream, words) in streams.iter_mut().zip(words.chunks_exact(6)) {
            *stream = Stream::from_words(words.try_into().expect("chunks of six"))?;
        }
        Ok(Streams { streams })
    }
}

/// How a model of this configuration divides its parameters and their optimizer state over the ranks, by key; masters
/// too, whether it has them or not. Needs no rank.
pub fn placements(config: &TrainConfig) -> HashMap<TensorKey, Placement> {
    let mut placements = HashMap::new();
    for param in ParamTable::new(config).params {
        for name in [MASTER, EXP_AVG, EXP_AVG_SQ] {
            placements.insert(TensorKey::new(format!("{name}{}", param.key)), param.optimizer_placement());
        }
        placements.insert(param.key, param.placement);
    }
    placements
}

/// Where the cell of a rank's streams lies: (PP, TP, position in `dp_cp_gtp_remat`).
fn stream_placement(groups: &ProcessGroups) -> Placement {
    let grid = [GroupKind::Pp, GroupKind::Tp, GroupKind::DpCpGtpRemat]
        .map(|kind| (kind, u64::from(groups.size(kind))));
    Placement::cells(&grid, &[StreamName::ALL.len() as u64, 6])
}

impl RunState {
    /// The state of `trainer`'s rank. `prefix` stands before every key, for a second model in one job.
    ///
    /// # Errors
    /// A placement that the groups do not divide.
    pub fn new(trainer: &mut Trainer, prefix: &str) -> Result<Self, Indivisible> {
        let groups = trainer.groups().clone();
        let (program, _) = trainer.parts();
        let mut entries = Vec::new();
        let mut add = |key: String, kind, dtype, placement: Placement, memory| -> Result<(), Indivisible> {
            let local = Local { shard: placement.shard(&groups)?, memory };
            let key = TensorKey::new(format!("{prefix}{key}"));
            entries.push((StateEntry { key, kind, dtype, placement }, local));
            Ok(())
        };
        let Program { model, weights, optimizer, .. } = program;
        for (index, param) in model.table().params.iter().enumerate() {
            let weight = weights.homes()[index].weight;
            let weight = match param.placement.dims().len() {
                1 => weight.reshaped(weight.numel(), 1),
                _ => weight,
            };
            let rows = param.optimizer_placement();
            let owned = |part| Memory::Device(optimizer.bucket.in_part(index, part));
            let placement = param.placement.clone();
            add(param.key.to_string(), StateKind::Model, weight.dtype, placement, Memory::Device(weight))?;
            let moments = [(EXP_AVG, optimizer.exp_avg), (EXP_AVG_SQ, optimizer.exp_avg_sq)];
            for (name, part) in optimizer.master.map(|part| (MASTER, part)).into_iter().chain(moments) {
                let key = format!("{name}{}", param.key);
                add(key, StateKind::Optimizer, DType::F32, rows.clone(), owned(part))?;
            }
        }
        add(RNG_STATE.into(), StateKind::Rng, DType::U32, stream_placement(&groups), Memory::Streams)?;
        entries.sort_by(|(a, _), (b, _)| a.key.cmp(&b.key));
        let (entries, locals) = entries.into_iter().unzip();
        let table = StateTable::new(entries).expect("parameters have different keys");
        let rng_key = TensorKey::new(format!("{prefix}{RNG_STATE}"));
        Ok(RunState { table, locals, prefix: prefix.to_owned(), rng_key })
    }

    /// All entries, sorted by key; equal on all ranks.
    pub fn table(&self) -> &StateTable {
        &self.table
    }

    /// What stands before every key.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Key of the tensor of random streams.
    pub fn rng_key(&self) -> &TensorKey {
        &self.rng_key
    }

    /// What this rank holds of an entry.
    pub fn shard(&self, entry: usize) -> &LocalShard {
        &self.locals[entry].shard
    }

    /// Copies a box of this rank's share, in its own coordinates, out of memory; row-major.
    ///
    /// # Errors
    /// What the device says.
    pub fn read(
        &self,
        be: &mut dyn Backend,
        streams: &Streams,
        entry: usize,
        local: &Region,
        bytes: &mut [u8],
    ) -> Result<(), BackendError> {
        match &self.locals[entry].memory {
            Memory::Device(view) => be.download(sub_view(*view, local), bytes),
            Memory::Streams => {
                bytes.copy_from_slice(bytemuck::cast_slice(&streams.to_words()));
                Ok(())
            }
        }
    }

    /// Copies a box into this rank's share. Cells of random streams are not written here: what becomes of them is a
    /// question of policy.
    ///
    /// # Errors
    /// What the device says.
    pub fn write(
        &self,
        be: &mut dyn Backend,
        entry: usize,
        local: &Region,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        match &self.locals[entry].memory {
            Memory::Device(view) => be.upload(sub_view(*view, local), bytes),
            Memory::Streams => Ok(()),
        }
    }
}

/// A box of a matrix, or of a vector that lies there as one column.
fn sub_view(view: View, local: &Region) -> View {
    let rows = local.range(0);
    let view = view.row_range(rows.start as usize, rows.end as usize);
    match local.num_dims() {
        1 => view,
        _ => {
            let cols = local.range(1);
            view.col_range(cols.start as usize, cols.end as usize)
        }
    }
}
