//! Which token files a run reads, how much of each, and which of their documents.

use std::ops::Range;
use std::path::PathBuf;
use std::str::FromStr;

/// Positions after which the turns of files repeat, at most: one period is kept in memory.
const PERIOD_MAX: u64 = 1 << 20;

/// Prefixes of token files, and their shares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataPath {
    /// Prefixes of the files, at least one.
    pub prefixes: Vec<PathBuf>,
    /// Shares of the files in the samples, one each, the smallest whole numbers in the proportion of the weights. None: every
    /// sample of every file once an epoch.
    pub shares: Option<Vec<u64>>,
}

/// Training, validation and test documents of a file: three parts, one after another, in the proportion of three numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Split {
    weights: [f64; 3],
}

/// A text that names no data.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DataPathError {
    /// A weight that is none.
    #[error("weight `{0}` is no decimal number above 0")]
    Weight(String),
    /// Weights with too many digits.
    #[error(
        "the weights are exact only every {period} samples, and every {PERIOD_MAX} is the most that is done"
    )]
    TooFine {
        /// Samples after which all files have had exactly their shares.
        period: u128,
        /// The weights with fewer digits.
        rounded: String,
    },
    /// A split that is none.
    #[error("`{0}` is no split: up to three decimal numbers between commas, the first of them above 0")]
    Split(String),
}

impl DataPathError {
    /// `RM6003`.
    pub fn code(&self) -> &'static str {
        "RM6003"
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            DataPathError::Weight(_) => {
                "as in `0.7 PREFIX 0.3 PREFIX`; weights are compared with one another and need not add up to 1".into()
            }
            DataPathError::TooFine { rounded, .. } => {
                format!("use fewer digits; rounded to parts of 10000 the weights are {rounded}")
            }
            DataPathError::Split(_) => "as in `969,30,1`: parts of training, validation and test".into(),
        }
    }
}

impl DataPath {
    /// One file.
    pub fn single(prefix: impl Into<PathBuf>) -> Self {
        DataPath { prefixes: vec![prefix.into()], shares: None }
    }

    /// What words say, as Megatron reads them: pairs of a weight and a prefix if every other word is a number, else prefixes.
    ///
    /// # Errors
    /// Weights that make no shares.
    ///
    /// # Panics
    /// Without a word.
    pub fn parse(words: &[String]) -> Result<Self, DataPathError> {
        assert!(!words.is_empty(), "a path of no words");
        let (pairs, rest) = words.as_chunks::<2>();
        if !rest.is_empty() || pairs.iter().any(|[weight, _]| weight.parse::<f64>().is_err()) {
            return Ok(DataPath { prefixes: words.iter().map(PathBuf::from).collect(), shares: None });
        }
        let weights: Vec<&str> = pairs.iter().map(|[weight, _]| weight.as_str()).collect();
        // One file has all turns, whatever its weight.
        let shares = Some(shares(&weights)?).filter(|shares| shares.len() > 1);
        Ok(DataPath { prefixes: pairs.iter().map(|[_, prefix]| PathBuf::from(prefix)).collect(), shares })
    }
}

