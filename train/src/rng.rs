//! Random numbers without state: Philox4x32-10, keyed by (seed, purpose) and counted by logical coordinates, never by rank
//! or by the number of calls. The exception are the named [`Stream`]s, one per coordinate, which are saved.
//!
//! J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).

use ckpt::fnv1a;
use std::ops::Range;

/// Layers that dropout counters can tell apart.
pub const MAX_LAYERS: u32 = 1 << 10;
/// Query heads that attention dropout counters can tell apart.
pub const MAX_HEADS: u32 = 1 << 8;
/// Sample ordinals that attention dropout counters can tell apart.
pub const MAX_ORDINALS_ATTENTION: u64 = 1 << 46;
/// Sample ordinals that hidden dropout counters can tell apart.
pub const MAX_ORDINALS_HIDDEN: u64 = 1 << 48;

const INIT: u32 = 1;
pub(crate) const HIDDEN_DROPOUT: u32 = 2;
pub(crate) const ATTENTION_DROPOUT: u32 = 3;
const DATA_ORDER: u32 = 4;
/// Purpose of the first named stream; the others follow.
const FIRST_STREAM: u32 = 16;

/// Philox4x32 with ten rounds.
#[inline(always)]
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..10 {
        let a = u64::from(c0) * 0xD251_1F53;
        let b = u64::from(c2) * 0xCD9E_8D57;
        (c0, c1, c2, c3) = ((b >> 32) as u32 ^ c1 ^ k0, b as u32, (a >> 32) as u32 ^ c3 ^ k1, a as u32);
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
    }
    [c0, c1, c2, c3]
}

/// Normal numbers of mean 0 for elements `elements` (row-major in the whole tensor) of the parameter `key`.
///
/// Element 4j + l is lane l of block j, so a shard initialises itself without its neighbours.
///
/// # Panics
/// If `out` does not have one place for each element.
pub fn init_normal(seed: u32, key: &str, elements: Range<u64>, std: f64, out: &mut [f32]) {
    assert_eq!(
        out.len() as u64,
        elements.end - elements.start,
        "places for the elements {elements:?} of `{key}`"
    );
    let name = fnv1a(key.as_bytes());
    let mut block_index = None;
    let mut block = [0.0; 4];
    for (element, out) in elements.zip(out) {
        let j = element / 4;
        if block_index != Some(j) {
            block =
                normals(philox([j as u32, (j >> 32) as u32, name as u32, (name >> 32) as u32], [seed, INIT]));
            block_index = Some(j);
        }
        *out = (std * block[(element % 4) as usize]) as f32;
    }
}

/// Box–Muller on the word pairs (0, 1) and (2, 3).
fn normals(words: [u32; 4]) -> [f64; 4] {
    const SCALE: f64 = 1.0 / (1u64 << 32) as f64;
    let pair = |x: u32, y: u32| {
        let r = libm::sqrt(-2.0 * libm::log((f64::from(x) + 0.5) * SCALE));
        let angle = 2.0 * std::f64::consts::PI * (f64::from(y) * SCALE);
        [r * libm::cos(angle), r * libm::sin(angle)]
    };
    let ([a, b], [c, d]) = (pair(words[0], words[1]), pair(words[2], words[3]));
    [a, b, c, d]
}

/// The random words of one row that dropout looks at: one word an element.
#[derive(Clone, Copy, Debug)]
pub struct DropoutRow {
    key: [u32; 2],
    /// Counter words 1 to 3; word 0 is the element's index divided by 4.
    coordinates: [u32; 3],
}

impl DropoutRow {
    /// Elements are the features of a token.
    ///
    /// # Panics
    /// If a coordinate does not fit its field; configurations are checked against the limits above.
    pub fn hidden(seed: u32, layer: u32, site: u32, ordinal: i64, position: i32) -> Self {
        assert!(site < 1 << 6, "dropout site {site} does not fit 6 bits");
        let high = Self::high_word(layer, ordinal, MAX_ORDINALS_HIDDEN) | dropout_place(0, site);
        DropoutRow {
            key: [seed, HIDDEN_DROPOUT],
            coordinates: [Self::position(position), ordinal as u32, high],
        }
    }

    /// Elements are the key positions that a query of global head `head` sees.
    ///
    /// # Panics
    /// If a coordinate does not fit its field; configurations are checked against the limits above.
    pub fn attention(seed: u32, layer: u32, head: u32, ordinal: i64, position: i32) -> Self {
        assert!(head < MAX_HEADS, "attention dropout counts heads up to {MAX_HEADS}, not {head}");
        let high = Self::high_word(layer, ordinal, MAX_ORDINALS_ATTENTION) | head << 14;
        DropoutRow {
            key: [seed, ATTENTION_DROPOUT],
            coordinates: [Self::position(position), ordinal as u32, high],
        }
    }

