//! What a change of layout moves: worked numbers, and every wanted byte counted one by one.

use ckpt::{
    Catalog, ChunkChecksums, Codec, FRAME_BYTES, Fingerprint, Frame, StoredChunk, StoredObject, StoredTensor,
};
use expect_test::expect;
use mesh::{
    ConfiguredCp, DType, DimPlacement, GroupKind, GroupTable, LayoutSizes, ModelPart, ParallelLayout,
    PipelineSplit, Placement, Rank, RankOrder, Region, Shape, StateKind, TensorKey,
};
use proptest::prelude::*;
use reshard::{Bytes, CutChange, LayoutChange, LayoutChangeError, RandomStreams, Target, plan_layout_change};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// TP, GTP and its sequence shards, configured CP, DP.
fn layout([tp, gtp, gtp_sequence_shards, cp, dp]: [u32; 5]) -> ParallelLayout {
    ParallelLayout::new(LayoutSizes {
        world_size: tp * gtp * cp * dp,
        rank_offset: 0,
        tp,
        pp: 1,
        cp: ConfiguredCp(cp),
        gtp,
        gtp_sequence_shards,
        order: RankOrder::GtpInsideCp,
    })
    .unwrap()
}

fn frames(bytes: u64) -> Vec<Frame> {
    let frame = |start| Frame { bytes: FRAME_BYTES.min(bytes - start) as u32, crc64: 0 };
    if bytes > FRAME_BYTES {
        (0..bytes).step_by(FRAME_BYTES as usize).map(frame).collect()
    } else {
        Vec::new()
    }
}

/// A catalog of these tensors, each in one chunk.
fn catalog(tensors: Vec<(&str, StateKind, Shape, Option<Placement>)>) -> Catalog {
    let mut objects = Vec::new();
    let mut stored = Vec::new();
    for (key, kind, shape, placement) in tensors {
        let bytes = shape.numel() * 4;
        stored.push(StoredTensor {
            key: TensorKey::from(key),
            kind,
            dtype: DType::F32,
            placement,
            fingerprint: Fingerprint::default(),
            statistics: None,
            chunks: vec![StoredChunk {
                region: Region::whole(&shape),
                object: objects.len(),
                offset: 0,
                stored_bytes: bytes,
                codec: Codec::Raw,
                checksums: ChunkChecksums { crc64: 0, frames: frames(bytes) },
            }],
            shape,
        });
        objects.push(StoredObject { path: format!("data/{key}.pack"), bytes });
    }
    Catalog::new(stored, objects).unwrap()
}

fn placed(key: &str, kind: StateKind, placement: Placement) -> (&str, StateKind, Shape, Option<Placement>) {
    (key, kind, placement.shape(), Some(placement))
}

/// Rows over TP and GTP, as a column-parallel weight.
fn column(rows: u64, cols: u64) -> Placement {
    let rows = DimPlacement::whole(rows).exact(GroupKind::Tp).ceil(GroupKind::GtpRemat);
    Placement::new(vec![rows, DimPlacement::whole(cols)])
}

/// A column-parallel weight and its first moment, a fused weight, a norm that all ranks hold, and random streams.
fn model(saved: &ParallelLayout) -> Catalog {
    let fused = DimPlacement::fused(&[192, 192]).exact(GroupKind::Tp).ceil(GroupKind::GtpRemat);
    let fused = Placement::new(vec![fused, DimPlacement::whole(8)]);
    let moment = column(256, 8).with_rows_over(GroupKind::DpCp);
    let groups = Arc::new(GroupTable::new("gpt", saved)).for_rank(Rank(0));
    let grid = [GroupKind::Pp, GroupKind::Tp, GroupKind::DpCpGtpRemat]
        .map(|kind| (kind, u64::from(groups.size(kind))));
    catalog(vec![
        placed("fc1", StateKind::Model, fused),
        placed("norm", StateKind::Model, Placement::replicated(&Shape::new(&[8]))),
        placed("optimizer.state.exp_avg.qkv", StateKind::Optimizer, moment),
        placed("qkv", StateKind::Model, column(256, 8)),
        placed("rng_state", StateKind::Rng, Placement::cells(&grid, &[5, 6])),
    ])
}

