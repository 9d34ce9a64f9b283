//! Checkpoints of other software, read by the binary. `tests/fixtures/foreign` holds what the real libraries wrote, each with what
//! they loaded back from it, and, in `hostile`, files that were changed by hand.

use crate::cli::{command, text};
use serde_json::{Map, Value};
use std::fs;
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/foreign")
}

/// The tensors of a value, by the way to them joined by dots, as `torch_save` cases keep them.
fn leaves(value: &Value, path: String, found: &mut Map<String, Value>) {
    let below = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
    match value["t"].as_str().unwrap() {
        "tensor" => drop(found.insert(path, value["v"].clone())),
        "dict" | "odict" => {
            for pair in value["v"].as_array().unwrap() {
                leaves(&pair[1], below(pair[0]["v"].as_str().unwrap_or("None")), found);
            }
        }
        "list" | "tuple" => {
            for (at, item) in value["v"].as_array().unwrap().iter().enumerate() {
                leaves(item, below(&at.to_string()), found);
            }
        }
        _ => {}
    }
}

#[test]
fn tensors_are_those_that_the_library_loads_back() {
    let mut num_cases = 0;
    for kind in ["dcp", "megatron", "hf", "torch_save"] {
        for case in fs::read_dir(fixtures().join(kind)).unwrap().map(|case| case.unwrap().path()) {
            let expected: Value =
                serde_json::from_slice(&fs::read(case.join("expected.json")).unwrap()).unwrap();
            let mut wanted = Map::new();
            match expected.get("root") {
                Some(root) => leaves(root, String::new(), &mut wanted),
                None => wanted = expected["tensors"].as_object().unwrap().clone(),
            }
            let output =
                command(&case, "digest --json").arg(expected["path"].as_str().unwrap()).output().unwrap();
            assert!(output.status.success(), "{}: {}", case.display(), text(&output.stderr));
            let found: Map<String, Value> = serde_json::from_slice(&output.stdout).unwrap();
            assert!(!wanted.is_empty());
            for (name, tensor) in &wanted {
                for field in ["dtype", "shape", "sha256"] {
                    assert_eq!(found[name][field], tensor[field], "{}: `{name}`: {field}", case.display());
                }
            }
            num_cases += 1;
        }
    }
    assert_eq!(num_cases, 15);
}

#[test]
fn hostile_files_are_refused_with_what_is_wrong_and_nothing_is_executed() {
    let work = tempfile::tempdir().unwrap();
    for (path, code, said) in [
        ("pt_runs_command/model.pt", "RM4001", "posix.system"),
        ("pt_stream_runs_command/model.pt", "RM4001", "posix.system"),
        ("dcp_metadata_runs_command_inside/ckpt", "RM4001", "posix.system"),
        ("dcp_object_runs_command/ckpt", "RM4001", "posix.system"),
        ("dcp_tensor_runs_command/ckpt", "RM4001", "posix.system"),
        ("pt_whole_module/model.pt", "RM4003", "torch.nn.modules.linear.Linear"),
        ("pt_sparse/model.pt", "RM4003", "_rebuild_sparse_tensor"),
        ("pt_torchscript/model.pt", "RM4003", "TorchScript"),
        ("pt_truncated/model.pt", "RM4003", "ZIP archive"),
        ("pt_not_a_checkpoint/model.pt", "RM4004", "no format"),
        ("dcp_only_tmp_metadata/ckpt", "RM4003", "never finished"),
        ("dcp_missing_shard/ckpt", "RM4003", "__1_0.distcp"),
        ("dcp_path_traversal/ckpt", "RM4003", "out of the checkpoint"),
        ("dcp_overlap/ckpt", "RM4003", "chunks [0..4, 0..6] and [2..6, 0..6] share [2..4, 0..6]"),
        ("dcp_hole/ckpt", "RM4003", "24 elements are in no chunk"),
        ("dcp_chunk_without_storage/ckpt", "RM4003", "nothing says where"),
        ("dcp_storage_past_end/ckpt", "RM4003", "should hold"),
        ("dcp_claims_2_60/ckpt", "RM4003", "more elements than can be counted"),
        ("dcp_flipped_data_byte/ckpt", "RM4003", "CRC-32"),
        ("dcp_dtype_differs/ckpt", "RM4003", "a tensor of F32 4 × 6 where one of I64 4 × 6 should be"),
        ("dcp_storage_claims_more/ckpt", "RM4003", "96 bytes"),
        ("dcp_stride_past_storage/ckpt", "RM4003", "reaches past"),
        ("meg_version_9/ckpt/iter_0000001", "RM4003", "version 9"),
        ("meg_latest_traversal/ckpt", "RM4003", "no step"),
    ] {
        let output =
            command(work.path(), "digest").arg(fixtures().join("hostile").join(path)).output().unwrap();
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(6), "{path}: {told}");
        assert!(told.contains(code) && told.contains(said), "{path}: {told}");
        assert_eq!(fs::read_dir(work.path()).unwrap().count(), 0, "{path}: something was written");
    }
    let empty = fixtures().join("hostile/st_zero_times_huge/model.safetensors");
    let output = command(work.path(), "digest").arg(empty).output().unwrap();
    assert!(output.status.success(), "a tensor of no elements: {}", text(&output.stderr));
}

#[test]
#[cfg(unix)]
fn a_link_is_followed_within_the_checkpoint_alone() {
    let work = tempfile::tempdir().unwrap();
    let copy = work.path().join("ckpt");
    fs::create_dir(&copy).unwrap();
    for file in fs::read_dir(fixtures().join("dcp/uneven_mesh2x2_w4/ckpt")).unwrap().map(Result::unwrap) {
        fs::copy(file.path(), copy.join(file.file_name())).unwrap();
    }
    let file = copy.join("__0_0.distcp");
    fs::rename(&file, copy.join("elsewhere")).unwrap();
    std::os::unix::fs::symlink("elsewhere", &file).unwrap();
    let output = command(work.path(), "digest ckpt").output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));

    fs::rename(copy.join("elsewhere"), work.path().join("outside")).unwrap();
    fs::remove_file(&file).unwrap();
    std::os::unix::fs::symlink("../outside", &file).unwrap();
    let output = command(work.path(), "digest ckpt").output().unwrap();
    assert_eq!(output.status.code(), Some(6));
    assert!(text(&output.stderr).contains("leads out of the checkpoint"));
}

#[test]
fn inspect_shows_what_other_software_saved_from_its_description_alone() {
    let work = tempfile::tempdir().unwrap();
    let case = fixtures().join("hostile/dcp_flipped_data_byte");
    let output = command(&case, "inspect ckpt").output().unwrap();
    expect_test::expect![[r"
        PyTorch DCP  ckpt
          2 tensors · 240 B · 1 other object

          tensor  dtype  global shape  chunks
          v       BF16   6 × 4         2
          w       F32    8 × 6         2
    "]]
    .assert_eq(&text(&output.stdout));
    let output = command(work.path(), "inspect .").output().unwrap();
    assert_eq!(output.status.code(), Some(3), "an empty folder is no checkpoint: {}", text(&output.stderr));
}
