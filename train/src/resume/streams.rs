//! Random streams, one cell a rank: they go on, or a policy says what becomes of them.

use crate::resume::{Resume, ResumeError};
use crate::rng::StreamName;
use crate::state::{RunState, Streams};
use crate::step::Trainer;
use ckpt::{Differing, LoadPlanError, Mismatch, StoredTensor};
use mesh::{DType, GroupKind, ProcessGroups, Region, Shape};
use serde::{Deserialize, Serialize};

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
    let cell = StreamCell::of(groups);
    let same_grid = saved.axis_sizes() == trainer.config().parallel.layout().axis_sizes();
    let exists =
        |cell: &StreamCell| cell.corner().iter().zip(stored.shape.dims()).all(|(at, extent)| at < extent);
    if !same_grid && resume.rng_policy == RngPolicy::Strict {
        // The same on every rank.
        let cells = groups.table().ranks().iter().map(|rank| StreamCell::of(&groups.of(*rank)));
        let missing = cells.into_iter().find(|cell| !exists(cell));
        let (saved, wanted) = (*saved, *trainer.config().parallel.layout());
        return Err(ResumeError::MissingStream { saved, wanted, missing });
    }
    let restore = same_grid || (resume.rng_policy == RngPolicy::Existing && exists(&cell));
    if restore {
        let (lo, hi) = (cell.corner(), cell.corner().map(|at| at + 1));
        *streams = Streams::from_words(&read_cells(resume, stored, &lo, &hi)?)?;
    }
    if same_grid {
        return Ok(Continued { is_whole: true, cells: true, note: None });
    }
    // One rank looks through all cells: streams that nobody drew from lose nothing when they are derived.
    let is_first = groups.rank() == groups.table().ranks()[0];
    let drawn = is_first && any_draws(resume, stored)?;
    let told =
        trainer.comms().tp_dp_cp.gather_bytes("load.streams", &[u8::from(restore), u8::from(drawn)])?;
    let drawn = told.iter().any(|told| told[1] == 1);
    let (kept, all) = (told.iter().filter(|told| told[0] == 1).count(), told.len());
    let note = match kept {
        0 => format!("{all} per-rank random streams derived anew: the layout changed"),
        kept => format!("{kept} ranks kept their random streams, {} derived new ones", all - kept),
    };
    Ok(Continued { is_whole: !drawn, cells: false, note: Some(note) })
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
