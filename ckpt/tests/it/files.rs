//! What lies in the folder, and what becomes of files that somebody made up.

use crate::support::*;
use arrow_ipc::reader::FileReader;
use arrow_ipc::writer::FileWriter;
use bytes::Bytes;
use ckpt::{
    COMMIT_NAME, Catalog, Store, StoredObject, TableFault, TableFile, TablesError, crc64, parse_commit,
    read_tables,
};
use expect_test::expect;
use mesh::{DType, DimPlacement, GroupKind, Placement, Shape, StateKind, StateTable};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Every file of the only checkpoint of a folder, by its path there, and the checkpoint's attempt.
fn files(root: &Path) -> (BTreeMap<String, Vec<u8>>, String) {
    let store = Store::open(root.to_str().unwrap()).unwrap();
    let checkpoint = store.latest(None).unwrap().checkpoint.unwrap();
    let folder = root.join(format!("iter_{:07}", checkpoint.step()));
    let paths =
        checkpoint.commit().files.iter().map(|file| file.path.clone()).chain([COMMIT_NAME.to_owned()]);
    let files = paths.map(|path| (path.clone(), fs::read(folder.join(path)).unwrap())).collect();
    (files, checkpoint.commit().writer.attempt.clone())
}

fn saved(table: &StateTable, degrees: Degrees) -> (BTreeMap<String, Vec<u8>>, String) {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path().to_str().unwrap()).unwrap();
    save_labelled(&store, 20, table, degrees);
    files(root.path())
}

