//! `plan` and `demo`.

use super::{MODEL, ok, refused, with_tokens};
use expect_test::expect;

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
          microbatches a step  1      4       changed

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
    ok(folder, "plan run --pp 2 --pipeline-model-parallel-layout Et|L");
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
    let resume = |flags: &str| -> serde_json::Value {
        let plan: serde_json::Value =
            serde_json::from_str(&ok(folder, &format!("plan run {flags} --json"))).unwrap();
        plan["resume"].clone()
    };
    assert_eq!(resume("")["exact"], true);
    let elsewhere = resume("--cp 2 --world-size 2");
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
    let said = ok(folder, "plan run@1 --world-size 4 --json");
    let plan: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(plan["resume"]["refused"]["code"], "RM2002", "{said}");
}
