//! `remesh digest`: SHA-256 of every whole logical tensor of model and optimizer, whatever the layout it was saved in.
//! Random streams are left out: they are keyed by the coordinates of a layout.

use crate::bar::Bar;
use crate::location::{Location, Opened};
use crate::output::{Output, one_line};
use crate::slabs;
use ckpt::{Checkpoint, ForeignCheckpoint, StoredTensor};
use mesh::{DType, Shape, StateKind};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt;
use std::process::ExitCode;

/// Flags of `remesh digest`.
#[derive(Debug, clap::Args)]
pub(crate) struct DigestArgs {
    /// RUN, RUN@STEP, the folder of a step, or a file or folder of other software
    #[arg(value_name = "CKPT")]
    checkpoint: Location,
}

/// By name. The document is nothing but this map, so that scripts can go over it.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(crate) struct Digests {
    tensors: BTreeMap<String, TensorDigest>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct TensorDigest {
    dtype: &'static str,
    shape: Vec<u64>,
    /// Of the elements in row-major order, little-endian.
    sha256: String,
}

/// Digests a checkpoint.
pub(crate) fn run(args: &DigestArgs, output: &Output) -> anyhow::Result<ExitCode> {
    let digests = match args.checkpoint.open_any()? {
        Opened::Native(checkpoint) => digests(&checkpoint, output)?,
        Opened::Foreign(foreign) => foreign_digests(&foreign, output)?,
    };
    output.result(&digests)?;
    Ok(ExitCode::SUCCESS)
}

/// The digests of a checkpoint's model and optimizer.
pub(crate) fn digests(checkpoint: &Checkpoint, output: &Output) -> anyhow::Result<Digests> {
    let tensors = checkpoint.catalog().tensors().iter();
    let tensors = tensors.filter(|tensor| matches!(tensor.kind, StateKind::Model | StateKind::Optimizer));
    let bar = output.bar("digesting", Some(tensors.clone().map(StoredTensor::raw_bytes).sum()));
    let digests = tensors.map(|tensor| {
        let digest = digest(tensor.dtype, &tensor.shape, slabs::read(checkpoint, tensor), &bar)?;
        Ok((tensor.key.to_string(), digest))
    });
    Ok(Digests { tensors: digests.collect::<anyhow::Result<_>>()? })
}

/// The digests of all tensors of other software's files, once all that is beside them was checked.
fn foreign_digests(checkpoint: &ForeignCheckpoint, output: &Output) -> anyhow::Result<Digests> {
    checkpoint.check()?;
    let bar = output.bar("digesting", None);
    let digests = checkpoint.tensors().iter().map(|(key, tensor)| {
        let digest = digest(tensor.dtype, &tensor.shape, slabs::read_foreign(checkpoint, key), &bar)?;
        Ok((key.to_string(), digest))
    });
    Ok(Digests { tensors: digests.collect::<anyhow::Result<_>>()? })
}

fn digest(
    dtype: DType,
    shape: &Shape,
    slabs: impl Iterator<Item = anyhow::Result<Vec<u8>>>,
    bar: &Bar,
) -> anyhow::Result<TensorDigest> {
    let mut sha = Sha256::new();
    for bytes in slabs {
        let bytes = bytes?;
        sha.update(&bytes);
        bar.add(bytes.len() as u64);
    }
    let sha256 = sha.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(TensorDigest { dtype: dtype.name(), shape: shape.dims().to_vec(), sha256 })
}

/// One line a tensor, as `sha256sum` prints them.
impl fmt::Display for Digests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tensors
            .iter()
            .try_for_each(|(name, digest)| writeln!(f, "{}  {}", digest.sha256, one_line(name)))
    }
}
