//! `ParallelConfig`: a layout with its sequence and batch sizes, checked once, without `Option`s; a checkpoint stores it.

use crate::group_options::GroupOptionsError;
use crate::layout::{self, LayoutError, ParallelLayout, RuntimeCp};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The free numbers of a [`ParallelConfig`]; everything else follows from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParallelSettings {
    /// The dense layout.
    pub layout: ParallelLayout,
    /// Whether the TP ranks split the sequence outside the matrix products.
    pub sequence_parallel: bool,
    /// Tokens of a sample.
    pub seq_length: u64,
    /// Samples that a rank runs at a time.
    pub micro_batch_size: u32,
    /// Samples of an optimizer step.
    pub global_batch_size: u64,
}

/// A layout with its sequence and batch sizes, all divisions exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "ParallelSettings", into = "ParallelSettings")]
pub struct ParallelConfig {
    settings: ParallelSettings,
}

impl ParallelConfig {
    /// Checks `settings`.
    ///
    /// # Errors
    /// Sequence shards inside GTP without sequence parallelism, a sequence that cannot be cut evenly, or a step that is
    /// no whole number of microbatches.
    pub fn new(settings: ParallelSettings) -> Result<Self, ParallelError> {
        let ParallelSettings { layout, sequence_parallel, seq_length, micro_batch_size, global_batch_size } =
            settings;
        let settings =
            ParallelSettings { sequence_parallel: sequence_parallel && layout.tp() > 1, ..settings };
        check_sequence_parallel(&layout, settings.sequence_parallel)?;
        let runtime_cp = layout.runtime_cp();
        let sp_degree = sp_degree(layout.tp(), settings.sequence_parallel);
        let multiple = sequence_multiple(runtime_cp, sp_degree);
        if seq_length == 0 {
            return Err(ParallelError::Zero { flag: "seq-length" });
        }
        if !seq_length.is_multiple_of(multiple) {
            return Err(ParallelError::SequenceLength { seq_length, runtime_cp, sp_degree, multiple });
        }
        if micro_batch_size == 0 {
            return Err(ParallelError::Zero { flag: "micro-batch-size" });
        }
        if global_batch_size == 0 {
            return Err(ParallelError::Zero { flag: "global-batch-size" });
        }
        let batch_parallel_size = layout.batch_parallel_size();
        if !global_batch_size.is_multiple_of(u64::from(micro_batch_size) * u64::from(batch_parallel_size)) {
            return Err(ParallelError::GlobalBatch {
                global_batch_size,
                micro_batch_size,
                batch_parallel_size,
            });
        }
        Ok(ParallelConfig { settings })
    }

    /// The dense layout.
    pub fn layout(&self) -> &ParallelLayout {
        &self.settings.layout
    }

    /// Whether the TP ranks split the sequence outside the matrix products; never with TP 1.
    pub fn sequence_parallel(&self) -> bool {
        self.settings.sequence_parallel
    }

    /// Pieces that sequence parallelism cuts a CP rank's tokens in: TP, or 1 without it.
    pub fn sp_degree(&self) -> u32 {
        sp_degree(self.layout().tp(), self.sequence_parallel())
    }

    /// Weight shards: TP × GTP.
    pub fn weight_shards(&self) -> u32 {
        self.layout().tp() * self.layout().gtp()
    }

    /// Sequence shards: SP degree × sequence shards inside GTP.
    pub fn sequence_shards(&self) -> u32 {
        self.sp_degree() * self.layout().gtp_sequence_shards()
    }

    /// Weight shards of an expert: ETP × EGTP.
    pub fn expert_weight_shards(&self) -> u32 {
        self.layout().experts().etp * self.layout().experts().egtp
    }

    /// Tokens of a sample.
    pub fn seq_length(&self) -> u64 {
        self.settings.seq_length
    }

    /// Samples that a rank runs at a time.
    pub fn micro_batch_size(&self) -> u32 {
        self.settings.micro_batch_size
    }

    /// Samples of an optimizer step.
    pub fn global_batch_size(&self) -> u64 {
        self.settings.global_batch_size
    }

    /// Microbatches of an optimizer step: global batch size ÷ (micro batch size × batch parallel size).
    pub fn num_microbatches(&self) -> u64 {
        self.global_batch_size()
            / (u64::from(self.micro_batch_size()) * u64::from(self.layout().batch_parallel_size()))
    }
}

