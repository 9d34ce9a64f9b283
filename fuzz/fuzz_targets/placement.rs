//! The placement of a tensor, as the table of tensors holds it: what parses says the same again, and whatever it divides,
//! the main shards of a layout tile the tensor once.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::sync::Arc;
use mesh::{ConfiguredCp, GroupTable, LayoutSizes, ParallelLayout, Placement, RankOrder, Region, prove_tiling};

fuzz_target!(|text: &str| {
    let Ok(placement) = serde_json::from_str::<Placement>(text) else { return };
    let again = serde_json::to_string(&placement).unwrap();
    assert_eq!(serde_json::from_str::<Placement>(&again).unwrap(), placement);
    let shape = placement.shape();
    if shape.dims().iter().any(|extent| *extent > 64) || shape.dims().len() > 4 {
        return;
    }
    let table = Arc::new(GroupTable::new("model", &layout()));
    let mut mains: Vec<Region> = Vec::new();
    for rank in table.ranks() {
        let groups = table.for_rank(*rank);
        let Ok(shard) = placement.shard(&groups) else { return };
        if placement.replica(&groups).is_main() {
            mains.extend(shard.pieces.into_iter().map(|piece| piece.region));
        }
    }
    mains.retain(|region| region.numel() > 0);
    let mains: Vec<&Region> = mains.iter().collect();
    prove_tiling(&shape, &mains).unwrap();
});

/// Eight ranks: TP 2, configured CP 2, GTP 2.
fn layout() -> ParallelLayout {
    ParallelLayout::new(LayoutSizes {
        world_size: 8,
        rank_offset: 0,
        tp: 2,
        pp: 1,
        cp: ConfiguredCp(2),
        gtp: 2,
        gtp_sequence_shards: 2,
        order: RankOrder::default(),
    })
    .expect("8 = 2 · 2 · 2")
}
