//! Hugging Face models: what a `config.json` says, and which of its tensors make which of ours.
//!
//! One table a family, read in both directions. Ours are Megatron's: queries, keys and values of a group stand together, gate
//! and up are one matrix, and weights are `[out, in]`.

use mesh::{Shape, TensorKey};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Families whose models are the same program with other settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HfFamily {
    /// Llama and Qwen2.
    Llama,
    /// GPT-2.
    Gpt2,
}

/// What a feed-forward block computes between its projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HfActivation {
    /// SiLU of the gate, times up.
    SiluGate,
    /// GELU by the error function.
    Gelu,
    /// GELU by the hyperbolic tangent.
    GeluTanh,
}

/// A model as its `config.json` describes it.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the settings of the same names
pub struct HfModel {
    pub family: HfFamily,
    pub num_layers: u64,
    pub hidden_size: u64,
    pub ffn_hidden_size: u64,
    pub num_attention_heads: u64,
    pub num_query_groups: u64,
    pub kv_channels: u64,
    pub vocab_size: u64,
    /// Rows of the table of positions; the longest sequence where positions are rotary.
    pub max_positions: u64,
    pub norm_epsilon: f64,
    /// Of no meaning to GPT-2.
    pub rotary_base: f64,
    pub activation: HfActivation,
    pub tie_embeddings: bool,
    /// Biases of queries, keys and values.
    pub qkv_bias: bool,
    /// Biases of the other projections.
    pub linear_bias: bool,
}

/// Why a `config.json` describes no model that is known here.
#[derive(Debug, thiserror::Error)]
pub enum HfConfigError {
    /// A field is needed.
    #[error("config.json has no `{field}`")]
    Missing {
        /// Which.
        field: &'static str,
    },
    /// A field is not of its type.
    #[error("`{field}` of config.json is {found}, which is not of its type")]
    Type {
        /// Which.
        field: &'static str,
        /// What it is.
        found: String,
    },
    /// A field asks for what is not there.
    #[error("`{field}` of config.json is {found}, which is not known here; known: {known}")]
    Unknown {
        /// Which.
        field: &'static str,
        /// What it is.
        found: String,
        /// What it may be.
        known: &'static str,
    },
    /// A size is 0.
    #[error("config.json: no model has {what} of 0")]
    Zero {
        /// Which.
        what: &'static str,
    },
    /// Heads that do not fit into groups, or into the hidden size.
    #[error("config.json: {heads} query heads in {groups} groups, hidden size {hidden}, are no model")]
    Heads {
        /// Query heads.
        heads: u64,
        /// Key-value heads.
        groups: u64,
        /// Hidden size.
        hidden: u64,
    },
}

impl HfConfigError {
    /// `RM4063`.
    pub fn code(&self) -> &'static str {
        "RM4063"
    }

    /// How to mend it.
    pub fn help(&self) -> &'static str {
        match self {
            HfConfigError::Unknown { .. } => "models of the kinds of Llama, Qwen2 and GPT-2 are known",
            _ => "the download or the copy may be incomplete; fetch the file again",
        }
    }
}

