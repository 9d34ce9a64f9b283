//! How many samples a step takes, and which of them a rank reads.
//!
//! Samples have positions in one global order. A step takes the next global batch of them, a microbatch the next
//! micro batch size × batch parallel size, and in it each lane the next micro batch size. Ranks of one lane read the same
//! samples: they share a sequence, a weight or a pipeline.

use crate::config::ParallelConfig;
use crate::groups::{GroupKind, ProcessGroups};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// Samples of each optimizer step, by the samples behind it: never by the number of the step, so that a resume goes on with
/// the size that the run had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BatchFields", into = "BatchFields")]
pub struct BatchSchedule {
    fields: BatchFields,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum BatchFields {
    Constant(u64),
    Ramp(Ramp),
    Steps(Vec<BatchStep>),
}

/// A batch size that grows in equal levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ramp {
    /// Samples of the first step.
    pub start: u64,
    /// Samples by which each level is larger than the one before.
    pub increment: u64,
    /// Samples until the last level is reached.
    pub samples: u64,
    /// Samples of a step at the last level.
    pub end: u64,
}

/// An entry of a schedule in steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchStep {
    /// Samples behind a run from which on it holds.
    pub from: u64,
    /// Samples of an optimizer step.
    pub size: u64,
}

/// Numbers that make no batch schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// A step of no samples.
    #[error("a step of 0 samples")]
    Zero,
    /// Levels that do not lead from start to end.
    #[error("a ramp from {} to {} samples in steps of {} is not exact", .0.start, .0.end, .0.increment)]
    Ramp(Ramp),
    /// Entries that are not in order, or do not begin at the start of the run.
    #[error(
        "entry {entry} holds from {from} samples on; the first holds from 0, each later one from more than the one before"
    )]
    Order {
        /// Index of the entry.
        entry: usize,
        /// Its first sample.
        from: u64,
    },
    /// A text that is no schedule.
    #[error("`{entry}` is no entry THRESHOLD:BATCH; numbers may end with K, M, B or T")]
    Text {
        /// The entry.
        entry: String,
    },
    /// A size in force that does not divide over the ranks.
    #[error(
        "batch size {size} ÷ (micro batch size {micro_batch_size} × batch parallel size {batch_parallel_size}) is not exact, \
         from {from} consumed samples on"
    )]
    Indivisible {
        /// Samples of a step.
        size: u64,
        /// Samples a rank runs at a time.
        micro_batch_size: u32,
        /// Ranks with different samples.
        batch_parallel_size: u32,
        /// Where it first holds.
        from: u64,
    },
}

impl BatchError {
    /// `RM2002`.
    pub fn code(&self) -> &'static str {
        "RM2002"
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            BatchError::Zero => "give every batch size a value of at least 1".to_owned(),
            BatchError::Ramp(ramp) => format!(
                "the end, which is --global-batch-size, is the start and a number of increments: {} would fit",
                ramp.start
                    + ramp.end.saturating_sub(ramp.start).checked_div(ramp.increment).unwrap_or(0)
                        * ramp.increment
            ),
            BatchError::Order { .. } | BatchError::Text { .. } => {
                "give entries such as `0:768 250B:1536`".to_owned()
            }
            BatchError::Indivisible { micro_batch_size, batch_parallel_size, .. } => format!(
                "every size from there on is a multiple of {}",
                u64::from(*micro_batch_size) * u64::from(*batch_parallel_size)
            ),
        }
    }
}

impl BatchSchedule {
    /// The same size at every step.
    ///
    /// # Errors
    /// A size of 0.
    pub fn constant(size: u64) -> Result<Self, BatchError> {
        BatchFields::Constant(size).try_into()
    }

    /// Levels of equal length, in samples, from `ramp.start` to `ramp.end`.
    ///
    /// # Errors
    /// Sizes of 0, or an end that no number of increments leads to.
    pub fn ramp(ramp: Ramp) -> Result<Self, BatchError> {
        BatchFields::Ramp(ramp).try_into()
    }

    /// The size of the last entry whose first sample is not beyond those consumed.
    ///
    /// # Errors
    /// Entries out of order, no entry at 0, and sizes of 0.
    pub fn steps(steps: Vec<BatchStep>) -> Result<Self, BatchError> {
        BatchFields::Steps(steps).try_into()
    }

    /// Entries `THRESHOLD:BATCH` between blanks or commas, in any order. Thresholds count tokens if `seq_length` is given,
    /// else samples; numbers may have decimals and end with K, M, B or T, and are rounded down.
    ///
    /// # Errors
    /// As [`steps`](Self::steps), after the thresholds became samples; a text that is none.
    pub fn parse(text: &str, seq_length: Option<u64>) -> Result<Self, BatchError> {
        let entries = text.split(|symbol: char| symbol == ',' || symbol.is_whitespace());
        let entry = |entry: &str| {
            let (from, size) = entry.split_once(':')?;
            let from = number(from)?;
            Some(BatchStep {
                from: seq_length.map_or(Some(from), |tokens| from.checked_div(tokens))?,
                size: number(size)?,
            })
        };
        let mut steps = Vec::new();
        for text in entries.filter(|entry| !entry.is_empty()) {
            steps.push(entry(text).ok_or_else(|| BatchError::Text { entry: text.to_owned() })?);
        }
        steps.sort_by_key(|step| step.from);
        BatchSchedule::steps(steps)
    }

