//! Operations to launches: which kernel, over how many blocks, with which arguments.

use super::HEAD_DIM_MAX;
use super::arguments::{Arguments, Attention, Center, Drop, Factor, Fixed, Gradient, Heads, Mat, Summand};
use super::device::{CudaBackend, Fault};
use crate::backend::{self, Accumulate, AttentionInputs, Dropout, HiddenSite, Op, View};
use crate::config::Activation;
use crate::numerics::power_of_two;
use crate::rng;
use mesh::DType;

/// Threads of a block that works on one row, as the kernels' reductions assume.
const ROW_THREADS: u32 = 256;
/// Edge of a block's tile in `gemm.cu`.
const GEMM_TILE: u64 = 64;
/// Rows of a block in `tiles.cu`.
const ATTENTION_ROWS: usize = 32;

/// The kernel for a compute type.
macro_rules! typed {
    ($dtype:expr, $name:literal) => {
        match $dtype {
            DType::F32 => concat!($name, "_f32"),
            DType::Bf16 => concat!($name, "_bf16"),
            other => panic!("nothing computes in {other}"),
        }
    };
}

impl CudaBackend {
    /// Queues an operation whose operands were checked.
    pub(super) fn start(&mut self, op: Op) -> Result<(), Fault> {
        match op {
            Op::Zero { dst } => self.zero(dst),
            Op::Copy { src, dst } => self.copy(src, dst),
            Op::Cast { src, dst } => match (src.dtype, dst.dtype) {
                (DType::F32, DType::Bf16) => self.elementwise("cast_f32_bf16", [src, dst]),
                (DType::Bf16, DType::F32) => self.elementwise("cast_bf16_f32", [src, dst]),
                _ => self.copy(src, dst),
            },
            Op::Add { src, dst } => self.elementwise(typed!(dst.dtype, "add"), [src, dst]),
            Op::AddFixed { src, dst } => {
                let [src, dst] = flat([src, dst]);
                let arguments = Arguments::default().and(self.mat(src)).and(self.mat(dst));
                self.launch_packs("add_i64", dst, 1, arguments)
            }
            Op::GatherRows { src, index, dst } => {
                let kernel = match src.dtype.size_bytes() {
                    2 => "gather_16",
                    4 => "gather_32",
                    _ => "gather_64",
                };
                let wide = self.wide([src, dst]);
                let arguments =
                    Arguments::default().and(self.mat(src)).and(self.mat(index)).and(self.mat(dst));
                self.launch_packs(kernel, dst, elements(src, wide), arguments.and(wide))
            }
            Op::Embed { tokens, table, first_row, out, accumulate } => {
                let wide = self.wide([table, out]);
                let arguments =
                    Arguments::default().and(self.mat(tokens)).and(self.mat(table)).and(first_row);
                let arguments = arguments.and(self.mat(out)).and(i32::from(accumulate)).and(wide);
                self.launch_packs(typed!(out.dtype, "embed"), out, elements(out, wide), arguments)
            }
            Op::EmbedBackward { tokens, d_out, first_row, acc, add } => {
                self.embed_backward(tokens, d_out, first_row, acc, add)
            }
            Op::AddNorm { x, delta, gamma, center, eps, sum, rstd, out } => {
                let beta = center.map_or(gamma, |center| center.beta);
                let wide = self.wide([x, delta.unwrap_or(x), gamma, beta, sum, out]);
                let delta = delta.map_or(Mat::NONE, |delta| self.mat(delta));
                let arguments = Arguments::default().and(self.mat(x)).and(delta).and(self.mat(gamma));
                let arguments = arguments.and(self.center(center)).and(eps);
                let arguments = arguments.and(self.mat(sum)).and(self.mat(rstd)).and(self.mat(out)).and(wide);
                self.launch_rows(typed!(x.dtype, "add_norm"), x.rows, arguments)
            }
            Op::NormApply { sum, rstd, gamma, center, out } => {
                let beta = center.map_or(gamma, |center| center.beta);
                let wide = self.wide([sum, gamma, beta, out]);
                let arguments =
                    Arguments::default().and(self.mat(sum)).and(self.mat(rstd)).and(self.mat(gamma));
                let arguments = arguments.and(self.center(center)).and(self.mat(out)).and(wide);
                self.launch_rows(typed!(sum.dtype, "norm_apply"), sum.rows, arguments)
            }
            Op::NormBackward { d_out, sum, mean, rstd, gamma, d_sum, accumulate, d_gamma, add } => {
                let wide = self.wide([d_out, sum, gamma, d_sum]);
                let mean = mean.map_or(Mat::NONE, |mean| self.mat(mean));
                let (d_out, normed, rstd) = (self.mat(d_out), self.mat(sum), self.mat(rstd));
                let arguments = Arguments::default().and(d_out).and(normed).and(mean).and(rstd);
                let arguments = arguments.and(self.mat(gamma)).and(self.mat(d_sum));
                let arguments = arguments.and(i32::from(accumulate)).and(wide);
                self.launch_rows(typed!(sum.dtype, "norm_backward"), sum.rows, arguments)?;
                let summand = Summand { x: d_out, normed, mean, rstd };
                self.sum_columns((sum.dtype, summand), d_gamma, add)
            }
            Op::Linear { x, w, bias, out, accumulate } => {
                let factors = (Factor::rows(self.mat(x)), Factor::rows(self.mat(w)));
                self.gemm(x.dtype, factors, x.cols, out, accumulate)?;
                bias.map_or(Ok(()), |bias| self.add_bias(bias, out))
            }
            Op::AddBias { bias, x } => self.add_bias(bias, x),
            Op::LinearDx { d_out, w, d_x, accumulate } => {
                let factors = (Factor::rows(self.mat(d_out)), Factor::cols(self.mat(w)));
                self.gemm(d_out.dtype, factors, d_out.cols, d_x, accumulate)
            }
            Op::LinearDw { d_out, x, acc, add } => self.weight_gradient(d_out, x, acc, add),
            Op::Rope { qkv, positions, table, heads, inverse } => {
                let arguments = Arguments::default().and(self.mat(qkv)).and(self.mat(positions));
                let arguments = arguments.and(self.mat(table)).and(of_heads(heads)).and(i32::from(inverse));
                let pairs = heads.groups * (heads.queries_per_group + 1) * (heads.head_dim / 2);
                self.launch_elements(typed!(qkv.dtype, "rope"), (qkv.rows, pairs), 1, arguments)
            }
            Op::PackKv { qkv, kv, heads } => {
                let wide = self.wide([qkv, kv]) & i32::from(is_wide(heads.head_dim, qkv.dtype));
                let arguments = Arguments::default().and(self.mat(qkv)).and(self.mat(kv));
                let arguments = arguments.and(of_heads(heads)).and(wide);
                self.launch_packs(typed!(qkv.dtype, "pack_kv"), kv, elements(kv, wide), arguments)
            }
            Op::UnpackKv { d_kv, d_qkv, heads } => {
                let wide = self.wide([d_kv, d_qkv]) & i32::from(is_wide(heads.head_dim, d_qkv.dtype));
                let arguments = Arguments::default().and(self.mat(d_kv)).and(self.mat(d_qkv));
                let arguments = arguments.and(of_heads(heads)).and(wide);
                self.launch_packs(typed!(d_qkv.dtype, "unpack_kv"), d_kv, elements(d_qkv, wide), arguments)
            }
            Op::Attention { inputs, out, lse } => self.attention(inputs, out, lse),
            Op::AttentionBackward { inputs, out, lse, d_out, d_qkv, d_kv, add } => {
                self.attention_backward(inputs, (out, lse), d_out, (d_qkv, d_kv), add)
            }
            Op::Activate { activation, x, out } => {
                let kernel = match activation {
                    Activation::Swiglu => typed!(out.dtype, "swiglu"),
                    Activation::Gelu => typed!(out.dtype, "gelu"),
                    Activation::GeluTanh => typed!(out.dtype, "gelu_tanh"),
                };
                let wide = self.wide([x, out]);
                let arguments = Arguments::default().and(self.mat(x)).and(self.mat(out)).and(wide);
                self.launch_packs(kernel, out, elements(out, wide), arguments)
            }
            Op::ActivateBackward { activation, d_out, x, d_x } => {
                let kernel = match activation {
                    Activation::Swiglu => typed!(d_out.dtype, "swiglu_backward"),
                    Activation::Gelu => typed!(d_out.dtype, "gelu_backward"),
                    Activation::GeluTanh => typed!(d_out.dtype, "gelu_tanh_backward"),
                };
                let wide = self.wide([d_out, x, d_x]);
                let arguments = Arguments::default().and(self.mat(d_out)).and(self.mat(x));
                self.launch_packs(
                    kernel,
                    d_out,
                    elements(d_out, wide),
                    arguments.and(self.mat(d_x)).and(wide),
                )
            }
            Op::CeMax { logits, valid, max } => {
                let wide = self.wide([logits]);
                let arguments = Arguments::default().and(self.mat(logits)).and(valid as i64);
                self.launch_rows(
                    typed!(logits.dtype, "ce_max"),
                    logits.rows,
                    arguments.and(self.mat(max)).and(wide),
                )
            }
            Op::CeSum { logits, max, target, first_col, valid, block, sum, picked } => {
                let wide = self.wide([logits]) & i32::from(is_wide(block, logits.dtype));
                let arguments =
                    Arguments::default().and(self.mat(logits)).and(self.mat(max)).and(self.mat(target));
                let arguments = arguments.and(first_col).and(valid as i64).and(block as i64);
                let arguments = arguments.and(self.mat(sum)).and(self.mat(picked)).and(wide);
                self.launch_rows(typed!(logits.dtype, "ce_sum"), logits.rows, arguments)
            }
            Op::CeGrad { logits, max, sum, picked, target, weight, first_col, valid, loss } => {
                let wide = self.wide([logits]);
                let arguments =
                    Arguments::default().and(self.mat(logits)).and(self.mat(max)).and(self.mat(sum));
                let arguments = arguments.and(self.mat(picked)).and(self.mat(target)).and(self.mat(weight));
                let arguments = arguments.and(first_col).and(valid as i64).and(self.mat(loss)).and(wide);
                self.launch_rows(typed!(logits.dtype, "ce_grad"), logits.rows, arguments)
            }
            Op::SumRows { x, acc, add } => {
                let summand = Summand { x: self.mat(x), normed: Mat::NONE, mean: Mat::NONE, rstd: Mat::NONE };
                self.sum_columns((x.dtype, summand), acc, add)
            }
            Op::Dropout { x, samples, positions, dropout, site } => {
                let arguments = Arguments::default().and(self.mat(x)).and(self.mat(samples));
                let arguments = arguments.and(self.mat(positions)).and(hidden_dropout(dropout, site));
                self.launch_packs(typed!(x.dtype, "dropout"), x, 4, arguments)
            }
            Op::FxTake { acc, bits, out } => {
                let [acc, out] = flat([acc, out]);
                let unit = power_of_two(-(bits as i32));
                let arguments = Arguments::default().and(self.mat(acc)).and(unit).and(self.mat(out));
                self.launch_packs("fx_take", out, 1, arguments)
            }
            Op::SquareNorm { x, limbs } => {
                let [x] = flat([x]);
                // A few elements a thread: the last additions of all blocks meet in six places.
                let blocks =
                    (x.cols as u64).div_ceil(8 * 256).min(u64::from(8 * self.gpu.num_multiprocessors()));
                let arguments =
                    Arguments::default().and(self.mat(x)).and(self.mat(limbs)).and(self.peak.address());
                self.launch("square_norm", (blocks, 1), 256, 0, arguments)?;
                self.launch("carry_limbs", (1, 1), 1, 0, Arguments::default().and(self.mat(limbs)))
            }
            Op::AdamW { w, m, v, g, step } => {
                let views = flat([w, m, v, g]);
                let wide = self.wide(views);
                let mut arguments = Arguments::default();
                for view in views {
                    arguments = arguments.and(self.mat(view).address);
                }
                let arguments = arguments.and(w.numel() as i64).and(step).and(wide);
                self.launch_packs("adamw_f32", views[0], elements(w, wide), arguments)
            }
        }
    }

