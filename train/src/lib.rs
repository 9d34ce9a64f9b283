//! Who makes the state: operations, communicators, models, optimizer and the training loop.

pub mod backend;
pub mod comm;
pub mod numerics;
pub mod rng;
