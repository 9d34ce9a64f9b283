//! What every operation asks of its operands, on every device.

use super::{Accumulate, AttentionInputs, Center, Op, View};
use mesh::DType;
use mesh::DType::{Bf16, F32, I32, I64};

impl Op {
    /// The operation's name.
    pub fn name(&self) -> &'static str {
        use Op::*;
        match self {
            Zero { .. } => "Zero",
            Copy { .. } => "Copy",
            Cast { .. } => "Cast",
            Add { .. } => "Add",
            AddFixed { .. } => "AddFixed",
            GatherRows { .. } => "GatherRows",
            Embed { .. } => "Embed",
            EmbedBackward { .. } => "EmbedBackward",
            AddNorm { .. } => "AddNorm",
            NormApply { .. } => "NormApply",
            NormBackward { .. } => "NormBackward",
            Linear { .. } => "Linear",
            LinearDx { .. } => "LinearDx",
            AddBias { .. } => "AddBias",
            LinearDw { .. } => "LinearDw",
            Rope { .. } => "Rope",
            PackKv { .. } => "PackKv",
            UnpackKv { .. } => "UnpackKv",
            Attention { .. } => "Attention",
            AttentionBackward { .. } => "AttentionBackward",
            Activate { .. } => "Activate",
            ActivateBackward { .. } => "ActivateBackward",
            CeMax { .. } => "CeMax",
            CeSum { .. } => "CeSum",
            CeGrad { .. } => "CeGrad",
            SumRows { .. } => "SumRows",
            Dropout { .. } => "Dropout",
            FxTake { .. } => "FxTake",
            SquareNorm { .. } => "SquareNorm",
            AdamW { .. } => "AdamW",
        }
    }

    /// Checks types, shapes and divisibility of the operands. Values (positions, row indices) are not looked at.
    ///
    /// # Panics
    /// With the operation, the operand, what it is and what it should be.
    pub fn check(&self) {
        use Op::*;
        let name = self.name();
        let is = |operand: &str, view: View, dtype: DType, rows: usize, cols: usize| {
            assert!(
                view.dtype == dtype && view.rows == rows && view.cols == cols,
                "{name}: `{operand}` is {} {} × {}, expected {dtype} {rows} × {cols}",
                view.dtype,
                view.rows,
                view.cols
            );
            assert!(
                view.rows <= 1 || view.stride >= view.cols,
                "{name}: rows of `{operand}` overlap: {} columns at a stride of {}",
                view.cols,
                view.stride
            );
        };
        let divides = |what: &str, part: usize, whole: usize| {
            assert!(
                part > 0 && whole.is_multiple_of(part),
                "{name}: {what} of {part} does not divide {whole}"
            );
        };
        // The compute type, as this operand has it; the others of the operation follow.
        let compute = |operand: &str, view: View| {
            let known = [F32, Bf16].contains(&view.dtype);
            assert!(known, "{name}: `{operand}` is {}, expected F32 or BF16", view.dtype);
            view.dtype
        };
        let leaf_divides = |add: Accumulate, rows: usize| {
            if let Accumulate::Fixed { leaf, .. } = add {
                divides("a leaf", leaf, rows);
            }
        };
        let is_center = |center: Option<Center>, dtype: DType, rows: usize, cols: usize| {
            if let Some(Center { mean, beta }) = center {
                is("mean", mean, F32, rows, 1);
                is("beta", beta, dtype, 1, cols);
            }
        };
        let is_attention = |inputs: AttentionInputs, out: View, lse: View| {
            let AttentionInputs { qkv, kv, positions, first_keys, samples, heads, batch, tile, .. } = inputs;
            let (rows, dtype) = (qkv.rows, compute("qkv", qkv));
            is("qkv", qkv, dtype, rows, heads.qkv_cols());
            is("kv", kv, dtype, kv.rows, heads.kv_cols());
            is("positions", positions, I32, rows, 1);
            if let Some(first_keys) = first_keys {
                is("first_keys", first_keys, I32, rows, 1);
            }
            is("samples", samples, I64, rows, 1);
            is("out", out, dtype, rows, heads.out_cols());
            is("lse", lse, F32, rows, heads.num_queries());
            // Queries are cut into samples and tiles, keys into samples.
            divides("a batch", batch, rows);
            divides("a batch", batch, kv.rows);
            divides("a tile", tile, rows / batch);
            assert!(heads.head_dim > 0, "{name}: heads without elements");
        };
        match *self {
            Zero { dst } => is("dst", dst, dst.dtype, dst.rows, dst.cols),
            Copy { src, dst } => {
                is("src", src, src.dtype, src.rows, src.cols);
                is("dst", dst, src.dtype, src.rows, src.cols);
            }
            Cast { src, dst } => {
                is("src", src, compute("src", src), src.rows, src.cols);
                is("dst", dst, compute("dst", dst), src.rows, src.cols);
            }
            Add { src, dst } => {
                is("src", src, compute("src", src), src.rows, src.cols);
                is("dst", dst, src.dtype, src.rows, src.cols);
            }
            AddFixed { src, dst } => {
                is("src", src, I64, src.rows, src.cols);
                is("dst", dst, I64, src.rows, src.cols);
            }
            GatherRows { src, index, dst } => {
                is("src", src, src.dtype, src.rows, src.cols);
                is("index", index, I32, dst.rows, 1);
                is("dst", dst, src.dtype, dst.rows, src.cols);
            }
            Embed { tokens, table, out, .. } => {
                is("tokens", tokens, I32, out.rows, 1);
                is("table", table, compute("table", table), table.rows, out.cols);
                is("out", out, table.dtype, out.rows, out.cols);
            }
            EmbedBackward { tokens, d_out, acc, add, .. } => {
                is("tokens", tokens, I32, d_out.rows, 1);
                is("d_out", d_out, compute("d_out", d_out), d_out.rows, d_out.cols);
                is("acc", acc, add.dtype(), acc.rows, d_out.cols);
            }
            AddNorm { x, delta, gamma, center, sum, rstd, out, .. } => {
                let dtype = compute("x", x);
                is("x", x, dtype, x.rows, x.cols);
                if let Some(delta) = delta {
                    is("delta", delta, dtype, x.rows, x.cols);
                }
                is("gamma", gamma, dtype, 1, x.cols);
                is_center(center, dtype, x.rows, x.cols);
                is("sum", sum, dtype, x.rows, x.cols);
                is("rstd", rstd, F32, x.rows, 1);
                is("out", out, dtype, x.rows, x.cols);
            }
            NormApply { sum, rstd, gamma, center, out } => {
                let dtype = compute("sum", sum);
                is("sum", sum, dtype, sum.rows, sum.cols);
                is("rstd", rstd, F32, sum.rows, 1);
                is("gamma", gamma, dtype, 1, sum.cols);
                is_center(center, dtype, sum.rows, sum.cols);
                is("out", out, dtype, sum.rows, sum.cols);
            }
            NormBackward { d_out, sum, mean, rstd, gamma, d_sum, d_gamma, add, .. } => {
                let dtype = compute("sum", sum);
                is("sum", sum, dtype, sum.rows, sum.cols);
                is("d_out", d_out, dtype, sum.rows, sum.cols);
                if let Some(mean) = mean {
                    is("mean", mean, F32, sum.rows, 1);
                }
                is("rstd", rstd, F32, sum.rows, 1);
                is("gamma", gamma, dtype, 1, sum.cols);
                is("d_sum", d_sum, dtype, sum.rows, sum.cols);
                is("d_gamma", d_gamma, add.dtype(), 1, sum.cols);
                leaf_divides(add, sum.rows);
            }
            Linear { x, w, bias, out, .. } => {
                is("x", x, compute("x", x), x.rows, x.cols);
                is("w", w, x.dtype, w.rows, x.cols);
                if let Some(bias) = bias {
                    is("bias", bias, x.dtype, 1, w.rows);
                }
                is("out", out, x.dtype, x.rows, w.rows);
            }
            AddBias { bias, x } => {
                is("x", x, compute("x", x), x.rows, x.cols);
                is("bias", bias, x.dtype, 1, x.cols);
            }
            LinearDx { d_out, w, d_x, .. } => {
                is("d_out", d_out, compute("d_out", d_out), d_out.rows, d_out.cols);
                is("w", w, d_out.dtype, d_out.cols, w.cols);
                is("d_x", d_x, d_out.dtype, d_out.rows, w.cols);
            }
            LinearDw { d_out, x, acc, add } => {
                is("d_out", d_out, compute("d_out", d_out), x.rows, d_out.cols);
                is("x", x, d_out.dtype, x.rows, x.cols);
                is("acc", acc, add.dtype(), d_out.cols, x.cols);
                leaf_divides(add, x.rows);
            }
            Rope { qkv, positions, table, heads, .. } => {
                is("qkv", qkv, compute("qkv", qkv), qkv.rows, heads.qkv_cols());
                is("positions", positions, I32, qkv.rows, 1);
                is("table", table, F32, table.rows, heads.head_dim);
                divides("a pair", 2, heads.head_dim);
            }
            PackKv { qkv, kv, heads } => {
                is("qkv", qkv, compute("qkv", qkv), qkv.rows, heads.qkv_cols());
                is("kv", kv, qkv.dtype, qkv.rows, heads.kv_cols());
            }
            UnpackKv { d_kv, d_qkv, heads } => {
                is("d_kv", d_kv, F32, d_kv.rows, heads.kv_cols());
                is("d_qkv", d_qkv, compute("d_qkv", d_qkv), d_kv.rows, heads.qkv_cols());
            }
            Attention { inputs, out, lse } => is_attention(inputs, out, lse),
            AttentionBackward { inputs, out, lse, d_out, d_qkv, d_kv, add } => {
                is_attention(inputs, out, lse);
                let AttentionInputs { qkv, kv, heads, tile, .. } = inputs;
                is("d_out", d_out, qkv.dtype, qkv.rows, heads.out_cols());
                is("d_qkv", d_qkv, qkv.dtype, qkv.rows, heads.qkv_cols());
                is("d_kv", d_kv, add.dtype(), kv.rows, heads.kv_cols());
                if let Accumulate::Fixed { leaf, .. } = add {
                    assert_eq!(leaf, tile, "{name}: a leaf that is no tile");
                }
            }
            Activate { activation, x, out } => {
                is("x", x, compute("x", x), out.rows, activation.inputs() * out.cols);
                is("out", out, x.dtype, out.rows, out.cols);
            }
            ActivateBackward { activation, d_out, x, d_x } => {
                is("d_out", d_out, compute("d_out", d_out), d_out.rows, d_out.cols);
                is("x", x, d_out.dtype, d_out.rows, activation.inputs() * d_out.cols);
                is("d_x", d_x, d_out.dtype, d_out.rows, activation.inputs() * d_out.cols);
            }
            CeMax { logits, valid, max } => {
                is("logits", logits, compute("logits", logits), logits.rows, logits.cols);
                is("max", max, F32, logits.rows, 1);
                assert!(valid <= logits.cols, "{name}: {valid} valid columns of {}", logits.cols);
            }
            CeSum { logits, max, target, valid, block, sum, picked, .. } => {
                is("logits", logits, compute("logits", logits), logits.rows, logits.cols);
                is("max", max, F32, logits.rows, 1);
                is("target", target, I32, logits.rows, 1);
                is("sum", sum, F32, logits.rows, 1);
                is("picked", picked, F32, logits.rows, 1);
                assert!(valid <= logits.cols, "{name}: {valid} valid columns of {}", logits.cols);
                divides("a block", block, logits.cols);
            }
            CeGrad { logits, max, sum, picked, target, weight, valid, loss, .. } => {
                is("logits", logits, compute("logits", logits), logits.rows, logits.cols);
                is("target", target, I32, logits.rows, 1);
                for (operand, view) in
                    [("max", max), ("sum", sum), ("picked", picked), ("weight", weight), ("loss", loss)]
                {
                    is(operand, view, F32, logits.rows, 1);
                }
                assert!(valid <= logits.cols, "{name}: {valid} valid columns of {}", logits.cols);
            }
            SumRows { x, acc, add } => {
                is("x", x, compute("x", x), x.rows, x.cols);
                is("acc", acc, add.dtype(), 1, x.cols);
                leaf_divides(add, x.rows);
            }
            Dropout { x, samples, positions, dropout, .. } => {
                is("x", x, compute("x", x), x.rows, x.cols);
                is("samples", samples, I64, x.rows, 1);
                is("positions", positions, I32, x.rows, 1);
                assert!((0.0..1.0).contains(&dropout.p), "{name}: a probability of {}", dropout.p);
            }
            FxTake { acc, out, .. } => {
                is("acc", acc, I64, acc.rows, acc.cols);
                is("out", out, F32, acc.rows, acc.cols);
            }
            SquareNorm { x, limbs } => {
                is("x", x, F32, x.rows, x.cols);
                is("limbs", limbs, I64, 1, 6);
            }
            AdamW { w, m, v, g, .. } => {
                for (operand, view) in [("w", w), ("m", m), ("v", v), ("g", g)] {
                    is(operand, view, F32, w.rows, w.cols);
                    assert!(view.is_contiguous(), "{name}: `{operand}` is strided");
                }
            }
        }
    }
}
