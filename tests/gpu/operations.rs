//! Each operation on random numbers and shapes, on both devices, with poisoned outputs: what one leaves unwritten the other does,
//! too.

use crate::Test;
use mesh::{DType, Rank};
use std::cell::RefCell;
use train::backend::{
    Accumulate, AdamWStep, AttentionInputs, Backend, Buffers, Center, Device, Dropout, Heads, HiddenSite,
    Lifetime, Op, Recorder, View,
};
use train::config::{Activation, Canonical, Numerics};
use train::rng;

pub(crate) const TESTS: &[Test] = &[
    ("operations::moving_rows", moving_rows),
    ("operations::embedding", embedding),
    ("operations::norm", norm),
    ("operations::products", products),
    ("operations::rotary_positions", rotary_positions),
    ("operations::attention", attention),
    ("operations::activations", activations),
    ("operations::cross_entropy", cross_entropy),
    ("operations::sums_of_rows", sums_of_rows),
    ("operations::dropout", dropout),
    ("operations::optimizer", optimizer),
    ("operations::out_of_range", out_of_range),
];

/// Fraction bits of accumulators.
const BITS: u32 = 36;
/// Rounds of random shapes, for each compute type and kind of accumulators.
const ROUNDS: u32 = 8;

/// How a buffer of both devices is compared.
#[derive(Clone, Copy, Debug)]
enum Check {
    Bits,
    /// ‖a − b‖ ≤ ε · (‖b‖ + size): the size is that of the terms whose difference the result is. In f32 ε is 1e-5: hundreds of
    /// roundings, added as random walks, stay below. In a program of bf16 it is 1e-2, two and a half units in the last place:
    /// sums in another order round to other neighbours, and what follows is computed from these. I64 has [`BITS`] fraction
    /// bits.
    Close {
        size: f64,
    },
}

struct Buffer {
    view: View,
    bytes: Vec<u8>,
    check: Check,
}

/// A program on buffers with contents.
struct Case {
    /// F32 or BF16.
    compute: DType,
    add: fn(usize) -> Accumulate,
    /// Whether views fill their buffers; else some have strides.
    dense: bool,
    buffers: Buffers,
    contents: Vec<Buffer>,
    ops: Vec<Op>,
}

/// Random numbers by counter.
struct Random {
    seed: u32,
    next: RefCell<u32>,
}

impl Random {
    fn new(name: &str, round: u32) -> Self {
        let seed = name.bytes().fold(round, |seed, byte| seed.wrapping_mul(31).wrapping_add(u32::from(byte)));
        Random { seed, next: RefCell::new(0) }
    }

    fn word(&self) -> u32 {
        let mut next = self.next.borrow_mut();
        *next += 1;
        rng::philox([*next, 0, 0, 0], [self.seed, 99])[0]
    }

    fn below(&self, n: usize) -> usize {
        self.word() as usize % n
    }

    /// From `lo` up to and with `hi`.
    fn within(&self, lo: usize, hi: usize) -> usize {
        lo + self.below(hi - lo + 1)
    }

    fn flag(&self) -> bool {
        self.below(2) == 1
    }

    fn normals(&self, len: usize, std: f64) -> Vec<f32> {
        let mut values = vec![0.0; len];
        rng::init_normal(self.word(), "random", 0..len as u64, std, &mut values);
        values
    }
}

/// Fixed point, by leaves.
fn fixed(leaf: usize) -> Accumulate {
    Accumulate::Fixed { leaf, bits: BITS }
}

impl Case {
    fn new(compute: DType, add: fn(usize) -> Accumulate) -> Self {
        Case {
            compute,
            add,
            dense: false,
            buffers: Buffers::default(),
            contents: Vec::new(),
            ops: Vec::new(),
        }
    }

    fn declare(&mut self, dtype: DType, rows: usize, cols: usize, bytes: Vec<u8>, check: Check) -> View {
        let name = format!("buffer {}", self.contents.len());
        let view = self.buffers.declare(name, Lifetime::Persistent, dtype, rows, cols);
        assert_eq!(bytes.len(), view.size_bytes());
        self.contents.push(Buffer { view, bytes, check });
        view
    }

