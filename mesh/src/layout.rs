//! `ParallelLayout`: checked degrees, the weight view and the token view of the same ranks, and every derived size.
//!
//! Resolving what a user said into these sizes is `args.rs`; which ranks form which group is `groups.rs`.

use crate::axis::{Axis, Grid};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The context-parallel degree that was asked for: replicas of a weight shard that share a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ConfiguredCp(pub u32);

/// The context-parallel degree that attention and slicing use: configured CP times sequence shards inside GTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RuntimeCp(pub u32);

/// Where configured CP stands among the dense axes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum RankOrder {
    /// TP, GTP-sequence, GTP-batch, CP, DP, PP.
    #[default]
    GtpInsideCp,
    /// TP, CP, GTP-sequence, GTP-batch, DP, PP: an older order, for comparing rank by rank with runs that used it.
    CpInsideGtp,
}

impl fmt::Display for RankOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            RankOrder::GtpInsideCp => "gtp-inside-cp",
            RankOrder::CpInsideGtp => "cp-inside-gtp",
        })
    }
}

/// The free sizes of a dense layout; everything else follows from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayoutSizes {
    /// Ranks of this grid.
    pub world_size: u32,
    /// First rank of this grid in the job.
    pub rank_offset: u32,
    /// Tensor parallel degree.
    pub tp: u32,
    /// Pipeline parallel degree.
    pub pp: u32,
    /// Configured context parallel degree.
    pub cp: ConfiguredCp,
    /// GTP_remat degree: weight shards ÷ TP.
    pub gtp: u32,
    /// Sequence shards inside GTP_remat.
    pub gtp_sequence_shards: u32,
    /// Order of the axes.
    pub order: RankOrder,
}

/// The free sizes of the expert grid: how the same ranks are divided for the weights of routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertSizes {
    /// Tensor parallel degree of experts.
    pub etp: u32,
    /// Expert parallel degree: ranks over which the experts are distributed.
    pub ep: u32,
    /// Expert weight shards ÷ ETP.
    pub egtp: u32,
}

impl ExpertSizes {
    /// Experts that are cut as the dense weights are by TP, and not distributed.
    pub const fn as_dense(tp: u32) -> Self {
        ExpertSizes { etp: tp, ep: 1, egtp: 1 }
    }
}

/// A layout whose divisions are all exact.
///
/// Two views of the same ranks: the *weight view* (TP × GTP cut weights, configured CP × DP replicate them) and the
/// *token view* (DP × GTP-batch hand out samples, configured CP × GTP-sequence cut sequences). Weights of experts have a
/// grid of their own over these ranks: ETP × EGTP cut them, EP distributes them, EDP replicates them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "LayoutFields", into = "LayoutFields")]
pub struct ParallelLayout {
    sizes: LayoutSizes,
    experts: ExpertSizes,
}

/// A layout in files.
#[derive(Serialize, Deserialize)]
struct LayoutFields {
    #[serde(flatten)]
    sizes: LayoutSizes,
    /// Left out where experts are as dense weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    experts: Option<ExpertSizes>,
}

/// Sizes that make no layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A size is zero.
    #[error("{size} is 0; every degree is at least 1")]
    Zero {
        /// Which size.
        size: &'static str,
    },
    /// Sequence shards do not divide the GTP group.
    #[error(
        "GTP degree {gtp} cannot be cut into {sequence_shards} sequence shards: {gtp} % {sequence_shards} != 0"
    )]
    SequenceShards {
        /// GTP_remat degree.
        gtp: u32,
        /// Sequence shards inside it.
        sequence_shards: u32,
    },
    /// One model copy does not divide the world.
    #[error(
        "world size {world_size} is not a multiple of TP {tp} × PP {pp} × CP {cp} × GTP {gtp} = {minimum}"
    )]
    World {
        /// Ranks there are.
        world_size: u32,
        /// Tensor parallel degree.
        tp: u32,
        /// Pipeline parallel degree.
        pp: u32,
        /// Configured context parallel degree.
        cp: u32,
        /// GTP_remat degree.
        gtp: u32,
        /// Their product.
        minimum: u64,
    },
    /// One copy of the experts does not divide the world.
    #[error(
        "world size {world_size} is not a multiple of ETP {etp} × EP {ep} × EGTP {egtp} × PP {pp} = {minimum}"
    )]
    ExpertWorld {
        /// Ranks there are.
        world_size: u32,
        /// Tensor parallel degree of experts.
        etp: u32,
        /// Expert parallel degree.
        ep: u32,
        /// Expert weight shards ÷ ETP.
        egtp: u32,
        /// Pipeline parallel degree.
        pp: u32,
        /// Their product.
        minimum: u64,
    },
    /// The older rank order cannot place sequence shards.
    #[error(
        "rank order {} has no place for {sequence_shards} sequence shards inside GTP",
        RankOrder::CpInsideGtp
    )]
    Order {
        /// Sequence shards inside GTP_remat.
        sequence_shards: u32,
    },
    /// More ranks than a job can have.
    #[error(
        "{world_size} ranks from rank {rank_offset} on are more than the {MAX_RANKS} that a job can have"
    )]
    TooManyRanks {
        /// Ranks of the grid.
        world_size: u32,
        /// Its first rank.
        rank_offset: u32,
    },
}

