//! How a run goes on and ends.

use super::{MODEL, command, metrics, ok, remesh, text, with_tokens};
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
    assert!(said.contains("epoch 0 ended; 4 samples that fill no batch were not used\n"), "{said}");
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
