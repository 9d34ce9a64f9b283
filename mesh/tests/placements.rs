//! What each rank holds: laws over all ranks of any layout, worked cuts, and tensors cut and put together by value.

#![allow(clippy::single_range_in_vec_init)] // lists of ranges, of which a rank often holds one

use expect_test::expect;
use mesh::{
    ConfiguredCp, DimPlacement, Group, GroupKind, GroupTable, LayoutSizes, LocalShard, ParallelLayout,
    Placement, ProcessGroups, Rank, RankOrder, Region, ReplicaId, Shape, prove_tiling,
};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// TP, GTP, configured CP and DP of a layout without sequence shards.
fn ranks([tp, gtp, cp, dp]: [u32; 4]) -> Vec<ProcessGroups> {
    ranks_of(LayoutSizes {
        world_size: tp * gtp * cp * dp,
        rank_offset: 0,
        tp,
        pp: 1,
        cp: ConfiguredCp(cp),
        gtp,
        gtp_sequence_shards: 1,
        order: RankOrder::GtpInsideCp,
    })
}

fn ranks_of(sizes: LayoutSizes) -> Vec<ProcessGroups> {
    let table = Arc::new(GroupTable::new("gpt", &ParallelLayout::new(sizes).unwrap()));
    table.ranks().iter().map(|rank| table.for_rank(*rank)).collect()
}

fn tp(degree: u32) -> Vec<ProcessGroups> {
    ranks([degree, 1, 1, 1])
}

fn shard(placement: &Placement, groups: &ProcessGroups) -> LocalShard {
    placement.shard(groups).unwrap()
}

/// Rows of a tensor of one dim: where they lie in the buffer and which they are.
fn rows(placement: &Placement, groups: &ProcessGroups) -> Vec<(Range<u64>, Range<u64>)> {
    let shard = shard(placement, groups);
    shard.pieces.iter().map(|piece| (piece.local.range(0), piece.region.range(0))).collect()
}

fn row_ranges(placement: &Placement, ranks: &[ProcessGroups]) -> Vec<Vec<Range<u64>>> {
    let of = |groups| rows(placement, groups).into_iter().map(|(_, global)| global).collect();
    ranks.iter().map(of).collect()
}

/// Every element's own index: a swapped, shifted or repeated element shows by value.
fn labels(shape: &Shape) -> Vec<u64> {
    (0..shape.numel()).collect()
}

const PADDING: u64 = u64::MAX;

/// What each rank holds of `tensor`.
fn cut(placement: &Placement, tensor: &[u64], ranks: &[ProcessGroups]) -> Vec<Vec<u64>> {
    let buffer = |groups| {
        let shard = shard(placement, groups);
        let mut buffer = vec![PADDING; shard.shape.numel() as usize];
        for piece in &shard.pieces {
            let from = piece.region.runs(&placement.shape()).flatten();
            for (to, from) in piece.local.runs(&shard.shape).flatten().zip(from) {
                buffer[to as usize] = tensor[from as usize];
            }
        }
        buffer
    };
    ranks.iter().map(buffer).collect()
}

/// The tensor that the main replicas hold together.
fn assemble(placement: &Placement, buffers: &[Vec<u64>], ranks: &[ProcessGroups]) -> Vec<u64> {
    let mut tensor = vec![PADDING; placement.shape().numel() as usize];
    for (buffer, groups) in buffers.iter().zip(ranks) {
        let shard = shard(placement, groups);
        if !shard.replica.is_main() {
            continue;
        }
        for piece in &shard.pieces {
            let to = piece.region.runs(&placement.shape()).flatten();
            for (from, to) in piece.local.runs(&shard.shape).flatten().zip(to) {
                tensor[to as usize] = buffer[from as usize];
            }
        }
    }
    tensor
}

fn assert_survives(placement: &Placement, ranks: &[ProcessGroups]) {
    let tensor = labels(&placement.shape());
    assert_eq!(assemble(placement, &cut(placement, &tensor, ranks), ranks), tensor);
}