    /// A kernel on views of one shape that sees each element by itself.
    fn elementwise<const N: usize>(&self, kernel: &'static str, views: [View; N]) -> Result<(), Fault> {
        let views = flat(views);
        let wide = self.wide(views);
        let arguments = views.iter().fold(Arguments::default(), |all, view| all.and(self.mat(*view)));
        let narrowest = views.iter().map(|view| elements(*view, wide)).max().unwrap_or(1);
        self.launch_packs(kernel, views[0], narrowest, arguments.and(wide))
    }

    /// A thread for every `pack` columns of each row of `view`.
    fn launch_packs(
        &self,
        kernel: &'static str,
        view: View,
        pack: usize,
        arguments: Arguments,
    ) -> Result<(), Fault> {
        self.launch_elements(kernel, (view.rows, view.cols), pack, arguments)
    }

    fn launch_elements(
        &self,
        kernel: &'static str,
        (rows, cols): (usize, usize),
        pack: usize,
        arguments: Arguments,
    ) -> Result<(), Fault> {
        let (grid, threads) = grid_of_elements((rows, cols), pack);
        self.launch(kernel, grid, threads, 0, arguments)
    }

    /// A block for every row.
    fn launch_rows(&self, kernel: &'static str, rows: usize, arguments: Arguments) -> Result<(), Fault> {
        self.launch(kernel, (rows as u64, 1), ROW_THREADS, 0, arguments)
    }

