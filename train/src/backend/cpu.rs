//! The CPU backend: one thread, and results that are the same bits whatever rows, columns, leaves and heads an operation is
//! cut into; only plain f32 accumulators depend on the order of what is added to them.
//!
//! Buffers of BF16 hold f32 numbers that are rounded whenever an operation has written them.

mod accumulate;
mod activation;
mod arena;
mod attention;
mod gemm;
mod linear;
mod loss;
mod matrix;
mod norm;
mod optimizer;
mod rows;
#[cfg(test)]
mod tests;
#[cfg(debug_assertions)]
mod validity;

use super::{Accumulate, Backend, BackendError, Center, MemoryPlan, Op, View};
use accumulate::{FixedPoint, Float};
use arena::Arena;
use matrix::{Matrix, MatrixMut};
use mesh::DType;
use std::sync::Arc;

/// Runs operations on the calling thread.
///
/// In debug builds a transient buffer holds nothing until it is written, and writing it destroys those that share its
/// place: reading one that holds nothing panics with its name, and what a partial write leaves out is NaN (for integers the
/// smallest).
#[derive(Debug)]
pub struct CpuBackend {
    f32s: Arena<f32>,
    i64s: Arena<i64>,
    i32s: Arena<i32>,
    scratch: Vec<f32>,
    /// Products on their way into accumulators.
    products: Vec<f32>,
    fixed_point_peak: f32,
    #[cfg(debug_assertions)]
    validity: validity::Validity,
}

/// Evaluates an expression with `$arena` being the arena of the type of `$view`.
macro_rules! with_arena {
    ($backend:expr, $view:expr, |$arena:ident| $body:expr) => {
        match $view.dtype {
            DType::F32 | DType::Bf16 => {
                let $arena = &mut $backend.f32s;
                $body
            }
            DType::I64 => {
                let $arena = &mut $backend.i64s;
                $body
            }
            DType::I32 => {
                let $arena = &mut $backend.i32s;
                $body
            }
            other => panic!("the CPU has no buffers of {other}"),
        }
    };
}

impl CpuBackend {
    /// A backend with the buffers of `plan`, all zero.
    ///
    /// # Panics
    /// If the plan has buffers of other types than F32, BF16, I64 and I32.
    pub fn new(plan: MemoryPlan) -> Self {
        for slot in plan.slots() {
            let known = [DType::F32, DType::Bf16, DType::I64, DType::I32].contains(&slot.dtype);
            assert!(known, "`{}`: the CPU has no buffers of {}", slot.name, slot.dtype);
        }
        let plan = Arc::new(plan);
        CpuBackend {
            f32s: Arena::new(&plan, &[DType::F32, DType::Bf16]),
            i64s: Arena::new(&plan, &[DType::I64]),
            i32s: Arena::new(&plan, &[DType::I32]),
            scratch: Vec::new(),
            products: Vec::new(),
            fixed_point_peak: 0.0,
            #[cfg(debug_assertions)]
            validity: validity::Validity::new(&plan),
        }
    }

    /// Checks that what is read holds something, and poisons what is written for the first time.
    #[cfg(debug_assertions)]
    fn note_use(&mut self, reads: &[View], writes: &[View]) {
        reads.iter().for_each(|view| self.validity.read(*view));
        for view in writes {
            if self.validity.write(*view) {
                match view.dtype {
                    DType::F32 | DType::Bf16 => self.f32s.fill(view.buf, f32::NAN),
                    DType::I64 => self.i64s.fill(view.buf, i64::MIN),
                    _ => self.i32s.fill(view.buf, i32::MIN),
                }
            }
        }
    }

    #[cfg(not(debug_assertions))]
    fn note_use(&mut self, _: &[View], _: &[View]) {}

    /// Rounds what was written to the type of its view.
    fn round(&mut self, written: View) {
        if written.dtype == DType::Bf16 {
            let ([written], []) = self.f32s.borrow([written], []);
            rows::round_to_bf16(written);
        }
    }

