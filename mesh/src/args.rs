//! What was said about the layout and the batch, and the one resolution of it into a [`ParallelConfig`].
//!
//! Two stages. [`ParallelArgs`] is what a flag, a file or a program said, `None` where it said nothing; layers of it are
//! merged first, and only then is anything derived, so that a default never loses to a number derived from another
//! default. [`ParallelConfig`] is what holds, without `Option`s; a checkpoint stores it.

use crate::config::{ParallelConfig, ParallelError, ParallelSettings, check_sequence_parallel, sp_degree};
use crate::group_options::GroupOptions;
use crate::layers::Merged;
use crate::layout::{self, ConfiguredCp, ExpertSizes, LayoutError, LayoutSizes, ParallelLayout, RankOrder};
use serde::{Deserialize, Serialize};

crate::settings! {
    /// Parallel degrees and batch sizes as they were said; `None` where nothing was.
    #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[cfg_attr(feature = "clap", derive(clap::Args))]
    #[cfg_attr(
        feature = "clap",
        command(arg = clap::Arg::new("no_sequence_parallel")
            .long("no-sequence-parallel")
            .help("Turn sequence parallelism off")
            .action(clap::ArgAction::SetTrue)
            .conflicts_with("sequence_parallel"))
    )]
    #[serde(default, deny_unknown_fields)]
    pub struct ParallelArgs {
        /// Ranks that split each weight matrix before GTP [default: 1; TP × PP × CP × GTP must divide the world size]
        #[cfg_attr(feature = "clap", arg(long, visible_alias = "tp", value_name = "RANKS"))]
        pub tensor_model_parallel_size: Option<u32>,
        /// Pipeline stages [default: 1; TP × PP × CP × GTP must divide the world size]
        #[cfg_attr(feature = "clap", arg(long, visible_alias = "pp", value_name = "STAGES"))]
        pub pipeline_model_parallel_size: Option<u32>,
        /// Weight replicas that share each sequence, before the sequence shards inside GTP [default: 1; 2 × runtime CP must
        /// divide the sequence length]
        #[cfg_attr(feature = "clap", arg(long, visible_alias = "cp", value_name = "RANKS"))]
        pub context_parallel_size: Option<u32>,
        /// Split the sequence over the TP ranks outside the matrix products [default: off; off if TP is 1; runtime CP × TP
        /// must divide the sequence length]
        #[cfg_attr(
            feature = "clap",
            arg(
                long,
                visible_alias = "sp",
                num_args = 0,
                default_missing_value = "true",
                default_value_if("no_sequence_parallel", "true", "false"),
                conflicts_with = "no_sequence_parallel"
            )
        )]
        pub sequence_parallel: Option<bool>,
        /// Weight shards, TP × GTP [default: TP; a multiple of TP]
        #[cfg_attr(feature = "clap", arg(long, visible_alias = "weight-shards", value_name = "SHARDS"))]
        pub tensor_parallel_num_weight_shards: Option<u32>,
        /// Sequence shards, SP degree × shards inside GTP [default: the SP degree, which is TP with sequence parallelism and
        /// else 1; a multiple of it, and sequence shards ÷ SP degree must divide GTP]
        #[cfg_attr(feature = "clap", arg(long, visible_alias = "seq-shards", value_name = "SHARDS"))]
        pub tensor_parallel_num_sequence_shards: Option<u32>,
        /// Ranks left for data parallelism, to check [default: world size ÷ (TP × PP × CP × GTP)]
        #[cfg_attr(feature = "clap", arg(long, visible_alias = "dp", value_name = "RANKS"))]
        pub data_parallel_size: Option<u32>,
        /// Ranks that the experts are distributed over [default: 1; ETP × EP × EGTP × PP must divide the world size]
        #[cfg_attr(feature = "clap", arg(long, visible_alias = "ep", value_name = "RANKS"))]
        pub expert_model_parallel_size: Option<u32>,
        /// Ranks that split each weight matrix of an expert [default: TP; ETP × EP × EGTP × PP must divide the world size]
        #[cfg_attr(feature = "clap", arg(long, visible_alias = "etp", value_name = "RANKS"))]
        pub expert_tensor_parallel_size: Option<u32>,
        /// Weight shards of an expert, ETP × EGTP [default: ETP; a multiple of ETP]
        #[cfg_attr(feature = "clap", arg(long, visible_alias = "expert-weight-shards", value_name = "SHARDS"))]
        pub expert_tensor_parallel_num_weight_shards: Option<u32>,
        /// Parts of the weight replicas that each hold the whole optimizer state [default: 1; divides the weight replicas and
        /// those of experts; 1 with weight shards beyond TP or ETP]
        #[cfg_attr(feature = "clap", arg(long, value_name = "INSTANCES"))]
        pub num_distributed_optimizer_instances: Option<u32>,
        /// Sizes of the levels inside runtime CP, the innermost first [default: one level; their product is runtime CP]
        #[cfg_attr(feature = "clap", arg(long, value_name = "RANKS", num_args = 1.., value_delimiter = ','))]
        pub hierarchical_context_parallel_sizes: Option<Vec<u32>>,
        /// Order of the dense axes among the ranks [default: gtp-inside-cp; the older cp-inside-gtp only without sequence
        /// shards inside GTP]
        #[cfg_attr(feature = "clap", arg(long, value_enum, value_name = "ORDER"))]
        pub rank_order: Option<RankOrder>,
        /// Samples that a rank runs at a time [required, no default]
        #[cfg_attr(feature = "clap", arg(long, visible_alias = "mbs", value_name = "SAMPLES"))]
        pub micro_batch_size: Option<u32>,
        /// Samples of an optimizer step [default: micro batch size × batch parallel size; a multiple of it]
        #[cfg_attr(feature = "clap", arg(long, visible_alias = "gbs", value_name = "SAMPLES"))]
        pub global_batch_size: Option<u64>,
        /// Tokens of a sample [required, no default; a multiple of 2 × runtime CP if that is above 1, and of runtime CP × SP degree]
        #[cfg_attr(feature = "clap", arg(long, value_name = "TOKENS"))]
        pub seq_length: Option<u64>,
    }
}