    fn floats(&mut self, rows: usize, cols: usize, values: &[f32], check: Check) -> View {
        self.declare(DType::F32, rows, cols, bytemuck::cast_slice(values).to_vec(), check)
    }

    /// Of the compute type.
    fn reals(&mut self, rows: usize, cols: usize, values: &[f32], check: Check) -> View {
        if self.compute == DType::F32 {
            return self.floats(rows, cols, values, check);
        }
        let bytes = values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect();
        self.declare(DType::Bf16, rows, cols, bytes, check)
    }

    /// Normal numbers of deviation 1, in a buffer that may be wider: views have strides.
    fn input(&mut self, random: &Random, rows: usize, cols: usize) -> View {
        let extra = if !self.dense && random.flag() { random.within(1, 9) } else { 0 };
        let values = random.normals(rows * (cols + extra), 1.0);
        let at = random.within(0, extra);
        self.reals(rows, cols + extra, &values, Check::Close { size: 0.0 }).col_range(at, at + cols)
    }

    /// An output of poison.
    fn output(&mut self, random: &Random, rows: usize, cols: usize, check: Check) -> View {
        let extra = if !self.dense && random.flag() { random.within(1, 9) } else { 0 };
        let at = random.within(0, extra);
        self.reals(rows, cols + extra, &vec![f32::NAN; rows * (cols + extra)], check).col_range(at, at + cols)
    }

    /// Row statistics: contiguous.
    fn column(&mut self, rows: usize) -> View {
        self.floats(rows, 1, &vec![f32::NAN; rows], Check::Close { size: 0.0 })
    }

    fn i32s(&mut self, values: &[i32]) -> View {
        self.declare(DType::I32, values.len(), 1, bytemuck::cast_slice(values).to_vec(), Check::Bits)
    }

    fn i64s(&mut self, values: &[i64]) -> View {
        self.declare(DType::I64, values.len(), 1, bytemuck::cast_slice(values).to_vec(), Check::Bits)
    }

    /// Accumulators that already hold something.
    fn acc(&mut self, rows: usize, cols: usize, size: f64) -> View {
        let values = (0..rows * cols).map(|at| at as i64 - 3);
        let check = Check::Close { size };
        match (self.add)(1) {
            Accumulate::Fixed { .. } => {
                let values: Vec<i64> = values.map(|value| value << 30).collect();
                self.declare(DType::I64, rows, cols, bytemuck::cast_slice(&values).to_vec(), check)
            }
            Accumulate::Float => {
                let values: Vec<f32> = values.map(|value| value as f32 / 64.0).collect();
                self.floats(rows, cols, &values, check)
            }
        }
    }

    /// What all buffers hold after the program, and the peak.
    fn run_on(&self, device: &Device) -> (Vec<Vec<u8>>, f32) {
        let mut backend =
            device.backend(Rank(0), Recorder::new(&self.buffers).plan(), &self.numerics()).unwrap();
        let backend: &mut dyn Backend = backend.as_mut();
        for Buffer { view, bytes, .. } in &self.contents {
            backend.upload(*view, bytes).unwrap();
        }
        self.ops.iter().for_each(|op| backend.run(*op).unwrap());
        let read = |Buffer { view, .. }: &Buffer| {
            let mut bytes = vec![0; view.size_bytes()];
            backend.download(*view, &mut bytes).unwrap();
            bytes
        };
        let contents = self.contents.iter().map(read).collect();
        (contents, backend.take_fixed_point_peak().unwrap())
    }

    /// Runs on both devices and compares every buffer.
    #[track_caller]
    fn compare(&self, device: &Device) {
        let (expected, expected_peak) = self.run_on(&Device::Cpu);
        let (found, peak) = self.run_on(device);
        for ((buffer, expected), found) in self.contents.iter().zip(&expected).zip(&found) {
            if let Some(fault) = self.difference(buffer, expected, found) {
                panic!("{:?} of {:?}: {fault}", buffer.view, self.ops);
            }
        }
        // Peaks are those of sums whose last bits may differ.
        let same =
            peak == expected_peak || f64::from((peak / expected_peak - 1.0).abs()) < 4.0 * self.epsilon();
        assert!(same, "a peak of {peak} instead of {expected_peak}: {:?}", self.ops);
    }

