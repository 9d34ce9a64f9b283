//! The layout matrix: losses, gradient norms and weights do not depend on the layout, bit for bit; what canonical numerics
//! does not admit is refused with the numbers.

use crate::support::{self, Layout, Trace, Tracing, difference, tiny_gpt2, tiny_mixture, tiny_model, trace};
use expect_test::expect;
use train::config::{ConfigError, Documents, ModelConfig, TrainConfig};
use train::data::Blend;

const TRACING: Tracing = Tracing { steps: 2, mutate: None, poison: None };

/// A model, sequence and batch whose layouts are compared with one another.
struct Case {
    model: fn(usize) -> ModelConfig,
    groups: usize,
    seq_length: u64,
    global_batch_size: u64,
    micro_batches: &'static [u32],
    documents: Option<Documents>,
}

/// 1, 2, 4 and 8 ranks.
const POWERS: Case = Case {
    model: tiny_model,
    groups: 4,
    seq_length: 64,
    global_batch_size: 8,
    micro_batches: &[1, 2, 4, 8],
    documents: None,
};
/// TP 8 needs as many query groups.
const EIGHT_GROUPS: Case = Case { groups: 8, ..POWERS };
/// 3 and 6 ranks.
const THREES: Case = Case {
    groups: 2,
    seq_length: 96,
    global_batch_size: 24,
    micro_batches: &[1, 2, 3, 4, 6, 8, 12, 24],
    ..POWERS
};
/// As many groups as heads.
const GPT2: Case = Case { model: tiny_gpt2, ..EIGHT_GROUPS };
/// Documents of a sample that have their own positions, and see and predict nothing of one another.
const PACKED: Case = Case {
    documents: Some(Documents {
        end_token: 256,
        reset_positions: true,
        reset_attention: true,
        mask_loss: true,
    }),
    ..POWERS
};
const MIXTURE: Case = Case { model: tiny_mixture, ..POWERS };

/// Layouts of 8 ranks in which each pair of axes is above 1 together, with SP and without it.
const COVERING: [Layout; 7] = [
    Layout { tp: 8, sp: true, ..Layout::SINGLE },
    Layout { tp: 2, sp: true, cp: 2, gtp: 2, mbs: 2, ..Layout::SINGLE },
    Layout { tp: 2, sp: true, gtp: 2, nseq: 2, dp: 2, ..Layout::SINGLE },
    Layout { tp: 2, cp: 2, dp: 2, mbs: 4, ..Layout::SINGLE },
    Layout { tp: 4, gtp: 2, ..Layout::SINGLE },
    Layout { cp: 2, gtp: 4, nseq: 2, ..Layout::SINGLE },
    Layout { cp: 2, gtp: 2, dp: 2, mbs: 2, ..Layout::SINGLE },
];

impl Case {
    fn config(&self, layout: Layout) -> Result<TrainConfig, String> {
        let parallel = layout.parallel(self.seq_length, self.global_batch_size).map_err(|e| e.to_string())?;
        let config = support::config((self.model)(self.groups), parallel, 10);
        let config = TrainConfig { documents: self.documents, ..config };
        config.check().map_err(|error: ConfigError| error.to_string())?;
        Ok(config)
    }

    /// Whether the written rules admit a layout; the code says the same in other words.
    fn admits(&self, layout: Layout) -> bool {
        let Layout { tp, sp, cp, gtp, nseq, dp, mbs } = layout;
        let (seq, groups) = (self.seq_length, self.groups as u64);
        let runtime_cp = u64::from(cp * nseq);
        let leaf = ((1 << seq.trailing_zeros()) / 16).clamp(1, 64);
        let sequence = seq.is_multiple_of(2 * runtime_cp) && (seq / (2 * runtime_cp)).is_multiple_of(leaf);
        let share = !sp || seq.is_multiple_of(runtime_cp * u64::from(tp) * leaf);
        let lanes = u64::from(dp * gtp / nseq * mbs);
        let tree = tp.is_power_of_two() && groups.is_multiple_of(tp.into());
        sequence
            && share
            && tree
            && self.global_batch_size.is_multiple_of(lanes)
            && (nseq == 1 || tp == 1 || sp)
    }

