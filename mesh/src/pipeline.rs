//! Which layers each stage of a pipeline holds, and which stages a part of the model lives on.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Where in the model a tensor stands; with a [`Pipeline`] it says which stages hold it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelPart {
    /// Every stage holds it.
    #[default]
    EveryStage,
    /// The first stage does: the word embedding.
    FirstStage,
    /// The last stage does: the final norm and the output layer.
    LastStage,
    /// The first stage does, and the last one a copy: a word embedding that is the output layer, too.
    BothEnds,
    /// The stage of this decoder layer, counted over the whole model.
    Layer(u32),
}

impl ModelPart {
    pub(crate) fn is_every_stage(&self) -> bool {
        *self == ModelPart::EveryStage
    }
}

/// How the layers of a model are divided over chunks, of which a stage has one or, interleaved, several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PipelineSplit {
    /// The same number each, where the embedding and the loss may count as a layer.
    Even {
        /// Whether the embedding counts as a layer of the first chunk.
        account_for_embedding: bool,
        /// Whether the loss counts as a layer of the last chunk.
        account_for_loss: bool,
    },
    /// Given numbers on the first and the last stage, the same number on those between.
    FirstLast {
        /// Layers of the first stage; as many as those between, if not given.
        first: Option<u32>,
        /// Layers of the last stage; as many as those between, if not given.
        last: Option<u32>,
    },
    /// Chunk by chunk.
    Stages(StageLayout),
}

impl PipelineSplit {
    /// The same number of layers each.
    pub const EVEN: PipelineSplit =
        PipelineSplit::Even { account_for_embedding: false, account_for_loss: false };
}

/// Layers of each chunk, in the order in which a sample runs through them, written `Ett|tt|ttL`: `E` the embedding, `t` a
/// layer, `L` the loss, `|` between chunks, `t*3` and `(tt|)*3` repeated, commas without meaning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageLayout {
    num_layers: Vec<u32>,
}

/// The layers of a model on the stages of a pipeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pipeline {
    num_stages: u32,
    /// Layers of each chunk, in the order in which a sample runs through them: chunk v of stage p at v · stages + p.
    chunks: Vec<Range<u32>>,
}

/// Layers that cannot be divided so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PipelineError {
    /// There is nothing to divide, or nothing to divide it over.
    #[error("a pipeline of {num_layers} layers on {num_stages} stages of {num_chunks} chunks")]
    Zero {
        /// Layers of the model.
        num_layers: u32,
        /// Pipeline parallel degree.
        num_stages: u32,
        /// Chunks of a stage.
        num_chunks: u32,
    },
    /// Layers do not divide.
    #[error("{what} {number} ÷ {over} is not exact")]
    Indivisible {
        /// What is divided.
        what: &'static str,
        /// How many there are.
        number: u32,
        /// Over how many.
        over: u32,
        /// A layout that works.
        working: StageLayout,
    },
    /// First and last stage take more than there is, or leave layers that no stage takes.
    #[error("first and last of {num_stages} stages take {taken} of {num_layers} layers")]
    FirstLast {
        /// Pipeline parallel degree.
        num_stages: u32,
        /// Layers of first and last stage.
        taken: u64,
        /// Layers of the model.
        num_layers: u32,
        /// A layout that works.
        working: StageLayout,
    },
    /// A layout of another model or another pipeline.
    #[error(
        "the stage layout has {layers} layers in {chunks} chunks; the model has {num_layers}, the pipeline {num_stages} stages"
    )]
    Stages {
        /// Layers of the layout.
        layers: u64,
        /// Its chunks.
        chunks: usize,
        /// Layers of the model.
        num_layers: u32,
        /// Pipeline parallel degree.
        num_stages: u32,
        /// A layout that works.
        working: StageLayout,
    },
}

impl PipelineError {
    /// `RM2009`.
    pub fn code(&self) -> &'static str {
        "RM2009"
    }

    /// How to mend it, with a layout that works.
    pub fn help(&self) -> String {
        match self {
            PipelineError::Zero { .. } => "give every number a value of at least 1".to_owned(),
            PipelineError::Indivisible { working, .. }
            | PipelineError::FirstLast { working, .. }
            | PipelineError::Stages { working, .. } => {
                format!("`--pipeline-model-parallel-layout '{working}'` works")
            }
        }
    }
}