/// The placements of a gated model's weights, biases and optimizer rows, with `rows × cols` elements a part.
fn placements(rows: u64, cols: u64, tp: u64) -> Vec<(&'static str, Placement)> {
    use GroupKind::{DpCp, DpCpGtpRemat, DpGtpRemat, GtpRemat, Tp};
    let whole = DimPlacement::whole;
    let named = |name, dims: &[DimPlacement]| (name, Placement::new(dims.to_vec()));
    let column = [whole(rows * tp).exact(Tp).ceil(GtpRemat), whole(cols)];
    let row = [whole(rows).ceil(GtpRemat), whole(cols * tp).exact(Tp)];
    let fused = DimPlacement::fused(&[rows * tp, rows * tp]).exact(Tp);
    let mut all = vec![
        named("replicated", &[whole(rows), whole(cols)]),
        named("scalar", &[]),
        named("column", &column),
        named("row", &row),
        named("gate and up", &[fused.clone().ceil(GtpRemat), whole(cols)]),
        named("gate and up, aligned", &[fused.aligned_to(4).ceil(GtpRemat), whole(cols)]),
        named("uneven parts", &[DimPlacement::fused(&[3 * tp, tp, rows * tp]).exact(Tp).ceil(GtpRemat)]),
        named(
            "vocabulary",
            &[whole(rows).padded_to((rows + 1).next_multiple_of(4 * tp)).exact(Tp).ceil(GtpRemat)],
        ),
        named("uneven twice", &[whole(rows).ceil(Tp).ceil(GtpRemat), whole(cols)]),
        named("rows over all copies", &[whole(rows).ceil(DpCpGtpRemat)]),
        named("a row a lane", &[whole(rows).ceil(DpGtpRemat)]),
    ];
    let optimizer: Vec<_> = (all.iter())
        .filter(|(name, _)| !name.starts_with("rows over") && !name.starts_with("a row"))
        .map(|(name, placement)| (*name, placement.clone().with_rows_over(DpCp)))
        .collect();
    all.extend(optimizer);
    all
}

/// Boxes of main replicas tile the tensor, each shard's copies have different ids of which one is main, and pieces do
/// not touch in the buffer.
fn check_laws(name: &str, placement: &Placement, ranks: &[ProcessGroups]) {
    let mut main = Vec::new();
    let mut copies: BTreeMap<Vec<Region>, Vec<ReplicaId>> = BTreeMap::new();
    for groups in ranks {
        let shard = shard(placement, groups);
        for (at, piece) in shard.pieces.iter().enumerate() {
            assert_eq!(piece.region.shape(), piece.local.shape(), "{name}");
            assert!(!piece.region.is_empty(), "{name}");
            assert!(Region::whole(&shard.shape).contains(&piece.local), "{name}");
            assert!(
                shard.pieces[..at].iter().all(|other| other.local.intersect(&piece.local).is_none()),
                "{name}"
            );
        }
        let regions: Vec<Region> = shard.pieces.into_iter().map(|piece| piece.region).collect();
        if shard.replica.is_main() {
            main.extend(regions.clone());
        }
        if !regions.is_empty() {
            copies.entry(regions).or_default().push(shard.replica);
        }
    }
    prove_tiling(&placement.shape(), &main.iter().collect::<Vec<_>>())
        .unwrap_or_else(|fault| panic!("{name}: {fault:?}"));
    for (regions, mut replicas) in copies {
        assert_eq!(replicas.iter().filter(|replica| replica.is_main()).count(), 1, "{name}: {regions:?}");
        let num_replicas = replicas.len();
        replicas.sort_unstable();
        replicas.dedup();
        assert_eq!(replicas.len(), num_replicas, "{name}: {regions:?}");
    }
}

proptest! {
    #[test]
    fn main_replicas_tile_every_tensor_under_every_layout(
        (tp, inside, batch, cp, dp) in (1..4u32, 1..4u32, 1..4u32, 1..4u32, 1..4u32),
        (rows, cols) in (0..9u64, 1..3u64),
    ) {
        let ranks = ranks_of(LayoutSizes {
            world_size: tp * inside * batch * cp * dp,
            rank_offset: 3,
            tp,
            pp: 1,
            cp: ConfiguredCp(cp),
            gtp: inside * batch,
            gtp_sequence_shards: inside,
            order: RankOrder::GtpInsideCp,
        });
        for (name, placement) in placements(rows, cols, tp.into()) {
            check_laws(name, &placement, &ranks);
            assert_survives(&placement, &ranks);
        }
    }
}

