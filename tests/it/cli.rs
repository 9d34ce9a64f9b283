//! The built binary: exit codes, messages, and what it writes.

use expect_test::expect;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Runs `remesh` in `folder` with the words of `line`.
fn remesh(folder: &Path, line: &str) -> Output {
    command(folder, line).output().unwrap()
}

fn command(folder: &Path, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_remesh"));
    command.current_dir(folder).args(line.split_whitespace()).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs and returns stdout of a command that must succeed.
fn ok(folder: &Path, line: &str) -> String {
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

#[test]
fn tokenizing_writes_bytes_and_an_end_token_for_each_document() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("a.txt"), "ab").unwrap();
    std::fs::write(folder.join("b.txt"), [0, 255]).unwrap();
    let said = ok(folder, "data tokenize a.txt b.txt -o tokens");
    expect![[r#"
        6 tokens of 2 documents, vocabulary 257
        wrote tokens.bin, tokens.idx and tokens.tokenizer.json
    "#]]
    .assert_eq(&said);
    let bin = std::fs::read(folder.join("tokens.bin")).unwrap();
    let tokens: Vec<u16> = bin.as_chunks().0.iter().map(|id| u16::from_le_bytes(*id)).collect();
    assert_eq!(tokens, [97, 98, 256, 0, 255, 256]);
    assert_eq!(train::data::TokenFile::open(&folder.join("tokens")).unwrap().num_documents(), 2);
    expect![[r#"
        {
          "kind": "byte",
          "vocab_size": 257,
          "eod": 256,
          "hash": "3bc445c62db5ead8"
        }
    "#]]
    .assert_eq(&std::fs::read_to_string(folder.join("tokens.tokenizer.json")).unwrap());
}

#[test]
fn a_missing_document_leaves_tokens_that_are_there_alone() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("a.txt"), "ab").unwrap();
    ok(folder, "data tokenize a.txt -o tokens");
    let before = std::fs::read(folder.join("tokens.bin")).unwrap();
    let said = refused(folder, "data tokenize a.txt nowhere.txt -o tokens", 3);
    expect![[r#"
        Error: RM1003

          × opening `nowhere.txt`
          ╰─▶ No such file or directory (os error 2)
          help: check the path for a typing error
    "#]]
    .assert_eq(&said);
    assert_eq!(std::fs::read(folder.join("tokens.bin")).unwrap(), before);
}

#[test]
fn errors_are_json_on_stderr_where_json_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let said = refused(folder.path(), "--json inspect nowhere", 3);
    expect![[r#"
        {"error":{"causes":[],"code":"RM4012","exit":3,"help":"check the path for a typing error","message":"there is no folder `nowhere`","retryable":false}}
    "#]]
    .assert_eq(&said);
    let said = refused(folder.path(), "inspect --json nowhere --al", 2);
    expect![[r#"
        {"error":{"causes":[],"code":"RM6001","exit":2,"help":"`--help` lists the flags","message":"unexpected argument '--al' found","retryable":false}}
    "#]]
    .assert_eq(&said);
}

#[test]
fn a_misspelt_flag_is_told_the_right_one() {
    let folder = tempfile::tempdir().unwrap();
    let said = refused(folder.path(), "verify run --deap", 2);
    assert!(said.contains("a similar argument exists: '--deep'"), "{said}");
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("a.txt"), "ab").unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = command(folder, "data tokenize a.txt -o tokens").stdout(writer).output().unwrap();
    assert!(output.status.success());
    assert_eq!(text(&output.stderr), "");
    assert!(folder.join("tokens.tokenizer.json").exists());
}

/// A tiny model on bytes; every run of a test adds its own flags.
const TINY: &str = "--num-layers 1 --hidden-size 16 --ffn-hidden-size 16 --num-attention-heads 2 --seq-length 32 \
                    --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --train-iters 4 --hidden-dropout 0.1 \
                    --attention-dropout 0.1 --data-path tokens";

/// A folder with tokens under the prefix `tokens`.
fn with_tokens() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let words: Vec<u8> = (0..4000u32).map(|i| ((i * i * 7 + i * 3 + (i >> 3)) % 251) as u8).collect();
    std::fs::write(folder.path().join("a.bin"), words).unwrap();
    ok(folder.path(), "data tokenize a.bin -o tokens");
    folder
}

#[derive(serde::Deserialize, Debug, PartialEq)]
struct Metrics {
    step: u64,
    loss: f64,
    lr: f64,
    grad_norm: f64,
    consumed_samples: u64,
}

fn metrics(folder: &Path, run: &str) -> Vec<Metrics> {
    let lines = std::fs::read_to_string(folder.join(run).join("metrics.jsonl")).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_run_resumed_under_other_layouts_equals_the_one_that_never_stopped() {
    let folder = with_tokens();
    let folder = folder.path();
    let said = ok(folder, &format!("train {TINY} --save straight --save-interval 2"));
    assert!(said.starts_with("starting afresh, 4 steps\nstep 1/4  loss 5.5"), "{said}");
    let straight = metrics(folder, "straight");
    assert_eq!(straight.iter().map(|line| line.step).collect::<Vec<_>>(), [1, 2, 3, 4]);
    let digest = ok(folder, "digest straight@4 --json");
    for (name, layout) in [
        ("cp", "--context-parallel-size 2"),
        ("seq", "--weight-shards 2 --seq-shards 2"),
        ("tp", "--tp 2 --sp --nproc-per-node 4"),
    ] {
        let said = ok(folder, &format!("train {TINY} {layout} --load straight@2 --save {name}"));
        let mut lines = said.lines();
        let resumed = lines.next().unwrap();
        assert!(
            resumed.starts_with("resumed step 2 of straight: TP 1 · GTP 1 · CP 1 · DP 1 · world 1 → "),
            "{resumed}"
        );
        assert!(resumed.contains("verified L2 ("), "{resumed}");
        assert!(lines.next().unwrap().starts_with("step 3/4  loss "), "{said}");
        assert_eq!(lines.next().unwrap(), "L3 step 3 is bit-identical");
        assert_eq!(metrics(folder, name), straight[2..], "{name}");
        assert_eq!(ok(folder, &format!("digest {name} --json")), digest, "{name}");
    }
}

#[test]
fn a_run_goes_on_from_its_own_newest_checkpoint_by_default() {
    let folder = with_tokens();
    let folder = folder.path();
    let flags = TINY.replace("--train-iters 4", "--lr-decay-iters 4");
    ok(folder, &format!("train {flags} --train-iters 3 --save run"));
    let said = ok(folder, &format!("train {flags} --train-iters 4 --save run"));
    assert!(said.starts_with("resumed step 3 of run: "), "{said}");
    assert!(said.contains("L3 step 4 expected; metrics.jsonl has no earlier line of it"), "{said}");
    ok(folder, &format!("train {flags} --train-iters 4 --save straight"));
    assert_eq!(metrics(folder, "run"), metrics(folder, "straight"));
    // Nothing is left to do, and nothing is done.
    let output = remesh(folder, &format!("train {flags} --train-iters 4 --save run"));
    assert!(output.status.success());
    assert_eq!(text(&output.stderr), "nothing to train: 4 of 4 steps are done\n");
    assert_eq!(metrics(folder, "run").len(), 4);
}
