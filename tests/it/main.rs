//! Integration tests of the whole workspace, one binary so that the heavy crates link once.

mod anchor;
mod cli;
mod layouts;
mod support;
