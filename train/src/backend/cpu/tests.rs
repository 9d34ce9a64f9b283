//! Operations against their f64 references, and the invariances that canonical numerics promises.

use super::*;
use crate::backend::refops::{self, Mat};
use crate::backend::{Buffers, Dropout, Heads, Lifetime, Recorder};
use crate::rng;
use proptest::prelude::*;

/// Buffers with contents, on which operations run.
#[derive(Default)]
struct Bench {
    buffers: Buffers,
    contents: Vec<(View, Vec<u8>)>,
    backend: Option<CpuBackend>,
}

impl Bench {
    fn declare(&mut self, dtype: DType, rows: usize, cols: usize, bytes: Vec<u8>) -> View {
        assert!(self.backend.is_none(), "buffers come before the first operation");
        let name = format!("buffer {}", self.contents.len());
        let view = self.buffers.declare(name, Lifetime::Persistent, dtype, rows, cols);
        self.contents.push((view, bytes));
        view
    }

    /// An input; f32 values, so that the reference sees the same numbers.
    fn input(&mut self, x: &Mat) -> View {
        let values: Vec<f32> = x.data.iter().map(|x| *x as f32).collect();
        self.declare(DType::F32, x.rows, x.cols, bytemuck::cast_slice(&values).to_vec())
    }

    fn i32s(&mut self, values: &[i32]) -> View {
        self.declare(DType::I32, values.len(), 1, bytemuck::cast_slice(values).to_vec())
    }

    fn i64s(&mut self, values: &[i64]) -> View {
        self.declare(DType::I64, values.len(), 1, bytemuck::cast_slice(values).to_vec())
    }

    /// An output, poisoned.
    fn output(&mut self, rows: usize, cols: usize) -> View {
        self.input(&Mat::from_fn(rows, cols, |_, _| f64::NAN))
    }

    /// A fixed-point accumulator, zero.
    fn acc(&mut self, rows: usize, cols: usize) -> View {
        self.declare(DType::I64, rows, cols, vec![0; rows * cols * 8])
    }

    fn run(&mut self, op: Op) {
        let backend = self.backend.get_or_insert_with(|| {
            let mut backend = CpuBackend::new(Recorder::new(&self.buffers).plan());
            self.contents.iter().for_each(|(view, bytes)| backend.upload(*view, bytes).unwrap());
            backend
        });
        backend.run(op).unwrap();
    }

    fn read<T: bytemuck::Pod>(&mut self, view: View) -> Vec<T> {
        let mut values = vec![T::zeroed(); view.numel()];
        let bytes = bytemuck::cast_slice_mut(&mut values);
        self.backend.as_mut().expect("something ran").download(view, bytes).unwrap();
        values
    }

    fn bits(&mut self, view: View) -> Vec<u32> {
        self.read(view)
    }

    fn fixed(&mut self, acc: View, bits: u32) -> Mat {
        let values = self.read::<i64>(acc);
        let data = values.iter().map(|value| *value as f64 / 2f64.powi(bits as i32)).collect();
        Mat { rows: acc.rows, cols: acc.cols, data }
    }

    fn mat(&mut self, view: View) -> Mat {
        let data = self.read::<f32>(view).into_iter().map(f64::from).collect();
        Mat { rows: view.rows, cols: view.cols, data }
    }
}

/// Normal numbers that f32 holds exactly.
fn random(seed: u32, name: &str, rows: usize, cols: usize) -> Mat {
    let mut values = vec![0.0; rows * cols];
    rng::init_normal(seed, name, 0..values.len() as u64, 1.0, &mut values);
    Mat { rows, cols, data: values.into_iter().map(f64::from).collect() }
}

/// Whole numbers below `n`.
fn random_below(seed: u32, len: usize, n: u32) -> Vec<i32> {
    (0..len).map(|at| (rng::philox([at as u32, 0, 0, 0], [seed, 99])[0] % n) as i32).collect()
}

/// ‖found − expected‖ ≤ 1e-5 ‖expected‖: hundreds of f32 roundings of 6e-8, added as random walks, stay below. NaN fails.
#[track_caller]
fn assert_close(found: &Mat, expected: &Mat) {
    assert_eq!((found.rows, found.cols), (expected.rows, expected.cols));
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let error = norm(&mut found.data.iter().zip(&expected.data).map(|(a, b)| a - b));
    let size = norm(&mut expected.data.iter().copied());
    assert!(error <= 1e-5 * size, "off by {error} of {size}: {found:?} instead of {expected:?}");
}

