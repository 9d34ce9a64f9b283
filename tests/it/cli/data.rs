//! What `data tokenize` writes and what it leaves alone.

use super::{MODEL, command, metrics, ok, refused, remesh, text};
use expect_test::expect;
use flate2::Compression;
use flate2::write::GzEncoder;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::Stdio;
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

/// A folder with token files of 40 documents under `a` and of 20 under `b`.
fn with_two_files() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, documents) in [("a", 40), ("b", 20)] {
        let lines: String = (0..documents).map(|line| format!("{name}{line} ").repeat(30) + "\n").collect();
        std::fs::write(folder.path().join(format!("{name}.txt")), lines).unwrap();
        ok(folder.path(), &format!("data tokenize {name}.txt --input-format lines -o {name}"));
    }
    folder
}

#[test]
fn several_files_are_trained_on_by_weight_or_as_one_and_what_they_are_is_kept() {
    let folder = with_two_files();
    let folder = folder.path();
    let model = MODEL.replace("--data-path tokens", "--lr-decay-iters 3 --save run --save-interval 1");
    let line = format!("train {model} --split 90,5,5");
    ok(folder, &format!("{line} --train-iters 2 --data-path 0.7 a 0.3 b"));
    let said = ok(folder, &format!("{line} --train-iters 3 --data-path 70 a 30 b"));
    assert!(said.contains("verified L2"), "{said}");
    for (flags, differs) in [
        ("--data-path 0.5 a 0.5 b", "samples of index 1 × documents 0 to 36 of "),
        ("--data-path a b", "samples of index documents 0 to 36 of "),
        ("--data-path 0.7 a 0.3 b --split 80,20", "samples of index 7 × documents 0 to 32 of "),
    ] {
        let said = refused(folder, &format!("{line} --train-iters 4 {flags}"), 2);
        assert!(
            said.contains("samples of index 7 × documents 0 to 36 of ") && said.contains(differs),
            "{said}"
        );
        assert!(said.contains("--allow-change data"), "{said}");
    }
    // In a file words of a list.
    let file = "[data]\ndata_path = [\"0.7\", \"a\", \"0.3\", \"b\"]\nsplit = \"90,5,5\"\n";
    std::fs::write(folder.join("run.toml"), file).unwrap();
    let by_file = model.replace("--save run", "--save file");
    ok(folder, &format!("train {by_file} --train-iters 3 --config run.toml"));
    assert_eq!(metrics(folder, "file"), metrics(folder, "run"));
}