/// Decimal numbers as the smallest whole ones in the same proportion.
fn shares(weights: &[&str]) -> Result<Vec<u64>, DataPathError> {
    let decimals = |weight: &str| weight.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    let places = weights.iter().map(|weight| decimals(weight)).max().unwrap_or(0);
    let mut shares: Vec<u64> = Vec::new();
    for weight in weights {
        let (whole, part) = weight.split_once('.').unwrap_or((weight, ""));
        let digits = format!("{whole}{part:0<places$}");
        let share = digits.bytes().all(|digit| digit.is_ascii_digit()).then(|| digits.parse().ok()).flatten();
        shares.push(share.filter(|share| *share > 0).ok_or_else(|| DataPathError::Weight((*weight).into()))?);
    }
    let divisor = shares.iter().copied().fold(0, gcd);
    shares.iter_mut().for_each(|share| *share /= divisor);
    let period: u128 = shares.iter().map(|share| u128::from(*share)).sum();
    if period > u128::from(PERIOD_MAX) {
        let rounded = shares.iter().map(|share| ((u128::from(*share) * 10_000 + period / 2) / period).max(1));
        let rounded = rounded.map(|share| share.to_string()).collect::<Vec<_>>().join(", ");
        return Err(DataPathError::TooFine { period, rounded });
    }
    Ok(shares)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Split {
    /// Everything is trained on.
    pub const TRAINING: Split = Split { weights: [1.0, 0.0, 0.0] };

    /// Whether there are to be documents for validation.
    pub fn has_validation(&self) -> bool {
        self.weights[1] > 0.0
    }

    /// Which of so many documents belong to training and to validation. The borders are those of Megatron, to the last bit of its
    /// rounding; the test documents are what is left.
    pub(super) fn training_and_validation(&self, documents: u64) -> [Range<u64>; 2] {
        let sum: f64 = self.weights.iter().sum();
        let border = |part: f64| (part * documents as f64).round_ties_even() as u64;
        let [training, validation, _] = self.weights.map(|weight| weight / sum);
        let [first, second] = [border(training), border(training + validation)];
        [0..first, first..second]
    }
}

impl FromStr for Split {
    type Err = DataPathError;

    fn from_str(text: &str) -> Result<Self, DataPathError> {
        let refused = || DataPathError::Split(text.into());
        let mut weights = [0.0; 3];
        for (at, number) in text.split(',').enumerate() {
            let number: f64 = number.trim().parse().map_err(|_| refused())?;
            *weights.get_mut(at).filter(|_| (0.0..f64::INFINITY).contains(&number)).ok_or_else(refused)? =
                number;
        }
        if weights[0] > 0.0 { Ok(Split { weights }) } else { Err(refused()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<DataPath, DataPathError> {
        DataPath::parse(&text.split(' ').map(String::from).collect::<Vec<_>>())
    }

    #[test]
    fn weights_are_whole_numbers_in_proportion() {
        let shares = |text| parse(text).unwrap().shares;
        assert_eq!(shares("0.7 a 0.3 b"), Some(vec![7, 3]));
        assert_eq!(shares("50 a 25.0 b 12.50 c"), Some(vec![4, 2, 1]));
        assert_eq!(shares("a b"), None);
        assert_eq!(parse("3 a"), Ok(DataPath::single("a")), "one file has all turns");
        assert_eq!(parse("3 a 4").unwrap().prefixes.len(), 3, "an odd number of words are prefixes");
        for bad in ["0 a 1 b", "-1 a 1 b", "1e3 a 1 b", "nan a 1 b", "inf a 1 b", "+1 a 1 b"] {
            assert!(matches!(parse(bad), Err(DataPathError::Weight(_))), "{bad}");
        }
        assert!(matches!(parse("99999999999999999999 a 1 b"), Err(DataPathError::Weight(_))));
    }

    #[test]
    fn weights_of_too_many_digits_are_refused_with_ones_that_fit() {
        let error = parse("1234567890 a 987654321 b 0.5 c").unwrap_err();
        let DataPathError::TooFine { period, rounded } = &error else { panic!("{error}") };
        assert_eq!((*period, rounded.as_str()), (2 * 1_234_567_890 + 2 * 987_654_321 + 1, "5556, 4444, 1"));
        assert!(parse("5556 a 4444 b 1 c").is_ok());
    }

    /// Expected: Python's `round` of the cumulated parts times the documents, which is what Megatron does.
    #[test]
    fn a_split_has_the_borders_of_megatron() {
        let borders = |split: &str, documents| {
            let [training, validation] = split.parse::<Split>().unwrap().training_and_validation(documents);
            assert_eq!((training.start, training.end), (0, validation.start));
            (validation.start, validation.end)
        };
        assert_eq!(borders("969,30,1", 1000), (969, 999));
        assert_eq!(borders("969, 30, 1", 7), (7, 7));
        assert_eq!(borders("99,1,0", 50), (50, 50), "49.5 is rounded to even");
        assert_eq!(borders("97,3", 50), (48, 50), "48.5 is rounded to even");
        assert_eq!(borders("1,0,0", 3), (3, 3));
        assert_eq!(borders("0.5,.25,0.25", 10), (5, 8), "7.5 is rounded to even");
        for bad in ["", "1,1,1,1", "0,1", "-1,2", "a", "1,,1", "inf", "nan,1"] {
            assert_eq!(bad.parse::<Split>(), Err(DataPathError::Split(bad.into())));
        }
    }
}
