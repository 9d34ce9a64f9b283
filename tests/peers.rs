//! Other software on what we wrote. Runs only where it is told a Python that has the packages of
//! `tests/fixtures/gen/read_tables-requirements.txt`, and says so where it does not.

use std::path::Path;
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let Some(python) = std::env::var_os("REMESH_PEERS_PYTHON") else {
        println!(
            "\npeers: not run here; `.ci/run` installs a Python with pyarrow and runs them (REMESH_PEERS_PYTHON)\n"
        );
        return ExitCode::SUCCESS;
    };
    pyarrow_reads_a_checkpoint_as_we_do(Path::new(&python));
    println!("peers: 1 passed");
    ExitCode::SUCCESS
}

/// A second reader, in Python with pyarrow, written from the description of the format alone: it checks every checksum,
/// alignment and fingerprint, and its digests of the logical tensors are those of `remesh digest`.
fn pyarrow_reads_a_checkpoint_as_we_do(python: &Path) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let at = |name: &str| folder.path().join(name);
    let remesh = |args: &[&str]| run(Command::new(env!("CARGO_BIN_EXE_remesh")).args(args));
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/README.md");
    let (tokens, save) = (at("tokens"), at("run"));
    let (tokens, save) = (tokens.to_str().expect("UTF-8"), save.to_str().expect("UTF-8"));
    remesh(&["data", "tokenize", text, "-o", tokens]);
    let model = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 8 --num-query-groups 4 \
                 --seq-length 64 --micro-batch-size 1 --global-batch-size 8 --train-iters 2 --lr 1e-3 \
                 --tp 2 --sp --cp 2 --weight-shards 4 --nproc-per-node 8";
    let train = ["train", "--data-path", tokens, "--save", save];
    remesh(&train.into_iter().chain(model.split_whitespace()).collect::<Vec<_>>());
    let checkpoint = format!("{save}/iter_0000002");
    let ours = remesh(&["digest", "--json", &checkpoint]);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/gen/read_tables.py");
    let theirs = run(Command::new(python).args([script, &checkpoint]));
    let parse = |text: &str| -> serde_json::Value { serde_json::from_str(text).expect("JSON") };
    let (ours, mut theirs) = (parse(&ours), parse(&theirs));
    let tensors = theirs.as_object_mut().expect("an object of tensors");
    assert!(
        tensors.remove("rng_state").is_some(),
        "random streams belong to a layout, so our digest leaves them out"
    );
    assert_eq!(tensors.len(), 45, "15 parameters, each with two moments");
    assert_eq!(ours, theirs, "digests of `remesh digest` and of the other reader");
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{stderr}", output.status);
    String::from_utf8(output.stdout).expect("UTF-8")
}
