//! `Placement`: one declaration per tensor of which dims are cut over which groups. With a model's process groups it
//! yields the boxes that a rank holds and which replica they are. Model, optimizer, save, load and `plan` all use it.

use crate::groups::{GroupKind, GroupTable, ProcessGroups};
use crate::pipeline::ModelPart;
use crate::region::Region;
use crate::shape::Shape;
use crate::shard::ReplicaId;
use serde::{Deserialize, Serialize};
use std::num::NonZeroU64;

/// How a logical tensor is divided. Sizes are logical: padding exists only in memory and is never stored.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Placement {
    dims: Vec<DimPlacement>,
    /// Which pipeline stages hold it.
    #[serde(default, skip_serializing_if = "ModelPart::is_every_stage")]
    part: ModelPart,
}

/// One dim of a placement.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "DimFields", into = "DimFields")]
pub struct DimPlacement {
    fields: DimFields,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DimFields {
    /// Logical extents of the fused parts along this dim (gate and up, say), in order; one for a plain dim.
    /// Each part is cut on its own by an exact cut.
    parts: Vec<u64>,
    /// Elements that all parts together are padded to in memory, at the tail, before the exact cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    padded: Option<u64>,
    /// A multiple to which each rank's piece of each part is padded in memory after the exact cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    align: Option<NonZeroU64>,
    /// The outermost first.
    cuts: Vec<Cut>,
}

/// Groups that may share a dim out: the axes that the others leave are those of a group, whose positions then tell the
/// copies apart.
const CUTTING_GROUPS: [GroupKind; 11] = [
    GroupKind::Tp,
    GroupKind::GtpRemat,
    GroupKind::DpCp,
    GroupKind::DpCpGtpRemat,
    GroupKind::DpGtpRemat,
    GroupKind::Pp,
    GroupKind::Ep,
    GroupKind::ExptTp,
    GroupKind::ExptGtpRemat,
    GroupKind::ExptDp,
    GroupKind::ExptDpGtpRemat,
];

/// Why a dim cannot be described so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidDim {
    /// No part, or more elements than can be counted.
    #[error("a dim of parts {parts:?} has no part, or more elements than can be counted")]
    Parts {
        /// Elements of each part.
        parts: Vec<u64>,
    },
    /// A padded extent that is too small, or that of a fused dim.
    #[error("a dim of parts {parts:?} cannot be padded to {padded}; only one part can, and only to more")]
    Padded {
        /// Elements of each part.
        parts: Vec<u64>,
        /// Elements with padding.
        padded: u64,
    },
    /// An exact cut after an uneven one, which joins the parts.
    #[error("an exact cut cannot follow an uneven one, which joins the parts")]
    ExactAfterCeil,
    /// A group that no dim is cut over.
    #[error("no dim is cut over `{group}`, because no group would tell the copies apart")]
    Group {
        /// The group.
        group: GroupKind,
    },
}

/// One cut of a dim over the members of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cut {
    /// Every part in equal pieces; the size must divide.
    Exact(GroupKind),
    /// What the cuts before left, parts joined, in pieces of ⌈n/p⌉: the last short, later ones empty.
    Ceil(GroupKind),
}

impl Cut {
    /// The group whose members share the pieces out.
    pub fn group(self) -> GroupKind {
        match self {
            Cut::Exact(kind) | Cut::Ceil(kind) => kind,
        }
    }
}

/// What one rank holds of a tensor: a row-major buffer and the boxes of the tensor that lie in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalShard {
    /// Shape of the buffer in memory, padding included.
    pub shape: Shape,
    /// The boxes in it, in buffer order; none if this rank holds only padding or nothing.
    pub pieces: Vec<Piece>,
    /// Which copy this is.
    pub replica: ReplicaId,
}

/// A box of the global tensor and where it lies in a rank's buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// In elements of the logical tensor.
    pub region: Region,
    /// In elements of the buffer; the same shape.
    pub local: Region,
}