    /// 1 if all rows of all views start and end at multiples of 16 bytes.
    fn wide<const N: usize>(&self, views: [View; N]) -> i32 {
        let wide = |view: View| {
            let mat = self.mat(view);
            let bytes = |elements: u64| elements * view.dtype.size_bytes() as u64;
            [mat.address, bytes(mat.stride as u64), bytes(mat.cols as u64)]
                .iter()
                .all(|at| at.is_multiple_of(16))
        };
        i32::from(views.into_iter().all(wide))
    }

    fn fixed(&self, bits: u32, weight: usize) -> Fixed {
        assert!(bits <= 62, "a fixed point of {bits} bits leaves no range");
        let unit = power_of_two(bits as i32 - 62) * weight as f32;
        Fixed { scale: power_of_two(bits as i32), unit, peak: self.peak.address() }
    }

    fn embed_backward(
        &self,
        tokens: View,
        d_out: View,
        first_row: i32,
        acc: View,
        add: Accumulate,
    ) -> Result<(), Fault> {
        let arguments = Arguments::default().and(self.mat(tokens)).and(self.mat(d_out)).and(first_row);
        let arguments = arguments.and(self.mat(acc));
        match add {
            // Tokens are added one by one where others add leaves.
            Accumulate::Fixed { leaf, bits } => {
                let kernel = typed!(d_out.dtype, "embed_backward_fixed");
                self.launch_packs(kernel, d_out, 1, arguments.and(self.fixed(bits, leaf)))
            }
            Accumulate::Float => {
                self.launch_rows(typed!(d_out.dtype, "embed_backward_float"), acc.rows, arguments)
            }
        }
    }

