//! Operations against their f64 references, and the invariances that canonical numerics promises.

mod invariance;

use super::*;
use crate::backend::refops::{self, Mat};
use crate::backend::{AdamWStep, AttentionInputs, Buffers, Dropout, Heads, HiddenSite, Lifetime, Recorder};
use crate::config::Activation;
use crate::rng;
use half::bf16;
use proptest::prelude::*;

/// What programs choose between: the compute type, and the kind of accumulators.
#[derive(Clone, Copy, Debug)]
struct Mode {
    dtype: DType,
    is_fixed: bool,
}

/// f32 and fixed point.
const CANONICAL: Mode = Mode { dtype: DType::F32, is_fixed: true };

fn modes() -> impl Strategy<Value = Mode> {
    (prop::sample::select(vec![DType::F32, DType::Bf16]), any::<bool>())
        .prop_map(|(dtype, is_fixed)| Mode { dtype, is_fixed })
}

impl Mode {
    fn add(self, leaf: usize) -> Accumulate {
        match self.is_fixed {
            true => Accumulate::Fixed { leaf, bits: BITS },
            false => Accumulate::Float,
        }
    }

    /// Normal numbers that the compute type holds exactly.
    fn random(self, seed: u32, name: &str, rows: usize, cols: usize) -> Mat {
        self.rounded(random(seed, name, rows, cols))
    }

    fn rounded(self, mut x: Mat) -> Mat {
        let round = |x: &f64| match self.dtype {
            DType::Bf16 => bf16::from_f64(*x).to_f64(),
            _ => f64::from(*x as f32),
        };
        x.data.iter_mut().for_each(|x| *x = round(x));
        x
    }

    /// How far a result may be off, relative to the norm of what it is made of. f32: hundreds of roundings of 6e-8, added as
    /// random walks, stay below 1e-5. BF16: and each element is rounded by 2⁻⁸ of itself at most.
    fn tolerance(self) -> f64 {
        match self.dtype {
            DType::Bf16 => F32_TOLERANCE + f64::powi(2.0, -8),
            _ => F32_TOLERANCE,
        }
    }
}

const F32_TOLERANCE: f64 = 1e-5;

/// Buffers with contents, on which operations run.
struct Bench {
    mode: Mode,
    buffers: Buffers,
    contents: Vec<(View, Vec<u8>)>,
    backend: Option<CpuBackend>,
}

impl Bench {
    fn new(mode: Mode) -> Self {
        Bench { mode, buffers: Buffers::default(), contents: Vec::new(), backend: None }
    }

    fn declare(&mut self, dtype: DType, rows: usize, cols: usize, bytes: Vec<u8>) -> View {
        assert!(self.backend.is_none(), "buffers come before the first operation");
        let name = format!("buffer {}", self.contents.len());
        let view = self.buffers.declare(name, Lifetime::Persistent, dtype, rows, cols);
        self.contents.push((view, bytes));
        view
    }

    /// An input of the compute type, which holds its values exactly, so that the reference sees the same numbers.
    fn input(&mut self, x: &Mat) -> View {
        let bytes = match self.mode.dtype {
            DType::Bf16 => x.data.iter().flat_map(|x| bf16::from_f64(*x).to_le_bytes()).collect(),
            _ => x.data.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect(),
        };
        self.declare(self.mode.dtype, x.rows, x.cols, bytes)
    }

