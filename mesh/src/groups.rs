//! `ProcessGroups`: one model's collection of process groups, built once and handed to everything that communicates,
//! places or saves. There is no current group: whoever needs one is given the model's own collection.

use crate::axis::Axis;
use crate::layout::ParallelLayout;
use crate::rank::{GroupRank, Rank};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

macro_rules! group_kinds {
    ($($(#[$doc:meta])* $variant:ident $name:literal $axes:expr,)*) => {
        /// The kinds of process group that a collection can hold.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum GroupKind {
            $($(#[$doc])* #[serde(rename = $name)] $variant,)*
        }

        impl GroupKind {
            /// Every kind.
            pub const ALL: &[GroupKind] = &[$(GroupKind::$variant,)*];

            /// The field's name for it.
            pub const fn name(self) -> &'static str {
                match self { $(GroupKind::$variant => $name,)* }
            }

            /// The dense axes that vary inside the group; none for the embedding groups, which are parts of `pp`.
            pub const fn axes(self) -> &'static [Axis] {
                use Axis::*;
                match self { $(GroupKind::$variant => &$axes,)* }
            }
        }
    };
}

group_kinds! {
    /// Tensor parallel: activation collectives.
    Tp "tp" [Tp],
    /// Weight shards beyond TP: weight gather, gradient reduce-scatter.
    GtpRemat "gtp_remat" [Seq, Bat],
    /// Runtime context parallel: attention exchange, batch slicing along the sequence.
    Cp "cp" [Cp, Seq],
    /// Tensor and runtime context parallel.
    TpCp "tp_cp" [Tp, Cp, Seq],
    /// Residual data replicas.
    Dp "dp" [Dp],
    /// Independent samples: lane index and number of lanes.
    DpGtpRemat "dp_gtp_remat" [Bat, Dp],
    /// Weight replicas: gradient reduction, optimizer sharding, writers.
    DpCp "dp_cp" [Cp, Dp],
    /// All ranks of a (TP, PP) coordinate: loss reduction, replica ids of parameters that GTP does not cut.
    DpCpGtpRemat "dp_cp_gtp_remat" [Seq, Bat, Cp, Dp],
    /// Distinct samples and TP.
    TpDp "tp_dp" [Tp, Bat, Dp],
    /// Everything but the pipeline.
    TpDpCp "tp_dp_cp" [Tp, Seq, Bat, Cp, Dp],
    /// Pipeline stages.
    Pp "pp" [Pp],
    /// Tensor and pipeline parallel.
    TpPp "tp_pp" [Tp, Pp],
    /// One model copy.
    Mp "mp" [Tp, Seq, Bat, Pp],
    /// Holders of the word embedding: first and last stage.
    Embd "embd" [],
    /// Holders of the position embedding: the first stage.
    PosEmbd "pos_embd" [],
}

impl fmt::Display for GroupKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for GroupKind {
    type Err = UnknownGroup;

    fn from_str(name: &str) -> Result<Self, UnknownGroup> {
        let known = GroupKind::ALL.iter().copied().find(|kind| kind.name() == name);
        known.ok_or_else(|| UnknownGroup { name: name.to_owned() })
    }
}

/// A name that no kind of group has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no process group `{name}`; the groups are {}", names(GroupKind::ALL))]
pub struct UnknownGroup {
    /// What was asked for.
    pub name: String,
}

/// Groups that a consumer needs and the collection lacks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{consumer} needs the process groups {}, which the collection of `{model}` does not have", names(.missing))]
pub struct MissingGroups {
    /// Who asked.
    pub consumer: &'static str,
    /// The collection's model.
    pub model: String,
    /// Every kind that is missing.
    pub missing: Vec<GroupKind>,
}

fn names(kinds: &[GroupKind]) -> String {
    kinds.iter().map(|kind| format!("`{kind}`")).collect::<Vec<_>>().join(", ")
}

/// Ranks that talk to each other, in the order of their positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    ranks: Vec<Rank>,
}

impl Group {
    /// A group of these members in this order.
    ///
    /// # Panics
    /// If there is none, or one is named twice.
    pub fn new(ranks: Vec<Rank>) -> Self {
        assert!(!ranks.is_empty(), "a group has at least one member");
        let mut seen = BTreeSet::new();
        for rank in &ranks {
            assert!(seen.insert(*rank), "rank {rank} is in one group twice");
        }
        Group { ranks }
    }

    /// Members; the index is the position in the group.
    pub fn ranks(&self) -> &[Rank] {
        &self.ranks
    }

    /// Number of members.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// The position of `rank`, if it is a member.
    pub fn position(&self, rank: Rank) -> Option<GroupRank> {
        self.ranks.iter().position(|member| *member == rank).map(|at| GroupRank(at as u32))
    }
}

/// All groups of one kind, and where each rank of the model finds its own.
#[derive(Clone, Debug, PartialEq, Eq)]
struct GroupsOfKind {
    groups: Vec<Group>,
    own: BTreeMap<Rank, (usize, GroupRank)>,
}

impl GroupsOfKind {
    fn new(groups: Vec<Group>) -> Self {
        let mut own = BTreeMap::new();
        for (index, group) in groups.iter().enumerate() {
            for (at, rank) in group.ranks().iter().enumerate() {
                let other = own.insert(*rank, (index, GroupRank(at as u32)));
                assert!(other.is_none(), "rank {rank} is in two groups of one kind");
            }
        }
        GroupsOfKind { groups, own }
    }
}

/// The collection of one model, without a rank: what [`ProcessGroups`] looks at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupTable {
    model: String,
    ranks: Vec<Rank>,
    /// A kind that is not here is absent; `None` says that the model explicitly has no such group.
    kinds: BTreeMap<GroupKind, Option<GroupsOfKind>>,
}

