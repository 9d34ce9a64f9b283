//! A folder of one safetensors file: a header up to the first zero byte, with the length that it has, and data behind it;
//! or the bytes as they are, behind a `!`.
#![no_main]

use ckpt::{SafetensorsFolder, Store};
use libfuzzer_sys::fuzz_target;
use std::fs;

fuzz_target!(|input: &[u8]| {
    let bytes = match input.strip_prefix(b"!") {
        Some(raw) => raw.to_vec(),
        None => {
            let len = input.iter().position(|byte| *byte == 0).unwrap_or(input.len());
            let data = input.get(len + 1..).unwrap_or_default();
            [&(len as u64).to_le_bytes(), &input[..len], data].concat()
        }
    };
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    let store = Store::open(folder.path().to_str().unwrap()).unwrap();
    let Ok(opened) = SafetensorsFolder::open(&store) else { return };
    for name in opened.tensors().keys() {
        assert!(opened.read(name).unwrap().len() <= input.len());
    }
});
