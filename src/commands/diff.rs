//! `remesh diff`: what two checkpoints have in common, whatever layouts they were saved in.

mod values;

use crate::location::Location;
use crate::output::{Output, count, table};
use ckpt::{Checkpoint, Commit, Fingerprint, StoredTensor};
use mesh::{DType, Shape, StateKind};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::process::ExitCode;
use values::Values;

/// Flags of `remesh diff`.
#[derive(Debug, clap::Args)]
pub(crate) struct DiffArgs {
    /// RUN, RUN@STEP or the folder of a step
    #[arg(value_name = "A")]
    a: Location,
    /// The one to compare it with
    #[arg(value_name = "B")]
    b: Location,
    /// Read the tensors that differ, and say how much and where first
    #[arg(long)]
    values: bool,
}

#[derive(Serialize)]
struct Differences {
    schema: &'static str,
    a: Side,
    b: Side,
    /// Whether tensors are the same: all, but for random streams of another layout.
    same: bool,
    /// Tensors that have the same elements.
    num_same: usize,
    tensors: Vec<TensorDifference>,
    /// Fields of the commits: counters, scheduler, layout, configuration and what identifies the data.
    settings: Vec<Setting>,
}

#[derive(Serialize)]
struct Side {
    run: String,
    step: u64,
}

#[derive(Serialize)]
struct TensorDifference {
    key: String,
    kind: StateKind,
    what: What,
    a: Option<Seen>,
    b: Option<Seen>,
    #[serde(skip_serializing_if = "Option::is_none")]
    values: Option<Values>,
}

/// The first of these that holds.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum What {
    OnlyInA,
    OnlyInB,
    /// Cells of random streams, one a rank.
    LayoutOfStreams,
    Kind,
    Dtype,
    Shape,
    Elements,
}

#[derive(Serialize)]
struct Seen {
    dtype: DType,
    shape: Shape,
    fingerprint: Fingerprint,
}

#[derive(Serialize)]
struct Setting {
    name: String,
    a: Option<Value>,
    b: Option<Value>,
}