    /// An input that is F32 whatever the compute type.
    fn f32s(&mut self, x: &Mat) -> View {
        let bytes = x.data.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
        self.declare(DType::F32, x.rows, x.cols, bytes)
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

    /// Statistics of rows, F32, poisoned.
    fn stats(&mut self, rows: usize, cols: usize) -> View {
        self.f32s(&Mat::from_fn(rows, cols, |_, _| f64::NAN))
    }

    /// Accumulators, zero.
    fn acc(&mut self, rows: usize, cols: usize) -> View {
        let dtype = self.mode.add(1).dtype();
        self.declare(dtype, rows, cols, vec![0; rows * cols * dtype.size_bytes()])
    }

    /// Fixed-point accumulators, zero.
    fn fixed(&mut self, rows: usize, cols: usize) -> View {
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

    fn bytes(&mut self, view: View) -> Vec<u8> {
        let mut bytes = vec![0; view.size_bytes()];
        self.backend.as_mut().expect("something ran").download(view, &mut bytes).unwrap();
        bytes
    }

    /// Numbers of any kind; fixed point has [`BITS`].
    fn mat(&mut self, view: View) -> Mat {
        let data = match view.dtype {
            DType::I64 => {
                self.read::<i64>(view).into_iter().map(|x| x as f64 / 2f64.powi(BITS as i32)).collect()
            }
            DType::Bf16 => self.read::<u16>(view).into_iter().map(|x| bf16::from_bits(x).to_f64()).collect(),
            _ => self.read::<f32>(view).into_iter().map(f64::from).collect(),
        };
        Mat { rows: view.rows, cols: view.cols, data }
    }

    /// ‖found − expected‖ ≤ tolerance · ‖expected‖. NaN fails.
    #[track_caller]
    fn assert_close(&mut self, found: View, expected: &Mat) {
        self.assert_within(found, expected, norm(expected.data.iter().copied()));
    }

    /// As `assert_close`, measured against `size`, for results that are what remains of terms of that norm.
    #[track_caller]
    fn assert_within(&mut self, found: View, expected: &Mat, size: f64) {
        let tolerance = match found.dtype {
            DType::Bf16 => self.mode.tolerance(),
            _ => F32_TOLERANCE,
        };
        assert_within(&self.mat(found), expected, tolerance * size);
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

fn norm(x: impl Iterator<Item = f64>) -> f64 {
    x.map(|x| x * x).sum::<f64>().sqrt()
}

#[track_caller]
fn assert_within(found: &Mat, expected: &Mat, limit: f64) {
    assert_eq!((found.rows, found.cols), (expected.rows, expected.cols));
    let error = norm(found.data.iter().zip(&expected.data).map(|(a, b)| a - b));
    assert!(error <= limit, "off by {error}, more than {limit}: {found:?} instead of {expected:?}");
}

const BITS: u32 = 36;

const ACTIVATIONS: &[Activation] = &[Activation::Swiglu, Activation::Gelu, Activation::GeluTanh];

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn linear_and_its_gradients(
        seed: u32, mode in modes(), leaf in 1usize..40, leaves in 1usize..4, k in 1usize..70, n in 1usize..70,
        accumulate: bool, with_bias: bool,
    ) {
        let m = leaf * leaves;
        let bias = mode.random(seed, "bias", 1, n);
        let [x, w, d] = [("x", m, k), ("w", n, k), ("d", m, n)].map(|(name, r, c)| mode.random(seed, name, r, c));
        let mut bench = Bench::new(mode);
        let [x_v, w_v, d_v, bias_v] = [&x, &w, &d, &bias].map(|x| bench.input(x));
        let mut expected = [
            refops::matmul(&x, &w.transposed()), refops::matmul(&d, &w), refops::matmul(&d.transposed(), &x),
        ];
        let before = mode.random(seed, "before", m, n.max(k));
        let outputs = [n, k].map(|cols| {
            if accumulate { bench.input(&before) } else { bench.output(m, n.max(k)) }.col_range(0, cols)
        });
        let (acc, bias_acc) = (bench.acc(n, k), bench.acc(1, n));
        bench.run(Op::Linear { x: x_v, w: w_v, bias: with_bias.then_some(bias_v), out: outputs[0], accumulate });
        bench.run(Op::LinearDx { d_out: d_v, w: w_v, d_x: outputs[1], accumulate });
        bench.run(Op::LinearDw { d_out: d_v, x: x_v, acc, add: mode.add(leaf) });
        bench.run(Op::SumRows { x: d_v, acc: bias_acc, add: mode.add(leaf) });
        if with_bias {
            expected[0] = refops::add_bias(&expected[0], &bias);
        }
        if accumulate {
            for expected in &mut expected[..2] {
                for row in 0..m {
                    (0..expected.cols).for_each(|col| expected[(row, col)] += before[(row, col)]);
                }
            }
        }
        bench.assert_close(outputs[0], &expected[0]);
        bench.assert_close(outputs[1], &expected[1]);
        bench.assert_close(acc, &expected[2]);
        // A sum may cancel to less than its terms.
        bench.assert_within(bias_acc, &refops::sum_rows(&d), norm(d.data.iter().copied()));
        let linear = bench.mat(outputs[0]);
        bench.run(Op::AddBias { bias: bias_v, x: outputs[0] });
        bench.assert_close(outputs[0], &refops::add_bias(&linear, &bias));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn norm_and_its_gradients(
        seed: u32, mode in modes(), leaf in 1usize..9, leaves in 1usize..5, h in 1usize..80, accumulate: bool,
        in_place: bool, with_delta: bool, with_center: bool,
    ) {
        let m = leaf * leaves;
        // Rows of few elements may be almost constant: ε keeps their rstd, and so the rounding that it magnifies, small.
        let eps = 1e-2;
        let [x, delta, d_out, before] = ["x", "delta", "d", "b"].map(|name| mode.random(seed, name, m, h));
        let [gamma, beta] = ["gamma", "beta"].map(|name| mode.random(seed, name, 1, h));
        let mut bench = Bench::new(mode);
        let [x_v, delta_v, gamma_v, beta_v, d_v, before_v] =
            [&x, &delta, &gamma, &beta, &d_out, &before].map(|x| bench.input(x));
        let sum_v = if in_place { x_v } else { bench.output(m, h) };
        let [rstd_v, mean_v] = [(); 2].map(|()| bench.stats(m, 1));
        let [out_v, again_v, poisoned] = [(); 3].map(|()| bench.output(m, h));
        let center = with_center.then_some(Center { mean: mean_v, beta: beta_v });
        let d_gamma = bench.acc(1, h);
        bench.run(Op::AddNorm {
            x: x_v, delta: with_delta.then_some(delta_v), gamma: gamma_v, center, eps: eps as f32, sum: sum_v,
            rstd: rstd_v, out: out_v,
        });
        bench.run(Op::NormApply { sum: sum_v, rstd: rstd_v, gamma: gamma_v, center, out: again_v });
        let d_sum = if accumulate { before_v } else { poisoned };
        bench.run(Op::NormBackward {
            d_out: d_v, sum: sum_v, mean: with_center.then_some(mean_v), rstd: rstd_v, gamma: gamma_v, d_sum, accumulate,
            d_gamma, add: mode.add(leaf),
        });
        let sum = mode.rounded(Mat::from_fn(m, h, |row, col| {
            let delta = if with_delta { delta[(row, col)] } else { 0.0 };
            f64::from((x[(row, col)] + delta) as f32)
        }));
        prop_assert_eq!(bench.mat(sum_v).data, sum.data.clone());
        let (rstd, out, (mut d_x, expected_d_gamma)) = if with_center {
            bench.assert_within(mean_v, &refops::mean(&sum), norm(sum.data.iter().copied()));
            let rstd = refops::rstd(&refops::center(&sum), eps);
            let out = refops::layer_norm(&sum, &gamma, &beta, eps);
            (rstd, out, refops::layer_norm_backward(&d_out, &sum, &gamma, eps))
        } else {
            let out = refops::norm(&sum, &gamma, eps);
            (refops::rstd(&sum, eps), out, refops::norm_backward(&d_out, &sum, &gamma, eps))
        };
        bench.assert_close(rstd_v, &rstd);
        bench.assert_close(out_v, &out);
        prop_assert_eq!(bench.bytes(again_v), bench.bytes(out_v));
        if accumulate {
            d_x.data.iter_mut().zip(&before.data).for_each(|(d_x, before)| *d_x += before);
        }
        // d_x is a difference of two vectors of about this norm.
        let g = (0..m * h).map(|at| rstd[(at / h, 0)] * d_out.data[at] * gamma[(0, at % h)]);
        bench.assert_within(d_sum, &d_x, norm(g) + norm(before.data.iter().copied()));
        // A gain's gradient may cancel: its terms are at most as large as the gradients that they are of.
        let size = norm(expected_d_gamma.data.iter().copied()) + norm(d_out.data.iter().copied());
        bench.assert_within(d_gamma, &expected_d_gamma, size);
    }

    #[test]
    fn embedding_and_its_gradient(
        seed: u32, mode in modes(), m in 1usize..30, rows in 1usize..9, h in 1usize..20, first_row in 0i32..5,
    ) {
        let tokens = random_below(seed, m, 12);
        let (table, d_out) = (mode.random(seed, "table", rows, h), mode.random(seed, "d", m, h));
        let mut bench = Bench::new(mode);
        let (tokens_v, table_v, d_v) = (bench.i32s(&tokens), bench.input(&table), bench.input(&d_out));
        let (out, acc) = (bench.output(m, h), bench.acc(rows, h));
        bench.run(Op::Embed { tokens: tokens_v, table: table_v, first_row, out, accumulate: false });
        bench.run(Op::EmbedBackward { tokens: tokens_v, d_out: d_v, first_row, acc, add: mode.add(1) });
        prop_assert_eq!(bench.mat(out).data, refops::embed(&tokens, &table, first_row).data);
        // Rows of few tokens may cancel, against the norm of all of them.
        let size = norm(d_out.data.iter().copied());
        bench.assert_within(acc, &refops::embed_backward(&tokens, &d_out, first_row, rows), size);
        bench.run(Op::Embed { tokens: tokens_v, table: table_v, first_row, out: d_v, accumulate: true });
        let rows = refops::embed(&tokens, &table, first_row);
        let sums = Mat::from_fn(m, h, |row, col| f64::from((d_out[(row, col)] + rows[(row, col)]) as f32));
        prop_assert_eq!(bench.mat(d_v).data, mode.rounded(sums).data);
    }

    #[test]
    fn activations_and_their_gradients(
        seed: u32, mode in modes(), m in 1usize..9, f in 1usize..50, activation in prop::sample::select(ACTIVATIONS),
    ) {
        let mut x = mode.random(seed, "x", m, activation.inputs() * f);
        x.data.iter_mut().for_each(|x| *x *= 8.0);
        let d_out = mode.random(seed, "d", m, f);
        let mut bench = Bench::new(mode);
        let (x_v, d_v) = (bench.input(&x), bench.input(&d_out));
        let (out, d_x) = (bench.output(m, f), bench.output(m, x.cols));
        bench.run(Op::Activate { activation, x: x_v, out });
        bench.run(Op::ActivateBackward { activation, d_out: d_v, x: x_v, d_x });
        // Where all are in the negative tail the results are of the order of the rounding of 1 + erf, 1e-7.
        let size = |expected: &Mat, of: &Mat| {
            norm(expected.data.iter().copied()) + 0.05 * norm(of.data.iter().copied())
        };
        let expected = refops::activate(activation, &x);
        bench.assert_within(out, &expected, size(&expected, &x));
        let expected = refops::activate_backward(activation, &d_out, &x);
        bench.assert_within(d_x, &expected, size(&expected, &d_out));
    }

    #[test]
    fn cross_entropy_over_split_vocabularies(
        seed: u32, mode in modes(), m in 1usize..6, block in 1usize..20, log_shards in 0u32..3, padding in 0usize..10,
    ) {
        let shards = 1usize << log_shards;
        let per_shard = 4 / shards * block;
        let valid = (4 * block).saturating_sub(padding).max(1);
        let mut logits = random(seed, "logits", m, 4 * block);
        logits.data.iter_mut().for_each(|x| *x *= 10.0);
        let logits = mode.rounded(logits);
        let targets = random_below(seed, m, valid as u32);
        let weights: Vec<f64> = (0..m).map(|row| [1.0, 0.0, 0.25][row % 3]).collect();
        let mut bench = Bench::new(mode);
        let whole = bench.input(&logits);
        let target = bench.i32s(&targets);
        let weight = bench.f32s(&Mat { rows: m, cols: 1, data: weights.clone() });
        let [maxes, sums, picks] = [m * shards; 3].map(|rows| bench.stats(rows, 1));
        let [max, sum, picked, loss] = [m; 4].map(|rows| bench.stats(rows, 1));
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
            prop_assert!((found - expected).abs() <= mode.tolerance(), "{} instead of {}", found, expected);
        }
    }

    #[test]
    fn rotary_positions_turn_and_turn_back(
        seed: u32, mode in modes(), m in 1usize..9, groups in 1usize..4, queries_per_group in 1usize..4,
        half in 1usize..9,
    ) {
        let heads = Heads { groups, queries_per_group, head_dim: 2 * half };
        let qkv = mode.random(seed, "qkv", m, heads.qkv_cols());
        let positions = random_below(seed, m, 32);
        let angle = |position: i32, pair: usize| f64::from(position) / 100f64.powf(pair as f64 / half as f64);
        let table = Mat::from_fn(32, 2 * half, |position, col| {
            let angle = angle(position as i32, col % half);
            if col < half { angle.cos() } else { angle.sin() }
        });
        let mut bench = Bench::new(mode);
        let (qkv_v, positions_v) = (bench.input(&qkv), bench.i32s(&positions));
        let table = bench.f32s(&table);
        let rotate = |inverse| Op::Rope { qkv: qkv_v, positions: positions_v, table, heads, inverse };
        bench.run(rotate(false));
        bench.assert_close(qkv_v, &refops::rope(&qkv, heads, |row, pair| angle(positions[row], pair)));
        bench.run(rotate(true));
        // Rounded twice.
        bench.assert_within(qkv_v, &qkv, 2.0 * norm(qkv.data.iter().copied()));
    }

    #[test]
    fn attention_and_its_gradients(
        seed: u32, mode in modes(), batch in 1usize..3, tile in 1usize..6, chunks in prop::sample::subsequence((0..5).collect::<Vec<usize>>(), 1..=5),
        groups in 1usize..3, queries_per_group in 1usize..4, head_dim in 1usize..12, with_dropout: bool, with_documents: bool,
    ) {
        let heads = Heads { groups, queries_per_group, head_dim };
        let (t, first_head) = (5 * tile, 3);
        let positions: Vec<i32> = (0..batch)
            .flat_map(|_| chunks.iter().flat_map(|chunk| chunk * tile..(chunk + 1) * tile))
            .map(|position| position as i32)
            .collect();
        let m = positions.len();
        let first_keys: Vec<i32> = random_below(seed, m, 30).iter().zip(&positions).map(|(any, position)| any % (position + 1)).collect();
        let first_keys = if with_documents { first_keys } else { vec![0; m] };
        let samples: Vec<i64> = (0..m).map(|row| (1 << 33) + (row * batch / m) as i64).collect();
        let qkv = mode.random(seed, "qkv", m, heads.qkv_cols());
        let kv = mode.random(seed, "kv", batch * t, heads.kv_cols());
        let d_out = mode.random(seed, "d", m, heads.out_cols());
        let dropout = with_dropout.then_some(Dropout { p: 0.3, seed, layer: 7 });
        let mut bench = Bench::new(mode);
        let [qkv_v, kv_v, d_v] = [&qkv, &kv, &d_out].map(|x| bench.input(x));
        let (positions_v, samples_v) = (bench.i32s(&positions), bench.i64s(&samples));
        let first_keys_v = with_documents.then(|| bench.i32s(&first_keys));
        let (out, lse) = (bench.output(m, heads.out_cols()), bench.stats(m, heads.num_queries()));
        let d_qkv = bench.output(m, heads.qkv_cols());
        let d_kv = bench.acc(batch * t, heads.kv_cols());
        let inputs = AttentionInputs {
            qkv: qkv_v, kv: kv_v, positions: positions_v, first_keys: first_keys_v, samples: samples_v, heads, batch, tile,
            dropout, first_head,
        };
        bench.run(Op::Attention { inputs, out, lse });
        bench.run(Op::AttentionBackward { inputs, out, lse, d_out: d_v, d_qkv, d_kv, add: mode.add(tile) });
        let mask = |row: usize, head: usize, key: usize| {
            let Some(Dropout { p, seed, layer }) = dropout else { return 1.0 };
            let coordinates = layer << 22 | (first_head + head as u32) << 14 | (samples[row] >> 32) as u32;
            let counter = [key as u32 / 4, positions[row] as u32, samples[row] as u32, coordinates];
            let word = rng::philox(counter, [seed, 3])[key % 4];
            if f64::from(word) >= f64::from(p) * 2f64.powi(32) { 1.0 / (1.0 - f64::from(p)) } else { 0.0 }
        };
        let reference = refops::Attention { heads, batch, positions: &positions, first_keys: &first_keys, mask: &mask };
        let (expected_out, expected_lse) = reference.forward(&qkv, &kv);
        bench.assert_close(out, &expected_out);
        bench.assert_close(lse, &expected_lse);
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
        // Gradients of scores are differences of terms about as large as d_out; one of them is a product with `out` as it was
        // rounded, which is felt in all gradients.
        let limit = mode.tolerance() * norm(d_out.data.iter().copied());
        assert_within(&queries(&found), &expected_d_qkv, 2.0 * limit);
        assert_within(&bench.mat(d_kv), &expected_d_kv, 2.0 * limit);
    }
}

#[test]
fn casts_round_to_the_nearest_and_widen_exactly() {
    let x = Mat { rows: 1, cols: 4, data: vec![1.0, 1.0 + 2f64.powi(-8), 1.0 + 3.0 * 2f64.powi(-8), -0.1] };
    let mut bench = Bench::new(Mode { dtype: DType::Bf16, is_fixed: false });
    let (wide, narrow, back) = (bench.f32s(&x), bench.output(1, 4), bench.stats(1, 4));
    bench.run(Op::Cast { src: wide, dst: narrow });
    bench.run(Op::Cast { src: narrow, dst: back });
    let expected = [1.0, 1.0, 1.0 + 2f64.powi(-6), -0.10009765625];
    assert_eq!(bench.mat(narrow).data, expected);
    assert_eq!(bench.mat(back).data, expected);
}

#[test]
fn moving_rows_keeps_their_bits() {
    let (x, y) = (random(1, "x", 4, 6), random(1, "y", 4, 6));
    let mut bench = Bench::new(CANONICAL);
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn sums_of_rows_and_their_values(seed: u32, leaf in 1usize..9, leaves in 1usize..9) {
        let x = random(seed, "x", leaf * leaves, 1);
        let mut bench = Bench::new(CANONICAL);
        let (x_v, acc, out) = (bench.input(&x), bench.acc(1, 1), bench.output(1, 1));
        bench.run(Op::SumRows { x: x_v, acc, add: CANONICAL.add(leaf) });
        bench.run(Op::FxTake { acc, bits: BITS, out });
        let expected = Mat { rows: 1, cols: 1, data: vec![x.data.iter().sum()] };
        bench.assert_within(out, &expected, norm(x.data.iter().copied()));
    }

    #[test]
    fn hidden_dropout_follows_global_coordinates(
        seed: u32, mode in modes(), m in 1usize..9, cols in 1usize..20, p in 0f32..0.99, first_sample in 0i64..1 << 47,
    ) {
        let x = mode.random(seed, "x", m, cols);
        let samples: Vec<i64> = (0..m as i64).map(|row| first_sample + row / 2).collect();
        let positions = random_below(seed, m, 100);
        let mut bench = Bench::new(mode);
        let (x_v, samples_v, positions_v) = (bench.input(&x), bench.i64s(&samples), bench.i32s(&positions));
        let dropout = Dropout { p, seed, layer: 3 };
        bench.run(Op::Dropout { x: x_v, samples: samples_v, positions: positions_v, dropout, site: HiddenSite::Mlp });
        let expected = Mat::from_fn(m, cols, |row, col| {
            let high = 3 << 22 | 1 << 16 | (samples[row] >> 32) as u32;
            let words = rng::philox([col as u32 / 4, positions[row] as u32, samples[row] as u32, high], [seed, 2]);
            let keep = f64::from(words[col % 4]) >= (f64::from(p) * 2f64.powi(32)).floor();
            if keep { x[(row, col)] / (1.0 - f64::from(p)) } else { 0.0 }
        });
        bench.assert_close(x_v, &expected);
    }

    /// Exact, whatever the ranks the elements are on.
    #[test]
    fn square_norms_are_exact_integers(
        values in prop::collection::vec((-0xFF_FFFFi64..0xFF_FFFF, -80i32..-14), 1..40), cut: prop::sample::Index,
    ) {
        let x = Mat::from_fn(1, values.len(), |_, at| values[at].0 as f64 * 2f64.powi(values[at].1));
        // In units of 2⁻¹⁰⁰, each square cut to an integer.
        let expected: u128 = values
            .iter()
            .map(|(mantissa, exponent)| {
                let square = u128::from(mantissa.unsigned_abs()).pow(2);
                let shift = 2 * exponent + 100;
                if shift >= 0 { square << shift } else { square.checked_shr(shift.unsigned_abs()).unwrap_or(0) }
            })
            .sum();
        let cut = cut.index(values.len());
        let mut bench = Bench::new(CANONICAL);
        let x_v = bench.input(&x);
        let limbs = [bench.fixed(1, 6), bench.fixed(1, 6)];
        bench.run(Op::SquareNorm { x: x_v.col_range(0, cut), limbs: limbs[0] });
        bench.run(Op::SquareNorm { x: x_v.col_range(cut, values.len()), limbs: limbs[1] });
        bench.run(Op::AddFixed { src: limbs[0], dst: limbs[1] });
        let found = bench.read::<i64>(limbs[1]);
        prop_assert_eq!(found[..4].iter().rev().fold(0, |sum, limb| (sum << 32) + *limb as u128), expected);
    }

    #[test]
    fn adamw_follows_its_formula_over_steps(seed: u32, len in 1usize..50, weight_decay in 0f32..0.3) {
        let (lr, beta1, beta2, eps, grad_scale) = (0.01f32, 0.9f32, 0.999f32, 1e-8f32, 0.5f32);
        let mut w = random(seed, "w", 1, len);
        let [mut m, mut v] = [Mat::zeros(1, len), Mat::zeros(1, len)];
        let gradients: Vec<Mat> = (0..3).map(|step| random(seed, &format!("g{step}"), 1, len)).collect();
        let mut bench = Bench::new(CANONICAL);
        let [w_v, m_v, v_v] = [&w, &m, &v].map(|x| bench.input(x));
        let gradients_v: Vec<View> = gradients.iter().map(|g| bench.input(g)).collect();
        for (step, (g, g_v)) in gradients.iter().zip(gradients_v).enumerate() {
            let correction = |beta: f32| 1.0 - f64::from(beta).powi(step as i32 + 1);
            let (correction1, correction2) = (correction(beta1), correction(beta2));
            let step = AdamWStep {
                grad_scale, lr, beta1, beta2, eps, weight_decay,
                correction1: correction1 as f32, correction2: correction2 as f32,
            };
            bench.run(Op::AdamW { w: w_v, m: m_v, v: v_v, g: g_v, step });
            let [lr, beta1, beta2, eps, decay] = [lr, beta1, beta2, eps, weight_decay].map(f64::from);
            for at in 0..len {
                let g = g.data[at] * f64::from(grad_scale);
                m.data[at] = beta1 * m.data[at] + (1.0 - beta1) * g;
                v.data[at] = beta2 * v.data[at] + (1.0 - beta2) * g * g;
                let update = m.data[at] / correction1 / ((v.data[at] / correction2).sqrt() + eps);
                w.data[at] -= lr * (update + decay * w.data[at]);
            }
        }
        bench.assert_close(w_v, &w);
        bench.assert_within(m_v, &m, (len as f64).sqrt());
        // 1 − β2 in f32 is off by half a unit of 2⁻²⁴, relative to 0.001 that is 3e-5.
        bench.assert_within(v_v, &v, 10.0 * norm(v.data.iter().copied()));
    }
}

#[test]
fn square_norms_hold_the_largest_gradients() {
    let mut bench = Bench::new(CANONICAL);
    let x =
        bench.input(&Mat { rows: 1, cols: 3, data: vec![2f64.powi(26), -(2f64.powi(-50)), 2f64.powi(-51)] });
    let limbs = bench.fixed(1, 6);
    bench.run(Op::SquareNorm { x, limbs });
    assert_eq!(bench.read::<i64>(limbs), [1, 0, 0, 0, 1 << 24, 0], "2⁵² and one unit of 2⁻¹⁰⁰");
}

#[test]
fn sums_out_of_range_are_told_once() {
    let mut bench = Bench::new(CANONICAL);
    let x = bench.input(&Mat {
        rows: 5,
        cols: 1,
        data: vec![0.5, 2f64.powi(21), 2f64.powi(23), f64::NAN, 2f64.powi(27)],
    });
    let (acc, limbs) = (bench.fixed(1, 1), bench.fixed(1, 6));
    let sum = |row: usize| Op::SumRows {
        x: x.row_range(row, row + 1),
        acc,
        add: Accumulate::Fixed { leaf: 1, bits: 40 },
    };
    let mut peak_after = |ops: &[Op]| {
        ops.iter().for_each(|op| bench.run(*op));
        bench.backend.as_mut().unwrap().take_fixed_point_peak().unwrap()
    };
    assert_eq!(peak_after(&[sum(1), sum(0)]), 0.5);
    assert_eq!(peak_after(&[sum(0)]), 0.5 / 2f32.powi(22));
    assert_eq!(peak_after(&[sum(2)]), 2.0);
    assert_eq!(peak_after(&[sum(3), sum(1)]), f32::INFINITY);
    assert_eq!(peak_after(&[]), 0.0);
    let square = |row: usize| Op::SquareNorm { x: x.row_range(row, row + 1), limbs };
    assert_eq!(peak_after(&[square(2)]), 0.0);
    assert_eq!([square(3), square(4)].map(|op| peak_after(&[op])), [f32::INFINITY; 2]);
}

/// Three transient buffers of which the first and the last share a place.
#[cfg(debug_assertions)]
fn chain() -> (CpuBackend, [View; 3]) {
    let mut buffers = Buffers::default();
    let views =
        ["first", "second", "third"].map(|name| buffers.declare(name, Lifetime::Transient, DType::F32, 2, 3));
    let [first, second, third] = views;
    let ops =
        [Op::Zero { dst: first }, Op::Copy { src: first, dst: second }, Op::Copy { src: second, dst: third }];
    let mut recorder = Recorder::new(&buffers);
    ops.iter().for_each(|op| recorder.run(*op).unwrap());
    (CpuBackend::new(recorder.plan()), views)
}

#[cfg(debug_assertions)]
#[test]
#[should_panic(expected = "`second` is read but holds nothing")]
fn a_buffer_that_was_never_written_cannot_be_read() {
    let (mut backend, [first, second, _]) = chain();
    backend.run(Op::Copy { src: second, dst: first }).unwrap();
}

#[cfg(debug_assertions)]
#[test]
#[should_panic(expected = "`first` is read but holds nothing: never written, or its place reused")]
fn a_buffer_whose_place_was_reused_cannot_be_read() {
    let (mut backend, [first, second, third]) = chain();
    backend.run(Op::Zero { dst: first }).unwrap();
    backend.run(Op::Copy { src: first, dst: second }).unwrap();
    backend.run(Op::Copy { src: second, dst: third }).unwrap();
    backend.run(Op::Copy { src: first, dst: second }).unwrap();
}

#[cfg(debug_assertions)]
#[test]
fn what_a_partial_write_leaves_out_is_not_a_number() {
    let (mut backend, [first, ..]) = chain();
    backend.run(Op::Zero { dst: first.row_range(1, 2) }).unwrap();
    let mut values = [0.0f32; 6];
    backend.download(first, bytemuck::cast_slice_mut(&mut values)).unwrap();
    assert!(values[..3].iter().all(|x| x.is_nan()));
    assert_eq!(values[3..], [0.0; 3]);
}

#[test]
#[should_panic(expected = "Linear: `w` is F32 5 × 3, expected F32 5 × 4")]
fn operands_of_the_wrong_shape_are_named() {
    let mut bench = Bench::new(CANONICAL);
    let (x, w, out) = (bench.output(2, 4), bench.output(5, 3), bench.output(2, 5));
    bench.run(Op::Linear { x, w, bias: None, out, accumulate: false });
}

#[test]
#[should_panic(expected = "`buffer 0` is read and written by one operation")]
fn operands_that_overlap_are_named() {
    let mut bench = Bench::new(CANONICAL);
    let x = bench.output(4, 4);
    bench.run(Op::Copy { src: x.row_range(0, 2), dst: x.row_range(1, 3) });
}