impl HfModel {
    /// Reads a `config.json`.
    ///
    /// # Errors
    /// A field that is missing, or asks for what is not known here: nothing that changes numbers is passed over.
    pub fn of_config(config: &Value) -> Result<HfModel, HfConfigError> {
        let model_type: String = required(config, "model_type")?;
        let model = match model_type.as_str() {
            "llama" | "qwen2" => llama(config, model_type == "qwen2")?,
            "gpt2" => gpt2(config)?,
            _ => return Err(unknown("model_type", model_type, "llama, qwen2, gpt2")),
        };
        let (heads, groups, hidden) = (model.num_attention_heads, model.num_query_groups, model.hidden_size);
        let sizes = [
            ("a number of layers", model.num_layers),
            ("a hidden size", hidden),
            ("a feed-forward width", model.ffn_hidden_size),
            ("a number of query heads", heads),
            ("a number of query groups", groups),
            ("a vocabulary", model.vocab_size),
            ("a number of positions", model.max_positions),
        ];
        if let Some((what, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(HfConfigError::Zero { what });
        }
        match heads.is_multiple_of(groups) && model.kv_channels > 0 {
            true => Ok(model),
            false => Err(HfConfigError::Heads { heads, groups, hidden }),
        }
    }

    /// Every tensor of the model, ours and theirs.
    pub fn tensors(&self) -> Vec<TensorMap> {
        let table: &[Row] = match self.family {
            HfFamily::Llama => LLAMA,
            HfFamily::Gpt2 => GPT2,
        };
        let mut maps = Vec::new();
        for row in table.iter().filter(|row| self.has(row)) {
            let layers = if row.ours.contains("{}") { self.num_layers } else { 1 };
            maps.extend((0..layers).map(|layer| self.tensor(row, layer)));
        }
        maps
    }

    fn has(&self, row: &Row) -> bool {
        match row.when {
            When::Always => true,
            When::QkvBias => self.qkv_bias,
            When::LinearBias => self.linear_bias,
            When::Untied => !self.tie_embeddings,
        }
    }

    fn tensor(&self, row: &Row, layer: u64) -> TensorMap {
        let of_layer = |name: &str| name.replace("{}", &layer.to_string());
        let (heads, groups, d) = (self.num_attention_heads, self.num_query_groups, self.kv_channels);
        let qkv = vec![heads * d, groups * d, groups * d];
        let parts = match row.rows {
            Rows::Hidden => vec![self.hidden_size],
            Rows::Vocabulary => vec![self.vocab_size],
            Rows::Positions => vec![self.max_positions],
            Rows::Qkv if row.theirs.len() == 1 => vec![qkv.iter().sum()],
            Rows::Qkv => qkv,
            Rows::Ffn => vec![self.ffn_hidden_size; row.theirs.len()],
        };
        let cols = match row.cols {
            Cols::None => None,
            Cols::Hidden => Some(self.hidden_size),
            Cols::Queries => Some(heads * d),
            Cols::Ffn => Some(self.ffn_hidden_size),
        };
        let shape = |rows: u64, transposed: bool| match cols {
            None => Shape::new(&[rows]),
            Some(cols) if transposed => Shape::new(&[cols, rows]),
            Some(cols) => Shape::new(&[rows, cols]),
        };
        let transposed = row.transposed;
        TensorMap {
            ours: TensorKey::new(of_layer(row.ours)),
            shape: shape(parts.iter().sum(), false),
            theirs: (row.theirs.iter().zip(&parts))
                .map(|(name, rows)| (of_layer(name), shape(*rows, transposed)))
                .collect(),
            parts,
            transposed,
            heads: matches!(row.rows, Rows::Qkv).then_some(GroupedHeads {
                groups,
                queries: heads / groups,
                dim: d,
            }),
        }
    }
}

/// One of our tensors and those of theirs that it is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// Native key.
    pub ours: TensorKey,
    /// Its logical shape.
    pub shape: Shape,
    /// Their names and shapes. Their rows follow one another in ours; of queries, keys and values those of a group stand together.
    pub theirs: Vec<(String, Shape)>,
    /// Our rows of each of them.
    parts: Vec<u64>,
    /// Whether theirs are `[in, out]`.
    transposed: bool,
    heads: Option<GroupedHeads>,
}

/// Rows of heads: theirs all queries, then all keys, then all values; ours group by group its queries, key and value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GroupedHeads {
    groups: u64,
    queries: u64,
    dim: u64,
}

impl GroupedHeads {
    /// Their row of our row.
    fn their_row(self, row: u64) -> u64 {
        let GroupedHeads { groups, queries, dim } = self;
        let (head, at) = (row / dim, row % dim);
        let (group, head) = (head / (queries + 2), head % (queries + 2));
        let their_head = match head {
            query if query < queries => group * queries + query,
            key if key == queries => groups * queries + group,
            _ => groups * (queries + 1) + group,
        };
        their_head * dim + at
    }
}

/// Elements that stay together: where they lie in ours, in which of theirs and where there, how many.
struct Run {
    ours: usize,
    part: usize,
    theirs: usize,
    len: usize,
}

