//! `ProcessGroups`: one model's collection of process groups, built once and handed to everything that communicates,
//! places or saves. There is no current group: whoever needs one is given the model's own collection.

use crate::axis::Axis;
use crate::group_options::{GroupOptions, GroupOptionsError};
use crate::layout::ParallelLayout;
use crate::pipeline::Pipeline;
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

            /// The axes that vary inside the group; none for a group that is made from those of another kind.
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
    /// Expert parallel: exchange of tokens.
    Ep "ep" [Ep],
    /// Tensor parallel of experts.
    ExptTp "expt_tp" [Etp],
    /// Weight shards of experts beyond ETP.
    ExptGtpRemat "expt_gtp_remat" [Egtp],
    /// Replicas of an expert's weight shard: gradient reduction, optimizer sharding, writers.
    ExptDp "expt_dp" [Edp],
    /// Ranks of an (ETP, EP, PP) coordinate: writers of expert state that EGTP does not cut.
    ExptDpGtpRemat "expt_dp_gtp_remat" [Egtp, Edp],
    /// Tensor and expert parallel.
    TpEp "tp_ep" [Etp, Ep],
    /// Tensor, expert and pipeline parallel.
    TpEpPp "tp_ep_pp" [Etp, Ep, Pp],
    /// One copy of the experts: index of their optimizer state.
    TpEpPpWithEgtpRemat "tp_ep_pp_with_egtp_remat" [Etp, Ep, Egtp, Pp],
    /// The ranks of `dp_cp` once more, so that parameters are gathered while gradients are reduced.
    DpCpAg "dp_cp_ag" [],
    /// The ranks of `expt_dp` once more.
    ExptDpAg "expt_dp_ag" [],
    /// The part of `dp_cp` that is one instance of the distributed optimizer.
    IntraDpCp "intra_dp_cp" [],
    /// The part of `expt_dp` that is one instance of the distributed optimizer.
    IntraExptDp "intra_expt_dp" [],
    /// The ranks of the same position in all instances.
    InterDistOpt "inter_dist_opt" [],
    /// All ranks of one instance: statistics of gradients.
    IntraDistOpt "intra_dist_opt" [],
}

impl GroupKind {
    /// Whether the group is one of the expert grid.
    pub fn is_expert(self) -> bool {
        self.axes().iter().any(|axis| axis.is_expert())
    }
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

/// Groups to gather parameters in that are not those of the weight replicas.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the ranks of `{kind}` are not those of `{replicas}` of `{model}`, among which parameters are gathered"
)]
pub struct AllGatherRanks {
    /// What was given.
    pub kind: GroupKind,
    /// What it must be equal to.
    pub replicas: GroupKind,
    /// The collection's model.
    pub model: String,
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
    /// Levels inside `cp`, the innermost first.
    hcp: Vec<GroupsOfKind>,
    /// Which layers the stages of `pp` hold; `None` where every stage is taken to hold all.
    pipeline: Option<Pipeline>,
}

impl GroupTable {
    /// Every group of `layout`, for the model named `model`: one instance of the distributed optimizer, no second
    /// communicators to gather parameters, no hierarchy inside `cp`.
    pub fn new(model: impl Into<String>, layout: &ParallelLayout) -> Self {
        let options = GroupOptions::default();
        GroupTable::with_options(model, layout, &options).expect("every layout takes the default options")
    }

    /// Every group of `layout` and `options`, for the model named `model`.
    ///
    /// # Errors
    /// Options that do not fit the layout.
    pub fn with_options(
        model: impl Into<String>,
        layout: &ParallelLayout,
        options: &GroupOptions,
    ) -> Result<Self, GroupOptionsError> {
        options.check(layout)?;
        let (grid, expert_grid) = (layout.grid(), layout.expert_grid());
        let lists = |kind: GroupKind| match kind.is_expert() {
            true => expert_grid.groups(kind.axes()),
            false => grid.groups(kind.axes()),
        };
        let num_instances = options.num_distributed_optimizer_instances;
        let expt_dp = || levels(&lists(GroupKind::ExptDp), &[layout.edp() / num_instances, num_instances]);
        let mut kinds = BTreeMap::new();
        for kind in GroupKind::ALL.iter().copied() {
            let groups = match kind {
                GroupKind::Embd => ends_of_pipelines(lists(GroupKind::Pp), true),
                GroupKind::PosEmbd => ends_of_pipelines(lists(GroupKind::Pp), false),
                GroupKind::DpCpAg | GroupKind::ExptDpAg => {
                    kinds.insert(kind, None);
                    continue;
                }
                GroupKind::IntraDpCp => blocks(lists(GroupKind::DpCp), num_instances),
                GroupKind::IntraExptDp => expt_dp().swap_remove(0),
                GroupKind::InterDistOpt => expt_dp().swap_remove(1),
                GroupKind::IntraDistOpt => merged(lists(GroupKind::TpEpPp), num_instances),
                _ => lists(kind),
            };
            kinds.insert(kind, Some(GroupsOfKind::new(of_ranks(groups))));
        }
        let hcp = match options.hierarchical_context_parallel_sizes.as_slice() {
            [] => Vec::new(),
            sizes => levels(&lists(GroupKind::Cp), sizes),
        };
        let hcp = hcp.into_iter().map(|level| GroupsOfKind::new(of_ranks(level))).collect();
        let table =
            GroupTable { model: model.into(), ranks: grid.ranks().collect(), kinds, hcp, pipeline: None };
        Ok(match options.create_all_gather_group {
            true => table.with_all_gather_groups(layout.experts().ep > 1),
            false => table,
        })
    }

