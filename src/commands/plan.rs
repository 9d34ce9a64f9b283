//! `remesh plan`: what a resume under another layout does, before it is done.

use crate::args::resolve;
use crate::location::Location;
use crate::output::{Output, human_bytes, table};
use ckpt::Checkpoint;
use mesh::{Explained, MergedArgs, ParallelArgs, ParallelConfig, PipelineSplit, Source, StageLayout};
use reshard::{CutChange, FoldChange, LayoutChange, Target, plan_layout_change};
use serde::Serialize;
use std::fmt;
use std::process::ExitCode;
use train::config::{Numerics, TrainConfig};
use train::resume::SavedRun;

/// Flags of `remesh plan`.
#[derive(Debug, clap::Args)]
pub(crate) struct PlanArgs {
    /// RUN, RUN@STEP or the folder of a step
    #[arg(value_name = "CKPT")]
    checkpoint: Location,
    /// Ranks of the job [default: as `train` has it, TP × PP × CP × GTP × DP]. Without this and any degree the
    /// saved layout is planned
    #[arg(long, visible_alias = "nproc-per-node", value_name = "RANKS")]
    world_size: Option<u32>,
    #[command(flatten)]
    parallel: ParallelArgs,
    #[command(flatten)]
    stages: StageArgs,
}

/// How the layers are divided over the pipeline stages of the target.
#[derive(Debug, clap::Args)]
struct StageArgs {
    /// Chunks of layers that a pipeline stage has, interleaved [default: 1, or as many as the stage layout says; the layers of a
    /// stage are a multiple of it]
    #[arg(long, value_name = "CHUNKS", conflicts_with = "pipeline_model_parallel_layout")]
    num_virtual_stages_per_pipeline_rank: Option<u32>,
    /// Layers of the first stage [default: as many as the others]
    #[arg(long, value_name = "LAYERS", conflicts_with = "pipeline_model_parallel_layout")]
    decoder_first_pipeline_num_layers: Option<u32>,
    /// Layers of the last stage [default: as many as the others]
    #[arg(long, value_name = "LAYERS", conflicts_with = "pipeline_model_parallel_layout")]
    decoder_last_pipeline_num_layers: Option<u32>,
    /// Count the embedding as a layer of the first stage
    #[arg(long, conflicts_with_all = ["pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers"])]
    account_for_embedding_in_pipeline_split: bool,
    /// Count the loss as a layer of the last stage
    #[arg(long, conflicts_with_all = ["pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers"])]
    account_for_loss_in_pipeline_split: bool,
    /// Layers of each chunk, such as 'Ett|tt|ttL' [default: the same number each]
    #[arg(long, value_name = "LAYOUT")]
    pipeline_model_parallel_layout: Option<StageLayout>,
}

impl StageArgs {
    /// Chunks of a stage and the layers of each.
    fn split(&self, num_stages: u32) -> (u32, PipelineSplit) {
        if let Some(layout) = &self.pipeline_model_parallel_layout {
            let num_chunks = (layout.num_chunks() as u32 / num_stages).max(1);
            return (num_chunks, PipelineSplit::Stages(layout.clone()));
        }
        let (first, last) = (self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers);
        let split = match first.or(last) {
            Some(_) => PipelineSplit::FirstLast { first, last },
            None => PipelineSplit::Even {
                account_for_embedding: self.account_for_embedding_in_pipeline_split,
                account_for_loss: self.account_for_loss_in_pipeline_split,
            },
        };
        (self.num_virtual_stages_per_pipeline_rank.unwrap_or(1), split)
    }
}

#[derive(Serialize)]
struct Plan {
    schema: &'static str,
    run: String,
    step: u64,
    #[serde(flatten)]
    change: LayoutChange,
    /// What all ranks read from the store, random streams aside.
    bytes_read: u64,
    /// What one rank reads at most.
    rank_bytes_read_max: u64,
    sp_degree: Numbers,
    /// Microbatches of a step.
    microbatches: Numbers,
    resume: ResumePlan,
    /// Every number of the target with its origin.
    explained: Vec<Explained>,
}

#[derive(Serialize)]
struct Numbers {
    saved: u64,
    target: u64,
}

#[derive(Serialize)]
struct ResumePlan {
    next_sample: u64,
    /// Why the layout cannot be trained, although state can be loaded under it.
    refused: Option<Refused>,
    /// Whether the losses are those of the run that never stopped, bit for bit.
    exact: bool,
    /// Why not.
    reasons: Vec<String>,
}

#[derive(Serialize)]
struct Refused {
    code: &'static str,
    message: String,
    help: String,
}

impl Refused {
    fn new(code: &'static str, error: &dyn std::error::Error, help: String) -> Self {
        Refused { code, message: error.to_string(), help }
    }
}

