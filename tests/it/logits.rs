//! Models of Hugging Face, imported: the logits of a forward pass are those that transformers gives.

use crate::support::{self, Layout, tied_model, tiny_gpt2, tiny_model};
use ckpt::{SafetensorsFolder, Store};
use half::bf16;
use mesh::{DType, GroupTable};
use reshard::{HfActivation, HfFamily, HfModel};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use train::backend::Device;
use train::comm::threads::{World, WorldOptions};
use train::config::{Activation, Biases, ModelConfig, Normalization, PositionEmbedding};
use train::model::MicroBatch;
use train::parallel::Comms;
use train::step::Trainer;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/hf").join(name)
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The same model in the trainer's words.
fn model_config(model: &HfModel) -> ModelConfig {
    let size = |size: u64| size as usize;
    let is_gpt2 = model.family == HfFamily::Gpt2;
    ModelConfig {
        num_layers: size(model.num_layers),
        hidden_size: size(model.hidden_size),
        ffn_hidden_size: size(model.ffn_hidden_size),
        num_attention_heads: size(model.num_attention_heads),
        num_query_groups: size(model.num_query_groups),
        kv_channels: size(model.kv_channels),
        vocab_size: size(model.vocab_size),
        tie_embeddings: model.tie_embeddings,
        normalization: if is_gpt2 { Normalization::LayerNorm } else { Normalization::RmsNorm },
        norm_epsilon: model.norm_epsilon as f32,
        position_embedding: match is_gpt2 {
            true => PositionEmbedding::LearnedAbsolute { max_positions: size(model.max_positions) },
            false => PositionEmbedding::Rope,
        },
        rotary_base: model.rotary_base,
        activation: match model.activation {
            HfActivation::SiluGate => Activation::Swiglu,
            HfActivation::Gelu => Activation::Gelu,
            HfActivation::GeluTanh => Activation::GeluTanh,
        },
        biases: match (model.qkv_bias, model.linear_bias) {
            (_, true) => Biases::All,
            (true, false) => Biases::Qkv,
            (false, false) => Biases::None,
        },
        // Dropouts of training, which a forward pass alone must leave out.
        hidden_dropout: 0.1,
        attention_dropout: 0.1,
        init_method_std: 0.02,
    }
}

/// Every tensor of ours, made of theirs; nothing of theirs is left over, and the way back gives their bytes.
fn weights(model: &HfModel, folder: &Path) -> BTreeMap<String, Vec<f32>> {
    let opened = SafetensorsFolder::open(&Store::open(folder.to_str().unwrap()).unwrap()).unwrap();
    let mut unused: BTreeSet<&String> = opened.tensors().keys().collect();
    let mut weights = BTreeMap::new();
    for map in model.tensors() {
        let mut parts = Vec::new();
        let mut dtype = None;
        for (name, shape) in &map.theirs {
            let stored = &opened.tensors()[name];
            assert_eq!(stored.shape, *shape, "{name}");
            assert!(unused.remove(name), "{name} is used twice");
            dtype = Some(stored.dtype);
            parts.push(opened.read(name).unwrap());
        }
        let ours = map.to_ours(&parts);
        assert!(map.to_theirs(&ours) == parts, "the way back of {}", map.ours);
        let values = match dtype.unwrap() {
            DType::F32 => ours.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
            DType::Bf16 => ours.as_chunks().0.iter().map(|x| bf16::from_le_bytes(*x).to_f32()).collect(),
            other => panic!("a fixture of {other}"),
        };
        weights.insert(map.ours.to_string(), values);
    }
    assert!(unused.is_empty(), "left over: {unused:?}");
    weights
}

/// Logits of all tokens of `ids`, `[B·T, V]`, of the first rank.
fn logits(name: &str, ids: &[Vec<i32>], layout: Layout) -> Vec<f32> {
    let folder = fixture(name);
    let model = HfModel::of_config(&json(&folder.join("config.json"))).unwrap();
    let weights = weights(&model, &folder);
    forward(model_config(&model), Some(&weights), ids, layout)
}