impl GroupTable {
    /// Every dense group of `layout`, for the model named `model`.
    pub fn new(model: impl Into<String>, layout: &ParallelLayout) -> Self {
        let grid = layout.grid();
        let mut kinds = BTreeMap::new();
        for kind in GroupKind::ALL.iter().copied() {
            let groups = match kind {
                GroupKind::Embd => ends_of_pipelines(grid.groups(&[Axis::Pp]), true),
                GroupKind::PosEmbd => ends_of_pipelines(grid.groups(&[Axis::Pp]), false),
                _ => grid.groups(kind.axes()),
            };
            kinds.insert(kind, Some(GroupsOfKind::new(groups.into_iter().map(Group::new).collect())));
        }
        GroupTable { model: model.into(), ranks: grid.ranks().collect(), kinds }
    }

    /// A collection that so far holds no group, for a model on `ranks`.
    pub fn empty(model: impl Into<String>, mut ranks: Vec<Rank>) -> Self {
        ranks.sort_unstable();
        GroupTable { model: model.into(), ranks, kinds: BTreeMap::new() }
    }

    /// The same collection with other groups of one kind; `None` says that there is none.
    pub fn with(mut self, kind: GroupKind, groups: Option<Vec<Group>>) -> Self {
        self.kinds.insert(kind, groups.map(GroupsOfKind::new));
        self
    }

    /// The same collection without any word about one kind.
    pub fn without(mut self, kind: GroupKind) -> Self {
        self.kinds.remove(&kind);
        self
    }

    /// The model this collection belongs to.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The model's ranks, ascending.
    pub fn ranks(&self) -> &[Rank] {
        &self.ranks
    }

    /// Whether the collection says something about `kind`, be it that there is none.
    pub fn is_present(&self, kind: GroupKind) -> bool {
        self.kinds.contains_key(&kind)
    }

    /// All groups of `kind`, in creation order; empty if absent or explicitly none.
    pub fn groups(&self, kind: GroupKind) -> &[Group] {
        self.kinds.get(&kind).and_then(Option::as_ref).map_or(&[], |groups| &groups.groups)
    }

    /// The collection as `rank` sees it.
    ///
    /// # Panics
    /// If the model has no such rank.
    pub fn for_rank(self: &Arc<Self>, rank: Rank) -> ProcessGroups {
        assert!(self.ranks.binary_search(&rank).is_ok(), "rank {rank} is not one of model `{}`", self.model);
        ProcessGroups { rank, table: Arc::clone(self) }
    }
}

fn ends_of_pipelines(pipelines: Vec<Vec<Rank>>, with_last: bool) -> Vec<Vec<Rank>> {
    let ends = |stages: Vec<Rank>| match stages.as_slice() {
        [first, .., last] if with_last => vec![*first, *last],
        stages => vec![stages[0]],
    };
    pipelines.into_iter().map(ends).collect()
}

/// One model's process groups as one of its ranks sees them. Cheap to clone.
///
/// An absent group means position 0 of 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessGroups {
    rank: Rank,
    table: Arc<GroupTable>,
}

impl ProcessGroups {
    /// The rank that looks, in the job.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The collection.
    pub fn table(&self) -> &Arc<GroupTable> {
        &self.table
    }

    /// The same collection as another rank of the model sees it.
    pub fn of(&self, rank: Rank) -> ProcessGroups {
        self.table.for_rank(rank)
    }

    fn own(&self, kind: GroupKind) -> Option<(&GroupsOfKind, usize, GroupRank)> {
        let groups = self.table.kinds.get(&kind)?.as_ref()?;
        groups.own.get(&self.rank).map(|(index, position)| (groups, *index, *position))
    }

    /// This rank's group of `kind`, if there is one.
    pub fn get(&self, kind: GroupKind) -> Option<&Group> {
        self.own(kind).map(|(groups, index, _)| &groups.groups[index])
    }

    /// The creation-order number of this rank's group among the groups of `kind`.
    pub fn group_index(&self, kind: GroupKind) -> Option<usize> {
        self.own(kind).map(|(_, index, _)| index)
    }

    /// This rank's position in its group of `kind`; 0 if there is none.
    pub fn position(&self, kind: GroupKind) -> GroupRank {
        self.own(kind).map_or(GroupRank(0), |(_, _, position)| position)
    }

    /// Members of this rank's group of `kind`; 1 if there is none.
    pub fn size(&self, kind: GroupKind) -> u32 {
        self.get(kind).map_or(1, |group| group.size() as u32)
    }

    /// The collection as each member of this rank's group of `kind` sees it, by position; this rank alone if there is none.
    pub fn members(&self, kind: GroupKind) -> Vec<ProcessGroups> {
        match self.get(kind) {
            Some(group) => group.ranks().iter().map(|rank| self.of(*rank)).collect(),
            None => vec![self.clone()],
        }
    }

    /// Checks that the collection has every kind of `needed` for this rank.
    ///
    /// # Errors
    /// Names every kind that is absent or explicitly none.
    pub fn require(&self, consumer: &'static str, needed: &[GroupKind]) -> Result<(), MissingGroups> {
        let missing: Vec<GroupKind> =
            needed.iter().copied().filter(|kind| self.get(*kind).is_none()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        Err(MissingGroups { consumer, model: self.table.model.clone(), missing })
    }
}

/// `model: tp 2, cp 4, dp none`: the groups that are set, with their sizes.
impl fmt::Display for ProcessGroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.table.model)?;
        for (at, (kind, groups)) in self.table.kinds.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            match groups {
                Some(_) => write!(f, "{comma} {kind} {}", self.size(*kind))?,
                None => write!(f, "{comma} {kind} none")?,
            }
        }
        Ok(())
    }
}
