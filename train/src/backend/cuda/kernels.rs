//! The kernel files and what is in them.

/// What is put before every source.
pub const PRELUDE: &str = include_str!("kernels/prelude.cuh");

/// A kernel file.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Name without the ending.
    pub name: &'static str,
    /// CUDA C++, without the prelude.
    pub text: &'static str,
    /// Registers that a kernel of the file may use on Hopper: above it, fewer blocks share a multiprocessor.
    pub max_registers: u32,
    /// Its kernels.
    pub kernels: &'static [&'static str],
}

/// The files for an architecture such as `sm_90a`.
pub fn sources_for(architecture: &str) -> impl Iterator<Item = &'static Source> {
    SOURCES.iter().chain(if architecture == HOPPER { &HOPPER_SOURCES[..] } else { &[] })
}

/// Files for any architecture.
static SOURCES: [Source; 9] = [
    Source {
        name: "rows",
        text: include_str!("kernels/rows.cu"),
        max_registers: 32,
        kernels: &[
            "cast_f32_bf16",
            "cast_bf16_f32",
            "add_f32",
            "add_bf16",
            "add_i64",
            "max_f32",
            "gather_16",
            "gather_32",
            "gather_64",
            "embed_f32",
            "embed_bf16",
            "add_bias_f32",
            "add_bias_bf16",
            "embed_backward_fixed_f32",
            "embed_backward_fixed_bf16",
            "embed_backward_float_f32",
            "embed_backward_float_bf16",
            "dropout_f32",
            "dropout_bf16",
            "fx_take",
        ],
    },
    Source {
        name: "norm",
        text: include_str!("kernels/norm.cu"),
        max_registers: 32,
        kernels: &[
            "add_norm_f32",
            "add_norm_bf16",
            "norm_apply_f32",
            "norm_apply_bf16",
            "norm_backward_f32",
            "norm_backward_bf16",
        ],
    },
    Source {
        name: "columns",
        text: include_str!("kernels/columns.cu"),
        max_registers: 40,
        kernels: &[
            "sum_columns_fixed_f32",
            "sum_columns_fixed_bf16",
            "sum_columns_float_f32",
            "sum_columns_float_bf16",
            "add_column_sums",
        ],
    },
    Source {
        name: "activation",
        text: include_str!("kernels/activation.cu"),
        max_registers: 40,
        kernels: &[
            "swiglu_f32",
            "swiglu_bf16",
            "swiglu_backward_f32",
            "swiglu_backward_bf16",
            "gelu_f32",
            "gelu_bf16",
            "gelu_backward_f32",
            "gelu_backward_bf16",
            "gelu_tanh_f32",
            "gelu_tanh_bf16",
            "gelu_tanh_backward_f32",
            "gelu_tanh_backward_bf16",
        ],
    },
    Source {
        name: "loss",
        text: include_str!("kernels/loss.cu"),
        max_registers: 32,
        kernels: &["ce_max_f32", "ce_max_bf16", "ce_sum_f32", "ce_sum_bf16", "ce_grad_f32", "ce_grad_bf16"],
    },
    Source {
        name: "optimizer",
        text: include_str!("kernels/optimizer.cu"),
        max_registers: 40,
        kernels: &["square_norm", "carry_limbs", "adamw_f32"],
    },
    Source {
        name: "gemm",
        text: include_str!("kernels/gemm.cu"),
        max_registers: 168,
        kernels: &["gemm_f32_f32", "gemm_bf16_bf16", "gemm_bf16_f32", "gemm_fixed_f32", "gemm_fixed_bf16"],
    },
    Source {
        name: "rope",
        text: include_str!("kernels/rope.cu"),
        max_registers: 32,
        kernels: &["rope_f32", "rope_bf16", "pack_kv_f32", "pack_kv_bf16", "unpack_kv_f32", "unpack_kv_bf16"],
    },
    Source {
        name: "tiles",
        text: include_str!("kernels/tiles.cu"),
        max_registers: 192,
        kernels: &[
            "tiles_forward_f32",
            "tiles_forward_bf16",
            "tiles_delta_f32",
            "tiles_delta_bf16",
            "tiles_queries_f32",
            "tiles_queries_bf16",
            "tiles_keys_fixed_f32",
            "tiles_keys_fixed_bf16",
            "tiles_keys_float_f32",
            "tiles_keys_float_bf16",
        ],
    },
];

/// What code with Hopper's own instructions is compiled for.
const HOPPER: &str = "sm_90a";

/// `attention.cu` for a head size, with dropout or without.
macro_rules! attention {
    ($head_dim:literal, $suffix:literal, $defines:literal) => {
        Source {
            name: concat!("attention", $suffix),
            text: concat!(
                "#define HEAD_DIM ",
                $head_dim,
                "\n#define KERNEL(name) name##",
                $suffix,
                "\n",
                $defines,
                include_str!("kernels/attention.cu")
            ),
            max_registers: 168,
            kernels: &[
                concat!("attention_forward", $suffix),
                concat!("attention_stats", $suffix),
                concat!("attention_dq", $suffix),
                concat!("attention_dkv", $suffix),
            ],
        }
    };
}

/// Files for Hopper alone.
static HOPPER_SOURCES: [Source; 4] = [
    attention!(64, "_64", ""),
    attention!(64, "_64_dropout", "#define DROPOUT\n"),
    attention!(128, "_128", ""),
    attention!(128, "_128_dropout", "#define DROPOUT\n"),
];
