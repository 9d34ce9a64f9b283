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
        1 faults
    "#]]
    .assert_eq(&text(&verified.stdout));
    // Where none is left, the refusal alone says why.
    std::fs::remove_file(folder.join("run/iter_0000002/checkpoint.json")).unwrap();
    let said = refused(folder, &format!("train {MODEL} --train-iters 4 --load run --save new"), 3);
    assert_eq!(said.matches("step 4 is passed over").count(), 1, "{said}");
}