/// `TP 2 · SP 2 · GTP 1 · CP 1 · DP 2 · world 4`; without SP where TP is 1.
impl fmt::Display for ParallelConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.layout().fmt_with_sp(f, Some(self.sp_degree()))
    }
}

impl TryFrom<ParallelSettings> for ParallelConfig {
    type Error = ParallelError;

    fn try_from(settings: ParallelSettings) -> Result<Self, ParallelError> {
        ParallelConfig::new(settings)
    }
}

impl From<ParallelConfig> for ParallelSettings {
    fn from(config: ParallelConfig) -> ParallelSettings {
        config.settings
    }
}

pub(crate) fn sp_degree(tp: u32, sequence_parallel: bool) -> u32 {
    if sequence_parallel { tp } else { 1 }
}

pub(crate) fn check_sequence_parallel(
    layout: &ParallelLayout,
    sequence_parallel: bool,
) -> Result<(), ParallelError> {
    if layout.gtp_sequence_shards() > 1 && layout.tp() > 1 && !sequence_parallel {
        return Err(ParallelError::NeedsSequenceParallel {
            gtp_sequence_shards: layout.gtp_sequence_shards(),
            tp: layout.tp(),
        });
    }
    Ok(())
}

/// What divides a sequence length: two chunks for each CP rank, if there are several, and equal pieces of a CP rank's
/// tokens for SP.
fn sequence_multiple(runtime_cp: RuntimeCp, sp_degree: u32) -> u64 {
    let cp = u64::from(runtime_cp.0);
    match (cp, u64::from(sp_degree)) {
        (1, sp) => sp,
        (cp, sp) if sp.is_multiple_of(2) => cp * sp,
        (cp, sp) => 2 * cp * sp,
    }
}

/// Why arguments make no configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParallelError {
    /// The degrees make no layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A number that has no default was not said.
    #[error("`--{flag}` is not set")]
    Missing {
        /// Its flag, without dashes.
        flag: &'static str,
    },
    /// A number of samples, tokens or shards is zero.
    #[error("`--{flag}` is 0")]
    Zero {
        /// Its flag, without dashes.
        flag: &'static str,
    },
    /// Process groups that do not fit the layout.
    #[error(transparent)]
    Groups(#[from] GroupOptionsError),
    /// Weight shards are no multiple of TP, or those of experts of ETP.
    #[error("weight shards {weight_shards} ÷ {name} {degree} is not exact")]
    WeightShards {
        /// Their flag, without dashes.
        flag: &'static str,
        /// Weight shards asked for.
        weight_shards: u32,
        /// TP or ETP.
        name: &'static str,
        /// That tensor parallel degree.
        degree: u32,
        /// Weight shards that this world can have.
        valid: Vec<u32>,
    },
    /// Sequence shards are no multiple of the SP degree.
    #[error("sequence shards {sequence_shards} ÷ SP degree {sp_degree} is not exact")]
    SequenceShards {
        /// Sequence shards asked for.
        sequence_shards: u32,
        /// SP degree.
        sp_degree: u32,
        /// Sequence shards that the weight shards allow.
        valid: Vec<u32>,
    },
    /// The sequence is cut inside GTP, but not over TP.
    #[error(
        "{gtp_sequence_shards} sequence shards inside GTP with TP {tp} need sequence parallelism, which is off"
    )]
    NeedsSequenceParallel {
        /// Sequence shards inside GTP.
        gtp_sequence_shards: u32,
        /// Tensor parallel degree.
        tp: u32,
    },
    /// DP was said and is not what is left of the world.
    #[error(
        "DP {dp} was asked for, but world size {world_size} ÷ {model_ranks} ranks of a model copy leaves DP {left}"
    )]
    DataParallel {
        /// DP asked for.
        dp: u32,
        /// Ranks there are.
        world_size: u32,
        /// TP × PP × CP × GTP.
        model_ranks: u32,
        /// DP that is left.
        left: u32,
    },
    /// A sequence cannot be cut evenly.
    #[error(
        "sequence length {seq_length} is not a multiple of {multiple}, as runtime CP {} and SP degree {sp_degree} need",
        .runtime_cp.0
    )]
    SequenceLength {
        /// Tokens of a sample.
        seq_length: u64,
        /// Runtime context parallel degree.
        runtime_cp: RuntimeCp,
        /// SP degree.
        sp_degree: u32,
        /// Lengths must be a multiple of this.
        multiple: u64,
    },
    /// A step is no whole number of microbatches.
    #[error(
        "global batch size {global_batch_size} ÷ (micro batch size {micro_batch_size} × batch parallel size \
         {batch_parallel_size}) is not exact"
    )]
    GlobalBatch {
        /// Samples of a step.
        global_batch_size: u64,
        /// Samples a rank runs at a time.
        micro_batch_size: u32,
        /// Ranks with different samples.
        batch_parallel_size: u32,
    },
}

