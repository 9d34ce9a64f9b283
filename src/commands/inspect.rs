//! `remesh inspect`: what a checkpoint holds, from its commit and tables alone.

use crate::location::{Location, Opened};
use crate::output::{Output, count, human_bytes, saved_layout, table};
use ckpt::{Checkpoint, Commit, Fingerprint, ForeignCheckpoint, ForeignFormat, StoredTensor};
use mesh::{DType, DimPlacement, GroupTable, Placement, ProcessGroups, Shape, StateKind};
use serde::Serialize;
use std::fmt;
use std::process::ExitCode;
use std::sync::Arc;

/// Flags of `remesh inspect`.
#[derive(Debug, clap::Args)]
pub(crate) struct InspectArgs {
    /// RUN, RUN@STEP, the folder of a step, or a file or folder of other software
    #[arg(value_name = "CKPT")]
    checkpoint: Location,
    /// List the tensors of the optimizer and of the random streams, too
    #[arg(long)]
    all: bool,
}

#[derive(Serialize)]
struct Inspected<'a> {
    schema: &'static str,
    run: String,
    step: u64,
    /// As it is stored.
    commit: &'a Commit,
    tensors: Vec<Tensor<'a>>,
    #[serde(skip)]
    all: bool,
}

#[derive(Serialize)]
struct Tensor<'a> {
    key: &'a str,
    kind: StateKind,
    dtype: DType,
    shape: &'a Shape,
    bytes: u64,
    chunks: usize,
    placement: Option<&'a Placement>,
    fingerprint: Fingerprint,
    min: Option<f64>,
    max: Option<f64>,
    mean: Option<f64>,
    nonfinite: Option<u64>,
}

/// Shows a checkpoint.
pub(crate) fn run(args: &InspectArgs, output: &Output) -> anyhow::Result<ExitCode> {
    match args.checkpoint.open_any()? {
        Opened::Native(checkpoint) => output.result(&inspect(&checkpoint, args.all))?,
        Opened::Foreign(foreign) => {
            output.result(&ForeignInspected::of(&foreign, args.checkpoint.path()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn inspect(checkpoint: &Checkpoint, all: bool) -> Inspected<'_> {
    Inspected {
        schema: "remesh.inspect/1",
        run: checkpoint.store().to_string(),
        step: checkpoint.step(),
        commit: checkpoint.commit(),
        tensors: checkpoint.catalog().tensors().iter().map(Tensor::of).collect(),
        all,
    }
}

impl<'a> Tensor<'a> {
    fn of(tensor: &'a StoredTensor) -> Self {
        let spread = tensor.statistics.and_then(|statistics| statistics.finite);
        Tensor {
            key: tensor.key.as_str(),
            kind: tensor.kind,
            dtype: tensor.dtype,
            shape: &tensor.shape,
            bytes: tensor.raw_bytes(),
            chunks: tensor.chunks.len(),
            placement: tensor.placement.as_ref(),
            fingerprint: tensor.fingerprint,
            min: spread.map(|spread| spread.min),
            max: spread.map(|spread| spread.max),
            mean: spread.map(|spread| spread.mean),
            nonfinite: tensor.statistics.map(|statistics| statistics.nonfinite),
        }
    }
}

/// What other software's files hold.
#[derive(Serialize)]
struct ForeignInspected<'a> {
    schema: &'static str,
    path: String,
    format: &'static str,
    tensors: Vec<ForeignTensor<'a>>,
    /// Names of what is stored beside tensors.
    objects: Vec<&'a str>,
}

#[derive(Serialize)]
struct ForeignTensor<'a> {
    key: &'a str,
    dtype: DType,
    shape: &'a Shape,
    bytes: u64,
    chunks: usize,
}

impl<'a> ForeignInspected<'a> {
    fn of(checkpoint: &'a ForeignCheckpoint, path: String) -> Self {
        let tensors = checkpoint.tensors().iter().map(|(key, tensor)| ForeignTensor {
            key: key.as_str(),
            dtype: tensor.dtype,
            shape: &tensor.shape,
            bytes: tensor.shape.numel() * tensor.dtype.size_bytes() as u64,
            chunks: tensor.num_chunks(),
        });
        let format = match checkpoint.format() {
            ForeignFormat::Dcp => "PyTorch DCP",
            ForeignFormat::TorchDist => "Megatron torch_dist",
            ForeignFormat::TorchSave => "torch.save",
            ForeignFormat::Safetensors => "safetensors",
        };
        ForeignInspected {
            schema: "remesh.inspect.foreign/1",
            path,
            format,
            tensors: tensors.collect(),
            objects: checkpoint.objects().collect(),
        }
    }
}

impl fmt::Display for ForeignInspected<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes: u64 = self.tensors.iter().map(|tensor| tensor.bytes).sum();
        let (tensors, objects) =
            (count(self.tensors.len() as u64, "tensor"), count(self.objects.len() as u64, "other object"));
        writeln!(f, "{}  {}\n  {tensors} · {} · {objects}\n", self.format, self.path, human_bytes(bytes))?;
        let row = |tensor: &ForeignTensor| {
            let (dtype, shape) = (tensor.dtype.to_string(), tensor.shape.to_string());
            vec![format!("  {}", tensor.key), dtype, shape, tensor.chunks.to_string()]
        };
        let heading = ["  tensor", "dtype", "global shape", "chunks"].map(String::from).to_vec();
        let rows: Vec<_> = std::iter::once(heading).chain(self.tensors.iter().map(row)).collect();
        f.write_str(&table(&rows))
    }
}

