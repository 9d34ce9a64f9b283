//! Process groups: worked vectors, the identities of the two views, placement on fast domains, and collections with
//! gaps.

use expect_test::expect;
use mesh::{
    Axis, ConfiguredCp, ExpertSizes, Group, GroupKind, GroupOptions, GroupTable, LayoutSizes, ParallelLayout,
    ProcessGroups, Rank, RankOrder,
};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The layout with these axis sizes; DP is what is left of the world.
fn layout(sizes: &BTreeMap<&str, u32>, order: RankOrder, rank_offset: u32) -> ParallelLayout {
    ParallelLayout::new(LayoutSizes {
        world_size: sizes.values().product(),
        rank_offset,
        tp: sizes["tp"],
        pp: sizes["pp"],
        cp: ConfiguredCp(sizes["cp"]),
        gtp: sizes["seq"] * sizes["batch"],
        gtp_sequence_shards: sizes["seq"],
        order,
    })
    .unwrap()
}

fn table(layout: &ParallelLayout) -> Arc<GroupTable> {
    Arc::new(GroupTable::new("gpt", layout))
}

fn members(groups: &ProcessGroups, kind: GroupKind) -> Vec<Rank> {
    groups.get(kind).unwrap().ranks().to_vec()
}

fn with_experts(layout: ParallelLayout, sizes: &BTreeMap<&str, u32>) -> ParallelLayout {
    let [etp, ep, egtp] = ["etp", "ep", "egtp"].map(|axis| sizes[axis]);
    layout.with_experts(ExpertSizes { etp, ep, egtp }).unwrap()
}

/// `[0,1] [2,3]`
fn text<'a>(groups: impl IntoIterator<Item = &'a Group>) -> String {
    let text = |group: &Group| {
        let ranks: Vec<String> = group.ranks().iter().map(Rank::to_string).collect();
        format!("[{}]", ranks.join(","))
    };
    groups.into_iter().map(text).collect::<Vec<String>>().join(" ")
}

const DENSE_KINDS: [GroupKind; 15] = {
    use GroupKind::*;
    [Tp, GtpRemat, Cp, TpCp, Dp, DpGtpRemat, DpCp, DpCpGtpRemat, TpDp, TpDpCp, Pp, TpPp, Mp, Embd, PosEmbd]
};
const EXPERT_KINDS: [GroupKind; 8] = {
    use GroupKind::*;
    [Ep, ExptTp, ExptGtpRemat, ExptDp, ExptDpGtpRemat, TpEp, TpEpPp, TpEpPpWithEgtpRemat]
};

fn numbers(line: &str) -> BTreeMap<&str, u32> {
    let pairs = line.split_whitespace().map(|pair| pair.split_once('=').unwrap());
    pairs.map(|(name, value)| (name, value.parse().unwrap())).collect()
}

#[test]
fn groups_and_sizes_are_those_of_the_worked_vectors() {
    let mut num_vectors = 0;
    for vector in include_str!("vectors.txt").split("\n\n").skip(1) {
        let mut lines = vector.lines();
        let name = lines.next().unwrap();
        let axes = lines.next().unwrap().strip_prefix("axes(fast→slow): ").unwrap();
        let order =
            if axes.starts_with("tp=1 cp=") { RankOrder::CpInsideGtp } else { RankOrder::GtpInsideCp };
        let mut layout = layout(&numbers(axes), order, 0);
        let named = [
            ("dp", layout.dp()),
            ("gtp_batch_shards", layout.gtp_batch_shards()),
            ("runtime_cp", layout.runtime_cp().0),
            ("batch_parallel", layout.batch_parallel_size()),
            ("weight_replicas", layout.num_weight_replicas()),
        ];
        assert_eq!(BTreeMap::from(named), numbers(lines.next().unwrap()), "{name}");
        let mut lines: Vec<&str> = lines.collect();
        let mut expected_kinds = DENSE_KINDS.to_vec();
        if let Some(at) = lines.iter().position(|line| line.starts_with("expert axes")) {
            let sizes = numbers(lines.remove(at).split_once(':').unwrap().1);
            layout = with_experts(layout, &sizes);
            assert_eq!((layout.edp(), layout.pp()), (sizes["edp"], sizes["pp"]), "{name}");
            expected_kinds.extend(EXPERT_KINDS);
        }
        let table = table(&layout);
        let mut kinds = Vec::new();
        for line in lines {
            let (kind, expected) = line.split_once('=').unwrap();
            let kind: GroupKind = kind.trim().parse().unwrap();
            assert_eq!(text(table.groups(kind)), expected.trim(), "{name}: {kind}");
            kinds.push(kind);
        }
        assert_eq!(kinds, expected_kinds, "{name}");
        num_vectors += 1;
    }
    assert_eq!(num_vectors, 14);
}

