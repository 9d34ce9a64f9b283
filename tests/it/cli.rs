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
