//! Several token files in one run: one global order, whatever the layout, that a resume goes on with; other files, weights or parts
//! are another run.

use crate::resume::{fingerprints, train};
use crate::support::{self, Layout, Tracing, difference, tiny_model, trace};
use ckpt::Store;
use expect_test::expect;
use std::path::Path;
use train::config::TrainConfig;
use train::data::{Blend, DataPath, Existing, Split, TokenWriter, Tokenizer};
use train::resume::Level;

const SEQ_LENGTH: u64 = 64;

/// Token files of so many documents of 100 tokens under `PREFIX0`, `PREFIX1`, …: each token says its file and its place.
fn files(folder: &Path, documents: &[u64]) -> DataPath {
    let prefixes = documents.iter().enumerate().map(|(file, documents)| {
        let prefix = folder.join(format!("tokens{file}"));
        let mut writer = TokenWriter::create(&prefix, Tokenizer::byte(), Existing::Keep).unwrap();
        for document in 0..*documents {
            let token = |at: u64| (((document * 100 + at) * (7 + file as u64)) % 251) as u32;
            writer.add_document((0..99).map(token).chain([256])).unwrap();
        }
        writer.finish().unwrap();
        prefix
    });
    DataPath { prefixes: prefixes.collect(), shares: None }
}

fn config(layout: Layout, train_iters: u64) -> TrainConfig {
    let config = support::config(tiny_model(4), layout.parallel(SEQ_LENGTH, 8).unwrap(), 6);
    TrainConfig { train_iters, ..config }
}

const LAYOUTS: [Layout; 3] = [
    Layout { dp: 4, ..Layout::SINGLE },
    Layout { tp: 2, sp: true, cp: 2, mbs: 2, ..Layout::SINGLE },
    Layout { gtp: 4, nseq: 2, mbs: 4, ..Layout::SINGLE },
];

/// 6 steps of 8 samples: 36 of them from a file of 15 samples, 12 from one of 46.
#[test]
fn files_with_weights_are_read_in_one_order_under_every_layout_and_through_a_resume() {
    let folder = tempfile::tempdir().unwrap();
    let path = DataPath { shares: Some(vec![3, 1]), ..files(folder.path(), &[10, 30]) };
    let tokens = Blend::open(&path).unwrap();
    let tracing = Tracing { steps: 6, ..Tracing::default() };
    let single = trace(&config(Layout::SINGLE, 6), &tokens, tracing).unwrap();
    let of_first = |samples: &[u64]| samples.iter().filter(|sample| **sample < 15).count();
    let counts: Vec<usize> = single.samples.iter().map(|step| of_first(step)).collect();
    assert_eq!(counts, [6; 6]);
    for layout in LAYOUTS {
        let other = trace(&config(layout, 6), &tokens, tracing).unwrap();
        assert_eq!(difference(&single, &other), None, "{layout:?}");
    }
    let straight_store = Store::open("memory://").unwrap();
    let straight = train(&config(Layout::SINGLE, 6), &tokens, &straight_store, None, 0, |_| {}).unwrap();
    let expected = fingerprints(&straight_store.checkpoint(6).unwrap());
    for (before, after) in [(LAYOUTS[0], LAYOUTS[1]), (LAYOUTS[2], LAYOUTS[0])] {
        let store = Store::open("memory://").unwrap();
        train(&config(before, 2), &tokens, &store, None, 0, |_| {}).unwrap();
        let saved = store.checkpoint(2).unwrap();
        // Opened anew, as another process would.
        let tokens = Blend::open(&path).unwrap();
        let told = train(&config(after, 6), &tokens, &store, Some(&saved), 0, |_| {}).unwrap();
        assert_eq!(told.resumed.unwrap().level, Some(Level::L2));
        let losses = |steps: &[train::run::Step]| {
            steps.iter().map(|step| step.outcome.loss.to_bits()).collect::<Vec<_>>()
        };
        assert_eq!(losses(&told.steps), losses(&straight.steps[2..]), "{before:?} → {after:?}");
        assert!(fingerprints(&store.checkpoint(6).unwrap()) == expected, "{before:?} → {after:?}");
    }
}

/// Without weights every sample comes once an epoch, whichever file it lies in.
#[test]
fn files_without_weights_are_one_data_set() {
    let folder = tempfile::tempdir().unwrap();
    let path = files(folder.path(), &[4, 9, 3]);
    let tokens = Blend::open(&path).unwrap();
    let sampler = tokens.sampler(&config(Layout::SINGLE, 6)).unwrap();
    let sizes = [399 / 64, 899 / 64, 299 / 64];
    assert_eq!(sampler.num_samples(), sizes.iter().sum::<u64>());
    let mut epoch: Vec<u64> =
        (0..sampler.num_samples()).map(|position| sampler.sample_at(position)).collect();
    epoch.sort_unstable();
    assert_eq!(epoch, (0..sampler.num_samples()).collect::<Vec<_>>());
    // The first sample of the second file is behind the last one of the first.
    let second = Blend::open(&DataPath::single(&path.prefixes[1])).unwrap();
    let read = |blend: &Blend, sample| blend.read_sample(sample, SEQ_LENGTH, 257).unwrap();
    assert_eq!(read(&tokens, sizes[0]), read(&second, 0));
    assert_eq!(read(&tokens, sizes[0] + sizes[1] - 1), read(&second, sizes[1] - 1));
}

