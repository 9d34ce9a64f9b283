//! Why a run cannot go on from a checkpoint.

use crate::comm::CommError;
use crate::resume::{Difference, StreamCell};
use crate::rng::InvalidStream;
use ckpt::{BadGlob, Fingerprint, LoadPlanError};
use mesh::{ParallelLayout, Shape, TensorKey};

/// A resume that cannot be.
#[derive(Debug, thiserror::Error)]
pub enum ResumeError {
    /// The checkpoint was made by a run of other settings.
    #[error("the checkpoint and this run differ: {}", list(.differences))]
    Differs {
        /// All of them.
        differences: Vec<Difference>,
    },
    /// The checkpoint says nothing, or nonsense, about a run.
    #[error("`{field}` of checkpoint.json is not that of a training run: {source}")]
    Field {
        /// Which field.
        field: &'static str,
        /// Why not.
        source: serde_json::Error,
    },
    /// Keys, shapes or types differ.
    #[error(transparent)]
    Plan(#[from] LoadPlanError),
    /// Bytes could not be read, or were not what was written.
    #[error(transparent)]
    Read(#[from] ckpt::LoadError),
    /// A pattern of an allow list is none.
    #[error(transparent)]
    Glob(#[from] BadGlob),
    /// The streams of this coordinate are not in the checkpoint.
    #[error("random streams: saved under {saved}, but this run is {wanted}{}", first_missing(.missing))]
    MissingStream {
        /// Layout that was saved.
        saved: ParallelLayout,
        /// Layout of this run.
        wanted: ParallelLayout,
        /// The first coordinate without a cell; `None` if all have one, that of another rank.
        missing: Option<StreamCell>,
    },
    /// The tensor of random streams is not one cell a rank of the layout that saved it.
    #[error("`{key}` has shape {found} in the checkpoint, where its layout makes {expected}")]
    StreamShape {
        /// Its key.
        key: TensorKey,
        /// What is there.
        found: Shape,
        /// One cell of five streams of six words a rank.
        expected: Shape,
    },
    /// Random numbers or counters that this program cannot go on with.
    #[error("checkpoint.json says {found} where this run needs {expected}")]
    Random {
        /// What it says.
        found: String,
        /// What is needed.
        expected: String,
    },
    /// A cell holds no streams.
    #[error(transparent)]
    Stream(#[from] InvalidStream),
    /// Memory does not hold what the checkpoint says.
    #[error("`{key}` has fingerprint {found} in memory (replica {replica}) but {expected} in the checkpoint")]
    Fingerprint {
        /// Which tensor.
        key: TensorKey,
        /// Of what is in memory.
        found: Fingerprint,
        /// Of what was saved.
        expected: Fingerprint,
        /// Which replica of it.
        replica: String,
    },
    /// `--strict` asks for more than was reached.
    #[error("verified {reached} where --strict asks for L2: {}", .notes.join("; "))]
    NotStrict {
        /// What was reached.
        reached: String,
        /// Why not more.
        notes: Vec<String>,
    },
    /// A placement that the groups do not divide.
    #[error(transparent)]
    Placement(#[from] mesh::Indivisible),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
}

fn first_missing(missing: &Option<StreamCell>) -> String {
    match missing {
        Some(StreamCell { pp, tp, dp_cp_gtp_remat }) => {
            format!(
                "; coordinate (pp {pp}, tp {tp}, position {dp_cp_gtp_remat} of `dp_cp_gtp_remat`) has no cell"
            )
        }
        None => "; it has fewer coordinates".to_owned(),
    }
}

fn list(differences: &[Difference]) -> String {
    let line = |d: &Difference| format!("{} is {} in the checkpoint but {} here", d.field, d.saved, d.wanted);
    differences.iter().map(line).collect::<Vec<_>>().join("; ")
}

impl ResumeError {
    /// Code of the error.
    pub fn code(&self) -> &'static str {
        match self {
            ResumeError::Differs { .. } => "RM3001",
            ResumeError::Field { .. } => "RM4040",
            ResumeError::Plan(error) => error.code(),
            ResumeError::Read(error) => error.code(),
            ResumeError::Glob(_) => "RM6009",
            ResumeError::MissingStream { .. } => "RM3102",
            ResumeError::StreamShape { .. } => "RM3104",
            ResumeError::Random { .. } => "RM3105",
            ResumeError::Stream(_) => "RM3103",
            ResumeError::Fingerprint { .. } => "RM4050",
            ResumeError::NotStrict { .. } => "RM3110",
            ResumeError::Placement(_) => "RM2003",
            ResumeError::Comm(error) => error.code(),
        }
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            ResumeError::Differs { differences } => {
                let mut fields: Vec<_> = differences.iter().map(|d| d.field).collect();
                // Samples of another length are others, whatever the files.
                if fields.contains(&"seq-length") && !fields.contains(&"data") {
                    fields.push("data");
                }
                match differences.iter().all(|d| d.overridable) {
                    true => {
                        let size = differences.iter().find(|d| d.field == "global-batch-size");
                        let size = size.filter(|size| size.saved.parse::<u64>().is_ok());
                        let keep = size.map(|size| format!("--global-batch-size {} is as it was; ", size.saved));
                        let (keep, fields) = (keep.unwrap_or_default(), fields.join(","));
                        format!("{keep}to go on with the new values: --allow-change {fields}")
                    }
                    false => "give this run the checkpoint's values, or another --save; what is a shape cannot change".into(),
                }
            }
            ResumeError::Field { .. } => "`remesh inspect` shows what the checkpoint holds".into(),
            ResumeError::Plan(error) => error.help(),
            ResumeError::Read(error) => error.help(),
            ResumeError::Glob(_) => "patterns are globs, such as `decoder.layers.0.*`".into(),
            ResumeError::MissingStream { .. } => {
                "--rng-policy derive starts the streams anew on every rank; dropout and data order do not depend on them".into()
            }
            ResumeError::StreamShape { .. } => {
                "--no-load-rng starts the streams anew; `remesh inspect` shows the layout it was saved in".into()
            }
            ResumeError::Random { .. } => {
                "this checkpoint was written by another program, or changed by hand after it was sealed".into()
            }
            ResumeError::Stream(_) => "--rng-policy derive starts the streams anew; `remesh verify` checks the files".into(),
            ResumeError::Fingerprint { .. } => {
                "`remesh verify` checks the files; if they are whole, this is a bug or a memory fault".into()
            }
            ResumeError::NotStrict { .. } => "leave out --strict, or mend what keeps it from L2".into(),
            ResumeError::Placement(_) => "pick a layout that divides the model".into(),
            ResumeError::Comm(error) => error.help().into(),
        }
    }
}
