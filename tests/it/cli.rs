//! The built binary: exit codes, messages, and what it writes; one subject a module.

mod damage;
mod data;
mod diff;
mod manual;
mod output;
mod places;
mod plan;
mod resume;
mod run;
mod settings;

use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Runs `remesh` in `folder` with the words of `line`.
fn remesh(folder: &Path, line: &str) -> Output {
    command(folder, line).output().unwrap()
}

pub fn command(folder: &Path, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_remesh"));
    command.current_dir(folder).args(line.split_whitespace()).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs and returns stdout of a command that must succeed.
pub fn ok(folder: &Path, line: &str) -> String {
    let output = remesh(folder, line);
    assert!(output.status.success(), "{line}: {}\n{}", output.status, text(&output.stderr));
    text(&output.stdout)
}

/// Runs a command that must be refused with this exit code and nothing on stdout, and returns stderr.
fn refused(folder: &Path, line: &str, exit: i32) -> String {
    let output = remesh(folder, line);
    assert_eq!(output.status.code(), Some(exit), "{line}: {}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "", "{line}");
    text(&output.stderr)
}

/// A tiny model on bytes; every run of a test adds its own flags.
const MODEL: &str = "--num-layers 1 --hidden-size 16 --ffn-hidden-size 16 --num-attention-heads 2 --seq-length 32 \
                    --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --hidden-dropout 0.1 \
                    --attention-dropout 0.1 --data-path tokens";

/// A folder with tokens under the prefix `tokens`.
pub fn with_tokens() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let words: Vec<u8> = (0..4000u32).map(|i| ((i * i * 7 + i * 3 + (i >> 3)) % 251) as u8).collect();
    std::fs::write(folder.path().join("a.bin"), words).unwrap();
    ok(folder.path(), "data tokenize a.bin -o tokens");
    folder
}

#[derive(serde::Deserialize, Debug, PartialEq)]
pub struct Metrics {
    pub step: u64,
    loss: f64,
    lr: f64,
    grad_norm: f64,
    consumed_samples: u64,
}

pub fn metrics(folder: &Path, run: &str) -> Vec<Metrics> {
    let lines = std::fs::read_to_string(folder.join(run).join("metrics.jsonl")).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Changes one bit of a step's data, and returns the file.
fn damage_data(step: &Path) -> std::path::PathBuf {
    let pack = std::fs::read_dir(step.join("data")).unwrap().next().unwrap().unwrap().path();
    let mut bytes = std::fs::read(&pack).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&pack, bytes).unwrap();
    pack
}
