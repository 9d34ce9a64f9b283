//! States and layouts that the tests share.

use ckpt::testing::{RankMemory, Ranks, header, load, save};
use ckpt::{Checkpoint, SaveReport, Store};
use mesh::{
    ConfiguredCp, DType, DimPlacement, GroupKind, GroupTable, LayoutSizes, ParallelLayout, Placement,
    RankOrder, Shape, StateEntry, StateKind, StateTable,
};

/// Degrees of a layout without pipeline stages: TP, configured CP, GTP, its sequence shards, DP.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Degrees {
    pub(crate) tp: u32,
    pub(crate) cp: u32,
    pub(crate) gtp: u32,
    pub(crate) sequence_shards: u32,
    pub(crate) dp: u32,
}

pub(crate) const ONE: Degrees = Degrees { tp: 1, cp: 1, gtp: 1, sequence_shards: 1, dp: 1 };

pub(crate) fn layout(degrees: Degrees) -> ParallelLayout {
    let Degrees { tp, cp, gtp, sequence_shards, dp } = degrees;
    ParallelLayout::new(LayoutSizes {
        world_size: tp * cp * gtp * dp,
        rank_offset: 0,
        tp,
        pp: 1,
        cp: ConfiguredCp(cp),
        gtp,
        gtp_sequence_shards: sequence_shards,
        order: RankOrder::GtpInsideCp,
    })
    .unwrap()
}

pub(crate) fn ranks(degrees: Degrees) -> Ranks {
    Ranks::new(GroupTable::new("gpt", &layout(degrees)))
}

pub(crate) fn entry(key: &str, kind: StateKind, dtype: DType, placement: Placement) -> StateEntry {
    StateEntry { key: key.into(), kind, dtype, placement }
}

/// A small model with everything that placements can do: vocabulary padded in memory, fused parts, a column cut, GTP rows,
/// replicated norms, a scalar, an empty tensor, optimizer rows over weight replicas, and opaque bytes.
pub(crate) fn model() -> StateTable {
    use DType::*;
    use GroupKind::{DpCp, GtpRemat, Tp};
    use StateKind::{Model, Object, Optimizer};
    let plain = |shape: &[u64]| Placement::replicated(&Shape::new(shape));
    let embedding = Placement::new(vec![
        DimPlacement::whole(257).padded_to(384).exact(Tp).ceil(GtpRemat),
        DimPlacement::whole(6),
    ]);
    let fused =
        Placement::new(vec![DimPlacement::fused(&[24, 24]).exact(Tp).ceil(GtpRemat), DimPlacement::whole(6)]);
    let columns =
        Placement::new(vec![DimPlacement::whole(6).ceil(GtpRemat), DimPlacement::whole(24).exact(Tp)]);
    let rows = |placement: &Placement| placement.clone().with_rows_over(DpCp);
    let mut entries = vec![
        entry("object/args é%20", Object, U8, plain(&[37])),
        entry("decoder.norm", Model, F32, plain(&[6])),
        entry("step", Optimizer, I64, plain(&[])),
        entry("scale", Model, F32, plain(&[])),
        entry("nothing", Model, Bf16, plain(&[0, 6])),
        entry("one", Model, F64, plain(&[1])),
    ];
    for (key, placement) in [("embedding", embedding), ("fc1", fused), ("fc2", columns)] {
        entries.push(entry(&format!("{key}.weight"), Model, Bf16, placement.clone()));
        entries.push(entry(&format!("optimizer.state.param.{key}.weight"), Optimizer, F32, rows(&placement)));
        entries.push(entry(
            &format!("optimizer.state.exp_avg.{key}.weight"),
            Optimizer,
            F32,
            rows(&placement),
        ));
    }
    entries.push(entry("optimizer.state.exp_avg.decoder.norm", Optimizer, F32, rows(&plain(&[6]))));
    StateTable::new(entries).unwrap()
}

/// Saves `table`, LABEL-filled, as `step`, on all ranks of a layout.
pub(crate) fn save_labelled(store: &Store, step: u64, table: &StateTable, degrees: Degrees) -> SaveReport {
    let layout = layout(degrees);
    let reports = ranks(degrees).run(|groups, exchange| {
        let memory = RankMemory::labelled(table, &groups);
        save(store, header(step, layout), table, &groups, exchange, &memory).unwrap()
    });
    assert!(reports.iter().all(|report| *report == reports[0]), "all ranks report the same");
    reports.into_iter().next().unwrap()
}

/// Loads `table` on each rank of a layout and compares every element with LABEL fill.
pub(crate) fn assert_loads_labelled(checkpoint: &Checkpoint, table: &StateTable, degrees: Degrees) {
    ranks(degrees).run(|groups, _| {
        let (memory, plan) = load(checkpoint, table, &groups).unwrap();
        assert!(!plan.is_partial());
        assert!(memory == RankMemory::labelled(table, &groups), "rank {}", groups.rank());
    });
}
