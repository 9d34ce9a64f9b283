//! How a run goes on and ends.

use super::{MODEL, command, metrics, ok, refused, remesh, text, with_tokens};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

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
    assert!(said.contains("epoch 0 ended; 4 samples left unused, too few for a batch\n"), "{said}");
    // An iteration that is passed over ends an epoch like any other.
    let flags =
        "--global-batch-size 6 --train-iters 3 --epoch-tail drop --iterations-to-skip 1 --save skipped";
    let said = ok(folder, &format!("train {model} {flags}"));
    let passed_over =
        "step 2 passed over, as asked\nepoch 1 ended; 4 samples left unused, too few for a batch\n";
    assert!(said.contains(passed_over), "{said}");
    assert_eq!(run("pad", 12, 3).1, [10, 20, 30]);
    assert_eq!(run("span", 6, 5).1, [6, 12, 18, 24, 30]);
}

#[test]
fn a_first_signal_ends_a_run_with_a_complete_save_and_75() {
    let folder = with_tokens();
    let folder = folder.path();
    let line = format!("train {MODEL} --train-iters 100000 --save run");
    let mut child = command(folder, &line).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("step 2/")));
    send("-USR1", &child.id().to_string());
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
    send("-TERM", &child.id().to_string());
    lines.for_each(drop);
    assert_eq!(child.wait().unwrap().code(), Some(143));
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

/// 10 samples a step are asked for: 3 lanes of 2 take 6 of them, 2 lanes 8, and one lane all.
#[test]
fn a_batch_that_does_not_divide_may_be_decreased_and_what_is_left_out_is_counted() {
    let folder = with_tokens();
    let folder = folder.path();
    let model = MODEL
        .replace("--micro-batch-size 1 --global-batch-size 4", "--micro-batch-size 2 --global-batch-size 10");
    let line = format!("train {model} --decrease-batch-size-if-needed --save run --save-interval 1");
    assert!(refused(folder, &format!("train {model} --train-iters 1 --dp 3"), 2).contains("RM2002"));
    ok(folder, &format!("{line} --train-iters 2 --dp 3"));
    let said = ok(folder, &format!("{line} --train-iters 3 --dp 2"));
    assert!(said.contains("verified L0"), "{said}");
    assert!(
        said.contains("the next samples are others: what the layout takes of the global batch changed"),
        "{said}"
    );
    ok(folder, &format!("{line} --train-iters 4"));
    let consumed: Vec<u64> = metrics(folder, "run").iter().map(|line| line.consumed_samples).collect();
    assert_eq!(consumed, [6, 12, 20, 30]);
    let counters = |step: u32| {
        let inspected: serde_json::Value =
            serde_json::from_str(&ok(folder, &format!("inspect run@{step} --json"))).unwrap();
        inspected["commit"]["counters"]["skipped_train_samples"].as_u64().unwrap()
    };
    assert_eq!([1, 2, 3, 4].map(counters), [4, 8, 10, 10]);
    // What was asked for is what must stay.
    let said = refused(folder, &format!("{line} --train-iters 5 --global-batch-size 12"), 2);
    assert!(said.contains("global-batch-size is 10 in the checkpoint but 12 here"), "{said}");
    assert!(refused(folder, &format!("{line} --train-iters 5 --dp 8"), 2).contains("RM2002"));
}

/// 2 samples a step, 3 from the 4th consumed sample on, 4 from the 8th.
#[test]
fn a_batch_that_grows_is_resumed_by_what_was_consumed() {
    let folder = with_tokens();
    let folder = folder.path();
    let consumed =
        |run: &str| metrics(folder, run).iter().map(|line| line.consumed_samples).collect::<Vec<_>>();
    let ramp = format!("train {MODEL} --rampup-batch-size 2 1 8");
    ok(folder, &format!("{ramp} --train-iters 3 --lr-decay-iters 6 --save run"));
    ok(folder, &format!("{ramp} --train-iters 6 --save run"));
    ok(folder, &format!("{ramp} --train-iters 6 --lr-decay-iters 6 --save straight"));
    // A step is saved before the batch changes.
    let steps = ok(folder, "ls straight --json");
    let steps: serde_json::Value = serde_json::from_str(&steps).unwrap();
    let mut steps: Vec<_> =
        steps["checkpoints"].as_array().unwrap().iter().map(|step| step["step"].as_u64()).collect();
    steps.sort_unstable();
    assert_eq!(steps, [2, 4, 6].map(Some));
    assert_eq!(consumed("straight"), [2, 4, 7, 10, 14, 18]);
    let numbers = |run: &str| {
        let lines = metrics(folder, run);
        lines
            .iter()
            .map(|line| (line.step, line.loss.to_bits(), line.grad_norm.to_bits(), line.lr.to_bits()))
            .collect::<Vec<_>>()
    };
    assert_eq!(numbers("run"), numbers("straight"));
    // The same as a schedule in tokens, 32 a sample; its last size stands for the global batch.
    let model = MODEL.replace("--global-batch-size 4 ", "");
    let line =
        format!("train {model} --train-iters 6 --save tokens-run --step-batch-size-schedule 0:2,128:3,256:4");
    ok(folder, &line);
    assert_eq!(numbers("tokens-run"), numbers("straight"));
    // Another schedule is another run.
    let said = refused(folder, &format!("train {MODEL} --train-iters 9 --save run"), 2);
    assert!(
        said.contains("global-batch-size is 2 to 4 by 1 over 8 samples in the checkpoint but 4 here"),
        "{said}"
    );
    for (flags, code) in [
        ("--rampup-batch-size 2 3 8 --train-iters 2", "RM2002"),
        ("--rampup-batch-size 2 1 8 --train-iters 6 --nproc-per-node 2 --dp 2", "RM2002"),
        ("--rampup-batch-size 2 1 8 --train-iters 6 --epoch-tail drop", "RM6003"),
        ("--step-batch-size-schedule 0:4 --train-iters 2 --config both.toml", "RM6003"),
    ] {
        std::fs::write(folder.join("both.toml"), "[training]\nrampup_batch_size = [2, 1, 8]\n").unwrap();
        let model = if flags.contains("step-batch") { &model } else { MODEL };
        let said = refused(folder, &format!("train {model} {flags} --save none"), 2);
        assert!(said.contains(code), "{flags}: {said}");
    }
    assert!(!folder.join("none").exists());
}