#[test]
fn parameters_that_gtp_does_not_cut_have_one_owner_among_gtp_peers_too() {
    let ranks = ranks([1, 2, 1, 2]);
    let norm = Placement::new(vec![DimPlacement::whole(64)]);
    let weight = Placement::new(vec![DimPlacement::whole(64).ceil(GroupKind::GtpRemat)]);
    let owners = |placement: &Placement| {
        let main = ranks.iter().filter(|groups| placement.replica(groups).is_main());
        main.map(ProcessGroups::rank).collect::<Vec<Rank>>()
    };
    assert_eq!(owners(&norm), [Rank(0)]);
    assert_eq!(owners(&weight), [Rank(0), Rank(1)]);
}

#[test]
fn a_cell_a_lane_is_written_once_where_other_groups_are_absent() {
    let lanes = |num_lanes| Placement::cells(&[(GroupKind::DpGtpRemat, num_lanes)], &[3]);
    let both: Vec<Rank> = [Rank(0), Rank(1)].into();
    let table = GroupTable::empty("gpt", both.clone());
    let with = |kind| {
        let table = Arc::new(table.clone().with(kind, Some(vec![Group::new(both.clone())])));
        both.iter().map(|rank| table.for_rank(*rank)).collect::<Vec<_>>()
    };
    let writers = |placement: &Placement, ranks: &[ProcessGroups]| {
        let main = ranks.iter().filter(|groups| placement.replica(groups).is_main());
        main.map(|groups| (groups.rank().0, shard(placement, groups).pieces[0].region.lo()[0]))
            .collect::<Vec<_>>()
    };
    assert_eq!(writers(&lanes(2), &with(GroupKind::DpGtpRemat)), [(0, 0), (1, 1)]);
    assert_eq!(writers(&lanes(1), &with(GroupKind::Cp)), [(0, 0)]);
}

#[test]
fn gate_and_up_rows_are_two_boxes_of_a_tp_rank() {
    let fc1 = Placement::new(vec![DimPlacement::fused(&[8, 8]).exact(GroupKind::Tp)]);
    let ranks = tp(2);
    assert_eq!(rows(&fc1, &ranks[0]), [(0..4, 0..4), (4..8, 8..12)]);
    assert_eq!(rows(&fc1, &ranks[1]), [(0..4, 4..8), (4..8, 12..16)]);
}

#[test]
fn a_gtp_shard_knows_its_gate_and_its_up_rows() {
    let fc1 =
        Placement::new(vec![DimPlacement::fused(&[9, 9]).exact(GroupKind::Tp).ceil(GroupKind::GtpRemat)]);
    // TP 1, GTP 2: gate only, then up only. GTP 4, ⌈18/4⌉ = 5 rows: the second holds the border.
    assert_eq!(row_ranges(&fc1, &ranks([1, 2, 1, 1])), [vec![0..9], vec![9..18]]);
    assert_eq!(
        row_ranges(&fc1, &ranks([1, 4, 1, 1])),
        [vec![0..5], vec![5..9, 9..10], vec![10..15], vec![15..18]]
    );
    // TP 3, GTP 2: the TP-local weight is 3 gate and 3 up rows.
    assert_eq!(
        row_ranges(&fc1, &ranks([3, 2, 1, 1])),
        [[0..3], [3..6], [6..9], [9..12], [12..15], [15..18]].map(Vec::from)
    );
}

/// The FFN of 96 gate and 96 up rows.
fn gate_up() -> DimPlacement {
    DimPlacement::fused(&[96, 96]).exact(GroupKind::Tp)
}

#[test]
fn gate_and_up_survive_every_change_of_tp_and_weight_shards() {
    let fc1 = Placement::new(vec![gate_up().ceil(GroupKind::GtpRemat), DimPlacement::whole(64)]);
    let moments = fc1.clone().with_rows_over(GroupKind::DpCp);
    for [tp, gtp] in [[4, 1], [1, 1], [2, 1], [8, 1], [1, 8], [1, 2], [1, 4], [2, 4], [4, 1], [1, 3]] {
        assert_survives(&fc1, &ranks([tp, gtp, 1, 2]));
        assert_survives(&moments, &ranks([tp, gtp, 2, 1]));
    }
}