    fn center(&self, center: Option<backend::Center>) -> Center {
        center.map_or(Center { mean: Mat::NONE, beta: Mat::NONE }, |backend::Center { mean, beta }| Center {
            mean: self.mat(mean),
            beta: self.mat(beta),
        })
    }

    fn add_bias(&self, bias: View, x: View) -> Result<(), Fault> {
        let wide = self.wide([bias, x]);
        let arguments = Arguments::default().and(self.mat(bias)).and(self.mat(x)).and(wide);
        self.launch_packs(typed!(x.dtype, "add_bias"), x, elements(x, wide), arguments)
    }

    /// `acc += Σ summand` over rows; accumulators of one row.
    fn sum_columns(
        &mut self,
        (dtype, summand): (DType, Summand),
        acc: View,
        add: Accumulate,
    ) -> Result<(), Fault> {
        let rows = summand.x.rows as usize;
        let blocks = (acc.cols as u64).div_ceil(128);
        // Enough parts to fill the GPU.
        let parts = u64::from(8 * self.gpu.num_multiprocessors()).div_ceil(blocks.max(1));
        match add {
            Accumulate::Fixed { leaf, bits } => {
                let parts = parts.min((rows / leaf) as u64);
                let arguments = Arguments::default().and(summand).and(self.mat(acc)).and(leaf as i64);
                let arguments = arguments.and(self.fixed(bits, 1));
                self.launch(typed!(dtype, "sum_columns_fixed"), (blocks, parts), 128, 0, arguments)
            }
            Accumulate::Float => {
                let rows_per_part = rows.div_ceil(parts as usize).max(1);
                let parts = rows.div_ceil(rows_per_part);
                let partial = self.scratch(parts, acc.cols)?;
                let arguments = Arguments::default().and(summand).and(partial).and(rows_per_part as i64);
                let kernel = typed!(dtype, "sum_columns_float");
                self.launch(kernel, (blocks, parts as u64), 128, 0, arguments)?;
                let arguments = Arguments::default().and(partial).and(self.mat(acc));
                self.launch("add_column_sums", (blocks, 1), 128, 0, arguments)
            }
        }
    }

