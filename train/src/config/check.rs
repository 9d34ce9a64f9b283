//! What cannot be trained, and how to mend it.

use super::{Canonical, EpochTail, Numerics, PositionEmbedding, TrainConfig};
use crate::evaluate::Evaluation;
use crate::rng;
use mesh::{BatchError, BatchSchedule, ExpertSizes, ParallelError};

impl TrainConfig {
    /// Checks everything that the layout rules alone cannot see: the model's widths against TP, and the canonical leaves
    /// against what a rank holds. Pure, so all ranks refuse alike, before any group exists.
    ///
    /// # Errors
    /// The first thing that does not fit, with the numbers.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.faults().into_iter().next().map_or(Ok(()), Err)
    }

    /// Everything that [`check`](Self::check) refuses, as far as one fault does not hide another.
    pub fn faults(&self) -> Vec<ConfigError> {
        let m = &self.model;
        let sizes = [
            ("num-layers", m.num_layers),
            ("hidden-size", m.hidden_size),
            ("ffn-hidden-size", m.ffn_hidden_size),
            ("num-attention-heads", m.num_attention_heads),
            ("num-query-groups", m.num_query_groups),
            ("kv-channels", m.kv_channels),
            ("vocab-size", m.vocab_size),
        ];
        let mut faults: Vec<ConfigError> = zeros(&sizes).collect();
        let has_sizes = faults.is_empty();
        if let Some(evaluation) = self.evaluation {
            let Evaluation { interval, iters, .. } = evaluation;
            faults.extend(zeros(&[("eval-interval", interval), ("eval-iters", iters)]));
            faults.extend(evaluation.parallel(&self.parallel).err().map(ConfigError::Evaluation));
        }
        let (value, divisor) = (m.num_attention_heads, m.num_query_groups);
        if has_sizes && !value.is_multiple_of(divisor) {
            let (what, by) = ("num-attention-heads", "num-query-groups");
            faults.push(ConfigError::Indivisible { what, value, by, divisor });
        }
        if m.position_embedding == PositionEmbedding::Rope && !m.kv_channels.is_multiple_of(2) {
            faults.push(ConfigError::OddHead { kv_channels: m.kv_channels });
        }
        faults.extend(self.ranges());
        faults.extend(self.too_large());
        if self.epoch_tail != EpochTail::Span && !self.batch.is_constant() {
            faults.push(ConfigError::TailOfSchedule { tail: self.epoch_tail, batch: self.batch.clone() });
        }
        let layout = &self.parallel.layout();
        if layout.pp() != 1 {
            faults.push(ConfigError::Pipeline { pp: layout.pp() });
        }
        // Without experts, it is all the same how TP would cut them.
        let ExpertSizes { ep, egtp, .. } = layout.experts();
        if ep.max(egtp) > 1 {
            faults.push(ConfigError::Experts { ep, weight_shards: self.parallel.expert_weight_shards() });
        }
        if has_sizes {
            faults.extend(self.undivided());
        }
        faults
    }

    /// Checks that the batches of all steps that are left after `consumed` samples divide over the ranks. Those before may not:
    /// a run may go on under a layout that its first batches were too small for.
    ///
    /// # Errors
    /// The first size that does not divide.
    pub fn check_batches(&self, consumed: u64) -> Result<(), BatchError> {
        let until = self.batch.samples_after(self.train_iters).unwrap_or(u64::MAX);
        self.batch.check(&self.parallel, consumed, until)
    }

    /// Numbers outside of which an update has no meaning, as the f32 that they are computed in.
    fn ranges(&self) -> Vec<ConfigError> {
        let (m, o, s) = (&self.model, &self.optimizer, &self.schedule);
        let part = (0.0..1.0, "a number from 0 up to, not including, 1");
        let above_0 = (f32::MIN_POSITIVE..f32::INFINITY, "a finite number above 0, from 1.2e-38 on");
        let at_least_0 = (0.0..f32::INFINITY, "a finite number of at least 0");
        let numbers = [
            ("hidden-dropout", m.hidden_dropout.into(), &part),
            ("attention-dropout", m.attention_dropout.into(), &part),
            ("adam-beta1", o.adam_beta1, &part),
            ("adam-beta2", o.adam_beta2, &part),
            ("adam-eps", o.adam_eps, &above_0),
            ("norm-epsilon", m.norm_epsilon.into(), &above_0),
            ("rotary-base", m.rotary_base, &above_0),
            ("init-method-std", m.init_method_std, &at_least_0),
            ("clip-grad", o.clip_grad, &at_least_0),
            ("lr", s.max_lr, &at_least_0),
            ("weight-decay", s.end_weight_decay, &at_least_0),
        ];
        let outside = numbers.into_iter().filter(|(_, value, (range, _))| !range.contains(&(*value as f32)));
        outside
            .map(|(what, value, (_, valid))| ConfigError::Range { what, value: value.to_string(), valid })
            .collect()
    }

    /// What random numbers are keyed by must fit its bits, and positions their table.
    fn too_large(&self) -> Vec<ConfigError> {
        let m = &self.model;
        let samples = self.batch.samples_after(self.train_iters).unwrap_or(u64::MAX);
        let seq_length = self.parallel.seq_length();
        let max_positions = match m.position_embedding {
            PositionEmbedding::Rope => seq_length,
            PositionEmbedding::LearnedAbsolute { max_positions } => max_positions as u64,
        };
        let mut counted = vec![
            ("seq-length", seq_length, max_positions),
            ("train-iters", self.train_iters, u64::from(u32::MAX)),
        ];
        if let Numerics::Canonical(Canonical { grad_bits, kv_bits, .. }) = self.numerics {
            counted.push(("numerics.grad_bits", grad_bits.into(), Canonical::FRACTION_BITS_MAX.into()));
            counted.push(("numerics.kv_bits", kv_bits.into(), Canonical::FRACTION_BITS_MAX.into()));
        }
        if m.hidden_dropout > 0.0 {
            counted.push(("num-layers", m.num_layers as u64, rng::MAX_LAYERS.into()));
            counted.push(("train-samples", samples, rng::MAX_ORDINALS_HIDDEN));
        }
        if m.attention_dropout > 0.0 {
            counted.push(("num-layers", m.num_layers as u64, rng::MAX_LAYERS.into()));
            counted.push(("num-attention-heads", m.num_attention_heads as u64, rng::MAX_HEADS.into()));
            counted.push(("train-samples", samples, rng::MAX_ORDINALS_ATTENTION));
        }
        let mut large: Vec<ConfigError> = Vec::new();
        for (what, value, max) in counted {
            // Both kinds of dropout count layers and samples.
            let is_said = large
                .iter()
                .any(|said| matches!(said, ConfigError::TooLarge { what: said, .. } if *said == what));
            if value > max && !is_said {
                large.push(ConfigError::TooLarge { what, value, max });
            }
        }
        large
    }

    /// What the layout does not divide, in a model whose sizes are not 0.
    fn undivided(&self) -> Option<ConfigError> {
        let (tp, groups, ffn) =
            (self.parallel.layout().tp(), self.model.num_query_groups, self.model.ffn_hidden_size);
        if !groups.is_multiple_of(tp as usize) {
            return Some(ConfigError::QueryGroups { tp, groups });
        }
        match &self.numerics {
            Numerics::Canonical(canonical) => self.check_canonical(canonical).err(),
            Numerics::Fast => (!ffn.is_multiple_of(tp as usize)).then(|| {
                let (what, by) = ("ffn-hidden-size", "tensor-model-parallel-size");
                ConfigError::Indivisible { what, value: ffn, by, divisor: tp as usize }
            }),
        }
    }

    fn check_canonical(&self, canonical: &Canonical) -> Result<(), ConfigError> {
        let Canonical { leaf_tokens: leaf, tp_leaves, .. } = *canonical;
        let leaves = [("canonical-leaf-tokens", leaf), ("canonical-tp-leaves", tp_leaves)];
        if let Some(zero) = zeros(&leaves).next() {
            return Err(zero);
        }
        let (groups, ffn) = (self.model.num_query_groups, self.model.ffn_hidden_size);
        if !tp_leaves.is_power_of_two() || !groups.is_multiple_of(tp_leaves) || !ffn.is_multiple_of(tp_leaves)
        {
            return Err(ConfigError::TpLeavesOfModel { tp_leaves, groups, ffn });
        }
        let layout = &self.parallel.layout();
        let tp = layout.tp();
        if !tp.is_power_of_two() || tp as usize > tp_leaves {
            return Err(ConfigError::TpLeaves { tp, tp_leaves });
        }
        let seq = self.parallel.seq_length() as usize;
        let cp = layout.runtime_cp().0 as usize;
        // An odd length is only allowed where nothing cuts it.
        let mut parts = match seq.is_multiple_of(2) {
            true => vec![(format!("T/(2·runtime CP) = {seq}/(2·{cp})"), seq / (2 * cp))],
            false => vec![("T".to_owned(), seq)],
        };
        if self.parallel.sequence_parallel() {
            parts.push((format!("T/(runtime CP·TP) = {seq}/({cp}·{tp})"), seq / (cp * tp as usize)));
        }
        let largest = parts.iter().fold(0, |all, (_, part)| gcd(all, *part));
        match parts.into_iter().find(|(_, part)| !part.is_multiple_of(leaf)) {
            Some((formula, part)) => Err(ConfigError::Leaf { leaf, formula, part, largest }),
            None => Ok(()),
        }
    }
}

