//! Where results and complaints go, and in what form.

use super::{MODEL, command, ok, refused, remesh, text, with_tokens};
use expect_test::expect;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

#[test]
fn errors_are_json_on_stderr_where_json_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let said = refused(folder.path(), "--json inspect nowhere", 3);
    expect![[r#"
        {"error":{"causes":[],"code":"RM4012","exit":3,"help":"check the path for a typing error","message":"there is no folder `nowhere`","retryable":false}}
    "#]]
    .assert_eq(&said);
    let said = refused(folder.path(), "inspect --json nowhere --al", 2);
    expect![[r#"
        {"error":{"causes":[],"code":"RM6001","exit":2,"help":"`--help` lists the flags","message":"unexpected argument '--al' found","retryable":false}}
    "#]]
    .assert_eq(&said);
}

#[test]
fn every_code_of_an_error_can_be_explained() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    expect![[r#"
        RM4012: there is no such checkpoint

        The folder, or the step in it, is not there. `remesh ls RUN` lists the steps that are.

        exit code 3: not found
    "#]]
    .assert_eq(&ok(folder, "explain rm4012"));
    let said = refused(folder, "explain RM1", 2);
    assert!(said.starts_with("Error: RM6008\n\n  × no error has the code `RM1`"), "{said}");
    let all: serde_json::Value = serde_json::from_str(&ok(folder, "explain --json")).unwrap();
    assert_eq!(ok(folder, "explain").lines().count(), all["codes"].as_array().unwrap().len());
}

#[test]
fn a_misspelt_flag_is_told_the_right_one() {
    let folder = tempfile::tempdir().unwrap();
    let said = refused(folder.path(), "verify run --deap", 2);
    assert!(said.contains("a similar argument exists: '--deep'"), "{said}");
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("a.txt"), "ab").unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = command(folder, "data tokenize a.txt -o tokens").stdout(writer).output().unwrap();
    assert!(output.status.success());
    assert_eq!(text(&output.stderr), "");
    assert!(folder.join("tokens.tokenizer.json").exists());
}

#[test]
fn a_run_goes_on_when_nobody_reads_its_lines() {
    let folder = with_tokens();
    let folder = folder.path();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let line = format!("train {MODEL} --train-iters 3 --save run");
    let output = command(folder, &line).stdout(writer).output().unwrap();
    assert!(output.status.success());
    assert_eq!(text(&output.stderr), "");
    ok(folder, "verify run@3");
}

/// On a terminal, that is, for people: a bar on stderr, gone when the result is there.
#[test]
fn a_bar_is_drawn_on_a_terminal_and_nowhere_else() {
    let folder = with_tokens();
    let folder = folder.path();
    ok(folder, &format!("train {MODEL} --train-iters 1 --save run"));
    let script = |program: &str| {
        let mut script = Command::new("script");
        script.current_dir(folder).args(["-qefc", program, "/dev/null"]).env("TERM", "xterm");
        script.stdin(Stdio::null()).output()
    };
    let on_terminal = |line: &str| script(&format!("{} {line}", env!("CARGO_BIN_EXE_remesh"))).unwrap();
    if !script("true").is_ok_and(|output| output.status.success()) {
        // Past the harness, which keeps what a test that passes prints to itself.
        let _ = writeln!(std::io::stderr(), "NOT RUN: no `script` makes a terminal here");
        return;
    }
    let commands = [
        ("verify run", "verifying"),
        ("digest run", "digesting"),
        ("data tokenize a.bin -o more --force", "tokenizing"),
    ];
    for (line, label) in commands {
        let drawn = text(&on_terminal(line).stdout);
        assert!(drawn.contains(label), "{line}: {drawn:?}");
        let result = ok(folder, line);
        let last = result.lines().last().unwrap();
        assert!(drawn.trim_end().ends_with(last), "{line}: {drawn:?} does not end with {last:?}");
        for flag in ["--json", "--quiet"] {
            let drawn = on_terminal(&format!("{line} {flag}"));
            assert!(!text(&drawn.stdout).contains(label), "{line} {flag}");
        }
        let piped = remesh(folder, line);
        assert!(!(text(&piped.stdout) + &text(&piped.stderr)).contains(label), "{line}");
    }
}

/// A name that would clear the screen, or look like a line of its own.
#[test]
fn control_characters_of_names_are_shown_and_never_obeyed() {
    use ckpt::testing::{RankMemory, Ranks, header, save};
    use mesh::{DType, GroupTable, ParallelLayout, Placement, Shape, StateEntry, StateKind, StateTable};
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let layout = ParallelLayout::single();
    let table = StateTable::new(vec![StateEntry {
        key: "w\u{1b}[2J\nok   all is well\r".into(),
        kind: StateKind::Model,
        dtype: DType::F32,
        placement: Placement::replicated(&Shape::new(&[400])),
    }])
    .unwrap();
    let store = ckpt::Store::create(folder.join("run").to_str().unwrap()).unwrap();
    Ranks::new(GroupTable::new("model", &layout)).run(|groups, exchange| {
        let memory = RankMemory::labelled(&table, &groups);
        save(&store, header(1, layout), &table, &groups, exchange, &memory).unwrap();
    });
    let shown = |line: &str| {
        let output = remesh(folder, line);
        let said = text(&output.stdout) + &text(&output.stderr);
        let is_plain = said.chars().all(|c| !c.is_control() || c == '\n');
        assert!(is_plain && !said.contains("\nok   all is well"), "{line}: {said:?}");
        said
    };
    let name = r"w\u{1b}[2J\nok   all is well\r";
    assert!(shown("inspect run").contains(name) && shown("digest run").contains(name));
    shown("ls run");
    shown("diff run run");
    super::damage_data(&folder.join("run/iter_0000001"));
    let verified = shown("verify run");
    assert!(verified.starts_with("BAD  ") && verified.contains(name), "{verified}");
    assert_eq!(verified.lines().count(), 2, "{verified}");
    assert!(shown("digest run").contains("is damaged"));
}

/// Commands are named in backticks, in texts of every crate and in the documents.
#[test]
fn every_command_that_a_text_names_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let commands = ok(root, "--help");
    let commands: Vec<&str> =
        commands.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next()).collect();
    let mut folders =
        ["src", "mesh/src", "ckpt/src", "train/src", "reshard/src", "docs"].map(|at| root.join(at)).to_vec();
    let mut named = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            if entry.file_type().unwrap().is_dir() {
                folders.push(entry.path());
                continue;
            }
            let Ok(said) = std::fs::read_to_string(entry.path()) else { continue };
            for (at, _) in said.match_indices("`remesh ") {
                let word = said[at + 8..].split(|c: char| !c.is_alphanumeric()).next().unwrap();
                named += 1;
                assert!(commands.contains(&word), "{}: `remesh {word}`", entry.path().display());
            }
        }
    }
    assert!(named > 10);
}

