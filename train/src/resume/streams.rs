//! Random streams, one cell a rank: they go on, or a policy says what becomes of them.

use crate::resume::{Resume, ResumeError};
use crate::rng::StreamName;
use crate::state::{RunState, Streams};
use crate::step::Trainer;
use ckpt::{Differing, LoadPlanError, Mismatch, StoredTensor};
use mesh::{Axis, DType, GroupKind, GroupTable, ParallelLayout, ProcessGroups, Rank, Region, Shape};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What becomes of random streams whose coordinates are not those of the checkpoint. One rule for all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RngPolicy {
    /// Every rank derives its streams from seed, coordinate and iteration.
    #[default]
    Derive,
    /// Ranks whose coordinates exist in the checkpoint keep their streams, the others derive.
    Existing,
    /// Refuse.
    Strict,
}

/// Where the cell of a rank's streams lies in the saved tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamCell {
    /// Pipeline stage.
    pub pp: u32,
    /// Tensor parallel rank.
    pub tp: u32,
    /// Position in the group of this name.
    pub dp_cp_gtp_remat: u32,
}

/// What became of a rank's streams.
pub(super) struct Continued {
    /// Whether every stream continues, or none was ever drawn from.
    pub(super) is_whole: bool,
    /// Whether memory holds the checkpoint's cells, all of them.
    pub(super) cells: bool,
    /// What a person should know of it.
    pub(super) note: Option<String>,
}

/// Restores this rank's cell of random streams, or applies the policy where the layout changed.
pub(super) fn load_streams(
    resume: &Resume,
    trainer: &Trainer,
    state: &RunState,
    streams: &mut Streams,
) -> Result<Continued, ResumeError> {
    let commit = resume.source.commit();
    let groups = trainer.groups();
    let key = state.rng_key();
    let Some(stored) = resume.source.catalog().tensor(key) else {
        let note = "the checkpoint has no random streams; every rank derived its own".to_owned();
        return Ok(Continued { is_whole: false, cells: false, note: Some(note) });
    };
    let saved = &commit.run.layout;
    let peers = saved.gtp() * saved.num_weight_replicas();
    let expected = [saved.pp(), saved.tp(), peers, StreamName::ALL.len() as u32, 6].map(u64::from);
    if stored.shape.dims() != expected {
        let (key, found) = (key.clone(), stored.shape.clone());
        return Err(ResumeError::StreamShape { key, found, expected: Shape::new(&expected) });
    }
    let wanted = trainer.config().parallel.layout();
    let predecessor = |rank: &Rank| predecessor(saved, wanted, *rank);
    // The same on every rank.
    let missing = groups.table().ranks().iter().find(|rank| predecessor(rank).is_none());
    let same_grid = saved.axis_sizes() == wanted.axis_sizes() && missing.is_none();
    if !same_grid && resume.rng_policy == RngPolicy::Strict {
        let missing = missing.map(|rank| StreamCell::of(&groups.of(*rank)));
        return Err(ResumeError::MissingStream { saved: *saved, wanted: *wanted, missing });
    }
    let keeps = same_grid || resume.rng_policy == RngPolicy::Existing;
    let kept = predecessor(&groups.rank()).filter(|_| keeps);
    if let Some(rank) = kept {
        let table = Arc::new(GroupTable::new(groups.table().model(), saved));
        let cell = StreamCell::of(&table.for_rank(rank));
        let (lo, hi) = (cell.corner(), cell.corner().map(|at| at + 1));
        streams.replace_by(Streams::from_words(&read_cells(resume, stored, &lo, &hi)?)?);
    }
    let restore = kept.is_some();
    if same_grid {
        let cells = saved.sizes().order == wanted.sizes().order;
        return Ok(Continued { is_whole: true, cells, note: None });
    }
    // One rank looks through all cells: streams that nobody drew from lose nothing when they are derived.
    let is_first = groups.rank() == groups.table().ranks()[0];
    let drawn = is_first && any_draws(resume, stored)?;
    let told =
        trainer.comms().tp_dp_cp.gather_bytes("load.streams", &[u8::from(restore), u8::from(drawn)])?;
    let drawn = told.iter().any(|told| told[1] == 1);
    let (kept, all) = (told.iter().filter(|told| told[0] == 1).count(), told.len());
    let note = match kept {
        0 => {
            let s = if all == 1 { "" } else { "s" };
            format!("{all} per-rank random stream{s} derived anew: the layout changed")
        }
        kept => format!("{kept} ranks kept their random streams, {} derived new ones", all - kept),
    };
    Ok(Continued { is_whole: !drawn, cells: false, note: Some(note) })
}

