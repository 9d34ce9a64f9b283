//! Checkpoints of small states whose every element tells where it belongs.

mod round_trip;
mod support;
