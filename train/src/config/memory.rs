//! The least memory that a run needs, so that what cannot fit is refused before any of it is asked for.

use super::{ConfigError, PositionEmbedding, TrainConfig};

impl TrainConfig {
    /// Checks that the run can fit in `there` bytes of memory, which its ranks share.
    ///
    /// # Errors
    /// If it needs more, whatever else it may need.
    pub fn check_memory(&self, there: u64) -> Result<(), ConfigError> {
        let wanted = self.bytes_at_least();
        if wanted > there { Err(ConfigError::Memory { wanted, there }) } else { Ok(()) }
    }

    /// Bytes that all ranks together need at least: matrices with their gradients and moments, a micro-batch of hidden
    /// states, the list of a step's samples, and what a thread cannot do without. Sizes that cannot be counted are the largest.
    fn bytes_at_least(&self) -> u64 {
        /// Of a thread.
        const RANK: u64 = 64 << 10;
        /// Of a weight and its gradient in each replica, and of two moments, in the smallest types there are.
        const REPLICATED: u64 = 6;
        const MOMENTS: u64 = 8;
        /// Of one sample's number and position in a list.
        const SAMPLE: u64 = 24;
        let product = |factors: &[u64]| factors.iter().copied().fold(1, u64::saturating_mul);
        let sum = |terms: &[u64]| terms.iter().copied().fold(0, u64::saturating_add);
        let m = &self.model;
        let [layers, hidden, ffn, heads, groups, channels, vocabulary] = [
            m.num_layers,
            m.hidden_size,
            m.ffn_hidden_size,
            m.num_attention_heads,
            m.num_query_groups,
            m.kv_channels,
            m.vocab_size,
        ]
        .map(|size| size as u64);
        let attention = product(&[2, hidden, channels, heads.saturating_add(groups)]);
        let layer = attention.saturating_add(product(&[2, hidden, ffn]));
        let embeddings = if m.tie_embeddings { 1 } else { 2 };
        let positions = match m.position_embedding {
            PositionEmbedding::Rope => 0,
            PositionEmbedding::LearnedAbsolute { max_positions } => max_positions as u64,
        };
        let rows = sum(&[product(&[embeddings, vocabulary]), positions]);
        let weights = sum(&[product(&[rows, hidden]), product(&[layers, layer])]);
        let layout = self.parallel.layout();
        let (ranks, batch) = (u64::from(layout.world_size()), self.parallel.global_batch_size());
        let evaluated = self.evaluation.map_or(0, |evaluation| evaluation.batch.global_batch_size);
        let micro_batch = batch / self.parallel.num_microbatches().max(1);
        sum(&[
            product(&[weights, REPLICATED, layout.num_weight_replicas().into()]),
            product(&[weights, MOMENTS]),
            product(&[micro_batch, self.parallel.seq_length(), hidden, 4]),
            product(&[ranks, batch.max(evaluated), SAMPLE]),
            product(&[ranks, RANK]),
        ])
    }
}