impl TensorMap {
    /// Our tensor from the bytes of theirs, row-major, in the order of [`theirs`](Self::theirs).
    ///
    /// # Panics
    /// If the lengths are not those of the shapes.
    pub fn to_ours(&self, theirs: &[Vec<u8>]) -> Vec<u8> {
        let sizes = self.theirs.iter().map(|(_, shape)| shape.numel() as usize);
        let total: usize = theirs.iter().map(Vec::len).sum();
        let width = total / self.shape.numel() as usize;
        assert!(theirs.iter().map(Vec::len).eq(sizes.map(|size| size * width)), "parts of `{}`", self.ours);
        let mut out = vec![0; total];
        for Run { ours, part, theirs: at, len } in self.runs() {
            out[ours * width..][..len * width].copy_from_slice(&theirs[part][at * width..][..len * width]);
        }
        out
    }

    /// Their tensors from the bytes of ours: the inverse.
    ///
    /// # Panics
    /// If the length is not that of the shape.
    pub fn to_theirs(&self, ours: &[u8]) -> Vec<Vec<u8>> {
        let width = ours.len() / self.shape.numel() as usize;
        assert_eq!(ours.len(), self.shape.numel() as usize * width, "bytes of `{}`", self.ours);
        let mut out: Vec<Vec<u8>> =
            self.theirs.iter().map(|(_, shape)| vec![0; shape.numel() as usize * width]).collect();
        for Run { ours: from, part, theirs, len } in self.runs() {
            out[part][theirs * width..][..len * width].copy_from_slice(&ours[from * width..][..len * width]);
        }
        out
    }

    fn runs(&self) -> impl Iterator<Item = Run> {
        let cols: u64 = self.shape.dims()[1..].iter().product();
        (0..self.shape.dims()[0]).flat_map(move |row| {
            let mut their_row = self.heads.map_or(row, |heads| heads.their_row(row));
            let mut part = 0;
            while their_row >= self.parts[part] {
                their_row -= self.parts[part];
                part += 1;
            }
            let (len, num_runs) = if self.transposed { (1, cols) } else { (cols, 1) };
            let stride = self.parts[part];
            (0..num_runs).map(move |run| Run {
                ours: (row * cols + run) as usize,
                part,
                theirs: (if self.transposed { run * stride + their_row } else { their_row * cols }) as usize,
                len: len as usize,
            })
        })
    }
}

/// A row of a family's table; `{}` is the layer.
struct Row {
    ours: &'static str,
    theirs: &'static [&'static str],
    rows: Rows,
    cols: Cols,
    transposed: bool,
    when: When,
}

enum Rows {
    Hidden,
    Vocabulary,
    Positions,
    Qkv,
    Ffn,
}

enum Cols {
    /// A vector.
    None,
    Hidden,
    Queries,
    Ffn,
}

enum When {
    Always,
    QkvBias,
    LinearBias,
    Untied,
}

macro_rules! table {
    ($transposed:expr; $($ours:literal [$($theirs:literal),+] $rows:ident $cols:ident $when:ident;)*) => {
        &[$(Row {
            ours: $ours,
            theirs: &[$($theirs),+],
            rows: Rows::$rows,
            cols: Cols::$cols,
            // Embeddings are tables of rows everywhere, and a vector has nothing to transpose.
            transposed: $transposed && !matches!(Rows::$rows, Rows::Vocabulary | Rows::Positions),
            when: When::$when,
        },)*]
    };
}

