//! Folders of safetensors: what the format allows is read, all else is refused before anything is allocated for it.

use ckpt::{SafetensorsFolder, Store};
use expect_test::expect;
use mesh::DType;
use std::path::Path;

/// A file: the length of its header, the header, the data.
fn file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

fn open(files: &[(&str, Vec<u8>)]) -> Result<SafetensorsFolder, String> {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    open_folder(folder.path()).map_err(|error| error.replace(folder.path().to_str().unwrap(), "FOLDER"))
}

fn open_folder(folder: &Path) -> Result<SafetensorsFolder, String> {
    let store = Store::open(folder.to_str().unwrap()).unwrap();
    SafetensorsFolder::open(&store).map_err(|error| format!("{} {error}", error.code()))
}

#[test]
fn tensors_of_any_order_shape_and_padding_are_read() {
    let header = r#"{"b":{"dtype":"F32","shape":[2],"data_offsets":[2,10]},"__metadata__":{"format":"pt"},
        "a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]},
        "../../x":{"dtype":"U8","shape":[0,4611686018427387904],"data_offsets":[10,10]}}      "#;
    let data: Vec<u8> = (0..10).collect();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("model.safetensors"), file(header, &data)).unwrap();
    let opened = open_folder(folder.path()).unwrap();
    let b = &opened.tensors()["b"];
    assert_eq!((b.dtype, b.shape.dims()), (DType::F32, &[2][..]));
    assert_eq!(opened.read("b").unwrap(), data[2..]);
    assert_eq!(opened.read("a").unwrap(), data[..2]);
    assert!(opened.read("../../x").unwrap().is_empty());
}

#[test]
fn a_file_that_breaks_a_rule_is_refused_with_the_numbers() {
    let entry = |name: &str, dtype: &str, shape: &str, offsets: &str| {
        format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
    };
    let a = entry("a", "F32", "[1]", "[0,4]");
    let of = |entries: &[&str], data: usize| file(&format!("{{{}}}", entries.join(",")), &vec![0; data]);
    let deep = format!("{}{}", "[".repeat(50_000), "]".repeat(50_000));
    let said: Vec<String> = [
        vec![0; 7],
        [&(1u64 << 63).to_le_bytes()[..], b"{}"].concat(),
        [&100u64.to_le_bytes()[..], b"{}"].concat(),
        file("\u{feff}{}", b""),
        file("[]", b""),
        file("{\"a\":1}", b""),
        file(&format!("{{\"a\":{deep}}}"), b""),
        of(&[&a, &a], 4),
        of(&[&a, &entry("b", "F32", "[1]", "[8,12]")], 12),
        of(&[&a, &entry("b", "F32", "[1]", "[2,6]")], 6),
        of(&[&a], 2),
        of(&[&a], 6),
        of(&[&entry("a", "F32", "[2]", "[0,4]")], 4),
        of(&[&entry("a", "F32", "[1]", "[4,0]")], 4),
        of(&[&entry("a", "F32", "[4294967296,4294967296]", "[0,4]")], 4),
        of(&[&entry("a", "F32", "[-1]", "[0,4]")], 4),
        of(&[&entry("a", "F33", "[1]", "[0,4]")], 4),
        of(&[&a, r#""__metadata__":{"n":1}"#], 4),
    ]
    .into_iter()
    .map(|bytes| open(&[("model.safetensors", bytes)]).unwrap_err())
    .collect();
    expect![[r#"
        RM4061 `model.safetensors` is no file of safetensors: its 7 bytes are too short for a header, or too many for an index
        RM4061 `model.safetensors` is no file of safetensors: its header of 9223372036854775808 bytes does not fit its 10 bytes, or is above the limit of 100000000
        RM4061 `model.safetensors` is no file of safetensors: its header of 100 bytes does not fit its 10 bytes, or is above the limit of 100000000
        RM4061 `model.safetensors` is no file of safetensors: expected value at line 1 column 1
        RM4061 `model.safetensors` is no file of safetensors: invalid type: sequence, expected a map of tensors at line 1 column 0
        RM4061 `model.safetensors` is no file of safetensors: invalid type: integer `1`, expected struct Entry at line 1 column 6
        RM4061 `model.safetensors` is no file of safetensors: invalid type: sequence, expected a string at line 1 column 6
        RM4061 `model.safetensors` is no file of safetensors: `a` comes twice at line 1 column 57
        RM4061 `model.safetensors` is no file of safetensors: `b` begins at byte 8 of the data, where the tensors before it end at 4
        RM4061 `model.safetensors` is no file of safetensors: `b` begins at byte 2 of the data, where the tensors before it end at 4
        RM4061 `model.safetensors` is no file of safetensors: its tensors end at byte 4 of 2 bytes of data
        RM4061 `model.safetensors` is no file of safetensors: its tensors end at byte 4 of 6 bytes of data
        RM4061 `model.safetensors` is no file of safetensors: `a` is said to be at bytes 0 to 4, which are not those of its shape
        RM4061 `model.safetensors` is no file of safetensors: `a` is said to be at bytes 4 to 0, which are not those of its shape
        RM4061 `model.safetensors` is no file of safetensors: `a` is said to be at bytes 0 to 4, which are not those of its shape
        RM4061 `model.safetensors` is no file of safetensors: invalid value: integer `-1`, expected u64 at line 1 column 31
        RM4061 `model.safetensors` is no file of safetensors: `a` has the element type F33, which is not known
        RM4061 `model.safetensors` is no file of safetensors: invalid type: integer `1`, expected a string at line 1 column 75"#]].assert_eq(&said.join("\n"));
}

#[test]
fn an_index_that_the_files_contradict_is_refused() {
    let a = file(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, &[7]);
    let index = |map: &str| ("model.safetensors.index.json", format!("{{{map}}}").into_bytes());
    let said: Vec<String> = [
        vec![index(r#""metadata":{}"#)],
        vec![index(r#""weight_map":{"a":"1.safetensors"}"#)],
        vec![index(r#""weight_map":{"a":"../1.safetensors"}"#), ("1.safetensors", a.clone())],
        vec![
            index(r#""weight_map":{"a":"1.safetensors","b":"1.safetensors"}"#),
            ("1.safetensors", a.clone()),
        ],
        vec![index(r#""weight_map":{"b":"1.safetensors"}"#), ("1.safetensors", a.clone())],
        vec![("1.safetensors", a.clone()), ("2.safetensors", a.clone())],
        vec![("1.bin", a.clone())],
    ]
    .iter()
    .map(|files| open(files).unwrap_err())
    .collect();
    expect![[r#"
        RM4061 `model.safetensors.index.json` is no file of safetensors: missing field `weight_map` at line 1 column 15
        RM4062 `model.safetensors.index.json` of `FOLDER` says that `a` is in `1.safetensors`, which is not so
        RM4062 `model.safetensors.index.json` of `FOLDER` says that `a` is in `../1.safetensors`, which is not so
        RM4062 `model.safetensors.index.json` of `FOLDER` says that `b` is in `1.safetensors`, which is not so
        RM4062 `1.safetensors` of `FOLDER` holds `a`, which `model.safetensors.index.json` or another file says is elsewhere
        RM4062 `2.safetensors` of `FOLDER` holds `a`, which `model.safetensors.index.json` or another file says is elsewhere
        RM4060 `FOLDER` holds no file of safetensors"#]].assert_eq(&said.join("\n"));
}
