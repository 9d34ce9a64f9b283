//! Where a run goes on from, and what the resume proves.

use super::{MODEL, damage_data, metrics, ok, refused, remesh, text, with_tokens};
use expect_test::expect;

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
        assert_eq!(
            lines.next().unwrap(),
            "L3 step 3 equals the saved run's, bit for bit: loss, gradient norm and learning rate"
        );
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
    assert!(
        said.contains(
            "L3 step 4 is expected to equal the saved run's; metrics.jsonl has no line of it to compare with"
        ),
        "{said}"
    );
    ok(folder, &format!("train {flags} --train-iters 4 --save straight"));
    assert_eq!(metrics(folder, "run"), metrics(folder, "straight"));
    // Nothing is left to do, and nothing is done.
    let output = remesh(folder, &format!("train {flags} --train-iters 4 --save run"));
    assert!(output.status.success());
    assert_eq!(text(&output.stderr), "nothing to train: 4 of 4 steps done\n");
    assert_eq!(metrics(folder, "run").len(), 4);
}

#[test]
fn a_place_is_the_same_however_it_is_written() {
    let folder = with_tokens();
    let folder = folder.path();
    let line = format!("train {MODEL} --lr-decay-iters 9 --save run --train-iters");
    let said = ok(folder, &format!("{line} 1 --load ./run/"));
    assert!(said.starts_with("starting afresh, 1 step\n"), "{said}");
    let url = format!("file://{}/./run/", folder.display());
    let said = ok(folder, &format!("{line} 2 --load {url}"));
    assert!(said.starts_with("resumed step 1 of run: "), "{said}");
    ok(folder, &format!("train {MODEL} --train-iters 1 --save run@5"));
    assert_eq!(ok(folder, "digest run@5"), ok(folder, "digest run@5@1"));
    // Found while it is loaded, so another step stands in, and the damaged one is in nobody's way.
    damage_data(&folder.join("run/iter_0000002"));
    let said = ok(folder, &format!("{line} 2 --load {url}@latest"));
    assert!(said.starts_with("resumed step 1 of "), "{said}");
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
          help: to go on from step 4, leave out what names another start (--load, --ckpt-step, --finetune); else save to another folder, or give `--overwrite`: they are set aside, not deleted
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
    // A shape, although the blocks of TP do not fit it either.
    expect![[r#"
        Error: RM3001

          × the checkpoint and this run differ: num-query-groups is 2 in the checkpoint but 1 here
          help: give this run the checkpoint's values, or another --save; what is a shape cannot change
    "#]]
    .assert_eq(&refused("--save run --num-query-groups 1", 2));
    let said = ok(folder, &format!("train {MODEL} --train-iters 4 --save empty --load auto"));
    assert!(said.starts_with("starting afresh, 4 steps\n"), "{said}");
}

/// The index is the same, and so is the length: only the tokens tell.
#[test]
fn other_tokens_under_the_same_index_are_refused_or_said() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {MODEL} --train-iters 2 --save run"));
    let mut tokens = std::fs::read(folder.join("tokens.bin")).unwrap();
    // Not of the last document's end.
    let end = tokens.len() - 2;
    tokens[..end].rotate_left(2);
    std::fs::write(folder.join("tokens.bin"), tokens).unwrap();
    let line = format!("train {MODEL} --train-iters 3 --lr-decay-iters 3 --load run --save new");
    let said = refused(folder, &line, 2);
    assert!(said.contains("RM3001") && said.contains("data is 125 samples of index "), "{said}");
    assert!(said.contains("--allow-change data"), "{said}");
    let said = ok(folder, &format!("{line} --allow-change data"));
    assert!(said.contains(", verified L0\n"), "{said}");
    assert!(
        said.contains("L3 step 3 is not expected to equal the saved run's: other data, schedule "),
        "{said}"
    );
}

#[test]
fn going_back_sets_newer_checkpoints_aside_when_told_to() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {MODEL} --train-iters 4 --save run --save-interval 1"));
    let before = metrics(folder, "run");
    let said =
        ok(folder, &format!("train {MODEL} --train-iters 4 --save run --ckpt-step 2 --overwrite --cp 2"));
    assert!(
        said.contains("L3 step 3 equals the saved run's, bit for bit: loss, gradient norm and learning rate"),
        "{said}"
    );
    // Step 3 was set aside and not saved again.
    let listed: serde_json::Value = serde_json::from_str(&ok(folder, "ls run --json")).unwrap();
    let state =
        |step: &serde_json::Value| (step["step"].as_u64().unwrap(), step["complete"].as_bool().unwrap());
    let steps: Vec<_> = listed["checkpoints"].as_array().unwrap().iter().map(state).collect();
    assert_eq!(steps, [(1, true), (2, true), (3, false), (4, true)]);
    assert_eq!(metrics(folder, "run")[4..], before[2..]);
}