const LLAMA: &[Row] = table! { false;
    "embedding.word_embeddings.weight" ["model.embed_tokens.weight"] Vocabulary Hidden Always;
    "decoder.layers.{}.self_attention.linear_qkv.layer_norm_weight"
        ["model.layers.{}.input_layernorm.weight"] Hidden None Always;
    "decoder.layers.{}.self_attention.linear_qkv.weight"
        ["model.layers.{}.self_attn.q_proj.weight", "model.layers.{}.self_attn.k_proj.weight",
         "model.layers.{}.self_attn.v_proj.weight"] Qkv Hidden Always;
    "decoder.layers.{}.self_attention.linear_qkv.bias"
        ["model.layers.{}.self_attn.q_proj.bias", "model.layers.{}.self_attn.k_proj.bias",
         "model.layers.{}.self_attn.v_proj.bias"] Qkv None QkvBias;
    "decoder.layers.{}.self_attention.linear_proj.weight"
        ["model.layers.{}.self_attn.o_proj.weight"] Hidden Queries Always;
    "decoder.layers.{}.self_attention.linear_proj.bias"
        ["model.layers.{}.self_attn.o_proj.bias"] Hidden None LinearBias;
    "decoder.layers.{}.mlp.linear_fc1.layer_norm_weight"
        ["model.layers.{}.post_attention_layernorm.weight"] Hidden None Always;
    "decoder.layers.{}.mlp.linear_fc1.weight"
        ["model.layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight"] Ffn Hidden Always;
    "decoder.layers.{}.mlp.linear_fc1.bias"
        ["model.layers.{}.mlp.gate_proj.bias", "model.layers.{}.mlp.up_proj.bias"] Ffn None LinearBias;
    "decoder.layers.{}.mlp.linear_fc2.weight" ["model.layers.{}.mlp.down_proj.weight"] Hidden Ffn Always;
    "decoder.layers.{}.mlp.linear_fc2.bias" ["model.layers.{}.mlp.down_proj.bias"] Hidden None LinearBias;
    "decoder.final_layernorm.weight" ["model.norm.weight"] Hidden None Always;
    "output_layer.weight" ["lm_head.weight"] Vocabulary Hidden Untied;
};

const GPT2: &[Row] = table! { true;
    "embedding.word_embeddings.weight" ["transformer.wte.weight"] Vocabulary Hidden Always;
    "embedding.position_embeddings.weight" ["transformer.wpe.weight"] Positions Hidden Always;
    "decoder.layers.{}.self_attention.linear_qkv.layer_norm_weight"
        ["transformer.h.{}.ln_1.weight"] Hidden None Always;
    "decoder.layers.{}.self_attention.linear_qkv.layer_norm_bias"
        ["transformer.h.{}.ln_1.bias"] Hidden None Always;
    "decoder.layers.{}.self_attention.linear_qkv.weight"
        ["transformer.h.{}.attn.c_attn.weight"] Qkv Hidden Always;
    "decoder.layers.{}.self_attention.linear_qkv.bias" ["transformer.h.{}.attn.c_attn.bias"] Qkv None Always;
    "decoder.layers.{}.self_attention.linear_proj.weight"
        ["transformer.h.{}.attn.c_proj.weight"] Hidden Queries Always;
    "decoder.layers.{}.self_attention.linear_proj.bias"
        ["transformer.h.{}.attn.c_proj.bias"] Hidden None Always;
    "decoder.layers.{}.mlp.linear_fc1.layer_norm_weight" ["transformer.h.{}.ln_2.weight"] Hidden None Always;
    "decoder.layers.{}.mlp.linear_fc1.layer_norm_bias" ["transformer.h.{}.ln_2.bias"] Hidden None Always;
    "decoder.layers.{}.mlp.linear_fc1.weight" ["transformer.h.{}.mlp.c_fc.weight"] Ffn Hidden Always;
    "decoder.layers.{}.mlp.linear_fc1.bias" ["transformer.h.{}.mlp.c_fc.bias"] Ffn None Always;
    "decoder.layers.{}.mlp.linear_fc2.weight" ["transformer.h.{}.mlp.c_proj.weight"] Hidden Ffn Always;
    "decoder.layers.{}.mlp.linear_fc2.bias" ["transformer.h.{}.mlp.c_proj.bias"] Hidden None Always;
    "decoder.final_layernorm.weight" ["transformer.ln_f.weight"] Hidden None Always;
    "decoder.final_layernorm.bias" ["transformer.ln_f.bias"] Hidden None Always;
    "output_layer.weight" ["lm_head.weight"] Vocabulary Hidden Untied;
};