/// Layers of arguments merged into one, with the source of each value.
pub type MergedArgs = Merged<ParallelArgs>;

/// The arguments that resolve to the same configuration, whatever weaker layers say. DP is left open: it follows from
/// the world size, and a configuration may be resumed on another one. So is what a configuration does not hold.
impl From<&ParallelConfig> for ParallelArgs {
    fn from(config: &ParallelConfig) -> Self {
        let layout = config.layout();
        ParallelArgs {
            tensor_model_parallel_size: Some(layout.tp()),
            pipeline_model_parallel_size: Some(layout.pp()),
            context_parallel_size: Some(layout.configured_cp().0),
            sequence_parallel: Some(config.sequence_parallel()),
            tensor_parallel_num_weight_shards: Some(config.weight_shards()),
            tensor_parallel_num_sequence_shards: Some(config.sequence_shards()),
            data_parallel_size: None,
            expert_model_parallel_size: Some(layout.experts().ep),
            expert_tensor_parallel_size: Some(layout.experts().etp),
            expert_tensor_parallel_num_weight_shards: Some(config.expert_weight_shards()),
            num_distributed_optimizer_instances: None,
            hierarchical_context_parallel_sizes: None,
            rank_order: Some(layout.sizes().order),
            micro_batch_size: Some(config.micro_batch_size()),
            global_batch_size: Some(config.global_batch_size()),
            seq_length: Some(config.seq_length()),
        }
    }
}

impl MergedArgs {
    /// The configuration on `world_size` ranks, the first of which is `rank_offset` in the job.
    ///
    /// # Errors
    /// Every refusal, before any process group exists: see [`ParallelError`].
    pub fn resolve(&self, world_size: u32, rank_offset: u32) -> Result<ParallelConfig, ParallelError> {
        let layout = self.resolve_layout(world_size, rank_offset)?;
        self.resolve_groups(&layout)?;
        let args = self.args();
        let micro_batch_size =
            args.micro_batch_size.ok_or(ParallelError::Missing { flag: "micro-batch-size" })?;
        let one_microbatch = u64::from(micro_batch_size) * u64::from(layout.batch_parallel_size());
        ParallelConfig::new(ParallelSettings {
            layout,
            sequence_parallel: self.sequence_parallel(),
            seq_length: args.seq_length.ok_or(ParallelError::Missing { flag: "seq-length" })?,
            micro_batch_size,
            global_batch_size: args.global_batch_size.unwrap_or(one_microbatch),
        })
    }

    /// What the process groups of `layout` are beyond it.
    ///
    /// # Errors
    /// What does not fit the layout, before any process group exists.
    pub fn resolve_groups(&self, layout: &ParallelLayout) -> Result<GroupOptions, ParallelError> {
        let args = self.args();
        let options = GroupOptions {
            num_distributed_optimizer_instances: args.num_distributed_optimizer_instances.unwrap_or(1),
            hierarchical_context_parallel_sizes: (args.hierarchical_context_parallel_sizes.clone())
                .unwrap_or_default(),
            create_all_gather_group: false,
        };
        options.check(layout)?;
        Ok(options)
    }

