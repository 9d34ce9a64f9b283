//! A checkpoint that an earlier version saved stays readable, to the bit, and goes on to the steps that it went on to then.

use crate::cli::{command, metrics, ok, text, with_tokens};
use std::fs;
use std::path::Path;

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let (path, name) = entry.map(|entry| (entry.path(), entry.file_name())).unwrap();
        if path.is_dir() {
            copy(&path, &to.join(name));
        } else {
            fs::copy(path, to.join(name)).unwrap();
        }
    }
}

/// `tests/fixtures/golden/README.md` has the commands that made it.
#[test]
fn a_checkpoint_of_an_earlier_version_is_read_and_goes_on() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/golden");
    let folder = with_tokens();
    let folder = folder.path();
    copy(&golden.join("run"), &folder.join("run"));
    assert!(ok(folder, "verify run@2").starts_with("ok "));
    let digest = |run: &str| -> serde_json::Value {
        serde_json::from_str(&ok(folder, &format!("digest {run} --json"))).unwrap()
    };
    let expected: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(golden.join("digest.json")).unwrap()).unwrap();
    assert_eq!(digest("run@2"), expected["2"]);
    let flags = fs::read_to_string(golden.join("flags")).unwrap();
    for (name, layout) in [("same", "--tp 2 --weight-shards 4"), ("other", "--cp 2")] {
        let line = format!("train {flags} {layout} --train-iters 4 --load run@2 --save {name} --strict");
        let output = command(folder, &line).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        let said = text(&output.stdout);
        assert!(said.lines().next().unwrap().ends_with(", verified L2"), "{said}");
        assert!(said.contains("L3 step 3 equals the saved run's, bit for bit"), "{said}");
        assert_eq!(metrics(folder, name), metrics(folder, "run")[2..]);
        assert_eq!(digest(name), expected["4"]);
    }
}
