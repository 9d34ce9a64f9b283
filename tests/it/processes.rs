//! Ranks as processes: what `remesh train` starts itself, and what torchrun and others start, is the run of ranks as threads, bit for
//! bit; and they end together.

use crate::cli::{command, metrics, ok, text, with_tokens};
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const RUN: &str = "train --num-layers 1 --hidden-size 32 --ffn-hidden-size 32 --num-attention-heads 4 --seq-length 64 \
                   --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --hidden-dropout 0.1 --data-path tokens";
const FOUR: &str = "--nproc-per-node 4 --tp 2 --sp --cp 2";

/// One rank of a job, as torchrun starts it.
fn under_torchrun(folder: &Path, line: &str, rank: u32, num_ranks: u32, port: u16) -> Command {
    let mut command = command(folder, line);
    let rank = rank.to_string();
    let said = [("RANK", &rank), ("LOCAL_RANK", &rank), ("WORLD_SIZE", &num_ranks.to_string())];
    command.envs(said).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.env("TORCHELASTIC_RUN_ID", "run").stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A process that is killed if the test ends before it.
struct Running(Option<Child>);

impl Running {
    fn start(command: &mut Command) -> Running {
        Running(Some(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()))
    }

    fn id(&self) -> u32 {
        self.0.as_ref().unwrap().id()
    }

    fn output(mut self) -> Output {
        self.0.take().unwrap().wait_with_output().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

fn signal(name: &str, process: u32) {
    let status = Command::new("sh").args(["-c", &format!("kill -{name} {process}")]).status().unwrap();
    assert!(status.success());
}

/// Processes that were started by `parent`.
fn children(parent: u32) -> Vec<u32> {
    let folders = std::fs::read_dir("/proc").unwrap().flatten();
    let processes = folders.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let parent_of = |process: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        // The name before it may hold anything but this.
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse::<u32>().ok()
    };
    processes.filter(|process| parent_of(process) == Some(parent)).collect()
}

#[track_caller]
fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn processes_train_save_and_resume_what_threads_do() {
    let folder = with_tokens();
    let folder = folder.path();
    let run = |flags: &str| ok(folder, &format!("{RUN} --lr-decay-iters 4 {flags}"));
    run("--train-iters 4 --save threads");
    let said = run(&format!("{FOUR} --ranks-as processes --train-iters 2 --save processes"));
    assert_eq!(said.matches("step 2/2").count(), 1, "one rank speaks: {said}");
    let resumed = run("--nproc-per-node 2 --ranks-as processes --train-iters 4 --save processes");
    assert!(resumed.contains("resumed step 2") && resumed.contains("verified L2"), "{resumed}");
    assert_eq!(
        metrics(folder, "processes"),
        metrics(folder, "threads"),
        "each step has one line, to the bit"
    );
}

#[test]
fn ranks_that_torchrun_started_find_each_other_past_its_agent() {
    let folder = with_tokens();
    let folder = folder.path();
    let agent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = agent.local_addr().unwrap().port();
    let line = format!("{RUN} --tp 2 --train-iters 3 --save launched");
    let ranks = [1, 0].map(|rank| Running::start(&mut under_torchrun(folder, &line, rank, 2, port)));
    let [second, first] = ranks.map(Running::output);
    for output in [&first, &second] {
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    assert!(text(&first.stdout).contains("step 3/3"), "{}", text(&first.stdout));
    assert_eq!((text(&second.stdout), text(&second.stderr)), (String::new(), String::new()));
    ok(folder, &format!("{RUN} --tp 2 --train-iters 3 --save threads"));
    assert_eq!(metrics(folder, "launched"), metrics(folder, "threads"));
    let digest = |run: &str| ok(folder, &format!("digest {run} --json"));
    assert_eq!(digest("launched").replace("launched", ""), digest("threads").replace("threads", ""));
}

#[test]
fn ranks_that_were_started_differently_are_refused() {
    let folder = with_tokens();
    let folder = folder.path();
    let agent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = agent.local_addr().unwrap().port();
    std::fs::write(folder.join("other.txt"), "Other text of about the same length.\n".repeat(40)).unwrap();
    ok(folder, "data tokenize other.txt -o other");
    // A copy with the index of the first and other tokens.
    let bytes = std::fs::read(folder.join("tokens.bin")).unwrap();
    std::fs::write(
        folder.join("stale.bin"),
        bytes.chunks(2).flat_map(|id| [id[0] ^ 1, id[1]]).collect::<Vec<_>>(),
    )
    .unwrap();
    std::fs::copy(folder.join("tokens.idx"), folder.join("stale.idx")).unwrap();
    std::fs::copy(folder.join("tokens.tokenizer.json"), folder.join("stale.tokenizer.json")).unwrap();
    for (flags, difference) in [
        (["--seed 0", "--seed 1"], "settings.seed is 1, not 0"),
        (["", "--data-path stale"], "data.next_batch is"),
        (
            ["--eval-interval 2 --valid-data-path tokens", "--eval-interval 2 --valid-data-path other"],
            "data.validation.files is",
        ),
        (["--save a --save-interval 1", "--save a"], "save-interval is 0, not 1"),
    ] {
        let line = |rank: usize| {
            let run = if flags[rank].starts_with("--data-path") {
                RUN.replace("--data-path tokens", "")
            } else {
                RUN.into()
            };
            format!("{run} --train-iters 3 {}", flags[rank])
        };
        let start = |rank| Running::start(&mut under_torchrun(folder, &line(rank), rank as u32, 2, port));
        let outputs = [0, 1].map(start).map(Running::output);
        let said: String = outputs.iter().map(|output| text(&output.stderr)).collect();
        let expected = format!("rank 1 was started otherwise than rank 0: {difference}");
        assert!(said.contains("RM3207") && said.contains(&expected), "{said}");
        // Whoever says it first ends the other one, too.
        assert!(outputs.iter().any(|output| output.status.code() == Some(2)), "{said}");
        assert!(outputs.iter().all(|output| !output.status.success()), "{said}");
    }
    let mut alone = under_torchrun(folder, &format!("{RUN} --train-iters 3 --nproc-per-node 4"), 0, 2, port);
    let output = alone.output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("4 ranks are asked for, and a launcher has started 2"));
}

#[test]
fn a_killed_rank_ends_the_others_and_is_named() {
    let folder = with_tokens();
    let folder = folder.path();
    let line =
        format!("{RUN} {FOUR} --ranks-as processes --train-iters 100000 --save killed --save-interval 1");
    let launcher = Running::start(&mut command(folder, &line));
    let saved = folder.join("killed/iter_0000002/checkpoint.json");
    wait_until("nothing was saved", || saved.exists());
    let ranks = children(launcher.id());
    assert_eq!(ranks.len(), 4);
    let killed = ranks[2];
    signal("KILL", killed);
    let output = launcher.output();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "running again helps: {said}");
    assert!(said.contains("RM3208"), "{said}");
    assert!(said.contains("failed: its process was ended by signal 9"), "{said}");
    wait_until("a rank lives on", || ranks.iter().all(|rank| !Path::new(&format!("/proc/{rank}")).exists()));
    // What was saved is whole, and ranks of any kind go on from it.
    ok(folder, "verify killed");
}

#[test]
fn rank_1_tells_that_rank_0_is_gone() {
    let folder = with_tokens();
    let folder = folder.path();
    let agent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = agent.local_addr().unwrap().port();
    let line = format!("{RUN} --train-iters 100000 --log-dir log");
    let [first, second] =
        [0, 1].map(|rank| Running::start(&mut under_torchrun(folder, &line, rank, 2, port)));
    let log = folder.join("log/metrics.jsonl");
    wait_until("no step was made", || std::fs::read_to_string(&log).is_ok_and(|log| log.lines().count() > 2));
    signal("KILL", first.id());
    let output = second.output();
    let said = text(&output.stderr);
    assert!(said.contains("rank 0 failed: the process that the job meets at"), "{said}");
    assert_eq!(output.status.code(), Some(5), "{said}");
}

#[test]
fn what_all_ranks_would_refuse_is_said_once_and_before_any_of_them_is_there() {
    let folder = with_tokens();
    let folder = folder.path();
    for (flags, code) in [("--train-iters 2 --load missing", 3), ("--train-iters 2 --eval-interval 1", 2)] {
        let output = command(folder, &format!("{RUN} {FOUR} --ranks-as processes {flags}")).output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert_eq!(said.matches("Error: RM").count(), 1, "{said}");
    }
}

#[test]
fn a_signal_to_the_launcher_ends_a_run_that_saves_nothing_by_its_number() {
    let folder = with_tokens();
    let folder = folder.path();
    for (name, code) in [("TERM", 143), ("INT", 130)] {
        let line = format!("{RUN} {FOUR} --ranks-as processes --train-iters 100000 --log-dir {name}");
        let launcher = Running::start(&mut command(folder, &line));
        let log = folder.join(name).join("metrics.jsonl");
        wait_until("no step was made", || log.exists());
        signal(name, launcher.id());
        let output = launcher.output();
        assert_eq!(output.status.code(), Some(code), "{}", text(&output.stderr));
    }
}

#[test]
fn a_signal_to_the_launcher_saves_and_ends_all() {
    let folder = with_tokens();
    let folder = folder.path();
    let line = format!("{RUN} {FOUR} --ranks-as processes --train-iters 100000 --save stopped");
    let launcher = Running::start(&mut command(folder, &line));
    let log = folder.join("stopped/metrics.jsonl");
    wait_until("no step was made", || std::fs::read_to_string(&log).is_ok_and(|log| log.lines().count() > 2));
    signal("TERM", launcher.id());
    let output = launcher.output();
    assert_eq!(output.status.code(), Some(75), "{}", text(&output.stderr));
    let steps = metrics(folder, "stopped").len();
    assert!(folder.join(format!("stopped/iter_{steps:07}/checkpoint.json")).exists());
}
