//! Who makes the state: operations, communicators, models, optimizer and the training loop.
//!
//! Training reads tokens, talks to other ranks through [`comm`], and hands its state to a `ckpt::Saver` or takes it from a
//! `ckpt::StateSource`; it knows no object store, runtime or file format of checkpoints.

pub mod backend;
pub mod comm;
pub mod config;
pub mod data;
pub mod evaluate;
pub mod model;
pub mod numerics;
mod optim;
pub mod parallel;
pub mod resume;
pub mod rng;
pub mod run;
pub mod state;
pub mod step;
