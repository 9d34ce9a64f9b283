//! What `data tokenize` writes and what it leaves alone.

use super::{command, ok, refused, text};
use expect_test::expect;
use flate2::Compression;
use flate2::write::GzEncoder;
use std::io::Write;
use std::path::Path;
use train::data::{TokenFile, Tokenizer};

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tokenizer");

/// All ids of a token file of 16 bits.
fn ids(prefix: &Path) -> Vec<u16> {
    let bin = std::fs::read(prefix.with_extension("bin")).unwrap();
    bin.as_chunks().0.iter().map(|id| u16::from_le_bytes(*id)).collect()
}

/// Names of the files of a folder that begin with `tokens` or are hidden.
fn written(folder: &Path) -> Vec<String> {
    let names =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.starts_with(['t', '.'])).collect();
    names.sort();
    names
}

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
    assert_eq!(ids(&folder.join("tokens")), [97, 98, 256, 0, 255, 256]);
    assert_eq!(TokenFile::open(&folder.join("tokens")).unwrap().num_documents(), 2);
    let mode = |name: &str| std::fs::metadata(folder.join(name)).unwrap().permissions();
    assert_eq!(mode("tokens.bin"), mode("a.txt"), "who may read an ordinary file may read tokens");
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
    let said = refused(folder, "data tokenize a.txt nowhere.txt -o tokens --force", 3);
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

#[test]
fn a_token_file_is_replaced_by_force_alone_and_only_by_a_whole_one() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("a.txt"), "ab").unwrap();
    ok(folder, "data tokenize a.txt -o tokens");
    let said = refused(folder, "data tokenize a.txt -o tokens", 7);
    expect![[r#"
        Error: RM7004

          × `tokens.bin` is there already
          help: give -o another prefix, or replace the token file with --force
    "#]]
    .assert_eq(&said);
    // The second line is bad, when a document has been tokenized already.
    std::fs::write(folder.join("b.jsonl"), "{\"text\": \"cde\"}\n{\"text\": 3}\n").unwrap();
    refused(folder, "data tokenize b.jsonl -o tokens --force", 6);
    assert_eq!(ids(&folder.join("tokens")), [97, 98, 256]);
    std::fs::write(folder.join("b.jsonl"), "{\"text\": \"cde\"}\n").unwrap();
    ok(folder, "data tokenize b.jsonl -o tokens --force");
    assert_eq!(ids(&folder.join("tokens")), [99, 100, 101, 256]);
    assert_eq!(
        written(folder),
        ["tokens.bin", "tokens.idx", "tokens.tokenizer.json"],
        "nothing is left over"
    );
    // Any of the three counts.
    std::fs::remove_file(folder.join("tokens.bin")).unwrap();
    std::fs::remove_file(folder.join("tokens.idx")).unwrap();
    refused(folder, "data tokenize a.txt -o tokens", 7);
}

#[test]
fn lines_json_and_gzip_give_a_document_each() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::create_dir(folder.join("in")).unwrap();
    std::fs::write(folder.join("in/b.jsonl"), "{\"id\": 1, \"body\": \"a\\u00e9\"}\n\n{\"body\": \"\"}")
        .unwrap();
    // Two members, as `cat` of two files makes; the line of JSON lies in both.
    let gzip = |text: &str| {
        let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
        gzip.write_all(text.as_bytes()).unwrap();
        gzip.finish().unwrap()
    };
    let members = [gzip("{\"body\": \"x"), gzip("y\"}\n")].concat();
    std::fs::write(folder.join("in/a.jsonl.gz"), &members).unwrap();
    let said = ok(folder, "data tokenize in/*.jsonl* --json-key body -o tokens");
    assert!(said.starts_with("8 tokens of 3 documents"), "{said}");
    assert_eq!(
        ids(&folder.join("tokens")),
        [120, 121, 256, 97, 0xc3, 0xa9, 256, 256],
        "in the order of names"
    );

    std::fs::write(folder.join("lines.txt"), "a\r\n\nb\n c").unwrap();
    ok(folder, "data tokenize lines.txt --input-format lines --append-eod=false -o lines");
    assert_eq!(ids(&folder.join("lines")), [97, 98, 32, 99]);
    assert_eq!(TokenFile::open(&folder.join("lines")).unwrap().num_documents(), 3);

    std::fs::write(folder.join("in/a.jsonl.gz"), &members[..members.len() - 9]).unwrap();
    let said = refused(folder, "data tokenize in/a.jsonl.gz -o cut", 6);
    assert!(said.contains("reading line 2 of `in/a.jsonl.gz`"), "{said}");
    refused(folder, "data tokenize nothing/*.txt -o cut", 3);
}