/// Plans a resume.
pub(crate) fn run(args: &PlanArgs, output: &Output) -> anyhow::Result<ExitCode> {
    let checkpoint = args.checkpoint.open()?;
    let saved = SavedRun::of(checkpoint.commit())?.config;
    let batch = ParallelArgs {
        micro_batch_size: Some(saved.parallel.micro_batch_size()),
        global_batch_size: Some(saved.parallel.global_batch_size()),
        seq_length: Some(saved.parallel.seq_length()),
        ..ParallelArgs::default()
    };
    // As `train` would take the same flags: what is left out has its default. No flag at all is the layout as it is.
    let layout = ParallelArgs {
        micro_batch_size: None,
        global_batch_size: None,
        seq_length: None,
        ..args.parallel.clone()
    };
    let is_saved = args.world_size.is_none() && layout == ParallelArgs::default();
    let stored = if is_saved { ParallelArgs::from(&saved.parallel) } else { batch };
    let said = MergedArgs::of(&[(Source::CommandLine, args.parallel.clone()), (Source::Checkpoint, stored)]);
    let world_size = match is_saved {
        true => saved.parallel.layout().world_size(),
        false => resolve::world_size(args.world_size, said.args()),
    };
    let target = said.resolve(world_size, 0)?;
    let consumed = checkpoint.commit().run.counters.consumed_train_samples;
    let wanted = TrainConfig { parallel: target, ..saved.clone() };
    let refused = match (wanted.check(), wanted.check_batches(consumed)) {
        (Err(error), _) => Some(Refused::new(error.code(), &error, error.help())),
        (_, Err(error)) => Some(Refused::new(error.code(), &error, error.help())),
        (Ok(()), Ok(())) => None,
    };
    let (num_chunks, split) = args.stages.split(target.layout().pp());
    let placements = train::state::placements(&wanted);
    let wanted = Target { layout: target.layout(), num_chunks, split: &split, placements: &placements };
    let change = plan_layout_change(checkpoint.catalog(), saved.parallel.layout(), &wanted)?;
    let bytes_read = change.bytes_to_read(checkpoint.catalog(), &wanted);
    output.result(&plan(&checkpoint, &saved, &target, change, bytes_read, refused, said.explain(&target)))?;
    Ok(ExitCode::SUCCESS)
}

fn plan(
    checkpoint: &Checkpoint,
    saved: &TrainConfig,
    target: &ParallelConfig,
    change: LayoutChange,
    bytes_read: Vec<u64>,
    refused: Option<Refused>,
    explained: Vec<Explained>,
) -> Plan {
    let is_other_sum = saved.numerics == Numerics::Fast && saved.parallel != *target;
    let saved = &saved.parallel;
    let sizes = [
        ("sequence length", saved.seq_length(), target.seq_length()),
        ("global batch size", saved.global_batch_size(), target.global_batch_size()),
    ];
    let changed = sizes.into_iter().filter(|(_, saved, wanted)| saved != wanted);
    let mut reasons: Vec<String> =
        changed.map(|(what, saved, wanted)| format!("the {what} changes from {saved} to {wanted}")).collect();
    if is_other_sum {
        reasons.push("fast numerics add in another order under another layout".to_owned());
    }
    Plan {
        schema: "remesh.plan/1",
        run: checkpoint.store().to_string(),
        step: checkpoint.step(),
        change,
        bytes_read: bytes_read.iter().sum(),
        rank_bytes_read_max: bytes_read.into_iter().max().unwrap_or(0),
        sp_degree: Numbers { saved: saved.sp_degree().into(), target: target.sp_degree().into() },
        microbatches: Numbers { saved: saved.num_microbatches(), target: target.num_microbatches() },
        resume: ResumePlan {
            next_sample: checkpoint.commit().run.counters.consumed_train_samples,
            exact: reasons.is_empty() && refused.is_none(),
            refused,
            reasons,
        },
        explained,
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { run, step, change, sp_degree, microbatches, resume, .. } = self;
        let recut = change.tensors.iter().filter(|tensor| tensor.cut != CutChange::Unchanged).count();
        match change.resume_in_place {
            true => writeln!(f, "step {step} of {run}: resume in place: 0 B to move")?,
            false => writeln!(
                f,
                "step {step} of {run}: {} to move; {recut} of {} tensors are cut again",
                human_bytes(change.bytes.moved),
                change.tensors.len()
            )?,
        }
        let mut rows = vec![["", "saved", "target"].map(String::from).to_vec()];
        let mut row = |name: &str, saved: u64, target: u64| {
            let same = if saved == target { "same" } else { "changed" };
            rows.push(vec![format!("  {name}"), saved.to_string(), target.to_string(), same.into()]);
        };
        for number in &change.numbers {
            row(number.name, number.saved.into(), number.target.into());
            if number.name == "TP" {
                row("SP degree", sp_degree.saved, sp_degree.target);
            }
        }
        row("microbatches a step", microbatches.saved, microbatches.target);
        let exactness = match (&resume.refused, resume.exact) {
            (Some(Refused { code, message, help }), _) => {
                ("note", format!("cannot be trained: {code} {message}; {help}"))
            }
            (None, true) => {
                ("exactness", "losses equal those of the run that never stopped, bit for bit".to_owned())
            }
            (None, false) => ("exactness", format!("not exact: {}", resume.reasons.join("; "))),
        };
        let facts = [
            (
                "reading",
                format!(
                    "{} by all ranks, {} by one at most",
                    human_bytes(self.bytes_read),
                    human_bytes(self.rank_bytes_read_max)
                ),
            ),
            ("data", format!("next sample {}, in the same order", resume.next_sample)),
            ("random", change.random_streams.to_string()),
            exactness,
        ];
        // Without sequence shards both forms are the same.
        let fold = change.fold.filter(|change| change.fold.cp > 1).map(|change| {
            let FoldChange { fold, memory, .. } = change;
            let text = format!(
                "CP {} folded into weight groups of {}: optimizer state that GTP does not cut takes {} a rank there, {} here",
                fold.cp,
                fold.cp * fold.gtp,
                human_bytes(memory.folded_bytes),
                human_bytes(memory.here_bytes)
            );
            ("fold", text)
        });
        let notes = change.notes.iter().map(|note| ("note", note.clone()));
        let facts =
            facts.into_iter().chain(fold).chain(notes).map(|(name, text)| vec![format!("  {name}"), text]);
        write!(f, "\n{}\n{}\n", table(&rows), table(&facts.collect::<Vec<_>>()))?;
        self.explained.iter().try_for_each(|line| writeln!(f, "  {line}"))
    }
}