/// A placement that a group's size does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("dim {dim} holds a part of {extent} elements, and {extent} % {size} != 0 for `{group}`")]
pub struct Indivisible {
    /// Which dim.
    pub dim: usize,
    /// Elements of the part, padding included.
    pub extent: u64,
    /// The group.
    pub group: GroupKind,
    /// Its size.
    pub size: u32,
}

/// A run of local elements along one dim: `len` elements that start at `local`; padding has no `global`.
#[derive(Clone, Copy)]
struct Run {
    global: Option<u64>,
    len: u64,
}

impl TryFrom<DimFields> for DimPlacement {
    type Error = InvalidDim;

    fn try_from(fields: DimFields) -> Result<Self, InvalidDim> {
        let DimFields { parts, padded, align, cuts } = &fields;
        // Alignment adds less than `align` to each part. Half the range is left for sums of positions.
        let align = align.map_or(0, NonZeroU64::get);
        let total = (parts.iter().chain(padded))
            .try_fold(0u64, |sum, extent| sum.checked_add(*extent)?.checked_add(align))
            .filter(|total| *total <= u64::MAX / 2);
        if parts.is_empty() || total.is_none() {
            return Err(InvalidDim::Parts { parts: parts.clone() });
        }
        if let Some(padded) = *padded
            && (parts.len() > 1 || padded < parts[0])
        {
            return Err(InvalidDim::Padded { parts: parts.clone(), padded });
        }
        if !cuts.is_sorted_by_key(|cut| matches!(cut, Cut::Ceil(_))) {
            return Err(InvalidDim::ExactAfterCeil);
        }
        match cuts.iter().find(|cut| !CUTTING_GROUPS.contains(&cut.group())) {
            Some(cut) => Err(InvalidDim::Group { group: cut.group() }),
            None => Ok(DimPlacement { fields }),
        }
    }
}

impl From<DimPlacement> for DimFields {
    fn from(dim: DimPlacement) -> DimFields {
        dim.fields
    }
}

/// The methods that change a dim panic where the change leaves no valid one; see [`InvalidDim`].
impl DimPlacement {
    /// A dim of `extent` elements that no group cuts.
    pub fn whole(extent: u64) -> Self {
        DimPlacement::fused(&[extent])
    }

    /// A dim of several parts that are cut apart, such as gate and up rows.
    pub fn fused(parts: &[u64]) -> Self {
        DimPlacement::checked(DimFields {
            parts: parts.to_vec(),
            padded: None,
            align: None,
            cuts: Vec::new(),
        })
    }

    /// Pads the dim in memory to `extent` elements, at the tail, before it is cut. Parts of a fused dim are padded by
    /// [`aligned_to`](Self::aligned_to).
    pub fn padded_to(self, extent: u64) -> Self {
        DimPlacement::checked(DimFields { padded: Some(extent), ..self.fields })
    }

    /// Pads each rank's piece of each part in memory to a multiple of `multiple`, after the exact cuts.
    ///
    /// # Panics
    /// If `multiple` is 0.
    pub fn aligned_to(self, multiple: u64) -> Self {
        let align = Some(NonZeroU64::new(multiple).expect("an alignment is at least 1"));
        DimPlacement::checked(DimFields { align, ..self.fields })
    }

    /// Cuts every part in equal pieces over `group`.
    pub fn exact(self, group: GroupKind) -> Self {
        self.cut(Cut::Exact(group))
    }

    /// Cuts what is left, parts joined, in pieces of ⌈n/p⌉ over `group`.
    pub fn ceil(self, group: GroupKind) -> Self {
        self.cut(Cut::Ceil(group))
    }

    fn cut(mut self, cut: Cut) -> Self {
        self.fields.cuts.push(cut);
        DimPlacement::checked(self.fields)
    }

    fn checked(fields: DimFields) -> Self {
        DimPlacement::try_from(fields).unwrap_or_else(|invalid| panic!("{invalid}"))
    }

    /// Logical elements.
    pub fn extent(&self) -> u64 {
        self.fields.parts.iter().sum()
    }

