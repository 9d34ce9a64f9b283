//! A whole checkpoint whose files were edited, listed and sealed anew: opened, loaded and verified.
//!
//! What opens and verifies without a fault must be the state that was saved, or say so.
#![no_main]

use arbitrary::Arbitrary;
use ckpt::testing::{RankMemory, Ranks, header, load, save};
use ckpt::{Store, crc64};
use libfuzzer_sys::fuzz_target;
use mesh::{DType, GroupTable, ParallelLayout, Placement, Shape, StateEntry, StateKind, StateTable, TensorKey};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// An edit of one file, the tables more often than the packs.
#[derive(Arbitrary, Debug)]
enum Edit {
    Set { file: u8, at: u16, byte: u8 },
    SetWord { file: u8, at: u16, word: u64 },
    Truncate { file: u8, len: u16 },
    Append { file: u8, bytes: Vec<u8> },
    Replace { file: u8, bytes: Vec<u8> },
}

fn table() -> StateTable {
    let entry = |key: &str, kind, dtype, shape: &[u64]| StateEntry {
        key: TensorKey::new(key),
        kind,
        dtype,
        placement: Placement::replicated(&Shape::new(shape)),
    };
    StateTable::new(vec![
        entry("large", StateKind::Model, DType::F32, &[70, 1024]),
        entry("moment", StateKind::Optimizer, DType::F32, &[9, 3]),
        entry("rng", StateKind::Rng, DType::U32, &[1, 1, 1, 5, 6]),
        entry("small", StateKind::Model, DType::F32, &[9]),
    ])
    .unwrap()
}

fn ranks() -> Ranks {
    Ranks::new(GroupTable::new("model", &ParallelLayout::single()))
}

/// The files of a whole checkpoint of step 7, by their path under the run's folder.
fn whole() -> &'static BTreeMap<PathBuf, Vec<u8>> {
    static WHOLE: OnceLock<BTreeMap<PathBuf, Vec<u8>>> = OnceLock::new();
    WHOLE.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::create(folder.path().to_str().unwrap()).unwrap();
        let table = table();
        ranks().run(|groups, exchange| {
            let memory = RankMemory::labelled(&table, &groups);
            save(&store, header(7, ParallelLayout::single()), &table, &groups, exchange, &memory).unwrap();
        });
        let mut files = BTreeMap::new();
        collect(folder.path(), folder.path(), &mut files);
        files
    })
}

fn collect(root: &Path, folder: &Path, files: &mut BTreeMap<PathBuf, Vec<u8>>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(root, &path, files);
        } else {
            files.insert(path.strip_prefix(root).unwrap().to_owned(), fs::read(&path).unwrap());
        }
    }
}

fn apply(edit: &Edit, files: &mut [(PathBuf, Vec<u8>)]) {
    let (Edit::Set { file, .. }
    | Edit::SetWord { file, .. }
    | Edit::Truncate { file, .. }
    | Edit::Append { file, .. }
    | Edit::Replace { file, .. }) = edit;
    let index = *file as usize % files.len();
    let bytes = &mut files[index].1;
    match edit {
        Edit::Set { at, byte, .. } if !bytes.is_empty() => {
            let at = *at as usize % bytes.len();
            bytes[at] = *byte;
        }
        Edit::SetWord { at, word, .. } if bytes.len() >= 8 => {
            let at = *at as usize % (bytes.len() - 7);
            bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        Edit::Truncate { len, .. } => bytes.truncate(*len as usize),
        Edit::Append { bytes: more, .. } => bytes.extend(more),
        Edit::Replace { bytes: other, .. } => bytes.clone_from(other),
        _ => {}
    }
}

/// The commit with the sizes and checksums that the files have now, sealed.
fn listed_anew(commit: &[u8], files: &[(PathBuf, Vec<u8>)]) -> Vec<u8> {
    let mut json: serde_json::Value = serde_json::from_slice(commit).unwrap();
    for entry in json["files"].as_array_mut().unwrap() {
        let path = Path::new("iter_0000007").join(entry["path"].as_str().unwrap());
        let (_, bytes) = files.iter().find(|(name, _)| *name == path).unwrap();
        entry["bytes"] = bytes.len().into();
        entry["crc64"] = format!("{:016x}", crc64(bytes)).into();
    }
    json.as_object_mut().unwrap().remove("seal");
    let text = serde_json::to_string(&json).unwrap();
    let open = format!("{},", text.strip_suffix('}').unwrap());
    format!("{open}\"seal\":\"{:016x}\"}}", crc64(open.as_bytes())).into_bytes()
}

fuzz_target!(|edits: Vec<Edit>| {
    let is_commit = |path: &Path| path.ends_with("checkpoint.json");
    let mut files: Vec<(PathBuf, Vec<u8>)> =
        whole().iter().filter(|(path, _)| !is_commit(path)).map(|(p, b)| (p.clone(), b.clone())).collect();
    for edit in edits.iter().take(8) {
        apply(edit, &mut files);
    }
    let (commit_path, commit) = whole().iter().find(|(path, _)| is_commit(path)).unwrap();
    let commit = listed_anew(commit, &files);
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    for (path, bytes) in files.iter().chain([&(commit_path.clone(), commit)]) {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    let store = Store::open(folder.path().to_str().unwrap()).unwrap();
    let Ok(checkpoint) = store.checkpoint(7) else { return };
    let faults = checkpoint.verify().map(|report| report.faults.len());
    let table = table();
    let groups = Arc::new(GroupTable::new("model", &ParallelLayout::single())).for_rank(mesh::Rank(0));
    let same_shapes = table.entries().iter().all(|entry| {
        (checkpoint.catalog().tensor(&entry.key))
            .is_some_and(|t| t.shape == entry.placement.shape() && t.dtype == entry.dtype)
    }) && checkpoint.catalog().tensors().len() == table.entries().len();
    if !same_shapes {
        return;
    }
    if let Ok((memory, _)) = load(&checkpoint, &table, &groups) {
        let as_saved = memory == RankMemory::labelled(&table, &groups);
        assert!(as_saved || faults.is_ok_and(|faults| faults > 0), "another state loads and verifies");
    }
});
