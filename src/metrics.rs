//! `metrics.jsonl`: one object a step, and one an evaluation, appended, never rewritten. Of a run the last line of a step counts; a
//! run that went back has lines of its own for the steps that it made anew.

use anyhow::Context;
use ckpt::open_file;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use train::run::Step;

/// The name of the file in its folder.
pub(crate) const FILE_NAME: &str = "metrics.jsonl";

/// One line. Numbers have all their digits, so that equal text is equal bits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Metrics {
    /// The run, as in the commits of its checkpoints. Empty in lines of old.
    #[serde(default)]
    pub(crate) run: String,
    /// Optimizer iterations done, this one included.
    pub(crate) step: u64,
    /// Null if it was not finite.
    pub(crate) loss: Option<f64>,
    pub(crate) lr: f64,
    /// Before clipping; null if it was not finite.
    pub(crate) grad_norm: Option<f64>,
    pub(crate) tokens_per_second: f64,
    pub(crate) consumed_samples: u64,
}

/// The line of an evaluation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct EvalMetrics {
    /// The run, as in the lines of its steps.
    pub(crate) run: String,
    /// Optimizer iterations done.
    pub(crate) step: u64,
    /// Null if it was not finite.
    pub(crate) eval_loss: Option<f64>,
    /// Samples that it is of.
    pub(crate) eval_samples: u64,
}

impl Metrics {
    /// The line of a step of `run`.
    pub(crate) fn new(run: &str, step: &Step) -> Self {
        let finite = |value: f64| Some(value).filter(|value| value.is_finite());
        Metrics {
            run: run.to_owned(),
            step: step.iteration,
            loss: finite(step.outcome.loss),
            lr: step.lr,
            grad_norm: finite(step.outcome.grad_norm),
            tokens_per_second: step.tokens_per_second,
            consumed_samples: step.consumed_samples,
        }
    }
}

/// The file of a run that is going on.
#[derive(Debug)]
pub(crate) struct MetricsFile {
    file: File,
    path: PathBuf,
}

impl MetricsFile {
    /// Opens the file in `folder` to append, and makes both if need be. A line that a crash left unfinished is ended.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub(crate) fn append_to(folder: &Path) -> anyhow::Result<Self> {
        let path = folder.join(FILE_NAME);
        let open = || -> io::Result<File> {
            std::fs::create_dir_all(folder)?;
            is_there(&path)?;
            let mut file = OpenOptions::new().create(true).append(true).read(true).open(&path)?;
            let mut last = [b'\n'];
            if file.seek(SeekFrom::End(0))? > 0 {
                file.seek(SeekFrom::End(-1))?;
                file.read_exact(&mut last)?;
            }
            if last != [b'\n'] {
                file.write_all(b"\n")?;
            }
            Ok(file)
        };
        let file = open().with_context(|| format!("opening `{}`", path.display()))?;
        Ok(MetricsFile { file, path })
    }

    /// Appends a line.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn append(&mut self, metrics: &impl Serialize) -> anyhow::Result<()> {
        let line = serde_json::to_string(metrics)? + "\n";
        self.file.write_all(line.as_bytes()).with_context(|| format!("writing `{}`", self.path.display()))
    }
}

/// The last line that `run`, or else any run, has for `step` in the file in `folder`; `None` if there is none, or no such file. The file is read from its end, a
/// block at a time, however long it is. What is no line of metrics, such as one that a crash left unfinished, is left out.
///
/// # Errors
/// If the file is there and cannot be read.
pub(crate) fn last_of(folder: &Path, run: Option<&str>, step: u64) -> anyhow::Result<Option<Metrics>> {
    let path = folder.join(FILE_NAME);
    let reading = || format!("reading `{}`", path.display());
    if !is_there(&path).with_context(reading)? {
        return Ok(None);
    }
    let file = open_file(&path).with_context(reading)?;
    find_from_end(&file, BLOCK_BYTES, run, step).with_context(reading)
}

/// Whether there is such a file.
///
/// # Errors
/// If it is something else, such as a link: what is behind it may be another run's.
fn is_there(path: &Path) -> io::Result<bool> {
    let wrong = |what| Err(io::Error::new(io::ErrorKind::IsADirectory, what));
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.is_symlink() => wrong("it is a symbolic link"),
        Ok(found) if !found.is_file() => wrong("it is no file"),
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Bytes that are read at a time; a line is far shorter.
const BLOCK_BYTES: u64 = 64 << 10;

fn find_from_end(file: &File, block_bytes: u64, run: Option<&str>, step: u64) -> io::Result<Option<Metrics>> {
    let mut end = file.metadata()?.len();
    // Of the line whose beginning lies in the block before.
    let mut rest = Vec::new();
    while end > 0 {
        let start = end.saturating_sub(block_bytes);
        let mut block = vec![0; (end - start) as usize];
        file.read_exact_at(&mut block, start)?;
        block.append(&mut rest);
        let mut lines: Vec<&[u8]> = block.split(|byte| *byte == b'\n').collect();
        let first = if start > 0 { lines.remove(0) } else { &[] };
        let metrics = lines.iter().rev().filter_map(|line| serde_json::from_slice::<Metrics>(line).ok());
        if let Some(found) =
            metrics.into_iter().find(|line| line.step == step && run.is_none_or(|run| line.run == run))
        {
            return Ok(Some(found));
        }
        // What is longer than a block is no line of metrics.
        rest = if first.len() as u64 <= block_bytes { first.to_vec() } else { Vec::new() };
        end = start;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_of_a_loss_comes_back_and_a_torn_line_hides_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let line = |step, loss| Metrics {
            run: "run".to_owned(),
            step,
            loss,
            lr: 0.1 + 0.2,
            grad_norm: Some(1.0 / 3.0),
            tokens_per_second: 1.5,
            consumed_samples: 8,
        };
        let last_of = |folder: &Path, step| last_of(folder, Some("run"), step);
        assert_eq!(last_of(folder.path(), 1).unwrap(), None);
        let first = line(1, Some(f64::from_bits(0x4015_f8a0_b3c1_d2e7)));
        MetricsFile::append_to(folder.path()).unwrap().append(&first).unwrap();
        let path = folder.path().join(FILE_NAME);
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"step\":2,\"lo").unwrap();
        let second = line(2, None);
        MetricsFile::append_to(folder.path()).unwrap().append(&second).unwrap();
        assert_eq!(last_of(folder.path(), 1).unwrap(), Some(first.clone()));
        assert_eq!(last_of(folder.path(), 2).unwrap(), Some(second.clone()));
        assert_eq!(last_of(folder.path(), 3).unwrap(), None);
        // Another run's lines are not this one's.
        let other = Metrics { run: "other".to_owned(), ..line(1, Some(5.0)) };
        MetricsFile::append_to(folder.path()).unwrap().append(&other).unwrap();
        // The last line of a step counts, wherever the borders of blocks lie.
        let again = line(1, Some(4.0));
        MetricsFile::append_to(folder.path()).unwrap().append(&again).unwrap();
        let file = File::open(&path).unwrap();
        for block_bytes in 300..500 {
            assert_eq!(
                find_from_end(&file, block_bytes, Some("run"), 1).unwrap(),
                Some(again.clone()),
                "{block_bytes}"
            );
            assert_eq!(
                find_from_end(&file, block_bytes, None, 2).unwrap(),
                Some(second.clone()),
                "{block_bytes}"
            );
        }
    }
}