#[test]
fn alignment_pads_gate_and_up_of_each_rank_in_memory_only() {
    let aligned = Placement::new(vec![gate_up().aligned_to(32)]);
    let ranks = tp(4);
    for (r, groups) in ranks.iter().enumerate() {
        let r = r as u64;
        assert_eq!(shard(&aligned, groups).shape, Shape::new(&[64]));
        let (gate, up) = (24 * r..24 * (r + 1), 96 + 24 * r..96 + 24 * (r + 1));
        assert_eq!(rows(&aligned, groups), [(0..24, gate), (32..56, up)]);
    }
    assert_eq!(aligned.shape(), Shape::new(&[192]));
    assert_survives(&aligned, &ranks);
}

#[test]
fn a_padded_vocabulary_keeps_its_257_rows() {
    for (degree, padded) in [(1, 384), (2, 512), (8, 1024)] {
        let rows_placement = DimPlacement::whole(257).padded_to(padded).exact(GroupKind::Tp);
        let vocabulary = Placement::new(vec![rows_placement.ceil(GroupKind::GtpRemat)]);
        assert_eq!(vocabulary.shape(), Shape::new(&[257]));
        let ranks = tp(degree);
        assert_eq!(shard(&vocabulary, &ranks[0]).shape, Shape::new(&[padded / u64::from(degree)]));
        assert_survives(&vocabulary, &ranks);
        if degree == 8 {
            // 128 rows each: the third rank holds one, the later ones padding only.
            let starts =
                [vec![0..128], vec![128..256], vec![256..257], vec![], vec![], vec![], vec![], vec![]];
            assert_eq!(row_ranges(&vocabulary, &ranks), starts);
        }
    }
}

#[test]
fn query_groups_may_be_fewer_than_tp_ranks() {
    // 64 query, 16 key and 16 value rows, cut as plain row ranges.
    let qkv = Placement::new(vec![DimPlacement::whole(96).exact(GroupKind::Tp)]);
    assert_eq!(row_ranges(&qkv, &tp(4)), [[0..24], [24..48], [48..72], [72..96]].map(Vec::from));
    for degree in [4, 1, 8] {
        assert_survives(&qkv, &tp(degree));
    }
}

#[test]
fn fewer_rows_than_ranks_leave_the_last_ranks_empty() {
    let of = |extent| Placement::new(vec![DimPlacement::whole(extent)]).with_rows_over(GroupKind::DpCp);
    let four = ranks([1, 1, 2, 2]);
    let counts = |extent| {
        let lens = four.iter().map(|groups| shard(&of(extent), groups).shape.dims()[0]);
        lens.collect::<Vec<u64>>()
    };
    assert_eq!(counts(6), [2, 2, 2, 0]);
    assert_eq!(counts(10), [3, 3, 3, 1]);
    assert_eq!(counts(1), [1, 0, 0, 0]);
    assert_eq!(counts(0), [0, 0, 0, 0]);
    for extent in [6, 10, 1, 0] {
        assert_eq!(of(extent).shape(), Shape::new(&[extent]));
        for dp in [4, 3, 5, 1] {
            assert_survives(&of(extent), &ranks([1, 1, 1, dp]));
        }
    }
}