impl Pipeline {
    /// `num_layers` layers on `num_stages` stages of `num_chunks` chunks each.
    ///
    /// # Errors
    /// Numbers that are zero or do not divide, and a stage layout of other numbers.
    pub fn new(
        num_layers: u32,
        num_stages: u32,
        num_chunks: u32,
        split: &PipelineSplit,
    ) -> Result<Self, PipelineError> {
        if num_layers == 0 || num_stages == 0 || num_chunks == 0 {
            return Err(PipelineError::Zero { num_layers, num_stages, num_chunks });
        }
        let all = num_stages.saturating_mul(num_chunks);
        let working = || StageLayout::balanced(num_layers, all);
        let exact = |what, number: u32, over: u32| match number.is_multiple_of(over) {
            true => Ok(number / over),
            false => Err(PipelineError::Indivisible { what, number, over, working: working() }),
        };
        let counts: Vec<u32> = match split {
            PipelineSplit::Even { account_for_embedding, account_for_loss } => {
                let (embedding, loss) = (u32::from(*account_for_embedding), u32::from(*account_for_loss));
                let counted = num_layers.saturating_add(embedding + loss);
                let what = if counted == num_layers { "layers" } else { "layers with embedding and loss" };
                let stage = exact(what, counted, num_stages)?;
                let chunk = exact("layers of a stage", stage, num_chunks)?;
                let mut counts = vec![chunk; all as usize];
                counts[0] -= embedding;
                *counts.last_mut().expect("a pipeline has a chunk") -= loss;
                counts
            }
            PipelineSplit::FirstLast { first, last } => {
                let (given, taken) = (first.iter().chain(last).count() as u32, {
                    let [first, last] = [first, last].map(|count| u64::from(count.unwrap_or(0)));
                    first + last
                });
                let between = num_stages.checked_sub(given);
                let left = u64::from(num_layers).checked_sub(taken).map(|left| left as u32);
                let (Some(between), Some(left)) =
                    (between, left.filter(|left| between != Some(0) || *left == 0))
                else {
                    return Err(PipelineError::FirstLast {
                        num_stages,
                        taken,
                        num_layers,
                        working: working(),
                    });
                };
                let middle = if between == 0 {
                    0
                } else {
                    exact("layers between first and last stage", left, between)?
                };
                let mut stages = vec![middle; num_stages as usize];
                if let Some(first) = first {
                    stages[0] = *first;
                }
                if let Some(last) = last {
                    stages[num_stages as usize - 1] = *last;
                }
                let mut chunk = Vec::new();
                for stage in stages {
                    chunk.push(exact("layers of a stage", stage, num_chunks)?);
                }
                chunk.repeat(num_chunks as usize)
            }
            PipelineSplit::Stages(StageLayout { num_layers: counts }) => {
                let layers = counts.iter().map(|count| u64::from(*count)).sum();
                if layers != u64::from(num_layers) || counts.len() as u64 != u64::from(all) {
                    let chunks = counts.len();
                    return Err(PipelineError::Stages {
                        layers,
                        chunks,
                        num_layers,
                        num_stages,
                        working: working(),
                    });
                }
                counts.clone()
            }
        };
        let mut start = 0;
        let chunk = |count: u32| {
            start += count;
            start - count..start
        };
        Ok(Pipeline { num_stages, chunks: counts.into_iter().map(chunk).collect() })
    }

    /// Pipeline parallel degree.
    pub fn num_stages(&self) -> u32 {
        self.num_stages
    }

    /// The layers of chunk `chunk` of stage `stage`: their number is the count, their start the offset.
    ///
    /// # Panics
    /// If there is no such chunk.
    pub fn layers(&self, stage: u32, chunk: u32) -> Range<u32> {
        assert!(stage < self.num_stages, "stage {stage} of {}", self.num_stages);
        self.chunks[(chunk * self.num_stages + stage) as usize].clone()
    }

    /// The stage that holds a layer; `None` if the model has no such layer.
    pub fn stage_of(&self, layer: u32) -> Option<u32> {
        let chunk = self.chunks.iter().position(|layers| layers.contains(&layer))?;
        Some(chunk as u32 % self.num_stages)
    }

    /// Which copy of `part` the stage holds, 0 the main one; `None` if it holds none.
    pub(crate) fn copy_on(&self, stage: u32, part: ModelPart) -> Option<u32> {
        let is_last = stage + 1 == self.num_stages;
        match part {
            ModelPart::EveryStage => Some(stage),
            ModelPart::FirstStage => (stage == 0).then_some(0),
            ModelPart::LastStage => is_last.then_some(0),
            ModelPart::BothEnds if stage == 0 => Some(0),
            ModelPart::BothEnds => is_last.then_some(1),
            ModelPart::Layer(layer) => (self.stage_of(layer) == Some(stage)).then_some(0),
        }
    }

