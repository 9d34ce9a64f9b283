//! Several token files as one data set. Without shares their samples are joined in the order of the files, and the global order
//! is over all of them; with shares each position of the order belongs to one file, by the rule of [`Turns`].

use crate::config::{EpochTail, TrainConfig};
use crate::data::path::{DataPath, Split};
use crate::data::sampler::{Sampler, SamplerError};
use crate::data::tokens::{TokenFile, TokenFileError};
use mesh::BatchSchedule;
use std::sync::Arc;

/// Token files, and in which shares they are read.
#[derive(Debug)]
pub struct Blend {
    files: Vec<TokenFile>,
    turns: Option<Arc<Turns>>,
}

/// What a split makes of token files.
#[derive(Debug)]
pub struct Parts {
    /// What is trained on.
    pub training: Blend,
    /// What evaluations read, if the split has a part for it.
    pub validation: Option<Blend>,
}

impl Blend {
    /// Opens whole files.
    ///
    /// # Errors
    /// The first file that cannot be used.
    pub fn open(path: &DataPath) -> Result<Self, TokenFileError> {
        Ok(Blend::open_parts(path, &Split::TRAINING)?.training)
    }

    /// Opens files and divides the documents of each.
    ///
    /// # Errors
    /// The first file that cannot be used.
    pub fn open_parts(path: &DataPath, split: &Split) -> Result<Parts, TokenFileError> {
        let [mut of_training, mut of_validation] = [Vec::new(), Vec::new()];
        for prefix in &path.prefixes {
            let [training, validation] = TokenFile::open_parts(prefix, split)?;
            of_training.push(training);
            of_validation.push(validation);
        }
        let turns = path.shares.as_deref().map(|shares| Arc::new(Turns::new(shares)));
        let blend = |files| Blend { files, turns: turns.clone() };
        Ok(Parts {
            training: blend(of_training),
            validation: split.has_validation().then(|| blend(of_validation)),
        })
    }

    /// The global order of a run's samples.
    ///
    /// # Errors
    /// Files without a sample, and a tail rule that shares or batches do not go with.
    pub fn sampler(&self, config: &TrainConfig) -> Result<Sampler, SamplerError> {
        self.sampler_of(config.parallel.seq_length(), config.seed, &config.batch, config.epoch_tail)
    }

    /// The order of its samples of `seq_length` tokens under `seed`, handed out in batches of `batch`.
    ///
    /// # Errors
    /// See [`sampler`](Self::sampler).
    pub(crate) fn sampler_of(
        &self,
        seq_length: u64,
        seed: u32,
        batch: &BatchSchedule,
        tail: EpochTail,
    ) -> Result<Sampler, SamplerError> {
        let sizes: Vec<u64> =
            self.files.iter().map(|file| file.num_samples(seq_length)).collect::<Result<_, _>>()?;
        match &self.turns {
            None => Sampler::new(seed, sizes.iter().sum(), batch, tail),
            Some(turns) => Sampler::by_turns(seed, &sizes, Arc::clone(turns), batch, tail),
        }
    }

    /// Whether its files are read in shares.
    pub(crate) fn has_shares(&self) -> bool {
        self.turns.is_some()
    }

    /// What is read, and how much of it: of each file the FNV-1a 64 of its `.idx`, hexadecimal, behind its share and its documents,
    /// where these are not everything.
    pub fn identity(&self) -> String {
        let of_file = |(index, file): (usize, &TokenFile)| match &self.turns {
            None => file.identity(),
            Some(turns) => format!("{} × {}", turns.shares[index], file.identity()),
        };
        self.files.iter().enumerate().map(of_file).collect::<Vec<_>>().join(", ")
    }

    /// The tokens of a sample, counted through the files in their order: see [`TokenFile::read_sample`].
    ///
    /// # Errors
    /// If they cannot be read, or one of them is no id below `vocab_size`.
    ///
    /// # Panics
    /// If there is no such sample.
    pub fn read_sample(
        &self,
        sample: u64,
        seq_length: u64,
        vocab_size: usize,
    ) -> Result<Vec<i32>, TokenFileError> {
        let mut sample_of_file = sample;
        for file in &self.files {
            let num_samples = file.num_samples(seq_length)?;
            if sample_of_file < num_samples {
                return file.read_sample(sample_of_file, seq_length, vocab_size);
            }
            sample_of_file -= num_samples;
        }
        panic!("sample {sample} is behind the last file");
    }
}

impl From<TokenFile> for Blend {
    fn from(file: TokenFile) -> Self {
        Blend { files: vec![file], turns: None }
    }
}

/// Whose turn it is at each position.
///
/// Of n positions, a file with share s of a period P has ⌊n·s/P⌋ or ⌈n·s/P⌉, for every n. Its turn j may come from position
/// ⌊j·P/s⌋ on, and must come before ⌈(j + 1)·P/s⌉; of the files that may, the one that must be first has the turn. (Baruah, Cohen,
/// Plaxton, Varvel: Proportionate progress, Algorithmica 15, 1996: for one processor, earliest deadline first meets every deadline.)
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Turns {
    shares: Vec<u64>,
    /// Of one period: whose turn, and which of its turns in the period.
    period: Vec<(u32, u32)>,
}

impl Turns {
    /// Turns of files with these shares, each above 0; their sum, the period, is kept in memory.
    pub(super) fn new(shares: &[u64]) -> Self {
        let len: u64 = shares.iter().sum();
        let mut taken = vec![0u64; shares.len()];
        let period = (0..len).map(|position| {
            let may = (0..shares.len()).filter(|file| taken[*file] * len / shares[*file] <= position);
            let next = may.min_by_key(|file| ((taken[*file] + 1) * len).div_ceil(shares[*file]));
            let file = next.expect("the shares of the turns so far are not above their number");
            taken[file] += 1;
            (file as u32, taken[file] as u32 - 1)
        });
        Turns { period: period.collect(), shares: shares.to_vec() }
    }

    /// The file that has the turn at a position, and how many it had before.
    pub(super) fn at(&self, position: u64) -> (usize, u64) {
        let len = self.period.len() as u64;
        let (file, turn) = self.period[(position % len) as usize];
        (file as usize, position / len * self.shares[file as usize] + u64::from(turn))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// After every number of positions each file has had its share, but for less than one turn, and its turns are counted.
        #[test]
        fn no_count_is_off_by_one(shares in prop::collection::vec(1..40u64, 1..7), periods in 1..3u64) {
            let turns = Turns::new(&shares);
            let period: u64 = shares.iter().sum();
            let mut counts = vec![0; shares.len()];
            for position in 0..periods * period {
                let (file, before) = turns.at(position);
                prop_assert_eq!(before, counts[file]);
                counts[file] += 1;
                for (count, share) in counts.iter().zip(&shares) {
                    prop_assert!((count * period).abs_diff((position + 1) * share) < period);
                }
            }
        }
    }
}