#[test]
fn the_folder_of_a_megatron_run_is_nowhere_to_save() {
    let folder = with_tokens();
    let folder = folder.path();
    std::fs::create_dir(folder.join("run")).unwrap();
    std::fs::write(folder.join("run/latest_checkpointed_iteration.txt"), "100").unwrap();
    let said = refused(folder, &format!("train {MODEL} --train-iters 1 --save run"), 7);
    assert!(said.contains("RM7005") && said.contains("/run` is the folder of a run of Megatron"), "{said}");
    assert!(!folder.join("run/iter_0000001").exists());
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

/// Of 100 steps, at the 50th: what the checkpoint has is kept, and what flags say goes over it, all of it or what they name.
#[test]
fn a_rising_weight_decay_goes_on_or_is_said_anew() {
    let folder = with_tokens();
    let folder = folder.path();
    let rises = |from, to| {
        format!("--weight-decay-incr-style linear --start-weight-decay {from} --end-weight-decay {to}")
    };
    let line =
        |iters: u32, flags: &str| format!("train {MODEL} --lr-decay-iters 100 --train-iters {iters} {flags}");
    let rising = rises(0.01, 0.1);
    ok(folder, &line(100, &format!("{rising} --save straight --save-interval 50")));
    let said = ok(folder, &line(51, "--load straight@50 --save kept"));
    assert!(said.contains("L3 step 51 equals the saved run's, bit for bit"), "{said}");
    let digest = |run: &str| ok(folder, &format!("digest {run}@51"));
    // Half of the way from 0.01 to 0.1.
    ok(folder, &line(51, "--load straight@50 --save constant --weight-decay 0.055"));
    assert_eq!(digest("kept"), digest("constant"));
    ok(folder, &line(100, "--load straight@50 --save to-the-end"));
    assert_eq!(ok(folder, "digest to-the-end"), ok(folder, "digest straight"));

    let said = ok(folder, &line(51, "--load straight@50 --save flat --weight-decay 0.2"));
    let named = "not expected to equal the saved run's: other schedule (end_weight_decay 0.1 → 0.2, start_weight_decay 0.01 → 0.2, \
                 weight_decay_style \"linear\" → \"constant\") than in the checkpoint";
    assert!(said.contains(named), "{said}");
    assert_ne!(digest("flat"), digest("kept"));
    let anew = format!("--load straight@50 --override-opt_param-scheduler {}", rises(0.2, 0.2));
    ok(folder, &line(51, &format!("{anew} --save anew")));
    assert_eq!(digest("anew"), digest("flat"));
}

/// Ten updates are behind step 10: in its name, in its record, and in what the eleventh is.
#[test]
fn a_checkpoint_is_named_after_the_updates_behind_it() {
    let folder = with_tokens();
    let folder = folder.path();
    let line = |iters: u32, run: &str| {
        format!("train {MODEL} --lr-decay-iters 15 --train-iters {iters} --save {run}")
    };
    ok(folder, &line(10, "run"));
    let inspected: serde_json::Value = serde_json::from_str(&ok(folder, "inspect run@10 --json")).unwrap();
    let commit = &inspected["commit"];
    assert!(folder.join("run/iter_0000010/checkpoint.json").exists());
    assert_eq!((&inspected["step"], &commit["iteration"]), (&10.into(), &10.into()));
    let counters = serde_json::json!({
        "consumed_train_samples": 40, "skipped_train_samples": 0, "consumed_valid_samples": 0, "optimizer_steps": 10, "tokens": 1280,
    });
    assert_eq!(commit["counters"], counters);
    assert_eq!(commit["random"]["ordinal"], 40);
    ok(folder, &line(12, "run"));
    ok(folder, &line(15, "run"));
    ok(folder, &line(15, "straight"));
    assert_eq!(metrics(folder, "run"), metrics(folder, "straight"));
    assert_eq!(metrics(folder, "run")[10].step, 11);
    assert_eq!(ok(folder, "digest run"), ok(folder, "digest straight"));
}

/// Every chunk of the optimizer is damaged: who does not ask for it never sees it, and who does is told.
#[test]
fn what_is_not_asked_for_is_not_read() {
    use std::os::unix::fs::FileExt;
    let folder = with_tokens();
    let folder = folder.path();
    let line = format!("train {MODEL} --train-iters 2 --save run --save-interval 1");
    ok(folder, &line);
    std::fs::remove_dir_all(folder.join("run/iter_0000002")).unwrap();
    let checkpoint = ckpt::Store::open(folder.join("run").to_str().unwrap()).unwrap().checkpoint(1).unwrap();
    let catalog = checkpoint.catalog();
    let of_optimizer = |tensor: &&ckpt::StoredTensor| tensor.kind == mesh::StateKind::Optimizer;
    for chunk in catalog.tensors().iter().filter(of_optimizer).flat_map(|tensor| &tensor.chunks) {
        let pack = folder.join("run/iter_0000001").join(&catalog.objects()[chunk.object].path);
        let pack = std::fs::OpenOptions::new().read(true).write(true).open(pack).unwrap();
        let mut byte = [0];
        pack.read_exact_at(&mut byte, chunk.offset).unwrap();
        pack.write_all_at(&[!byte[0]], chunk.offset).unwrap();
    }
    let line = format!("train {MODEL} --train-iters 2 --load run@1 --tp 2");
    for flags in ["--no-load-optim --save moments", "--finetune --save weights"] {
        let said = ok(folder, &format!("{line} {flags}"));
        assert!(said.contains("verified what was loaded"), "{said}");
    }
    let said = refused(folder, &format!("{line} --save all"), 6);
    assert!(said.contains("RM4021") && said.contains("`optimizer.state.exp_avg"), "{said}");
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
        the learning rate is 0 in the last 2 steps: the checkpoint's schedule comes down in 2 steps; --lr-decay-iters 4 spreads it over the whole run
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
    assert!(
        said.contains("L3 step 3 is not expected to equal the saved run's: not restored: optimizer"),
        "{said}"
    );
    // Later checkpoints know it, too, also when the run was taken up again.
    let train = |iters: u32| format!("train {MODEL} --train-iters {iters} --save new");
    ok(folder, &train(5));
    let inspected: serde_json::Value = serde_json::from_str(&ok(folder, "inspect new@5 --json")).unwrap();
    assert_eq!(inspected["commit"]["partial"], serde_json::json!(["moments, fresh at step 2"]));
    let said = refused(folder, &format!("{} --strict", line.replace("--save new", "--save strict")), 1);
    assert!(said.contains("RM3110"), "{said}");
    let line =
        format!("train {MODEL} --train-iters 4 --load run@2 --save streams --cp 2 --rng-policy strict");
    assert!(refused(folder, &line, 2).contains("RM3102"));
    let said = ok(folder, &format!("train {MODEL} --train-iters 1 --load run --save tuned --finetune"));
    assert!(said.starts_with("step 0 with weights of step 4 of run: "), "{said}");
    assert!(said.contains("\nstep 1/1  "), "{said}");
    // The shapes are the same, and the rows of the fused matrix would mean something else.
    for (flags, difference) in [
        ("--num-attention-heads 4", "num-attention-heads is 2 in the checkpoint but 4 here"),
        ("--num-attention-heads 1", "num-attention-heads is 2 in the checkpoint but 1 here"),
        ("--rotary-base 10", "rotary-base is 10000 in the checkpoint but 10 here"),
    ] {
        let model = MODEL.replace("--num-attention-heads 2", "");
        let heads = if flags.contains("heads") { "" } else { "--num-attention-heads 2" };
        let line =
            format!("train {model} {heads} {flags} --train-iters 1 --load run --save other --finetune");
        let said = refused(folder, &line, 2);
        assert!(said.contains("RM3001") && said.contains(difference), "{said}");
    }
    ok(
        folder,
        &format!(
            "train {MODEL} --rotary-base 10 --train-iters 1 --load run --finetune --allow-change rotary-base"
        ),
    );
}

#[test]
fn a_run_is_not_saved_inside_a_step() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {MODEL} --train-iters 1 --save run"));
    for flags in ["--save run/iter_0000001", "--load run/iter_0000001 --save run/iter_0000001"] {
        let said = refused(folder, &format!("train {MODEL} --train-iters 2 {flags}"), 2);
        assert!(said.contains("RM6003") && said.contains("is the folder of a step"), "{said}");
    }
    let inside =
        std::fs::read_dir(folder.join("run/iter_0000001")).unwrap().map(|file| file.unwrap().file_name());
    assert!(inside.into_iter().all(|name| name != "metrics.jsonl"));
}