    fn numerics(&self) -> Numerics {
        match (self.add)(1) {
            Accumulate::Fixed { .. } => Numerics::Canonical(Canonical {
                leaf_tokens: 1,
                tp_leaves: 1,
                grad_bits: BITS,
                kv_bits: BITS,
            }),
            Accumulate::Float => Numerics::Fast,
        }
    }

    fn epsilon(&self) -> f64 {
        if self.compute == DType::F32 { 1e-5 } else { 1e-2 }
    }

    fn difference(&self, buffer: &Buffer, expected: &[u8], found: &[u8]) -> Option<String> {
        let Check::Close { size } = buffer.check else {
            return (expected != found).then(|| "other bits".to_owned());
        };
        let numbers = |bytes| numbers(buffer.view.dtype, bytes);
        let (mut error, mut norm) = (0.0, 0.0);
        for (at, (expected, found)) in numbers(expected).into_iter().zip(numbers(found)).enumerate() {
            if expected.is_nan() != found.is_nan() {
                return Some(format!("element {at} is {found} instead of {expected}"));
            }
            if expected != found && !expected.is_nan() {
                error += (expected - found) * (expected - found);
            }
            if expected.is_finite() {
                norm += expected * expected;
            }
        }
        let (error, bound) = (error.sqrt(), self.epsilon() * (norm.sqrt() + size));
        (error.is_nan() || error > bound).then(|| format!("off by {error}, {bound} is allowed"))
    }
}

/// Elements as numbers.
fn numbers(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        DType::Bf16 => {
            let (values, _) = bytes.as_chunks();
            values.iter().map(|value| half::bf16::from_le_bytes(*value).to_f64()).collect()
        }
        DType::I64 => {
            let (values, _) = bytes.as_chunks();
            values.iter().map(|value| i64::from_le_bytes(*value) as f64 / f64::from(BITS).exp2()).collect()
        }
        _ => {
            let (values, _) = bytes.as_chunks();
            values.iter().map(|value| f64::from(f32::from_le_bytes(*value))).collect()
        }
    }
}

fn rounds(name: &str, device: &Device, build: impl Fn(&Random, &mut Case)) {
    for compute in [DType::F32, DType::Bf16] {
        for add in [fixed as fn(usize) -> Accumulate, |_| Accumulate::Float] {
            for round in 0..ROUNDS {
                let (random, mut case) = (Random::new(name, round), Case::new(compute, add));
                build(&random, &mut case);
                case.compare(device);
            }
        }
    }
}

fn moving_rows(device: &Device) {
    rounds("rows", device, |random, case| {
        let (rows, cols) = (random.within(1, 70), [random.within(1, 300), 64][random.below(2)]);
        let (x, y) = (case.input(random, rows, cols), case.input(random, rows, cols));
        let out = case.output(random, rows, cols, Check::Bits);
        let index: Vec<i32> = (0..rows).map(|_| random.below(rows + 1) as i32 - 1).collect();
        let index = case.i32s(&index);
        let numbers: Vec<i64> = (0..rows as i64).map(|at| (at - 3) << 61).collect();
        let (a, b) = (case.i64s(&numbers), case.i64s(&vec![i64::MAX / 3; rows]));
        let moved = case.i64s(&vec![7; rows]);
        case.ops = vec![
            Op::Copy { src: x, dst: out },
            Op::Add { src: out, dst: y },
            Op::GatherRows { src: y, index, dst: out },
            Op::Zero { dst: y.row_range(0, rows / 2) },
            Op::AddFixed { src: a, dst: b },
            Op::GatherRows { src: b, index, dst: moved },
        ];
    });
}

fn embedding(device: &Device) {
    rounds("embedding", device, |random, case| {
        let (m, vocab, h) = (random.within(1, 90), random.within(1, 20), random.within(1, 200));
        let tokens: Vec<i32> = (0..m).map(|_| random.below(vocab + 6) as i32).collect();
        let tokens = case.i32s(&tokens);
        let (table, d_out) = (case.input(random, vocab, h), case.input(random, m, h));
        let out = case.output(random, m, h, Check::Bits);
        let acc = case.acc(vocab, h, 0.0);
        let first_row = random.below(4) as i32;
        case.ops = vec![
            Op::Embed { tokens, table, first_row, out, accumulate: false },
            Op::Embed { tokens, table, first_row: first_row + 1, out, accumulate: true },
            Op::EmbedBackward { tokens, d_out, first_row, acc, add: (case.add)(3) },
        ];
    });
}

