//! Formats of other software, read in their own terms.

mod safetensors;

pub use safetensors::{SafeTensor, SafetensorsError, SafetensorsFault, SafetensorsFolder};
