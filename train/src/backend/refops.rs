//! Every operation again, naive, in f64: what tests compare with.
