//! Checkpoints of small states whose every element tells where it belongs.

mod broken;
mod faults;
mod files;
mod keys;
mod kill;
mod large;
mod plans;
mod retention;
mod round_trip;
mod safetensors;
mod sharing;
mod support;
mod sweep;
mod two_runs;
