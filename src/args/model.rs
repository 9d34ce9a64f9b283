//! The shape of the model.

use super::flag::{contrary, named};
use super::resolve::{missing, said_twice};
use crate::report::Refusal;
use serde::{Deserialize, Serialize};
use train::config::{Activation, Biases, ConfigError, ModelConfig, Normalization, PositionEmbedding};

mesh::settings! {
    /// `[model]`
    #[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    #[command(arg = contrary(
        "untie-embeddings-and-output-weights",
        "tie_embeddings",
        "Keep the output layer apart from the word embedding"
    ))]
    #[command(arg = contrary("no-swiglu", "swiglu", "Plain feed-forward blocks: GELU by the error function"))]
    #[command(arg = contrary("disable-bias-linear", "add_bias_linear", "Leave projections without biases"))]
    pub(crate) struct ModelArgs {
        /// Decoder layers (required)
        #[arg(long, value_name = "LAYERS")]
        pub(crate) num_layers: Option<usize>,
        /// Hidden size (required)
        #[arg(long, value_name = "SIZE")]
        pub(crate) hidden_size: Option<usize>,
        /// Width of the feed-forward blocks, for SwiGLU that of gate and of up [default: ⌊8 × hidden size ÷ 3 ÷ 64⌋ × 64, as
        /// Megatron's for SwiGLU; else 4 × hidden size]
        #[arg(long, value_name = "SIZE")]
        pub(crate) ffn_hidden_size: Option<usize>,
        /// Query heads (required; a multiple of the query groups)
        #[arg(long, value_name = "HEADS")]
        pub(crate) num_attention_heads: Option<usize>,
        /// Key-value heads [default: query heads; a multiple of TP]
        #[arg(long, value_name = "GROUPS")]
        pub(crate) num_query_groups: Option<usize>,
        /// Says that --num-query-groups is meant; that alone is enough
        #[arg(long, hide = true)]
        pub(crate) group_query_attention: Option<bool>,
        /// Elements of a head [default: hidden size ÷ query heads]
        #[arg(long, value_name = "SIZE")]
        pub(crate) kv_channels: Option<usize>,
        /// Token ids there are [default: what PREFIX.tokenizer.json of the data says]
        #[arg(long, value_name = "IDS")]
        pub(crate) vocab_size: Option<usize>,
        /// Use the word embedding as output layer [default: off]
        #[arg(
            long,
            default_value_if("untie-embeddings-and-output-weights", "true", "false"),
            conflicts_with = "untie-embeddings-and-output-weights"
        )]
        pub(crate) tie_embeddings: Option<bool>,
        /// Kind of the norms [default: RMSNorm]
        #[arg(long, value_parser = named::<Normalization>(), value_name = "KIND")]
        pub(crate) normalization: Option<Normalization>,
        /// ε of the norms [default: 1e-5]
        #[arg(long, value_name = "EPSILON")]
        pub(crate) norm_epsilon: Option<f32>,
        /// Where positions come in [default: rope]
        #[arg(long, value_parser = named::<PositionEmbeddingType>(), value_name = "TYPE")]
        pub(crate) position_embedding_type: Option<PositionEmbeddingType>,
        /// Rows of the table of learned positions [default: the sequence length; at least that]
        #[arg(long, value_name = "POSITIONS")]
        pub(crate) max_position_embeddings: Option<usize>,
        /// Base of the rotary angles [default: 10000]
        #[arg(long, value_name = "BASE")]
        pub(crate) rotary_base: Option<f64>,
        /// SwiGLU in the feed-forward blocks [default: on]
        #[arg(long, default_value_if("no-swiglu", "true", "false"), conflicts_with = "no-swiglu")]
        pub(crate) swiglu: Option<bool>,
        /// GELU by the hyperbolic tangent, as GPT-2 has it, in place of SwiGLU [default: off]
        #[arg(long)]
        pub(crate) openai_gelu: Option<bool>,
        /// Biases in all projections of a layer [default: off]
        #[arg(
            long,
            default_value_if("disable-bias-linear", "true", "false"),
            conflicts_with = "disable-bias-linear"
        )]
        pub(crate) add_bias_linear: Option<bool>,
        /// Biases of queries, keys and values, as Qwen2 has them [default: off]
        #[arg(long)]
        pub(crate) add_qkv_bias: Option<bool>,
        /// Probability of the hidden dropouts, from 0 to below 1 [default: 0]
        #[arg(long, value_name = "P")]
        pub(crate) hidden_dropout: Option<f32>,
        /// Probability of the attention dropout, from 0 to below 1 [default: 0]
        #[arg(long, value_name = "P")]
        pub(crate) attention_dropout: Option<f32>,
        /// Standard deviation of initial weights [default: 0.02]
        #[arg(long, value_name = "STD")]
        pub(crate) init_method_std: Option<f64>,
    }
}

/// Which of the [`PositionEmbedding`]s; the size of a table is a setting of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum PositionEmbeddingType {
    Rope,
    LearnedAbsolute,
}

impl ModelArgs {
    /// Takes out of `weaker` the other activation than the one that is asked for here.
    pub(super) fn silence(&self, weaker: &mut Self) {
        if self.swiglu == Some(true) {
            weaker.openai_gelu = None;
        }
        if self.openai_gelu == Some(true) {
            weaker.swiglu = None;
        }
    }

