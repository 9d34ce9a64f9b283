//! `remesh verify`: whether a checkpoint is as it was written.

use crate::location::Location;
use crate::output::{Output, complain, count, human_bytes, one_line};
use crate::report::is_damage;
use ckpt::{Checkpoint, OpenError, Store};
use serde::Serialize;
use std::fmt;
use std::process::ExitCode;

/// Flags of `remesh verify`.
#[derive(Debug, clap::Args)]
pub(crate) struct VerifyArgs {
    /// RUN, RUN@STEP or the folder of a step
    #[arg(value_name = "CKPT")]
    checkpoint: Location,
    /// Read and check every byte [default: true; =false checks the commit, the tables and the files' sizes]
    #[arg(long, num_args = 0..=1, require_equals = true, default_value = "true", default_missing_value = "true")]
    #[arg(action = clap::ArgAction::Set, hide_default_value = true, value_name = "BOOL")]
    deep: bool,
}

#[derive(Serialize)]
struct Verified {
    schema: &'static str,
    checkpoint: String,
    step: Option<u64>,
    ok: bool,
    tensors: usize,
    chunks: usize,
    bytes_read: u64,
    faults: Vec<String>,
}

/// Verifies a checkpoint; exit code 1 if anything is wrong with it.
pub(crate) fn run(args: &VerifyArgs, output: &Output) -> anyhow::Result<ExitCode> {
    let mut verified = Verified {
        schema: "remesh.verify/1",
        checkpoint: args.checkpoint.run.clone(),
        step: args.checkpoint.step,
        ok: true,
        tensors: 0,
        chunks: 0,
        bytes_read: 0,
        faults: Vec::new(),
    };
    match open(&args.checkpoint, &mut verified.faults) {
        Ok(None) => {}
        Ok(Some(checkpoint)) => {
            let tensors = checkpoint.catalog().tensors();
            verified.step = Some(checkpoint.step());
            verified.tensors = tensors.len();
            verified.chunks = tensors.iter().map(|tensor| tensor.chunks.len()).sum();
            if args.deep {
                let total = checkpoint.catalog().objects().iter().map(|object| object.bytes).sum();
                let bar = output.bar("verifying", Some(total));
                let report = checkpoint.verify_telling(&mut |bytes| bar.add(bytes))?;
                verified.bytes_read = report.bytes_read;
                verified.faults.extend(report.faults.iter().map(ToString::to_string));
            }
        }
        Err(error) if is_damage(&error) => verified.faults.push(format!("{error:#}")),
        Err(error) => return Err(error),
    }
    verified.ok = verified.faults.is_empty();
    output.result(&verified)?;
    Ok(if verified.ok { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// Opens the checkpoint. Where no step was asked for, each newer one that has a commit and is not whole is a fault, and so
/// there may be none to open; what never was committed is no checkpoint, and gets a line.
fn open(location: &Location, faults: &mut Vec<String>) -> anyhow::Result<Option<Checkpoint>> {
    if location.step.is_some() {
        return location.open().map(Some);
    }
    let store = Store::open(&location.run)?;
    let latest = store.latest(None)?;
    latest.strays.iter().for_each(complain);
    for passed in &latest.passed_over {
        match passed.why {
            OpenError::NoCommit { .. } => complain(passed),
            OpenError::SetAside { .. } => {}
            _ => faults.push(passed.to_string()),
        }
    }
    match faults.is_empty() {
        true => Ok(Some(latest.require(&store)?)),
        false => Ok(latest.checkpoint),
    }
}

impl fmt::Display for Verified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for fault in &self.faults {
            writeln!(f, "BAD  {}", one_line(fault))?;
        }
        if !self.ok {
            f.write_str(&count(self.faults.len() as u64, "fault"))?;
            return match self.step.filter(|_| self.tensors > 0) {
                Some(step) => write!(f, "; step {step} was checked"),
                None => Ok(()),
            };
        }
        let (tensors, chunks) = (count(self.tensors as u64, "tensor"), count(self.chunks as u64, "chunk"));
        let step = self.step.map(|step| format!("step {step}: ")).unwrap_or_default();
        write!(f, "ok   {step}{tensors}, every element in one of {chunks}; ")?;
        match self.bytes_read {
            0 => f.write_str("data not read"),
            bytes => write!(f, "{} read, all as written", human_bytes(bytes)),
        }
    }
}
