//! The layout matrix: losses, gradient norms and weights do not depend on the layout, bit for bit; what canonical numerics
//! does not admit is refused with the numbers.

use crate::support::{self, Layout, Trace, tiny_model, trace};
use train::config::{ConfigError, TrainConfig};
use train::data::TokenFile;

const STEPS: u64 = 2;

/// A model, sequence and batch whose layouts are compared with one another.
struct Case {
    groups: usize,
    seq_length: u64,
    global_batch_size: u64,
    micro_batches: &'static [u32],
}

/// 1, 2, 4 and 8 ranks.
const POWERS: Case = Case { groups: 4, seq_length: 64, global_batch_size: 8, micro_batches: &[1, 2, 4, 8] };
/// TP 8 needs as many query groups.
const EIGHT_GROUPS: Case = Case { groups: 8, ..POWERS };
/// 3 and 6 ranks.
const THREES: Case = Case { groups: 2, seq_length: 96, global_batch_size: 24, micro_batches: &[1, 2, 4] };

impl Case {
    fn config(&self, layout: Layout) -> Result<TrainConfig, String> {
        let parallel = layout.parallel(self.seq_length, self.global_batch_size).map_err(|e| e.to_string())?;
        let config = support::config(tiny_model(self.groups), parallel, 10);
        config.check().map_err(|error: ConfigError| error.to_string())?;
        Ok(config)
    }

    /// Runs every layout of `ranks` ranks that is admitted and `keep` keeps, and compares it with the single rank.
    fn compare(&self, ranks: &[u32], keep: impl Fn(&Layout) -> bool) -> usize {
        let folder = tempfile::tempdir().unwrap();
        let tokens = support::token_file(folder.path(), 6000);
        let single = self.run(Layout::SINGLE, &tokens);
        assert!(single.outcomes.iter().all(|outcome| outcome.applied && outcome.loss.is_finite()));
        let mut compared = 0;
        for layout in ranks.iter().flat_map(|ranks| Layout::all(*ranks, self.micro_batches)).filter(keep) {
            if self.config(layout).is_ok() {
                assert_same(&single, &self.run(layout, &tokens), layout);
                compared += 1;
            }
        }
        compared
    }

    fn run(&self, layout: Layout, tokens: &TokenFile) -> Trace {
        trace(&self.config(layout).unwrap(), tokens, STEPS, None)
    }
}

fn assert_same(single: &Trace, other: &Trace, layout: Layout) {
    assert_eq!(other.samples, single.samples, "samples of {layout:?}");
    for (step, (a, b)) in single.outcomes.iter().zip(&other.outcomes).enumerate() {
        assert_eq!(
            b.loss.to_bits(),
            a.loss.to_bits(),
            "loss of step {step} of {layout:?}: {} for {}",
            b.loss,
            a.loss
        );
        assert_eq!(
            b.grad_norm.to_bits(),
            a.grad_norm.to_bits(),
            "gradient norm of step {step} of {layout:?}: {} for {}",
            b.grad_norm,
            a.grad_norm
        );
    }
    for (key, bytes) in &single.state {
        assert!(other.state[key] == *bytes, "`{key}` after {STEPS} steps of {layout:?}");
    }
}

#[test]
fn every_layout_of_1_and_2_ranks_gives_the_same_bits() {
    assert_eq!(POWERS.compare(&[1, 2], |_| true), 26);
}

#[test]
fn every_layout_of_4_ranks_gives_the_same_bits() {
    assert_eq!(POWERS.compare(&[4], |_| true), 62);
}

#[test]
fn every_layout_of_8_ranks_gives_the_same_bits() {
    assert_eq!(POWERS.compare(&[8], |_| true), 120);
}

#[test]
fn every_layout_with_tp_8_gives_the_same_bits() {
    assert_eq!(EIGHT_GROUPS.compare(&[8], |layout| layout.tp == 8), 8);
}

#[test]
fn every_layout_of_3_and_6_ranks_gives_the_same_bits() {
    assert_eq!(THREES.compare(&[3, 6], |_| true), 81);
}