#[test]
fn uneven_cuts_compose_and_keep_the_whole_shape() {
    use GroupKind::{DpCp, GtpRemat, Tp};
    let whole = DimPlacement::whole;
    let ten = Placement::new(vec![whole(10), whole(2)]).with_rows_over(DpCp);
    let one = Placement::new(vec![whole(1), whole(17)]).with_rows_over(DpCp);
    let five = Placement::new(vec![whole(5).ceil(Tp).ceil(GtpRemat)]);
    assert_eq!([&ten, &one, &five].map(Placement::shape), [&[10, 2][..], &[1, 17], &[5]].map(Shape::new));
    let shapes = |ranks: &[ProcessGroups]| {
        ranks.iter().map(|groups| shard(&one, groups).shape.to_string()).collect::<Vec<_>>().join(", ")
    };
    expect!["1 × 17, 0 × 17"].assert_eq(&shapes(&ranks([1, 1, 1, 2])));
    assert_eq!(row_ranges(&five, &ranks([2, 1, 1, 1])), [vec![0..3], vec![3..5]]);
    assert_eq!(row_ranges(&five, &ranks([2, 2, 1, 1])), [[0..2], [3..4], [2..3], [4..5]].map(Vec::from));
    assert_survives(&ten, &ranks([1, 1, 1, 4]));
    assert_survives(&one, &ranks([1, 1, 1, 2]));
    assert_survives(&five, &ranks([2, 2, 1, 1]));
}

#[test]
fn ranks_with_nothing_but_padding_hold_no_piece() {
    // 10 elements in a buffer of 32 over 8 ranks: 4, 4 and 2 of them, then padding only.
    let of = |padded| Placement::new(vec![DimPlacement::whole(10).padded_to(padded).ceil(GroupKind::DpCp)]);
    let eight = ranks([1, 1, 2, 4]);
    let none: Vec<Range<u64>> = Vec::new();
    let mut expected = vec![vec![0..4], vec![4..8], vec![8..10]];
    expected.resize(8, none);
    assert_eq!(row_ranges(&of(32), &eight), expected);
    assert!(eight.iter().all(|groups| shard(&of(32), groups).shape == Shape::new(&[4])));
    assert_eq!(of(32).shape(), Shape::new(&[10]));
    assert_survives(&of(32), &eight);
    assert_survives(&of(12), &ranks([1, 1, 3, 1]));
    assert_survives(&of(12), &ranks([1, 1, 1, 1]));
}

#[test]
fn an_inexact_cut_names_the_numbers() {
    let placement = Placement::new(vec![gate_up()]);
    let error = placement.shard(&tp(5)[0]).unwrap_err();
    expect!["dim 0 holds a part of 96 elements, and 96 % 5 != 0 for `tp`"].assert_eq(&error.to_string());
}

#[test]
fn a_stored_placement_comes_back_or_is_refused() {
    let dim = gate_up().aligned_to(32).ceil(GroupKind::GtpRemat);
    let placement = Placement::new(vec![dim, DimPlacement::whole(257).padded_to(384)]);
    let text = serde_json::to_string(&placement).unwrap();
    expect![[r#"{"dims":[{"parts":[96,96],"align":32,"cuts":[{"exact":"tp"},{"ceil":"gtp_remat"}]},{"parts":[257],"padded":384,"cuts":[]}]}"#]].assert_eq(&text);
    assert_eq!(serde_json::from_str::<Placement>(&text).unwrap(), placement);
    let refused = |dim: &str| serde_json::from_str::<DimPlacement>(dim).unwrap_err().to_string();
    let lines = [
        refused(r#"{"parts":[],"cuts":[]}"#),
        refused(r#"{"parts":[9223372036854775807,9223372036854775807,2],"cuts":[]}"#),
        refused(r#"{"parts":[8],"align":0,"cuts":[]}"#),
        refused(r#"{"parts":[8],"padded":7,"cuts":[]}"#),
        refused(r#"{"parts":[8,8],"padded":32,"cuts":[]}"#),
        refused(r#"{"parts":[8],"cuts":[{"ceil":"gtp_remat"},{"exact":"tp"}]}"#),
        refused(r#"{"parts":[8],"cuts":[{"ceil":"dp"}]}"#),
    ];
    expect![[r#"
        a dim of parts [] has no part, or more elements than can be counted
        a dim of parts [9223372036854775807, 9223372036854775807, 2] has no part, or more elements than can be counted
        invalid value: integer `0`, expected a nonzero u64 at line 1 column 22
        a dim of parts [8] cannot be padded to 7; only one part can, and only to more
        a dim of parts [8, 8] cannot be padded to 32; only one part can, and only to more
        an exact cut cannot follow an uneven one, which joins the parts
        no dim is cut over `dp`, because no group would tell the copies apart"#]].assert_eq(&lines.join("\n"));
}