    /// Whether every step has the same size.
    pub fn is_constant(&self) -> bool {
        matches!(self.fields, BatchFields::Constant(_))
    }

    /// The ramp, if it is one.
    pub fn as_ramp(&self) -> Option<Ramp> {
        match self.fields {
            BatchFields::Ramp(ramp) => Some(ramp),
            _ => None,
        }
    }

    /// The entries, if it is a schedule in steps.
    pub fn as_steps(&self) -> Option<&[BatchStep]> {
        match &self.fields {
            BatchFields::Steps(steps) => Some(steps),
            _ => None,
        }
    }

    /// Samples of the step that starts when `consumed` samples are behind.
    pub fn size_at(&self, consumed: u64) -> u64 {
        match &self.fields {
            BatchFields::Constant(size) => *size,
            BatchFields::Ramp(ramp) => ramp.size_at(consumed),
            BatchFields::Steps(steps) => {
                let next = steps.partition_point(|step| step.from <= consumed);
                steps[next - 1].size
            }
        }
    }

    /// The size that holds in the end.
    pub fn last_size(&self) -> u64 {
        self.size_at(u64::MAX)
    }

    /// Runs of steps of one size from `consumed` samples on: the samples behind the first of them, the size, and the number
    /// of steps, none for the last run, which does not end.
    fn runs(&self, mut consumed: u64) -> impl Iterator<Item = (u64, u64, Option<u64>)> {
        let mut ended = false;
        std::iter::from_fn(move || {
            if ended {
                return None;
            }
            let (from, size) = (consumed, self.size_at(consumed));
            let steps = self.next_change(consumed).map(|change| (change - from).div_ceil(size));
            ended = steps.is_none();
            // Beyond what can be counted nothing is asked for.
            consumed = from.saturating_add(steps.unwrap_or(0).saturating_mul(size));
            Some((from, size, steps))
        })
    }

    /// The first count of samples after `consumed` at which another size holds.
    fn next_change(&self, consumed: u64) -> Option<u64> {
        match &self.fields {
            BatchFields::Constant(_) => None,
            BatchFields::Ramp(ramp) => ramp.next_change(consumed),
            BatchFields::Steps(steps) => steps.iter().map(|step| step.from).find(|from| *from > consumed),
        }
    }

    /// Samples behind a run after so many steps from its start; `None` if they are too many to count.
    pub fn samples_after(&self, mut steps: u64) -> Option<u64> {
        for (from, size, run) in self.runs(0) {
            match run {
                Some(run) if run < steps => steps -= run,
                _ => return size.checked_mul(steps)?.checked_add(from),
            }
        }
        unreachable!("the last run of steps does not end")
    }

    /// Whole steps from the start of a run until `samples` are behind it; a last step that they do not fill is none.
    pub fn steps_within(&self, samples: u64) -> u64 {
        let mut steps = 0;
        for (from, size, run) in self.runs(0) {
            let left = samples.saturating_sub(from) / size;
            match run {
                Some(run) if run <= left => steps += run,
                _ => return steps + left,
            }
        }
        unreachable!("the last run of steps does not end")
    }

    /// The same with each size rounded down to whole microbatches on all lanes: what a run takes that may take less than was asked
    /// for.
    ///
    /// # Errors
    /// A size of less than one microbatch on all lanes.
    pub fn decreased(&self, micro_batch_size: u32, batch_parallel_size: u32) -> Result<Self, BatchError> {
        let one = u64::from(micro_batch_size) * u64::from(batch_parallel_size);
        let mut steps: Vec<BatchStep> = Vec::new();
        let mut next = Some(0);
        while let Some(from) = next {
            let asked = self.size_at(from);
            let size = asked / one * one;
            if size == 0 {
                return Err(BatchError::Indivisible {
                    size: asked,
                    micro_batch_size,
                    batch_parallel_size,
                    from,
                });
            }
            if steps.last().is_none_or(|last| last.size != size) {
                steps.push(BatchStep { from, size });
            }
            next = self.next_change(from);
        }
        match steps[..] {
            [BatchStep { size, .. }] => BatchSchedule::constant(size),
            _ => BatchSchedule::steps(steps),
        }
    }

    /// Checks every size in force between `consumed` and `until` samples against a layout.
    ///
    /// # Errors
    /// The first size that does not divide over the ranks.
    pub fn check(&self, config: &ParallelConfig, consumed: u64, until: u64) -> Result<(), BatchError> {
        let (micro_batch_size, batch_parallel_size) =
            (config.micro_batch_size(), config.layout().batch_parallel_size());
        let one = u64::from(micro_batch_size) * u64::from(batch_parallel_size);
        let in_force = self.runs(consumed).take_while(|(from, ..)| *from < until);
        match in_force.into_iter().find(|(_, size, _)| !size.is_multiple_of(one)) {
            Some((from, size, _)) => {
                Err(BatchError::Indivisible { size, micro_batch_size, batch_parallel_size, from })
            }
            None => Ok(()),
        }
    }
}