/// 20 documents: 16 are trained on, 3 are for validation, and no token is in both.
#[test]
fn a_split_divides_whole_documents() {
    let folder = tempfile::tempdir().unwrap();
    let path = files(folder.path(), &[20]);
    let parts = Blend::open_parts(&path, &"80,15,5".parse().unwrap()).unwrap();
    let validation = parts.validation.unwrap();
    let samples = |blend: &Blend| blend.sampler(&config(Layout::SINGLE, 6)).unwrap().num_samples();
    assert_eq!((samples(&parts.training), samples(&validation)), (1599 / 64, 299 / 64));
    let whole = Blend::open(&path).unwrap();
    let read = |blend: &Blend, sample, seq_length| blend.read_sample(sample, seq_length, 257).unwrap();
    let of_whole: Vec<i32> = read(&whole, 0, 1999);
    assert_eq!(read(&parts.training, 0, 1599), of_whole[..1600]);
    assert_eq!(read(&validation, 0, 299), of_whole[1600..1900]);
    assert!(Blend::open_parts(&path, &Split::TRAINING).unwrap().validation.is_none());
    let error = Blend::open_parts(&path, &"99,1,0".parse().unwrap()).unwrap().validation.unwrap();
    let error = error.sampler(&config(Layout::SINGLE, 6)).unwrap_err().to_string();
    assert!(
        error.ends_with("the 0 tokens of documents 20 to 20 hold no sample of 64 tokens and the one after"),
        "{error}"
    );
}

#[test]
fn other_files_weights_or_parts_are_refused_with_both_values() {
    let folder = tempfile::tempdir().unwrap();
    let path = |shares: [u64; 2]| DataPath {
        shares: Some(shares.to_vec()),
        prefixes: [0, 1].map(|file| folder.path().join(format!("tokens{file}"))).to_vec(),
    };
    files(folder.path(), &[10, 30]);
    let store = Store::open("memory://").unwrap();
    let config = |train_iters| config(Layout::SINGLE, train_iters);
    let parts =
        |path: &DataPath, split: &str| Blend::open_parts(path, &split.parse().unwrap()).unwrap().training;
    train(&config(1), &parts(&path([3, 1]), "90,10"), &store, None, 0, |_| {}).unwrap();
    let saved = store.checkpoint(1).unwrap();
    let mut reversed = path([1, 3]);
    reversed.prefixes.reverse();
    let refusals = [
        (path([3, 2]), "90,10"),
        (path([3, 1]), "80,20"),
        (reversed, "90,10"),
        (DataPath::single(folder.path().join("tokens0")), "90,10"),
    ]
    .map(|(path, split)| {
        let tokens = parts(&path, split);
        train(&config(2), &tokens, &store, Some(&saved), 0, |_| {}).err().unwrap().to_string()
    });
    // Which tokens are next is a number; what differs before it says enough.
    let refusals = refusals.map(|text| {
        text.split(" with the next tokens ")
            .map(|part| part.trim_start_matches(|c: char| c.is_ascii_hexdigit()))
            .collect::<Vec<_>>()
            .join(" … ")
    });
    expect![[r#"
        the checkpoint and this run differ: data is 56 samples of index 3 × documents 0 to 9 of c437881cef72367f, 1 × documents 0 to 27 of b53e4f1bb97c9a6b …  in the checkpoint but 56 samples of index 3 × documents 0 to 9 of c437881cef72367f, 2 × documents 0 to 27 of b53e4f1bb97c9a6b …  here
        the checkpoint and this run differ: data is 56 samples of index 3 × documents 0 to 9 of c437881cef72367f, 1 × documents 0 to 27 of b53e4f1bb97c9a6b …  in the checkpoint but 49 samples of index 3 × documents 0 to 8 of c437881cef72367f, 1 × documents 0 to 24 of b53e4f1bb97c9a6b …  here
        the checkpoint and this run differ: data is 56 samples of index 3 × documents 0 to 9 of c437881cef72367f, 1 × documents 0 to 27 of b53e4f1bb97c9a6b …  in the checkpoint but 56 samples of index 1 × documents 0 to 27 of b53e4f1bb97c9a6b, 3 × documents 0 to 9 of c437881cef72367f …  here
        the checkpoint and this run differ: data is 56 samples of index 3 × documents 0 to 9 of c437881cef72367f, 1 × documents 0 to 27 of b53e4f1bb97c9a6b …  in the checkpoint but 14 samples of index documents 0 to 9 of c437881cef72367f …  here"#]].assert_eq(&refusals.join("\n"));
    // Another split with the same training documents is no other data.
    let same = parts(&path([3, 1]), "90,5,5");
    train(&config(2), &same, &store, Some(&saved), 0, |_| {}).unwrap();
}