    fn high_word(layer: u32, ordinal: i64, max_ordinals: u64) -> u32 {
        assert!(layer < MAX_LAYERS, "dropout counts layers up to {MAX_LAYERS}, not {layer}");
        let ordinal = u64::try_from(ordinal).expect("sample ordinals count from 0");
        assert!(ordinal < max_ordinals, "dropout counts samples up to {max_ordinals}, not {ordinal}");
        dropout_place(layer, 0) | (ordinal >> 32) as u32
    }

    fn position(position: i32) -> u32 {
        u32::try_from(position).expect("positions count from 0")
    }

    /// Keeps an element of the row, scaled by 1 / (1 − p), when its word is at least ⌊p · 2³²⌋, and makes it 0 otherwise.
    pub fn apply(self, p: f32, row: &mut [f32]) {
        let (threshold, scale) = (dropout_threshold(p), dropout_scale(p));
        let [c1, c2, c3] = self.coordinates;
        for (block, elements) in row.chunks_mut(4).enumerate() {
            let words = philox([block as u32, c1, c2, c3], self.key);
            for (x, word) in elements.iter_mut().zip(words) {
                *x = if word >= threshold { *x * scale } else { 0.0 };
            }
        }
    }
}

/// The bits of the last counter word that say where in the model a mask stands; `site` is that of a hidden dropout.
pub(crate) fn dropout_place(layer: u32, site: u32) -> u32 {
    layer << 22 | site << 16
}

/// ⌊p · 2³²⌋: elements with words from there on are kept.
pub(crate) fn dropout_threshold(p: f32) -> u32 {
    (f64::from(p) * (1u64 << 32) as f64) as u32
}

/// What a kept element is multiplied by.
pub(crate) fn dropout_scale(p: f32) -> f32 {
    1.0 / (1.0 - p)
}

/// The order in which samples are seen: each epoch is a permutation of `0..num_samples` keyed by (seed, epoch).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataOrder {
    seed: u32,
    num_samples: u64,
    half_bits: u32,
    file: u32,
}

impl DataOrder {
    /// The order of `num_samples` samples.
    ///
    /// # Panics
    /// If there is none: data sets without samples are refused when they are opened.
    pub fn new(seed: u32, num_samples: u64) -> Self {
        DataOrder::of_file(0, seed, num_samples)
    }

    /// The order of the samples of one file of several, each of which has its own; that of file 0 is [`new`](Self::new).
    ///
    /// # Panics
    /// If there is none.
    pub fn of_file(file: u32, seed: u32, num_samples: u64) -> Self {
        assert!(num_samples > 0, "an order of no samples");
        let half_bits = (1..32).find(|bits| 1u64 << (2 * bits) >= num_samples).unwrap_or(32);
        DataOrder { seed, num_samples, half_bits, file }
    }

    /// The sample seen at `position` (samples consumed before it since the run began), by a Feistel network that is
    /// walked until it lands inside.
    ///
    /// # Panics
    /// If the epoch does not fit 32 bits.
    pub fn sample(self, position: u64) -> u64 {
        let epoch = u32::try_from(position / self.num_samples).expect("fewer than 2³² epochs");
        let mask = ((1u64 << self.half_bits) - 1) as u32;
        let mut x = position % self.num_samples;
        loop {
            let (mut left, mut right) = ((x >> self.half_bits) as u32, x as u32 & mask);
            for round in 0..6 {
                let word = philox([right, round, epoch, self.file], [self.seed, DATA_ORDER])[0];
                (left, right) = (right, left ^ (word & mask));
            }
            x = u64::from(left) << self.half_bits | u64::from(right);
            if x < self.num_samples {
                return x;
            }
        }
    }
}

/// The named streams, in the order of their rows in `rng_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamName {
    /// Agrees over tensor parallel ranks.
    DataParallel = 0,
    /// Differs over tensor parallel ranks.
    ModelParallel = 1,
    /// Differs over expert and expert tensor parallel ranks.
    ExpertParallel = 2,
    /// Differs over the shards of GTP_remat too; exists only where there are several.
    GtpRemat = 3,
    /// Differs over the shards of expert GTP_remat too; exists only where there are several.
    EgtpRemat = 4,
}

impl StreamName {
    /// Every stream, by row.
    pub const ALL: [StreamName; 5] = [
        StreamName::DataParallel,
        StreamName::ModelParallel,
        StreamName::ExpertParallel,
        StreamName::GtpRemat,
        StreamName::EgtpRemat,
    ];
}

