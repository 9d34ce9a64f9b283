//! Choosing what to resume from when the newest step is not whole.

use crate::support::*;
use ckpt::testing::{RankMemory, header, load, save};
use ckpt::{Checkpoint, Fault, OpenError, Store, crc64};
use mesh::{DType, Placement, Shape, StateKind, StateTable};
use std::fs;
use std::path::{Path, PathBuf};

fn table() -> StateTable {
    let plain = |shape: &[u64]| Placement::replicated(&Shape::new(shape));
    StateTable::new(vec![
        entry("large", StateKind::Model, DType::F32, plain(&[300, 512])),
        entry("small", StateKind::Model, DType::F32, plain(&[9])),
        entry("tiny", StateKind::Model, DType::F32, plain(&[1])),
    ])
    .unwrap()
}

struct Run {
    _folder: tempfile::TempDir,
    root: PathBuf,
    store: Store,
}

/// Good steps 10 and 20 in a local folder.
fn run() -> Run {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_owned();
    let store = Store::open(root.to_str().unwrap()).unwrap();
    save_labelled(&store, 10, &table(), ONE);
    save_labelled(&store, 20, &table(), ONE);
    Run { _folder: folder, root, store }
}

impl Run {
    fn newest(&self) -> PathBuf {
        self.root.join("iter_0000020")
    }

    fn file(&self, part: &str) -> PathBuf {
        let all = all_files(&self.newest());
        all.into_iter().find(|path| path.to_str().unwrap().contains(part)).unwrap()
    }

    fn edit_commit(&self, edit: impl Fn(&str) -> String) {
        let path = self.newest().join("checkpoint.json");
        fs::write(&path, edit(&fs::read_to_string(&path).unwrap())).unwrap();
    }
}

fn all_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { files.extend(all_files(&path)) } else { files.push(path) }
    }
    files.sort();
    files
}

fn sealed(text: &str) -> String {
    let (before, _) = text.rsplit_once("\"seal\"").unwrap();
    format!("{before}\"seal\": \"{:016x}\"\n}}\n", crc64(before.as_bytes()))
}

fn truncate(path: &Path, by: u64) {
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len() - by).unwrap();
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 1;
    fs::write(path, bytes).unwrap();
}

/// Step 20 is passed over for a reason that has these words, and is refused by name; nothing is removed.
fn assert_passed_over(what: &str, words: &str, break_it: impl Fn(&Run)) {
    let run = run();
    break_it(&run);
    let before = all_files(&run.root);
    let latest = run.store.latest(None).unwrap();
    assert_eq!(latest.checkpoint.as_ref().map(Checkpoint::step), Some(10), "{what}");
    let reasons: Vec<String> = latest.passed_over.iter().map(ToString::to_string).collect();
    assert_eq!(reasons.len(), 1, "{what}: {reasons:?}");
    assert!(
        reasons[0].starts_with("step 20 is passed over (RM40") && reasons[0].contains(words),
        "{}",
        reasons[0]
    );
    let error = run.store.checkpoint(20).unwrap_err();
    assert!(error.is_damage(), "{what}: {error}");
    assert_eq!(all_files(&run.root), before, "{what}");
    assert_loads_labelled(&latest.checkpoint.unwrap(), &table(), ONE);
}

