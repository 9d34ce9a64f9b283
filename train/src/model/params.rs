//! The table of parameters: names, shapes, placements, initial values. Everything that shards, saves, loads, reduces or
//! updates a parameter derives it from here.

use crate::config::TrainConfig;
use mesh::{DimPlacement, GroupKind, Placement, TensorKey};

/// One parameter of the model.
#[derive(Clone, Debug)]
pub struct ParamDecl {
    /// Native key.
    pub key: TensorKey,
    /// How the logical tensor is divided.
    pub placement: Placement,
    /// Initial values.
    pub init: Init,
    /// Whether weight decay applies: to matrices.
    pub decay: bool,
}

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Every element is 1.
    Ones,
    /// Normal with this standard deviation, drawn by global element index.
    Normal {
        /// Standard deviation.
        std: f64,
    },
}

/// Index of a parameter in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ParamId(pub usize);

/// The parameters of one decoder layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerParams {
    /// Norm before attention, `[h]`.
    pub input_norm: ParamId,
    /// Fused query, key and value heads, `[G·(q+2)·d, h]`, per group.
    pub qkv: ParamId,
    /// Attention output, `[h, G·q·d]`.
    pub proj: ParamId,
    /// Norm before the feed-forward block, `[h]`.
    pub mlp_norm: ParamId,
    /// Fused gate and up, `[2F, h]`.
    pub fc1: ParamId,
    /// Down projection, `[h, F]`.
    pub fc2: ParamId,
}

/// The parameters of a model, and which is which.
#[derive(Clone, Debug)]
pub struct ParamTable {
    /// In the order of the forward pass.
    pub params: Vec<ParamDecl>,
    /// Word embedding, `[V, h]`.
    pub embedding: ParamId,
    /// By global layer number.
    pub layers: Vec<LayerParams>,
    /// Norm after the last layer, `[h]`.
    pub final_norm: ParamId,
    /// Output layer, `[V, h]`: the word embedding itself if tied.
    pub output: ParamId,
}

/// Rows that the vocabulary takes in memory, given the blocks of a TP-split sum: in canonical numerics the same under every
/// TP, so that the blocks never move.
pub fn padded_vocab(vocab_size: usize, blocks: usize) -> usize {
    vocab_size.next_multiple_of(128 * blocks)
}

impl ParamTable {
    /// The table of a model.
    pub fn new(config: &TrainConfig) -> Self {
        let model = &config.model;
        let [hidden, ffn, vocab] =
            [model.hidden_size, model.ffn_hidden_size, model.vocab_size].map(|size| size as u64);
        let query_cols = (model.num_attention_heads * model.kv_channels) as u64;
        let qkv_rows = query_cols + 2 * (model.num_query_groups * model.kv_channels) as u64;
        let blocks = config.numerics.tp_blocks(config.parallel.layout().tp() as usize);
        let padded = padded_vocab(model.vocab_size, blocks) as u64;
        let normal = Init::Normal { std: model.init_method_std };
        let residual = Init::Normal { std: model.init_method_std / (2.0 * model.num_layers as f64).sqrt() };

        let column_parallel = |rows: DimPlacement, cols: u64| {
            Placement::new(vec![
                rows.exact(GroupKind::Tp).ceil(GroupKind::GtpRemat),
                DimPlacement::whole(cols),
            ])
        };
        let row_parallel = |rows: u64, cols: u64| {
            Placement::new(vec![
                DimPlacement::whole(rows).ceil(GroupKind::GtpRemat),
                DimPlacement::whole(cols).exact(GroupKind::Tp),
            ])
        };
        let vocabulary = || column_parallel(DimPlacement::whole(vocab).padded_to(padded), hidden);

        let mut params = Vec::new();
        let mut matrix = |key: String, placement, init| {
            params.push(ParamDecl { key: TensorKey::new(key), placement, init, decay: true });
            ParamId(params.len() - 1)
        };
        let embedding = matrix("embedding.word_embeddings.weight".into(), vocabulary(), normal);
        let mut layers = Vec::new();
        for layer in 0..model.num_layers {
            let name = |part: &str| format!("decoder.layers.{layer}.{part}");
            let norm = Placement::new(vec![DimPlacement::whole(hidden)]);
            layers.push(LayerParams {
                input_norm: matrix(
                    name("self_attention.linear_qkv.layer_norm_weight"),
                    norm.clone(),
                    Init::Ones,
                ),
                qkv: matrix(
                    name("self_attention.linear_qkv.weight"),
                    column_parallel(DimPlacement::whole(qkv_rows), hidden),
                    normal,
                ),
                proj: matrix(
                    name("self_attention.linear_proj.weight"),
                    row_parallel(hidden, query_cols),
                    residual,
                ),
                mlp_norm: matrix(name("mlp.linear_fc1.layer_norm_weight"), norm, Init::Ones),
                fc1: matrix(
                    name("mlp.linear_fc1.weight"),
                    column_parallel(DimPlacement::fused(&[ffn, ffn]), hidden),
                    normal,
                ),
                fc2: matrix(name("mlp.linear_fc2.weight"), row_parallel(hidden, ffn), residual),
            });
        }
        let norm = Placement::new(vec![DimPlacement::whole(hidden)]);
        let final_norm = matrix("decoder.final_layernorm.weight".into(), norm, Init::Ones);
        let output = match model.tie_embeddings {
            true => embedding,
            false => matrix("output_layer.weight".into(), vocabulary(), normal),
        };
        for param in &mut params {
            param.decay = param.placement.dims().len() > 1;
        }
        ParamTable { params, embedding, layers, final_norm, output }
    }
}
