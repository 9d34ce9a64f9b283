//! Every element of a model's state carries its own index, and the state hops over layouts: saved, loaded, saved again from
//! what was loaded. A swapped, shifted or doubled element shows by its value. The layouts need not be ones that train.

use crate::support::{self, Layout};
use ckpt::Store;
use ckpt::testing::{RankMemory, Ranks, header, load, save};
use mesh::{
    DType, GroupKind, GroupTable, LayoutSizes, ParallelLayout, Pipeline, PipelineSplit, Shape, StateEntry,
    StateKind, StateTable, TensorKey,
};
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
    let one_stage =
        |layout: &Layout| Stages { layout: *layout, pp: 1, split: PipelineSplit::EVEN, num_chunks: 1 };
    stage_hops(config, &layouts.iter().map(one_stage).collect::<Vec<_>>());
}

/// A layout on each of several pipeline stages.
#[derive(Debug)]
struct Stages {
    layout: Layout,
    pp: u32,
    num_chunks: u32,
    split: PipelineSplit,
}

impl Stages {
    fn parallel(&self) -> ParallelLayout {
        let LayoutSizes { world_size, .. } = self.layout.parallel(96, 48).unwrap().layout().sizes();
        ParallelLayout::new(LayoutSizes {
            world_size: world_size * self.pp,
            pp: self.pp,
            ..self.layout.parallel(96, 48).unwrap().layout().sizes()
        })
        .unwrap()
    }

    fn groups(&self, num_layers: usize) -> GroupTable {
        let pipeline = Pipeline::new(num_layers as u32, self.pp, self.num_chunks, &self.split).unwrap();
        GroupTable::new("model", &self.parallel()).with_pipeline(pipeline)
    }
}

fn stage_hops(config: &TrainConfig, layouts: &[Stages]) {
    let table = state_table(config);
    let store = Store::open("memory://").unwrap();
    let mut fingerprint = None;
    for (hop, layout) in layouts.iter().enumerate() {
        let ranks = Ranks::new(layout.groups(config.model.num_layers));
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
            save(&store, header(hop as u64, layout.parallel()), &table, &groups, exchange, &memory).unwrap()
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

/// PP, the number of chunks of a stage, and TP.
fn stages(pp: u32, num_chunks: u32, tp: u32, weight_shards: u32, split: PipelineSplit) -> Stages {
    Stages { layout: layout(tp, weight_shards, 1), pp, num_chunks, split }
}

#[test]
fn layers_find_their_stage_whatever_the_pipeline() {
    let even = || PipelineSplit::EVEN;
    let first = PipelineSplit::FirstLast { first: Some(2), last: None };
    let written = PipelineSplit::Stages("E|ttt|tL".parse().unwrap());
    stage_hops(
        &config(model()),
        &[
            stages(2, 1, 2, 2, even()),
            stages(1, 1, 4, 4, even()),
            stages(2, 2, 1, 2, even()),
            stages(3, 1, 1, 1, first),
            stages(4, 1, 2, 2, even()),
            stages(3, 1, 1, 3, written),
            stages(1, 1, 1, 1, even()),
        ],
    );
}

#[test]
fn a_tied_table_is_stored_once_and_reaches_the_last_stage_too() {
    let tied = config(ModelConfig { num_layers: 6, tie_embeddings: true, ..model() });
    let even = || PipelineSplit::EVEN;
    let hops = [
        stages(1, 1, 2, 2, even()),
        stages(2, 1, 2, 2, even()),
        stages(3, 2, 1, 1, even()),
        stages(3, 1, 1, 2, even()),
        stages(2, 3, 1, 1, even()),
        stages(1, 1, 1, 1, even()),
    ];
    stage_hops(&tied, &hops);
    // The main copy is that of the first stage; the last one has the same rows as copy 1.
    let table = state_table(&tied);
    let embedding = table.index_of(&"embedding.word_embeddings.weight".into()).unwrap();
    let groups = std::sync::Arc::new(hops[2].groups(6));
    let copies: Vec<Option<u32>> = (groups.ranks().iter())
        .map(|rank| {
            let shard = table.entries()[embedding].placement.shard(&groups.for_rank(*rank)).unwrap();
            (!shard.pieces.is_empty()).then_some(shard.replica.pp)
        })
        .collect();
    assert_eq!(copies, [Some(0), None, Some(1)]);
}