/// Ranks that a job can have. A bound on what a damaged file can make us allocate, far above any machine.
pub const MAX_RANKS: u32 = 1 << 24;

impl LayoutError {
    /// `RM2006` for the rank order, else `RM2001`: sizes that do not divide, are too small or too large.
    pub fn code(&self) -> &'static str {
        match self {
            LayoutError::Order { .. } => "RM2006",
            _ => "RM2001",
        }
    }

    /// How to mend it, with the choices that fit.
    pub fn help(&self) -> String {
        match self {
            LayoutError::Zero { size } => {
                let article = if size.starts_with('E') { "an" } else { "a" };
                format!("give {article} {size} of at least 1, or leave it out")
            }
            LayoutError::SequenceShards { gtp: 1, sequence_shards } => format!(
                "there are no weight shards beyond TP to cut a sequence by: give as many as sequence shards, such as \
                 `--weight-shards {sequence_shards} --seq-shards {sequence_shards}` with TP 1, or let TP cut it: `--sequence-parallel`"
            ),
            LayoutError::SequenceShards { gtp, .. } => format!(
                "{} sequence shards inside GTP {gtp} would fit; more pieces of a sequence than that come from CP",
                one_of(&degrees_that_fit(*gtp, 1))
            ),
            LayoutError::World { world_size, tp, pp, cp, gtp, minimum } => {
                choices(*world_size, *minimum, &[("TP", *tp), ("PP", *pp), ("CP", *cp), ("GTP", *gtp)])
            }
            LayoutError::ExpertWorld { world_size, etp, ep, egtp, pp, minimum } => {
                choices(*world_size, *minimum, &[("ETP", *etp), ("EP", *ep), ("EGTP", *egtp), ("PP", *pp)])
            }
            LayoutError::Order { .. } => format!(
                "leave `--rank-order` at {}, or the sequence shards at the SP degree",
                RankOrder::GtpInsideCp
            ),
            LayoutError::TooManyRanks { .. } => "give the number of ranks that the job has".to_owned(),
        }
    }
}

/// What would fit where the product `minimum` of `degrees` does not divide `world_size`.
fn choices(world_size: u32, minimum: u64, degrees: &[(&str, u32)]) -> String {
    let mut choices = vec![format!("a world size that is a multiple of {minimum}")];
    for (name, degree) in degrees.iter().filter(|(_, degree)| *degree > 1) {
        let fitting = degrees_that_fit(world_size, minimum / u64::from(*degree));
        if !fitting.is_empty() {
            choices.push(format!("{name} {}", one_of(&fitting)));
        }
    }
    format!("with the other sizes as they are, one of these would fit: {}", choices.join("; "))
}

/// Degrees of one more axis beside `others` that divide `world_size` exactly, ascending; none if `others` alone does not.
pub(crate) fn degrees_that_fit(world_size: u32, others: u64) -> Vec<u32> {
    if others == 0 || !u64::from(world_size).is_multiple_of(others) {
        return Vec::new();
    }
    let left = (u64::from(world_size) / others) as u32;
    let small = (1..=left.isqrt()).filter(|degree| left.is_multiple_of(*degree));
    let mut degrees: Vec<u32> = small.flat_map(|degree| [degree, left / degree]).collect();
    degrees.sort_unstable();
    degrees.dedup();
    degrees
}

/// `8`, or `4 or 8`, or `2, 4 or 8`.
pub(crate) fn one_of(choices: &[u32]) -> String {
    let texts: Vec<String> = choices.iter().map(u32::to_string).collect();
    match texts.as_slice() {
        [rest @ .., last] if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        texts => texts.concat(),
    }
}