fn llama(config: &Value, is_qwen2: bool) -> Result<HfModel, HfConfigError> {
    let activation: String = optional(config, "hidden_act")?.unwrap_or_else(|| "silu".to_owned());
    if activation != "silu" {
        return Err(unknown("hidden_act", activation, "silu"));
    }
    if is_qwen2 && optional(config, "use_sliding_window")? == Some(true) {
        return Err(unknown("use_sliding_window", "true".to_owned(), "false"));
    }
    // Newer files have one object, older ones the base beside a scaling that is null.
    let rope = config.get("rope_parameters").filter(|rope| !rope.is_null());
    let scaling = rope.or(config.get("rope_scaling")).filter(|rope| !rope.is_null());
    let scaling = scaling.and_then(|rope| rope.get("rope_type").or(rope.get("type")));
    if let Some(scaling) = scaling.filter(|scaling| *scaling != "default") {
        return Err(unknown("rope_type", scaling.to_string(), "default"));
    }
    let heads: u64 = required(config, "num_attention_heads")?;
    let hidden_size: u64 = required(config, "hidden_size")?;
    let attention_bias = optional(config, "attention_bias")?.unwrap_or(false);
    let mlp_bias = optional(config, "mlp_bias")?.unwrap_or(false);
    if attention_bias != mlp_bias {
        let found = format!("{mlp_bias} and `attention_bias` {attention_bias}");
        return Err(unknown("mlp_bias", found, "both or neither"));
    }
    Ok(HfModel {
        family: HfFamily::Llama,
        num_layers: required(config, "num_hidden_layers")?,
        hidden_size,
        ffn_hidden_size: required(config, "intermediate_size")?,
        num_attention_heads: heads,
        num_query_groups: optional(config, "num_key_value_heads")?.unwrap_or(heads),
        kv_channels: optional(config, "head_dim")?.unwrap_or(hidden_size / heads.max(1)),
        vocab_size: required(config, "vocab_size")?,
        max_positions: required(config, "max_position_embeddings")?,
        norm_epsilon: required(config, "rms_norm_eps")?,
        rotary_base: optional(rope.unwrap_or(config), "rope_theta")?.unwrap_or(10_000.0),
        activation: HfActivation::SiluGate,
        tie_embeddings: optional(config, "tie_word_embeddings")?.unwrap_or(false),
        qkv_bias: is_qwen2 || attention_bias,
        linear_bias: mlp_bias,
    })
}

fn gpt2(config: &Value) -> Result<HfModel, HfConfigError> {
    let activation: String =
        optional(config, "activation_function")?.unwrap_or_else(|| "gelu_new".to_owned());
    let activation = match activation.as_str() {
        "gelu_new" | "gelu_pytorch_tanh" => HfActivation::GeluTanh,
        "gelu" => HfActivation::Gelu,
        _ => {
            return Err(unknown("activation_function", activation, "gelu_new, gelu_pytorch_tanh, gelu"));
        }
    };
    for (field, usual) in [("scale_attn_weights", true), ("scale_attn_by_inverse_layer_idx", false)] {
        if optional(config, field)?.unwrap_or(usual) != usual {
            return Err(unknown(field, (!usual).to_string(), if usual { "true" } else { "false" }));
        }
    }
    let heads: u64 = required(config, "n_head")?;
    let hidden_size: u64 = required(config, "n_embd")?;
    Ok(HfModel {
        family: HfFamily::Gpt2,
        num_layers: required(config, "n_layer")?,
        hidden_size,
        ffn_hidden_size: optional(config, "n_inner")?.unwrap_or(hidden_size.saturating_mul(4)),
        num_attention_heads: heads,
        num_query_groups: heads,
        kv_channels: hidden_size / heads.max(1),
        vocab_size: required(config, "vocab_size")?,
        max_positions: required(config, "n_positions")?,
        norm_epsilon: optional(config, "layer_norm_epsilon")?.unwrap_or(1e-5),
        rotary_base: 10_000.0,
        activation,
        tie_embeddings: optional(config, "tie_word_embeddings")?.unwrap_or(true),
        qkv_bias: true,
        linear_bias: true,
    })
}

/// A field that may be missing or null.
fn optional<T: DeserializeOwned>(config: &Value, field: &'static str) -> Result<Option<T>, HfConfigError> {
    match config.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match serde_json::from_value(value.clone()) {
            Ok(value) => Ok(Some(value)),
            Err(_) => Err(HfConfigError::Type { field, found: value.to_string() }),
        },
    }
}

fn required<T: DeserializeOwned>(config: &Value, field: &'static str) -> Result<T, HfConfigError> {
    optional(config, field)?.ok_or(HfConfigError::Missing { field })
}

fn unknown(field: &'static str, found: String, known: &'static str) -> HfConfigError {
    HfConfigError::Unknown { field, found, known }
}
