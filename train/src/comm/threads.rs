//! Ranks as threads.