fn norm(device: &Device) {
    rounds("norm", device, |random, case| {
        let (leaf, h) = (random.within(1, 70), [random.within(1, 600), 256][random.below(2)]);
        let m = leaf * random.within(1, 4);
        let [x, delta, d_out] = [(); 3].map(|()| case.input(random, m, h));
        let gamma = case.input(random, 1, h);
        let (accumulate, in_place) = (random.flag(), random.flag());
        let size = (m * h) as f64;
        let sum = if in_place { x } else { case.output(random, m, h, Check::Close { size: 0.0 }) };
        let rstd = case.column(m);
        let center = random.flag().then(|| Center { mean: case.column(m), beta: case.input(random, 1, h) });
        let [out, again] = [(); 2].map(|()| case.output(random, m, h, Check::Close { size: 0.0 }));
        let d_sum = if accumulate {
            case.input(random, m, h)
        } else {
            case.output(random, m, h, Check::Close { size: size.sqrt() })
        };
        let d_gamma = case.acc(1, h, size.sqrt());
        let delta = random.flag().then_some(delta);
        case.ops = vec![
            Op::AddNorm { x, delta, gamma, center, eps: 1e-5, sum, rstd, out },
            Op::NormApply { sum, rstd, gamma, center, out: again },
            Op::NormBackward {
                d_out,
                sum,
                mean: center.map(|center| center.mean),
                rstd,
                gamma,
                d_sum,
                accumulate,
                d_gamma,
                add: (case.add)(leaf),
            },
        ];
    });
}

fn products(device: &Device) {
    rounds("products", device, |random, case| {
        let (leaf, k, n) = (random.within(1, 70), random.within(1, 200), random.within(1, 200));
        let m = leaf * random.within(1, 4);
        let (x, w, d_out) = (case.input(random, m, k), case.input(random, n, k), case.input(random, m, n));
        let accumulate = random.flag();
        let mut output = |rows, cols| match accumulate {
            true => case.input(random, rows, cols),
            false => case.output(random, rows, cols, Check::Close { size: 0.0 }),
        };
        let (out, d_x) = (output(m, n), output(m, k));
        let acc = case.acc(n, k, 0.0);
        let bias = case.input(random, 1, n);
        case.ops = vec![
            Op::Linear { x, w, bias: random.flag().then_some(bias), out, accumulate },
            Op::AddBias { bias, x: out },
            Op::LinearDx { d_out, w, d_x, accumulate },
            Op::LinearDw { d_out, x, acc, add: (case.add)(leaf) },
        ];
    });
}

fn heads(random: &Random) -> Heads {
    Heads {
        groups: random.within(1, 3),
        queries_per_group: random.within(1, 3),
        head_dim: [2 * random.within(1, 20), 64, 128][random.below(3)],
    }
}

fn rotary_positions(device: &Device) {
    rounds("rope", device, |random, case| {
        let (heads, m, inverse) = (heads(random), random.within(1, 40), random.flag());
        let qkv = case.input(random, m, heads.qkv_cols());
        let positions: Vec<i32> = (0..m).map(|_| random.below(32) as i32).collect();
        let positions = case.i32s(&positions);
        let table = random.normals(32 * heads.head_dim, 1.0);
        let table = case.floats(32, heads.head_dim, &table, Check::Bits);
        let kv = case.output(random, m, heads.kv_cols(), Check::Close { size: 0.0 });
        let d_kv = random.normals(m * heads.kv_cols(), 1.0);
        let d_kv = case.floats(m, heads.kv_cols(), &d_kv, Check::Bits);
        case.ops = vec![
            Op::Rope { qkv, positions, table, heads, inverse },
            Op::PackKv { qkv, kv, heads },
            Op::UnpackKv { d_kv, d_qkv: qkv, heads },
        ];
    });
}