    /// The layout alone, for what has no batch, such as a view of stored weights.
    ///
    /// # Errors
    /// Sizes that are zero or do not divide, and missing sequence parallelism.
    pub fn resolve_layout(&self, world_size: u32, rank_offset: u32) -> Result<ParallelLayout, ParallelError> {
        let args = self.args();
        let tp = self.tp();
        let pp = args.pipeline_model_parallel_size.unwrap_or(1);
        let cp = args.context_parallel_size.unwrap_or(1);
        let dp = args.data_parallel_size;
        for (size, value) in [("TP", tp), ("PP", pp), ("CP", cp), ("DP", dp.unwrap_or(1))] {
            if value == 0 {
                return Err(LayoutError::Zero { size }.into());
            }
        }
        let weight_shards = args.tensor_parallel_num_weight_shards.unwrap_or(tp);
        let gtp = shards_beyond(weight_shards, ("tensor-parallel-num-weight-shards", "TP", tp), || {
            layout::degrees_that_fit(world_size, u64::from(pp) * u64::from(cp))
        })?;
        let sp_degree = sp_degree(tp, self.sequence_parallel());
        let sequence_shards = args.tensor_parallel_num_sequence_shards.unwrap_or(sp_degree);
        if sequence_shards == 0 {
            return Err(ParallelError::Zero { flag: "tensor-parallel-num-sequence-shards" });
        }
        if !sequence_shards.is_multiple_of(sp_degree) {
            let valid =
                layout::degrees_that_fit(gtp, 1).into_iter().map(|inside| sp_degree * inside).collect();
            return Err(ParallelError::SequenceShards { sequence_shards, sp_degree, valid });
        }
        let layout = ParallelLayout::new(LayoutSizes {
            world_size,
            rank_offset,
            tp,
            pp,
            cp: ConfiguredCp(cp),
            gtp,
            gtp_sequence_shards: sequence_shards / sp_degree,
            order: args.rank_order.unwrap_or_default(),
        })?
        .with_experts(self.resolve_experts(world_size)?)?;
        check_sequence_parallel(&layout, self.sequence_parallel())?;
        match dp {
            Some(dp) if dp != layout.dp() => Err(ParallelError::DataParallel {
                dp,
                world_size,
                model_ranks: world_size / layout.dp(),
                left: layout.dp(),
            }),
            _ => Ok(layout),
        }
    }

    fn resolve_experts(&self, world_size: u32) -> Result<ExpertSizes, ParallelError> {
        let args = self.args();
        let pp = args.pipeline_model_parallel_size.unwrap_or(1);
        let (ep, etp) = (
            args.expert_model_parallel_size.unwrap_or(1),
            args.expert_tensor_parallel_size.unwrap_or(self.tp()),
        );
        for (size, value) in [("EP", ep), ("ETP", etp)] {
            if value == 0 {
                return Err(LayoutError::Zero { size }.into());
            }
        }
        let weight_shards = args.expert_tensor_parallel_num_weight_shards.unwrap_or(etp);
        let egtp =
            shards_beyond(weight_shards, ("expert-tensor-parallel-num-weight-shards", "ETP", etp), || {
                layout::degrees_that_fit(world_size, u64::from(pp) * u64::from(ep))
            })?;
        Ok(ExpertSizes { etp, ep, egtp })
    }

    fn tp(&self) -> u32 {
        self.args().tensor_model_parallel_size.unwrap_or(1)
    }

    fn sequence_parallel(&self) -> bool {
        self.tp() > 1 && self.args().sequence_parallel == Some(true)
    }
}

/// Weight shards ÷ the tensor parallel degree that they were said over; `degrees` are those that this world can have.
fn shards_beyond(
    weight_shards: u32,
    (flag, name, degree): (&'static str, &'static str, u32),
    degrees: impl FnOnce() -> Vec<u32>,
) -> Result<u32, ParallelError> {
    if weight_shards == 0 {
        return Err(ParallelError::Zero { flag });
    }
    if !weight_shards.is_multiple_of(degree) {
        let valid = degrees().into_iter().filter(|shards| shards.is_multiple_of(degree)).collect();
        return Err(ParallelError::WeightShards { flag, weight_shards, name, degree, valid });
    }
    Ok(weight_shards / degree)
}