/// The batch of the third step is consumed and nothing is learned from it.
#[test]
fn an_iteration_can_be_passed_over() {
    let folder = with_tokens();
    let folder = folder.path();
    let said = ok(folder, &format!("train {MODEL} --train-iters 4 --iterations-to-skip 2 --save run"));
    assert!(said.contains("step 3 passed over, as asked\n"), "{said}");
    let lines = metrics(folder, "run");
    let steps: Vec<_> = lines.iter().map(|line| (line.step, line.consumed_samples)).collect();
    assert_eq!(steps, [(1, 4), (2, 8), (4, 16)]);
    let inspected: serde_json::Value = serde_json::from_str(
        &std::fs::read_to_string(folder.join("run/iter_0000004/checkpoint.json")).unwrap(),
    )
    .unwrap();
    assert_eq!(inspected["counters"]["skipped_train_samples"], 4);
    assert_eq!(inspected["counters"]["optimizer_steps"], 3);
    assert_eq!(inspected["counters"]["consumed_train_samples"], 16);
}

/// The gradients are finite, the weights after the update are not: they are not saved, and no step is made from them.
#[test]
fn a_state_that_is_not_finite_is_never_saved() {
    let folder = with_tokens();
    let folder = folder.path();
    let line =
        format!("train {MODEL} --train-iters 9 --save run --save-interval 1 --lr 1e30 --weight-decay 1e30");
    let output = remesh(folder, &line);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    let said = text(&output.stderr);
    assert!(
        said.starts_with("Error: RM3205\n\n  × the checkpoint of iteration 1 could not be saved\n"),
        "{said}"
    );
    assert!(said.contains(" elements of `") && said.contains("` are not finite"), "{said}");
    assert_eq!(ok(folder, "ls run"), "no checkpoints in `run`\n");
}

/// Whichever saves second sees the other's step and ends at once; the other goes on.
#[test]
fn of_two_runs_that_save_to_one_folder_one_ends_and_names_the_other() {
    let folder = with_tokens();
    let folder = folder.path();
    let mut runs = [3, 4].map(|interval| {
        let line = format!("train {MODEL} --train-iters 100000 --save run --save-interval {interval}");
        command(folder, &line).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    });
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let ended = loop {
        if let Some(ended) = runs.iter_mut().position(|run| run.try_wait().unwrap().is_some()) {
            break ended;
        }
        assert!(std::time::Instant::now() < deadline, "both go on");
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    let [first, second] = runs;
    let (ended, other) = if ended == 0 { (first, second) } else { (second, first) };
    let id = other.id().to_string();
    let output = ended.wait_with_output().unwrap();
    send("-USR1", &id);
    assert_eq!(other.wait_with_output().unwrap().status.code(), Some(75));
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{said}");
    assert!(said.contains("Error: RM7002") && said.contains(&format!("(process {id} on ")), "{said}");
    ok(folder, "verify run");
}

/// `metrics.jsonl` is read while a run starts; a pipe in its place never ends.
#[test]
fn what_is_no_file_is_not_waited_for() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {MODEL} --train-iters 1 --save run"));
    let metrics = folder.join("run/metrics.jsonl");
    std::fs::remove_file(&metrics).unwrap();
    assert!(Command::new("mkfifo").arg(&metrics).status().unwrap().success());
    let output = remesh(folder, &format!("train {MODEL} --train-iters 2 --load run --save new"));
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("RM1006") && said.contains("run/metrics.jsonl`"), "{said}");
    // Nor is another run's file written to through a link.
    std::fs::create_dir(folder.join("linked")).unwrap();
    std::fs::write(folder.join("theirs"), "").unwrap();
    std::os::unix::fs::symlink("../theirs", folder.join("linked/metrics.jsonl")).unwrap();
    let said = refused(folder, &format!("train {MODEL} --train-iters 1 --save linked"), 3);
    assert!(said.contains("RM1006") && said.contains("it is a symbolic link"), "{said}");
    assert_eq!(std::fs::read(folder.join("theirs")).unwrap(), b"");
    for name in ["tokens.idx", "tokens.bin"] {
        let file = folder.join(name);
        std::fs::rename(&file, folder.join("kept")).unwrap();
        assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
        let said = refused(folder, &format!("train {MODEL} --train-iters 1"), 3);
        assert!(said.contains("RM1006") && said.contains(&format!("`{name}`")), "{said}");
        std::fs::rename(folder.join("kept"), &file).unwrap();
    }
}

