//! What state becomes elsewhere.
//!
//! Loading under another layout needs nothing from here: `ckpt` intersects boxes with boxes, whatever the layouts.
//! [`plan_layout_change`] says beforehand what such a load will come to. It reads no data. What boxes cannot say, names and
//! fused matrices of other software's models, is a table: [`HfModel`].
//!
//! This crate knows neither devices nor training.

#![forbid(unsafe_code)]

mod hf;
mod plan;

pub use hf::{HfActivation, HfConfigError, HfFamily, HfModel, TensorMap};
pub use plan::{
    Bytes, CutChange, FoldChange, LayoutChange, LayoutChangeError, NumberChange, RandomStreams, RankChange,
    Target, TensorChange, UndividedTensor, plan_layout_change,
};