    /// A collection that so far holds no group, for a model on `ranks`.
    pub fn empty(model: impl Into<String>, mut ranks: Vec<Rank>) -> Self {
        ranks.sort_unstable();
        GroupTable { model: model.into(), ranks, kinds: BTreeMap::new(), hcp: Vec::new(), pipeline: None }
    }

    /// The same collection with other groups of one kind; `None` says that there is none.
    ///
    /// # Panics
    /// If these are groups to gather parameters in: [`with_all_gather`](Self::with_all_gather) checks them.
    pub fn with(mut self, kind: GroupKind, groups: Option<Vec<Group>>) -> Self {
        assert!(groups.is_none() || replicas_of(kind).is_none(), "`{kind}` is checked against its replicas");
        self.kinds.insert(kind, groups.map(GroupsOfKind::new));
        self
    }

    /// The same collection with these groups to gather parameters in, `dp_cp_ag` or `expt_dp_ag`.
    ///
    /// # Errors
    /// If they are not the ranks of the weight replicas, in their order.
    ///
    /// # Panics
    /// If `kind` is another one.
    pub fn with_all_gather(mut self, kind: GroupKind, groups: Vec<Group>) -> Result<Self, AllGatherRanks> {
        let replicas = replicas_of(kind).expect("parameters are gathered in `dp_cp_ag` and `expt_dp_ag`");
        if groups != self.groups(replicas) {
            return Err(AllGatherRanks { kind, replicas, model: self.model });
        }
        self.kinds.insert(kind, Some(GroupsOfKind::new(groups)));
        Ok(self)
    }

    /// The same collection with second communicators for `dp_cp` and, if `experts` are to be covered, for `expt_dp`.
    fn with_all_gather_groups(mut self, experts: bool) -> Self {
        let mut again = vec![(GroupKind::DpCpAg, GroupKind::DpCp)];
        again.extend(experts.then_some((GroupKind::ExptDpAg, GroupKind::ExptDp)));
        for (kind, replicas) in again {
            let groups = self.kinds[&replicas].clone();
            self.kinds.insert(kind, groups);
        }
        self
    }

    /// The same collection without any word about one kind.
    pub fn without(mut self, kind: GroupKind) -> Self {
        self.kinds.remove(&kind);
        self
    }

    /// The same collection of a model whose layers are divided over the stages of `pp`. Without it every stage holds every
    /// tensor.
    ///
    /// # Panics
    /// If the pipeline has another number of stages.
    pub fn with_pipeline(mut self, pipeline: Pipeline) -> Self {
        let num_stages = self.groups(GroupKind::Pp).first().map_or(1, Group::size);
        assert_eq!(pipeline.num_stages() as usize, num_stages, "stages of the pipeline and ranks of `pp`");
        self.pipeline = Some(pipeline);
        self
    }

    /// Which layers the stages hold.
    pub fn pipeline(&self) -> Option<&Pipeline> {
        self.pipeline.as_ref()
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

/// The weight replicas that a kind gathers parameters among, if it is for that.
fn replicas_of(kind: GroupKind) -> Option<GroupKind> {
    match kind {
        GroupKind::DpCpAg => Some(GroupKind::DpCp),
        GroupKind::ExptDpAg => Some(GroupKind::ExptDp),
        _ => None,
    }
}

fn of_ranks(lists: Vec<Vec<Rank>>) -> Vec<Group> {
    lists.into_iter().map(Group::new).collect()
}

/// Each list as a hierarchy of `sizes`, whose product is its length, the innermost level first: the groups of each level.
/// A group fixes the positions on all other levels.
fn levels(lists: &[Vec<Rank>], sizes: &[u32]) -> Vec<Vec<Vec<Rank>>> {
    let mut inside = 1;
    let mut all = Vec::new();
    for size in sizes.iter().map(|size| *size as usize) {
        let group = |list: &[Rank], low| list[low..].iter().copied().step_by(inside).collect::<Vec<Rank>>();
        let outer = lists.iter().flat_map(|list| list.chunks(inside * size));
        all.push(outer.flat_map(|list| (0..inside).map(move |low| group(list, low))).collect());
        inside *= size;
    }
    all
}

/// Each list in `number` contiguous blocks.
fn blocks(lists: Vec<Vec<Rank>>, number: u32) -> Vec<Vec<Rank>> {
    lists.iter().flat_map(|list| list.chunks(list.len() / number as usize)).map(<[Rank]>::to_vec).collect()
}

/// Lists one after another, merged to `number` sorted ones.
fn merged(lists: Vec<Vec<Rank>>, number: u32) -> Vec<Vec<Rank>> {
    let merge = |lists: &[Vec<Rank>]| {
        let mut ranks = lists.concat();
        ranks.sort_unstable();
        ranks
    };
    lists.chunks(lists.len() / number as usize).map(merge).collect()
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

    /// This rank's group on each level inside `cp`, the innermost first; none without a hierarchy.
    pub fn hierarchical_cp(&self) -> impl Iterator<Item = &Group> {
        self.table.hcp.iter().map(|level| {
            let (index, _) = level.own[&self.rank];
            &level.groups[index]
        })
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