#[test]
fn fast_numerics_and_bf16_are_kept_by_a_resume_which_expects_equal_bits_under_the_same_layout_alone() {
    let folder = with_tokens();
    let folder = folder.path();
    let line = format!("train {MODEL} --train-iters 4");
    ok(folder, &format!("{line} --numerics fast --bf16 --save run --save-interval 2"));
    let said = ok(folder, &format!("{line} --load run@2 --save same"));
    assert!(said.contains("L3 step 3 equals the saved run's, bit for bit"), "{said}");
    assert_eq!(metrics(folder, "same"), metrics(folder, "run")[2..]);
    let said = ok(folder, &format!("{line} --load run@2 --save other --tp 2 --strict"));
    assert!(
        said.contains(
            "is not expected to equal the saved run's: other layout (fast numerics) than in the checkpoint"
        ),
        "{said}"
    );
    expect![[r#"
        Error: RM3001

          × the checkpoint and this run differ: precision is bf16 in the checkpoint but fp32 here
          help: give this run the checkpoint's values, or another --save; what is a shape cannot change
    "#]]
    .assert_eq(&refused(folder, &format!("{line} --load run@2 --save other --fp32"), 2));
}

/// Lines that another branch left in the file prove nothing about this one.
#[test]
fn the_first_step_is_compared_with_the_run_that_saved_the_checkpoint() {
    let folder = with_tokens();
    let folder = folder.path();
    let train = |iters: u32, flags: &str| {
        format!("train {MODEL} --lr-decay-iters 8 --train-iters {iters} --save run --save-interval 2 {flags}")
    };
    ok(folder, &train(4, ""));
    // Back to step 2 with another rate, and stopped in the middle: lines of steps 3 to 5, whose checkpoint is then lost.
    ok(folder, &train(5, "--ckpt-step 2 --overwrite --lr 3e-3"));
    std::fs::remove_dir_all(folder.join("run/iter_0000005")).unwrap();
    std::fs::remove_dir_all(folder.join("run/iter_0000004")).unwrap();
    let said = ok(folder, &train(3, "--strict"));
    assert!(said.contains("L3 step 3 equals the saved run's, bit for bit"), "{said}");
    let lines = std::fs::read_to_string(folder.join("run/metrics.jsonl")).unwrap();
    let runs: std::collections::BTreeSet<String> = lines
        .lines()
        .map(|line| {
            serde_json::from_str::<serde_json::Value>(line).unwrap()["run"].as_str().unwrap().to_owned()
        })
        .collect();
    assert_eq!(runs.len(), 3, "each run's lines have its name");
}

#[test]
fn a_longer_run_is_told_where_the_stored_schedule_ends() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {MODEL} --train-iters 4 --save run --save-interval 2"));
    std::fs::remove_dir_all(folder.join("run/iter_0000004")).unwrap();
    let resume = |flags: &str| text(&remesh(folder, &format!("train {MODEL} --load run {flags} -q")).stderr);
    let said = resume("--train-iters 6");
    assert!(
        said.starts_with(
            "the learning rate is 0 in the last 2 steps: the checkpoint's schedule comes down in 4"
        ),
        "{said}"
    );
    assert_eq!(resume("--train-iters 4"), "");
    assert_eq!(resume("--train-iters 6 --lr-decay-iters 6"), "");
}

/// 257 ids on four ranks: the last one's piece of the vocabulary is padding alone.
#[test]
fn a_rank_that_holds_nothing_of_a_tensor_resumes() {
    let folder = with_tokens();
    let folder = folder.path();
    for precision in ["--fp32", "--bf16"] {
        let train = |iters: u32, flags: &str| {
            format!(
                "train {MODEL} --num-attention-heads 4 --lr-decay-iters 4 --train-iters {iters} {precision} {flags}"
            )
        };
        ok(folder, &train(4, &format!("--save straight{precision}")));
        ok(folder, &train(2, &format!("--save run{precision} --tp 4")));
        ok(folder, &train(3, &format!("--save run{precision} --tp 4 --strict")));
        ok(folder, &train(4, &format!("--save run{precision} --weight-shards 4 --strict")));
        let [run, straight] =
            ["run", "straight"].map(|run| ok(folder, &format!("digest {run}{precision} --json")));
        assert_eq!(run, straight);
    }
}

#[test]
fn iterations_to_skip_are_part_of_what_goes_on() {
    let folder = with_tokens();
    let folder = folder.path();
    let train = |flags: &str| format!("train {MODEL} --train-iters 6 --save-interval 2 {flags}");
    ok(folder, &train("--iterations-to-skip 2 4 --save run"));
    let straight = metrics(folder, "run");
    std::fs::remove_dir_all(folder.join("run/iter_0000006")).unwrap();
    std::fs::remove_dir_all(folder.join("run/iter_0000004")).unwrap();
    let stderr = refused(folder, &train("--save run"), 2);
    assert!(
        stderr.contains("iterations-to-skip") && stderr.contains("2, 4") && stderr.contains("none"),
        "{stderr}"
    );
    // The first step that is made is compared, with the line that the saved run has for it.
    let said = ok(folder, &train("--iterations-to-skip 2 4 --save run --strict"));
    assert!(said.contains("L3 step 4 equals the saved run's, bit for bit"), "{said}");
    assert_eq!(metrics(folder, "run")[straight.len()..], straight[2..]);
    // What is over may be forgotten.
    ok(folder, &train("--save run").replace("--train-iters 6", "--train-iters 7"));
    let other = ok(
        folder,
        &train("--iterations-to-skip 3 --allow-change iterations-to-skip --load run@2 --save other"),
    );
    assert!(other.contains(", verified L0") && other.contains("iterations-to-skip"), "{other}");
}

/// Masters are the weights of a bf16 run, with all their digits: who leaves moments behind keeps them.
#[test]
fn masters_are_no_moments() {
    let folder = with_tokens();
    let folder = folder.path();
    let model = MODEL.replace("--lr 1e-2", "");
    ok(folder, &format!("train {model} --lr 1e-2 --bf16 --train-iters 2 --save a"));
    let still = "--lr 0 --min-lr 0 --weight-decay 0 --bf16";
    ok(folder, &format!("train {model} {still} --train-iters 3 --load a --save b --no-load-optim"));
    ok(folder, &format!("train {model} {still} --train-iters 1 --load a --save c --finetune"));
    let masters = |run: &str| -> Vec<String> {
        let said = ok(folder, &format!("digest {run}"));
        said.lines().filter(|line| line.contains("optimizer.state.param.")).map(str::to_owned).collect()
    };
    assert!(!masters("a").is_empty());
    assert_eq!(masters("a"), masters("b"));
    assert_eq!(masters("a"), masters("c"));
}

#[test]
fn what_is_set_aside_or_contradicts_itself_is_said() {
    let folder = with_tokens();
    let folder = folder.path();
    let train = |flags: &str| format!("train {MODEL} --save-interval 2 --lr-decay-iters 8 {flags}");
    ok(folder, &train("--train-iters 6 --save run"));
    let output = remesh(folder, &train("--train-iters 4 --load run@2 --save run --overwrite -q"));
    assert_eq!(
        text(&output.stderr),
        "set aside in RUN, as asked: steps 4, 6\n".replace("RUN", &folder.join("run").display().to_string())
    );
    let stderr = refused(folder, &train("--train-iters 6 --load run@2 --ckpt-step 4 --save new"), 2);
    assert!(stderr.contains("`--ckpt-step 4` and `--load run@2` name two steps"), "{stderr}");
    refused(folder, &train("--train-iters 6 --finetune --save new"), 3);
}