    /// Runs every layout of `ranks` ranks that is admitted and `keep` keeps, and compares it with the single rank; every other
    /// one must be refused.
    fn compare(&self, ranks: &[u32], keep: impl Fn(&Layout) -> bool) -> usize {
        let folder = tempfile::tempdir().unwrap();
        let tokens = match self.documents {
            None => support::token_file(folder.path(), 6000),
            Some(_) => support::packed_file(folder.path()),
        };
        let single = self.run(Layout::SINGLE, &tokens);
        assert!(single.outcomes.iter().all(|outcome| outcome.applied && outcome.loss.is_finite()));
        let mut compared = 0;
        for layout in ranks.iter().flat_map(|ranks| Layout::all(*ranks, self.micro_batches)).filter(keep) {
            let refusal = self.config(layout).err();
            assert_eq!(refusal.is_none(), self.admits(layout), "{layout:?}: {refusal:?}");
            if refusal.is_none() {
                let differs = difference(&single, &self.run(layout, &tokens));
                assert!(differs.is_none(), "{layout:?}: {}", differs.unwrap_or_default());
                compared += 1;
            }
        }
        compared
    }

    fn run(&self, layout: Layout, tokens: &Blend) -> Trace {
        trace(&self.config(layout).unwrap(), tokens, TRACING).unwrap()
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
    assert_eq!(THREES.compare(&[3, 6], |_| true), 148);
}

#[test]
fn layouts_of_gpt2_that_cover_all_axes_give_the_same_bits() {
    assert_eq!(GPT2.compare(&[1, 2], |layout| layout.mbs == 1), 7);
    assert_eq!(GPT2.compare(&[8], |layout| COVERING.contains(layout)), COVERING.len());
}

#[test]
fn layouts_of_packed_documents_give_the_same_bits() {
    assert_eq!(PACKED.compare(&[1, 2], |_| true), 26);
    let keep = |layout: &Layout| layout.tp < 8 && COVERING.contains(layout);
    assert_eq!(PACKED.compare(&[8], keep), COVERING.len() - 1);
    let gpt2 = Case { documents: PACKED.documents, ..GPT2 };
    assert_eq!(gpt2.compare(&[8], |layout| COVERING.contains(layout)), COVERING.len());
}

#[test]
fn layouts_of_a_mixture_of_llama_and_gpt2_give_the_same_bits() {
    let keep = |layout: &Layout| layout.tp < 8 && COVERING.contains(layout);
    assert_eq!(MIXTURE.compare(&[8], keep), COVERING.len() - 1);
}

/// A sample whose losses are not a number: all ranks leave out that step and go on, whoever held the sample.
#[test]
fn a_step_that_is_not_finite_is_skipped_by_all_ranks_alike() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let tracing = Tracing { steps: 3, mutate: None, poison: Some(POWERS.global_batch_size + 3) };
    let run = |layout| trace(&POWERS.config(layout).unwrap(), &tokens, tracing).unwrap();
    let single = run(Layout::SINGLE);
    let applied: Vec<bool> = single.outcomes.iter().map(|outcome| outcome.applied).collect();
    assert_eq!(applied, [true, false, true]);
    assert!(single.outcomes[1].loss.is_nan() && single.outcomes[2].loss.is_finite());
    for layout in [
        Layout { dp: 8, ..Layout::SINGLE },
        Layout { cp: 4, dp: 2, ..Layout::SINGLE },
        Layout { tp: 2, sp: true, gtp: 2, dp: 2, ..Layout::SINGLE },
        Layout { gtp: 4, nseq: 2, ..Layout::SINGLE },
    ] {
        assert_eq!(difference(&single, &run(layout)), None, "{layout:?}");
    }
}

#[test]
fn what_canonical_numerics_does_not_admit_is_refused_with_the_numbers() {
    let refusal = |case: &Case, layout: Layout| case.config(layout).unwrap_err();
    expect!["`num-attention-heads` 8 is no multiple of `num-query-groups` 6"]
        .assert_eq(&refusal(&Case { groups: 6, ..THREES }, Layout { tp: 3, ..Layout::SINGLE }));
    expect!["TP 8 does not divide the 4 query groups: 4 % 8 != 0 (`decoder.layers.*.self_attention.linear_qkv.weight`)"]
        .assert_eq(&refusal(&POWERS, Layout { tp: 8, ..Layout::SINGLE }));
    let config = POWERS.config(Layout { cp: 4, ..Layout::SINGLE }).unwrap();
    let error = support::with_leaf(config, 16).check().unwrap_err();
    expect!["a leaf of 16 tokens does not divide T/(2·runtime CP) = 64/(2·4) = 8"]
        .assert_eq(&error.to_string());
    expect!["the largest leaf that fits is --canonical-leaf-tokens 8"].assert_eq(&error.help());
}