    /// The part that stands for all those on the same stages: what is on the stage of a layer is as its first one.
    pub(crate) fn representative(&self, part: ModelPart) -> ModelPart {
        let ModelPart::Layer(layer) = part else { return part };
        let same = |first: &Range<u32>| self.stage_of(first.start) == self.stage_of(layer);
        let first = self.chunks.iter().filter(|layers| !layers.is_empty()).find(|layers| same(layers));
        first.map_or(part, |first| ModelPart::Layer(first.start))
    }
}

impl StageLayout {
    /// `num_layers` layers as evenly over `num_chunks` chunks as whole layers go, the earlier ones with one more.
    pub fn balanced(num_layers: u32, num_chunks: u32) -> Self {
        let (each, more) = (num_layers / num_chunks, num_layers % num_chunks);
        StageLayout { num_layers: (0..num_chunks).map(|chunk| each + u32::from(chunk < more)).collect() }
    }

    /// Number of chunks.
    pub fn num_chunks(&self) -> usize {
        self.num_layers.len()
    }
}

/// `Et*3|t*3|t*2|t*2L`
impl fmt::Display for StageLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("E")?;
        for (chunk, count) in self.num_layers.iter().enumerate() {
            if chunk > 0 {
                f.write_str("|")?;
            }
            match count {
                0 => {}
                1..3 => f.write_str(&"t".repeat(*count as usize))?,
                count => write!(f, "t*{count}")?,
            }
        }
        f.write_str("L")
    }
}

/// A text that is no stage layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no stage layout: {reason}; `Ett|tt|ttL` is one, `(tt|)*3` repeats")]
pub struct BadStageLayout {
    /// What was given.
    pub text: String,
    /// Why not.
    pub reason: &'static str,
}

impl FromStr for StageLayout {
    type Err = BadStageLayout;

    fn from_str(text: &str) -> Result<Self, BadStageLayout> {
        let bad = |reason| BadStageLayout { text: text.to_owned(), reason };
        let symbols: Vec<char> =
            text.chars().filter(|symbol| *symbol != ',' && !symbol.is_whitespace()).collect();
        let mut at = 0;
        let flat = expand(&symbols, &mut at, 0).map_err(bad)?;
        if at < symbols.len() {
            return Err(bad("a bracket closes that was not opened"));
        }
        let Some(inner) = flat.strip_prefix('E').and_then(|rest| rest.strip_suffix('L')) else {
            return Err(bad("it begins with the embedding `E` and ends with the loss `L`"));
        };
        if inner.contains(['E', 'L']) {
            return Err(bad("embedding and loss are there once"));
        }
        Ok(StageLayout { num_layers: inner.split('|').map(|chunk| chunk.len() as u32).collect() })
    }
}

/// Symbols of a layout written out; a bound, because a layout names every layer.
const SYMBOLS_MAX: usize = 1 << 16;

/// Symbols from `at` on up to the bracket that closes, repetitions written out.
fn expand(symbols: &[char], at: &mut usize, depth: usize) -> Result<String, &'static str> {
    let mut all = String::new();
    while let Some(symbol) = symbols.get(*at) {
        *at += 1;
        let item = match symbol {
            'E' | 't' | 'L' | '|' => symbol.to_string(),
            '(' if depth < 8 => {
                let inner = expand(symbols, at, depth + 1)?;
                if symbols.get(*at) != Some(&')') {
                    return Err("a bracket does not close");
                }
                *at += 1;
                inner
            }
            '(' => return Err("brackets are too deep"),
            ')' => {
                *at -= 1;
                return Ok(all);
            }
            'm' => return Err("there are no layers for multi-token prediction"),
            _ => return Err("its symbols are E, t, L, |, *, brackets and numbers"),
        };
        let mut times = 1u32;
        if symbols.get(*at) == Some(&'*') {
            let digits: String =
                symbols[*at + 1..].iter().take_while(|digit| digit.is_ascii_digit()).collect();
            *at += 1 + digits.len();
            times = digits.parse().map_err(|_| "a number follows `*`")?;
        }
        if all.len() as u64 + item.len() as u64 * u64::from(times) > SYMBOLS_MAX as u64 {
            return Err("it is too long");
        }
        all.push_str(&item.repeat(times as usize));
    }
    Ok(all)
}
