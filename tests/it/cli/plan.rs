//! `plan` and `demo`.

use super::{MODEL, ok, refused, remesh, text, with_tokens};
use expect_test::expect;
use serde_json::{Value, json};
use std::path::Path;

/// What `plan` says of a resume with these flags. It ends with 2 if the resume cannot be.
fn resume(folder: &Path, flags: &str) -> Value {
    let output = remesh(folder, &format!("plan {flags} --json"));
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    let expected = if plan["resume"]["refused"].is_null() { 0 } else { 2 };
    assert_eq!(output.status.code(), Some(expected), "{flags}: {}", text(&output.stderr));
    plan["resume"].clone()
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
          SP degree            1      1       same
          PP                   1      1       same
          weight shards        2      2       same
          configured CP        1      2       changed
          DP                   2      1       changed
          weight replicas      2      2       same
          GTP sequence shards  1      2       changed
          runtime CP           1      4       changed
          batch parallel size  4      1       changed
          microbatches next    1      4       changed

          reading    207.0 KiB by all ranks, 111.5 KiB by one at most
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
    assert_eq!(plan["fold"]["cp"], 1);
    refused(folder, "plan run --tp 3 --world-size 3", 2);
    // Sequence shards inside GTP could be CP; one layer is not for two stages, unless one of them has none.
    let said = ok(folder, "plan run --weight-shards 4 --seq-shards 4");
    let line = said.lines().find(|line| line.starts_with("  fold ")).unwrap();
    assert!(line.ends_with("  CP 4 folded into weight groups of 4: optimizer state that GTP does not cut takes 96 B a rank there, 384 B here"), "{line}");
    expect![[r#"
        Error: RM2009

          × layers 1 ÷ 2 is not exact
          help: `--pipeline-model-parallel-layout 'Et|L'` works
    "#]]
    .assert_eq(&refused(folder, "plan run --pp 2", 2));
    // What cannot be trained can be loaded all the same.
    for (layout, refusal) in [
        ("--tp 4 --world-size 4", "RM2003"),
        ("--cp 16 --world-size 16", "RM2030"),
        ("--pp 2 --pipeline-model-parallel-layout Et|L", "RM2032"),
    ] {
        let planned = resume(folder, &format!("run {layout}"));
        assert_eq!(planned["refused"]["code"], refusal);
        assert_eq!(planned["exact"], false);
    }
    assert!(
        refused(folder, "plan run --tp 4 --world-size 4 -q", 2).starts_with("cannot be trained: RM2003 ")
    );
    let said = text(&remesh(folder, "plan run --tp 4 --world-size 4").stdout);
    let line = said.lines().find(|line| line.starts_with("  note ")).unwrap();
    expect!["  note     cannot be trained: RM2003 TP 4 does not divide the 2 query groups: 2 % 4 != 0 (`decoder.layers.*.self_attention.linear_qkv.weight`); pick a TP size that divides the query groups: 1, 2"].assert_eq(line);
}

/// A plan of no layout is the layout as it is.
#[test]
fn without_layout_flags_the_saved_layout_is_planned() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {MODEL} --train-iters 1 --tp 2 --sp --cp 2 --weight-shards 4 --save run"));
    for flags in ["", "--mbs 2"] {
        let plan: serde_json::Value =
            serde_json::from_str(&ok(folder, &format!("plan run --json {flags}"))).unwrap();
        assert_eq!(plan["target"], plan["saved"], "{flags}");
        assert_eq!(plan["sp_degree"], serde_json::json!({ "saved": 2, "target": 2 }), "{flags}");
        assert_eq!(plan["resume_in_place"], true, "{flags}");
    }
}

/// Frames are 256 KiB, so that some ranks read more than they want. Fast numerics pad the vocabulary to a multiple of TP,
/// so that its rows are divided otherwise than they were saved.
#[test]
fn a_plan_tells_the_bytes_that_the_resume_then_reads() {
    let folder = with_tokens();
    let folder = folder.path();
    let model = MODEL.replace("--hidden-size 16", "--hidden-size 512");
    let fast = format!("{model} --numerics fast");
    ok(folder, &format!("train {model} --train-iters 1 --dp 2 --nproc-per-node 2 --save run"));
    ok(folder, &format!("train {fast} --train-iters 1 --dp 2 --nproc-per-node 2 --save fast"));
    let canonical = ["--tp 2 --sp", "--weight-shards 4", "--cp 2"].map(|layout| ("run", &model, layout));
    for (run, model, layout) in canonical.into_iter().chain([("fast", &fast, "--tp 2 --sp")]) {
        let plan: serde_json::Value =
            serde_json::from_str(&ok(folder, &format!("plan {run} --json {layout}"))).unwrap();
        let run = ok(folder, &format!("train {model} --train-iters 2 --load {run} --json {layout}"));
        let resumed: serde_json::Value = serde_json::from_str(run.lines().next().unwrap()).unwrap();
        assert_eq!(resumed["event"], "resumed", "{layout}");
        assert_eq!(plan["target"], resumed["layout"], "the same flags are the same job");
        assert_eq!(plan["bytes_read"], resumed["bytes"], "{layout}");
        assert!(plan["bytes_read"].as_u64() > plan["bytes"]["wanted"].as_u64(), "{layout}");
    }
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

/// As `train` says of its first step, in advance.
#[test]
fn fast_numerics_are_exact_under_the_layout_that_they_were_saved_with_alone() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {MODEL} --train-iters 1 --numerics fast --save run"));
    assert_eq!(resume(folder, "run")["exact"], true);
    let elsewhere = resume(folder, "run --cp 2 --world-size 2");
    assert_eq!(elsewhere["exact"], false);
    assert_eq!(elsewhere["reasons"][0], "fast numerics add in another order under another layout");
}

/// Two samples a step at first: four data parallel ranks can train the later steps only.
#[test]
fn a_batch_that_does_not_divide_under_the_layout_is_refused_by_the_plan_too() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(
        folder,
        &format!("train {MODEL} --rampup-batch-size 2 2 8 --train-iters 4 --save run --save-interval 1"),
    );
    let refused = |flags: &str| resume(folder, flags)["refused"]["code"].clone();
    assert_eq!(refused("run@1 --world-size 4"), "RM2002");
    // The run is at its end: what it takes if it goes on, in steps of 6 and of 8.
    ok(folder, &format!("train {MODEL} --rampup-batch-size 2 2 8 --train-iters 2 --save short"));
    assert_eq!(refused("short --world-size 4"), "RM2002");
    assert_eq!(refused("run --world-size 4"), Value::Null);
    let plan: Value = serde_json::from_str(&ok(folder, "plan run@1 --world-size 2 --json")).unwrap();
    assert_eq!(plan["microbatches"], json!({ "saved": 2, "target": 1 }));
}

