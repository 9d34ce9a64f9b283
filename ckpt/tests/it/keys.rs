//! Keys, shapes and types that differ between model and checkpoint.

use crate::support::*;
use ckpt::testing::label_bytes;
use ckpt::{Checkpoint, LoadPlan, LoadPlanError, StateSource, Store, StoredTensor, Strictness, plan_load};
use expect_test::expect;
use mesh::{DType, Region, ReplicaId, Shape, ShardedTensor, StateKind, StateTable};

fn want(key: &str, dtype: DType, shape: &[u64]) -> ShardedTensor {
    let global_shape = Shape::new(shape);
    let region = Region::whole(&global_shape);
    ShardedTensor { key: key.into(), dtype, global_shape, region, replica: ReplicaId::default() }
}

/// A checkpoint of [`model`], and wants for all of it.
fn checkpoint() -> (Checkpoint, Vec<ShardedTensor>) {
    let store = Store::open("memory://").unwrap();
    save_labelled(&store, 1, &model(), ONE);
    let table = model();
    let of = |entry: &mesh::StateEntry| want(entry.key.as_str(), entry.dtype, entry.placement.shape().dims());
    let wants = table.entries().iter().map(of).collect();
    (store.checkpoint(1).unwrap(), wants)
}

fn plan(checkpoint: &Checkpoint, wants: &[ShardedTensor]) -> Result<LoadPlan, LoadPlanError> {
    plan_load(checkpoint.catalog(), wants, &Strictness::exact(), &|_| true)
}

#[test]
fn each_difference_is_refused_and_named() {
    let (checkpoint, wants) = checkpoint();
    let refused = |change: &dyn Fn(&mut Vec<ShardedTensor>)| {
        let mut wants = wants.clone();
        change(&mut wants);
        plan(&checkpoint, &wants).unwrap_err().to_string()
    };
    expect!["the checkpoint does not fit the model: 1 stored but not wanted: `decoder.norm`"]
        .assert_eq(&refused(&|wants| wants.retain(|want| want.key.as_str() != "decoder.norm")));
    expect!["the checkpoint does not fit the model: 1 wanted but not stored: `new.weight`"]
        .assert_eq(&refused(&|wants| wants.push(want("new.weight", DType::F32, &[2]))));
    expect!["the checkpoint does not fit the model: 1 of another shape: `fc1.weight` (48 × 6 in the checkpoint, 6 × 48 in the model)"]
        .assert_eq(&refused(&|wants| {
            let at = wants.iter().position(|want| want.key.as_str() == "fc1.weight").unwrap();
            wants[at] = want("fc1.weight", DType::Bf16, &[6, 48]);
        }));
    expect!["the checkpoint does not fit the model: 1 of another type: `one` (F64 in the checkpoint, F32 in the model)"]
        .assert_eq(&refused(&|wants| {
            let at = wants.iter().position(|want| want.key.as_str() == "one").unwrap();
            wants[at] = want("one", DType::F32, &[1]);
        }));
}

#[test]
fn a_long_list_is_counted() {
    let (checkpoint, mut wants) = checkpoint();
    wants.extend((0..25).map(|number| want(&format!("new.{number:02}"), DType::F32, &[1])));
    let text = plan(&checkpoint, &wants).unwrap_err().to_string();
    assert!(
        text.contains("25 wanted but not stored: `new.00`, ") && text.ends_with("`new.19` and 5 more"),
        "{text}"
    );
}

#[test]
fn an_allow_list_lets_keys_pass_and_lists_them() {
    let (checkpoint, mut wants) = checkpoint();
    wants.retain(|want| want.key.as_str() != "decoder.norm");
    wants.push(want("new.a", DType::F32, &[2]));
    let allow = |missing: &[&str], extra: &[&str]| {
        let owned = |globs: &[&str]| globs.iter().map(|glob| (*glob).to_owned()).collect::<Vec<_>>();
        Strictness::new(&owned(missing), &owned(extra)).unwrap()
    };
    let plan = plan_load(checkpoint.catalog(), &wants, &allow(&["new.*"], &["*norm"]), &|_| true).unwrap();
    assert!(plan.is_partial());
    assert_eq!((plan.missing, plan.extra), (vec!["new.a".into()], vec!["decoder.norm".into()]));
    assert!(plan_load(checkpoint.catalog(), &wants, &allow(&["new.*"], &["nor"]), &|_| true).is_err());
    assert!(
        plan_load(checkpoint.catalog(), &wants, &allow(&["*norm"], &["new.*"]), &|_| true).is_err(),
        "sides do not mix"
    );
    let another_type = [want("one", DType::F32, &[1])];
    assert!(
        plan_load(checkpoint.catalog(), &another_type, &allow(&["*"], &["*"]), &|_| true).is_err(),
        "types always fit"
    );
    assert!(Strictness::new(&["a[".to_owned()], &[]).is_err());
}

