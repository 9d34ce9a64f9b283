//! Shapes and element types.

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::fmt;

/// Elements per dim of a tensor, outermost first. No dims: a scalar with one element.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Shape(pub SmallVec<[u64; 4]>);

impl Shape {
    /// The shape with these extents.
    pub fn new(dims: &[u64]) -> Self {
        Shape(SmallVec::from_slice(dims))
    }

    /// Extents, outermost dim first.
    pub fn dims(&self) -> &[u64] {
        &self.0
    }

    /// Number of elements; 1 for a scalar.
    pub fn numel(&self) -> u64 {
        self.0.iter().product()
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("scalar");
        }
        for (at, extent) in self.0.iter().enumerate() {
            if at > 0 {
                f.write_str(" × ")?;
            }
            write!(f, "{extent}")?;
        }
        Ok(())
    }
}

macro_rules! dtypes {
    ($($variant:ident $name:literal $bytes:literal,)*) => {
        /// The type of one element, under the names of safetensors (and their continuation for what it lacks).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[allow(missing_docs)]
        pub enum DType {
            $(#[serde(rename = $name)] $variant,)*
        }

        impl DType {
            /// Every element type.
            pub const ALL: &[DType] = &[$(DType::$variant,)*];

            /// Bytes of one element.
            pub const fn size_bytes(self) -> usize {
                match self { $(DType::$variant => $bytes,)* }
            }

            /// The name in files.
            pub const fn name(self) -> &'static str {
                match self { $(DType::$variant => $name,)* }
            }
        }
    };
}

dtypes! {
    Bool "BOOL" 1,
    U8 "U8" 1,
    I8 "I8" 1,
    F8E4M3 "F8_E4M3" 1,
    F8E5M2 "F8_E5M2" 1,
    F8E4M3Fnuz "F8_E4M3FNUZ" 1,
    F8E5M2Fnuz "F8_E5M2FNUZ" 1,
    U16 "U16" 2,
    I16 "I16" 2,
    F16 "F16" 2,
    Bf16 "BF16" 2,
    U32 "U32" 4,
    I32 "I32" 4,
    F32 "F32" 4,
    C32 "C32" 4,
    U64 "U64" 8,
    I64 "I64" 8,
    F64 "F64" 8,
    C64 "C64" 8,
    C128 "C128" 16,
}

impl DType {
    /// The element type with this name in files.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.iter().copied().find(|dtype| dtype.name() == name)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