    /// Logical elements of each part.
    pub fn parts(&self) -> &[u64] {
        &self.fields.parts
    }

    /// The cuts, outermost first.
    pub fn cuts(&self) -> &[Cut] {
        &self.fields.cuts
    }

    fn runs(&self, dim: usize, groups: &ProcessGroups) -> Result<Vec<Run>, Indivisible> {
        let mut start = 0;
        let mut parts: Vec<Vec<Run>> = Vec::new();
        for len in &self.fields.parts {
            parts.push(vec![Run { global: Some(start), len: *len }]);
            start += len;
        }
        if let Some(padded) = self.fields.padded {
            parts[0].push(Run { global: None, len: padded - self.extent() });
        }
        let mut cuts = self.fields.cuts.iter().peekable();
        while let Some(Cut::Exact(group)) = cuts.next_if(|cut| matches!(cut, Cut::Exact(_))) {
            let size = groups.size(*group);
            let position = u64::from(groups.position(*group).0);
            for part in &mut parts {
                let extent: u64 = part.iter().map(|run| run.len).sum();
                if !extent.is_multiple_of(u64::from(size)) {
                    return Err(Indivisible { dim, extent, group: *group, size });
                }
                let piece = extent / u64::from(size);
                *part = slice(part, position * piece, piece);
            }
        }
        if let Some(align) = self.fields.align {
            for part in &mut parts {
                let extent: u64 = part.iter().map(|run| run.len).sum();
                part.push(Run { global: None, len: extent.next_multiple_of(align.get()) - extent });
            }
        }
        let mut runs: Vec<Run> = parts.into_iter().flatten().collect();
        for cut in cuts {
            let piece =
                runs.iter().map(|run| run.len).sum::<u64>().div_ceil(u64::from(groups.size(cut.group())));
            runs = slice(&runs, u64::from(groups.position(cut.group()).0) * piece, piece);
        }
        Ok(runs)
    }
}

/// Elements `[start, start + len)` of what `runs` hold one after another; short if they end before.
fn slice(runs: &[Run], start: u64, len: u64) -> Vec<Run> {
    let mut cut = Vec::new();
    let mut at = 0;
    for run in runs {
        let lo = start.max(at);
        let hi = (start + len).min(at + run.len);
        if lo < hi {
            cut.push(Run { global: run.global.map(|global| global + lo - at), len: hi - lo });
        }
        at += run.len;
    }
    cut
}

impl Placement {
    /// A tensor with these dims.
    pub fn new(dims: Vec<DimPlacement>) -> Self {
        Placement { dims, part: ModelPart::EveryStage }
    }

    /// A tensor of `shape` that every rank holds whole.
    pub fn replicated(shape: &Shape) -> Self {
        Placement::new(shape.dims().iter().map(|extent| DimPlacement::whole(*extent)).collect())
    }

    /// One cell a rank: leading dims cut over groups, one index each, then a cell of shape `cell`.
    pub fn cells(grid: &[(GroupKind, u64)], cell: &[u64]) -> Self {
        let axes = grid.iter().map(|(group, extent)| DimPlacement::whole(*extent).exact(*group));
        Placement::new(axes.chain(cell.iter().map(|extent| DimPlacement::whole(*extent))).collect())
    }

    /// The same tensor with its local rows cut once more over `group`, as optimizer state is over weight replicas.
    /// A scalar stays as it is.
    pub fn with_rows_over(mut self, group: GroupKind) -> Self {
        if let Some(rows) = self.dims.first_mut() {
            *rows = rows.clone().ceil(group);
        }
        self
    }

    /// The same tensor on the pipeline stages that hold `part`.
    ///
    /// # Panics
    /// If it is a scalar: nothing of it is still one element, so every stage has it.
    pub fn of(mut self, part: ModelPart) -> Self {
        assert!(!self.dims.is_empty(), "a scalar is on every stage");
        self.part = part;
        self
    }

    /// Which pipeline stages hold it.
    pub fn part(&self) -> ModelPart {
        self.part
    }

