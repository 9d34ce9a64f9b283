//! Where checkpoints are kept: full disks, folders that may not be written, odd names. The checkpoint before stays whole.

use super::{MODEL, command, ok, refused, remesh, text, with_tokens};
use std::fs::{Permissions, set_permissions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

/// What is under `folder`, sorted.
fn names(folder: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().map(Result::unwrap) {
        names.push(entry.path().display().to_string());
        names.extend(names_if_folder(&entry.path()));
    }
    names.sort();
    names
}

fn names_if_folder(path: &Path) -> Vec<String> {
    if path.is_dir() { names(path) } else { Vec::new() }
}

/// Saves of steps 3 and 4 into `run` fail for lack of room: both are said, and steps 1 and 2 stay as they were.
fn assert_full(folder: &Path, output: &Output) {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(8), "{said}");
    assert!(
        said.starts_with("step 3 could not be saved (RM1005): the save failed on rank 0: writing `"),
        "{said}"
    );
    assert!(said.contains("Error: RM1005") && said.contains("no space is left"), "{said}");
    ok(folder, "verify run@2");
    let left = names(&folder.join("run"));
    assert!(
        left.iter().all(|name| !name.contains("iter_0000003") && !name.contains("iter_0000004")),
        "{left:?}"
    );
}

/// The largest size of a file stands in for the size of the disk: it needs no privilege.
#[test]
fn a_full_disk_leaves_the_checkpoint_before_and_no_debris() {
    let folder = with_tokens();
    let folder = folder.path();
    let train = |iters| {
        format!("train {MODEL} --save run --save-interval 1 --lr-decay-iters 4 --train-iters {iters}")
    };
    ok(folder, &train(2));
    // The signal that goes with the limit is ignored, so that the write fails.
    let script = format!("trap '' XFSZ; ulimit -f 40; exec {} {}", env!("CARGO_BIN_EXE_remesh"), train(4));
    let output = Command::new("sh").current_dir(folder).args(["-c", &script]).output().unwrap();
    assert_full(folder, &output);
    ok(folder, &train(4));
}

/// The same on a disk that is really full.
#[test]
fn a_full_file_system_leaves_the_checkpoint_before_and_no_debris() {
    let folder = with_tokens();
    let folder = folder.path();
    let run = folder.join("run");
    std::fs::create_dir(&run).unwrap();
    let size = "size=512k";
    let mounted =
        Command::new("mount").args(["-t", "tmpfs", "-o", size, "tmpfs"]).arg(&run).output().unwrap();
    if !mounted.status.success() {
        // Past the harness, which keeps what a test that passes prints to itself.
        let why = text(&mounted.stderr);
        let _ = writeln!(std::io::stderr(), "NOT RUN: a file system of {size} cannot be mounted: {why}");
        return;
    }
    let train = |iters| {
        format!("train {MODEL} --save run --save-interval 1 --lr-decay-iters 4 --train-iters {iters}")
    };
    let outcome = std::panic::catch_unwind(|| {
        ok(folder, &train(2));
        // What is left is less than a step.
        let filler = std::fs::File::create(run.join("filler")).unwrap();
        let zeros = [0; 4096];
        while (&filler).write_all(&zeros).is_ok() {}
        filler.set_len(filler.metadata().unwrap().len() - 32 * 1024).unwrap();
        assert_full(folder, &remesh(folder, &train(4)));
    });
    assert!(Command::new("umount").arg(&run).status().unwrap().success());
    outcome.unwrap();
}

/// A command as somebody whom permissions bind: `nobody`, where the tests run as root.
fn as_nobody(folder: &Path, line: &str) -> Output {
    let mut command = command(folder, line);
    if std::fs::metadata("/proc/self").unwrap().uid() == 0 {
        let program = folder.join("remesh");
        if !program.exists() {
            std::fs::copy(env!("CARGO_BIN_EXE_remesh"), &program).unwrap();
        }
        command = Command::new(program);
        command
            .current_dir(folder)
            .args(line.split_whitespace())
            .env_remove("RUST_LOG")
            .uid(65534)
            .gid(65534);
    }
    command.output().unwrap()
}

#[test]
fn what_may_not_be_read_or_written_is_said_and_nothing_is_lost() {
    let folder = with_tokens();
    let folder = folder.path();
    let mode = |path: &str, mode| set_permissions(folder.join(path), Permissions::from_mode(mode)).unwrap();
    let denied = |line: &str| {
        let output = as_nobody(folder, line);
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(4), ""), "{line}: {said}");
        assert!(said.contains("Error: RM1004") && said.contains("Permission denied"), "{line}: {said}");
        said
    };
    set_permissions(folder, Permissions::from_mode(0o755)).unwrap();
    let train = |flags: &str| format!("train {MODEL} --train-iters 2 {flags}");
    ok(folder, &train("--save run --save-interval 1"));
    // Not to be written: neither a new run, nor the next step, nor the metrics.
    mode("run", 0o555);
    mode(".", 0o555);
    denied(&train("--save new"));
    denied(&train("--load run@1 --log-dir logs"));
    mode(".", 0o755);
    // Not to be read: the newest step may be whole, so none stands in for it; a listing goes on.
    mode("run/iter_0000002", 0o000);
    denied(&train("--load run"));
    denied("inspect run");
    let listed = as_nobody(folder, "ls run");
    assert!(listed.status.success());
    let listed = text(&listed.stdout);
    assert!(listed.lines().next().unwrap().starts_with("1  complete"), "{listed}");
    assert!(listed.lines().nth(1).unwrap().starts_with("2  cannot be judged  RM1004: "), "{listed}");
    mode("run/iter_0000002", 0o755);
    mode("run", 0o755);
    ok(folder, "verify run@2");
}

