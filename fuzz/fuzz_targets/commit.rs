//! `checkpoint.json`, sealed anew so that what lies behind the seal is reached.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    let _ = ckpt::parse_commit(text);
    let mut sealed = text.to_vec();
    let seal = ckpt::crc64(text);
    sealed.extend(format!("\"seal\": \"{seal:016x}\"\n}}\n").as_bytes());
    if let Ok(commit) = ckpt::parse_commit(&sealed) {
        assert!(commit.files.iter().all(|file| !file.path.contains("..") && !file.path.starts_with('/')));
    }
});