/// Keys are no patterns: `a[0]` and `a*` are names like others.
#[test]
fn what_is_out_of_scope_is_neither_found_nor_extra() {
    let store = Store::open("memory://").unwrap();
    let of = |(key, kind)| entry(key, kind, DType::F32, mesh::Placement::replicated(&Shape::new(&[2])));
    let entries = [("a[0]", StateKind::Model), ("a*", StateKind::Model), ("b{", StateKind::Rng)].map(of);
    save_labelled(&store, 1, &StateTable::new(entries.to_vec()).unwrap(), ONE);
    let checkpoint = store.checkpoint(1).unwrap();
    let plan = |wants: &[&str], in_scope: &dyn Fn(&StoredTensor) -> bool| {
        let wants: Vec<_> = wants.iter().map(|key| want(key, DType::F32, &[2])).collect();
        plan_load(checkpoint.catalog(), &wants, &Strictness::exact(), in_scope)
    };
    let is_model = |tensor: &StoredTensor| tensor.kind == StateKind::Model;
    assert!(!plan(&["a[0]", "a*"], &is_model).unwrap().is_partial());
    assert!(!plan(&["a[0]"], &|tensor| tensor.key.as_str() == "a[0]").unwrap().is_partial());
    expect!["the checkpoint does not fit the model: 1 stored but not wanted: `a*`"]
        .assert_eq(&plan(&["a[0]"], &is_model).unwrap_err().to_string());
    expect!["the checkpoint does not fit the model: 1 wanted but not stored: `b{`"]
        .assert_eq(&plan(&["a[0]", "a*", "b{"], &is_model).unwrap_err().to_string());
    expect!["none of the 1 wanted tensors is among the 2 of the checkpoint, for example `b{`"]
        .assert_eq(&plan(&["b{"], &is_model).unwrap_err().to_string());
}

/// Any box of any tensor, whatever the chunks it was saved in.
#[test]
fn one_box_is_read_into_a_buffer() {
    let store = Store::open("memory://").unwrap();
    save_labelled(&store, 1, &model(), Degrees { tp: 2, gtp: 2, dp: 2, ..ONE });
    let checkpoint = store.checkpoint(1).unwrap();
    for (ordinal, entry) in model().entries().iter().enumerate() {
        let shape = entry.placement.shape();
        let whole = Region::whole(&shape);
        // Half of each dim, from the middle.
        let lo: Vec<u64> = shape.dims().iter().map(|extent| extent / 4).collect();
        let hi: Vec<u64> = shape.dims().iter().map(|extent| (3 * extent).div_ceil(4)).collect();
        for region in [whole, Region::new(&lo, &hi), Region::new(&lo, &lo)] {
            let mut bytes = vec![0xEE; region.numel() as usize * entry.dtype.size_bytes()];
            checkpoint.read_box(&entry.key, &region, &mut bytes).unwrap();
            assert_eq!(bytes, label_bytes(ordinal, entry.dtype, &shape, &region), "`{}` {region}", entry.key);
        }
    }
}

#[test]
fn a_load_that_matches_nothing_is_an_error() {
    let (checkpoint, _) = checkpoint();
    let all = Strictness::new(&["*".to_owned()], &["*".to_owned()]).unwrap();
    let error = plan_load(checkpoint.catalog(), &[want("x", DType::F32, &[1])], &all, &|_| true).unwrap_err();
    expect!["none of the 1 wanted tensors is among the 16 of the checkpoint, for example `x`"]
        .assert_eq(&error.to_string());
    assert_eq!(plan_load(checkpoint.catalog(), &[], &all, &|_| true), Err(LoadPlanError::NothingWanted));
}

#[test]
fn names_shapes_and_types_come_back_as_they_were() {
    let (checkpoint, wants) = checkpoint();
    for want in &wants {
        let stored = checkpoint.catalog().tensor(&want.key).unwrap();
        assert_eq!((&stored.shape, stored.dtype), (&want.global_shape, want.dtype));
    }
    let dims = |key: &str| checkpoint.catalog().tensor(&key.into()).unwrap().shape.dims().len();
    assert_eq!((dims("scale"), dims("one"), dims("nothing")), (0, 1, 2));
    assert!(checkpoint.catalog().index_of(&"object/args é%20".into()).is_some());
}

#[test]
fn a_slice_reads_only_the_frames_it_touches() {
    let store = Store::open("memory://").unwrap();
    let plain = mesh::Placement::replicated(&Shape::new(&[4096, 512]));
    let table = mesh::StateTable::new(vec![entry("w", mesh::StateKind::Model, DType::F32, plain)]).unwrap();
    save_labelled(&store, 1, &table, ONE);
    let checkpoint = store.checkpoint(1).unwrap();
    let mut slice = want("w", DType::F32, &[4096, 512]);
    slice.region = Region::new(&[1000, 100], &[1010, 103]);
    let plan = plan(&checkpoint, std::slice::from_ref(&slice)).unwrap();
    let mut got = Vec::new();
    let report = checkpoint
        .read(&plan, &mut |_, within, bytes| {
            got.push((within.clone(), bytes.to_vec()));
            Ok(())
        })
        .unwrap();
    let expected = ckpt::testing::label_bytes(0, DType::F32, &slice.global_shape, &slice.region);
    assert_eq!(got, [(Region::new(&[0, 0], &[10, 3]), expected)]);
    // Rows of 2 KiB: 1000 to 1010 lie in frame 7 of 128 rows.
    assert_eq!((report.bytes_read, report.bytes_wanted, report.requests), (256 << 10, 120, 1));
}