const BITS: u32 = 36;

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn linear_and_its_gradients(
        seed: u32, leaf in 1usize..40, leaves in 1usize..4, k in 1usize..70, n in 1usize..70, accumulate: bool,
    ) {
        let m = leaf * leaves;
        let [x, w, d] = [("x", m, k), ("w", n, k), ("d", m, n)].map(|(name, r, c)| random(seed, name, r, c));
        let mut bench = Bench::default();
        let [x_v, w_v, d_v] = [&x, &w, &d].map(|x| bench.input(x));
        let mut expected = [
            refops::matmul(&x, &w.transposed()), refops::matmul(&d, &w), refops::matmul(&d.transposed(), &x),
        ];
        let before = random(seed, "before", m, n.max(k));
        let outputs = [n, k].map(|cols| {
            if accumulate { bench.input(&before) } else { bench.output(m, n.max(k)) }.col_range(0, cols)
        });
        let acc = bench.acc(n, k);
        bench.run(Op::Linear { x: x_v, w: w_v, out: outputs[0], accumulate });
        bench.run(Op::LinearDx { d_out: d_v, w: w_v, d_x: outputs[1], accumulate });
        bench.run(Op::LinearDw { d_out: d_v, x: x_v, acc, leaf, bits: BITS });
        if accumulate {
            for expected in &mut expected[..2] {
                for row in 0..m {
                    (0..expected.cols).for_each(|col| expected[(row, col)] += before[(row, col)]);
                }
            }
        }
        assert_close(&bench.mat(outputs[0]), &expected[0]);
        assert_close(&bench.mat(outputs[1]), &expected[1]);
        assert_close(&bench.fixed(acc, BITS), &expected[2]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn norm_and_its_gradients(
        seed: u32, leaf in 1usize..9, leaves in 1usize..5, h in 1usize..80, accumulate: bool, in_place: bool,
        with_delta: bool,
    ) {
        let m = leaf * leaves;
        let eps = 1e-5;
        let [x, delta, d_out, before] = ["x", "delta", "d", "b"].map(|name| random(seed, name, m, h));
        let gamma = random(seed, "gamma", 1, h);
        let mut bench = Bench::default();
        let [x_v, delta_v, gamma_v, d_v, before_v] =
            [&x, &delta, &gamma, &d_out, &before].map(|x| bench.input(x));
        let sum_v = if in_place { x_v } else { bench.output(m, h) };
        let [rstd_v, out_v, again_v, poisoned] =
            [(m, 1), (m, h), (m, h), (m, h)].map(|(rows, cols)| bench.output(rows, cols));
        let d_gamma = bench.acc(1, h);
        bench.run(Op::AddNorm {
            x: x_v, delta: with_delta.then_some(delta_v), gamma: gamma_v, eps: eps as f32, sum: sum_v, rstd: rstd_v,
            out: out_v,
        });
        bench.run(Op::NormApply { sum: sum_v, rstd: rstd_v, gamma: gamma_v, out: again_v });
        let d_sum = if accumulate { before_v } else { poisoned };
        bench.run(Op::NormBackward {
            d_out: d_v, sum: sum_v, rstd: rstd_v, gamma: gamma_v, d_sum, accumulate, d_gamma, leaf, bits: BITS,
        });
        let sum = Mat::from_fn(m, h, |row, col| {
            let delta = if with_delta { delta[(row, col)] } else { 0.0 };
            f64::from((x[(row, col)] + delta) as f32)
        });
        assert_close(&bench.mat(sum_v), &sum);
        assert_close(&bench.mat(rstd_v), &refops::rstd(&sum, eps));
        assert_close(&bench.mat(out_v), &refops::norm(&sum, &gamma, eps));
        prop_assert_eq!(bench.bits(again_v), bench.bits(out_v));
        let (mut d_x, expected_d_gamma) = refops::norm_backward(&d_out, &sum, &gamma, eps);
        // What cancels in d_x is as large as its parts: measure against them.
        for (at, d_x) in d_x.data.iter_mut().enumerate() {
            *d_x += if accumulate { before.data[at] } else { 0.0 };
        }
        if h > 1 {
            assert_close(&bench.mat(d_sum), &d_x);
        }
        assert_close(&bench.fixed(d_gamma, BITS), &expected_d_gamma);
    }

    #[test]
    fn embedding_and_its_gradient(seed: u32, m in 1usize..30, rows in 1usize..9, h in 1usize..20, first_row in 0i32..5) {
        let tokens = random_below(seed, m, 12);
        let (table, d_out) = (random(seed, "table", rows, h), random(seed, "d", m, h));
        let mut bench = Bench::default();
        let (tokens_v, table_v, d_v) = (bench.i32s(&tokens), bench.input(&table), bench.input(&d_out));
        let (out, acc) = (bench.output(m, h), bench.acc(rows, h));
        bench.run(Op::Embed { tokens: tokens_v, table: table_v, first_row, out });
        bench.run(Op::EmbedBackward { tokens: tokens_v, d_out: d_v, first_row, acc, bits: BITS });
        prop_assert_eq!(bench.mat(out).data, refops::embed(&tokens, &table, first_row).data);
        assert_close(&bench.fixed(acc, BITS), &refops::embed_backward(&tokens, &d_out, first_row, rows));
    }

    #[test]
    fn glu_and_its_gradient(seed: u32, m in 1usize..9, f in 1usize..50) {
        let mut gate_up = random(seed, "gate_up", m, 2 * f);
        gate_up.data.iter_mut().for_each(|x| *x *= 8.0);
        let d_out = random(seed, "d", m, f);
        let mut bench = Bench::default();
        let (gate_up_v, d_v) = (bench.input(&gate_up), bench.input(&d_out));
        let (out, d_gate_up) = (bench.output(m, f), bench.output(m, 2 * f));
        bench.run(Op::Glu { gate_up: gate_up_v, out });
        bench.run(Op::GluBackward { d_out: d_v, gate_up: gate_up_v, d_gate_up });
        assert_close(&bench.mat(out), &refops::glu(&gate_up));
        assert_close(&bench.mat(d_gate_up), &refops::glu_backward(&d_out, &gate_up));
    }

    #[test]
    fn cross_entropy_over_split_vocabularies(
        seed: u32, m in 1usize..6, block in 1usize..20, log_shards in 0u32..3, padding in 0usize..10,
    ) {
        let shards = 1usize << log_shards;
        let per_shard = 4 / shards * block;
        let valid = (4 * block).saturating_sub(padding).max(1);
        let mut logits = random(seed, "logits", m, 4 * block);
        logits.data.iter_mut().for_each(|x| *x *= 10.0);
        let targets = random_below(seed, m, valid as u32);
        let weights: Vec<f64> = (0..m).map(|row| [1.0, 0.0, 0.25][row % 3]).collect();
        let mut bench = Bench::default();
        let whole = bench.input(&logits);
        let target = bench.i32s(&targets);
        let weight = bench.input(&Mat { rows: m, cols: 1, data: weights.clone() });
        let [maxes, sums, picks] = [m * shards; 3].map(|rows| bench.output(rows, 1));
        let [max, sum, picked, loss] = [m; 4].map(|rows| bench.output(rows, 1));
        let shard = |index: usize| {
            let lo = index * per_shard;
            (whole.col_range(lo, lo + per_shard), lo as i32, valid.saturating_sub(lo).min(per_shard))
        };
        for index in 0..shards {
            let (logits, _, valid) = shard(index);
            bench.run(Op::CeMax { logits, valid, max: maxes.row_range(index * m, (index + 1) * m) });
        }
        // The reductions over shards, by hand.
        let values = bench.mat(maxes).data;
        let of_shards = |values: &[f64], row: usize| {
            (0..shards).map(|index| values[index * m + row] as f32).collect::<Vec<f32>>()
        };
        let upload = |bench: &mut Bench, view: View, values: Vec<f32>| {
            bench.backend.as_mut().unwrap().upload(view, bytemuck::cast_slice(&values)).unwrap();
        };
        let row_max = (0..m).map(|row| of_shards(&values, row).into_iter().fold(f32::NEG_INFINITY, f32::max));
        upload(&mut bench, max, row_max.collect());
        for index in 0..shards {
            let (logits, first_col, valid) = shard(index);
            let rows = |view: View| view.row_range(index * m, (index + 1) * m);
            bench.run(Op::CeSum {
                logits, max, target, first_col, valid, block, sum: rows(sums), picked: rows(picks),
            });
        }
        let (partial, picks) = (bench.mat(sums).data, bench.mat(picks).data);
        let totals: Vec<f32> =
            (0..m).map(|row| crate::numerics::sum_pairwise(&mut of_shards(&partial, row))).collect();
        upload(&mut bench, sum, totals);
        upload(&mut bench, picked, (0..m).map(|row| of_shards(&picks, row).iter().sum()).collect());
        for index in 0..shards {
            let (logits, first_col, valid) = shard(index);
            bench.run(Op::CeGrad { logits, max, sum, picked, target, weight, first_col, valid, loss });
        }
        let expected_loss = refops::cross_entropy(&logits, valid, &targets, &weights);
        for (found, expected) in bench.mat(loss).data.iter().zip(&expected_loss.data) {
            // A loss is the difference of numbers up to the spread of the logits, about 60.
            prop_assert!((found - expected).abs() <= 60.0 * 1e-6, "{} instead of {}", found, expected);
        }
        let gradient = refops::cross_entropy_backward(&logits, valid, &targets, &weights);
        let found = bench.mat(whole);
        for (found, expected) in found.data.iter().zip(&gradient.data) {
            prop_assert!((found - expected).abs() <= 1e-5, "{} instead of {}", found, expected);
        }
    }

    #[test]
    fn rotary_positions_turn_and_turn_back(
        seed: u32, m in 1usize..9, groups in 1usize..4, queries_per_group in 1usize..4, half in 1usize..9,
    ) {
        let heads = Heads { groups, queries_per_group, head_dim: 2 * half };
        let qkv = random(seed, "qkv", m, heads.qkv_cols());
        let positions = random_below(seed, m, 32);
        let angle = |position: i32, pair: usize| f64::from(position) / 100f64.powf(pair as f64 / half as f64);
        let table = Mat::from_fn(32, 2 * half, |position, col| {
            let angle = angle(position as i32, col % half);
            if col < half { angle.cos() } else { angle.sin() }
        });
        let mut bench = Bench::default();
        let (qkv_v, positions_v) = (bench.input(&qkv), bench.i32s(&positions));
        let table = bench.input(&table);
        let rotate = |inverse| Op::Rope { qkv: qkv_v, positions: positions_v, table, heads, inverse };
        bench.run(rotate(false));
        let turned = bench.mat(qkv_v);
        assert_close(&turned, &refops::rope(&qkv, heads, |row, pair| angle(positions[row], pair)));
        bench.run(rotate(true));
        assert_close(&bench.mat(qkv_v), &qkv);
    }

    #[test]
    fn attention_and_its_gradients(
        seed: u32, batch in 1usize..3, leaf in 1usize..6, chunks in prop::sample::subsequence((0..5).collect::<Vec<usize>>(), 1..=5),
        groups in 1usize..3, queries_per_group in 1usize..4, head_dim in 1usize..12, with_dropout: bool,
    ) {
        let heads = Heads { groups, queries_per_group, head_dim };
        let (t, first_head) = (5 * leaf, 3);
        let positions: Vec<i32> = (0..batch)
            .flat_map(|_| chunks.iter().flat_map(|chunk| chunk * leaf..(chunk + 1) * leaf))
            .map(|position| position as i32)
            .collect();
        let m = positions.len();
        let samples: Vec<i64> = (0..m).map(|row| (1 << 33) + (row * batch / m) as i64).collect();
        let qkv = random(seed, "qkv", m, heads.qkv_cols());
        let kv = random(seed, "kv", batch * t, heads.kv_cols());
        let d_out = random(seed, "d", m, heads.out_cols());
        let dropout = with_dropout.then_some(Dropout { p: 0.3, seed, layer: 7 });
        let mut bench = Bench::default();
        let [qkv_v, kv_v, d_v] = [&qkv, &kv, &d_out].map(|x| bench.input(x));
        let (positions_v, samples_v) = (bench.i32s(&positions), bench.i64s(&samples));
        let (out, lse) = (bench.output(m, heads.out_cols()), bench.output(m, heads.num_queries()));
        let d_qkv = bench.output(m, heads.qkv_cols());
        let d_kv = bench.acc(batch * t, heads.kv_cols());
        bench.run(Op::Attention {
            qkv: qkv_v, kv: kv_v, positions: positions_v, samples: samples_v, out, lse, heads, batch, leaf, dropout,
            first_head,
        });
        bench.run(Op::AttentionBackward {
            qkv: qkv_v, kv: kv_v, positions: positions_v, samples: samples_v, out, lse, d_out: d_v, d_qkv, d_kv, heads,
            batch, leaf, bits: BITS, dropout, first_head,
        });
        let mask = |row: usize, head: usize, key: usize| {
            let Some(Dropout { p, seed, layer }) = dropout else { return 1.0 };
            let coordinates = layer << 22 | (first_head + head as u32) << 14 | (samples[row] >> 32) as u32;
            let counter = [key as u32 / 4, positions[row] as u32, samples[row] as u32, coordinates];
            let word = rng::philox(counter, [seed, 3])[key % 4];
            if f64::from(word) >= f64::from(p) * 2f64.powi(32) { 1.0 / (1.0 - f64::from(p)) } else { 0.0 }
        };
        let reference = refops::Attention { heads, batch, positions: &positions, mask: &mask };
        let (expected_out, expected_lse) = reference.forward(&qkv, &kv);
        assert_close(&bench.mat(out), &expected_out);
        assert_close(&bench.mat(lse), &expected_lse);
        let (expected_d_qkv, expected_d_kv) = reference.backward(&qkv, &kv, &d_out);
        let found = bench.mat(d_qkv);
        for group in 0..groups {
            for row in 0..m {
                for col in heads.key(group)..heads.query(group + 1, 0) {
                    prop_assert!(found[(row, col)].is_nan(), "only query columns are written");
                }
            }
        }
        let queries = |x: &Mat| Mat::from_fn(m, heads.qkv_cols(), |row, col| {
            if col % heads.query(1, 0) < heads.key(0) { x[(row, col)] } else { 0.0 }
        });
        assert_close_to_parts(&queries(&found), &expected_d_qkv);
        assert_close_to_parts(&bench.fixed(d_kv, BITS), &expected_d_kv);
    }
}

/// As `assert_close`, where the result is what remains of terms of size 1 that cancel.
#[track_caller]
fn assert_close_to_parts(found: &Mat, expected: &Mat) {
    let shifted = |x: &Mat| Mat {
        data: x.data.iter().copied().chain([1.0]).collect(),
        rows: 1,
        cols: x.data.len() + 1,
    };
    assert_close(&shifted(found), &shifted(expected));
}

#[test]
fn moving_rows_keeps_their_bits() {
    let (x, y) = (random(1, "x", 4, 6), random(1, "y", 4, 6));
    let mut bench = Bench::default();
    let (x_v, y_v, out) = (bench.input(&x), bench.input(&y), bench.output(3, 3));
    let index = bench.i32s(&[2, -1, 0]);
    let (a, b, moved) = (bench.i64s(&[i64::MAX, 5]), bench.i64s(&[1, -7]), bench.i64s(&[0, 0]));
    let (numbers, kept) = (bench.i32s(&[7, 8, 9]), bench.i32s(&[0, 0, 0]));
    bench.run(Op::GatherRows { src: x_v.col_range(1, 4), index, dst: out });
    let expected = [2, 0, 0].map(|row| [1, 2, 3].map(|col| x[(row, col)]));
    assert_eq!(bench.mat(out).data, [expected[0], [0.0; 3], expected[2]].concat());
    bench.run(Op::GatherRows { src: numbers, index, dst: kept });
    assert_eq!(bench.read::<i32>(kept), [9, 0, 7]);
    bench.run(Op::GatherRows { src: a, index: index.row_range(1, 3), dst: moved });
    assert_eq!(bench.read::<i64>(moved), [0, i64::MAX]);
    bench.run(Op::AddFixed { src: b, dst: a });
    assert_eq!(bench.read::<i64>(a), [i64::MIN, -2]);
    bench.run(Op::Add { src: x_v.col_range(0, 3), dst: y_v.col_range(3, 6) });
    bench.run(Op::Copy { src: x_v.col_range(0, 3), dst: y_v.col_range(0, 3) });
    bench.run(Op::Zero { dst: x_v.row_range(1, 3).col_range(2, 6) });
    let sum = Mat::from_fn(4, 6, |row, col| match col {
        0..3 => x[(row, col)],
        _ => f64::from((y[(row, col)] + x[(row, col - 3)]) as f32),
    });
    assert_eq!(bench.mat(y_v).data, sum.data);
    let zeroed =
        Mat::from_fn(4, 6, |row, col| if (1..3).contains(&row) && col >= 2 { 0.0 } else { x[(row, col)] });
    assert_eq!(bench.mat(x_v).data, zeroed.data);
}
