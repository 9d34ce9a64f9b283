//! `remesh plan`: what a resume under another layout does, before it is done.

use crate::args::{Said, TrainArgs, TrainingArgs, resolve};
use crate::location::Location;
use crate::output::{Output, complain, human_bytes, table};
use ckpt::Checkpoint;
use mesh::{Explained, ParallelArgs, PipelineSplit, StageLayout};
use reshard::{CutChange, FoldChange, LayoutChange, Target, plan_layout_change};
use serde::Serialize;
use std::fmt;
use std::process::ExitCode;
use train::config::{Numerics, TrainConfig};
use train::resume::{Difference, SavedRun, allowed, compare};
use train::run::RunError;

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
    /// Take fewer samples than the global batch where these do not divide over the ranks [default: as the run does]
    #[arg(long)]
    decrease_batch_size_if_needed: bool,
    /// Consecutive positions whose sum runs in one order, in tokens [default: the checkpoint's]
    #[arg(long, value_name = "TOKENS")]
    canonical_leaf_tokens: Option<usize>,
    /// Settings that may differ from the checkpoint's, as for `train`
    #[arg(long, value_name = "FIELD", value_delimiter = ',')]
    allow_change: Vec<String>,
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
    /// Microbatches of the next step.
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
    code: String,
    message: String,
    help: String,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Refused { code, message, help } = self;
        write!(f, "cannot be trained: {code} {message}; {help}")
    }
}

/// Plans a resume. Exit code 2 if it cannot be trained.
pub(crate) fn run(args: &PlanArgs, output: &Output) -> anyhow::Result<ExitCode> {
    let checkpoint = args.checkpoint.open()?;
    let saved = SavedRun::of(checkpoint.commit())?;
    // As `train` would take the same flags: what is left out has its default. No flag at all is the layout as it is.
    let layout = ParallelArgs {
        micro_batch_size: None,
        global_batch_size: None,
        seq_length: None,
        ..args.parallel.clone()
    };
    let is_saved = args.world_size.is_none() && layout == ParallelArgs::default();
    let flags = TrainArgs {
        parallelism: args.parallel.clone(),
        training: TrainingArgs {
            nproc_per_node: args.world_size,
            decrease_batch_size_if_needed: args.decrease_batch_size_if_needed.then_some(true),
            canonical_leaf_tokens: args.canonical_leaf_tokens,
            ..TrainingArgs::default()
        },
        ..TrainArgs::default()
    };
    let said = Said::of_saved(flags, &saved.config, is_saved);
    let parallel = resolve::parallel(&said)?;
    resolve::check_groups(&said.parallelism().resolve_groups(parallel.layout())?)?;
    let config = TrainConfig {
        documents: saved.config.documents,
        ..resolve::config(said.args(), parallel, None, Some(&saved.config))?
    };
    let resume = resume_plan(&checkpoint, &saved, &config, &args.allow_change);
    let (num_chunks, split) = args.stages.split(parallel.layout().pp());
    let placements = train::state::placements(&config);
    let wanted = Target { layout: parallel.layout(), num_chunks, split: &split, placements: &placements };
    let change = plan_layout_change(checkpoint.catalog(), saved.config.parallel.layout(), &wanted)?;
    let bytes_read = change.bytes_to_read(checkpoint.catalog(), &wanted);
    let explained = said.parallelism().explain(&parallel);
    let plan = plan(&checkpoint, &saved.config, &config, change, bytes_read, resume, explained);
    output.result(&plan)?;
    let Some(refused) = &plan.resume.refused else { return Ok(ExitCode::SUCCESS) };
    if output.is_quiet() {
        complain(refused);
    }
    Ok(ExitCode::from(2))
}

/// How the run of `checkpoint` goes on as `config`.
fn resume_plan(
    checkpoint: &Checkpoint,
    saved: &SavedRun,
    config: &TrainConfig,
    allow_change: &[String],
) -> ResumePlan {
    let consumed = checkpoint.commit().run.counters.consumed_train_samples;
    let (reasons, refused) = match differences(checkpoint, saved, config, allow_change) {
        Ok(differences) => (reasons(&saved.config, config, &differences), None),
        Err(error) => {
            let (code, message, help) = (error.code().to_owned(), error.to_string(), error.help());
            (Vec::new(), Some(Refused { code, message, help }))
        }
    };
    let exact = reasons.is_empty() && refused.is_none();
    ResumePlan { next_sample: consumed, refused, exact, reasons }
}

/// What differs between the saved run and `config`, which may all differ. The data are taken to be the same.
///
/// # Errors
/// What `train` refuses, in its order.
fn differences(
    checkpoint: &Checkpoint,
    saved: &SavedRun,
    config: &TrainConfig,
    allow_change: &[String],
) -> Result<Vec<Difference>, RunError> {
    let commit = checkpoint.commit();
    let consumed = commit.run.counters.consumed_train_samples;
    if commit.iteration < config.train_iters {
        config.check_batches(consumed)?;
    } else {
        // A run that is at its end goes on for as long as somebody says then.
        config.batch.check(&config.parallel, consumed, u64::MAX)?;
    }
    let differences = compare(&saved.config, &saved.data, config, &saved.data, commit.iteration);
    let differences = allowed(differences, allow_change)?;
    config.check()?;
    Ok(differences)
}

/// Why the losses are not those of the run that never stopped.
fn reasons(saved: &TrainConfig, config: &TrainConfig, differences: &[Difference]) -> Vec<String> {
    let changed = differences.iter().map(|d| format!("{} changes from {} to {}", d.field, d.saved, d.wanted));
    let mut reasons: Vec<String> = changed.collect();
    if reasons.is_empty() && saved.batch != config.batch {
        reasons.push(format!(
            "the layout takes {} of the global batch, and took {}",
            config.batch.last_size(),
            saved.batch.last_size()
        ));
    }
    if saved.numerics == Numerics::Fast && saved.parallel != config.parallel {
        reasons.push("fast numerics add in another order under another layout".to_owned());
    }
    reasons
}

fn plan(
    checkpoint: &Checkpoint,
    saved: &TrainConfig,
    config: &TrainConfig,
    change: LayoutChange,
    bytes_read: Vec<u64>,
    resume: ResumePlan,
    explained: Vec<Explained>,
) -> Plan {
    let (before, target) = (&saved.parallel, &config.parallel);
    let microbatches = |config: &TrainConfig| {
        let parallel = &config.parallel;
        let one = u64::from(parallel.micro_batch_size()) * u64::from(parallel.layout().batch_parallel_size());
        config.batch.size_at(resume.next_sample) / one
    };
    let microbatches = Numbers { saved: microbatches(saved), target: microbatches(config) };
    Plan {
        schema: "remesh.plan/1",
        run: checkpoint.store().to_string(),
        step: checkpoint.step(),
        change,
        bytes_read: bytes_read.iter().sum(),
        rank_bytes_read_max: bytes_read.into_iter().max().unwrap_or(0),
        sp_degree: Numbers { saved: before.sp_degree().into(), target: target.sp_degree().into() },
        microbatches,
        resume,
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
        row("microbatches next", microbatches.saved, microbatches.target);
        let exactness = match (&resume.refused, resume.exact) {
            (Some(refused), _) => ("note", refused.to_string()),
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
