//! Checkpoints that are damaged or not whole: listed, passed over, refused by name.

use super::{MODEL, damage_data, metrics, ok, refused, remesh, text, with_tokens};
use expect_test::expect;

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
    assert!(ok(folder, "verify run@2").starts_with("ok   step 2: "));
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
    assert!(said.ends_with("1 fault; step 4 was checked\n"), "{said}");
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
        said.starts_with("resumed step 2 of run: ")
            && said.contains(
                "L3 step 3 equals the saved run's, bit for bit: loss, gradient norm and learning rate"
            ),
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
    expect![[r#"
        Error: RM6003

          × `run/iter_0000004` is step 4 of a run
          help: `remesh ls run` lists the run, `remesh inspect` shows the step
    "#]]
    .assert_eq(&refused(folder, "ls run/iter_0000004", 2));
    let verified = remesh(folder, "verify run@4");
    assert_eq!(verified.status.code(), Some(1));
    expect![[r#"
        BAD  step 4 is incomplete: `run/iter_0000004` has no checkpoint.json
        1 fault
    "#]]
    .assert_eq(&text(&verified.stdout));
    // The others take the same one, each with a line about the step that they pass over.
    for line in ["inspect run", "plan run", "verify run", "digest run", "diff run run@2"] {
        let output = remesh(folder, line);
        assert!(output.status.success(), "{line}");
        assert!(text(&output.stderr).contains("step 4 is passed over (RM4020)"), "{line}");
        assert_eq!(text(&output.stdout), ok(folder, &line.replacen("run", "run@2", 1)), "{line}");
    }
    let resumed = ok(folder, &format!("train {MODEL} --train-iters 4 --load run --save other"));
    assert!(resumed.starts_with("resumed step 2 of run: "), "{resumed}");
    // Where none is left, the refusal alone says why.
    std::fs::remove_file(folder.join("run/iter_0000002/checkpoint.json")).unwrap();
    let said = refused(folder, &format!("train {MODEL} --train-iters 4 --load run --save new"), 6);
    assert_eq!(said.matches("step 4 is passed over").count(), 1, "{said}");
}

#[test]
fn a_run_of_damaged_steps_is_damage_and_no_run_starts_afresh_over_it() {
    let folder = with_tokens();
    let folder = folder.path();
    let train = format!("train {MODEL} --train-iters 4");
    ok(folder, &format!("{train} --save run --save-interval 2"));
    let commit = |step: u64| folder.join(format!("run/iter_{step:07}/checkpoint.json"));
    std::fs::write(commit(4), "{").unwrap();
    damage_data(&folder.join("run/iter_0000002"));
    // The one is seen by its commit, the other while it is loaded.
    let said = refused(folder, &format!("{train} --save run"), 6);
    assert!(
        said.starts_with("step 4 is passed over (RM4021): ")
            && said.contains("\nstep 2 is damaged and passed over: "),
        "{said}"
    );
    assert!(said.contains("\nError: RM4024\n"), "{said}");
    std::fs::write(commit(2), "{").unwrap();
    for line in [format!("{train} --load run --save new"), format!("{train} --save run"), "digest run".into()]
    {
        let said = refused(folder, &line, 6);
        assert!(
            said.starts_with(
                "Error: RM4024\n\n  × no checkpoint in `run` is whole; step 4 is passed over (RM4021): "
            ),
            "{said}"
        );
        assert!(said.contains("; step 2 is passed over (RM4021): "), "{said}");
    }
    assert!(refused(folder, &format!("{train} --load run@2 --save new"), 6).contains("RM4021"));
    // What was never complete is no checkpoint that is lost.
    std::fs::remove_file(commit(2)).unwrap();
    std::fs::remove_file(commit(4)).unwrap();
    assert!(ok(folder, &format!("{train} --save run")).starts_with("starting afresh, 4 steps\n"));
}

/// Each stray name gets one line, and nothing waits for a pipe.
#[test]
fn stray_names_are_passed_over_and_no_listing_fails() {
    use std::os::unix::ffi::OsStrExt;
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {MODEL} --train-iters 2 --save run"));
    let run = folder.join("run");
    let pipe = |path: &std::path::Path| {
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success())
    };
    for name in [&b"iter_x"[..], b"iter_\xff", b"iter_0000009\n", b"iter_9", b"\xfe"] {
        std::fs::create_dir(run.join(std::ffi::OsStr::from_bytes(name))).unwrap();
    }
    std::fs::write(run.join("iter_0000003"), "").unwrap();
    std::os::unix::fs::symlink("iter_0000004", run.join("iter_0000004")).unwrap();
    pipe(&run.join("iter_0000005"));
    for step in 6..=8 {
        std::fs::create_dir(run.join(format!("iter_000000{step}"))).unwrap();
    }
    pipe(&run.join("iter_0000006/checkpoint.json"));
    let socket = std::os::unix::net::UnixListener::bind(run.join("iter_0000007/checkpoint.json")).unwrap();
    std::os::unix::fs::symlink("checkpoint.json", run.join("iter_0000008/checkpoint.json")).unwrap();
    let listed = remesh(folder, "ls run");
    assert!(listed.status.success());
    expect![[r#"
        `run/\xfe` is passed over: its name is no plain text
        `run/iter_0000003` is passed over: it is no folder
        `run/iter_0000004` is passed over: Too many levels of symbolic links (os error 40)
        `run/iter_0000005` is passed over: it is no folder
        `run/iter_0000009\n` is passed over: a step is `iter_` and its number in seven digits or more
        `run/iter_9` is passed over: a step is `iter_` and its number in seven digits or more
        `run/iter_\xff` is passed over: a step is `iter_` and its number in seven digits or more
        `run/iter_x` is passed over: a step is `iter_` and its number in seven digits or more
    "#]]
    .assert_eq(&text(&listed.stderr));
    let listed = text(&listed.stdout);
    expect![[r#"
        6  not whole  RM4021: `run/iter_0000006/checkpoint.json` is no file
        7  not whole  RM4021: `run/iter_0000007/checkpoint.json` is no file
        8  cannot be judged  RM4023: `run/iter_0000008/checkpoint.json` is a symbolic link, or in a folder that is one; a checkpoint's files must lie in its own folder
    "#]]
    .assert_eq(listed.split_once('\n').unwrap().1);
    // What a link may hide stops the search.
    assert!(refused(folder, "digest run", 6).contains("RM4023"));
    std::fs::remove_file(run.join("iter_0000008/checkpoint.json")).unwrap();
    assert_eq!(ok(folder, "digest run"), ok(folder, "digest run@2"));
    drop(socket);
}

/// What is sealed and not whole any more is in nobody's way: the run goes on from the step before, and saves that step anew.
#[test]
fn a_step_whose_files_are_gone_is_saved_again() {
    let folder = with_tokens();
    let folder = folder.path();
    let train =
        |iters: u32, flags: &str| format!("train {MODEL} --lr-decay-iters 6 --train-iters {iters} {flags}");
    ok(folder, &train(6, "--save straight"));
    for (run, is_gone) in [("gone", true), ("short", false)] {
        ok(folder, &train(4, &format!("--save {run} --save-interval 2")));
        let data = folder.join(run).join("iter_0000004/data");
        let pack = std::fs::read_dir(data).unwrap().next().unwrap().unwrap().path();
        match is_gone {
            true => std::fs::remove_file(&pack).unwrap(),
            false => {
                let file = std::fs::OpenOptions::new().write(true).open(&pack).unwrap();
                file.set_len(file.metadata().unwrap().len() - 1).unwrap();
            }
        }
        let resumed = remesh(folder, &train(6, &format!("--save {run} --save-interval 1")));
        assert!(resumed.status.success(), "{}", text(&resumed.stderr));
        assert!(text(&resumed.stderr).starts_with("step 4 is passed over (RM4020): "));
        let steps: Vec<u64> = metrics(folder, run).iter().map(|line| line.step).collect();
        assert_eq!(steps, [1, 2, 3, 4, 3, 4, 5, 6]);
        ok(folder, &format!("verify {run}@4"));
        assert_eq!(ok(folder, &format!("digest {run} --json")), ok(folder, "digest straight --json"));
    }
}

#[test]
fn a_step_that_was_set_aside_is_no_damage_and_comes_back() {
    let folder = with_tokens();
    let folder = folder.path();
    let train = |iters: u32, flags: &str| {
        format!("train {MODEL} --lr-decay-iters 6 --train-iters {iters} --save run {flags}")
    };
    ok(folder, &train(4, "--save-interval 2"));
    let before = ok(folder, "digest run@4 --json");
    ok(folder, &train(3, "--ckpt-step 2 --overwrite"));
    let listed = ok(folder, "ls run");
    assert!(
        listed.lines().nth(2).unwrap().starts_with("4  set aside  RM4025: step 4 was set aside: "),
        "{listed}"
    );
    // Nobody needs to hear of it again.
    for line in ["verify run".to_owned(), train(3, "")] {
        let output = remesh(folder, &line);
        assert!(output.status.success(), "{line}");
        assert!(!text(&output.stderr).contains("step 4"), "{line}: {}", text(&output.stderr));
    }
    let stderr = refused(folder, "digest run@4", 6);
    assert!(
        stderr.contains("RM4025") && stderr.contains("help: to take it back, rename that file"),
        "{stderr}"
    );
    let step = folder.join("run/iter_0000004");
    let aside = std::fs::read_dir(&step).unwrap().map(|entry| entry.unwrap().path());
    let aside = aside.into_iter().find(|path| path.to_str().unwrap().contains("superseded")).unwrap();
    std::fs::rename(aside, step.join("checkpoint.json")).unwrap();
    assert_eq!(ok(folder, "digest run@4 --json"), before);
}

/// Folders of another run's steps, linked: nothing is read, renamed or written through them.
#[test]
fn nothing_is_saved_or_set_aside_through_a_link() {
    let folder = with_tokens();
    let folder = folder.path();
    let train = |flags: &str| format!("train {MODEL} --lr-decay-iters 8 --save-interval 2 {flags}");
    ok(folder, &train("--train-iters 4 --save a"));
    let before = ok(folder, "digest a@4 --json");
    std::fs::create_dir(folder.join("b")).unwrap();
    for step in ["iter_0000002", "iter_0000004"] {
        std::os::unix::fs::symlink(format!("../a/{step}"), folder.join("b").join(step)).unwrap();
    }
    for flags in ["--train-iters 4 --load a@2 --save b --overwrite", "--train-iters 6 --save b"] {
        let stderr = refused(folder, &train(flags), 6);
        assert!(stderr.contains("RM4023"), "{stderr}");
    }
    std::fs::create_dir(folder.join("c")).unwrap();
    std::os::unix::fs::symlink("../a/iter_0000004", folder.join("c/iter_0000006")).unwrap();
    let output = remesh(folder, &train("--train-iters 6 --load a@4 --save c"));
    assert_eq!(output.status.code(), Some(6), "{}", text(&output.stderr));
    assert_eq!(ok(folder, "digest a@4 --json"), before);
    assert!(ok(folder, "verify a").starts_with("ok "));
}

#[test]
fn a_commit_of_any_length_is_passed_over() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {MODEL} --train-iters 4 --save run --save-interval 2"));
    let commit =
        std::fs::OpenOptions::new().write(true).open(folder.join("run/iter_0000004/checkpoint.json"));
    commit.unwrap().set_len(6 << 30).unwrap();
    assert_eq!(ok(folder, "digest run"), ok(folder, "digest run@2"));
}