fn attention(device: &Device) {
    rounds("attention", device, |random, case| {
        case.dense = random.flag();
        let heads = heads(random);
        let (batch, leaf, chunks) = (random.within(1, 2), random.within(1, 40), random.within(1, 6));
        let t = leaf * chunks;
        // A rank has some of the chunks of a sequence.
        let own: Vec<usize> = (0..chunks).filter(|_| random.flag()).collect();
        let own = if own.is_empty() { vec![chunks - 1] } else { own };
        let position_of = |chunk: &usize| (chunk * leaf..(chunk + 1) * leaf).map(|position| position as i32);
        let positions: Vec<i32> = (0..batch).flat_map(|_| own.iter().flat_map(position_of)).collect();
        let m = positions.len();
        let samples: Vec<i64> = (0..m).map(|row| (1 << 33) + (row * batch / m) as i64).collect();
        let (qkv, kv) =
            (case.input(random, m, heads.qkv_cols()), case.input(random, batch * t, heads.kv_cols()));
        let d_out = case.input(random, m, heads.out_cols());
        let (positions, samples) = (case.i32s(&positions), case.i64s(&samples));
        let out = case.output(random, m, heads.out_cols(), Check::Close { size: 0.0 });
        let lse = vec![f32::NAN; m * heads.num_queries()];
        let lse = case.floats(m, heads.num_queries(), &lse, Check::Close { size: 0.0 });
        // Gradients of scores are differences of terms about as large as d_out.
        let size = ((m * heads.out_cols()) as f64).sqrt();
        let d_qkv = case.output(random, m, heads.qkv_cols(), Check::Close { size });
        let d_kv = case.acc(batch * t, heads.kv_cols(), size);
        let dropout = random.flag().then_some(Dropout { p: 0.3, seed: 77, layer: 7 });
        let first_head = random.below(9) as u32;
        let (first_keys, tile) = (None, leaf);
        let inputs = AttentionInputs {
            qkv,
            kv,
            positions,
            first_keys,
            samples,
            heads,
            batch,
            tile,
            dropout,
            first_head,
        };
        let add = (case.add)(leaf);
        case.ops = vec![
            Op::Attention { inputs, out, lse },
            Op::AttentionBackward { inputs, out, lse, d_out, d_qkv, d_kv, add },
        ];
    });
}

fn activations(device: &Device) {
    rounds("activations", device, |random, case| {
        let activation = [Activation::Swiglu, Activation::Gelu, Activation::GeluTanh][random.below(3)];
        let (m, f) = (random.within(1, 40), [random.within(1, 300), 128][random.below(2)]);
        let (x, d_out) = (case.input(random, m, activation.inputs() * f), case.input(random, m, f));
        let out = case.output(random, m, f, Check::Close { size: 0.0 });
        let d_x = case.output(random, m, activation.inputs() * f, Check::Close { size: 0.0 });
        case.ops =
            vec![Op::Activate { activation, x, out }, Op::ActivateBackward { activation, d_out, x, d_x }];
    });
}

fn cross_entropy(device: &Device) {
    rounds("cross entropy", device, |random, case| {
        let (m, block, blocks) = (random.within(1, 20), random.within(1, 300), random.within(1, 9));
        let cols = block * blocks;
        let valid = cols - random.below(cols.min(block + 1));
        let logits = case.reals(m, cols, &random.normals(m * cols, 5.0), Check::Close { size: 0.0 });
        let first_col = random.below(3) as i32;
        let target: Vec<i32> = (0..m).map(|_| random.below(valid + 3) as i32).collect();
        let target = case.i32s(&target);
        let weight: Vec<f32> = (0..m).map(|row| [1.0, 0.0, 0.25][row % 3]).collect();
        let weight = case.floats(m, 1, &weight, Check::Bits);
        let [max, sum, picked, loss] = [(); 4].map(|()| case.column(m));
        case.ops = vec![
            Op::CeMax { logits, valid, max },
            Op::CeSum { logits, max, target, first_col, valid, block, sum, picked },
            Op::CeGrad { logits, max, sum, picked, target, weight, first_col, valid, loss },
        ];
    });
}

