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
    let verified = remesh(folder, "verify run@4");
    assert_eq!(verified.status.code(), Some(1));
    expect![[r#"
        BAD  step 4 is incomplete: `run/iter_0000004` has no checkpoint.json
        1 fault
    "#]]
    .assert_eq(&text(&verified.stdout));
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
        8  not whole  RM4021: `run/iter_0000008/checkpoint.json` is no file
    "#]]
    .assert_eq(listed.split_once('\n').unwrap().1);
    assert_eq!(ok(folder, "digest run"), ok(folder, "digest run@2"));
    drop(socket);
}