#[test]
fn places_may_have_any_name() {
    let folder = with_tokens();
    let folder = folder.path();
    std::fs::create_dir_all(folder.join("elsewhere")).unwrap();
    std::os::unix::fs::symlink("elsewhere", folder.join("link")).unwrap();
    let absolute = folder.join("absolute").display().to_string();
    // An accent of its own, and the letter that has it, are two names.
    let (composed, apart) = ("ein é 🚂", "ein e\u{301} 🚂");
    let long = "n".repeat(200);
    let names = ["a run", "50%25#?", "100%25", "[run]", "a+b", "-run", composed, apart, &long];
    for place in [&names[..], &["läufe/Ü 1", "slash//", "link", "./a/../b", &absolute]].concat() {
        let run = |words: &[&str]| {
            let output = command(folder, "").args(words).output().unwrap();
            assert!(output.status.success(), "{place}: {}", text(&output.stderr));
            text(&output.stdout)
        };
        let save = format!("--save={place}");
        let model: Vec<&str> = MODEL.split_whitespace().chain(["--lr-decay-iters", "2", &save]).collect();
        run(&[&["train", "--train-iters", "1"], &model[..]].concat());
        let said = run(&[&["train", "--train-iters", "2"], &model[..]].concat());
        assert!(said.starts_with("resumed step 1 of ") && said.contains("verified L2"), "{place}: {said}");
        assert!(run(&["verify", "--", place]).starts_with("ok "), "{place}");
        assert_eq!(run(&["ls", "--", place]).lines().count(), 2, "{place}");
        assert_eq!(run(&["digest", "--", &format!("{place}@2")]), run(&["digest", "--", place]), "{place}");
    }
    let there: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    for name in names {
        assert!(there.iter().any(|there| there == name), "`{name}` is not among {there:?}");
    }
    assert!(folder.join("elsewhere/iter_0000002").is_dir());
}

/// Of every file, whatever wrote it: nobody in the group is shut out, and nobody else let in.
#[test]
fn modes_and_group_are_what_umask_and_folder_say() {
    let folder = with_tokens();
    let folder = folder.path();
    for (umask, of_files, of_folders) in [("022", 0o644, 0o755), ("027", 0o640, 0o750), ("077", 0o600, 0o700)]
    {
        let shared = folder.join(format!("shared-{umask}"));
        std::fs::create_dir(&shared).unwrap();
        set_permissions(&shared, Permissions::from_mode(0o2775)).unwrap();
        let train = format!("train {MODEL} --train-iters 2 --save-interval 1 --save shared-{umask}/run");
        let script = format!("umask {umask}; exec {} {train}", env!("CARGO_BIN_EXE_remesh"));
        let output = Command::new("sh").current_dir(folder).args(["-c", &script]).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        let group = std::fs::metadata(&shared).unwrap().gid();
        let found = names(&shared.join("run"));
        assert!(found.len() > 10 && found.iter().any(|name| name.ends_with("metrics.jsonl")), "{found:?}");
        for name in found {
            let metadata = std::fs::metadata(&name).unwrap();
            let expected = if metadata.is_dir() { of_folders } else { of_files };
            assert_eq!(metadata.mode() & 0o777, expected, "{name} under umask {umask}");
            assert_eq!(metadata.gid(), group, "{name}");
        }
    }
}

/// What a checkpoint holds is read a little at a time: a limit of 100 MiB of memory is enough for one of more than that.
#[test]
fn a_large_checkpoint_is_looked_at_in_little_memory_and_without_ranks() {
    let folder = with_tokens();
    let folder = folder.path();
    let large = MODEL.replace("--hidden-size 16", "--hidden-size 256");
    ok(
        folder,
        &format!(
            "train {large} --train-iters 1 --vocab-size 24000 --save run --tp 2 --cp 2 --weight-shards 4"
        ),
    );
    let bytes: u64 =
        names(&folder.join("run")).iter().map(|name| std::fs::metadata(name).unwrap().len()).sum();
    assert!(bytes > 120 << 20, "{bytes}");
    for line in
        ["inspect run", "ls run", "verify run", "digest run", "diff run run", "plan run --tp 2 --dp 2"]
    {
        // Of KiB: the heap, stacks of threads and all else that is written to.
        let script = format!("ulimit -d 102400; exec {} {line}", env!("CARGO_BIN_EXE_remesh"));
        let output = Command::new("sh").current_dir(folder).args(["-c", &script]).output().unwrap();
        assert!(output.status.success(), "{line}: {}", text(&output.stderr));
    }
}

#[test]
fn a_file_is_no_place_to_save() {
    let folder = with_tokens();
    let folder = folder.path();
    for place in ["a.bin", "a.bin/run"] {
        let said = refused(folder, &format!("train {MODEL} --train-iters 1 --save {place}"), 3);
        assert!(said.contains("RM1006") && said.contains("a file lies where the folder"), "{said}");
    }
    let long = "x".repeat(300);
    let said = refused(folder, &format!("train {MODEL} --train-iters 1 --save {long}"), 2);
    assert!(said.contains("RM1007"), "{said}");
}
