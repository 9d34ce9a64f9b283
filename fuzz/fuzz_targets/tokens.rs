//! A token file: the first bytes say where its index ends and its tokens begin.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::fs;

fuzz_target!(|input: (Vec<u8>, Vec<u8>)| {
    let (index, tokens) = input;
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let prefix = folder.path().join("t");
    // Half of the inputs get the header that a token index must have, so that its counts are reached.
    let mut bytes = if index.first().is_some_and(|byte| byte & 1 == 1) {
        b"MMIDIDX\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x08".to_vec()
    } else {
        Vec::new()
    };
    bytes.extend(&index);
    fs::write(prefix.with_extension("idx"), bytes).unwrap();
    fs::write(prefix.with_extension("bin"), &tokens).unwrap();
    let Ok(file) = train::data::TokenFile::open(&prefix) else { return };
    assert!(file.num_tokens() <= tokens.len() as u64);
    let seq_length = 4;
    if let Ok(samples) = file.num_samples(seq_length) {
        for sample in (0..samples).take(3) {
            let _ = file.read_sample(sample, seq_length, 257);
        }
    }
});