impl Inspected<'_> {
    /// `7.1 M elements · 27.2 MiB` of one kind.
    fn amount(&self, kind: StateKind) -> String {
        let of_kind = || self.tensors.iter().filter(|tensor| tensor.kind == kind);
        let elements: u64 = of_kind().map(|tensor| tensor.shape.numel()).sum();
        let bytes: u64 = of_kind().map(|tensor| tensor.bytes).sum();
        let (tensors, elements) = (count(of_kind().count() as u64, "tensor"), count(elements, "element"));
        format!("{tensors} · {elements} · {}", human_bytes(bytes))
    }
}

impl fmt::Display for Inspected<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let commit = self.commit;
        let counters = &commit.run.counters;
        let file_bytes: u64 = commit.files.iter().map(|file| file.bytes).sum();
        writeln!(f, "native checkpoint, complete  {} step {}", self.run, self.step)?;
        let samples = counters.consumed_train_samples;
        let mut rows = vec![
            (
                "step",
                format!(
                    "{} · {samples} samples consumed, {} skipped",
                    self.step, counters.skipped_train_samples
                ),
            ),
            (
                "saved",
                format!(
                    "{} by {} on {} (run {})",
                    commit.created, commit.writer.program, commit.writer.host, commit.writer.run
                ),
            ),
            ("layout", saved_layout(commit)),
            ("model", self.amount(StateKind::Model)),
            ("optimizer", self.amount(StateKind::Optimizer)),
            (
                "random",
                format!(
                    "{}, seed {}, ordinal {}",
                    commit.run.random.algorithm, commit.run.random.seed, commit.run.random.ordinal
                ),
            ),
            ("files", format!("{} files and the commit · {}", commit.files.len(), human_bytes(file_bytes))),
            ("fingerprint", commit.fingerprint.to_string()),
        ];
        if !commit.partial.is_empty() {
            rows.push(("partial", commit.partial.join(", ")));
        }
        let rows: Vec<Vec<String>> =
            rows.into_iter().map(|(name, text)| vec![format!("  {name}"), text]).collect();
        f.write_str(&table(&rows))?;
        let shown = self.tensors.iter().filter(|tensor| self.all || tensor.kind == StateKind::Model);
        let table_of_groups = Arc::new(GroupTable::new("model", &commit.run.layout));
        let groups = table_of_groups.for_rank(table_of_groups.ranks()[0]);
        let row = |tensor: &Tensor| {
            vec![
                format!("  {}", tensor.key),
                tensor.dtype.to_string(),
                tensor.shape.to_string(),
                tensor.placement.map_or_else(String::new, |placement| cuts(placement, &groups)),
            ]
        };
        let heading = ["  tensor", "dtype", "global shape", "cut"].map(String::from).to_vec();
        let rows: Vec<_> = std::iter::once(heading).chain(shown.map(row)).collect();
        write!(f, "\n{}", table(&rows))
    }
}

/// `dim 0 over tp, gtp_remat`: the groups that the dim is cut over, in which there is more than one rank.
fn cuts(placement: &Placement, groups: &ProcessGroups) -> String {
    let text = |(at, dim): (usize, &DimPlacement)| {
        let cuts = dim.cuts().iter().filter(|cut| groups.size(cut.group()) > 1);
        let names: Vec<String> = cuts.map(|cut| cut.group().to_string()).collect();
        let parts =
            if dim.parts().len() > 1 { format!(" in {} parts", dim.parts().len()) } else { String::new() };
        (!names.is_empty()).then(|| format!("dim {at}{parts} over {}", names.join(", ")))
    };
    placement.dims().iter().enumerate().filter_map(text).collect::<Vec<_>>().join(" · ")
}