    /// A placement that divides the tensor in the same way among the ranks of `table`; the same one for all tensors of the
    /// same dims on the same stages.
    pub fn representative(&self, table: &GroupTable) -> Placement {
        let part =
            table.pipeline().map_or(ModelPart::EveryStage, |pipeline| pipeline.representative(self.part));
        Placement { dims: self.dims.clone(), part }
    }

    /// The dims, outermost first.
    pub fn dims(&self) -> &[DimPlacement] {
        &self.dims
    }

    /// Shape of the logical tensor.
    pub fn shape(&self) -> Shape {
        Shape(self.dims.iter().map(DimPlacement::extent).collect())
    }

    /// Whether a cut runs over a group whose axes include those of `group`.
    pub fn is_cut_over(&self, group: GroupKind) -> bool {
        let covers = |cut: &Cut| {
            !group.axes().is_empty() && group.axes().iter().all(|axis| cut.group().axes().contains(axis))
        };
        self.dims.iter().flat_map(DimPlacement::cuts).any(covers)
    }

    /// What the rank behind `groups` holds: nothing on a pipeline stage that the tensor is not on.
    ///
    /// # Errors
    /// If an exact cut does not divide.
    pub fn shard(&self, groups: &ProcessGroups) -> Result<LocalShard, Indivisible> {
        if self.copy_on_stage(groups).is_none() {
            let shape = Shape::new(&vec![0; self.dims.len()]);
            return Ok(LocalShard { shape, pieces: Vec::new(), replica: self.replica(groups) });
        }
        let dims: Vec<Vec<Run>> = (self.dims.iter().enumerate())
            .map(|(dim, placement)| placement.runs(dim, groups))
            .collect::<Result<_, _>>()?;
        let shape = Shape(dims.iter().map(|runs| runs.iter().map(|run| run.len).sum()).collect());
        let scalar = Region::whole(&Shape::default());
        let mut pieces = vec![Piece { region: scalar.clone(), local: scalar }];
        for runs in &dims {
            let mut longer = Vec::new();
            for piece in &pieces {
                let mut at = 0;
                for run in runs {
                    if let Some(global) = run.global.filter(|_| run.len > 0) {
                        longer.push(Piece {
                            region: piece.region.with_dim(global..global + run.len),
                            local: piece.local.with_dim(at..at + run.len),
                        });
                    }
                    at += run.len;
                }
            }
            pieces = longer;
        }
        Ok(LocalShard { shape, pieces, replica: self.replica(groups) })
    }

    /// Which copy for another pipeline stage the rank's stage holds, 0 the main one; `None` if it holds none.
    fn copy_on_stage(&self, groups: &ProcessGroups) -> Option<u32> {
        let stage = groups.position(GroupKind::Pp).0;
        match groups.table().pipeline() {
            _ if self.is_cut_over(GroupKind::Pp) => Some(0),
            Some(pipeline) => pipeline.copy_on(stage, self.part),
            None => Some(stage),
        }
    }

    /// Which copy the rank behind `groups` holds: its position along the axes that do not cut the tensor.
    pub fn replica(&self, groups: &ProcessGroups) -> ReplicaId {
        let position = |group| if self.is_cut_over(group) { 0 } else { groups.position(group).0 };
        let pp = self.copy_on_stage(groups).unwrap_or(0);
        // What experts hold has the axes of their grid.
        if self.is_cut_over(GroupKind::Ep) {
            return ReplicaId {
                pp,
                tp: position(GroupKind::ExptTp),
                gtp: position(GroupKind::ExptGtpRemat),
                dp: position(GroupKind::ExptDp),
            };
        }
        // Where samples cut it, copies differ by their sequence piece.
        let (gtp, dp) = if self.is_cut_over(GroupKind::DpGtpRemat) {
            (0, position(GroupKind::Cp))
        } else {
            (position(GroupKind::GtpRemat), position(GroupKind::DpCp))
        };
        ReplicaId { pp, tp: position(GroupKind::Tp), gtp, dp }
    }
}
