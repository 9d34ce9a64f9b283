//! More elements and bytes than 32 bits count.

use crate::support::*;
use ckpt::testing::header;
use ckpt::{Saver, Snapshot, StateSource, Store, Strictness, own_shards, plan_load};
use mesh::{DType, DimPlacement, GroupKind, Placement, Region, Shape, StateKind, StateTable};

/// Elements of the large tensor: its last ones lie behind 2³¹.
const LEN: u64 = (1 << 31) + 8;

fn element(index: u64) -> u8 {
    (index ^ (index >> 9) ^ (index >> 31)) as u8
}

/// Saved by one rank, verified, loaded by three, and read at the places where a 32-bit count would turn over. The small tensor's bytes
/// begin behind 2³¹ of their pack.
#[test]
#[ignore = "writes 2 GiB; `cargo test --workspace --test it -- --ignored large`"]
fn counts_go_beyond_32_bits() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path().to_str().unwrap()).unwrap();
    let large = Placement::new(vec![DimPlacement::whole(LEN).ceil(GroupKind::DpCp)]);
    let small = Placement::replicated(&Shape::new(&[9]));
    let table = StateTable::new(vec![
        entry("large", StateKind::Model, DType::U8, large),
        entry("small", StateKind::Model, DType::U8, small),
    ])
    .unwrap();
    ranks(ONE).run(|groups, exchange| {
        let read = &mut |_, local: &Region, bytes: &mut [u8]| {
            let first = local.range(0).start;
            (first..).zip(bytes).for_each(|(index, byte)| *byte = element(index));
            Ok(())
        };
        let snapshot = Snapshot { header: header(1, layout(ONE)), table: &table, groups: &groups, read };
        Saver::new(store.clone(), exchange).save(snapshot).unwrap();
    });
    let checkpoint = store.checkpoint(1).unwrap();
    let report = checkpoint.verify().unwrap();
    assert_eq!(report.faults.len(), 0);
    assert!(report.bytes_read > LEN);
    for start in [0, LEN / 2, (1 << 31) - 56, LEN - 64] {
        let mut bytes = [0; 64];
        checkpoint.read_box(&"large".into(), &Region::new(&[start], &[start + 64]), &mut bytes).unwrap();
        assert!((start..).zip(bytes).all(|(index, byte)| byte == element(index)), "from {start}");
    }
    ranks(Degrees { dp: 3, ..ONE }).run(|groups, _| {
        let own = own_shards(&table, &groups).unwrap();
        let wanted: Vec<_> = own.iter().map(|own| own.shard.clone()).collect();
        let plan = plan_load(checkpoint.catalog(), &wanted, &Strictness::exact(), &|_| true).unwrap();
        let report = checkpoint.read(&plan, &mut |target, within, bytes| {
            let first = wanted[target].region.range(0).start + within.range(0).start;
            assert!((first..).zip(bytes).all(|(index, byte)| *byte == element(index)), "from {first}");
            Ok(())
        });
        assert_eq!(
            report.unwrap().bytes_wanted,
            wanted.iter().map(|shard| shard.region.numel()).sum::<u64>()
        );
    });
}