#[test]
fn a_line_that_is_no_document_is_named_with_the_way_out() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let said: Vec<String> = ["{\"text\": ", "[\"text\"]", "{\"txt\": \"a\", \"id\": 3}", "{\"text\": null}"]
        .into_iter()
        .map(|line| {
            std::fs::write(folder.join("a.jsonl"), format!("{{\"text\": \"a\"}}\n{line}\n")).unwrap();
            refused(folder, "data tokenize a.jsonl -o tokens", 6)
        })
        .collect();
    expect![[r#"
        Error: RM1028

          × line 2 of `a.jsonl`: no object of JSON: EOF while parsing a value at line 1 column 9
          help: each line is an object of JSON with its text under --json-key
        Error: RM1028

          × line 2 of `a.jsonl`: no object of JSON: invalid type: sequence, expected a map at line 1 column 0
          help: each line is an object of JSON with its text under --json-key
        Error: RM1028

          × line 2 of `a.jsonl`: no key `text`; there is `id`, `txt`
          help: each line is an object of JSON with its text under --json-key
        Error: RM1028

          × line 2 of `a.jsonl`: `text` is no string
          help: each line is an object of JSON with its text under --json-key
    "#]]
    .assert_eq(&said.concat());
    assert!(written(folder).is_empty());
}

#[test]
fn a_tokenizer_of_hugging_face_gives_the_ids_that_it_gives_in_python() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let known = std::fs::read_to_string(format!("{FIXTURE}/ids.json")).unwrap();
    let known = known.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    // Many times the texts, so that cores share them, with the text under `text` as there.
    let known: Vec<_> = std::iter::repeat_n(known.collect::<Vec<_>>(), 200).flatten().collect();
    let lines: Vec<String> = known.iter().map(|line| line.to_string() + "\n").collect();
    std::fs::write(folder.join("a.jsonl"), lines.concat()).unwrap();
    let line = format!("data tokenize a.jsonl --tokenizer {FIXTURE}/tokenizer.json -o tokens");
    ok(folder, &line);
    let tokenizer = Tokenizer::open(&folder.join("tokens")).unwrap().unwrap();
    assert_eq!((tokenizer.kind.as_str(), tokenizer.eod), ("huggingface", Some(0)));
    let expected: Vec<u16> = known
        .iter()
        .flat_map(|line| {
            let ids = line["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u16);
            ids.chain([0]).collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(ids(&folder.join("tokens")), expected);
    assert!(tokenizer.vocab_size <= 320 && expected.iter().all(|id| usize::from(*id) < tokenizer.vocab_size));
    let train = "train --num-layers 1 --hidden-size 16 --ffn-hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 \
                 --train-iters 1 --lr 1e-2 --data-path tokens";
    ok(folder, train);
}

#[test]
fn a_tokenizer_that_cuts_texts_cuts_no_document() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut cutting: serde_json::Value =
        serde_json::from_slice(&std::fs::read(format!("{FIXTURE}/tokenizer.json")).unwrap()).unwrap();
    cutting["truncation"] =
        serde_json::json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    std::fs::write(folder.join("tokenizer.json"), cutting.to_string()).unwrap();
    std::fs::write(folder.join("a.txt"), "the mesh of ranks, and of ranks the mesh").unwrap();
    let said = refused(folder, "data tokenize a.txt --tokenizer tokenizer.json -o tokens", 2);
    expect![[r#"
        Error: RM6004

          × `tokenizer.json` does not say which token ends a document
          help: name it with --eod-token, such as `<|endoftext|>`, or write none with --append-eod=false
    "#]]
    .assert_eq(&said);
    ok(folder, "data tokenize a.txt --tokenizer tokenizer.json --append-eod=false -o cut");
    ok(
        folder,
        &format!("data tokenize a.txt --tokenizer {FIXTURE}/tokenizer.json --append-eod=false -o whole"),
    );
    let cut = ids(&folder.join("cut"));
    assert!(cut.len() > 4, "{cut:?}");
    assert_eq!(cut, ids(&folder.join("whole")));
}

#[test]
fn what_is_no_tokenizer_and_what_is_no_text_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("a.txt"), b"ab\xff").unwrap();
    let whole = std::fs::read(format!("{FIXTURE}/tokenizer.json")).unwrap();
    for text in [b"{}".as_slice(), b"", &whole[..whole.len() / 2], b"\x80\x02}q\x00."] {
        std::fs::write(folder.join("tokenizer.json"), text).unwrap();
        let said = refused(folder, "data tokenize a.txt --tokenizer tokenizer.json -o tokens", 6);
        assert!(said.contains("RM1027") && said.contains("`tokenizer.json` is no tokenizer"), "{said}");
    }
    let said =
        refused(folder, &format!("data tokenize a.txt --tokenizer {FIXTURE}/tokenizer.json -o tokens"), 6);
    assert!(said.contains("`a.txt`: no UTF-8 at byte 2"), "{said}");
    let unknown =
        format!("data tokenize a.txt --tokenizer {FIXTURE}/tokenizer.json --eod-token </s> -o tokens");
    assert!(refused(folder, &unknown, 2).contains("`</s>` is no token of"));
    let output = command(folder, "data tokenize a.txt --eod-token </s> -o tokens").output().unwrap();
    assert!(text(&output.stderr).contains("--tokenizer"), "the end of bytes is 256");
    assert!(written(folder).iter().all(|name| name == "tokenizer.json"));
}