/// The plan of a change between layouts of one stage, or of evenly divided ones.
fn plan(
    catalog: &Catalog,
    saved: &ParallelLayout,
    target: &ParallelLayout,
) -> Result<LayoutChange, LayoutChangeError> {
    let (split, placements) = (&PipelineSplit::EVEN, &HashMap::new());
    plan_layout_change(catalog, saved, &Target { layout: target, num_chunks: 1, split, placements })
}

fn change(saved: [u32; 5], target: [u32; 5]) -> LayoutChange {
    let saved = layout(saved);
    plan(&model(&saved), &saved, &layout(target)).unwrap()
}

/// Kept and moved of one tensor.
fn kept_and_moved(change: &LayoutChange, key: &str) -> (u64, u64) {
    let tensor = change.tensors.iter().find(|tensor| tensor.key.as_str() == key).unwrap();
    (tensor.bytes.kept, tensor.bytes.moved)
}

#[test]
fn the_same_layout_moves_nothing_and_keeps_the_random_streams() {
    let change = change([2, 2, 2, 2, 2], [2, 2, 2, 2, 2]);
    assert!(change.resume_in_place);
    assert_eq!(change.random_streams, RandomStreams::Kept);
    assert!(change.numbers.iter().all(|number| number.saved == number.target));
}

#[test]
fn cp_for_dp_and_more_sequence_shards_move_nothing() {
    for (saved, target) in [
        ([1, 2, 1, 1, 2], [1, 2, 1, 2, 1]),    // CP · DP stays 2
        ([1, 2, 1, 1, 2], [1, 2, 2, 1, 2]),    // sequence shards inside GTP
        ([2, 2, 1, 1, 2], [2, 2, 2, 2, 1]),    // both, under TP
        ([1, 64, 1, 1, 2], [1, 64, 64, 2, 1]), // 128 ranks
    ] {
        let change = change(saved, target);
        assert!(change.resume_in_place, "{saved:?} → {target:?}");
        assert_eq!(change.bytes.moved, 0);
        assert!(change.bytes.kept > 0);
        assert_eq!(change.random_streams, RandomStreams::Derived);
    }
}

