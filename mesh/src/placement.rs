//! `Placement`: one declaration per tensor of which dims are cut over which groups. With a model's process groups it
//! yields the boxes that a rank holds and which replica they are. Model, optimizer, save, load and `plan` all use it.

use crate::groups::{GroupKind, ProcessGroups};
use crate::region::Region;
use crate::shape::Shape;
use crate::shard::ReplicaId;
use serde::{Deserialize, Serialize};

/// How a logical tensor is divided. Sizes are logical: padding exists only in memory and is never stored.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Placement {
    dims: Vec<DimPlacement>,
}

/// One dim of a placement.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DimPlacement {
    /// Logical extents of the fused parts along this dim (gate and up, say), in order; one for a plain dim.
    /// Each part is cut on its own by an exact cut.
    parts: Vec<u64>,
    /// Elements that all parts together are padded to in memory, at the tail, before the exact cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    padded: Option<u64>,
    /// A multiple to which each rank's piece of each part is padded in memory after the exact cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    align: Option<u64>,
    /// Cuts, the outermost first.
    cuts: Vec<Cut>,
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

impl DimPlacement {
    /// A dim of `extent` elements that no group cuts.
    pub fn whole(extent: u64) -> Self {
        DimPlacement::fused(&[extent])
    }

    /// A dim of several parts that are cut apart, such as gate and up rows.
    pub fn fused(parts: &[u64]) -> Self {
        DimPlacement { parts: parts.to_vec(), padded: None, align: None, cuts: Vec::new() }
    }

    /// Pads the dim in memory to `extent` elements, at the tail, before it is cut.
    pub fn padded_to(mut self, extent: u64) -> Self {
        assert!(extent >= self.extent(), "padding makes a dim no smaller");
        assert!(self.parts.len() == 1, "parts of a fused dim are padded by `aligned_to`");
        self.padded = Some(extent);
        self
    }

    /// Pads each rank's piece of each part in memory to a multiple of `multiple`.
    pub fn aligned_to(mut self, multiple: u64) -> Self {
        assert!(multiple > 0, "an alignment is at least 1");
        self.align = Some(multiple);
        self
    }

    /// Cuts every part in equal pieces over `group`.
    pub fn exact(mut self, group: GroupKind) -> Self {
        assert!(
            !self.cuts.iter().any(|cut| matches!(cut, Cut::Ceil(_))),
            "parts are joined by the first uneven cut and cannot be cut apart after it"
        );
        self.cuts.push(Cut::Exact(group));
        self
    }

    /// Cuts what is left, parts joined, in pieces of ⌈n/p⌉ over `group`.
    pub fn ceil(mut self, group: GroupKind) -> Self {
        self.cuts.push(Cut::Ceil(group));
        self
    }

    /// Logical elements.
    pub fn extent(&self) -> u64 {
        self.parts.iter().sum()
    }

    /// Logical elements of each part.
    pub fn parts(&self) -> &[u64] {
        &self.parts
    }

    /// The cuts, outermost first.
    pub fn cuts(&self) -> &[Cut] {
        &self.cuts
    }

    fn runs(&self, dim: usize, groups: &ProcessGroups) -> Result<Vec<Run>, Indivisible> {
        let mut start = 0;
        let mut parts: Vec<Vec<Run>> = Vec::new();
        for len in &self.parts {
            parts.push(vec![Run { global: Some(start), len: *len }]);
            start += len;
        }
        if let Some(padded) = self.padded {
            parts[0].push(Run { global: None, len: padded - self.extent() });
        }
        let mut cuts = self.cuts.iter().peekable();
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
        if let Some(align) = self.align {
            for part in &mut parts {
                let extent: u64 = part.iter().map(|run| run.len).sum();
                part.push(Run { global: None, len: extent.next_multiple_of(align) - extent });
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
        Placement { dims }
    }

    /// A tensor of `shape` that every rank holds whole.
    pub fn replicated(shape: &Shape) -> Self {
        Placement { dims: shape.dims().iter().map(|extent| DimPlacement::whole(*extent)).collect() }
    }

    /// One cell a rank: leading dims cut over groups, one index each, then a cell of shape `cell`.
    pub fn cells(grid: &[(GroupKind, u64)], cell: &[u64]) -> Self {
        let axes = grid.iter().map(|(group, extent)| DimPlacement::whole(*extent).exact(*group));
        Placement { dims: axes.chain(cell.iter().map(|extent| DimPlacement::whole(*extent))).collect() }
    }

    /// The same tensor with its local rows cut once more over `group`, as optimizer state is over weight replicas.
    /// A scalar stays as it is.
    pub fn with_rows_over(mut self, group: GroupKind) -> Self {
        if let Some(rows) = self.dims.first_mut() {
            rows.cuts.push(Cut::Ceil(group));
        }
        self
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
        self.dims.iter().flat_map(|dim| &dim.cuts).any(covers)
    }

    /// What the rank behind `groups` holds.
    ///
    /// # Errors
    /// If an exact cut does not divide.
    pub fn shard(&self, groups: &ProcessGroups) -> Result<LocalShard, Indivisible> {
        let dims: Vec<Vec<Run>> = (self.dims.iter().enumerate())
            .map(|(dim, placement)| placement.runs(dim, groups))
            .collect::<Result<_, _>>()?;
        let shape = Shape(dims.iter().map(|runs| runs.iter().map(|run| run.len).sum()).collect());
        let mut pieces = vec![(Vec::new(), Vec::new(), Vec::new(), Vec::new())];
        for runs in &dims {
            let mut longer = Vec::new();
            for (lo, hi, local_lo, local_hi) in pieces {
                let mut at = 0;
                for run in runs {
                    if let Some(global) = run.global.filter(|_| run.len > 0) {
                        let push = |corner: &Vec<u64>, value| [corner.as_slice(), &[value]].concat();
                        longer.push((
                            push(&lo, global),
                            push(&hi, global + run.len),
                            push(&local_lo, at),
                            push(&local_hi, at + run.len),
                        ));
                    }
                    at += run.len;
                }
            }
            pieces = longer;
        }
        let pieces = pieces
            .into_iter()
            .map(|(lo, hi, local_lo, local_hi)| Piece {
                region: Region::new(&lo, &hi),
                local: Region::new(&local_lo, &local_hi),
            })
            .collect();
        Ok(LocalShard { shape, pieces, replica: self.replica(groups) })
    }

    /// Which copy the rank behind `groups` holds: its position along each axis that does not cut the tensor.
    pub fn replica(&self, groups: &ProcessGroups) -> ReplicaId {
        let position = |group| if self.is_cut_over(group) { 0 } else { groups.position(group).0 };
        ReplicaId {
            pp: 0,
            tp: position(GroupKind::Tp),
            gtp: position(GroupKind::GtpRemat),
            dp: position(GroupKind::DpCp),
        }
    }
}
