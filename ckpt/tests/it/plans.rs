//! Who writes what.

use crate::support::*;
use ckpt::{CHUNK_BYTES_MAX, SavePlan, SavePlanError, plan_save};
use mesh::{
    DType, DimPlacement, GroupKind, GroupTable, Placement, Rank, Region, Shape, StateKind, StateTable,
    prove_tiling,
};
use std::sync::Arc;

fn plan(table: &StateTable, degrees: Degrees) -> SavePlan {
    plan_save(table, &Arc::new(GroupTable::new("gpt", &layout(degrees)))).unwrap()
}

fn plain(key: &str, shape: &[u64]) -> mesh::StateEntry {
    entry(key, StateKind::Model, DType::U8, Placement::replicated(&Shape::new(shape)))
}

fn bytes_of(plan: &SavePlan, rank: u32) -> u64 {
    plan.chunks_of(Rank(rank)).map(|(_, chunk)| chunk.raw_bytes).sum()
}

#[test]
fn the_worked_example_of_the_rule() {
    // `c` has one holder and comes first; then the larger ones, each to the holder with fewer bytes.
    let one_holder = Placement::new(vec![DimPlacement::whole(4).padded_to(8).exact(GroupKind::DpCp)]);
    let c = entry("c", StateKind::Model, DType::U8, one_holder);
    let table = StateTable::new(vec![plain("a", &[8]), plain("b", &[6]), c, plain("d", &[2])]).unwrap();
    let writers: Vec<u32> =
        plan(&table, Degrees { dp: 2, ..ONE }).chunks.iter().map(|chunk| chunk.writer.0).collect();
    assert_eq!(writers, [1, 0, 0, 1]);
}

#[test]
fn replicas_share_the_bytes_out() {
    for dp in 1..9 {
        let table = StateTable::new((0..40).map(|at| plain(&format!("t{at}"), &[17 * at + 5, 10])).collect());
        let plan = plan(&table.unwrap(), Degrees { dp, ..ONE });
        let loads: Vec<u64> = (0..dp).map(|rank| bytes_of(&plan, rank)).collect();
        let largest = plan.chunks.iter().map(|chunk| chunk.raw_bytes).max().unwrap();
        assert!(loads.iter().max().unwrap() - loads.iter().min().unwrap() <= largest, "{loads:?}");
    }
}

#[test]
fn chunks_are_cut_by_rows_and_then_within_a_row() {
    const MIB: u64 = 1 << 20;
    let regions = |shape: &[u64]| -> Vec<Region> {
        let plan = plan(&StateTable::new(vec![plain("w", shape)]).unwrap(), ONE);
        let regions: Vec<Region> = plan.chunks.iter().map(|chunk| chunk.region.clone()).collect();
        assert_eq!(prove_tiling(&Shape::new(shape), &regions.iter().collect::<Vec<_>>()), Ok(()));
        assert!(plan.chunks.iter().all(|chunk| chunk.raw_bytes <= CHUNK_BYTES_MAX));
        regions
    };
    let box_of = |lo: &[u64], hi: &[u64]| Region::new(lo, hi);
    assert_eq!(regions(&[16 * MIB]), [box_of(&[0], &[16 * MIB])]);
    assert_eq!(regions(&[16 * MIB + 1]).len(), 2);
    // Rows of 5 MiB: three to a chunk.
    assert_eq!(regions(&[7, 5 * MIB]).iter().map(|r| r.extent(0)).collect::<Vec<_>>(), [3, 3, 1]);
    let within_rows = [
        box_of(&[0, 0], &[1, 16 * MIB]),
        box_of(&[0, 16 * MIB], &[1, 20 * MIB]),
        box_of(&[1, 0], &[2, 16 * MIB]),
        box_of(&[1, 16 * MIB], &[2, 20 * MIB]),
    ];
    assert_eq!(regions(&[2, 20 * MIB]), within_rows);
    assert_eq!(regions(&[1, 1, 1, 40 * MIB]).len(), 3);
}

#[test]
fn ranks_agree_on_the_digest_and_changes_show() {
    let degrees = Degrees { tp: 2, dp: 2, ..ONE };
    let digest = |table: &StateTable, degrees| plan(table, degrees).digest(table);
    let same = digest(&model(), degrees);
    assert_eq!(same, digest(&model(), degrees));
    assert_ne!(same, digest(&model(), Degrees { dp: 4, ..ONE }));
    let mut entries = model().entries().to_vec();
    entries[0].kind = StateKind::Rng;
    assert_ne!(same, digest(&StateTable::new(entries).unwrap(), degrees));
}

#[test]
fn a_collection_that_does_not_tell_copies_apart_is_refused() {
    let groups = GroupTable::new("gpt", &layout(Degrees { dp: 2, ..ONE })).without(GroupKind::DpCp);
    let table = StateTable::new(vec![plain("w", &[4])]).unwrap();
    let error = plan_save(&table, &Arc::new(groups)).unwrap_err();
    assert_eq!(error.to_string(), "`w`: ranks 0 and 1 both hold the main replica of [0..4]");
    let uneven = Placement::new(vec![DimPlacement::whole(5).exact(GroupKind::Tp)]);
    let table = StateTable::new(vec![entry("w", StateKind::Model, DType::U8, uneven)]).unwrap();
    let groups = Arc::new(GroupTable::new("gpt", &layout(Degrees { tp: 2, ..ONE })));
    assert!(matches!(plan_save(&table, &groups), Err(SavePlanError::Indivisible { .. })));
}