    fn note_peak(&mut self, peak: f32) {
        self.fixed_point_peak = self.fixed_point_peak.max(peak);
    }
}

impl Backend for CpuBackend {
    fn run(&mut self, op: Op) -> Result<(), BackendError> {
        op.check();
        let (reads, writes) = op.operands();
        self.note_use(&reads, &writes);
        match op {
            Op::Zero { dst } => with_arena!(self, dst, |arena| {
                let ([mut dst], []) = arena.borrow([dst], []);
                (0..dst.rows).for_each(|row| dst.row(row).fill(Default::default()));
            }),
            Op::Copy { src, dst } => with_arena!(self, src, |arena| {
                let ([dst], [src]) = arena.borrow([dst], [src]);
                rows::copy(src, dst);
            }),
            Op::Cast { src, dst } => {
                let ([dst], [src]) = self.f32s.borrow([dst], [src]);
                rows::copy(src, dst);
            }
            Op::Add { src, dst } => {
                let ([dst], [src]) = self.f32s.borrow([dst], [src]);
                rows::add(src, dst);
            }
            Op::AddFixed { src, dst } => {
                let ([dst], [src]) = self.i64s.borrow([dst], [src]);
                rows::add_fixed(src, dst);
            }
            Op::GatherRows { src, index, dst } => {
                if src.dtype == DType::I32 {
                    let ([dst], [src, index]) = self.i32s.borrow([dst], [src, index]);
                    rows::gather(src, index, dst);
                } else {
                    let ([], [index]) = self.i32s.borrow([], [index]);
                    if src.dtype == DType::I64 {
                        let ([dst], [src]) = self.i64s.borrow([dst], [src]);
                        rows::gather(src, index, dst);
                    } else {
                        let ([dst], [src]) = self.f32s.borrow([dst], [src]);
                        rows::gather(src, index, dst);
                    }
                }
            }
            Op::Embed { tokens, table, first_row, out, accumulate } => {
                let ([], [tokens]) = self.i32s.borrow([], [tokens]);
                let ([out], [table]) = self.f32s.borrow([out], [table]);
                rows::embed(tokens, table, first_row, out, accumulate);
            }
            Op::EmbedBackward { tokens, d_out, first_row, acc, add } => {
                let ([], [tokens]) = self.i32s.borrow([], [tokens]);
                match add {
                    Accumulate::Fixed { leaf, bits } => {
                        let mut fixed = FixedPoint::new(bits);
                        let ([], [d_out]) = self.f32s.borrow([], [d_out]);
                        let ([acc], []) = self.i64s.borrow([acc], []);
                        rows::embed_backward(tokens, d_out, first_row, acc, &mut fixed);
                        // Tokens are added one by one where others add leaves.
                        self.note_peak(fixed.peak() * leaf as f32);
                    }
                    Accumulate::Float => {
                        let ([acc], [d_out]) = self.f32s.borrow([acc], [d_out]);
                        rows::embed_backward(tokens, d_out, first_row, acc, &mut Float);
                    }
                }
            }
            Op::AddNorm { x, delta, gamma, center, eps, sum, rstd, out } => {
                if x != sum {
                    let ([sum], [x]) = self.f32s.borrow([sum], [x]);
                    rows::copy(x, sum);
                }
                if let Some(delta) = delta {
                    let ([sum], [delta]) = self.f32s.borrow([sum], [delta]);
                    rows::add(delta, sum);
                }
                self.round(sum);
                match center {
                    None => {
                        let ([rstd, out], [sum, gamma]) = self.f32s.borrow([rstd, out], [sum, gamma]);
                        norm::norm(sum, gamma, None, eps, rstd, out);
                    }
                    Some(Center { mean, beta }) => {
                        let ([mean, rstd, out], [sum, gamma, beta]) =
                            self.f32s.borrow([mean, rstd, out], [sum, gamma, beta]);
                        norm::norm(sum, gamma, Some((mean, beta)), eps, rstd, out);
                    }
                }
            }
            Op::NormApply { sum, rstd, gamma, center, out } => match center {
                None => {
                    let ([out], [sum, rstd, gamma]) = self.f32s.borrow([out], [sum, rstd, gamma]);
                    norm::apply(sum, rstd, gamma, None, out);
                }
                Some(Center { mean, beta }) => {
                    let ([out], [sum, rstd, gamma, mean, beta]) =
                        self.f32s.borrow([out], [sum, rstd, gamma, mean, beta]);
                    norm::apply(sum, rstd, gamma, Some((mean, beta)), out);
                }
            },
            Op::NormBackward { d_out, sum, mean, rstd, gamma, d_sum, accumulate, d_gamma, add } => {
                let space = &mut self.scratch;
                // Reads may overlap: without a mean any view stands in its place.
                let reads = [d_out, sum, rstd, mean.unwrap_or(rstd)];
                let ([d_sum], [d_out, sum, rstd, center, gamma]) =
                    self.f32s.borrow([d_sum], [reads[0], reads[1], reads[2], reads[3], gamma]);
                let normed = norm::Normed { x: sum, mean: mean.map(|_| center), rstd };
                norm::backward_sum(d_out, normed, gamma, d_sum, accumulate, space);
                match add {
                    Accumulate::Fixed { leaf, bits } => {
                        let mut fixed = FixedPoint::new(bits);
                        let ([], [d_out, sum, rstd, center]) = self.f32s.borrow([], reads);
                        let ([d_gamma], []) = self.i64s.borrow([d_gamma], []);
                        let normed = norm::Normed { x: sum, mean: mean.map(|_| center), rstd };
                        norm::backward_gamma(d_out, normed, d_gamma, leaf, &mut fixed, space);
                        self.note_peak(fixed.peak());
                    }
                    Accumulate::Float => {
                        let ([d_gamma], [d_out, sum, rstd, center]) = self.f32s.borrow([d_gamma], reads);
                        let normed = norm::Normed { x: sum, mean: mean.map(|_| center), rstd };
                        norm::backward_gamma(d_out, normed, d_gamma, sum.rows, &mut Float, space);
                    }
                }
            }
            Op::Linear { x, w, bias, out, accumulate } => {
                let ([product], [x, w]) = self.f32s.borrow([out], [x, w]);
                gemm::gemm(gemm::Factor::new(x), gemm::Factor::transposed(w), product, accumulate);
                if let Some(bias) = bias {
                    let ([out], [bias]) = self.f32s.borrow([out], [bias]);
                    rows::add_bias(bias, out);
                }
            }
            Op::AddBias { bias, x } => {
                let ([x], [bias]) = self.f32s.borrow([x], [bias]);
                rows::add_bias(bias, x);
            }
            Op::LinearDx { d_out, w, d_x, accumulate } => {
                let ([d_x], [d_out, w]) = self.f32s.borrow([d_x], [d_out, w]);
                gemm::gemm(gemm::Factor::new(d_out), gemm::Factor::new(w), d_x, accumulate);
            }
            Op::LinearDw { d_out, x, acc, add } => match add {
                Accumulate::Fixed { leaf, bits } => {
                    let mut fixed = FixedPoint::new(bits);
                    let ([], [d_out, x]) = self.f32s.borrow([], [d_out, x]);
                    let ([acc], []) = self.i64s.borrow([acc], []);
                    linear::weight_gradient(d_out, x, acc, leaf, &mut fixed, &mut self.products);
                    self.note_peak(fixed.peak());
                }
                Accumulate::Float => {
                    let ([acc], [d_out, x]) = self.f32s.borrow([acc], [d_out, x]);
                    gemm::gemm(gemm::Factor::transposed(d_out), gemm::Factor::new(x), acc, true);
                }
            },
            Op::Rope { qkv, positions, table, heads, inverse } => {
                let ([], [positions]) = self.i32s.borrow([], [positions]);
                let ([qkv], [table]) = self.f32s.borrow([qkv], [table]);
                attention::rope(qkv, positions, table, heads, inverse);
            }
            Op::PackKv { qkv, kv, heads } => {
                let ([kv], [qkv]) = self.f32s.borrow([kv], [qkv]);
                attention::pack_kv(qkv, kv, heads);
            }
            Op::UnpackKv { d_kv, d_qkv, heads } => {
                let ([d_qkv], [d_kv]) = self.f32s.borrow([d_qkv], [d_kv]);
                attention::unpack_kv(d_kv, d_qkv, heads);
            }
            Op::Attention { inputs, out, lse } => {
                let first_keys = inputs.first_keys.unwrap_or(inputs.positions);
                let ([], [positions, first_keys]) = self.i32s.borrow([], [inputs.positions, first_keys]);
                let first_keys = inputs.first_keys.map(|_| first_keys);
                let ([], [samples]) = self.i64s.borrow([], [inputs.samples]);
                let ([out, lse], [qkv, kv]) = self.f32s.borrow([out, lse], [inputs.qkv, inputs.kv]);
                let call = attention::Call { inputs, qkv, kv, positions, first_keys, samples };
                call.forward(out, lse, &mut self.scratch);
            }
            Op::AttentionBackward { inputs, out, lse, d_out, d_qkv, d_kv, add } => {
                let space = [&mut self.scratch, &mut self.products];
                let first_keys = inputs.first_keys.unwrap_or(inputs.positions);
                let ([], [positions, first_keys]) = self.i32s.borrow([], [inputs.positions, first_keys]);
                let first_keys = inputs.first_keys.map(|_| first_keys);
                let reads = [inputs.qkv, inputs.kv, out, lse, d_out];
                match add {
                    Accumulate::Fixed { bits, .. } => {
                        let mut fixed = FixedPoint::new(bits);
                        let ([d_kv], [samples]) = self.i64s.borrow([d_kv], [inputs.samples]);
                        let ([d_qkv], [qkv, kv, out, lse, d_out]) = self.f32s.borrow([d_qkv], reads);
                        let result = attention::Forward { out, lse };
                        let call = attention::Call { inputs, qkv, kv, positions, first_keys, samples };
                        call.backward(result, d_out, d_qkv, d_kv, &mut fixed, space);
                        self.note_peak(fixed.peak());
                    }
                    Accumulate::Float => {
                        let ([], [samples]) = self.i64s.borrow([], [inputs.samples]);
                        let ([d_qkv, d_kv], [qkv, kv, out, lse, d_out]) =
                            self.f32s.borrow([d_qkv, d_kv], reads);
                        let result = attention::Forward { out, lse };
                        let call = attention::Call { inputs, qkv, kv, positions, first_keys, samples };
                        call.backward(result, d_out, d_qkv, d_kv, &mut Float, space);
                    }
                }
            }
            Op::Activate { activation, x, out } => {
                let ([out], [x]) = self.f32s.borrow([out], [x]);
                activation::forward(activation, x, out);
            }
            Op::ActivateBackward { activation, d_out, x, d_x } => {
                let ([d_x], [d_out, x]) = self.f32s.borrow([d_x], [d_out, x]);
                activation::backward(activation, d_out, x, d_x);
            }
            Op::CeMax { logits, valid, max } => {
                let ([max], [logits]) = self.f32s.borrow([max], [logits]);
                loss::max(logits, valid, max);
            }
            Op::CeSum { logits, max, target, first_col, valid, block, sum, picked } => {
                let ([], [target]) = self.i32s.borrow([], [target]);
                let (sums, [logits, max]) = self.f32s.borrow([sum, picked], [logits, max]);
                let shard = loss::Shard { first_col, valid };
                loss::sum(logits, max, target, shard, block, sums, &mut self.scratch);
            }
            Op::CeGrad { logits, max, sum, picked, target, weight, first_col, valid, loss } => {
                let ([], [target]) = self.i32s.borrow([], [target]);
                let ([logits, loss], [max, sum, picked, weight]) =
                    self.f32s.borrow([logits, loss], [max, sum, picked, weight]);
                let rows = loss::Rows { max, sum, picked, target, weight };
                loss::gradient(rows, loss::Shard { first_col, valid }, logits, loss);
            }
            Op::SumRows { x, acc, add } => match add {
                Accumulate::Fixed { leaf, bits } => {
                    let mut fixed = FixedPoint::new(bits);
                    let ([], [x]) = self.f32s.borrow([], [x]);
                    let ([acc], []) = self.i64s.borrow([acc], []);
                    rows::sum_rows(x, acc, leaf, &mut fixed, &mut self.scratch);
                    self.note_peak(fixed.peak());
                }
                Accumulate::Float => {
                    let ([acc], [x]) = self.f32s.borrow([acc], [x]);
                    rows::sum_rows(x, acc, x.rows, &mut Float, &mut self.scratch);
                }
            },
            Op::Dropout { x, samples, positions, dropout, site } => {
                let ([], [samples]) = self.i64s.borrow([], [samples]);
                let ([], [positions]) = self.i32s.borrow([], [positions]);
                let ([x], []) = self.f32s.borrow([x], []);
                rows::dropout(x, samples, positions, dropout, site);
            }
            Op::FxTake { acc, bits, out } => {
                let ([], [acc]) = self.i64s.borrow([], [acc]);
                let ([out], []) = self.f32s.borrow([out], []);
                accumulate::take(acc, bits, out);
            }
            Op::SquareNorm { x, limbs } => {
                let ([], [x]) = self.f32s.borrow([], [x]);
                let ([limbs], []) = self.i64s.borrow([limbs], []);
                if !optimizer::square_norm(x, limbs) {
                    self.note_peak(f32::INFINITY);
                }
            }
            Op::AdamW { w, m, v, g, step } => {
                let ([w, m, v], [g]) = self.f32s.borrow([w, m, v], [g]);
                optimizer::adamw(step, w, m, v, g);
            }
        }
        writes.into_iter().for_each(|written| self.round(written));
        Ok(())
    }

