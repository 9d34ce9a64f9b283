//! The commands, one a module: each takes its parsed arguments and returns the exit code or an error.

pub(crate) mod completions;
pub(crate) mod config;
pub(crate) mod demo;
pub(crate) mod diff;
pub(crate) mod digest;
pub(crate) mod doctor;
pub(crate) mod env;
pub(crate) mod explain;
pub(crate) mod inspect;
pub(crate) mod ls;
pub(crate) mod plan;
pub(crate) mod tokenize;
pub(crate) mod train;
pub(crate) mod verify;