/// Standing still before training begins: the configuration comes through a pipe that nobody writes to.
#[test]
fn a_signal_before_training_begins_ends_the_process_at_once() {
    let folder = with_tokens();
    let folder = folder.path();
    let config = folder.join("config.toml");
    assert!(Command::new("mkfifo").arg(&config).status().unwrap().success());
    for (signal, code) in [("-INT", 130), ("-TERM", 143), ("-USR1", 138)] {
        let mut child = command(folder, "train --config config.toml --save run").spawn().unwrap();
        // Opening to write succeeds once the run has opened it to read, and so has its handlers.
        let writer = std::fs::OpenOptions::new().write(true).open(&config).unwrap();
        send(signal, &child.id().to_string());
        assert_eq!(child.wait().unwrap().code(), Some(code), "{signal}");
        drop(writer);
        assert!(!folder.join("run").exists());
    }
}

#[test]
fn a_second_signal_ends_a_run_at_once_and_nothing_is_saved() {
    let folder = with_tokens();
    let folder = folder.path();
    // The first step takes minutes: it is still in hand when the second signal comes, however busy the machine.
    let line = format!("train {MODEL} --train-iters 1 --save run")
        .replace("--global-batch-size 4", "--global-batch-size 400000");
    let mut child = command(folder, &line).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("starting afresh")));
    let id = child.id().to_string();
    send("-USR1", &id);
    std::thread::sleep(std::time::Duration::from_millis(1500));
    send("-TERM", &id);
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert_eq!(ok(folder, "ls run"), "no checkpoints in `run`\n");
}

#[test]
fn older_checkpoints_go_as_asked() {
    let folder = with_tokens();
    let folder = folder.path();
    let train = |iters: u32, flags: &str| {
        format!("train {MODEL} --train-iters {iters} --save run --save-interval 1 {flags}")
    };
    let said = ok(folder, &train(4, "--most-recent-k 2 --save-retain-interval 3"));
    assert!(
        said.lines().any(|line| line.starts_with("saved step 3 ") && line.ends_with("; removed: 1")),
        "{said}"
    );
    let steps = || -> Vec<u64> {
        let listed: serde_json::Value = serde_json::from_str(&ok(folder, "ls run --json")).unwrap();
        listed["checkpoints"].as_array().unwrap().iter().map(|row| row["step"].as_u64().unwrap()).collect()
    };
    assert_eq!(steps(), [3, 4]);
    // What it goes on from stays.
    ok(folder, &train(7, "--most-recent-k 1"));
    assert_eq!(steps(), [4, 7]);
    let stderr = refused(folder, &format!("train {MODEL} --train-iters 1 --save-interval 1"), 2);
    assert!(stderr.contains("`--save-interval` is set, and `--save` is not"), "{stderr}");
}

/// Forty ranks for some 300 rows: the last of them own nothing.
#[test]
fn ranks_that_own_no_row_train_and_save() {
    let folder = with_tokens();
    let folder = folder.path();
    let train = |run: &str, ranks: u32| {
        let line = format!("train {MODEL} --train-iters 2 --save {run} --nproc-per-node {ranks}");
        ok(folder, &line.replace("--global-batch-size 4", "--global-batch-size 40"));
        ok(folder, &format!("digest {run} --json"))
    };
    assert_eq!(train("many", 40), train("one", 1));
}

/// As `timeout` sends them, to a process and at once to its group.
#[test]
fn two_signals_at_once_are_one_request() {
    let folder = with_tokens();
    let folder = folder.path();
    let mut child = command(folder, &format!("train {MODEL} --train-iters 1000000 --save run"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("step 1/")));
    let id = child.id().to_string();
    send("-TERM", &id);
    send("-USR1", &id);
    assert!(lines.any(|line| line.starts_with("saved step ")));
    assert_eq!(child.wait().unwrap().code(), Some(75));
}

/// Sends a signal by the shell's own `kill`: a bare system has no other.
fn send(signal: &str, id: &str) {
    let sent = Command::new("sh").args(["-c", "kill \"$@\"", "sh", signal, id]).status();
    assert!(sent.unwrap().success());
}