#[test]
fn the_newest_whole_step_is_taken() {
    let is_commit = |path: &Path| path.ends_with("checkpoint.json");
    assert_passed_over("an empty folder", "has no checkpoint.json", |run| {
        fs::remove_dir_all(run.newest()).unwrap();
        fs::create_dir(run.newest()).unwrap();
    });
    assert_passed_over("no commit", "has no checkpoint.json", |run| {
        fs::remove_file(run.newest().join("checkpoint.json")).unwrap();
    });
    assert_passed_over("a truncated commit", "no seal", |run| {
        truncate(&run.newest().join("checkpoint.json"), 40);
    });
    assert_passed_over("a missing pack", ".pack` is missing", |run| {
        fs::remove_file(run.file(".pack")).unwrap()
    });
    assert_passed_over("a missing table", ".arrow` is missing", |run| {
        fs::remove_file(run.file("chunks-")).unwrap()
    });
    assert_passed_over("a pack without its last byte", "bytes, not", |run| truncate(&run.file(".pack"), 1));
    assert_passed_over("a flipped byte in a table", "its checksum is", |run| {
        flip(&run.file("tensors-"), 300)
    });
    assert_passed_over("only temporary names", "has no checkpoint.json", |run| {
        for path in all_files(&run.newest()) {
            let name = if is_commit(&path) { "checkpoint.json#1" } else { "x.tmp" };
            fs::rename(&path, run.newest().join(name)).unwrap();
        }
    });
    assert_passed_over("the commit of another step", "is the commit of step 10", |run| {
        fs::copy(run.root.join("iter_0000010/checkpoint.json"), run.newest().join("checkpoint.json"))
            .unwrap();
    });
    assert_passed_over("counters missing", "missing field `counters`", |run| {
        run.edit_commit(|text| sealed(&text.replacen("\"counters\"", "\"count\"", 1)));
    });
    assert_passed_over("an edited commit", "changed or damaged", |run| {
        run.edit_commit(|text| text.replacen("\"pid\": 4711", "\"pid\": 4712", 1));
    });
    assert_passed_over("a file outside the folder", "`data/../x.pack`", |run| {
        let name = run.file(".pack").file_name().unwrap().to_str().unwrap().to_owned();
        run.edit_commit(|text| sealed(&text.replacen(&name, "../x.pack", 1)));
    });
    assert_passed_over("two tables of tensors", "lists 2 tables of tensors, not one", |run| {
        run.edit_commit(|text| sealed(&text.replacen("chunks-", "tensors-2-", 1)));
    });
    assert_passed_over(
        "a table in the place of another",
        "chunks-0.arrow` cannot be read as a table",
        |run| {
            let table = run.file("tensors-");
            let bytes = fs::read(&table).unwrap();
            fs::write(run.newest().join("chunks-0.arrow"), &bytes).unwrap();
            let files = format!(
                "{{\"path\": \"chunks-0.arrow\", \"bytes\": {}, \"crc64\": \"{:016x}\"}}",
                bytes.len(),
                crc64(&bytes)
            );
            run.edit_commit(|text| {
                sealed(&text.replacen("\"files\": [", &format!("\"files\": [{files},"), 1))
            });
        },
    );
}

/// What may be whole, and this program cannot tell, stops everything that looks for a step or would replace it.
fn assert_refused(code: &str, words: &str, change: impl Fn(&Run)) {
    let run = run();
    change(&run);
    let before = all_files(&run.root);
    let check = |error: OpenError| {
        assert!(!error.is_damage() && error.to_string().contains(words), "{error}");
        assert_eq!(error.code(), code);
    };
    check(run.store.checkpoint(20).unwrap_err());
    check(run.store.latest(None).unwrap_err());
    check(run.store.whole_steps_after(10).unwrap_err());
    assert_eq!(run.store.latest(Some(20)).unwrap().require(&run.store).unwrap().step(), 10);
    let error = run.store.require_none_after(10, &[]).unwrap_err();
    assert_eq!(error.code(), code);
    let saved = ranks(ONE).run(|groups, exchange| {
        let (table, header) = (table(), header(20, layout(ONE)));
        save(&run.store, header, &table, &groups, exchange, &RankMemory::labelled(&table, &groups))
    });
    let error = saved.into_iter().next().unwrap().unwrap_err();
    assert!(error.to_string().contains(words), "{error}");
    assert_eq!(error.code(), code);
    assert_eq!(all_files(&run.root), before, "the commit stays, and nothing of the save does");
}

#[test]
fn a_newer_version_is_never_passed_over_or_replaced() {
    assert_refused("RM4022", "checkpoint.json` has version 2 of the format", |run| {
        run.edit_commit(|text| sealed(&text.replacen("\"version\": 1", "\"version\": 2", 1)));
    });
}

#[test]
fn a_symbolic_link_is_never_passed_over_or_replaced() {
    let link = |run: &Run, target: &Path| {
        let pack = run.file(".pack");
        fs::rename(&pack, run.root.join("elsewhere")).unwrap();
        std::os::unix::fs::symlink(target, &pack).unwrap();
    };
    let words = ".pack` is a symbolic link";
    assert_refused("RM4023", words, |run| link(run, &run.root.join("elsewhere")));
    assert_refused("RM4023", words, |run| link(run, &run.root.join("not-mounted")));
}