    /// `out[m][n] (+)= Σ a(m, k) · b(n, k)` over `depth`, for factors of type `dtype`.
    fn gemm(
        &mut self,
        dtype: DType,
        (a, b): (Factor, Factor),
        depth: usize,
        out: View,
        accumulate: bool,
    ) -> Result<(), Fault> {
        let result = self.mat(out);
        if dtype == DType::Bf16
            && let Some(products) = &mut self.products
            && products.run(self.stream, (a, b), depth, (result, out.dtype), accumulate)?
        {
            return Ok(());
        }
        let kernel = match (dtype, out.dtype) {
            (DType::F32, DType::F32) => "gemm_f32_f32",
            (DType::Bf16, DType::Bf16) => "gemm_bf16_bf16",
            (DType::Bf16, DType::F32) => "gemm_bf16_f32",
            (from, to) => panic!("no product of {from} makes {to}"),
        };
        let arguments = Arguments::default().and(a).and(b).and(depth as i64).and(result);
        self.launch(kernel, gemm_grid(out), 256, 0, arguments.and(i32::from(accumulate)))
    }

    /// `acc += d_outᵀ · x`.
    fn weight_gradient(&mut self, d_out: View, x: View, acc: View, add: Accumulate) -> Result<(), Fault> {
        let (a, b) = (Factor::cols(self.mat(d_out)), Factor::cols(self.mat(x)));
        match add {
            Accumulate::Fixed { leaf, bits } => {
                let arguments = Arguments::default().and(a).and(b).and(x.rows as i64).and(self.mat(acc));
                let arguments = arguments.and(leaf as i64).and(self.fixed(bits, 1));
                self.launch(typed!(x.dtype, "gemm_fixed"), gemm_grid(acc), 256, 0, arguments)
            }
            Accumulate::Float => self.gemm(x.dtype, (a, b), x.rows, acc, true),
        }
    }

    fn attention_arguments(&self, inputs: AttentionInputs) -> Attention {
        let AttentionInputs { qkv, kv, positions, samples, heads, batch, tile, dropout, first_head, .. } =
            inputs;
        assert!(
            heads.head_dim as u64 <= HEAD_DIM_MAX,
            "a head of {} elements, which runs do not ask for",
            heads.head_dim
        );
        Attention {
            qkv: self.mat(qkv),
            kv: self.mat(kv),
            positions: self.mat(positions),
            samples: self.mat(samples),
            heads: of_heads(heads),
            padding: 0,
            queries: (qkv.rows / batch) as i64,
            keys: (kv.rows / batch) as i64,
            tile: tile as i64,
            scale: 1.0 / (heads.head_dim as f32).sqrt(),
            has_dropout: i32::from(dropout.is_some()),
            drop: attention_drop(dropout),
            first_head,
        }
    }

    fn attention(&self, inputs: AttentionInputs, out: View, lse: View) -> Result<(), Fault> {
        assert!(inputs.first_keys.is_none(), "a run with documents that see themselves alone is refused");
        if self.is_quick_attention(inputs, &[out, lse]) {
            return self.quick_attention(inputs, out, lse);
        }
        let arguments = Arguments::default().and(self.attention_arguments(inputs));
        let arguments = arguments.and(self.mat(out)).and(self.mat(lse));
        let shared = shared_bytes(inputs.heads, 3, 1);
        let kernel = typed!(inputs.qkv.dtype, "tiles_forward");
        self.launch(kernel, query_grid(inputs), ROW_THREADS, shared, arguments)
    }

