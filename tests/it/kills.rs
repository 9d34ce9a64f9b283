//! SIGKILL: five times at any moment and once in each phase of a save, each time resumed under another layout. The run ends
//! with the same loss bits and the same state as the one that was never killed.

use crate::cli::{command, metrics, ok, text, with_tokens};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const ITERATIONS: u64 = 40;
const RUN: &str = "--num-layers 2 --hidden-size 32 --ffn-hidden-size 32 --num-attention-heads 4 --num-query-groups 4 \
                   --seq-length 64 --micro-batch-size 1 --global-batch-size 8 --lr 1e-2 --hidden-dropout 0.1 \
                   --attention-dropout 0.1 --data-path tokens --train-iters 40 --save-interval 1";
const LAYOUTS: [&str; 5] = [
    "--nproc-per-node 8 --tp 2 --cp 2 --weight-shards 4",
    "--nproc-per-node 4 --cp 4",
    "--nproc-per-node 8 --weight-shards 4 --seq-shards 2",
    "--nproc-per-node 4 --tp 4 --sp",
    "--nproc-per-node 2",
];

/// Where in a save a process is, as its folder shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Some pack is there, no table.
    Packs,
    /// One of the two tables is there.
    Tables,
    /// Both tables are there, no commit.
    BeforeCommit,
    /// The commit is there.
    AfterCommit,
}

/// The folder of a step that was begun after `after`, and how far it is.
fn newest_save(run: &Path, after: u64) -> Option<(u64, Phase)> {
    let names = |folder: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    };
    let step = names(run).iter().filter_map(|name| name.strip_prefix("iter_")?.parse().ok()).max()?;
    let folder: PathBuf = run.join(format!("iter_{step:07}"));
    let files = names(&folder);
    let tables = files.iter().filter(|name| name.ends_with(".arrow")).count();
    let phase = match (files.iter().any(|name| name == "checkpoint.json"), tables) {
        (true, _) => Phase::AfterCommit,
        (false, 0) if names(&folder.join("data")).is_empty() => return None,
        (false, 0) => Phase::Packs,
        (false, 1) => Phase::Tables,
        (false, _) => Phase::BeforeCommit,
    };
    (step > after).then_some((step, phase))
}

/// The newest step whose commit is there.
fn newest_commit(run: &Path) -> u64 {
    (1..=ITERATIONS)
        .rev()
        .find(|step| run.join(format!("iter_{step:07}/checkpoint.json")).exists())
        .unwrap_or(0)
}

/// A run that is killed if the test ends before it.
struct Running(Child);

impl Running {
    fn start(folder: &Path, layout: &str) -> Running {
        let mut command = command(folder, &format!("train {RUN} {layout} --save killed"));
        Running(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// Whether it was still running.
    fn kill(mut self) -> bool {
        let was_running = self.0.try_wait().unwrap().is_none();
        self.0.kill().unwrap();
        let output = self.0.wait().unwrap();
        assert!(was_running || output.success(), "the run failed by itself: {output}");
        was_running
    }
}

/// Starts a run and kills it as soon as its newest save is in `phase`; true if the folder it leaves is in that phase.
fn kill_in(folder: &Path, layout: &str, phase: Phase) -> bool {
    let run = folder.join("killed");
    let before = newest_commit(&run);
    let running = Running::start(folder, layout);
    let deadline = Instant::now() + Duration::from_secs(60);
    let seen = loop {
        match newest_save(&run, before) {
            Some((step, now)) if now == phase => break step,
            _ => assert!(Instant::now() < deadline, "no save came to {phase:?}"),
        }
    };
    running.kill() && newest_save(&run, before) == Some((seen, phase))
}

#[test]
fn a_run_that_is_killed_again_and_again_ends_like_one_that_never_was() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {RUN} --save straight"));

    let mut layouts = LAYOUTS.iter().cycle();
    for millis in [310, 170, 420, 230, 90] {
        let running = Running::start(folder, layouts.next().unwrap());
        std::thread::sleep(Duration::from_millis(millis));
        assert!(running.kill(), "the run was over before it could be killed; make it longer");
    }
    for phase in [Phase::Packs, Phase::Tables, Phase::BeforeCommit, Phase::AfterCommit] {
        // The moment between seeing a phase and the kill belongs to the run, so it may have moved on: again, then.
        let hit = (0..12).any(|_| kill_in(folder, layouts.next().unwrap(), phase));
        assert!(hit, "{phase:?} was never hit");
    }
    let reached = newest_commit(&folder.join("killed"));
    assert!(reached < ITERATIONS, "nothing was left to resume after the last kill");

    let output = command(folder, &format!("train {RUN} {} --save killed", LAYOUTS[0])).output().unwrap();
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    assert!(said.contains(&format!("resumed step {reached} ")) && said.contains("verified L2"), "{said}");
    let last = |run: &str| metrics(folder, run).pop().unwrap();
    assert_eq!(last("killed").step, ITERATIONS);
    assert_eq!(last("killed"), last("straight"), "the last line of metrics.jsonl, to the bit");
    let digest = |run: &str| ok(folder, &format!("digest {run}@{ITERATIONS} --json"));
    assert_eq!(digest("killed"), digest("straight"));
}