impl ParallelLayout {
    /// Checks `sizes`. Experts are cut as dense weights are by TP.
    ///
    /// # Errors
    /// A size of zero, too many ranks, sequence shards that do not divide the GTP degree or that the rank order has no
    /// place for, or a world that is no multiple of one model copy.
    pub fn new(sizes: LayoutSizes) -> Result<Self, LayoutError> {
        let LayoutSizes { world_size, rank_offset, tp, pp, cp, gtp, gtp_sequence_shards, order } = sizes;
        let named = [
            ("world size", world_size),
            ("TP", tp),
            ("PP", pp),
            ("CP", cp.0),
            ("GTP", gtp),
            ("the number of sequence shards", gtp_sequence_shards),
        ];
        if let Some((size, _)) = named.into_iter().find(|(_, value)| *value == 0) {
            return Err(LayoutError::Zero { size });
        }
        if world_size.saturating_add(rank_offset) > MAX_RANKS {
            return Err(LayoutError::TooManyRanks { world_size, rank_offset });
        }
        if !gtp.is_multiple_of(gtp_sequence_shards) {
            return Err(LayoutError::SequenceShards { gtp, sequence_shards: gtp_sequence_shards });
        }
        let minimum = [tp, pp, cp.0, gtp].iter().map(|size| u64::from(*size)).fold(1, u64::saturating_mul);
        if !u64::from(world_size).is_multiple_of(minimum) {
            return Err(LayoutError::World { world_size, tp, pp, cp: cp.0, gtp, minimum });
        }
        if order != RankOrder::GtpInsideCp && gtp_sequence_shards > 1 {
            return Err(LayoutError::Order { sequence_shards: gtp_sequence_shards });
        }
        Ok(ParallelLayout { sizes, experts: ExpertSizes::as_dense(tp) })
    }

    /// The same dense grid with this expert grid.
    ///
    /// # Errors
    /// A size of zero, or a world that is no multiple of one copy of the experts.
    pub fn with_experts(self, experts: ExpertSizes) -> Result<Self, LayoutError> {
        let ExpertSizes { etp, ep, egtp } = experts;
        let named = [("ETP", etp), ("EP", ep), ("EGTP", egtp)];
        if let Some((size, _)) = named.into_iter().find(|(_, value)| *value == 0) {
            return Err(LayoutError::Zero { size });
        }
        let LayoutSizes { world_size, pp, .. } = self.sizes;
        let minimum = [etp, ep, egtp, pp].iter().map(|size| u64::from(*size)).fold(1, u64::saturating_mul);
        if !u64::from(world_size).is_multiple_of(minimum) {
            return Err(LayoutError::ExpertWorld { world_size, etp, ep, egtp, pp, minimum });
        }
        Ok(ParallelLayout { experts, ..self })
    }

    /// One rank, all degrees 1.
    pub fn single() -> Self {
        ParallelLayout {
            sizes: LayoutSizes {
                world_size: 1,
                rank_offset: 0,
                tp: 1,
                pp: 1,
                cp: ConfiguredCp(1),
                gtp: 1,
                gtp_sequence_shards: 1,
                order: RankOrder::GtpInsideCp,
            },
            experts: ExpertSizes::as_dense(1),
        }
    }

    /// The free sizes of the dense grid.
    pub fn sizes(&self) -> LayoutSizes {
        self.sizes
    }

    /// The free sizes of the expert grid.
    pub fn experts(&self) -> ExpertSizes {
        self.experts
    }

    /// Ranks of this grid.
    pub fn world_size(&self) -> u32 {
        self.sizes.world_size
    }

    /// Tensor parallel degree.
    pub fn tp(&self) -> u32 {
        self.sizes.tp
    }

    /// Pipeline parallel degree.
    pub fn pp(&self) -> u32 {
        self.sizes.pp
    }

    /// Context parallel degree as asked for.
    pub fn configured_cp(&self) -> ConfiguredCp {
        self.sizes.cp
    }

    /// GTP_remat degree: peers over which a TP-local weight is cut and gathered.
    pub fn gtp(&self) -> u32 {
        self.sizes.gtp
    }

    /// Sequence shards inside GTP_remat.
    pub fn gtp_sequence_shards(&self) -> u32 {
        self.sizes.gtp_sequence_shards
    }

    /// Batch shards inside GTP_remat: GTP ÷ its sequence shards.
    pub fn gtp_batch_shards(&self) -> u32 {
        self.sizes.gtp / self.sizes.gtp_sequence_shards
    }

    /// Residual data parallel degree.
    pub fn dp(&self) -> u32 {
        self.sizes.world_size / (self.sizes.tp * self.sizes.pp * self.sizes.cp.0 * self.sizes.gtp)
    }

    /// Replicas of an expert's weight shard: what ETP, EP, EGTP and PP leave of the world.
    pub fn edp(&self) -> u32 {
        let ExpertSizes { etp, ep, egtp } = self.experts;
        self.sizes.world_size / (etp * ep * egtp * self.sizes.pp)
    }

