//! What `data tokenize` writes and what it leaves alone.

use super::{ok, refused};
use expect_test::expect;

#[test]
fn tokenizing_writes_bytes_and_an_end_token_for_each_document() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("a.txt"), "ab").unwrap();
    std::fs::write(folder.join("b.txt"), [0, 255]).unwrap();
    let said = ok(folder, "data tokenize a.txt b.txt -o tokens");
    expect![[r#"
        6 tokens of 2 documents, vocabulary 257
        wrote tokens.bin, tokens.idx and tokens.tokenizer.json
    "#]]
    .assert_eq(&said);
    let bin = std::fs::read(folder.join("tokens.bin")).unwrap();
    let tokens: Vec<u16> = bin.as_chunks().0.iter().map(|id| u16::from_le_bytes(*id)).collect();
    assert_eq!(tokens, [97, 98, 256, 0, 255, 256]);
    assert_eq!(train::data::TokenFile::open(&folder.join("tokens")).unwrap().num_documents(), 2);
    expect![[r#"
        {
          "kind": "byte",
          "vocab_size": 257,
          "eod": 256,
          "hash": "3bc445c62db5ead8"
        }
    "#]]
    .assert_eq(&std::fs::read_to_string(folder.join("tokens.tokenizer.json")).unwrap());
}

#[test]
fn a_missing_document_leaves_tokens_that_are_there_alone() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("a.txt"), "ab").unwrap();
    ok(folder, "data tokenize a.txt -o tokens");
    let before = std::fs::read(folder.join("tokens.bin")).unwrap();
    let said = refused(folder, "data tokenize a.txt nowhere.txt -o tokens", 3);
    expect![[r#"
        Error: RM1003

          × opening `nowhere.txt`
          ╰─▶ No such file or directory (os error 2)
          help: check the path for a typing error
    "#]]
    .assert_eq(&said);
    assert_eq!(std::fs::read(folder.join("tokens.bin")).unwrap(), before);
}

#[test]
fn a_document_is_never_written_over_by_its_own_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("book.bin"), "text").unwrap();
    let said = refused(folder, "data tokenize ./book.bin -o book", 7);
    assert!(said.contains("RM7004") && said.contains("is a document, and would be written over"), "{said}");
    assert_eq!(std::fs::read(folder.join("book.bin")).unwrap(), b"text");
}
