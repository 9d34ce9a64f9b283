//! Megatron's flags that are no setting here: what they ask for happens anyway, or makes no difference to the numbers, or is
//! refused with the reason. A launch script can be pasted, and nothing in it is ignored in silence.

use super::TrainArgs;
use super::model::PositionEmbeddingType;
use crate::report::Refusal;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches};
use train::config::LossAverage;

/// The settings whose default here is not Megatron's, each with the flag that says what it is there.
fn defaults_elsewhere(args: &TrainArgs) -> [(bool, &'static str); 8] {
    let (model, training) = (&args.model, &args.training);
    [
        (model.normalization.is_some(), "--normalization LayerNorm"),
        (model.swiglu.is_some() || model.openai_gelu.is_some(), "--no-swiglu"),
        (model.position_embedding_type.is_some(), "--position-embedding-type learned_absolute"),
        (model.add_bias_linear.is_some(), "--add-bias-linear"),
        (model.tie_embeddings.is_some(), "--tie-embeddings"),
        (model.hidden_dropout.is_some(), "--hidden-dropout 0.1"),
        (model.attention_dropout.is_some(), "--attention-dropout 0.1"),
        (training.lr_decay_style.is_some(), "--lr-decay-style linear"),
    ]
}

/// What a flag comes to.
#[derive(Clone, Copy, Debug)]
enum Verdict {
    /// It is done anyway.
    Same,
    /// It is done anyway if the value is one of these; others are refused for the reason.
    SameFor(&'static [&'static str], &'static str),
    /// Speed, memory or display elsewhere; no number here depends on it.
    NoEffect,
    /// It would change numbers or files in a way that is not there yet.
    Refused(&'static str),
}

use Verdict::{NoEffect, Refused, Same, SameFor};

/// Whether a flag takes a value.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Switch,
    Value,
}

use Kind::{Switch, Value};

/// Token losses are averaged over tokens.
const PER_TOKEN_LOSS: &str = "calculate-per-token-loss";
/// There is no table of positions.
const NO_TABLE: &str = "no-position-embedding";
/// Queries and keys are rotated.
const ROTARY: &str = "use-rotary-position-embeddings";
/// What happens where the tensors of model and checkpoint are not the same.
const STRICTNESS: &str = "dist-ckpt-strictness";

const PRECISION: &str = "the trainer computes in f32 or bf16 so far";
const MODEL: &str =
    "models so far have RMSNorm or LayerNorm, SwiGLU or GELU, plain rotary or learned positions";
const STAGE: &str = "the trainer runs one pipeline stage so far";
const EXPERTS: &str = "there are no experts so far";
const FORMAT: &str = "checkpoints are saved in the native format so far";
const LACKING: &str = "a tensor that the checkpoint lacks is trained from its initial value only if it is named: \
                       --allow-missing GLOB; --allow-extra GLOB names what the model does not want";
const NODES: &str = "ranks are threads of one process so far";

const FLAGS: &[(&str, Kind, Verdict)] = &[
    // Model.
    ("squared-relu", Switch, Refused(MODEL)),
    ("qk-layernorm", Switch, Refused(MODEL)),
    ("apply-layernorm-1p", Switch, Refused(MODEL)),
    (ROTARY, Switch, Same),
    (NO_TABLE, Switch, Same),
    ("rotary-percent", Value, SameFor(&["1", "1.0"], MODEL)),
    ("rotary-interleaved", Switch, Refused(MODEL)),
    ("rotary-seq-len-interpolation-factor", Value, SameFor(&["1"], MODEL)),
    ("use-rope-scaling", Switch, Refused(MODEL)),
    ("make-vocab-size-divisible-by", Value, NoEffect),
    ("attention-softmax-in-fp32", Switch, Same),
    ("window-size", Value, Refused(MODEL)),
    ("multi-latent-attention", Switch, Refused(MODEL)),
    ("num-experts", Value, Refused(EXPERTS)),
    ("moe-router-topk", Value, Refused(EXPERTS)),
    ("moe-router-load-balancing-type", Value, Refused(EXPERTS)),
    ("moe-aux-loss-coeff", Value, Refused(EXPERTS)),
    ("moe-token-dispatcher-type", Value, Refused(EXPERTS)),
    ("moe-grouped-gemm", Switch, Refused(EXPERTS)),
    ("moe-permute-fusion", Switch, Refused(EXPERTS)),
    ("mtp-num-layers", Value, Refused(MODEL)),
    // Precision.
    ("fp16", Switch, Refused(PRECISION)),
    ("fp8-format", Value, Refused(PRECISION)),
    ("fp8-amax-history-len", Value, Refused(PRECISION)),
    ("fp8-amax-compute-algo", Value, Refused(PRECISION)),
    ("fp8-param-gather", Switch, Refused(PRECISION)),
    ("grad-reduce-in-bf16", Switch, Refused("gradients are summed in f32")),
    ("accumulate-allreduce-grads-in-fp32", Switch, Same),
    ("loss-scale", Value, Refused(PRECISION)),
    ("initial-loss-scale", Value, Refused(PRECISION)),
    // Layout.
    ("num-layers-per-virtual-pipeline-stage", Value, Refused(STAGE)),
    ("num-virtual-stages-per-pipeline-rank", Value, Refused(STAGE)),
    ("pipeline-model-parallel-layout", Value, Refused(STAGE)),
    ("use-tp-pp-dp-mapping", Switch, Refused("--rank-order names the order of the axes")),
    ("create-all-gather-group", Switch, NoEffect),
    ("hybrid-context-parallel", Switch, Refused("every sample is cut in the same number of pieces so far")),
    ("ddp-average-in-collective", Switch, Refused("gradients are summed in the collective and divided once")),
    ("cp-comm-type", Value, NoEffect),
    ("use-distributed-optimizer", Switch, Same),
    ("overlap-grad-reduce", Switch, NoEffect),
    ("overlap-param-gather", Switch, NoEffect),
    ("tp-comm-overlap", Switch, NoEffect),
    ("distributed-backend", Value, NoEffect),
    ("nnodes", Value, SameFor(&["1"], NODES)),
    ("node-rank", Value, SameFor(&["0"], NODES)),
    ("master-addr", Value, NoEffect),
    ("master-port", Value, NoEffect),
    // Training.
    ("optimizer", Value, SameFor(&["adam"], "the one optimizer so far is AdamW")),
    ("decoupled-lr", Value, Refused("all parameters have one learning rate so far")),
    ("decoupled-min-lr", Value, Refused("all parameters have one learning rate so far")),
    ("exit-interval", Value, Refused("SIGUSR1 saves and ends a run; --train-iters ends it")),
    ("exit-duration-in-mins", Value, Refused("SIGUSR1 saves and ends a run; `timeout -s USR1` sends it")),
    ("exit-signal-handler", Switch, Same),
    (PER_TOKEN_LOSS, Switch, Same),
    ("recompute-activations", Switch, NoEffect),
    ("recompute-granularity", Value, NoEffect),
    ("recompute-method", Value, NoEffect),
    ("recompute-num-layers", Value, NoEffect),
    ("use-cpu-initialization", Switch, NoEffect),
    ("deterministic-mode", Switch, Same),
    // Data.
    ("tokenizer-type", Value, NoEffect),
    ("tokenizer-model", Value, NoEffect),
    ("vocab-file", Value, NoEffect),
    ("merge-file", Value, NoEffect),
    ("dataloader-type", Value, SameFor(&["single"], "samples come in one global order")),
    ("mask-prob", Value, NoEffect),
    ("mock-data", Switch, Refused("`remesh data tokenize` makes data of any file")),
    ("num-workers", Value, NoEffect),
    ("data-cache-path", Value, NoEffect),
    ("no-mmap-bin-files", Switch, NoEffect),
    ("no-create-attention-mask-in-dataloader", Switch, NoEffect),
    // Checkpoints.
    ("ckpt-format", Value, SameFor(&["native"], FORMAT)),
    ("use-dist-ckpt", Switch, Same),
    ("auto-detect-ckpt-format", Switch, Same),
    (STRICTNESS, Value, SameFor(&["raise_all", "assume_ok_unexpected", "raise_unexpected"], LACKING)),
    ("ckpt-fully-parallel-save", Switch, Same),
    ("ckpt-fully-parallel-load", Switch, Same),
    ("dist-ckpt-optim-fully-reshardable", Switch, Same),
    ("async-save", Switch, NoEffect),
    ("no-save-optim", Switch, Refused("a checkpoint holds the whole state so far")),
    ("no-save-rng", Switch, Refused("a checkpoint holds the whole state so far")),
    ("non-persistent-save-interval", Value, Refused("every checkpoint is whole and stays where it is saved")),
    ("use-checkpoint-opt-param-scheduler", Switch, Same),
    // Speed and display.
    ("use-mcore-models", Switch, NoEffect),
    ("transformer-impl", Value, NoEffect),
    ("use-flash-attn", Switch, NoEffect),
    ("attention-backend", Value, NoEffect),
    ("no-masked-softmax-fusion", Switch, NoEffect),
    ("no-bias-swiglu-fusion", Switch, NoEffect),
    ("no-bias-dropout-fusion", Switch, NoEffect),
    ("no-rope-fusion", Switch, NoEffect),
    ("no-gradient-accumulation-fusion", Switch, NoEffect),
    ("cross-entropy-loss-fusion", Switch, NoEffect),
    ("no-async-tensor-model-parallel-allreduce", Switch, NoEffect),
    ("profile", Switch, NoEffect),
    ("profile-step-start", Value, NoEffect),
    ("profile-step-end", Value, NoEffect),
    ("profile-ranks", Value, NoEffect),
    ("use-pytorch-profiler", Switch, NoEffect),
    ("rerun-mode", Value, NoEffect),
    ("check-for-nan-in-loss-and-grad", Switch, Same),
    ("no-check-for-nan-in-loss-and-grad", Switch, NoEffect),
    ("manual-gc", Switch, NoEffect),
    ("manual-gc-interval", Value, NoEffect),
    ("empty-unused-memory-level", Value, NoEffect),
    ("tensorboard-dir", Value, NoEffect),
    ("tensorboard-log-interval", Value, NoEffect),
    ("tensorboard-queue-size", Value, NoEffect),
    ("log-timers-to-tensorboard", Switch, NoEffect),
    ("log-validation-ppl-to-tensorboard", Switch, NoEffect),
    ("log-memory-to-tensorboard", Switch, NoEffect),
    ("log-throughput", Switch, NoEffect),
    ("log-params-norm", Switch, NoEffect),
    ("log-num-zeros-in-grad", Switch, NoEffect),
    ("log-progress", Switch, NoEffect),
    ("timing-log-level", Value, NoEffect),
    ("wandb-project", Value, NoEffect),
    ("wandb-exp-name", Value, NoEffect),
    ("wandb-save-dir", Value, NoEffect),
];

/// The flags of this module that were given.
#[derive(Clone, Debug, Default)]
pub(crate) struct MegatronFlags {
    given: Vec<(&'static str, Option<String>, Verdict)>,
}

impl MegatronFlags {
    /// The flags that make no difference here.
    ///
    /// # Errors
    /// All flags that ask for what is not done, each with the reason.
    pub(crate) fn check(&self) -> Result<Vec<String>, Refusal> {
        let mut without_effect = Vec::new();
        let mut refused = Vec::new();
        let mut names = Vec::new();
        for (name, value, verdict) in &self.given {
            let flag = match value {
                Some(value) => format!("--{name} {value}"),
                None => format!("--{name}"),
            };
            let reason = match verdict {
                Same => continue,
                SameFor(values, _) if value.as_deref().is_some_and(|value| values.contains(&value)) => {
                    continue;
                }
                NoEffect => {
                    without_effect.push(flag);
                    continue;
                }
                SameFor(_, reason) | Refused(reason) => reason,
            };
            refused.push(format!("`{flag}`: {reason}"));
            names.push(flag);
        }
        if refused.is_empty() {
            return Ok(without_effect);
        }
        Err(Refusal::new("RM6005", refused.join("; "), format!("leave out {}", names.join(" "))))
    }
}

impl MegatronFlags {
    /// What Megatron's own defaults would be, where `args` say nothing and the default here is another one. Nothing if none of
    /// these flags was given, as in a launch script of Megatron's.
    pub(crate) fn other_defaults(&self, args: &TrainArgs) -> Vec<&'static str> {
        let rotary = self.given.iter().any(|(name, ..)| matches!(*name, ROTARY | NO_TABLE));
        let unsaid = |(said, flag): (bool, &'static str)| (!said).then_some(flag);
        let flags = defaults_elsewhere(args).into_iter().filter_map(unsaid);
        let flags = flags.filter(|flag| !(rotary && flag.starts_with("--position")));
        if self.given.is_empty() { Vec::new() } else { flags.collect() }
    }

    /// Puts what these flags ask for, where there is a setting of that meaning, among `args`, which were said beside them.
    ///
    /// # Errors
    /// If `args` say the opposite.
    pub(crate) fn put_into(&self, args: &mut TrainArgs) -> Result<(), Refusal> {
        for (name, value, _) in &self.given {
            match (*name, value.as_deref()) {
                (PER_TOKEN_LOSS, _) if args.training.loss_average == Some(LossAverage::Sample) => {
                    let message =
                        format!("`--{PER_TOKEN_LOSS}` and `--loss-average sample` contradict each other");
                    return Err(Refusal::new("RM6003", message, "leave one of them out"));
                }
                (flag @ (ROTARY | NO_TABLE), _)
                    if args.model.position_embedding_type == Some(PositionEmbeddingType::LearnedAbsolute) =>
                {
                    let message = format!(
                        "`--{flag}` and `--position-embedding-type learned_absolute` contradict each other"
                    );
                    return Err(Refusal::new("RM6003", message, "leave one of them out"));
                }
                (PER_TOKEN_LOSS, _) => args.training.loss_average = Some(LossAverage::Token),
                // What the checkpoint has and the model does not want is ignored.
                (STRICTNESS, Some("assume_ok_unexpected" | "raise_unexpected")) => {
                    args.checkpoint.allow_extra = Some(vec!["**".into()]);
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl FromArgMatches for MegatronFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let is_given = |name: &str| matches.value_source(name) == Some(ValueSource::CommandLine);
        let given = FLAGS.iter().filter(|(name, ..)| is_given(name)).map(|(name, kind, verdict)| {
            let value = if *kind == Value { matches.get_one::<String>(name).cloned() } else { None };
            (*name, value, *verdict)
        });
        Ok(MegatronFlags { given: given.collect() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = MegatronFlags::from_arg_matches(matches)?;
        Ok(())
    }
}

impl clap::Args for MegatronFlags {
    fn augment_args(command: Command) -> Command {
        let arg = |(name, kind, _): &(&'static str, Kind, Verdict)| {
            let action = if *kind == Switch { ArgAction::SetTrue } else { ArgAction::Set };
            Arg::new(*name).long(*name).action(action).hide(true)
        };
        command.args(FLAGS.iter().map(arg))
    }

    fn augment_args_for_update(command: Command) -> Command {
        MegatronFlags::augment_args(command)
    }
}
