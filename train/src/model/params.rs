//! The table of parameters: names, shapes, placements, initial values. Everything that shards, saves, loads, reduces or
//! updates a parameter derives it from here.

use crate::config::{Biases, Normalization, PositionEmbedding, TrainConfig};
use mesh::{DimPlacement, GroupKind, ModelPart, Placement, TensorKey};

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

impl ParamDecl {
    /// How its moments, and its master, are divided: as the parameter, and their rows over its replicas too.
    pub fn optimizer_placement(&self) -> Placement {
        self.placement.clone().with_rows_over(GroupKind::DpCp)
    }
}

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Every element is 0.
    Zeros,
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

/// A weight and what is added to its output: a projection and its bias, a norm's gain and shift.
#[derive(Clone, Copy, Debug)]
pub struct Affine {
    /// What is multiplied by.
    pub weight: ParamId,
    /// What is added, one element an output.
    pub bias: Option<ParamId>,
}

/// The parameters of one decoder layer. F inputs of the down projection, and for SwiGLU as many gates.
#[derive(Clone, Copy, Debug)]
pub struct LayerParams {
    /// Norm before attention, `[h]`.
    pub input_norm: Affine,
    /// Fused query, key and value heads, `[G·(q+2)·d, h]`, per group.
    pub qkv: Affine,
    /// Attention output, `[h, G·q·d]`.
    pub proj: Affine,
    /// Norm before the feed-forward block, `[h]`.
    pub mlp_norm: Affine,
    /// Fused gate and up, `[2F, h]`; without gates `[F, h]`.
    pub fc1: Affine,
    /// Down projection, `[h, F]`.
    pub fc2: Affine,
}

/// The parameters of a model, and which is which.
#[derive(Clone, Debug)]
pub struct ParamTable {
    /// In the order of the forward pass.
    pub params: Vec<ParamDecl>,
    /// Word embedding, `[V, h]`.
    pub embedding: ParamId,
    /// Learned positions, `[P, h]`.
    pub positions: Option<ParamId>,
    /// By global layer number.
    pub layers: Vec<LayerParams>,
    /// Norm after the last layer, `[h]`.
    pub final_norm: Affine,
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
        // Vectors are cut by TP as the rows of their weight, and never by GTP.
        let whole_vector = || Placement::new(vec![DimPlacement::whole(hidden)]);
        let cut_vector = |rows: DimPlacement| Placement::new(vec![rows.exact(GroupKind::Tp)]);
        let qkv_rows = || DimPlacement::whole(qkv_rows);
        let fc1_rows = || DimPlacement::fused(&vec![ffn; model.activation.inputs()]);
        let shift = || (model.normalization == Normalization::LayerNorm).then(whole_vector);
        let has_biases = model.biases == Biases::All;

        let mut table = Params::default();
        let first = if model.tie_embeddings { ModelPart::BothEnds } else { ModelPart::FirstStage };
        let embedding = table.add("embedding.word_embeddings.weight".into(), vocabulary().of(first), normal);
        let positions = match model.position_embedding {
            PositionEmbedding::Rope => None,
            PositionEmbedding::LearnedAbsolute { max_positions } => {
                let rows = DimPlacement::whole(max_positions as u64);
                let placement =
                    Placement::new(vec![rows, DimPlacement::whole(hidden)]).of(ModelPart::FirstStage);
                Some(table.add("embedding.position_embeddings.weight".into(), placement, normal))
            }
        };
        let layers = (0..model.num_layers)
            .map(|layer| {
                let mut affine = |name: &str, placement, init, bias| {
                    let stem = format!("decoder.layers.{layer}.{name}");
                    table.affine(&stem, ModelPart::Layer(layer as u32), placement, init, bias)
                };
                LayerParams {
                    input_norm: affine(
                        "self_attention.linear_qkv.layer_norm_",
                        whole_vector(),
                        Init::Ones,
                        shift(),
                    ),
                    qkv: affine(
                        "self_attention.linear_qkv.",
                        column_parallel(qkv_rows(), hidden),
                        normal,
                        (model.biases != Biases::None).then(|| cut_vector(qkv_rows())),
                    ),
                    proj: affine(
                        "self_attention.linear_proj.",
                        row_parallel(hidden, query_cols),
                        residual,
                        has_biases.then(whole_vector),
                    ),
                    mlp_norm: affine("mlp.linear_fc1.layer_norm_", whole_vector(), Init::Ones, shift()),
                    fc1: affine(
                        "mlp.linear_fc1.",
                        column_parallel(fc1_rows(), hidden),
                        normal,
                        has_biases.then(|| cut_vector(fc1_rows())),
                    ),
                    fc2: affine(
                        "mlp.linear_fc2.",
                        row_parallel(hidden, ffn),
                        residual,
                        has_biases.then(whole_vector),
                    ),
                }
            })
            .collect();
        let last = ModelPart::LastStage;
        let final_norm = table.affine("decoder.final_layernorm.", last, whole_vector(), Init::Ones, shift());
        let output = match model.tie_embeddings {
            true => embedding,
            false => table.add("output_layer.weight".into(), vocabulary().of(last), normal),
        };
        ParamTable { params: table.params, embedding, positions, layers, final_norm, output }
    }
}

/// A table in the making.
#[derive(Default)]
struct Params {
    params: Vec<ParamDecl>,
}

impl Params {
    fn add(&mut self, key: String, placement: Placement, init: Init) -> ParamId {
        let decay = placement.dims().len() > 1;
        self.params.push(ParamDecl { key: TensorKey::new(key), placement, init, decay });
        ParamId(self.params.len() - 1)
    }

    /// `stem` and `weight`, and where there is a bias `stem` and `bias`, both of one part of the model.
    fn affine(
        &mut self,
        stem: &str,
        part: ModelPart,
        placement: Placement,
        init: Init,
        bias: Option<Placement>,
    ) -> Affine {
        Affine {
            weight: self.add(format!("{stem}weight"), placement.of(part), init),
            bias: bias.map(|placement| self.add(format!("{stem}bias"), placement.of(part), Init::Zeros)),
        }
    }
}
