//! Process groups: worked vectors, the identities of the two views, placement on fast domains, and collections with
//! gaps.

use expect_test::expect;
use mesh::{
    Axis, ConfiguredCp, Group, GroupKind, GroupTable, LayoutSizes, ParallelLayout, ProcessGroups, Rank,
    RankOrder,
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
        let layout = layout(&numbers(axes), order, 0);
        let named = [
            ("dp", layout.dp()),
            ("gtp_batch_shards", layout.gtp_batch_shards()),
            ("runtime_cp", layout.runtime_cp().0),
            ("batch_parallel", layout.batch_parallel_size()),
            ("weight_replicas", layout.num_weight_replicas()),
        ];
        assert_eq!(BTreeMap::from(named), numbers(lines.next().unwrap()), "{name}");
        let table = table(&layout);
        let mut kinds = Vec::new();
        for line in lines {
            let (kind, expected) = line.split_once('=').unwrap();
            let kind: GroupKind = kind.trim().parse().unwrap();
            let text = |group: &Group| {
                let ranks: Vec<String> = group.ranks().iter().map(Rank::to_string).collect();
                format!("[{}]", ranks.join(","))
            };
            let found: Vec<String> = table.groups(kind).iter().map(text).collect();
            assert_eq!(found.join(" "), expected.trim(), "{name}: {kind}");
            kinds.push(kind);
        }
        assert_eq!(kinds, GroupKind::ALL, "{name}");
        num_vectors += 1;
    }
    assert_eq!(num_vectors, 12);
}

/// Every layout of at most `world_size_max` ranks in the canonical order.
fn layouts(world_size_max: u32, rank_offset: u32) -> Vec<ParallelLayout> {
    let mut all = vec![BTreeMap::new()];
    for axis in ["tp", "seq", "batch", "cp", "dp", "pp"] {
        all = (all.into_iter())
            .flat_map(|sizes: BTreeMap<&str, u32>| {
                let most = world_size_max / sizes.values().product::<u32>();
                (1..=most).map(move |size| {
                    let mut longer = sizes.clone();
                    longer.insert(axis, size);
                    longer
                })
            })
            .collect();
    }
    all.iter().map(|sizes| layout(sizes, RankOrder::GtpInsideCp, rank_offset)).collect()
}

/// The members of the groups of `kind` of all `ranks`, one after another, sorted.
fn joined(groups: &ProcessGroups, ranks: &[Rank], kind: GroupKind) -> Vec<Rank> {
    let mut all: Vec<Rank> = ranks.iter().flat_map(|rank| members(&groups.of(*rank), kind)).collect();
    all.sort_unstable();
    all
}

#[test]
fn each_contribution_counts_once_in_both_views() {
    use GroupKind::{Cp, DpCp, DpCpGtpRemat, DpGtpRemat, GtpRemat};
    let mut num_layouts = 0;
    for layout in layouts(64, 7) {
        let table = table(&layout);
        // Two looks at the same ranks: shards then replicas of a weight, sequence pieces then samples.
        for (pieces, copies) in [(GtpRemat, DpCp), (DpGtpRemat, Cp)] {
            for rank in table.ranks() {
                let groups = table.for_rank(*rank);
                let holders = members(&groups, copies);
                let meeting: Vec<Rank> =
                    members(&groups, pieces).into_iter().filter(|member| holders.contains(member)).collect();
                assert_eq!(meeting, [*rank], "{layout}: {pieces} and {copies} of rank {rank}");
                // Equal as lists, so without repetition.
                assert_eq!(
                    joined(&groups, &holders, pieces),
                    members(&groups, DpCpGtpRemat),
                    "{layout}: {pieces} of the members of {copies} of rank {rank}"
                );
                for holder in holders {
                    assert_eq!(
                        groups.of(holder).position(pieces),
                        groups.position(pieces),
                        "{layout}: {holder}"
                    );
                }
            }
        }
        num_layouts += 1;
    }
    assert!(num_layouts > 1000, "{num_layouts}");
}

#[test]
fn every_rank_is_in_one_group_of_each_kind_but_the_embedding_ones() {
    for layout in layouts(24, 3) {
        let table = table(&layout);
        for kind in GroupKind::ALL.iter().copied() {
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
    expect!["teacher: gtp_remat 1, cp 1, tp_cp 1, dp 1, dp_gtp_remat 1, dp_cp_gtp_remat 1, tp_dp 1, tp_dp_cp 1, pp none, tp_pp 1, mp 1, embd 1, pos_embd 1"].assert_eq(&groups.to_string());
}

#[test]
fn an_unknown_group_is_refused_with_the_known_ones() {
    expect!["there is no process group `dp_tp`; the groups are `tp`, `gtp_remat`, `cp`, `tp_cp`, `dp`, `dp_gtp_remat`, `dp_cp`, `dp_cp_gtp_remat`, `tp_dp`, `tp_dp_cp`, `pp`, `tp_pp`, `mp`, `embd`, `pos_embd`"].assert_eq(&"dp_tp".parse::<GroupKind>().unwrap_err().to_string());
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
