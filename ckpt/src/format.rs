//! Formats of other software, read in their own terms. Nothing of them is executed, and no size that they claim is allocated
//! before so much is known to be there.

mod dcp;
mod foreign;
mod pickle;
mod safetensors;
mod torch_file;

use foreign::read_range;
pub use foreign::{ForeignCheckpoint, ForeignError, ForeignFormat, ForeignTensor};
pub use pickle::{PickleError, PickleFault};
pub use safetensors::{SafeTensor, SafetensorsError, SafetensorsFault, SafetensorsFolder};