    fn upload(&mut self, dst: View, bytes: &[u8]) -> Result<(), BackendError> {
        assert_eq!(bytes.len(), dst.size_bytes(), "bytes for {} × {} of {}", dst.rows, dst.cols, dst.dtype);
        self.note_use(&[], &[dst]);
        if dst.dtype == DType::Bf16 {
            let ([dst], []) = self.f32s.borrow([dst], []);
            rows::upload_bf16(bytes, dst);
            return Ok(());
        }
        with_arena!(self, dst, |arena| {
            let ([dst], []) = arena.borrow([dst], []);
            rows::upload(bytes, dst);
        });
        Ok(())
    }

    fn download(&mut self, src: View, bytes: &mut [u8]) -> Result<(), BackendError> {
        assert_eq!(bytes.len(), src.size_bytes(), "bytes for {} × {} of {}", src.rows, src.cols, src.dtype);
        self.note_use(&[src], &[]);
        if src.dtype == DType::Bf16 {
            let ([], [src]) = self.f32s.borrow([], [src]);
            rows::download_bf16(src, bytes);
            return Ok(());
        }
        with_arena!(self, src, |arena| {
            let ([], [src]) = arena.borrow([], [src]);
            rows::download(src, bytes);
        });
        Ok(())
    }

    fn take_fixed_point_peak(&mut self) -> Result<f32, BackendError> {
        Ok(std::mem::take(&mut self.fixed_point_peak))
    }
}

/// The first `len` elements of scratch space, which grows to the largest request.
fn scratch(space: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if space.len() < len {
        space.resize(len, 0.0);
    }
    &mut space[..len]
}
