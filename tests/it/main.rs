//! Integration tests of the whole workspace, one binary so that the heavy crates link once.

#![allow(unreachable_pub)] // one crate: what a module shares with its neighbours is `pub`

mod anchor;
mod architecture;
mod averages;
mod blends;
mod cli;
mod documents;
mod evaluation;
mod fast;
mod foreign;
mod golden;
mod kills;
mod labels;
mod layouts;
mod logits;
mod mutations;
mod processes;
mod resume;
mod streams;
mod support;
mod two_models;