/// Compares by fingerprints; with `--values` also reads what differs. Exit code 1 if tensors differ.
pub(crate) fn run(args: &DiffArgs, output: &Output) -> anyhow::Result<ExitCode> {
    let differences = differences(&args.a.open()?, &args.b.open()?, args.values)?;
    output.result(&differences)?;
    Ok(if differences.same { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn differences(a: &Checkpoint, b: &Checkpoint, with_values: bool) -> anyhow::Result<Differences> {
    let by_key = |checkpoint: &Checkpoint| -> BTreeMap<String, StoredTensor> {
        let tensors = checkpoint.catalog().tensors().iter();
        tensors.map(|tensor| (tensor.key.to_string(), tensor.clone())).collect()
    };
    let (in_a, in_b) = (by_key(a), by_key(b));
    let mut keys: Vec<&String> = in_a.keys().chain(in_b.keys()).collect();
    keys.sort();
    keys.dedup();
    let num_keys = keys.len();
    let [layout_a, layout_b] = [a, b].map(|checkpoint| &checkpoint.commit().run.layout);
    let same_axes = layout_a.axis_sizes() == layout_b.axis_sizes();
    let mut tensors = Vec::new();
    for key in keys {
        let (one, other) = (in_a.get(key), in_b.get(key));
        let Some(what) = what_differs(one, other, same_axes) else { continue };
        let values = match (one, other) {
            (Some(one), Some(other)) if with_values && what == What::Elements => {
                Some(Values::compare((a, one), (b, other))?)
            }
            _ => None,
        };
        let kind = one.or(other).expect("one of them has it").kind;
        let [one, other] = [one, other].map(|tensor| tensor.map(Seen::of));
        tensors.push(TensorDifference { key: key.clone(), kind, what, a: one, b: other, values });
    }
    let same = tensors.iter().all(|tensor| tensor.what == What::LayoutOfStreams);
    let side =
        |checkpoint: &Checkpoint| Side { run: checkpoint.store().to_string(), step: checkpoint.step() };
    Ok(Differences {
        schema: "remesh.diff/1",
        a: side(a),
        b: side(b),
        same,
        num_same: num_keys - tensors.len(),
        tensors,
        settings: settings(a.commit(), b.commit()),
    })
}

/// Streams go on only where all axes have the sizes that they had: `same_axes`.
fn what_differs(a: Option<&StoredTensor>, b: Option<&StoredTensor>, same_axes: bool) -> Option<What> {
    let (a, b) = match (a, b) {
        (Some(a), Some(b)) => (a, b),
        (Some(_), None) => return Some(What::OnlyInA),
        (None, _) => return Some(What::OnlyInB),
    };
    let found = [
        (a.kind != b.kind, What::Kind),
        (a.dtype != b.dtype, What::Dtype),
        (
            a.kind == StateKind::Rng && (a.shape != b.shape || !same_axes && a.fingerprint != b.fingerprint),
            What::LayoutOfStreams,
        ),
        (a.shape != b.shape, What::Shape),
        (a.fingerprint != b.fingerprint, What::Elements),
    ];
    found.into_iter().find(|(differs, _)| *differs).map(|(_, what)| what)
}

/// The leaves of both commits' records of the run that are not equal, by their path.
fn settings(a: &Commit, b: &Commit) -> Vec<Setting> {
    let leaves = |commit: &Commit| {
        let mut leaves = BTreeMap::new();
        let record = serde_json::to_value(&commit.run).expect("plain data");
        collect_leaves("", &record, &mut leaves);
        leaves
    };
    let (a, b) = (leaves(a), leaves(b));
    let mut names: Vec<&String> = a.keys().chain(b.keys()).collect();
    names.sort();
    names.dedup();
    let differs = names.into_iter().filter(|name| a.get(*name) != b.get(*name));
    differs
        .map(|name| Setting { name: name.clone(), a: a.get(name).cloned(), b: b.get(name).cloned() })
        .collect()
}

fn collect_leaves(path: &str, value: &Value, leaves: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (name, value) in fields {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                collect_leaves(&path, value, leaves);
            }
        }
        leaf => drop(leaves.insert(path.to_owned(), leaf.clone())),
    }
}

impl Seen {
    fn of(tensor: &StoredTensor) -> Self {
        Seen { dtype: tensor.dtype, shape: tensor.shape.clone(), fingerprint: tensor.fingerprint }
    }
}

impl fmt::Display for Differences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "A  {} step {}\nB  {} step {}", self.a.run, self.a.step, self.b.run, self.b.step)?;
        let differing = self.tensors.len() as u64;
        writeln!(f, "{} the same, {differing} not", count(self.num_same as u64, "tensor"))?;
        f.write_str(&table(&self.tensors.iter().map(TensorDifference::row).collect::<Vec<_>>()))?;
        if !self.settings.is_empty() {
            let text = |value: &Option<Value>| value.as_ref().map_or("–".to_owned(), Value::to_string);
            let row = |setting: &Setting| {
                vec![format!("  {}", setting.name), text(&setting.a), "→".to_owned(), text(&setting.b)]
            };
            writeln!(f, "{} of the runs' records not", count(self.settings.len() as u64, "field"))?;
            f.write_str(&table(&self.settings.iter().map(row).collect::<Vec<_>>()))?;
        }
        Ok(())
    }
}

impl TensorDifference {
    fn row(&self) -> Vec<String> {
        let between = |text: &dyn Fn(&Seen) -> String| match (&self.a, &self.b) {
            (Some(a), Some(b)) => format!("{} → {}", text(a), text(b)),
            _ => String::new(),
        };
        let text = match self.what {
            What::OnlyInA => "only in A".to_owned(),
            What::OnlyInB => "only in B".to_owned(),
            What::LayoutOfStreams => "streams of another layout: not compared".to_owned(),
            What::Kind => "kept for another purpose".to_owned(),
            What::Dtype => between(&|seen| seen.dtype.to_string()),
            What::Shape => between(&|seen| seen.shape.to_string()),
            What::Elements => self.values.as_ref().map_or("other elements".to_owned(), Values::to_string),
        };
        vec![format!("  {}", self.key), text]
    }
}