#[test]
fn a_run_is_evaluated_on_the_validation_part_or_on_files_of_its_own() {
    let folder = with_two_files();
    let folder = folder.path();
    let model = MODEL.replace("--data-path tokens", "--train-iters 3 --eval-interval 2");
    let said = ok(folder, &format!("train {model} --data-path a --split 80,20 --eval-iters 2 --save run"));
    let lines: Vec<&str> = said.lines().filter(|line| line.contains("validation loss")).collect();
    assert!(lines.len() == 2 && lines[0].starts_with("step 2  validation loss 5."), "{said}");
    assert!(lines[1].starts_with("step 3  ") && lines[1].ends_with(" of 8 samples"), "{said}");
    let evaluations = |run: &str| {
        let lines = std::fs::read_to_string(folder.join(run).join("metrics.jsonl")).unwrap();
        let lines = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        lines.filter(|line| !line["eval_loss"].is_null()).collect::<Vec<_>>()
    };
    let found = evaluations("run");
    assert_eq!(found.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), [2, 3]);
    // What is evaluated is no part of what the run is: the same steps, under another layout and on other data.
    let line = "--data-path a --split 80,20 --eval-iters 1 --save more --load run --train-iters 4 --cp 2";
    let output = remesh(folder, &format!("train {model} {line}"));
    let (said, notes) = (text(&output.stdout), text(&output.stderr));
    assert!(said.contains("verified L1") || said.contains("verified L2"), "{said}");
    assert!(
        notes.contains("validation losses from here on are not to be compared with earlier ones"),
        "{notes}"
    );
    assert!(notes.contains("evaluations read 4 samples") && notes.contains("and read 8 samples"), "{notes}");
    assert_eq!(evaluations("more")[0]["eval_samples"], 4);
    ok(folder, &format!("train {model} --data-path a --valid-data-path 1 a 1 b --eval-iters 3 --save apart"));
    assert_eq!(evaluations("apart")[0]["eval_samples"], 12);

    let refused = |flags: &str| refused(folder, &format!("train {model} --data-path a {flags}"), 2);
    let said = [
        "",
        "--split 80,20 --valid-data-path b",
        "--valid-data-path b --eval-interval 0",
        "--valid-data-path b --nproc-per-node 8 --weight-shards 8 --global-batch-size 8 --eval-global-batch-size 4",
    ]
    .map(refused);
    expect![[r#"
        Error: RM6004

          × there are no validation data to evaluate on
          help: say --split 969,30,1, or --valid-data-path PREFIX; --eval-iters 0 evaluates nothing
        Error: RM6003

          × `split` and `valid_data_path` are both set
          help: leave one of them out
        Error: RM6003

          × `eval-interval` is 0
          help: give `eval-interval` a value of at least 1
        Error: RM2002

          × batches of evaluations: global batch size 4 ÷ (micro batch size 1 × batch parallel size 8) is not exact
          help: make `--eval-global-batch-size` a multiple of 8
    "#]].assert_eq(&said.concat());
    // 8 lanes take one micro-batch each of 8 samples.
    let check = "--nproc-per-node 8 --weight-shards 8 --global-batch-size 16 --eval-global-batch-size 8";
    ok(folder, &format!("config check {model} --data-path a --valid-data-path b {check}"));
    let shown = ok(folder, &format!("config show {model} --data-path a --valid-data-path b {check}"));
    for line in ["eval_global_batch_size = 8  # command line", "# eval_micro_batch_size = 1  # built-in"] {
        assert!(shown.lines().any(|shown| shown == line), "{shown}");
    }
}

#[test]
fn documents_are_told_apart_by_their_end_tokens() {
    let folder = with_two_files();
    let folder = folder.path();
    // Several documents in each sample.
    let lines: String = (0..200).map(|line| format!("line {line}\n")).collect();
    std::fs::write(folder.join("short.txt"), lines).unwrap();
    ok(folder, "data tokenize short.txt --input-format lines -o a --force");
    let model = MODEL.replace("--data-path tokens", "--train-iters 2 --data-path a");
    let line = format!("train {model} --reset-position-ids --reset-attention-mask --eod-mask-loss");
    ok(folder, &format!("{line} --save run --save-interval 1"));
    ok(folder, &format!("{line} --save cut --cp 2"));
    assert_eq!(metrics(folder, "run"), metrics(folder, "cut"));
    ok(folder, &format!("train {model} --save whole"));
    assert!(metrics(folder, "run")[0] != metrics(folder, "whole")[0]);
    let said = refused(folder, &format!("train {model} --load run@1 --save other --eod-mask-loss"), 2);
    assert!(
        said.contains("documents is end token 256 resets positions, resets attention, masks the next target in the checkpoint but end token 256 masks the next target here"),
        "{said}"
    );
    std::fs::remove_file(folder.join("a.tokenizer.json")).unwrap();
    expect![[r#"
        Error: RM6004

          × documents are to be told apart, and no `PREFIX.tokenizer.json` says which token ends one
          help: its `eod` does, as `remesh data tokenize` writes it
    "#]]
    .assert_eq(&refused(folder, &format!("{line} --vocab-size 257"), 2));
}

#[test]
fn data_paths_that_make_no_data_set_are_refused() {
    let folder = with_two_files();
    let folder = folder.path();
    let model = MODEL.replace("--data-path tokens", "--train-iters 1");
    let refused = |flags: &str| refused(folder, &format!("train {model} {flags}"), 2);
    let said = [
        "--data-path 0 a 1 b",
        "--data-path 0.33333333 a 1 b",
        "--data-path a --split 0,1",
        "--data-path 1 a 2 b --epoch-tail drop",
    ]
    .map(refused);
    expect![[r#"
        Error: RM6003

          × weight `0` is no decimal number above 0
          help: as in `0.7 PREFIX 0.3 PREFIX`; weights are compared with one another and need not add up to 1
        Error: RM6003

          × the weights are exact only every 133333333 samples, and every 1048576 is the most that is done
          help: use fewer digits; rounded to parts of 10000 the weights are 2500, 7500
        Error: RM6003

          × `0,1` is no split: up to three decimal numbers between commas, the first of them above 0
          help: as in `969,30,1`: parts of training, validation and test
        Error: RM6003

          × epoch tail `drop` counts epochs of all data, and files with weights have an epoch each
          help: use --epoch-tail span, or leave out the weights
    "#]]
    .assert_eq(&said.concat());
    let tokenizer = format!("data tokenize a.txt --tokenizer {FIXTURE}/tokenizer.json -o c");
    ok(folder, &tokenizer);
    expect![[r#"
        Error: RM1030

          × the tokens of `b` and `c` are of different tokenizers
          help: each PREFIX.tokenizer.json says which; tokenize the text of all with the same `--tokenizer`
    "#]]
    .assert_eq(&refused("--data-path a b c"));
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

/// Stdin and pipes are read once, from their beginning to their end.
#[test]
fn text_comes_through_stdin_and_pipes_and_whoever_waits_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("lines"), "ab\n\nc\n").unwrap();
    let stdin = || std::fs::File::open(folder.join("lines")).unwrap();
    let tokenize =
        |line: &str| command(folder, &format!("data tokenize {line}")).stdin(stdin()).output().unwrap();
    let output = tokenize("- --input-format lines -o tokens");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(ids(&folder.join("tokens")), [97, 98, 256, 99, 256]);
    let said = text(&tokenize("- --input-format jsonl -o other").stderr);
    assert!(said.contains("line 1 of stdin"), "{said}");
    assert!(text(&tokenize("- - -o other").stderr).contains("`-`, stdin, is named twice"));
    assert!(text(&tokenize("- --input-format parquet -o other").stderr).contains("stdin is no file"));

    let pipe = folder.join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut waiting = command(folder, "data tokenize pipe -o piped");
    let mut waiting = waiting.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    BufReader::new(waiting.stderr.take().unwrap()).read_line(&mut said).unwrap();
    assert_eq!(said, "`pipe` is a pipe: waiting for what is written into it\n");
    std::fs::write(&pipe, "xyz").unwrap();
    assert!(waiting.wait().unwrap().success());
    assert_eq!(ids(&folder.join("piped")), [120, 121, 122, 256]);
}

#[test]
fn no_document_makes_no_token_file() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("empty.jsonl"), "\n \n").unwrap();
    let said = refused(folder, "data tokenize empty.jsonl -o tokens", 2);
    assert!(said.contains("RM1023") && said.contains("there is no document in what was read"), "{said}");
    assert!(written(folder).is_empty());
    // A file of no text is a document of its end token.
    std::fs::write(folder.join("empty.txt"), "").unwrap();
    ok(folder, "data tokenize empty.txt -o tokens");
    assert_eq!(ids(&folder.join("tokens")), [256]);
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

/// What pyarrow wrote, packed in each way that is understood, in several row groups, with a dictionary and with several columns.
#[test]
fn a_column_of_parquet_gives_a_document_a_row() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/parquet");
    let texts = std::fs::read_to_string(format!("{fixtures}/texts.jsonl")).unwrap();
    std::fs::write(folder.join("texts.jsonl"), &texts).unwrap();
    ok(folder, "data tokenize texts.jsonl --json-key body -o expected");
    for name in ["plain", "snappy", "gzip", "zstd"] {
        ok(folder, &format!("data tokenize {fixtures}/{name}.parquet --json-key body -o {name}"));
        assert_eq!(ids(&folder.join(name)), ids(&folder.join("expected")), "{name}");
    }
    std::fs::write(folder.join("texts.jsonl.zst"), zstd::encode_all(texts.as_bytes(), 1).unwrap()).unwrap();
    ok(folder, "data tokenize texts.jsonl.zst --json-key body -o zst");
    assert_eq!(ids(&folder.join("zst")), ids(&folder.join("expected")));

    let cut = std::fs::read(format!("{fixtures}/plain.parquet")).unwrap();
    std::fs::write(folder.join("cut.parquet"), &cut[..cut.len() - 9]).unwrap();
    std::fs::copy(format!("{fixtures}/nulls.parquet"), folder.join("nulls.parquet")).unwrap();
    let zst = std::fs::read(folder.join("texts.jsonl.zst")).unwrap();
    std::fs::write(folder.join("cut.jsonl.zst"), &zst[..zst.len() / 2]).unwrap();
    let said =
        ["nulls.parquet", "nulls.parquet --json-key body", "cut.parquet", "cut.jsonl.zst --json-key body"]
            .map(|flags| refused(folder, &format!("data tokenize {flags} -o tokens"), 6));
    expect![[r#"
        Error: RM1028

          × `nulls.parquet`: no column of strings `text`; there is `body`, `title`
          help: name the column with --json-key
        Error: RM1028

          × row 2 of `nulls.parquet` has no text
          help: leave rows without text out of the file
        Error: RM1031

          × `cut.parquet`: Parquet error: Invalid Parquet file. Corrupt footer
          help: fetch or write it anew; Snappy, gzip and Zstandard are understood
        Error: RM1011

          × reading line 1 of `cut.jsonl.zst`
          ╰─▶ incomplete frame
          help: the file is cut short or of another kind; write it anew
    "#]]
    .assert_eq(&said.concat());
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

/// An average over no token is none, and not the best loss there is.
#[test]
fn a_batch_and_an_evaluation_without_a_token_that_counts_have_no_loss() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("empty.jsonl"), "{\"text\": \"\"}\n".repeat(300)).unwrap();
    std::fs::write(folder.join("text.txt"), "A text with tokens that count. ".repeat(20)).unwrap();
    ok(folder, "data tokenize empty.jsonl -o ends");
    ok(folder, "data tokenize text.txt -o text");
    let model = MODEL.replace("--data-path tokens", "--eod-mask-loss --train-iters 2");
    let output = remesh(folder, &format!("train {model} --data-path ends --max-skipped-in-a-row 1"));
    assert!(text(&output.stderr).contains("no token to learn from"), "{}", text(&output.stderr));
    assert_eq!(output.status.code(), Some(1));
    let said =
        ok(folder, &format!("train {model} --data-path text --valid-data-path ends --eval-interval 2"));
    assert!(said.contains("validation loss not defined"), "{said}");
}
