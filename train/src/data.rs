//! Token files, and which samples a rank reads: functions of the step and the layout alone, so nothing is kept per rank.

pub mod sampler;
pub mod tokens;

pub use sampler::Sampler;
pub use tokens::{TokenFile, TokenFileError, TokenWriter};