#[test]
fn what_changes_when_nothing_moves_is_named_with_both_numbers() {
    let change = change([1, 64, 1, 1, 2], [1, 64, 64, 2, 1]);
    let lines: Vec<String> = change.numbers.iter().map(ToString::to_string).collect();
    expect![[r#"
        world size 128 as before
        TP 1 as before
        PP 1 as before
        weight shards 64 as before
        configured CP 1 → 2
        DP 2 → 1
        weight replicas 2 as before
        GTP sequence shards 1 → 64
        runtime CP 1 → 128
        batch parallel size 128 → 1"#]]
    .assert_eq(&lines.join("\n"));
}

/// `qkv` has 256 × 8 elements of 4 bytes, 32 bytes a row. TP 2 → 4 on four ranks, DP 2 → 1:
///
/// | rank | held (TP = rank mod 2) | wants | kept |
/// |---|---|---|---|
/// | 0 | 0..128 | 0..64 | 64 |
/// | 1 | 128..256 | 64..128 | 0 |
/// | 2 | 0..128 | 128..192 | 0 |
/// | 3 | 128..256 | 192..256 | 64 |
///
/// Of 256 wanted rows 128 are kept, 128 × 32 B = 4,096 B each.
///
/// `fc1`: gate rows 0..192, up rows 192..384. Rank 0 held 0..96 and 192..288 and wants 0..48 and 192..240: all 96 rows kept.
/// Rank 1 held the other halves and wants 48..96 and 240..288: none. Rank 2 held what rank 0 did and wants 96..144 and
/// 288..336: none. Rank 3 wants 144..192 and 336..384, of 96..192 and 288..384: all 96. So 192 × 32 B = 6,144 B each.
#[test]
fn another_tp_moves_the_rows_that_change_hands() {
    let change = change([2, 1, 1, 1, 2], [4, 1, 1, 1, 1]);
    assert!(!change.resume_in_place);
    assert_eq!(kept_and_moved(&change, "qkv"), (4096, 4096));
    assert_eq!(kept_and_moved(&change, "fc1"), (6144, 6144));
    // Eight elements on each of four ranks.
    assert_eq!(kept_and_moved(&change, "norm"), (128, 0));
    let moved: Vec<(u32, u64)> = change.ranks.iter().map(|rank| (rank.rank.0, rank.bytes.moved)).collect();
    // 64 rows of `qkv`, 96 of `fc1`; of the moment, rank 0 held 0..64 and wants it, rank 1 held 128..192 and wants 64..128,
    // rank 2 held 64..128 and wants 128..192, rank 3 held 192..256 and wants it.
    assert_eq!(moved, [(0, 0), (1, 64 * 32 + 96 * 32 + 64 * 32), (2, 64 * 32 + 96 * 32 + 64 * 32), (3, 0)]);
}

/// Ten rows of 4 B over three weight shards are rows 0..4, 4..8 and 8..10. Rank 0 held all ten; ranks 1 and 2 are new.
#[test]
fn one_weight_shard_to_three_keeps_the_first_and_moves_the_others() {
    let rows = column(10, 1);
    let catalog = catalog(vec![placed("w", StateKind::Model, rows)]);
    let change = plan(&catalog, &layout([1, 1, 1, 1, 1]), &layout([1, 3, 1, 1, 1])).unwrap();
    let kept_and_moved: Vec<_> =
        change.ranks.iter().map(|rank| (rank.bytes.kept, rank.bytes.moved)).collect();
    assert_eq!(kept_and_moved, [(16, 0), (0, 16), (0, 8)]);
    assert_eq!(change.tensors[0].cut, CutChange::Recut);
    assert_eq!(change.random_streams, RandomStreams::Absent);
}

/// 24 rows of 4 B. Eight weight shards of 3 rows become three of 8. Rank 0 held 0..3 of 0..8: 3 rows kept. Rank 1 held
/// 3..6 and wants 8..16, rank 2 held 6..9 and wants 16..24: none.
#[test]
fn eight_ranks_to_three_keep_what_still_lies_right() {
    let catalog = catalog(vec![placed("w", StateKind::Model, column(24, 1))]);
    let change = plan(&catalog, &layout([1, 8, 1, 1, 1]), &layout([1, 3, 1, 1, 1])).unwrap();
    assert_eq!(change.bytes, Bytes { wanted: 96, kept: 12, moved: 84 });
}

/// The optimizer of two replicas, cut in two, comes to one rank; the weights are on it already.
#[test]
fn fewer_replicas_move_optimizer_rows_alone() {
    let change = change([1, 1, 1, 1, 2], [1, 1, 1, 1, 1]);
    let moved = |key| kept_and_moved(&change, key).1;
    assert_eq!([moved("qkv"), moved("fc1"), moved("norm")], [0; 3]);
    assert_eq!(kept_and_moved(&change, "optimizer.state.exp_avg.qkv"), (4096, 4096));
    let cut: Vec<_> = change.tensors.iter().map(|tensor| (tensor.key.as_str(), tensor.cut)).collect();
    use CutChange::{Recut, Unchanged};
    assert_eq!(
        cut,
        [("fc1", Unchanged), ("norm", Unchanged), ("optimizer.state.exp_avg.qkv", Recut), ("qkv", Unchanged)]
    );
}

#[test]
fn copies_are_counted() {
    let change = change([2, 2, 1, 1, 2], [2, 2, 1, 2, 1]);
    let copies: Vec<_> = change.tensors.iter().map(|tensor| (tensor.key.as_str(), tensor.copies)).collect();
    assert_eq!(copies, [("fc1", 2), ("norm", 8), ("optimizer.state.exp_avg.qkv", 1), ("qkv", 2)]);
}

#[test]
fn a_tensor_without_placement_is_counted_whole_and_said_so() {
    let shape = Shape::new(&[6]);
    let catalog = catalog(vec![("blob", StateKind::Object, shape, None)]);
    let change = plan(&catalog, &layout([1, 1, 1, 1, 2]), &layout([1, 1, 1, 1, 2])).unwrap();
    assert_eq!(change.bytes, Bytes { wanted: 48, kept: 0, moved: 48 });
    assert!(!change.resume_in_place);
    expect!["without placement: 1 of 1 tensors, counted whole on every rank as bytes to move"]
        .assert_eq(&change.notes.join("\n"));
}

/// Four layers of 32 B, from one stage to two of two layers each. Rank 0 keeps its two of four, rank 1 is new; what both
/// ends hold is on both.
#[test]
fn layers_move_to_their_stages_and_nothing_is_counted_on_another() {
    let on = |part| Placement::new(vec![DimPlacement::whole(8)]).of(part);
    let layers: Vec<String> = (0..4).map(|layer| format!("layer.{layer}")).collect();
    let mut tensors: Vec<_> = (0..4)
        .map(|layer| placed(&layers[layer], StateKind::Model, on(ModelPart::Layer(layer as u32))))
        .collect();
    tensors.insert(0, placed("embedding", StateKind::Model, on(ModelPart::BothEnds)));
    let catalog = catalog(tensors);
    let one = layout([1, 1, 1, 1, 1]);
    let two = ParallelLayout::new(LayoutSizes { world_size: 2, pp: 2, ..one.sizes() }).unwrap();
    let change = plan(&catalog, &one, &two).unwrap();
    let bytes = |rank: usize| change.ranks[rank].bytes;
    assert_eq!(bytes(0), Bytes { wanted: 96, kept: 96, moved: 0 });
    assert_eq!(bytes(1), Bytes { wanted: 96, kept: 0, moved: 96 });
    assert_eq!(change.notes, [""; 0]);
    // Back again, the other half comes to rank 0.
    let change = plan(&catalog, &two, &one).unwrap();
    assert_eq!(change.bytes, Bytes { wanted: 160, kept: 96, moved: 64 });
    let three = ParallelLayout::new(LayoutSizes { world_size: 3, pp: 3, ..one.sizes() }).unwrap();
    let error = plan(&catalog, &one, &three).unwrap_err();
    expect!["RM2009 layers 4 ÷ 3 is not exact; `--pipeline-model-parallel-layout 'Ett|t|tL'` works"]
        .assert_eq(&format!("{} {error}; {}", error.code(), error.help()));
}

/// 16 B of a norm's moment, which GTP does not cut. Two sequence shards in four weight shards fold to CP 2 and GTP 2.
#[test]
fn a_fold_says_what_uncut_optimizer_state_takes_in_both_forms() {
    let norm = Placement::new(vec![DimPlacement::whole(4)]);
    let moment = norm.with_rows_over(GroupKind::DpCp);
    let catalog = catalog(vec![
        placed("cut", StateKind::Optimizer, column(16, 8)),
        placed("norm", StateKind::Optimizer, moment),
    ]);
    let change = plan(&catalog, &layout([1, 1, 1, 1, 1]), &layout([1, 4, 2, 1, 1])).unwrap();
    expect![[r#"{"cp":2,"gtp":2,"optimizer_bytes":16,"here_bytes":16,"folded_bytes":8}"#]]
        .assert_eq(&serde_json::to_string(&change.fold).unwrap());
    // CP beyond the weight group has no folded form.
    assert_eq!(plan(&catalog, &layout([1, 1, 1, 1, 1]), &layout([1, 4, 2, 2, 1])).unwrap().fold, None);
}

#[test]
fn a_degree_that_does_not_divide_is_refused_with_the_tensor() {
    let catalog = catalog(vec![placed("w", StateKind::Model, column(10, 1))]);
    let error = plan(&catalog, &layout([1, 1, 1, 1, 1]), &layout([4, 1, 1, 1, 1])).unwrap_err();
    assert_eq!(error.code(), "RM2003");
    expect!["`w` cannot be divided under TP 4 · GTP 1 · CP 1 · DP 1 · world 4"].assert_eq(&error.to_string());
    let cause = std::error::Error::source(&error).unwrap();
    expect!["dim 0 holds a part of 10 elements, and 10 % 4 != 0 for `tp`"].assert_eq(&cause.to_string());
}

#[test]
fn ten_thousand_ranks_resume_in_place() {
    let change = change([4, 50, 1, 1, 50], [4, 50, 25, 50, 1]);
    assert_eq!(change.ranks.len(), 10_000);
    assert!(change.resume_in_place);
}

#[test]
fn the_document_has_numbers_for_scripts() {
    let catalog = catalog(vec![placed("w", StateKind::Model, column(10, 1))]);
    let change = plan(&catalog, &layout([1, 1, 1, 1, 1]), &layout([1, 1, 1, 1, 2])).unwrap();
    let json = serde_json::to_value(&change).unwrap();
    assert_eq!(json["bytes"], serde_json::json!({ "wanted": 80, "kept": 40, "moved": 40 }));
    assert_eq!(json["ranks"][1], serde_json::json!({ "rank": 1, "wanted": 40, "kept": 0, "moved": 40 }));
    assert_eq!(json["tensors"][0]["cut"], "recut");
    assert_eq!(json["target"]["world_size"], 2);
}

fn layouts() -> impl Strategy<Value = [u32; 5]> {
    let degree = || prop::sample::select(vec![1u32, 2, 3, 4]);
    (prop::sample::select(vec![1u32, 2, 4]), degree(), degree(), degree())
        .prop_flat_map(|(tp, gtp, cp, dp)| (1..=gtp).prop_map(move |seq| [tp, gtp, seq, cp, dp]))
        .prop_filter("sequence shards divide GTP", |[_, gtp, seq, ..]| gtp % seq == 0)
}

proptest! {
    /// Counted element by element: what a rank wants and did not hold is moved, all else that it wants is kept.
    #[test]
    fn every_wanted_byte_is_kept_or_moved(saved in layouts(), target in layouts()) {
        let (saved, target) = (layout(saved), layout(target));
        let catalog = model(&saved);
        let change = plan(&catalog, &saved, &target).unwrap();
        let groups = [&saved, &target].map(|layout| Arc::new(GroupTable::new("gpt", layout)));
        let elements = |side: usize, placement: &Placement, rank: Rank| -> HashSet<u64> {
            if !groups[side].ranks().contains(&rank) {
                return HashSet::new();
            }
            let shard = placement.shard(&groups[side].for_rank(rank)).unwrap();
            shard.pieces.iter().flat_map(|piece| piece.region.runs(&placement.shape()).flatten()).collect()
        };
        for rank in &change.ranks {
            let mut counted = Bytes::default();
            for tensor in catalog.tensors().iter().filter(|tensor| tensor.kind != StateKind::Rng) {
                let placement = tensor.placement.as_ref().unwrap();
                let (held, wanted) = (elements(0, placement, rank.rank), elements(1, placement, rank.rank));
                counted.wanted += 4 * wanted.len() as u64;
                counted.kept += 4 * wanted.intersection(&held).count() as u64;
                counted.moved += 4 * wanted.difference(&held).count() as u64;
            }
            prop_assert_eq!(rank.bytes, counted);
        }
        let by_rank: u64 = change.ranks.iter().map(|rank| rank.bytes.moved).sum();
        let by_tensor: u64 = change.tensors.iter().map(|tensor| tensor.bytes.moved).sum();
        prop_assert_eq!([by_rank, by_tensor], [change.bytes.moved; 2]);
    }
}