/// What `train` takes of the batch, what it evaluates, and what it refuses unless it is allowed to change.
#[test]
fn a_plan_takes_batches_as_train_does() {
    let folder = with_tokens();
    let folder = folder.path();
    let model = MODEL.replace("--global-batch-size 4", "--global-batch-size 7");
    let decreased =
        format!("{model} --decrease-batch-size-if-needed --eval-iters 1 --valid-data-path tokens");
    ok(folder, &format!("train {decreased} --train-iters 2 --nproc-per-node 3 --save run"));
    assert_eq!(resume(folder, "run --world-size 3")["exact"], true);
    let alone = resume(folder, "run --world-size 1");
    assert_eq!(alone["exact"], false);
    assert_eq!(alone["reasons"], json!(["the layout takes 7 of the global batch, and took 6"]));
    assert_eq!(resume(folder, "run --world-size 5")["refused"], Value::Null, "of 7 it takes 5");

    let evaluated = format!("{MODEL} --eval-iters 1 --eval-global-batch-size 2 --valid-data-path tokens");
    ok(folder, &format!("train {evaluated} --train-iters 1 --nproc-per-node 2 --save evaluated"));
    let refused = resume(folder, "evaluated --world-size 4")["refused"].clone();
    assert_eq!(refused["help"], "make `--eval-global-batch-size` a multiple of 4");

    for (flags, changed) in [
        ("--global-batch-size 8", "global-batch-size"),
        ("--seq-length 64", "seq-length,data"),
        ("--canonical-leaf-tokens 1", "numerics"),
    ] {
        let refused = resume(folder, &format!("evaluated {flags}"))["refused"].clone();
        assert_eq!(refused["code"], "RM3001");
        let help = format!("to go on with the new values: --allow-change {changed}");
        assert!(refused["help"].as_str().unwrap().ends_with(&help), "{refused}");
        let allowed = resume(folder, &format!("evaluated {flags} --allow-change {changed}"));
        assert_eq!(allowed["refused"], Value::Null);
        assert_eq!(allowed["exact"], false);
    }
}