/// The rank of `saved` that had the coordinates which `rank` has in `wanted`, dense and of experts.
fn predecessor(saved: &ParallelLayout, wanted: &ParallelLayout, rank: Rank) -> Option<Rank> {
    let coordinate = |axis| wanted.grid().coordinate(rank, axis);
    let found = saved.grid().rank(coordinate)?;
    let experts = (wanted.expert_grid(), saved.expert_grid());
    let is_same = |axis| experts.0.coordinate(rank, axis) == experts.1.coordinate(found, axis);
    [Axis::Etp, Axis::Ep, Axis::Egtp].into_iter().all(is_same).then_some(found)
}

impl StreamCell {
    fn of(groups: &ProcessGroups) -> Self {
        let position = |kind| groups.position(kind).0;
        StreamCell {
            pp: position(GroupKind::Pp),
            tp: position(GroupKind::Tp),
            dp_cp_gtp_remat: position(GroupKind::DpCpGtpRemat),
        }
    }

    /// Along the first three dims of the tensor of streams.
    fn corner(self) -> [u64; 3] {
        [self.pp, self.tp, self.dp_cp_gtp_remat].map(u64::from)
    }
}

/// Whether any saved stream was ever drawn from.
fn any_draws(resume: &Resume, stored: &StoredTensor) -> Result<bool, ResumeError> {
    let words = read_cells(resume, stored, &[0; 3], &stored.shape.dims()[..3])?;
    let mut drawn = false;
    for cell in words.chunks_exact(Streams::WORDS) {
        drawn |= Streams::from_words(cell)?.draws() > 0;
    }
    Ok(drawn)
}

/// The words of the cells between two coordinates.
fn read_cells(
    resume: &Resume,
    stored: &StoredTensor,
    lo: &[u64],
    hi: &[u64],
) -> Result<Vec<u32>, ResumeError> {
    let cell = &stored.shape.dims()[3..];
    if stored.dtype != DType::U32 {
        let dtypes = vec![Differing { key: stored.key.clone(), stored: stored.dtype, wanted: DType::U32 }];
        return Err(LoadPlanError::Mismatch(Mismatch { dtypes, ..Mismatch::default() }.into()).into());
    }
    let region = Region::new(&[lo, &[0, 0]].concat(), &[hi, cell].concat());
    let mut words = vec![0u32; region.numel() as usize];
    resume.source.read_box(&stored.key, &region, bytemuck::cast_slice_mut(&mut words))?;
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mesh::{ConfiguredCp, LayoutSizes, RankOrder};

    fn layout(order: RankOrder, dp: u32) -> ParallelLayout {
        ParallelLayout::new(LayoutSizes {
            world_size: 8 * dp,
            rank_offset: 0,
            tp: 2,
            pp: 1,
            cp: ConfiguredCp(2),
            gtp: 2,
            gtp_sequence_shards: 1,
            order,
        })
        .expect("8 · DP ranks")
    }

    #[test]
    fn another_order_of_ranks_moves_every_cell_with_its_coordinates() {
        let saved = layout(RankOrder::GtpInsideCp, 2);
        let wanted = layout(RankOrder::CpInsideGtp, 2);
        let mut moved = 0;
        for rank in wanted.grid().ranks() {
            let found = predecessor(&saved, &wanted, rank).unwrap();
            for (axis, _) in wanted.grid().axes() {
                assert_eq!(saved.grid().coordinate(found, *axis), wanted.grid().coordinate(rank, *axis));
            }
            moved += usize::from(found != rank);
        }
        assert_eq!(moved, 8, "where CP and GTP shard are not equal");
        let grown = layout(RankOrder::CpInsideGtp, 3);
        let without = grown.grid().ranks().filter(|rank| predecessor(&saved, &grown, *rank).is_none());
        assert_eq!(without.collect::<Vec<_>>(), (16..24).map(Rank).collect::<Vec<_>>());
    }
}