    /// Ranks with different samples per (PP, TP, CP) coordinate: DP × batch shards.
    pub fn batch_parallel_size(&self) -> u32 {
        self.dp() * self.gtp_batch_shards()
    }

    /// Ranks that hold the same weight shard: configured CP × DP.
    pub fn num_weight_replicas(&self) -> u32 {
        self.sizes.cp.0 * self.dp()
    }

    /// Context parallel degree of attention and slicing: configured CP × sequence shards.
    pub fn runtime_cp(&self) -> RuntimeCp {
        RuntimeCp(self.sizes.cp.0 * self.sizes.gtp_sequence_shards)
    }

    /// Sizes of all axes that ranks have coordinates on, in the order of [`Axis`]; EDP follows from them. Layouts with equal ones have the same coordinates, whatever their rank
    /// order.
    pub fn axis_sizes(&self) -> [u32; 9] {
        let LayoutSizes { tp, pp, cp, gtp_sequence_shards, .. } = self.sizes;
        let ExpertSizes { etp, ep, egtp } = self.experts;
        [tp, gtp_sequence_shards, self.gtp_batch_shards(), cp.0, self.dp(), pp, etp, ep, egtp]
    }

    /// The ranks as the expert grid: ETP, EP, EGTP, EDP, PP from fastest to slowest. Its pipelines are those of the dense
    /// grid.
    pub fn expert_grid(&self) -> Grid {
        use Axis::{Edp, Egtp, Ep, Etp, Pp};
        let ExpertSizes { etp, ep, egtp } = self.experts;
        let axes = vec![(Etp, etp), (Ep, ep), (Egtp, egtp), (Edp, self.edp()), (Pp, self.pp())];
        Grid::new(self.sizes.rank_offset, axes)
    }

    /// The ranks as the dense grid.
    pub fn grid(&self) -> Grid {
        let s = &self.sizes;
        let cp = (Axis::Cp, s.cp.0);
        let gtp = [(Axis::Seq, s.gtp_sequence_shards), (Axis::Bat, self.gtp_batch_shards())];
        let mut axes = vec![(Axis::Tp, s.tp)];
        match s.order {
            RankOrder::GtpInsideCp => axes.extend([gtp[0], gtp[1], cp]),
            RankOrder::CpInsideGtp => axes.extend([cp, gtp[0], gtp[1]]),
        }
        axes.extend([(Axis::Dp, self.dp()), (Axis::Pp, s.pp)]);
        Grid::new(s.rank_offset, axes)
    }
}

impl TryFrom<LayoutFields> for ParallelLayout {
    type Error = LayoutError;

    fn try_from(LayoutFields { sizes, experts }: LayoutFields) -> Result<Self, LayoutError> {
        let layout = ParallelLayout::new(sizes)?;
        experts.map_or(Ok(layout), |experts| layout.with_experts(experts))
    }
}

impl From<ParallelLayout> for LayoutFields {
    fn from(ParallelLayout { sizes, experts }: ParallelLayout) -> LayoutFields {
        LayoutFields { sizes, experts: Some(experts).filter(|it| *it != ExpertSizes::as_dense(sizes.tp)) }
    }
}

/// `TP 2 · GTP 2 (2 sequence × 1 batch) · CP 2 · DP 1 · world 8`, the way a person compares layouts.
impl fmt::Display for ParallelLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fmt_with_sp(f, None)
    }
}

impl ParallelLayout {
    /// The layout, with the SP degree if TP gives a choice and it is known.
    pub(crate) fn fmt_with_sp(&self, f: &mut fmt::Formatter<'_>, sp_degree: Option<u32>) -> fmt::Result {
        write!(f, "TP {}", self.tp())?;
        if let Some(sp_degree) = sp_degree.filter(|_| self.tp() > 1) {
            write!(f, " · SP {sp_degree}")?;
        }
        write!(f, " · GTP {}", self.gtp())?;
        if self.gtp() > 1 {
            write!(f, " ({} sequence × {} batch)", self.gtp_sequence_shards(), self.gtp_batch_shards())?;
        }
        write!(f, " · CP {} · DP {}", self.sizes.cp.0, self.dp())?;
        if self.pp() > 1 {
            write!(f, " · PP {}", self.pp())?;
        }
        let ExpertSizes { etp, ep, egtp } = self.experts;
        if self.experts != ExpertSizes::as_dense(self.tp()) {
            write!(f, " · experts: ETP {etp} · EP {ep} · EGTP {egtp} · EDP {}", self.edp())?;
        }
        write!(f, " · world {}", self.world_size())
    }
}
