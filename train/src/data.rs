//! Token files, and which samples a rank reads: functions of the step and the layout alone, so nothing is kept per rank.

mod blend;
mod index;
mod path;
pub mod sampler;
mod tokenizer;
pub mod tokens;
mod writer;

pub use blend::{Blend, Parts};
pub use path::{DataPath, DataPathError, Split};
pub use sampler::Sampler;
pub use tokenizer::Tokenizer;
pub use tokens::{TokenFile, TokenFileError};
pub use writer::{Existing, TokenWriter};