    /// The model, over data of `vocab_size` ids.
    ///
    /// # Errors
    /// A size that has no default and was not said, or sizes that contradict each other or the data.
    pub(super) fn resolve(
        &self,
        vocab_size: Option<usize>,
        seq_length: usize,
    ) -> anyhow::Result<ModelConfig> {
        let hidden_size = self.hidden_size.ok_or_else(|| missing("hidden-size"))?;
        let heads = self.num_attention_heads.ok_or_else(|| missing("num-attention-heads"))?;
        if self.group_query_attention == Some(true) && self.num_query_groups.is_none() {
            return Err(missing("num-query-groups").into());
        }
        if self.kv_channels.is_none() && !hidden_size.is_multiple_of(heads.max(1)) {
            let (what, by) = ("hidden-size", "num-attention-heads");
            return Err(ConfigError::Indivisible { what, value: hidden_size, by, divisor: heads }.into());
        }
        if let (Some(said), Some(ids)) = (self.vocab_size, vocab_size)
            && said < ids
        {
            return Err(Refusal::new(
                "RM6003",
                format!("`--vocab-size` {said} is less than the {ids} ids of the data's tokenizer"),
                "leave it out, or give at least that",
            )
            .into());
        }
        let vocab_size = self.vocab_size.or(vocab_size);
        let activation = match (self.swiglu, self.openai_gelu) {
            (Some(true), Some(true)) => return Err(said_twice("swiglu", "openai_gelu").into()),
            (_, Some(true)) => Activation::GeluTanh,
            (Some(false), _) => Activation::Gelu,
            _ => Activation::Swiglu,
        };
        let default_ffn = match activation {
            Activation::Swiglu => (hidden_size.saturating_mul(8) / 3 / 64).max(1) * 64,
            Activation::Gelu | Activation::GeluTanh => hidden_size.saturating_mul(4),
        };
        Ok(ModelConfig {
            num_layers: self.num_layers.ok_or_else(|| missing("num-layers"))?,
            hidden_size,
            ffn_hidden_size: self.ffn_hidden_size.unwrap_or(default_ffn),
            num_attention_heads: heads,
            num_query_groups: self.num_query_groups.unwrap_or(heads),
            kv_channels: self.kv_channels.unwrap_or(hidden_size / heads.max(1)),
            vocab_size: vocab_size.ok_or_else(|| missing("vocab-size"))?,
            tie_embeddings: self.tie_embeddings.unwrap_or(false),
            normalization: self.normalization.unwrap_or_default(),
            position_embedding: match self.position_embedding_type {
                None | Some(PositionEmbeddingType::Rope) => PositionEmbedding::Rope,
                Some(PositionEmbeddingType::LearnedAbsolute) => PositionEmbedding::LearnedAbsolute {
                    max_positions: self.max_position_embeddings.unwrap_or(seq_length),
                },
            },
            activation,
            biases: match (self.add_bias_linear, self.add_qkv_bias) {
                (Some(true), _) => Biases::All,
                (_, Some(true)) => Biases::Qkv,
                _ => Biases::None,
            },
            norm_epsilon: self.norm_epsilon.unwrap_or(1e-5),
            rotary_base: self.rotary_base.unwrap_or(10_000.0),
            hidden_dropout: self.hidden_dropout.unwrap_or(0.0),
            attention_dropout: self.attention_dropout.unwrap_or(0.0),
            init_method_std: self.init_method_std.unwrap_or(0.02),
        })
    }
}

/// The settings that resolve to the same model.
impl From<&ModelConfig> for ModelArgs {
    fn from(model: &ModelConfig) -> Self {
        let (position_embedding_type, max_position_embeddings) = match model.position_embedding {
            PositionEmbedding::Rope => (PositionEmbeddingType::Rope, None),
            PositionEmbedding::LearnedAbsolute { max_positions } => {
                (PositionEmbeddingType::LearnedAbsolute, Some(max_positions))
            }
        };
        ModelArgs {
            num_layers: Some(model.num_layers),
            hidden_size: Some(model.hidden_size),
            ffn_hidden_size: Some(model.ffn_hidden_size),
            num_attention_heads: Some(model.num_attention_heads),
            num_query_groups: Some(model.num_query_groups),
            group_query_attention: None,
            kv_channels: Some(model.kv_channels),
            vocab_size: Some(model.vocab_size),
            tie_embeddings: Some(model.tie_embeddings),
            normalization: Some(model.normalization),
            norm_epsilon: Some(model.norm_epsilon),
            position_embedding_type: Some(position_embedding_type),
            max_position_embeddings,
            rotary_base: Some(model.rotary_base),
            swiglu: Some(model.activation == Activation::Swiglu),
            openai_gelu: Some(model.activation == Activation::GeluTanh),
            add_bias_linear: Some(model.biases == Biases::All),
            add_qkv_bias: Some(model.biases != Biases::None),
            hidden_dropout: Some(model.hidden_dropout),
            attention_dropout: Some(model.attention_dropout),
            init_method_std: Some(model.init_method_std),
        }
    }
}
