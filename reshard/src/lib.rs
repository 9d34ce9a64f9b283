//! reshard
