//! What a collection of process groups holds beyond what its layout says.

use crate::layout::{ParallelLayout, one_of};

/// What a collection holds beyond what its layout says. No number of a run depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupOptions {
    /// Copies of the sharded optimizer state: parts that weight replicas are divided in.
    pub num_distributed_optimizer_instances: u32,
    /// Sizes of the levels inside `cp`, the innermost first; empty for no hierarchy.
    pub hierarchical_context_parallel_sizes: Vec<u32>,
    /// Whether weight replicas get second communicators to gather parameters in.
    pub create_all_gather_group: bool,
}

impl Default for GroupOptions {
    fn default() -> Self {
        GroupOptions {
            num_distributed_optimizer_instances: 1,
            hierarchical_context_parallel_sizes: Vec::new(),
            create_all_gather_group: false,
        }
    }
}

/// Options that do not fit a layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupOptionsError {
    /// Instances that do not divide the replicas of weights.
    #[error(
        "{instances} distributed optimizer instances do not divide the {replicas} weight replicas and the {edp} of experts"
    )]
    Instances {
        /// Instances asked for.
        instances: u32,
        /// Configured CP × DP.
        replicas: u32,
        /// Replicas of an expert's weight shard.
        edp: u32,
    },
    /// Several instances where weights are gathered before use.
    #[error("{instances} distributed optimizer instances with GTP {gtp} and EGTP {egtp}: one at most")]
    InstancesWithGtp {
        /// Instances asked for.
        instances: u32,
        /// GTP_remat degree.
        gtp: u32,
        /// The same of experts.
        egtp: u32,
    },
    /// Levels that are not a division of runtime CP.
    #[error(
        "hierarchical context parallel sizes {} make {product}, not runtime CP {runtime_cp}",
        .sizes.iter().map(u32::to_string).collect::<Vec<_>>().join(" × ")
    )]
    Hierarchy {
        /// Sizes asked for.
        sizes: Vec<u32>,
        /// Their product.
        product: u64,
        /// Runtime context parallel degree.
        runtime_cp: u32,
    },
}

impl GroupOptionsError {
    /// `RM2001`: sizes that do not divide; `RM2008`: options that exclude each other.
    pub fn code(&self) -> &'static str {
        match self {
            GroupOptionsError::InstancesWithGtp { .. } => "RM2008",
            GroupOptionsError::Instances { .. } | GroupOptionsError::Hierarchy { .. } => "RM2001",
        }
    }

    /// How to mend it, with the choices that fit.
    pub fn help(&self) -> String {
        match self {
            GroupOptionsError::Instances { replicas, edp, .. } => {
                let fitting: Vec<u32> = (1..=*replicas)
                    .filter(|number| replicas.is_multiple_of(*number) && edp.is_multiple_of(*number))
                    .collect();
                format!("`--num-distributed-optimizer-instances` {} would fit", one_of(&fitting))
            }
            GroupOptionsError::InstancesWithGtp { .. } => {
                "leave out `--num-distributed-optimizer-instances`, or the weight shards beyond TP".to_owned()
            }
            GroupOptionsError::Hierarchy { runtime_cp, .. } => format!(
                "give `--hierarchical-context-parallel-sizes` whose product is {runtime_cp}, the innermost first, or leave \
                 them out"
            ),
        }
    }
}

impl GroupOptions {
    /// Checks that the options fit `layout`.
    ///
    /// # Errors
    /// Optimizer instances that do not divide the replicas, or that weight shards exclude; levels whose product is not
    /// runtime CP.
    pub fn check(&self, layout: &ParallelLayout) -> Result<(), GroupOptionsError> {
        let instances = self.num_distributed_optimizer_instances;
        let (replicas, edp) = (layout.num_weight_replicas(), layout.edp());
        let divides = |number: u32| instances > 0 && number.is_multiple_of(instances);
        if !divides(replicas) || !divides(edp) {
            return Err(GroupOptionsError::Instances { instances, replicas, edp });
        }
        let (gtp, egtp) = (layout.gtp(), layout.experts().egtp);
        if instances > 1 && gtp.max(egtp) > 1 {
            return Err(GroupOptionsError::InstancesWithGtp { instances, gtp, egtp });
        }
        let sizes = &self.hierarchical_context_parallel_sizes;
        let product = sizes.iter().fold(1, |product: u64, size| product.saturating_mul(u64::from(*size)));
        let runtime_cp = layout.runtime_cp().0;
        if !sizes.is_empty() && product != u64::from(runtime_cp) {
            return Err(GroupOptionsError::Hierarchy { sizes: sizes.clone(), product, runtime_cp });
        }
        Ok(())
    }
}