/// What must be at least 1 and is 0.
fn zeros<T: PartialEq + From<u8>>(sizes: &[(&'static str, T)]) -> impl Iterator<Item = ConfigError> {
    sizes.iter().filter(|(_, value)| *value == T::from(0)).map(|(what, _)| ConfigError::Zero { what })
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// A configuration that cannot be trained.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Something must be at least one.
    #[error("`{what}` is 0")]
    Zero {
        /// Which setting.
        what: &'static str,
    },
    /// A division that must be exact.
    #[error("`{what}` {value} is no multiple of `{by}` {divisor}")]
    Indivisible {
        /// What is divided.
        what: &'static str,
        /// Its value.
        value: usize,
        /// By what.
        by: &'static str,
        /// Its value.
        divisor: usize,
    },
    /// A head whose channels are no pairs, which rotary positions turn.
    #[error("`kv-channels` is {kv_channels}, and rotary positions turn channels in pairs")]
    OddHead {
        /// Channels of a head.
        kv_channels: usize,
    },
    /// TP does not divide the query groups.
    #[error(
        "TP {tp} does not divide the {groups} query groups: {groups} % {tp} != 0 (`decoder.layers.*.self_attention.linear_qkv.weight`)"
    )]
    QueryGroups {
        /// Tensor parallel degree.
        tp: u32,
        /// Query groups.
        groups: usize,
    },
    /// A pipeline, which the trainer does not run.
    #[error("pipeline parallel size {pp}: the trainer runs one stage")]
    Pipeline {
        /// Pipeline parallel degree.
        pp: u32,
    },
    /// Experts on several ranks, which the models do not have.
    #[error(
        "expert parallel size {ep}, {weight_shards} expert weight shards: the trainer's models have no experts"
    )]
    Experts {
        /// Expert parallel degree.
        ep: u32,
        /// ETP × EGTP.
        weight_shards: u32,
    },
    /// A tail rule that counts in whole batches, and batches that grow.
    #[error("epoch tail `{tail}` counts in global batches, which grow here: {batch}")]
    TailOfSchedule {
        /// The rule.
        tail: EpochTail,
        /// The batches.
        batch: BatchSchedule,
    },
    /// The leaf does not divide what a rank holds.
    #[error("a leaf of {leaf} tokens does not divide {formula} = {part}")]
    Leaf {
        /// Tokens of a leaf.
        leaf: usize,
        /// What must be a multiple, as a formula.
        formula: String,
        /// Its value.
        part: usize,
        /// The largest leaf that fits.
        largest: usize,
    },
    /// TP does not fit the canonical tree.
    #[error("canonical numerics need TP 1, 2, 4 … up to {tp_leaves} here, found {tp}")]
    TpLeaves {
        /// Tensor parallel degree.
        tp: u32,
        /// Blocks of TP-split sums.
        tp_leaves: usize,
    },
    /// The number of TP blocks does not fit the model.
    #[error(
        "{tp_leaves} TP blocks: a power of two that divides the {groups} query groups and the feed-forward width {ffn} is needed"
    )]
    TpLeavesOfModel {
        /// Blocks of TP-split sums.
        tp_leaves: usize,
        /// Query groups.
        groups: usize,
        /// Feed-forward width.
        ffn: usize,
    },
    /// More than there are bits to count it, in random numbers or sums.
    #[error("`{what}` {value} is more than {max}")]
    TooLarge {
        /// Which setting.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The largest that fits.
        max: u64,
    },
    /// A number outside its range.
    #[error("`{what}` is {value}")]
    Range {
        /// Which setting.
        what: &'static str,
        /// Its value, as text.
        value: String,
        /// What it can be.
        valid: &'static str,
    },
    /// Batches of evaluations that the layout does not divide.
    #[error("batches of evaluations: {0}")]
    Evaluation(ParallelError),
    /// What only other devices do.
    #[error("`{what}` is not done on this device so far")]
    Device {
        /// Which setting.
        what: &'static str,
    },
    /// More than the machine has.
    #[error("this run needs at least {} of memory, and there are {there}", bytes_or_more(.wanted))]
    Memory {
        /// Bytes that it needs at least; `u64::MAX` where they cannot be counted.
        wanted: u64,
        /// Bytes that the machine has.
        there: u64,
    },
}