/// The same of any model; without weights of those that it starts from.
fn forward(
    model: ModelConfig,
    weights: Option<&BTreeMap<String, Vec<f32>>>,
    ids: &[Vec<i32>],
    layout: Layout,
) -> Vec<f32> {
    let (batch, seq) = (ids.len(), ids[0].len());
    let layout = Layout { mbs: batch as u32, ..layout };
    let lanes = layout.dp * layout.gtp / layout.nseq;
    let parallel = layout.parallel(seq as u64, batch as u64 * u64::from(lanes)).unwrap();
    let config = support::config(model, parallel, 1);
    config.check().unwrap();
    let tokens = ids.concat();
    let micro_batch = MicroBatch {
        targets: vec![0; tokens.len()],
        weights: vec![0.0; tokens.len()],
        positions: (0..batch).flat_map(|_| 0..seq as i32).collect(),
        samples: (0..batch as i64).flat_map(|sample| vec![sample; seq]).collect(),
        tokens,
        ..MicroBatch::default()
    };
    let table = Arc::new(GroupTable::new("model", config.parallel.layout()));
    let ranks = World::run(layout.world_size(), WorldOptions::default(), |context| {
        let groups = table.for_rank(context.rank());
        let comms = Comms::new(&groups, |kind| context.comm(&groups, kind)).unwrap();
        let mut trainer = Trainer::new(&config, &groups, comms, &Device::Cpu).unwrap();
        if let Some(weights) = weights {
            trainer.set_weights(|param| weights[param.key.as_str()].clone()).unwrap();
        }
        let first = trainer.logits(&micro_batch)?;
        // A forward pass leaves nothing behind.
        assert_eq!(trainer.logits(&micro_batch)?, first);
        Ok::<_, train::parallel::StepError>(first)
    });
    ranks.map_err(|error| error.to_string()).unwrap().swap_remove(0)
}

fn ids(name: &str) -> Vec<Vec<i32>> {
    serde_json::from_value(json(&fixture(name).join("ids.json"))["input_ids"].clone()).unwrap()
}

/// f32 elements of a `.npy` file: ten bytes, the last two the length of the header, the header, the elements.
fn npy(path: &Path) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap();
    let header = usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    bytes[10 + header..].as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect()
}

/// Both compute in f32: differences of some roundings of 6e-8 over a few layers, of logits up to 3.
fn gives_the_logits_of_transformers(name: &str) {
    let expected = npy(&fixture(name).join("logits.npy"));
    let found = logits(name, &ids(name), Layout::SINGLE);
    assert_eq!(found.len(), expected.len());
    let apart = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(apart <= 2e-5, "{name}: logits are {apart:e} apart");
}

#[test]
fn llama_gives_the_logits_of_transformers() {
    gives_the_logits_of_transformers("llama_f32");
}

#[test]
fn llama_in_bf16_and_several_files_gives_the_logits_of_transformers() {
    gives_the_logits_of_transformers("llama_bf16_sharded");
}

#[test]
fn qwen2_with_biases_and_a_tied_head_gives_the_logits_of_transformers() {
    gives_the_logits_of_transformers("qwen2_tied_bf16");
}

#[test]
fn gpt2_gives_the_logits_of_transformers() {
    gives_the_logits_of_transformers("gpt2_f32");
}

/// Sums that TP splits run in the same order whoever has which part, and the vocabulary's columns come back in theirs.
#[test]
fn logits_have_the_same_bits_under_any_tensor_parallelism() {
    let ids: Vec<Vec<i32>> =
        (0..2).map(|sample| (0..16).map(|at| (sample * 90 + at * 13) % 251).collect()).collect();
    for model in [tiny_model(8), tied_model(8), tiny_gpt2(8)] {
        let bits = |layout| -> Vec<u32> {
            forward(model.clone(), None, &ids, layout).iter().map(|logit| logit.to_bits()).collect()
        };
        let expected = bits(Layout::SINGLE);
        assert_eq!(expected.len(), 2 * 16 * 257);
        for tp in [2, 4, 8] {
            for (sp, gtp) in [(false, 1), (true, 1), (true, 2)] {
                let layout = Layout { tp, sp, gtp, ..Layout::SINGLE };
                assert!(bits(layout) == expected, "{layout:?}");
            }
        }
    }
}