#[test]
fn every_json_document_names_its_schema_and_bad_log_settings_are_said() {
    let folder = with_tokens();
    let folder = folder.path();
    let said = ok(folder, &format!("train {MODEL} --train-iters 1 --save run --json"));
    let events: Vec<serde_json::Value> =
        said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(events.iter().all(|event| event["schema"] == "remesh.train/1"), "{said}");
    let names: Vec<_> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
    assert_eq!(names, ["fresh", "step", "saved"]);
    for (line, schema) in [
        ("inspect run", "remesh.inspect/1"),
        ("ls run", "remesh.ls/1"),
        ("verify run", "remesh.verify/1"),
        ("plan run", "remesh.plan/1"),
        ("data tokenize a.bin -o again", "remesh.tokenize/1"),
        ("doctor", "remesh.doctor/1"),
    ] {
        let document: serde_json::Value =
            serde_json::from_str(&ok(folder, &format!("{line} --json"))).unwrap();
        assert_eq!(document["schema"], schema);
    }
    // A digest is nothing but its tensors, so that scripts can go over it.
    let digests: serde_json::Value = serde_json::from_str(&ok(folder, "digest run --json")).unwrap();
    let fields = |tensor: &serde_json::Value| tensor.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert!(
        digests.as_object().unwrap().values().all(|tensor| fields(tensor) == ["dtype", "sha256", "shape"])
    );
    let output = command(folder, "ls run").env("RUST_LOG", "ckpt=loud").output().unwrap();
    assert!(output.status.success());
    expect![[r#"
        RUST_LOG `ckpt=loud` is not understood (error parsing level filter: expected one of "off", "error", "warn", "info", "debug", "trace", or a number 0-5); warnings are logged
    "#]]
    .assert_eq(&text(&output.stderr));
}

#[test]
fn what_must_not_be_missed_is_on_stderr_even_when_quiet() {
    let folder = with_tokens();
    let folder = folder.path();
    std::fs::create_dir(folder.join("run")).unwrap();
    std::fs::write(folder.join("run/iter_0000002"), "in the way").unwrap();
    let output =
        remesh(folder, &format!("train {MODEL} --train-iters 3 --save run --save-interval 1 --quiet"));
    assert!(output.status.success());
    assert_eq!(text(&output.stdout), "");
    let said = text(&output.stderr);
    assert!(
        said.starts_with(
            "`run/iter_0000002` is passed over: it is no folder\nstep 2 could not be saved (RM1006)"
        ),
        "{said}"
    );
    let output = remesh(folder, &format!("train {MODEL} --train-iters 3 --load run@1 --save new --cp 2 -q"));
    expect![[r#"
        2 per-rank random streams derived anew: the layout changed
    "#]]
    .assert_eq(&text(&output.stderr));
    std::fs::remove_file(folder.join("run/iter_0000003/checkpoint.json")).unwrap();
    let output = remesh(folder, "digest run -q");
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(0), String::new()));
    let said = text(&output.stderr);
    assert!(said.contains("\nstep 3 is passed over (RM4020): "), "{said}");
}

/// Where there is a driver, `tests/gpu.rs` says more.
#[test]
fn what_a_missing_driver_disables_is_said_and_its_device_is_refused() {
    let folder = with_tokens();
    let folder = folder.path();
    let found: serde_json::Value = serde_json::from_str(&ok(folder, "doctor --json")).unwrap();
    let driver = &found["libraries"][0];
    assert_eq!(driver["name"], "libcuda");
    if driver["version"].is_null() {
        let said = ok(folder, "doctor");
        assert!(said.contains("libcuda      not found, so there is no training on GPUs"), "{said}");
        let said = refused(folder, &format!("train {MODEL} --train-iters 1 --device cuda"), 3);
        assert!(said.contains("RM8001") && said.contains("libcuda"), "{said}");
    }
}