/// Every layout of at most `world_size_max` ranks in the canonical order.
fn layouts(world_size_max: u32, rank_offset: u32) -> Vec<ParallelLayout> {
    let all = grids(world_size_max, ["tp", "seq", "batch", "cp", "dp", "pp"]);
    all.iter().map(|sizes| layout(sizes, RankOrder::GtpInsideCp, rank_offset)).collect()
}

/// Every expert grid of at most `world_size_max` ranks, over a dense grid that is cut by pipelines alone.
fn expert_layouts(world_size_max: u32, rank_offset: u32) -> Vec<ParallelLayout> {
    let all = grids(world_size_max, ["etp", "ep", "egtp", "edp", "pp"]);
    let layout = |sizes: &BTreeMap<&'static str, u32>| {
        let world_size: u32 = sizes.values().product();
        let dense = ParallelLayout::new(LayoutSizes {
            world_size,
            rank_offset,
            pp: sizes["pp"],
            ..ParallelLayout::single().sizes()
        });
        with_experts(dense.unwrap(), sizes)
    };
    all.iter().map(layout).collect()
}

/// Every choice of sizes of these axes whose product is at most `world_size_max`.
fn grids<const N: usize>(world_size_max: u32, axes: [&'static str; N]) -> Vec<BTreeMap<&'static str, u32>> {
    let mut all = vec![BTreeMap::new()];
    for axis in axes {
        all = (all.into_iter())
            .flat_map(|sizes: BTreeMap<&'static str, u32>| {
                let most = world_size_max / sizes.values().product::<u32>();
                (1..=most).map(move |size| {
                    let mut longer = sizes.clone();
                    longer.insert(axis, size);
                    longer
                })
            })
            .collect();
    }
    all
}

/// The members of the groups of `kind` of all `ranks`, one after another, sorted.
fn joined(groups: &ProcessGroups, ranks: &[Rank], kind: GroupKind) -> Vec<Rank> {
    let mut all: Vec<Rank> = ranks.iter().flat_map(|rank| members(&groups.of(*rank), kind)).collect();
    all.sort_unstable();
    all
}

/// Of every rank, the groups of `pieces` of the members of its `copies` make up its `whole`, without repetition; they meet
/// in the rank alone; and those members have one position in `pieces`.
fn assert_two_steps(layout: &ParallelLayout, [pieces, copies, whole]: [GroupKind; 3]) {
    let table = table(layout);
    for rank in table.ranks() {
        let groups = table.for_rank(*rank);
        let holders = members(&groups, copies);
        let meeting: Vec<Rank> =
            members(&groups, pieces).into_iter().filter(|member| holders.contains(member)).collect();
        assert_eq!(meeting, [*rank], "{layout}: {pieces} and {copies} of rank {rank}");
        // Equal as lists, so without repetition.
        assert_eq!(
            joined(&groups, &holders, pieces),
            members(&groups, whole),
            "{layout}: {pieces} of the members of {copies} of rank {rank}"
        );
        for holder in holders {
            assert_eq!(groups.of(holder).position(pieces), groups.position(pieces), "{layout}: {holder}");
        }
    }
}

#[test]
fn each_contribution_counts_once_in_both_views() {
    use GroupKind::{Cp, DpCp, DpCpGtpRemat, DpGtpRemat, GtpRemat};
    let all = layouts(64, 7);
    assert!(all.len() > 1000, "{}", all.len());
    for layout in all {
        // Two looks at the same ranks: shards then replicas of a weight, sequence pieces then samples.
        for steps in [[GtpRemat, DpCp, DpCpGtpRemat], [DpGtpRemat, Cp, DpCpGtpRemat]] {
            assert_two_steps(&layout, steps);
        }
    }
}

#[test]
fn each_contribution_counts_once_on_the_expert_grid() {
    use GroupKind::{
        Ep, ExptDp, ExptDpGtpRemat, ExptGtpRemat, ExptTp, Pp, TpDpCp, TpEp, TpEpPp, TpEpPpWithEgtpRemat,
    };
    let all = expert_layouts(64, 7);
    assert!(all.len() > 1000, "{}", all.len());
    for layout in all {
        for steps in [
            [ExptGtpRemat, ExptDp, ExptDpGtpRemat],
            [ExptTp, Ep, TpEp],
            [TpEp, Pp, TpEpPp],
            [ExptGtpRemat, TpEpPp, TpEpPpWithEgtpRemat],
            [TpEp, ExptDpGtpRemat, TpDpCp],
        ] {
            assert_two_steps(&layout, steps);
        }
        let pipelines = layout.expert_grid().groups(&[Axis::Pp]);
        assert_eq!(pipelines, layout.grid().groups(&[Axis::Pp]), "{layout}: both grids have the same ones");
    }
}

#[test]
fn optimizer_instances_divide_the_replicas_in_blocks() {
    // V11 with two instances: `dp_cp` [0,2] [1,3] [4,6] [5,7], `expt_dp` the same, `tp_ep_pp` [0,1,4,5] [2,3,6,7].
    let sizes = BTreeMap::from([("tp", 2), ("seq", 1), ("batch", 1), ("cp", 1), ("dp", 2), ("pp", 2)]);
    let layout = layout(&sizes, RankOrder::GtpInsideCp, 0);
    let layout = layout.with_experts(ExpertSizes { etp: 1, ep: 2, egtp: 1 }).unwrap();
    let options = |num_distributed_optimizer_instances| GroupOptions {
        num_distributed_optimizer_instances,
        ..GroupOptions::default()
    };
    let two = GroupTable::with_options("moe", &layout, &options(2)).unwrap();
    expect!["[0] [2] [1] [3] [4] [6] [5] [7]"].assert_eq(&text(two.groups(GroupKind::IntraDpCp)));
    expect!["[0] [2] [1] [3] [4] [6] [5] [7]"].assert_eq(&text(two.groups(GroupKind::IntraExptDp)));
    expect!["[0,2] [1,3] [4,6] [5,7]"].assert_eq(&text(two.groups(GroupKind::InterDistOpt)));
    expect!["[0,1,4,5] [2,3,6,7]"].assert_eq(&text(two.groups(GroupKind::IntraDistOpt)));
    let one = GroupTable::new("moe", &layout);
    assert_eq!(one.groups(GroupKind::IntraDpCp), one.groups(GroupKind::DpCp));
    assert_eq!(one.groups(GroupKind::IntraExptDp), one.groups(GroupKind::ExptDp));
    expect!["[0,1,2,3,4,5,6,7]"].assert_eq(&text(one.groups(GroupKind::IntraDistOpt)));
    let error = GroupTable::with_options("moe", &layout, &options(3)).unwrap_err();
    expect![[r#"
        RM2001 3 distributed optimizer instances do not divide the 2 weight replicas and the 2 of experts
        help: `--num-distributed-optimizer-instances` 1 or 2 would fit"#]]
    .assert_eq(&format!("{} {error}\nhelp: {}", error.code(), error.help()));
}

#[test]
fn on_every_expert_grid_instances_share_the_replicas_out() {
    use GroupKind::{ExptDp, InterDistOpt, IntraDistOpt, IntraExptDp};
    for layout in expert_layouts(24, 3).into_iter().filter(|layout| layout.experts().egtp == 1) {
        for instances in (1..=layout.edp()).filter(|number| layout.edp().is_multiple_of(*number)) {
            let options =
                GroupOptions { num_distributed_optimizer_instances: instances, ..GroupOptions::default() };
            let table = Arc::new(GroupTable::with_options("moe", &layout, &options).unwrap());
            assert_eq!(table.groups(IntraDistOpt).len() as u32, instances);
            for rank in table.ranks() {
                let groups = table.for_rank(*rank);
                let peers = members(&groups, InterDistOpt);
                assert_eq!(peers.len() as u32, instances, "{layout}");
                assert_eq!(joined(&groups, &peers, IntraExptDp), members(&groups, ExptDp), "{layout}");
                assert_eq!(joined(&groups, &peers, IntraDistOpt), table.ranks(), "{layout}");
            }
        }
    }
}

#[test]
fn levels_inside_context_parallelism_are_a_hierarchy_of_positions() {
    let sizes = BTreeMap::from([("tp", 1), ("seq", 1), ("batch", 1), ("cp", 16), ("dp", 1), ("pp", 1)]);
    let flat = layout(&sizes, RankOrder::GtpInsideCp, 0);
    let options = |sizes: &[u32]| GroupOptions {
        hierarchical_context_parallel_sizes: sizes.to_vec(),
        ..GroupOptions::default()
    };
    let table = Arc::new(GroupTable::with_options("gpt", &flat, &options(&[2, 2, 4])).unwrap());
    let of = |rank| text(table.for_rank(Rank(rank)).hierarchical_cp());
    expect!["[0,1] [0,2] [0,4,8,12]"].assert_eq(&of(0));
    expect!["[4,5] [5,7] [1,5,9,13]"].assert_eq(&of(5));
    assert_eq!(GroupTable::new("gpt", &flat), GroupTable::with_options("gpt", &flat, &options(&[])).unwrap());

    // Sequence shards are part of it: V9 has runtime CP 4 with the groups [0,1,4,5] and [2,3,6,7].
    let sizes = BTreeMap::from([("tp", 1), ("seq", 2), ("batch", 2), ("cp", 2), ("dp", 1), ("pp", 1)]);
    let sharded = layout(&sizes, RankOrder::GtpInsideCp, 0);
    let table = Arc::new(GroupTable::with_options("gpt", &sharded, &options(&[2, 2])).unwrap());
    expect!["[6,7] [3,7]"].assert_eq(&text(table.for_rank(Rank(7)).hierarchical_cp()));
    let error = GroupTable::with_options("gpt", &sharded, &options(&[2])).unwrap_err();
    expect![[r#"
        RM2001 hierarchical context parallel sizes 2 make 2, not runtime CP 4
        help: give `--hierarchical-context-parallel-sizes` whose product is 4, the innermost first, or leave them out"#]]
    .assert_eq(&format!("{} {error}\nhelp: {}", error.code(), error.help()));
}

#[test]
fn parameters_are_gathered_among_the_weight_replicas_and_nobody_else() {
    use GroupKind::{DpCp, DpCpAg, DpGtpRemat, ExptDp, ExptDpAg};
    let options = GroupOptions { create_all_gather_group: true, ..GroupOptions::default() };
    for world_size in [4, 8] {
        // Context parallelism over all ranks, half of it inside GTP: replicas are configured CP, not runtime CP.
        let sizes = BTreeMap::from([
            ("tp", 1),
            ("seq", 2),
            ("batch", 1),
            ("cp", world_size / 2),
            ("dp", 1),
            ("pp", 1),
        ]);
        let layout = layout(&sizes, RankOrder::GtpInsideCp, 0);
        let plain = Arc::new(GroupTable::new("gpt", &layout));
        assert_eq!(plain.for_rank(Rank(0)).get(DpCpAg), None, "only when it is asked for");
        let table = Arc::new(GroupTable::with_options("gpt", &layout, &options).unwrap());
        assert_eq!(table.groups(DpCpAg), table.groups(DpCp));
        assert_eq!(table.for_rank(Rank(0)).size(DpCpAg), world_size / 2);
        assert_eq!(table.for_rank(Rank(0)).size(DpGtpRemat), 1);
        assert!(table.groups(ExptDpAg).is_empty(), "without experts on several ranks");

        let runtime = plain.groups(GroupKind::Cp).to_vec();
        let error = GroupTable::new("gpt", &layout).with_all_gather(DpCpAg, runtime).unwrap_err();
        expect![
            "the ranks of `dp_cp_ag` are not those of `dp_cp` of `gpt`, among which parameters are gathered"
        ]
        .assert_eq(&error.to_string());
        let replicas = plain.groups(DpCp).to_vec();
        let again = GroupTable::new("gpt", &layout).with_all_gather(DpCpAg, replicas).unwrap();
        assert_eq!(again, *table);
    }
    let sizes = BTreeMap::from([("tp", 1), ("seq", 1), ("batch", 1), ("cp", 1), ("dp", 4), ("pp", 1)]);
    let experts = BTreeMap::from([("etp", 1), ("ep", 2), ("egtp", 1)]);
    let moe = with_experts(layout(&sizes, RankOrder::GtpInsideCp, 0), &experts);
    let table = GroupTable::with_options("moe", &moe, &options).unwrap();
    expect!["[0,2] [1,3]"].assert_eq(&text(table.groups(ExptDpAg)));
    assert_eq!(table.groups(ExptDpAg), table.groups(ExptDp));
}

#[test]
fn every_rank_is_in_one_group_of_each_kind_but_the_embedding_ones() {
    for layout in layouts(24, 3) {
        let table = table(&layout);
        let asked_for = |kind: &GroupKind| [GroupKind::DpCpAg, GroupKind::ExptDpAg].contains(kind);
        for kind in GroupKind::ALL.iter().copied().filter(|kind| !asked_for(kind)) {
            let mut all: Vec<Rank> =
                table.groups(kind).iter().flat_map(|group| group.ranks().to_vec()).collect();
            all.sort_unstable();
            let grid = layout.grid();
            let stage = |rank: &Rank| grid.coordinate(*rank, Axis::Pp);
            let expected: Vec<Rank> = (grid.ranks())
                .filter(|rank| match kind {
                    GroupKind::Embd => [0, layout.pp() - 1].contains(&stage(rank)),
                    GroupKind::PosEmbd => stage(rank) == 0,
                    _ => true,
                })
                .collect();
            assert_eq!(all, expected, "{layout}: {kind}");
        }
    }
}

#[test]
fn weight_tiles_stay_inside_a_fast_domain_and_sequences_span_domains() {
    for tp in [1, 2] {
        let sizes =
            BTreeMap::from([("tp", tp), ("seq", 64 / tp), ("batch", 1), ("cp", 2), ("dp", 1), ("pp", 1)]);
        let layout = layout(&sizes, RankOrder::GtpInsideCp, 0);
        assert_eq!((layout.world_size(), layout.batch_parallel_size()), (128, 1));
        assert_eq!(layout.num_weight_replicas(), 2);
        let table = table(&layout);
        let tiles = layout.grid().groups(&[Axis::Tp, Axis::Seq, Axis::Bat]);
        let domains: Vec<Vec<Rank>> =
            [0..64, 64..128].map(|domain| domain.map(Rank).collect::<Vec<Rank>>()).into();
        assert_eq!(tiles, domains);
        for group in table.groups(GroupKind::GtpRemat) {
            assert_eq!(group.size() as u32, 64 / tp);
        }
        for group in table.groups(GroupKind::Cp) {
            assert_eq!(group.size() as u32, 128 / tp);
        }
    }
}

#[test]
fn weights_and_optimizer_rows_stay_where_they_are_when_cp_or_sequence_shards_change() {
    for tp in [1, 2] {
        let mut first: Option<Arc<GroupTable>> = None;
        for cp in [1, 2, 4] {
            for inside in [2, 8, 32] {
                let gtp = 64 / tp;
                let layout = ParallelLayout::new(LayoutSizes {
                    world_size: 256,
                    rank_offset: 0,
                    tp,
                    pp: 1,
                    cp: ConfiguredCp(cp),
                    gtp,
                    gtp_sequence_shards: inside,
                    order: RankOrder::GtpInsideCp,
                })
                .unwrap();
                let table = table(&layout);
                let first = first.get_or_insert_with(|| Arc::clone(&table));
                for kind in [GroupKind::GtpRemat, GroupKind::DpCp, GroupKind::Mp] {
                    assert_eq!(table.groups(kind), first.groups(kind), "{layout}: {kind}");
                }
            }
        }
    }
}

#[test]
fn coordinates_and_ranks_are_each_others_inverse() {
    for layout in layouts(24, 5) {
        let grid = layout.grid();
        for rank in grid.ranks() {
            let mut stride = 1;
            let mut back = 5;
            for (axis, size) in grid.axes() {
                back += grid.coordinate(rank, *axis) * stride;
                stride *= size;
            }
            assert_eq!(Rank(back), rank, "{layout}");
        }
    }
}

#[test]
fn an_absent_group_is_position_0_of_1() {
    let ranks: Vec<Rank> = [Rank(0), Rank(1)].into();
    let only_dp = GroupTable::empty("gpt", ranks.clone()).with(GroupKind::Dp, Some(vec![Group::new(ranks)]));
    let groups = Arc::new(only_dp).for_rank(Rank(1));
    for kind in [GroupKind::Cp, GroupKind::Tp, GroupKind::Pp, GroupKind::DpGtpRemat] {
        assert_eq!((groups.position(kind).0, groups.size(kind)), (0, 1), "{kind}");
        assert_eq!(groups.get(kind), None);
    }
    assert_eq!((groups.position(GroupKind::Dp).0, groups.size(GroupKind::Dp)), (1, 2));
}

#[test]
fn every_missing_group_is_named_and_none_is_not_absent() {
    let table = GroupTable::new("teacher", &ParallelLayout::single())
        .without(GroupKind::Tp)
        .without(GroupKind::DpCp)
        .with(GroupKind::Pp, None);
    assert!(!table.is_present(GroupKind::Tp));
    assert!(table.is_present(GroupKind::Pp));
    let groups = Arc::new(table).for_rank(Rank(0));
    assert_eq!(groups.require("point-to-point", &[GroupKind::Cp, GroupKind::Dp]), Ok(()));
    let error = groups
        .require("sequence packing", &[GroupKind::Tp, GroupKind::Pp, GroupKind::Cp, GroupKind::DpCp])
        .unwrap_err();
    expect!["sequence packing needs the process groups `tp`, `pp`, `dp_cp`, which the collection of `teacher` does not have"].assert_eq(&error.to_string());
    expect!["teacher: gtp_remat 1, cp 1, tp_cp 1, dp 1, dp_gtp_remat 1, dp_cp_gtp_remat 1, tp_dp 1, tp_dp_cp 1, pp none, tp_pp 1, mp 1, embd 1, pos_embd 1, ep 1, expt_tp 1, expt_gtp_remat 1, expt_dp 1, expt_dp_gtp_remat 1, tp_ep 1, tp_ep_pp 1, tp_ep_pp_with_egtp_remat 1, dp_cp_ag none, expt_dp_ag none, intra_dp_cp 1, intra_expt_dp 1, inter_dist_opt 1, intra_dist_opt 1"].assert_eq(&groups.to_string());
}

#[test]
fn an_unknown_group_is_refused_with_the_known_ones() {
    expect!["there is no process group `dp_tp`; the groups are `tp`, `gtp_remat`, `cp`, `tp_cp`, `dp`, `dp_gtp_remat`, `dp_cp`, `dp_cp_gtp_remat`, `tp_dp`, `tp_dp_cp`, `pp`, `tp_pp`, `mp`, `embd`, `pos_embd`, `ep`, `expt_tp`, `expt_gtp_remat`, `expt_dp`, `expt_dp_gtp_remat`, `tp_ep`, `tp_ep_pp`, `tp_ep_pp_with_egtp_remat`, `dp_cp_ag`, `expt_dp_ag`, `intra_dp_cp`, `intra_expt_dp`, `inter_dist_opt`, `intra_dist_opt`"].assert_eq(&"dp_tp".parse::<GroupKind>().unwrap_err().to_string());
}

#[test]
fn two_models_of_one_job_have_their_own_groups() {
    let sizes = BTreeMap::from([("tp", 2), ("seq", 1), ("batch", 1), ("cp", 1), ("dp", 2), ("pp", 1)]);
    let student = table(&layout(&sizes, RankOrder::GtpInsideCp, 0)).for_rank(Rank(1));
    let teacher = table(&layout(&sizes, RankOrder::GtpInsideCp, 4)).for_rank(Rank(5));
    assert_eq!(members(&student, GroupKind::Dp), [Rank(1), Rank(3)]);
    assert_eq!(members(&teacher, GroupKind::Dp), [Rank(5), Rank(7)]);
    assert_eq!(student.position(GroupKind::Tp), teacher.position(GroupKind::Tp));
}
