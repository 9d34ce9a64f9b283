//! Every collective of a step matters: turned into the identity, one call site at a time, each makes the comparison with a
//! single rank fail. The sites are those of the recorded program of a layout with every axis above 1.

use crate::support::{self, Layout, Tracing, difference, tiny_model, trace};
use expect_test::expect;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use train::backend::Device;
use train::comm::OpSignature;
use train::comm::record::{CallLog, RecordedComm};
use train::parallel::Comms;
use train::step::Trainer;

/// 32 ranks: TP 2 with SP, two sequence and two batch shards inside GTP, CP 2, DP 2.
const EVERY_AXIS: Layout = Layout { tp: 2, sp: true, cp: 2, gtp: 4, nseq: 2, dp: 2, mbs: 1 };
const GLOBAL_BATCH_SIZE: u64 = 8;

#[test]
fn each_collective_left_out_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let config = |layout: Layout| {
        let parallel = layout.parallel(64, GLOBAL_BATCH_SIZE).unwrap();
        support::config(tiny_model(4), parallel, 10)
    };
    // In the second step only the ranks that hold one sample see that its losses are not a number.
    let tracing = Tracing { steps: 3, mutate: None, poison: Some(GLOBAL_BATCH_SIZE + 3) };
    let single = trace(&config(Layout::SINGLE), &tokens, tracing).unwrap();
    let every_axis = config(EVERY_AXIS);
    assert_eq!(difference(&single, &trace(&every_axis, &tokens, tracing).unwrap()), None);

    let groups =
        Arc::new(mesh::GroupTable::new("model", every_axis.parallel.layout())).for_rank(mesh::Rank(0));
    let ignored = CallLog::default();
    let comms = Comms::new(&groups, |kind| Rc::new(RecordedComm::new(&groups, kind, &ignored))).unwrap();
    let calls = Trainer::new(&every_axis, &groups, comms, &Device::Cpu).unwrap().call_log().calls();
    let mut sites = BTreeMap::new();
    for call in calls {
        let OpSignature::Tensor { site, collective, .. } = call.operation else { continue };
        sites.insert(site, format!("{} {collective:?}", call.kind));
    }
    let listed: Vec<String> = sites.iter().map(|(site, what)| format!("{site}: {what}")).collect();
    expect![[r#"
        attention.gather_grad: tp AllGather
        attention.gather_kv: cp AllGather
        attention.gather_kv_again: cp AllGather
        attention.gather_tokens: tp AllGather
        attention.gather_tokens_again: tp AllGather
        attention.reduce: tp ReduceScatter(Tree)
        attention.reduce_grad: tp ReduceScatter(Tree)
        attention.scatter_kv_grad: cp ReduceScatter(Fixed)
        embedding.gather_grad: tp AllGather
        embedding.reduce: tp ReduceScatter(Tree)
        fixed_point_peak.reduce: tp_dp_cp AllReduce(Max)
        grad_norm.reduce: tp_dp_cp AllReduce(Fixed)
        loss.max: tp AllReduce(Max)
        loss.picked: tp AllReduce(Tree)
        loss.reduce: dp_cp_gtp_remat AllReduce(Fixed)
        loss.sum: tp AllReduce(Tree)
        mlp.gather_grad: tp AllGather
        mlp.gather_tokens: tp AllGather
        mlp.gather_tokens_again: tp AllGather
        mlp.reduce: tp ReduceScatter(Tree)
        mlp.reduce_grad: tp ReduceScatter(Tree)
        output.gather_tokens: tp AllGather
        output.reduce_grad: tp ReduceScatter(Tree)
        replica.gather_rows: dp_cp AllGather
        replica.scatter_grads: dp_cp ReduceScatter(Fixed)
        weight.gather: gtp_remat AllGather
        weight.grad.scatter: gtp_remat ReduceScatter(Fixed)
        whole_grads.reduce_gtp: gtp_remat AllReduce(Fixed)
        whole_grads.reduce_tp: tp AllReduce(Fixed)"#]]
    .assert_eq(&listed.join("\n"));

    let unnoticed: Vec<_> = (sites.keys())
        .filter(|site| {
            let mutated = trace(&every_axis, &tokens, Tracing { mutate: Some(site), ..tracing });
            mutated.is_ok_and(|mutated| difference(&single, &mutated).is_none())
        })
        .collect();
    assert!(unnoticed.is_empty(), "nobody notices that these are left out: {unnoticed:?}");
}