/// Sizes that cannot be counted are the largest number there is, which says nothing.
fn bytes_or_more(wanted: &u64) -> String {
    match *wanted {
        u64::MAX => "2⁶⁴ bytes".to_owned(),
        wanted => format!("{wanted} bytes"),
    }
}

impl ConfigError {
    /// Code of the error.
    pub fn code(&self) -> &'static str {
        match self {
            ConfigError::QueryGroups { .. } => "RM2003",
            ConfigError::Memory { .. } => "RM2050",
            ConfigError::Device { .. } => "RM6005",
            ConfigError::Evaluation(error) => error.code(),
            ConfigError::Leaf { .. } => "RM2030",
            ConfigError::TpLeaves { .. } | ConfigError::TpLeavesOfModel { .. } => "RM2031",
            ConfigError::Pipeline { .. } | ConfigError::Experts { .. } => "RM2032",
            ConfigError::TailOfSchedule { .. }
            | ConfigError::Zero { .. }
            | ConfigError::Indivisible { .. }
            | ConfigError::OddHead { .. }
            | ConfigError::Range { .. }
            | ConfigError::TooLarge { .. } => "RM6003",
        }
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            ConfigError::QueryGroups { groups, .. } => {
                let sizes: Vec<_> =
                    (1..=(*groups).min(1024)).filter(|tp| groups.is_multiple_of(*tp)).map(|tp| tp.to_string()).collect();
                format!("pick a TP size that divides the query groups: {}", sizes.join(", "))
            }
            ConfigError::Evaluation(ParallelError::GlobalBatch { micro_batch_size, batch_parallel_size, .. }) => {
                let one = u64::from(*micro_batch_size) * u64::from(*batch_parallel_size);
                format!("make `--eval-global-batch-size` a multiple of {one}")
            }
            ConfigError::Evaluation(error) => error.help(),
            ConfigError::Leaf { largest, .. } => format!("the largest leaf that fits is --canonical-leaf-tokens {largest}"),
            ConfigError::TpLeaves { tp_leaves, .. } => {
                let sizes: Vec<_> = (0..=tp_leaves.ilog2()).map(|log| (1 << log).to_string()).collect();
                format!("valid TP sizes: {}; --numerics fast takes others", sizes.join(", "))
            }
            ConfigError::TpLeavesOfModel { .. } => {
                "leave out --canonical-tp-leaves for the largest that fits".to_owned()
            }
            ConfigError::Pipeline { .. } => {
                "leave out --pipeline-model-parallel-size; weights of a large model are spread by --tp and --weight-shards".to_owned()
            }
            ConfigError::Experts { .. } => {
                "leave out --expert-model-parallel-size and --expert-tensor-parallel-num-weight-shards".to_owned()
            }
            ConfigError::TailOfSchedule { .. } => "use --epoch-tail span, or a constant batch size".to_owned(),
            ConfigError::Zero { what } => format!("give `{what}` a value of at least 1"),
            ConfigError::Indivisible { what, by, divisor, .. } => {
                format!("make `{what}` a multiple of `{by}` ({divisor})")
            }
            ConfigError::OddHead { .. } => {
                "give an even `kv-channels` (default: hidden size ÷ heads), or --position-embedding-type \
                 learned_absolute"
                    .to_owned()
            }
            ConfigError::TooLarge { what, max, .. } => format!("give `{what}` a value up to {max}"),
            ConfigError::Device { what } => format!("leave out `{what}`, or use --device cpu"),
            ConfigError::Range { what, valid, .. } => format!("give `{what}` {valid}"),
            ConfigError::Memory { .. } => {
                "check the sizes for a typing error; a smaller model, fewer ranks or a smaller batch needs less".to_owned()
            }
        }
    }
}