#[test]
fn fields_that_are_not_known_are_ignored() {
    let unknown = run();
    unknown.edit_commit(|text| sealed(&text.replacen("\"iteration\"", "\"later\": [1], \"iteration\"", 1)));
    assert_loads_labelled(&unknown.store.checkpoint(20).unwrap(), &table(), ONE);
}

/// The one fault that sizes do not show: found while loading, so that the caller takes the next older step.
#[test]
fn a_flipped_bit_is_found_and_named() {
    let run = run();
    let newest = run.store.latest(None).unwrap().checkpoint.unwrap();
    let chunk = &newest.catalog().tensor(&"large".into()).unwrap().chunks[0];
    // In the second frame of 256 KiB: rows 128 to 256 of 512 elements.
    flip(&run.file(".pack"), chunk.offset as usize + 300_000);
    let error = ranks(ONE).run(|groups, _| load(&newest, &table(), &groups).unwrap_err());
    let text = error[0].to_string();
    assert!(text.starts_with("`large` [128..256, 0..512] is damaged: bytes 262144..524288 of"), "{text}");
    assert!(text.contains("/iter_0000020/data/"), "{text}");
    assert_eq!((error[0].is_damage(), error[0].code()), (true, "RM4021"));
    let older = run.store.latest(Some(20)).unwrap().checkpoint.unwrap();
    assert_eq!(older.step(), 10);
    assert_loads_labelled(&older, &table(), ONE);
    let faults: Vec<String> = newest.verify().unwrap().faults.iter().map(ToString::to_string).collect();
    assert_eq!(faults, [text]);
}

#[test]
fn a_changed_gap_between_chunks_is_found() {
    let run = run();
    let checkpoint = run.store.checkpoint(20).unwrap();
    // 36 bytes of `small`, then `tiny` at the next multiple of 64.
    let small = &checkpoint.catalog().tensor(&"small".into()).unwrap().chunks[0];
    flip(&run.file(".pack"), small.offset as usize + 40);
    assert_loads_labelled(&checkpoint, &table(), ONE);
    let faults = checkpoint.verify().unwrap().faults;
    assert!(matches!(faults.as_slice(), [Fault::Pack { .. }]), "{faults:?}");
}

#[test]
fn what_cannot_be_found_is_told_apart() {
    let run = run();
    let missing = run.store.checkpoint(30).unwrap_err();
    let root = run.root.display();
    assert_eq!(missing.to_string(), format!("no checkpoint of step 30 in `{root}`; nearest: 10, 20"));
    assert_eq!(missing.code(), "RM4012");
    let mistyped = Store::open(run.root.join("typo").to_str().unwrap()).unwrap_err();
    assert_eq!(mistyped.to_string(), format!("there is no folder `{root}/typo`"));
    assert_eq!(mistyped.code(), "RM4012");
    let file = run.root.join("iter_0000010/checkpoint.json");
    for path in [file.clone(), file.join("run")] {
        let path = path.to_str().unwrap();
        for error in [Store::open(path).unwrap_err(), Store::create(path).unwrap_err()] {
            let expected = format!("a file lies where the folder `{path}`, or one above it, should be");
            assert_eq!(error.to_string(), expected);
            assert_eq!(error.code(), "RM1006");
        }
    }
    let empty = Store::create(run.root.join("empty").to_str().unwrap()).unwrap();
    let latest = empty.latest(None).unwrap();
    assert!(latest.checkpoint.is_none() && latest.passed_over.is_empty());
    let none = latest.require(&empty).unwrap_err();
    assert_eq!(none.to_string(), format!("no checkpoint in `{root}/empty`"));
    assert_eq!(none.code(), "RM4012");
    // The root vanishes while the run goes on: a storage error, and no word of a missing step.
    fs::remove_dir_all(&run.root).unwrap();
    fs::write(&run.root, "a file").unwrap();
    let error = run.store.latest(None).unwrap_err();
    assert!(error.to_string().starts_with("listing "), "{error}");
    assert_eq!(error.code(), "RM1006");
    fs::remove_file(&run.root).unwrap();
}