impl Ramp {
    fn num_levels(&self) -> u64 {
        (self.end - self.start).checked_div(self.increment).unwrap_or(0)
    }

    /// Levels have `samples` ÷ their number samples, a real number: exact in integers here, where a float may be one level off.
    fn level_at(&self, consumed: u64) -> u64 {
        let levels = self.num_levels();
        match consumed < self.samples {
            true => (u128::from(consumed) * u128::from(levels) / u128::from(self.samples)) as u64,
            false => levels,
        }
    }

    fn size_at(&self, consumed: u64) -> u64 {
        self.start + self.level_at(consumed) * self.increment
    }

    fn next_change(&self, consumed: u64) -> Option<u64> {
        let (next, levels) = (self.level_at(consumed) + 1, self.num_levels());
        let start = (u128::from(next) * u128::from(self.samples)).div_ceil(u128::from(levels.max(1)));
        (next <= levels).then_some(start as u64)
    }
}

/// The number that a text such as `250B` or `1.5k` says, rounded down.
fn number(text: &str) -> Option<u64> {
    let last = text.chars().last()?;
    let (digits, scale) = match last.to_ascii_uppercase() {
        'K' => (&text[..text.len() - 1], 1_000),
        'M' => (&text[..text.len() - 1], 1_000_000),
        'B' => (&text[..text.len() - 1], 1_000_000_000),
        'T' => (&text[..text.len() - 1], 1_000_000_000_000),
        _ => (text, 1u128),
    };
    let (whole, part) = digits.split_once('.').unwrap_or((digits, ""));
    // Digits beyond those that a number can have would not fit the sum below.
    if whole.is_empty() || whole.len() > 20 || part.len() > 15 {
        return None;
    }
    let all: u128 = [whole, part].concat().bytes().try_fold(0, |sum: u128, digit| {
        digit.is_ascii_digit().then(|| sum * 10 + u128::from(digit - b'0'))
    })?;
    u64::try_from((all.checked_mul(scale)?) / 10u128.pow(part.len() as u32)).ok()
}

impl TryFrom<BatchFields> for BatchSchedule {
    type Error = BatchError;

    fn try_from(fields: BatchFields) -> Result<Self, BatchError> {
        match &fields {
            BatchFields::Constant(0) => return Err(BatchError::Zero),
            BatchFields::Constant(_) => {}
            BatchFields::Ramp(ramp) => {
                if ramp.start == 0 {
                    return Err(BatchError::Zero);
                }
                let more = ramp.end.checked_sub(ramp.start);
                // Without a difference there is no level to climb, and an increment of 0 divides nothing else.
                if !more.is_some_and(|more| more.is_multiple_of(ramp.increment)) {
                    return Err(BatchError::Ramp(*ramp));
                }
            }
            BatchFields::Steps(steps) => {
                let out_of_order = |entry: usize| match entry {
                    0 => steps[0].from != 0,
                    entry => steps[entry].from <= steps[entry - 1].from,
                };
                if let Some(entry) = (0..steps.len()).find(|entry| out_of_order(*entry)) {
                    return Err(BatchError::Order { entry, from: steps[entry].from });
                }
                if steps.is_empty() || steps.iter().any(|step| step.size == 0) {
                    return Err(BatchError::Zero);
                }
            }
        }
        Ok(BatchSchedule { fields })
    }
}

impl From<BatchSchedule> for BatchFields {
    fn from(schedule: BatchSchedule) -> BatchFields {
        schedule.fields
    }
}

/// `16`, `8 + 4 per 80 samples up to 16`, `0:8 160:16`.
impl fmt::Display for BatchSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.fields {
            BatchFields::Constant(size) => size.fmt(f),
            BatchFields::Ramp(Ramp { start, increment, samples, end }) => {
                write!(f, "{start} to {end} by {increment} over {samples} samples")
            }
            BatchFields::Steps(steps) => {
                let texts: Vec<String> =
                    steps.iter().map(|step| format!("{}:{}", step.from, step.size)).collect();
                f.write_str(&texts.join(" "))
            }
        }
    }
}

impl ParallelConfig {
    /// The positions in the global order of the samples that the rank behind `groups` reads in microbatch `microbatch` of
    /// the step that starts after `consumed` samples. Its lane is its position in the `dp_gtp_remat` group.
    ///
    /// # Panics
    /// If the `dp_gtp_remat` group does not have batch parallel size members: the groups are of another layout.
    pub fn samples(&self, groups: &ProcessGroups, consumed: u64, microbatch: u64) -> Range<u64> {
        let lanes = groups.size(GroupKind::DpGtpRemat);
        assert_eq!(
            lanes,
            self.layout().batch_parallel_size(),
            "`dp_gtp_remat` group and batch parallel size of the configuration"
        );
        let lane = u64::from(groups.position(GroupKind::DpGtpRemat).0);
        let micro = u64::from(self.micro_batch_size());
        let start = consumed + (microbatch * u64::from(lanes) + lane) * micro;
        start..start + micro
    }
}