/// A rank's coordinates as far as streams depend on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamCoordinates {
    /// Pipeline stage.
    pub pp: u32,
    /// Tensor parallel rank.
    pub tp: u32,
    /// Expert parallel rank.
    pub ep: u32,
    /// Expert tensor parallel rank.
    pub etp: u32,
    /// Position among the GTP_remat shards; `None` if there is one.
    pub gtp: Option<u32>,
    /// Position among the expert GTP_remat shards; `None` if there is one.
    pub egtp: Option<u32>,
}

/// A stream of random words with a position, saved cell by cell in `rng_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    key: [u32; 2],
    draws: u64,
    iteration: u32,
}

impl Stream {
    /// The stream `name` at `coordinates`, as it starts at `iteration`; `None` if the layout has no such stream.
    /// Seeds are Megatron's, modulo 2³².
    pub fn derive(
        seed: u32,
        name: StreamName,
        coordinates: StreamCoordinates,
        iteration: u32,
    ) -> Option<Stream> {
        let StreamCoordinates { pp, tp, ep, etp, gtp, egtp } = coordinates;
        let base = seed.wrapping_add(pp.wrapping_mul(100));
        let expert = ep.wrapping_mul(100).wrapping_add(etp).wrapping_add(1024);
        let shard = |index: u32| index.wrapping_add(1).wrapping_mul(65536);
        let offset = match name {
            StreamName::DataParallel => 0,
            StreamName::ModelParallel => tp.wrapping_add(2718),
            StreamName::ExpertParallel => expert,
            StreamName::GtpRemat => tp.wrapping_add(2718).wrapping_add(shard(gtp?)),
            StreamName::EgtpRemat => expert.wrapping_add(32768).wrapping_add(shard(egtp?)),
        };
        Some(Stream { key: [base.wrapping_add(offset), FIRST_STREAM + name as u32], draws: 0, iteration })
    }

    /// The next word.
    pub fn next_u32(&mut self) -> u32 {
        let [.., c0, c1, c2, c3] = self.to_words();
        self.draws += 1;
        philox([c0, c1, c2, c3], self.key)[0]
    }

    /// Words drawn so far.
    pub fn draws(self) -> u64 {
        self.draws
    }

    /// Key and counter: k0 k1 c0 c1 c2 c3.
    pub fn to_words(self) -> [u32; 6] {
        [self.key[0], self.key[1], self.draws as u32, (self.draws >> 32) as u32, self.iteration, 0]
    }

    /// The stream with these key and counter words; `None` for the zeros of a stream that does not exist.
    ///
    /// # Errors
    /// Words that [`to_words`](Self::to_words) never gives.
    pub fn from_words(words: [u32; 6]) -> Result<Option<Stream>, InvalidStream> {
        if words == [0; 6] {
            return Ok(None);
        }
        let [k0, k1, low, high, iteration, last] = words;
        let streams = FIRST_STREAM..FIRST_STREAM + StreamName::ALL.len() as u32;
        if !streams.contains(&k1) || last != 0 {
            return Err(InvalidStream { words });
        }
        Ok(Some(Stream { key: [k0, k1], draws: u64::from(high) << 32 | u64::from(low), iteration }))
    }
}

