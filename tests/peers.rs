//! Other software on what we wrote. Runs only where it is told a Python that has the packages of
//! `tests/fixtures/gen/read_tables-requirements.txt` and `indexed-requirements.txt` beside it, and says so where it does not.

use std::path::Path;
use std::process::{Command, ExitCode};
use train::data::TokenFile;

fn main() -> ExitCode {
    let Some(python) = std::env::var_os("REMESH_PEERS_PYTHON") else {
        println!(
            "\npeers: not run here; `.ci/run` installs a Python with the peers and runs them (REMESH_PEERS_PYTHON)\n"
        );
        return ExitCode::SUCCESS;
    };
    pyarrow_reads_a_checkpoint_as_we_do(Path::new(&python));
    megatron_reads_our_tokens_and_we_read_its(Path::new(&python));
    println!("peers: 2 passed");
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

/// Megatron-Core's own reader on what `data tokenize` writes, and its own writer's files, of each integer type and with several
/// sequences in a document, in ours.
fn megatron_reads_our_tokens_and_we_read_its(python: &Path) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let at = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/gen/indexed.py");
    std::fs::write(at("a.txt"), "text\n\n\u{e9}").expect("a file");
    run(Command::new(env!("CARGO_BIN_EXE_remesh")).args([
        "data",
        "tokenize",
        &at("a.txt"),
        "--input-format",
        "lines",
        "-o",
        &at("ours"),
    ]));
    let read = run(Command::new(python).args([script, "read", &at("ours")]));
    assert_eq!(read.trim(), "[[116, 101, 120, 116, 256], [195, 169, 256]]");

    run(Command::new(python).args([script, "write", &at("")]));
    for name in ["uint8", "int8", "int16", "int32", "int64", "uint16"] {
        let file = TokenFile::open(Path::new(&at(name))).expect("a token file");
        assert_eq!((file.num_documents(), file.num_tokens()), (3, 6), "{name}");
        assert_eq!(file.read_sample(0, 5, 7).expect("its tokens"), [1, 2, 3, 4, 5, 6], "{name}");
    }
    let error = TokenFile::open(Path::new(&at("multimodal"))).expect_err("modes are not understood");
    assert!(error.to_string().contains("multimodal data is not supported"), "{error}");
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{stderr}", output.status);
    String::from_utf8(output.stdout).expect("UTF-8")
}