fn sums_of_rows(device: &Device) {
    rounds("sums", device, |random, case| {
        let leaf = random.within(1, 70);
        let m = leaf * random.within(1, 100);
        let n = [1, random.within(1, 300)][random.below(2)];
        let x = case.input(random, m, n);
        let acc = case.acc(1, n, ((m * n) as f64).sqrt());
        let (rows, cols) = (random.within(1, 30), random.within(1, 300));
        let more: Vec<i64> = (0..(rows * cols) as i64).map(|at| (at - 9) << (at % 40)).collect();
        let more = case.i64s(&more).reshaped(rows, cols);
        let [out, again] =
            [(); 2].map(|()| case.floats(rows, cols, &vec![f32::NAN; rows * cols], Check::Bits));
        let wide = case.floats(rows, cols, &random.normals(rows * cols, 1.0), Check::Bits);
        let narrow = case.reals(rows, cols, &vec![f32::NAN; rows * cols], Check::Bits);
        case.ops = vec![
            Op::SumRows { x, acc, add: (case.add)(leaf) },
            Op::FxTake { acc: more, bits: BITS, out },
            Op::Cast { src: wide, dst: narrow },
            Op::Cast { src: narrow, dst: again },
        ];
    });
}

/// The same masks, bit for bit.
fn dropout(device: &Device) {
    rounds("dropout", device, |random, case| {
        let (m, cols) = (random.within(1, 40), random.within(1, 300));
        let values = random.normals(m * cols, 1.0);
        let x = case.reals(m, cols, &values, Check::Bits);
        let samples: Vec<i64> = (0..m as i64).map(|row| (1 << 46) + row / 2).collect();
        let positions: Vec<i32> = (0..m).map(|_| random.below(1000) as i32).collect();
        let (samples, positions) = (case.i64s(&samples), case.i32s(&positions));
        let p = random.below(100) as f32 / 100.0;
        let dropout = Dropout { p, seed: random.word(), layer: random.below(1024) as u32 };
        case.ops = vec![Op::Dropout { x, samples, positions, dropout, site: HiddenSite::Mlp }];
    });
}

/// The norm's limbs are exact, so they are the same bits.
fn optimizer(device: &Device) {
    rounds("optimizer", device, |random, case| {
        let len = [random.within(1, 100_000), 1 << 16][random.below(2)];
        let wide = |random: &Random| -> Vec<f32> {
            let values = random.normals(len, 1.0);
            values.into_iter().map(|x| x * (random.below(60) as f32 - 40.0).exp2()).collect()
        };
        let x = case.floats(1, len, &wide(random), Check::Bits);
        let limbs = case.declare(DType::I64, 1, 6, vec![0; 48], Check::Bits);
        let [w, m, g] = [(); 3].map(|()| {
            let values = random.normals(len, 1.0);
            case.floats(1, len, &values, Check::Close { size: 0.0 })
        });
        let v: Vec<f32> = random.normals(len, 1.0).into_iter().map(|x| x * x).collect();
        let v = case.floats(1, len, &v, Check::Close { size: 0.0 });
        let step = AdamWStep {
            grad_scale: 0.5,
            lr: 0.01,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.1,
            correction1: 0.19,
            correction2: 0.002,
        };
        case.ops =
            vec![Op::SquareNorm { x, limbs }, Op::SquareNorm { x: g, limbs }, Op::AdamW { w, m, v, g, step }];
    });
}

/// A value out of range, or none, is told by the peak.
fn out_of_range(device: &Device) {
    for bad in [2f32.powi(30), f32::INFINITY, f32::NAN] {
        let mut case = Case::new(DType::F32, fixed);
        let x = case.floats(4, 1, &[0.5, bad, 1.0, 2.0], Check::Bits);
        let acc = case.declare(DType::I64, 1, 1, vec![0; 8], Check::Close { size: f64::INFINITY });
        let limbs = case.declare(DType::I64, 1, 6, vec![0; 48], Check::Bits);
        case.ops = vec![Op::SumRows { x, acc, add: fixed(1) }];
        case.compare(device);
        case.ops = vec![Op::SquareNorm { x, limbs }];
        case.compare(device);
    }
}