/// Six words that are no stream's key and counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{words:?} is not the key and counter of a random stream; `--rng-policy derive` starts the streams anew"
)]
pub struct InvalidStream {
    /// What was found.
    pub words: [u32; 6],
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn philox_gives_the_published_words() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]);
        assert_eq!(
            philox([0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344], [0xA409_3822, 0x299F_31D0]),
            [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1]
        );
    }

    #[test]
    fn the_order_of_twenty_samples_is_the_documented_one() {
        let order = DataOrder::new(1234, 20);
        let epoch: Vec<u64> = (0..20).map(|position| order.sample(position)).collect();
        assert_eq!(epoch, [2, 0, 19, 18, 5, 6, 16, 15, 4, 1, 14, 3, 13, 7, 11, 9, 17, 10, 8, 12]);
    }

    proptest! {
        #[test]
        fn every_epoch_sees_every_sample_once(seed: u32, num_samples in 1u64..300, epoch in 0u64..5) {
            let order = DataOrder::new(seed, num_samples);
            let mut seen: Vec<u64> = (0..num_samples).map(|n| order.sample(epoch * num_samples + n)).collect();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..num_samples).collect::<Vec<_>>());
        }

        #[test]
        fn a_shard_initialises_itself_as_the_whole_would(seed: u32, lo in 0u64..40, len in 0u64..40) {
            let mut whole = [0.0; 80];
            init_normal(seed, "w", 0..80, 0.02, &mut whole);
            let mut shard = vec![0.0; len as usize];
            init_normal(seed, "w", lo..lo + len, 0.02, &mut shard);
            prop_assert_eq!(&shard[..], &whole[lo as usize..(lo + len) as usize]);
        }
    }

    #[test]
    fn initial_weights_are_normal_and_differ_between_keys() {
        let [mut a, mut b] = [[0.0; 40_000]; 2];
        init_normal(7, "a", 0..40_000, 0.5, &mut a);
        init_normal(7, "b", 0..40_000, 0.5, &mut b);
        let mean = |f: &dyn Fn(usize) -> f64| (0..a.len()).map(f).sum::<f64>() / a.len() as f64;
        let (x, y) = (|i: usize| f64::from(a[i]), |i: usize| f64::from(b[i]));
        // Five standard errors of 40,000 draws each.
        assert!(mean(&x).abs() < 5.0 * 0.5 / 200.0);
        assert!((mean(&|i| x(i).powi(2)) - 0.25).abs() < 5.0 * 0.25 * 2f64.sqrt() / 200.0);
        assert!((mean(&|i| x(i).powi(4)) - 3.0 / 16.0).abs() < 5.0 * 96f64.sqrt() / 16.0 / 200.0);
        assert!(mean(&|i| x(i) * y(i)).abs() < 5.0 * 0.25 / 200.0, "keys must not be correlated");
    }

    #[test]
    fn blocks_above_two_to_the_32_have_their_own_numbers() {
        let mut numbers = [[0.0f32; 4]; 2];
        init_normal(1, "w", 0..4, 1.0, &mut numbers[0]);
        init_normal(1, "w", 1 << 34..(1 << 34) + 4, 1.0, &mut numbers[1]);
        assert_ne!(numbers[0], numbers[1]);
    }

    #[test]
    fn dropout_words_follow_the_documented_counter() {
        let row = DropoutRow::hidden(9, 5, 2, (3 << 32) | 7, 11);
        assert_eq!((row.key, row.coordinates), ([9, 2], [11, 7, (5 << 22) | (2 << 16) | 3]));
        let row = DropoutRow::attention(9, 5, 200, (3 << 32) | 7, 11);
        assert_eq!((row.key, row.coordinates), ([9, 3], [11, 7, (5 << 22) | (200 << 14) | 3]));
        let mut kept = vec![1.0; 9];
        row.apply(0.5, &mut kept);
        for (element, kept) in kept.iter().enumerate() {
            let word = philox([element as u32 / 4, 11, 7, (5 << 22) | (200 << 14) | 3], [9, 3])[element % 4];
            assert_eq!(*kept, if word >= 1 << 31 { 2.0 } else { 0.0 });
        }
    }

    #[test]
    #[should_panic(expected = "dropout counts layers up to 1024, not 1024")]
    fn a_coordinate_that_does_not_fit_is_refused() {
        DropoutRow::hidden(0, 1024, 0, 0, 0);
    }

    #[test]
    fn streams_differ_where_ranks_must_and_agree_where_they_must() {
        let at = |tp, gtp| StreamCoordinates { tp, gtp, ..Default::default() };
        let seed_of = |name, at| Stream::derive(1234, name, at, 0).unwrap().key[0];
        assert_eq!(
            seed_of(StreamName::DataParallel, at(0, None)),
            seed_of(StreamName::DataParallel, at(3, None))
        );
        assert_eq!(seed_of(StreamName::ModelParallel, at(3, None)), 1234 + 2718 + 3);
        assert_eq!(seed_of(StreamName::GtpRemat, at(1, Some(2))), 1234 + 2718 + 1 + 65536 * 3);
        assert_eq!(Stream::derive(1234, StreamName::GtpRemat, at(0, None), 0), None);
        let expert = StreamCoordinates { pp: 2, ep: 3, etp: 1, egtp: Some(0), ..Default::default() };
        assert_eq!(seed_of(StreamName::ExpertParallel, expert), 1234 + 200 + 1024 + 301);
        assert_eq!(seed_of(StreamName::EgtpRemat, expert), 1234 + 200 + 1024 + 301 + 32768 + 65536);
    }

    #[test]
    fn a_stream_goes_on_from_its_words() {
        let at = StreamCoordinates::default();
        let mut stream = Stream::derive(5, StreamName::ModelParallel, at, 20).unwrap();
        let first: Vec<u32> = (0..3).map(|_| stream.next_u32()).collect();
        let words = stream.to_words();
        assert_eq!(words, [5 + 2718, 17, 3, 0, 20, 0]);
        let mut restored = Stream::from_words(words).unwrap().unwrap();
        let next = restored.next_u32();
        assert_eq!(next, stream.next_u32());
        assert!(!first.contains(&next));
        let mut derived_later = Stream::derive(5, StreamName::ModelParallel, at, 30).unwrap();
        assert_ne!(derived_later.next_u32(), first[0]);
        assert_eq!(Stream::from_words([0; 6]), Ok(None));
        assert!(Stream::from_words([1, 2, 0, 0, 0, 0]).is_err());
    }
}