#[test]
fn the_commit_reads_like_this() {
    let (files, attempt) = saved(&model(), Degrees { dp: 2, ..ONE });
    let text = String::from_utf8(files[COMMIT_NAME].clone()).unwrap().replace(&attempt, "ATTEMPT");
    // The attempt is part of the tables, so their checksums and the seal differ each time.
    let mut of_table = false;
    let masked = |line: &str| {
        of_table = line.contains(".arrow") || (of_table && !line.contains("path"));
        let (name, value) = line.split_once(": ").unwrap_or((line, ""));
        let varies = name.ends_with("\"seal\"") || (of_table && name.ends_with("\"crc64\""));
        if varies { line.replace(value, "…") } else { line.to_owned() }
    };
    let lines: Vec<String> = text.lines().map(masked).collect();
    expect![[r#"
        {
          "format": "remesh",
          "version": 1,
          "iteration": 20,
          "created": "2026-01-01T00:00:00Z",
          "writer": {
            "run": "run-1",
            "attempt": "ATTEMPT",
            "host": "host-1",
            "pid": 4711,
            "program": "test"
          },
          "counters": {
            "consumed_train_samples": 160,
            "skipped_train_samples": 0,
            "consumed_valid_samples": 0,
            "optimizer_steps": 20,
            "tokens": 0
          },
          "scheduler": {
            "lr": 0.1
          },
          "groups": {},
          "layout": {
            "world_size": 2,
            "rank_offset": 0,
            "tp": 1,
            "pp": 1,
            "cp": 1,
            "gtp": 1,
            "gtp_sequence_shards": 1,
            "order": "gtp-inside-cp"
          },
          "numerics": {},
          "config": {},
          "random": {
            "algorithm": "philox4x32-10",
            "seed": 1234,
            "ordinal": 160
          },
          "data": {},
          "fingerprint": "8f32b490171c44462b7a39650c6cd3ee",
          "partial": [],
          "files": [
            {
              "path": "tensors-ATTEMPT.arrow",
              "bytes": 6066,
              "crc64": …
            },
            {
              "path": "chunks-ATTEMPT.arrow",
              "bytes": 5538,
              "crc64": …
            },
            {
              "path": "data/ATTEMPT-0-0.pack",
              "bytes": 11040,
              "crc64": "1fa7b50b0d9ba030"
            },
            {
              "path": "data/ATTEMPT-1-0.pack",
              "bytes": 9416,
              "crc64": "caa9a0079028ca7e"
            }
          ],
          "seal": …
        }"#]]
    .assert_eq(&lines.join("\n"));
}

#[test]
fn equal_states_give_equal_bytes_but_for_the_attempt() {
    let degrees = Degrees { tp: 2, cp: 2, ..ONE };
    let ((one, first), (other, second)) = (saved(&model(), degrees), saved(&model(), degrees));
    assert_ne!(first, second);
    assert_eq!(one.len(), other.len());
    for (path, bytes) in &one {
        let twin = &other[&path.replace(&first, &second)];
        assert_eq!(bytes.len(), twin.len(), "{path}");
        if path.ends_with(".pack") {
            assert!(bytes == twin, "{path}");
        }
    }
}

#[test]
fn the_tables_open_in_any_arrow_library() {
    let (files, attempt) = saved(&model(), Degrees { tp: 2, dp: 2, ..ONE });
    let batch = |name: &str| {
        let reader =
            FileReader::try_new(std::io::Cursor::new(&files[&format!("{name}-{attempt}.arrow")]), None);
        let batches: Vec<_> = reader.unwrap().map(Result::unwrap).collect();
        assert_eq!(batches.len(), 1);
        batches.into_iter().next().unwrap()
    };
    let columns = |name: &str| {
        let schema = batch(name).schema();
        let columns = schema.fields().iter().map(|field| format!("{} {}", field.name(), field.data_type()));
        columns.collect::<Vec<_>>().join("\n")
    };
    assert_eq!(batch("tensors").num_rows(), model().entries().len());
    expect![[r#"
        tensor UInt32
        key Utf8
        kind Utf8
        dtype Utf8
        shape List(non-null UInt64)
        placement Utf8
        fingerprint FixedSizeBinary(16)
        min Float64
        max Float64
        mean Float64
        nonfinite UInt64"#]]
    .assert_eq(&columns("tensors"));
    expect![[r#"
        tensor UInt32
        lo List(non-null UInt64)
        hi List(non-null UInt64)
        pack Utf8
        offset UInt64
        stored_bytes UInt64
        raw_bytes UInt64
        codec UInt8
        crc64 UInt64
        frame_bytes List(non-null UInt32)
        frame_crc64 List(non-null UInt64)"#]]
    .assert_eq(&columns("chunks"));
}

#[test]
fn chunks_are_aligned_and_small_tensors_share_pages() {
    let store = Store::open("memory://").unwrap();
    let plain = |shape: &[u64]| Placement::replicated(&Shape::new(shape));
    let tensors = [("a", [1 << 20]), ("b", [100]), ("c", [3]), ("d", [1 << 20])];
    let entries = tensors.map(|(key, shape)| entry(key, StateKind::Model, DType::U8, plain(&shape)));
    save_labelled(&store, 1, &StateTable::new(entries.to_vec()).unwrap(), ONE);
    let checkpoint = store.checkpoint(1).unwrap();
    let offsets: Vec<u64> =
        checkpoint.catalog().tensors().iter().map(|tensor| tensor.chunks[0].offset).collect();
    let mib = 1 << 20;
    assert_eq!(offsets, [0, mib, mib + 128, mib + 4096]);
}

fn read(tensors: &[u8], chunks: &[u8], objects: &[StoredObject]) -> Result<Catalog, TablesError> {
    let table = |name: &str, bytes| TableFile { name: name.to_owned(), bytes: Bytes::copy_from_slice(bytes) };
    read_tables(table("tensors", tensors), [table("chunks", chunks)], objects.to_vec())
}

/// The table and the row are named, whichever batch the row is in.
#[test]
fn a_wrong_row_is_named() {
    let (files, attempt) = saved(&model(), Degrees { dp: 2, ..ONE });
    let [tensors, chunks] =
        ["tensors", "chunks"].map(|name| files[&format!("{name}-{attempt}.arrow")].clone());
    let one_row_a_batch = |table: &[u8]| {
        let batch = FileReader::try_new(std::io::Cursor::new(table), None).unwrap().next().unwrap().unwrap();
        let mut writer = FileWriter::try_new(Vec::new(), &batch.schema()).unwrap();
        for row in 0..batch.num_rows() {
            writer.write(&batch.slice(row, 1)).unwrap();
        }
        writer.into_inner().unwrap()
    };
    let (tensors, chunks) = (one_row_a_batch(&tensors), one_row_a_batch(&chunks));
    let object = |number| {
        let path = format!("data/{attempt}-{number}-0.pack");
        StoredObject { bytes: files[&path].len() as u64, path }
    };
    let catalog = read(&tensors, &chunks, &[object(0), object(1)]).unwrap();
    let of_chunks: Vec<usize> =
        catalog.tensors().iter().flat_map(|tensor| &tensor.chunks).map(|chunk| chunk.object).collect();
    // Without the pack that the first row is not in.
    let (there, missing) = (object(of_chunks[0]), object(1 - of_chunks[0]));
    let expected = of_chunks.iter().position(|object| *object != of_chunks[0]).unwrap();
    let error = read(&tensors, &chunks, &[there]).unwrap_err();
    let TablesError::Table { table, source: TableFault::Row { row, what } } = error else {
        panic!("{error}")
    };
    assert_eq!((table.as_str(), row), ("chunks", expected));
    assert_eq!(what, format!("the checkpoint has no file `{}`", missing.path));
    let error = read(&tensors, &tensors, &[object(0)]).unwrap_err();
    assert!(matches!(&error, TablesError::Table { table, source: TableFault::Columns } if table == "chunks"));
}

/// Every byte of both tables set to several values, and every length: an error or the same claims, never a panic, and
/// never an allocation that the file does not back.
#[test]
fn tables_that_somebody_made_up_are_refused() {
    let split = Placement::new(vec![DimPlacement::whole(70_000).exact(GroupKind::Tp)]);
    let small =
        |key: &str| entry(key, StateKind::Object, DType::U8, Placement::replicated(&Shape::new(&[3, 2])));
    let table = vec![entry("split", StateKind::Model, DType::F64, split), small("one"), small("two")];
    let (files, attempt) = saved(&StateTable::new(table).unwrap(), Degrees { tp: 2, ..ONE });
    let [tensors, chunks] =
        ["tensors", "chunks"].map(|name| files[&format!("{name}-{attempt}.arrow")].clone());
    let packs = files.iter().filter(|(path, _)| path.ends_with(".pack"));
    let objects: Vec<StoredObject> =
        packs.map(|(path, bytes)| StoredObject { path: path.clone(), bytes: bytes.len() as u64 }).collect();
    assert!(read(&tensors, &chunks, &objects).is_ok());
    assert!(read(&chunks, &tensors, &objects).is_err());
    assert!(read(&tensors, &chunks, &objects[..1]).is_err());
    for (table, is_tensors) in [(&tensors, true), (&chunks, false)] {
        let read_with = |changed: &[u8]| {
            if is_tensors { read(changed, &chunks, &objects) } else { read(&tensors, changed, &objects) }
        };
        for len in 0..table.len() {
            assert!(read_with(&table[..len]).is_err());
        }
        let mut changed = table.clone();
        for at in 0..table.len() {
            for value in [0x00, 0x7F, 0xFF, table[at] ^ 1] {
                changed[at] = value;
                drop(read_with(&changed));
            }
            changed[at] = table[at];
        }
    }
}

#[test]
fn commits_that_somebody_made_up_are_refused() {
    let (files, _) = saved(&model(), ONE);
    let text = &files[COMMIT_NAME];
    assert!(parse_commit(text).is_ok());
    for len in 0..text.len() - 1 {
        assert!(parse_commit(&text[..len]).is_err(), "cut at {len}");
    }
    let mut changed = text.clone();
    for at in 0..text.len() - 1 {
        changed[at] ^= 4;
        assert!(parse_commit(&changed).is_err(), "byte {at} changed");
        changed[at] = text[at];
    }
    let nested = format!("{}\"seal\": \"0000000000000000\"}}", "[".repeat(100_000));
    assert!(parse_commit(nested.as_bytes()).is_err());
    let resealed = |from: &str, to: &str| {
        let text = String::from_utf8(text.clone()).unwrap().replacen(from, to, 1);
        let (before, _) = text.rsplit_once("\"seal\"").unwrap();
        parse_commit(format!("{before}\"seal\": \"{:016x}\"}}", crc64(before.as_bytes())).as_bytes())
    };
    assert!(resealed("\"remesh\"", "\"other\"").is_err());
    assert!(resealed("\"world_size\": 1", "\"world_size\": 0").is_err());
    let pack = parse_commit(text).unwrap().files.last().unwrap().crc64;
    let digits = format!("{pack:016x}");
    assert!(digits.to_uppercase() != digits && resealed(&digits, &digits.to_uppercase()).is_err());
    assert!(resealed("\"pid\"", "\"iteration\": 1, \"pid\"").is_ok(), "a field of another object");
    assert!(resealed("\"created\"", "\"iteration\": 1, \"created\"").is_err(), "twice in one object");
}
