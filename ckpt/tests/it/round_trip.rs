//! Saved under one layout, loaded under another.

use crate::support::*;
use ckpt::Store;
use mesh::{DType, DimPlacement, GroupKind, Placement, Shape, StateKind, StateTable};
use proptest::prelude::*;

fn degrees() -> impl Strategy<Value = Degrees> {
    let gtp = prop::sample::select(vec![(1, 1), (2, 1), (2, 2), (3, 3), (4, 2)]);
    (prop::sample::select(vec![1, 2, 3]), 1..3u32, gtp, 1..4u32)
        .prop_map(|(tp, cp, (gtp, sequence_shards), dp)| Degrees { tp, cp, gtp, sequence_shards, dp })
        .prop_filter("at most 12 ranks", |degrees| degrees.tp * degrees.cp * degrees.gtp * degrees.dp <= 12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Every load is a reshard: whatever the two layouts, every element comes back to where its index says, and the
    /// state's fingerprint does not depend on the layout.
    #[test]
    fn any_layout_loads_what_any_other_saved(saved in degrees(), loaded in degrees()) {
        let (store, table) = (Store::open("memory://").unwrap(), model());
        let report = save_labelled(&store, 20, &table, saved);
        let checkpoint = store.latest(None).unwrap().require(&store).unwrap();
        prop_assert_eq!(checkpoint.step(), 20);
        assert_loads_labelled(&checkpoint, &table, loaded);
        prop_assert_eq!(checkpoint.verify().unwrap().faults.len(), 0);
        let alone = save_labelled(&Store::open("memory://").unwrap(), 20, &table, ONE);
        prop_assert_eq!(report.fingerprint, alone.fingerprint);
    }
}

#[test]
fn a_local_folder_comes_back() {
    let root = tempfile::tempdir().unwrap();
    let location = root.path().join("runs/a b");
    let store = Store::create(location.to_str().unwrap()).unwrap();
    let table = model();
    save_labelled(&store, 10, &table, Degrees { tp: 2, dp: 2, ..ONE });
    save_labelled(&store, 20, &table, Degrees { dp: 2, ..ONE });
    save_labelled(&store, 12_345_678, &table, ONE);
    let store = Store::open(location.to_str().unwrap()).unwrap();
    assert_eq!(store.steps().unwrap(), [10, 20, 12_345_678]);
    assert_loads_labelled(&store.checkpoint(10).unwrap(), &table, Degrees { gtp: 2, cp: 2, ..ONE });
    assert!(location.join("iter_12345678/checkpoint.json").is_file());
}

#[test]
fn fewer_rows_than_ranks() {
    let rows = |key: &str, rows, cols| {
        let placement = Placement::new(vec![DimPlacement::whole(rows), DimPlacement::whole(cols)]);
        entry(key, StateKind::Optimizer, DType::F32, placement.with_rows_over(GroupKind::DpCp))
    };
    let composed = Placement::new(vec![DimPlacement::whole(5).ceil(GroupKind::Tp).ceil(GroupKind::DpCp)]);
    let table = StateTable::new(vec![
        rows("six", 6, 1),
        rows("ten", 10, 2),
        rows("one", 1, 17),
        rows("none", 0, 3),
        entry("five", StateKind::Model, DType::F32, composed),
    ])
    .unwrap();
    for saved in [4, 1] {
        let store = Store::open("memory://").unwrap();
        save_labelled(&store, 1, &table, Degrees { dp: saved, ..ONE });
        save_labelled(&store, 2, &table, Degrees { dp: saved, tp: 2, ..ONE });
        for step in [1, 2] {
            let checkpoint = store.checkpoint(step).unwrap();
            let shape = |key: &str| checkpoint.catalog().tensor(&key.into()).unwrap().shape.clone();
            assert_eq!(shape("ten"), Shape::new(&[10, 2]));
            assert_eq!(shape("one"), Shape::new(&[1, 17]));
            assert_eq!(shape("none"), Shape::new(&[0, 3]));
            for dp in [4, 3, 5, 1] {
                assert_loads_labelled(&checkpoint, &table, Degrees { dp, ..ONE });
            }
        }
    }
}

#[test]
fn padding_is_in_memory_only() {
    // Ten elements, four a rank: three ranks hold 4, 4 and 2, the others padding.
    let rows = DimPlacement::whole(10).padded_to(32).exact(GroupKind::DpCp);
    let table =
        StateTable::new(vec![entry("w", StateKind::Model, DType::F32, Placement::new(vec![rows]))]).unwrap();
    let store = Store::open("memory://").unwrap();
    save_labelled(&store, 1, &table, Degrees { dp: 8, ..ONE });
    let checkpoint = store.checkpoint(1).unwrap();
    assert_eq!(checkpoint.catalog().tensors()[0].shape, Shape::new(&[10]));
    assert_eq!(checkpoint.catalog().objects().len(), 3, "ranks of padding write nothing");
    for dp in [8, 4, 1] {
        assert_loads_labelled(&checkpoint, &table, Degrees { dp, ..ONE });
    }
}