impl ParallelError {
    /// `RM2001`: sizes that do not divide or are too small; `RM2002`: batch sizes; `RM2004`: the sequence length;
    /// `RM2005`: sequence parallelism is missing; `RM2006`: the rank order; `RM2007`: a number was not said; `RM2008`: what
    /// excludes each other.
    pub fn code(&self) -> &'static str {
        match self {
            ParallelError::Layout(error) => error.code(),
            ParallelError::Groups(error) => error.code(),
            ParallelError::Missing { .. } => "RM2007",
            ParallelError::Zero { flag: "micro-batch-size" | "global-batch-size" }
            | ParallelError::GlobalBatch { .. } => "RM2002",
            ParallelError::Zero { flag: "seq-length" } | ParallelError::SequenceLength { .. } => "RM2004",
            ParallelError::NeedsSequenceParallel { .. } => "RM2005",
            ParallelError::Zero { .. }
            | ParallelError::WeightShards { .. }
            | ParallelError::SequenceShards { .. }
            | ParallelError::DataParallel { .. } => "RM2001",
        }
    }

    /// How to mend it, with the choices that fit.
    pub fn help(&self) -> String {
        match self {
            ParallelError::Layout(error) => error.help(),
            ParallelError::Groups(error) => error.help(),
            ParallelError::Missing { flag } => {
                format!("give `--{flag}`, or `{}` in the configuration file", flag.replace('-', "_"))
            }
            ParallelError::Zero { flag } => format!("give `--{flag}` a value of at least 1"),
            ParallelError::WeightShards { flag, name, degree, valid, .. } => {
                format!("`--{flag}` is a multiple of {name} {degree}{}", fits(valid))
            }
            ParallelError::SequenceShards { sp_degree, valid, .. } => format!(
                "`--tensor-parallel-num-sequence-shards` is a multiple of the SP degree {sp_degree}{}",
                fits(valid)
            ),
            ParallelError::NeedsSequenceParallel { gtp_sequence_shards, tp } => format!(
                "add `--sequence-parallel --tensor-parallel-num-sequence-shards {}`, or leave the sequence shards out",
                u64::from(*tp) * u64::from(*gtp_sequence_shards)
            ),
            ParallelError::DataParallel { dp, model_ranks, left, .. } => format!(
                "leave `--data-parallel-size` out or give {left}, or run on {} ranks",
                u64::from(*dp) * u64::from(*model_ranks)
            ),
            ParallelError::SequenceLength { seq_length, multiple, .. } => {
                format!("`--seq-length` {} would fit", nearest(*seq_length, *multiple))
            }
            ParallelError::GlobalBatch { global_batch_size, micro_batch_size, batch_parallel_size } => {
                let one = u64::from(*micro_batch_size) * u64::from(*batch_parallel_size);
                let fewer = if *global_batch_size < one {
                    ""
                } else {
                    "; `--decrease-batch-size-if-needed` lets a step take fewer"
                };
                format!("`--global-batch-size` {} would fit{fewer}", nearest(*global_batch_size, one))
            }
        }
    }
}

fn fits(valid: &[u32]) -> String {
    if valid.is_empty() { String::new() } else { format!("; here {} would fit", layout::one_of(valid)) }
}

/// The multiples of `step` on both sides of `number`, which is none.
fn nearest(number: u64, step: u64) -> String {
    let below = number / step * step;
    match (below, below.checked_add(step)) {
        (0, Some(above)) => above.to_string(),
        (below, Some(above)) => format!("{below} or {above}"),
        (below, None) => below.to_string(),
    }
}
