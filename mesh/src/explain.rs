//! Where the numbers of a configuration come from, for people.

use crate::args::MergedArgs;
use crate::config::ParallelConfig;
use crate::layers::Source;
use crate::layout::ExpertSizes;
use serde::Serialize;
use std::fmt;

/// A number of a configuration and where it comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Explained {
    /// The flag without its dashes, or the name of a derived number.
    pub name: &'static str,
    /// The number in force.
    pub value: String,
    /// Why it has this value.
    pub origin: Origin,
}

/// Where a number comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// Somebody said it.
    Said(Source),
    /// Nobody said anything.
    BuiltIn,
    /// Sequence parallelism was asked for and dropped, because TP is 1.
    DroppedWithoutTp(Source),
    /// It follows from other numbers.
    Formula(String),
}

impl MergedArgs {
    /// Every number of `config`, which these arguments resolved to, with its origin: first what can be said, then what is
    /// derived.
    pub fn explain(&self, config: &ParallelConfig) -> Vec<Explained> {
        let layout = config.layout();
        let said = |name: &'static str, value: String, otherwise: Origin| Explained {
            name,
            value,
            origin: self.source(&name.replace('-', "_")).map_or(otherwise, Origin::Said),
        };
        let formula = |text: String| Origin::Formula(text);
        let derived =
            |name, value: u64, text| Explained { name, value: value.to_string(), origin: formula(text) };
        let (tp, pp, gtp, dp) = (layout.tp(), layout.pp(), layout.gtp(), layout.dp());
        let cp = layout.configured_cp().0;
        let (inside, batch_shards) = (layout.gtp_sequence_shards(), layout.gtp_batch_shards());
        let sp_degree = config.sp_degree();
        let (micro, parallel) = (config.micro_batch_size(), layout.batch_parallel_size());
        let mut sequence_parallel = said(
            "sequence-parallel",
            if config.sequence_parallel() { "on" } else { "off" }.to_owned(),
            Origin::BuiltIn,
        );
        if let (1, Some(true), Some(source)) =
            (tp, self.args().sequence_parallel, self.source("sequence_parallel"))
        {
            sequence_parallel.origin = Origin::DroppedWithoutTp(source);
        }
        let model_ranks = format!("(TP {tp} × PP {pp} × CP {cp} × GTP {gtp})");
        let mut numbers = vec![
            said("tensor-model-parallel-size", tp.to_string(), Origin::BuiltIn),
            said("pipeline-model-parallel-size", pp.to_string(), Origin::BuiltIn),
            said("context-parallel-size", cp.to_string(), Origin::BuiltIn),
            sequence_parallel,
            said(
                "tensor-parallel-num-weight-shards",
                config.weight_shards().to_string(),
                Origin::Formula(format!("TP {tp}")),
            ),
            said(
                "tensor-parallel-num-sequence-shards",
                config.sequence_shards().to_string(),
                Origin::Formula(format!("SP degree {sp_degree}")),
            ),
            said(
                "data-parallel-size",
                dp.to_string(),
                Origin::Formula(format!("world size {} ÷ {model_ranks}", layout.world_size())),
            ),
            said("rank-order", layout.sizes().order.to_string(), Origin::BuiltIn),
            said("seq-length", config.seq_length().to_string(), Origin::BuiltIn),
            said("micro-batch-size", micro.to_string(), Origin::BuiltIn),
            said(
                "global-batch-size",
                config.global_batch_size().to_string(),
                Origin::Formula(format!("micro batch size {micro} × batch parallel size {parallel}")),
            ),
            derived("GTP degree", gtp.into(), format!("weight shards {} ÷ TP {tp}", config.weight_shards())),
            derived(
                "SP degree",
                sp_degree.into(),
                if config.sequence_parallel() { format!("TP {tp}") } else { "1 without SP".to_owned() },
            ),
            derived(
                "GTP sequence shards",
                inside.into(),
                format!("sequence shards {} ÷ SP degree {sp_degree}", config.sequence_shards()),
            ),
            derived(
                "GTP batch shards",
                batch_shards.into(),
                format!("GTP degree {gtp} ÷ {inside} GTP sequence shards"),
            ),
            derived(
                "runtime CP",
                layout.runtime_cp().0.into(),
                format!("configured CP {cp} × {inside} GTP sequence shards"),
            ),
            derived(
                "batch parallel size",
                parallel.into(),
                format!("DP {dp} × {batch_shards} GTP batch shards"),
            ),
            derived(
                "weight replicas",
                layout.num_weight_replicas().into(),
                format!("configured CP {cp} × DP {dp}"),
            ),
            derived(
                "microbatches",
                config.num_microbatches(),
                format!(
                    "global batch size {} ÷ (micro batch size {micro} × batch parallel size {parallel})",
                    config.global_batch_size()
                ),
            ),
        ];
        numbers.extend(self.explain_experts(config));
        numbers
    }

    /// The numbers of the expert grid, where anything was said of them.
    fn explain_experts(&self, config: &ParallelConfig) -> Vec<Explained> {
        let names = [
            "expert-model-parallel-size",
            "expert-tensor-parallel-size",
            "expert-tensor-parallel-num-weight-shards",
        ];
        let source = |name: &str| self.source(&name.replace('-', "_"));
        if names.iter().all(|name| source(name).is_none()) {
            return Vec::new();
        }
        let layout = config.layout();
        let (ExpertSizes { etp, ep, egtp }, tp, pp) = (layout.experts(), layout.tp(), layout.pp());
        let shards = config.expert_weight_shards();
        let values = [ep, etp, shards];
        let otherwise =
            [Origin::BuiltIn, Origin::Formula(format!("TP {tp}")), Origin::Formula(format!("ETP {etp}"))];
        let said = names.into_iter().zip(values).zip(otherwise).map(|((name, value), otherwise)| Explained {
            name,
            value: value.to_string(),
            origin: source(name).map_or(otherwise, Origin::Said),
        });
        let derived = [
            ("EGTP degree", egtp, format!("expert weight shards {shards} ÷ ETP {etp}")),
            (
                "expert replicas",
                layout.edp(),
                format!("world size {} ÷ (ETP {etp} × EP {ep} × EGTP {egtp} × PP {pp})", layout.world_size()),
            ),
        ];
        said.chain(derived.map(|(name, value, formula)| Explained {
            name,
            value: value.to_string(),
            origin: Origin::Formula(formula),
        }))
        .collect()
    }
}

/// `batch parallel size 4 = DP 1 × 4 GTP batch shards`, `tensor-parallel-num-sequence-shards 2 (program default)`.
impl fmt::Display for Explained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.value)?;
        match &self.origin {
            Origin::Said(source) => write!(f, " ({source})"),
            Origin::BuiltIn => f.write_str(" (built-in default)"),
            Origin::DroppedWithoutTp(source) => {
                write!(f, " (asked for by the {source}, dropped because TP is 1)")
            }
            Origin::Formula(formula) => write!(f, " = {formula}"),
        }
    }
}
