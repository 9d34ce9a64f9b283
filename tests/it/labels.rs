//! Every element of a model's state carries its own index, and the state hops over layouts: saved, loaded, saved again from
//! what was loaded. A swapped, shifted or doubled element shows by its value. The layouts need not be ones that train.

use crate::support::{self, Layout};
use ckpt::Store;
use ckpt::testing::{RankMemory, Ranks, header, load, save};
use mesh::{DType, GroupKind, GroupTable, Shape, StateEntry, StateKind, StateTable, TensorKey};
use train::config::{ModelConfig, TrainConfig};
use train::model::params::ParamTable;
use train::state::{EXP_AVG, EXP_AVG_SQ};

/// 4 layers, hidden 64, 8 query heads of 8 in 2 groups, feed-forward 96, vocabulary 257.
fn model() -> ModelConfig {
    ModelConfig { num_layers: 4, hidden_size: 64, ffn_hidden_size: 96, ..support::tiny_model(2) }
}

/// The entries of a checkpoint of `config`'s model, without random streams.
fn state_table(config: &TrainConfig) -> StateTable {
    let mut entries = Vec::new();
    for param in ParamTable::new(config).params {
        let mut add = |prefix: &str, kind, placement| {
            let key = TensorKey::new(format!("{prefix}{}", param.key));
            entries.push(StateEntry { key, kind, dtype: DType::F32, placement });
        };
        let rows = param.placement.clone().with_rows_over(GroupKind::DpCp);
        add("", StateKind::Model, param.placement.clone());
        add(EXP_AVG, StateKind::Optimizer, rows.clone());
        add(EXP_AVG_SQ, StateKind::Optimizer, rows);
    }
    StateTable::new(entries).unwrap()
}

/// Saves LABEL fill under the first layout, then loads and saves under one after the other; every rank of every hop holds
/// what its indices say, padding aside.
fn hops(config: &TrainConfig, layouts: &[Layout]) {
    let table = state_table(config);
    let store = Store::open("memory://").unwrap();
    let mut fingerprint = None;
    for (hop, layout) in layouts.iter().enumerate() {
        let parallel = layout.parallel(96, 48).unwrap();
        let ranks = Ranks::new(GroupTable::new("model", parallel.layout()));
        let reports = ranks.run(|groups, exchange| {
            let labelled = RankMemory::labelled(&table, &groups);
            let memory = match hop {
                0 => labelled,
                _ => {
                    let (memory, plan) =
                        load(&store.checkpoint(hop as u64 - 1).unwrap(), &table, &groups).unwrap();
                    assert!(!plan.is_partial());
                    assert!(memory == labelled, "hop {hop} to {layout:?}, rank {}", groups.rank());
                    memory
                }
            };
            save(&store, header(hop as u64, *parallel.layout()), &table, &groups, exchange, &memory).unwrap()
        });
        let of = *fingerprint.get_or_insert(reports[0].fingerprint);
        assert_eq!(reports[0].fingerprint, of, "hop {hop} to {layout:?}");
    }
    let last = store.checkpoint(layouts.len() as u64 - 1).unwrap();
    let shape = |key: &str| last.catalog().tensor(&key.into()).unwrap().shape.clone();
    assert_eq!(shape("embedding.word_embeddings.weight"), Shape::new(&[257, 64]), "padding is never stored");
    assert_eq!(shape("decoder.layers.0.mlp.linear_fc1.weight"), Shape::new(&[192, 64]));
    assert_eq!(shape("decoder.layers.3.self_attention.linear_qkv.weight"), Shape::new(&[96, 64]));
}

fn config(model: ModelConfig) -> TrainConfig {
    support::config(model, Layout::SINGLE.parallel(96, 48).unwrap(), 1)
}

const fn layout(tp: u32, weight_shards: u32, dp: u32) -> Layout {
    Layout { tp, sp: false, cp: 1, gtp: weight_shards / tp, nseq: 1, dp, mbs: 1 }
}

#[test]
fn vocabulary_gate_up_and_grouped_queries_keep_their_rows_under_every_tp() {
    let tps = [4, 1, 2, 8, 1, 4, 8].map(|tp| layout(tp, tp, 1));
    hops(&config(model()), &tps);
}

#[test]
fn rows_keep_their_place_when_weight_shards_cut_through_gate_and_up() {
    let (one, two, four, eight) = (layout(1, 1, 1), layout(1, 2, 1), layout(1, 4, 1), layout(1, 8, 1));
    hops(&config(model()), &[eight, one, two, four, layout(2, 8, 1), layout(4, 4, 2), layout(1, 3, 2), one]);
}

#[test]
fn a_tied_model_keeps_one_table_and_one_set_of_moments() {
    let tied = config(ModelConfig { tie_embeddings: true, ..model() });
    let keys: Vec<String> = state_table(&tied).entries().iter().map(|entry| entry.key.to_string()).collect();
    assert!(!keys.iter().any(|key| key.contains("output_layer")), "{keys:?}");
    assert_eq!(keys.iter().filter(|key| key.contains("word_embeddings")).count(), 3);
    hops(&tied, &[layout(2, 2, 1), layout(1, 1, 2), layout(1, 3, 1)]);
}
