//! The built binary: exit codes, messages, and what it writes.

use expect_test::expect;
use std::io::{BufRead, BufReader};
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
fn a_document_is_never_written_over_by_its_own_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("book.bin"), "text").unwrap();
    let said = refused(folder, "data tokenize ./book.bin -o book", 7);
    assert!(said.contains("RM7004") && said.contains("is a document, and would be written over"), "{said}");
    assert_eq!(std::fs::read(folder.join("book.bin")).unwrap(), b"text");
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

#[test]
fn a_run_goes_on_when_nobody_reads_its_lines() {
    let folder = with_tokens();
    let folder = folder.path();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let line = format!("train {MODEL} --train-iters 3 --save run");
    let output = command(folder, &line).stdout(writer).output().unwrap();
    assert!(output.status.success());
    assert_eq!(text(&output.stderr), "");
    ok(folder, "verify run@3");
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

#[test]
fn a_run_resumed_under_other_layouts_equals_the_one_that_never_stopped() {
    let folder = with_tokens();
    let folder = folder.path();
    let said = ok(folder, &format!("train {MODEL} --train-iters 4 --save straight --save-interval 2"));
    assert!(said.starts_with("starting afresh, 4 steps\nstep 1/4  loss 5.5"), "{said}");
    let straight = metrics(folder, "straight");
    assert_eq!(straight.iter().map(|line| line.step).collect::<Vec<_>>(), [1, 2, 3, 4]);
    let digest = ok(folder, "digest straight@4 --json");
    for (name, layout) in [
        ("cp", "--context-parallel-size 2"),
        ("seq", "--weight-shards 2 --seq-shards 2"),
        ("tp", "--tp 2 --sp --nproc-per-node 4"),
    ] {
        let said =
            ok(folder, &format!("train {MODEL} --train-iters 4 {layout} --load straight@2 --save {name}"));
        let mut lines = said.lines();
        let resumed = lines.next().unwrap();
        assert!(
            resumed.starts_with("resumed step 2 of straight: TP 1 · GTP 1 · CP 1 · DP 1 · world 1 → "),
            "{resumed}"
        );
        assert!(resumed.ends_with(", verified L2"), "{resumed}");
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
    let flags = format!("{MODEL} --lr-decay-iters 4");
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

#[test]
fn a_pasted_launch_script_is_taken_and_what_makes_no_difference_is_named() {
    let folder = with_tokens();
    let folder = folder.path();
    let script = "--num-layers 1 --hidden-size 16 --ffn-hidden-size 16 --num-attention-heads 2 --group-query-attention \
                  --num-query-groups 2 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 \
                  --global-batch-size 4 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 1 \
                  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --clip-grad 1.0 --train-iters 2 \
                  --swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-5 \
                  --position-embedding-type rope --rotary-base 500000 --untie-embeddings-and-output-weights \
                  --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.02 --use-flash-attn \
                  --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 \
                  --use-distributed-optimizer --overlap-grad-reduce --data-path tokens --tokenizer-type NullTokenizer \
                  --vocab-size 257 --split 100,0,0 --save run --load run --save-interval 1 --log-interval 1 --seed 7";
    let output = remesh(folder, &format!("train {script}"));
    assert!(output.status.success(), "{}", text(&output.stderr));
    expect![[r#"
        no effect here: --max-position-embeddings 32, --overlap-grad-reduce, --tokenizer-type NullTokenizer, --use-flash-attn
    "#]]
    .assert_eq(&text(&output.stderr));
    assert_eq!(metrics(folder, "run").len(), 2);

    let said =
        refused(folder, &format!("train {script} --bf16 --num-experts 8 --normalization LayerNorm"), 2);
    expect![[r#"
        Error: RM6005

          × `--normalization LayerNorm`: the one model so far is Llama-like: RMSNorm, rotary positions, SwiGLU, no biases; `--num-experts 8`: there are no experts so far; `--bf16`: the trainer computes in f32 on CPU so far
          help: leave out --normalization LayerNorm --num-experts 8 --bf16
    "#]]
    .assert_eq(&said);
}

#[test]
fn settings_come_from_the_file_and_flags_go_over_it() {
    let folder = with_tokens();
    let folder = folder.path();
    let file = "[model]\nnum_layers = 1\nhidden_size = 16\nffn_hidden_size = 16\nnum_attention_heads = 2\n\
                [training]\nseq_length = 32\nmicro_batch_size = 1\nglobal_batch_size = 4\ntrain_iters = 9\nlr = 1e-2\n\
                [data]\ndata_path = \"tokens\"\n[checkpoint]\nsave = \"run\"\n";
    std::fs::write(folder.join("run.toml"), file).unwrap();
    ok(folder, "train --config run.toml --train-samples 8");
    let by_file = metrics(folder, "run");
    assert_eq!(by_file.len(), 2);
    let no_dropout = MODEL.replace("0.1", "0");
    ok(folder, &format!("train {no_dropout} --train-samples 8 --save flags"));
    assert_eq!(metrics(folder, "flags"), by_file);

    std::fs::write(
        folder.join("typo.toml"),
        "[parallelism]\ntensor_model_parallel_size = 2\ncontext_parallel_sizes = 4\n",
    )
    .unwrap();
    expect![[r#"
        Error: RM6002

          × unknown key `context_parallel_sizes` in [parallelism]
           ╭─[typo.toml:3:1]
         2 │ tensor_model_parallel_size = 2
         3 │ context_parallel_sizes = 4
           · ───────────┬──────────
           ·            ╰── not a known key
           ╰────
          help: did you mean `context_parallel_size`?
    "#]]
    .assert_eq(&refused(folder, "train --config typo.toml", 2));
    std::fs::write(folder.join("type.toml"), "[training]\nlr = \"high\"\n").unwrap();
    expect![[r#"
        Error: RM6003

          × invalid type: string "high", expected f64
           ╭─[type.toml:2:6]
         1 │ [training]
         2 │ lr = "high"
           ·      ───┬──
           ·         ╰── here
           ╰────
          help: a value has the type that `remesh train --help` tells for the flag of the same name
    "#]]
    .assert_eq(&refused(folder, "train --config type.toml", 2));
    std::fs::write(folder.join("table.toml"), "[optimizer]\nlr = 1.0\n").unwrap();
    expect![[r#"
        Error: RM6002

          × unknown table or key `optimizer`
           ╭─[table.toml:1:2]
         1 │ [optimizer]
           ·  ────┬────
           ·      ╰── not a known key
         2 │ lr = 1.0
           ╰────
          help: known here: model, parallelism, training, data, checkpoint, logging
    "#]]
    .assert_eq(&refused(folder, "train --config table.toml", 2));
}

#[test]
fn the_example_configuration_trains() {
    let folder = with_tokens();
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/remesh.toml");
    let said = ok(folder.path(), &format!("train --config {example} --train-iters 1 --micro-batch-size 4"));
    assert!(said.contains("saved step 1 to "), "{said}");
}

/// 10 samples, 3 ranks. `drop` leaves 4 samples of an epoch unused, `pad` fills 2 slots up, `span` crosses into the next epoch.
#[test]
fn each_rule_for_the_end_of_an_epoch_advances_the_counter_by_the_samples_it_used() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("a.bin"), vec![7; 10 * 32]).unwrap();
    ok(folder, "data tokenize a.bin -o tokens");
    let model = MODEL.replace("--micro-batch-size 1 --global-batch-size 4", "--micro-batch-size 2 --dp 3");
    let run = |tail: &str, batch: u32, iters: u32| {
        let flags =
            format!("--global-batch-size {batch} --train-iters {iters} --epoch-tail {tail} --save {tail}");
        let said = ok(folder, &format!("train {model} {flags}"));
        let consumed = metrics(folder, tail).iter().map(|line| line.consumed_samples).collect::<Vec<_>>();
        (said, consumed)
    };
    let (said, consumed) = run("drop", 6, 3);
    assert_eq!(consumed, [6, 12, 18]);
    assert!(said.contains("epoch 0 ended; 4 samples that fill no batch were not used\n"), "{said}");
    assert_eq!(run("pad", 12, 3).1, [10, 20, 30]);
    assert_eq!(run("span", 6, 5).1, [6, 12, 18, 24, 30]);
}

#[test]
fn every_number_of_a_layout_says_where_it_comes_from() {
    let folder = with_tokens();
    let output =
        remesh(folder.path(), &format!("train {MODEL} --train-iters 4 -v --weight-shards 2 --seq-shards 2"));
    let said = text(&output.stderr);
    for line in [
        "tensor-parallel-num-sequence-shards 2 (command line)",
        "runtime CP 2 = configured CP 1 × 2 GTP sequence shards",
        "batch parallel size 1 = DP 1 × 1 GTP batch shards",
    ] {
        assert!(said.lines().any(|said| said == line), "{said}");
    }
}

#[test]
fn layouts_that_cannot_be_are_refused_before_anything_is_written() {
    let folder = with_tokens();
    let folder = folder.path();
    let refused =
        |flags: &str| refused(folder, &format!("train {MODEL} --train-iters 4 --save run {flags}"), 2);
    expect![[r#"
        Error: RM2003

          × TP 4 does not divide the 2 query groups: 2 % 4 != 0 (`decoder.layers.*.self_attention.linear_qkv.weight`)
          help: pick a TP size that divides the query groups: 1, 2
    "#]].assert_eq(&refused("--tp 4"));
    expect![[r#"
        Error: RM2001

          × weight shards 3 ÷ TP 2 is not exact
          help: `--tensor-parallel-num-weight-shards` is a multiple of TP 2
    "#]]
    .assert_eq(&refused("--weight-shards 3 --tp 2"));
    expect![[r#"
        Error: RM2030

          × a leaf of 16 tokens does not divide T/(2·runtime CP) = 32/(2·2) = 8
          help: the largest leaf that fits is --canonical-leaf-tokens 8
    "#]]
    .assert_eq(&refused("--cp 2 --canonical-leaf-tokens 16"));
    expect![[r#"
        Error: RM6005

          × `--numerics fast` is not there yet
          help: leave it out: canonical numerics are the default
    "#]]
    .assert_eq(&refused("--numerics fast"));
    // What flags alone show comes before any file is looked for.
    assert!(refused("--tp 4 --data-path nowhere").contains("RM2003"));
    assert!(refused("--cp 2 --canonical-leaf-tokens 16 --data-path nowhere").contains("RM2030"));
    assert!(!folder.join("run").exists());
}

#[test]
fn settings_that_contradict_the_data_or_each_other_are_refused() {
    let folder = with_tokens();
    let folder = folder.path();
    let refused = |flags: &str| refused(folder, &format!("train {MODEL} --save run {flags}"), 2);
    expect![[r#"
        Error: RM6003

          × `--vocab-size` 100 is less than the 257 ids of the data's tokenizer
          help: leave it out, or give at least that
    "#]]
    .assert_eq(&refused("--train-iters 1 --vocab-size 100"));
    expect![[r#"
        Error: RM6003

          × 3 samples of training are less than a global batch of 4
          help: give more --train-samples, or at least one of --train-iters
    "#]]
    .assert_eq(&refused("--train-samples 3"));
    expect![[r#"
        Error: RM6003

          × `--calculate-per-token-loss` and `--loss-average sample` contradict each other
          help: leave one of them out
    "#]]
    .assert_eq(&refused("--train-iters 1 --loss-average sample --calculate-per-token-loss"));
    expect![[r#"
        Error: RM6005

          × `--dist-ckpt-strictness log_all`: a tensor that the checkpoint lacks is trained from its initial value only if it is named: --allow-missing GLOB; --allow-extra GLOB names what the model does not want
          help: leave out --dist-ckpt-strictness log_all
    "#]]
    .assert_eq(&refused("--train-iters 1 --dist-ckpt-strictness log_all"));
    assert!(!folder.join("run").exists());
}

#[test]
fn flags_of_launch_scripts_mean_what_they_say() {
    let folder = with_tokens();
    let folder = folder.path();
    let line = format!("train {MODEL} --train-iters 1");
    std::fs::write(folder.join("sample.toml"), "[training]\nloss_average = \"sample\"\n").unwrap();
    ok(folder, &format!("{line} --config sample.toml --calculate-per-token-loss --save run"));
    let inspected: serde_json::Value = serde_json::from_str(&ok(folder, "inspect run --json")).unwrap();
    assert_eq!(inspected["commit"]["config"]["loss_average"], "token");
    assert!(refused(folder, &format!("{line} --distributed-timeout-minutes 0"), 2).contains("zero"));
    ok(folder, &format!("{line} --distributed-timeout-minutes 30"));
    // The tied model does not want the checkpoint's output layer.
    let tied = format!("{line} --load run --save new --finetune --tie-embeddings --dist-ckpt-strictness");
    assert!(refused(folder, &format!("{tied} raise_all"), 2).contains("`output_layer.weight`"));
    ok(folder, &format!("{tied} assume_ok_unexpected"));
}

/// Commands are named in backticks, in texts of every crate and in the documents.
#[test]
fn every_command_that_a_text_names_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let commands = ok(root, "--help");
    let commands: Vec<&str> =
        commands.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next()).collect();
    let mut folders =
        ["src", "mesh/src", "ckpt/src", "train/src", "reshard/src", "docs"].map(|at| root.join(at)).to_vec();
    let mut named = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            if entry.file_type().unwrap().is_dir() {
                folders.push(entry.path());
                continue;
            }
            let Ok(said) = std::fs::read_to_string(entry.path()) else { continue };
            for (at, _) in said.match_indices("`remesh ") {
                let word = said[at + 8..].split(|c: char| !c.is_alphanumeric()).next().unwrap();
                named += 1;
                assert!(commands.contains(&word), "{}: `remesh {word}`", entry.path().display());
            }
        }
    }
    assert!(named > 10);
}

#[test]
fn a_place_is_the_same_however_it_is_written() {
    let folder = with_tokens();
    let folder = folder.path();
    let line = format!("train {MODEL} --lr-decay-iters 9 --save run --train-iters");
    let said = ok(folder, &format!("{line} 1 --load ./run/"));
    assert!(said.starts_with("starting afresh, 1 steps\n"), "{said}");
    let url = format!("file://{}/./run/", folder.display());
    let said = ok(folder, &format!("{line} 2 --load {url}"));
    assert!(said.starts_with("resumed step 1 of run: "), "{said}");
    // Found while it is loaded, so another step stands in, and the damaged one is in nobody's way.
    damage_data(&folder.join("run/iter_0000002"));
    let said = ok(folder, &format!("{line} 2 --load {url}@latest"));
    assert!(said.starts_with("resumed step 1 of "), "{said}");
}

#[test]
fn every_json_document_names_its_schema_and_bad_log_settings_are_said() {
    let folder = with_tokens();
    let folder = folder.path();
    let said = ok(folder, &format!("train {MODEL} --train-iters 1 --save run --json"));
    let events: Vec<serde_json::Value> =
        said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(events.iter().all(|event| event["schema"] == "remesh.train/1"), "{said}");
    let names: Vec<_> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
    assert_eq!(names, ["fresh", "step", "saved"]);
    for (line, schema) in [
        ("inspect run", "remesh.inspect/1"),
        ("ls run", "remesh.ls/1"),
        ("verify run", "remesh.verify/1"),
        ("plan run", "remesh.plan/1"),
        ("data tokenize a.bin -o again", "remesh.tokenize/1"),
    ] {
        let document: serde_json::Value =
            serde_json::from_str(&ok(folder, &format!("{line} --json"))).unwrap();
        assert_eq!(document["schema"], schema);
    }
    // A digest is nothing but its tensors, so that scripts can go over it.
    let digests: serde_json::Value = serde_json::from_str(&ok(folder, "digest run --json")).unwrap();
    let fields = |tensor: &serde_json::Value| tensor.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert!(
        digests.as_object().unwrap().values().all(|tensor| fields(tensor) == ["dtype", "sha256", "shape"])
    );
    let output = command(folder, "ls run").env("RUST_LOG", "ckpt=loud").output().unwrap();
    assert!(output.status.success());
    expect![[r#"
        RUST_LOG `ckpt=loud` is not understood (error parsing level filter: expected one of "off", "error", "warn", "info", "debug", "trace", or a number 0-5); warnings are logged
    "#]]
    .assert_eq(&text(&output.stderr));
}

#[test]
fn a_wish_to_resume_that_cannot_be_met_is_refused_and_each_says_why() {
    let folder = with_tokens();
    let folder = folder.path();
    std::fs::create_dir(folder.join("empty")).unwrap();
    ok(folder, &format!("train {MODEL} --train-iters 4 --save run --save-interval 2"));
    let refused = |flags: &str, exit| {
        refused(folder, &format!("train {MODEL} --train-iters 4 {flags}"), exit)
            .replace(folder.to_str().unwrap(), "FOLDER")
    };
    expect![[r#"
        Error: RM4012

          × no checkpoint of step 3 in `run`; nearest: 2, 4
          help: name one of the steps there are, or `@latest`
    "#]]
    .assert_eq(&refused("--load run --ckpt-step 3 --save new", 3));
    expect![[r#"
        Error: RM4012

          × there is no folder `rnu`
          help: check the path for a typing error
    "#]]
    .assert_eq(&refused("--load rnu --save new", 3));
    expect![[r#"
        Error: RM4012

          × no checkpoint in `empty`
          help: check the folder, or start a run that saves there
    "#]]
    .assert_eq(&refused("--load empty --save new", 3));
    expect![[r#"
        Error: RM4012

          × no checkpoint in `empty`
          help: check the folder, or start a run that saves there
    "#]]
    .assert_eq(&refused("--save empty --exit-on-missing-checkpoint", 3));
    expect![[r#"
        Error: RM7003

          × `FOLDER/run` holds whole checkpoints newer than step 2: 4
          help: save to another folder, or give `--overwrite`: they are set aside, not deleted
    "#]]
    .assert_eq(&refused("--load run@2 --save run", 7));
    expect![[r#"
        Error: RM3001

          × the checkpoint and this run differ: hidden-size is 16 in the checkpoint but 32 here; kv-channels is 8 in the checkpoint but 16 here; seed is 1234 in the checkpoint but 7 here
          help: give this run the checkpoint's values, or another --save; what is a shape cannot change
    "#]].assert_eq(&refused("--save run --seed 7 --hidden-size 32", 2));
    expect![[r#"
        Error: RM3001

          × the checkpoint and this run differ: seed is 1234 in the checkpoint but 7 here
          help: to go on with the new values: --allow-change seed
    "#]]
    .assert_eq(&refused("--save run --seed 7", 2));
    let said = ok(folder, &format!("train {MODEL} --train-iters 4 --save empty --load auto"));
    assert!(said.starts_with("starting afresh, 4 steps\n"), "{said}");
}

#[test]
fn going_back_sets_newer_checkpoints_aside_when_told_to() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {MODEL} --train-iters 4 --save run --save-interval 1"));
    let before = metrics(folder, "run");
    let said =
        ok(folder, &format!("train {MODEL} --train-iters 4 --save run --ckpt-step 2 --overwrite --cp 2"));
    assert!(said.contains("L3 step 3 is bit-identical"), "{said}");
    // Step 3 was set aside and not saved again.
    let listed: serde_json::Value = serde_json::from_str(&ok(folder, "ls run --json")).unwrap();
    let state =
        |step: &serde_json::Value| (step["step"].as_u64().unwrap(), step["complete"].as_bool().unwrap());
    let steps: Vec<_> = listed["checkpoints"].as_array().unwrap().iter().map(state).collect();
    assert_eq!(steps, [(1, true), (2, true), (3, false), (4, true)]);
    assert_eq!(metrics(folder, "run")[4..], before[2..]);
}

#[test]
fn newer_checkpoints_stay_when_the_one_to_go_back_to_cannot_be_loaded() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {MODEL} --train-iters 4 --save run --save-interval 2"));
    damage_data(&folder.join("run/iter_0000002"));
    refused(folder, &format!("train {MODEL} --train-iters 4 --save run --ckpt-step 2 --overwrite"), 6);
    ok(folder, "verify run@4");
}

/// Changes one bit of a step's data, and returns the file.
fn damage_data(step: &Path) -> std::path::PathBuf {
    let pack = std::fs::read_dir(step.join("data")).unwrap().next().unwrap().unwrap().path();
    let mut bytes = std::fs::read(&pack).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&pack, bytes).unwrap();
    pack
}

#[test]
fn verifying_a_run_finds_what_is_wrong_with_its_newest_commit() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {MODEL} --train-iters 3 --save run --save-interval 1"));
    let commit = folder.join("run/iter_0000003/checkpoint.json");
    let whole = std::fs::read_to_string(&commit).unwrap();
    std::fs::write(&commit, whole.replace("\"iteration\"", "\"literation\"")).unwrap();
    for flags in ["", "--deep=false"] {
        let verified = remesh(folder, &format!("verify run {flags}"));
        assert_eq!(verified.status.code(), Some(1));
        let said = text(&verified.stdout);
        assert!(said.starts_with("BAD  step 3 is passed over (RM4021): "), "{said}");
    }
    ok(folder, "verify run@2");
    // Without its commit it is no checkpoint, only what a save left behind.
    std::fs::remove_file(commit).unwrap();
    let verified = remesh(folder, "verify run");
    assert!(verified.status.success());
    assert!(text(&verified.stderr).starts_with("step 3 is passed over (RM4020): "));
}

#[test]
fn damage_makes_an_older_step_stand_in_and_verify_names_it() {
    let folder = with_tokens();
    let folder = folder.path();
    let train =
        |iters: u32, flags: &str| format!("train {MODEL} --lr-decay-iters 6 --train-iters {iters} {flags}");
    ok(folder, &train(6, "--save straight"));
    ok(folder, &train(4, "--save run --save-interval 2"));
    let pack = damage_data(&folder.join("run/iter_0000004"));

    let verified = remesh(folder, "verify run");
    assert_eq!(verified.status.code(), Some(1));
    let said = text(&verified.stdout);
    assert!(
        said.starts_with("BAD  `") && said.contains(pack.file_name().unwrap().to_str().unwrap()),
        "{said}"
    );
    ok(folder, "verify run@2");
    ok(folder, "verify run --deep=false");

    let by_name = refused(folder, &train(6, "--save run --ckpt-step 4"), 6);
    assert!(by_name.contains("is damaged"), "{by_name}");
    let resumed = remesh(folder, &train(6, "--save run --save-interval 2"));
    let (said, noted) = (text(&resumed.stdout), text(&resumed.stderr));
    assert!(resumed.status.success(), "{noted}");
    assert!(noted.starts_with("step 4 is damaged and passed over: "), "{noted}");
    assert!(
        said.starts_with("resumed step 2 of run: ") && said.contains("L3 step 3 is bit-identical"),
        "{said}"
    );
    assert_eq!(metrics(folder, "run")[4..], metrics(folder, "straight")[2..]);
    ok(folder, "verify run@4");
}

#[test]
fn a_step_that_is_not_whole_is_passed_over_by_every_command_and_listed_with_the_reason() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {MODEL} --train-iters 4 --save run --save-interval 2"));
    std::fs::remove_file(folder.join("run/iter_0000004/checkpoint.json")).unwrap();
    expect![[r#"
        step 4 is passed over (RM4020): step 4 is incomplete: `run/iter_0000004` has no checkpoint.json
    "#]]
    .assert_eq(&text(&remesh(folder, "digest run").stderr));
    expect![[r#"
        Error: RM4020

          × step 4 is incomplete: `run/iter_0000004` has no checkpoint.json
          help: use `@latest`, which takes the newest whole step; `remesh verify` lists what is lost
    "#]]
    .assert_eq(&refused(folder, "inspect run@4", 6));
    expect!["4  not whole  RM4020: step 4 is incomplete: `run/iter_0000004` has no checkpoint.json"]
        .assert_eq(ok(folder, "ls run").lines().last().unwrap());
    let verified = remesh(folder, "verify run@4");
    assert_eq!(verified.status.code(), Some(1));
    expect![[r#"
        BAD  step 4 is incomplete: `run/iter_0000004` has no checkpoint.json
        1 faults
    "#]]
    .assert_eq(&text(&verified.stdout));
    // Where none is left, the refusal alone says why.
    std::fs::remove_file(folder.join("run/iter_0000002/checkpoint.json")).unwrap();
    let said = refused(folder, &format!("train {MODEL} --train-iters 4 --load run --save new"), 3);
    assert_eq!(said.matches("step 4 is passed over").count(), 1, "{said}");
}

#[test]
fn a_first_signal_ends_a_run_with_a_complete_save_and_75() {
    let folder = with_tokens();
    let folder = folder.path();
    let line = format!("train {MODEL} --train-iters 100000 --save run");
    let mut child = command(folder, &line).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("step 2/")));
    assert!(Command::new("kill").args(["-USR1", &child.id().to_string()]).status().unwrap().success());
    let rest: Vec<String> = lines.collect();
    assert_eq!(child.wait().unwrap().code(), Some(75));
    let [.., stopping, saved] = &rest[..] else { panic!("{rest:?}") };
    let step: u64 =
        stopping.strip_prefix("stopping after step ").unwrap().split(',').next().unwrap().parse().unwrap();
    assert!(saved.starts_with(&format!("saved step {step} to ")), "{saved}");
    assert_eq!(metrics(folder, "run").last().unwrap().step, step);
    ok(folder, &format!("verify run@{step}"));
}

#[test]
fn a_signal_ends_a_run_that_saves_nothing_with_the_signals_own_code() {
    let folder = with_tokens();
    let line = format!("train {MODEL} --train-iters 100000");
    let mut child = command(folder.path(), &line).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("step 1/")));
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    lines.for_each(drop);
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

#[test]
fn a_step_that_is_not_the_earlier_one_fails_l3_and_says_both() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {MODEL} --train-iters 2 --save run --save-interval 1"));
    let path = folder.join("run/metrics.jsonl");
    let lines = std::fs::read_to_string(&path).unwrap().replace("\"loss\":5.", "\"loss\":6.");
    std::fs::write(&path, lines).unwrap();
    let line = format!("train {MODEL} --train-iters 2 --load run@1");
    let failed = remesh(folder, &format!("{line} --save new --quiet"));
    assert!(failed.status.success());
    let said = text(&failed.stderr);
    assert!(said.starts_with("L3 step 2 FAILED: loss 5."), "{said}");
    assert!(said.contains(", but metrics.jsonl has loss 6."), "{said}");
    // Nothing of the step stays, so that no later attempt takes it for the saved run's.
    let output = remesh(folder, &format!("{line} --save strict --strict"));
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(said.starts_with("Error: RM3111\n\n  × L3 step 2 FAILED: loss 5."), "{said}");
    assert_eq!(metrics(folder, "strict"), []);
    assert_eq!(ok(folder, "ls strict"), "no checkpoints in `strict`\n");
}

#[test]
fn what_must_not_be_missed_is_on_stderr_even_when_quiet() {
    let folder = with_tokens();
    let folder = folder.path();
    std::fs::create_dir(folder.join("run")).unwrap();
    std::fs::write(folder.join("run/iter_0000002"), "in the way").unwrap();
    let output =
        remesh(folder, &format!("train {MODEL} --train-iters 3 --save run --save-interval 1 --quiet"));
    assert!(output.status.success());
    assert_eq!(text(&output.stdout), "");
    let said = text(&output.stderr);
    assert!(said.starts_with("step 2 could not be saved (RM"), "{said}");
    let output = remesh(folder, &format!("train {MODEL} --train-iters 3 --load run@1 --save new --cp 2 -q"));
    expect![[r#"
        2 per-rank random streams derived anew: the layout changed
    "#]]
    .assert_eq(&text(&output.stderr));
    std::fs::remove_file(folder.join("run/iter_0000003/checkpoint.json")).unwrap();
    let output = remesh(folder, "digest run -q");
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(0), String::new()));
    let said = text(&output.stderr);
    assert!(said.starts_with("step 3 is passed over (RM4020): "), "{said}");
}

#[test]
fn a_resume_says_that_its_schedule_has_ended_and_can_leave_it_alone() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {MODEL} --train-iters 2 --save run"));
    ok(folder, &format!("train {MODEL} --train-iters 4 --save straight"));
    let line = format!("train {MODEL} --train-iters 4 --load run");
    let output = remesh(folder, &format!("{line} --save ended -q"));
    expect![[r#"
        the learning rate stays 0 in all 2 steps that are left: the checkpoint's schedule comes down in 2 steps; --lr-decay-iters 4 spreads it over the whole run
    "#]]
    .assert_eq(&text(&output.stderr));
    let rates = |run: &str| metrics(folder, run).iter().rev().take(2).map(|line| line.lr).collect::<Vec<_>>();
    assert_eq!(rates("ended"), [0.0, 0.0]);
    for (name, flags) in [("longer", "--lr-decay-iters 4"), ("own", "--override-opt_param-scheduler")] {
        let output = remesh(folder, &format!("{line} --save {name} {flags}"));
        assert_eq!(text(&output.stderr), "", "{name}");
        assert_eq!(rates(name), rates("straight"), "{name}");
    }
    // All of it: nothing that was said then still holds.
    ok(folder, &format!("train {MODEL} --train-iters 2 --min-lr 1e-3 --save high"));
    ok(
        folder,
        &format!("{line} --save new --override-opt_param-scheduler").replace("--load run", "--load high"),
    );
    assert_eq!(rates("new"), rates("straight"));
}

#[test]
fn less_than_the_whole_state_is_said_and_no_level_is_claimed() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {MODEL} --train-iters 4 --save run --save-interval 2"));
    let line = format!("train {MODEL} --train-iters 4 --load run@2 --save new --no-load-optim");
    let said = ok(folder, &line);
    assert!(said.contains(", verified what was loaded\n"), "{said}");
    assert!(said.contains("L3 step 3 not expected: not restored: optimizer"), "{said}");
    let said = refused(folder, &format!("{} --strict", line.replace("--save new", "--save strict")), 1);
    assert!(said.contains("RM3110"), "{said}");
    let line =
        format!("train {MODEL} --train-iters 4 --load run@2 --save streams --cp 2 --rng-policy strict");
    assert!(refused(folder, &line, 2).contains("RM3102"));
    let said = ok(folder, &format!("train {MODEL} --train-iters 1 --load run --save tuned --finetune"));
    assert!(said.starts_with("step 0 with weights of step 4 of run: "), "{said}");
    assert!(said.contains("\nstep 1/1  "), "{said}");
}

/// Values that no step can use end a run, and the last save stays.
#[test]
fn steps_that_are_not_finite_end_a_run() {
    let folder = with_tokens();
    let folder = folder.path();
    let line = format!(
        "train {MODEL} --train-iters 9 --lr 1e30 --save run --save-interval 1 --max-skipped-in-a-row 2"
    );
    let output = remesh(folder, &line);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    assert!(text(&output.stderr).contains("RM3201"));
    assert!(text(&output.stdout).contains("skipped, nothing was updated"));
    ok(folder, "verify run");
}

#[test]
fn a_plan_leads_with_what_a_change_of_layout_really_does() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {MODEL} --train-iters 1 --weight-shards 2 --nproc-per-node 4 --save run"));
    // CP instead of DP, and sequence shards instead of batch shards: nobody holds anything else.
    expect![[r#"
        step 1 of run: resume in place: 0 B to move

                               saved  target
          world size           4      4       same
          TP                   1      1       same
          PP                   1      1       same
          weight shards        2      2       same
          configured CP        1      2       changed
          DP                   2      1       changed
          weight replicas      2      2       same
          GTP sequence shards  1      2       changed
          runtime CP           1      4       changed
          batch parallel size  4      1       changed
          microbatches a step  1      4       changed

          reading    158.0 KiB by all ranks, 71.4 KiB by one at most
          data       next sample 4, in the same order
          random     axes have other sizes: every rank derives its random streams anew; dropout and data order do not use them
          exactness  losses equal those of the run that never stopped, bit for bit

          tensor-model-parallel-size 1 (built-in default)
          pipeline-model-parallel-size 1 (built-in default)
          context-parallel-size 2 (command line)
          sequence-parallel off (built-in default)
          tensor-parallel-num-weight-shards 2 (command line)
          tensor-parallel-num-sequence-shards 2 (command line)
          data-parallel-size 1 = world size 4 ÷ (TP 1 × PP 1 × CP 2 × GTP 2)
          rank-order gtp-inside-cp (built-in default)
          seq-length 32 (checkpoint)
          micro-batch-size 1 (checkpoint)
          global-batch-size 4 (checkpoint)
          GTP degree 2 = weight shards 2 ÷ TP 1
          SP degree 1 = 1 without SP
          GTP sequence shards 2 = sequence shards 2 ÷ SP degree 1
          GTP batch shards 1 = GTP degree 2 ÷ 2 GTP sequence shards
          runtime CP 4 = configured CP 2 × 2 GTP sequence shards
          batch parallel size 1 = DP 1 × 1 GTP batch shards
          weight replicas 2 = configured CP 2 × DP 1
          microbatches 4 = global batch size 4 ÷ (micro batch size 1 × batch parallel size 1)
    "#]]
    .assert_eq(&ok(folder, "plan run --weight-shards 2 --seq-shards 2 --cp 2"));
    let said = ok(folder, "plan run --tp 2 --sp --json");
    let plan: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(plan["schema"], "remesh.plan/1");
    assert_eq!(plan["resume_in_place"], false);
    assert!(plan["bytes"]["moved"].as_u64().unwrap() > 0);
    assert_eq!(plan["resume"]["exact"], true);
    assert_eq!(plan["saved"]["gtp"], 2);
    assert_eq!(plan["target"]["tp"], 2);
    refused(folder, "plan run --tp 3 --world-size 3", 2);
    // What cannot be trained can be loaded all the same.
    for (layout, refusal) in [("--tp 4 --world-size 4", "RM2003"), ("--cp 16 --world-size 16", "RM2030")] {
        let planned: serde_json::Value =
            serde_json::from_str(&ok(folder, &format!("plan run {layout} --json"))).unwrap();
        assert_eq!(planned["resume"]["refused"]["code"], refusal);
        assert_eq!(planned["resume"]["exact"], false);
    }
    let said = ok(folder, "plan run --tp 4 --world-size 4");
    let line = said.lines().find(|line| line.starts_with("  note ")).unwrap();
    expect!["  note     cannot be trained: RM2003 TP 4 does not divide the 2 query groups: 2 % 4 != 0 (`decoder.layers.*.self_attention.linear_qkv.weight`); pick a TP size that divides the query groups: 1, 2"].assert_eq(line);
}

#[test]
fn the_demonstration_shows_the_same_run_four_times() {
    let folder = tempfile::tempdir().unwrap();
    let said: serde_json::Value = serde_json::from_str(&ok(folder.path(), "demo --json")).unwrap();
    assert_eq!(said["equal"], true);
    let steps = said["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 10);
    assert!(
        steps[5..].iter().all(|row| row["resumed"].as_array().unwrap() == &vec![row["straight"].clone(); 3])
    );
}
