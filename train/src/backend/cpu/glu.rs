//! SwiGLU.

use super::gemm::widest;
use super::{Matrix, MatrixMut};
use crate::numerics::exp;

pub(super) fn forward(gate_up: Matrix<'_, f32>, mut out: MatrixMut<'_, f32>) {
    widest(
        #[inline(always)]
        || {
            for (row, gate_up) in gate_up.iter().enumerate() {
                let out = out.row(row);
                let (gate, up) = gate_up.split_at(out.len());
                for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                    *out = gate * sigmoid(*gate) * up;
                }
            }
        },
    )
}

pub(super) fn backward(d_out: Matrix<'_, f32>, gate_up: Matrix<'_, f32>, mut d_gate_up: MatrixMut<'_, f32>) {
    widest(
        #[inline(always)]
        || {
            for (row, d_out) in d_out.iter().enumerate() {
                let (gate, up) = gate_up.row(row).split_at(d_out.len());
                let (d_gate, d_up) = d_gate_up.row(row).split_at_mut(d_out.len());
                for ((((d_gate, d_up), d_out), gate), up) in
                    d_gate.iter_mut().zip(d_up).zip(d_out).zip(gate).zip(up)
                {
                    let sigmoid = sigmoid(*gate);
                    *d_gate = d_out * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)));
                    *d_up = d_out * (gate * sigmoid);
                }
            }
        },
    )
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}
