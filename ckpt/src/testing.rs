//! For tests: a store that fails on purpose, ranks as threads, and small states whose every element tells where it
//! belongs.

mod faulty;
mod state;

pub use faulty::{FaultyStore, Trouble};
pub use state::{RankMemory, Ranks, header, label_bytes, load, save, save_through};