    fn attention_backward(
        &mut self,
        inputs: AttentionInputs,
        (out, lse): (View, View),
        d_out: View,
        (d_qkv, d_kv): (View, View),
        add: Accumulate,
    ) -> Result<(), Fault> {
        if add == Accumulate::Float && self.is_quick_attention(inputs, &[out, lse, d_out, d_qkv, d_kv]) {
            return self.quick_attention_backward(inputs, (out, lse), d_out, (d_qkv, d_kv));
        }
        let (rows, heads) = (inputs.qkv.rows, inputs.heads.num_queries());
        let delta = self.scratch(rows, heads)?;
        let gradient = Gradient { out: self.mat(out), lse: self.mat(lse), d_out: self.mat(d_out) };
        let arguments =
            |be: &Self| Arguments::default().and(be.attention_arguments(inputs)).and(gradient).and(delta);
        let dtype = inputs.qkv.dtype;
        self.launch_elements(typed!(dtype, "tiles_delta"), (rows, heads), 1, arguments(self))?;
        let shared = shared_bytes(inputs.heads, 4, 1);
        let of_queries = arguments(self).and(self.mat(d_qkv));
        self.launch(typed!(dtype, "tiles_queries"), query_grid(inputs), ROW_THREADS, shared, of_queries)?;
        let of_keys = arguments(self).and(self.mat(d_kv));
        let (kernel, of_keys) = match add {
            Accumulate::Fixed { bits, .. } => {
                (typed!(dtype, "tiles_keys_fixed"), of_keys.and(self.fixed(bits, 1)))
            }
            Accumulate::Float => (typed!(dtype, "tiles_keys_float"), of_keys),
        };
        self.launch(kernel, key_grid(inputs), ROW_THREADS, shared_bytes(inputs.heads, 4, 2), of_keys)
    }
}

/// Blocks of `rows` of all samples.
fn row_blocks(rows: usize, batch: usize) -> u64 {
    ((rows / batch).div_ceil(ATTENTION_ROWS) * batch) as u64
}

/// Blocks of queries by heads.
fn query_grid(inputs: AttentionInputs) -> (u64, u64) {
    (row_blocks(inputs.qkv.rows, inputs.batch), inputs.heads.num_queries() as u64)
}

/// Blocks of keys by groups.
fn key_grid(inputs: AttentionInputs) -> (u64, u64) {
    (row_blocks(inputs.kv.rows, inputs.batch), inputs.heads.groups as u64)
}

/// Views of one shape, as one row each if none has gaps.
fn flat<const N: usize>(views: [View; N]) -> [View; N] {
    match views.iter().all(|view| view.is_contiguous()) {
        true => views.map(|view| View { stride: view.cols, ..view }.reshaped(1, view.numel())),
        false => views,
    }
}

/// Whether `len` elements end at a multiple of 16 bytes.
fn is_wide(len: usize, dtype: DType) -> bool {
    (len * dtype.size_bytes()).is_multiple_of(16)
}

/// Elements that a thread has.
fn elements(view: View, wide: i32) -> usize {
    if wide == 1 { 16 / view.dtype.size_bytes() } else { 1 }
}

fn gemm_grid(out: View) -> (u64, u64) {
    ((out.cols as u64).div_ceil(GEMM_TILE), (out.rows as u64).div_ceil(GEMM_TILE))
}

/// Shared memory of `tiles.cu`: blocks of 32 rows of a head, and 32 × 32 tables of scores.
fn shared_bytes(heads: backend::Heads, blocks: usize, tables: usize) -> usize {
    let (rows, dim) = (ATTENTION_ROWS, heads.head_dim);
    (blocks * rows * (dim + 1) + tables * rows * (rows + 1)) * size_of::<f32>()
}

/// Blocks, and threads of one, where there is a thread for every `pack` columns of each row.
pub(super) fn grid_of_elements((rows, cols): (usize, usize), pack: usize) -> ((u64, u64), u32) {
    let packs = cols.div_ceil(pack);
    let threads = packs.next_multiple_of(32).clamp(32, 256);
    ((packs.div_ceil(threads) as u64, rows.min(65_535) as u64), threads as u32)
}

fn of_heads(heads: backend::Heads) -> Heads {
    let backend::Heads { groups, queries_per_group, head_dim } = heads;
    Heads { groups: groups as i32, queries: queries_per_group as i32, dim: head_dim as i32 }
}

fn drop_of(dropout: Dropout, purpose: u32, site: u32) -> Drop {
    let Dropout { p, seed, layer } = dropout;
    Drop {
        seed,
        purpose,
        place: rng::dropout_place(layer, site),
        threshold: rng::dropout_threshold(p),
        scale: rng::dropout_scale(p),
    }
}

/// Without dropout nothing looks at it.
pub(super) fn attention_drop(dropout: Option<Dropout>) -> Drop {
    dropout.map_or(bytemuck::Zeroable::zeroed(), |dropout| drop_of(dropout, rng::ATTENTION_DROPOUT, 0))
}

fn hidden_dropout(dropout: Dropout, site: HiddenSite) -> Drop {
    drop_of(dropout, rng::HIDDEN_DROPOUT, site as u32)
}
