//! SwiGLU and both forms of GELU.

use super::gemm::widest;
use super::{Matrix, MatrixMut};
use crate::config::Activation;
use crate::numerics::{exp, normal};

pub(super) fn forward(activation: Activation, x: Matrix<'_, f32>, mut out: MatrixMut<'_, f32>) {
    widest(
        #[inline(always)]
        || {
            for (row, x) in x.iter().enumerate() {
                let out = out.row(row);
                match activation {
                    Activation::Swiglu => {
                        let (gate, up) = x.split_at(out.len());
                        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                            *out = gate * sigmoid(*gate) * up;
                        }
                    }
                    Activation::Gelu => {
                        for (out, x) in out.iter_mut().zip(x) {
                            *out = x * normal(*x).distribution;
                        }
                    }
                    Activation::GeluTanh => {
                        for (out, x) in out.iter_mut().zip(x) {
                            *out = x * sigmoid(tanh_argument(*x));
                        }
                    }
                }
            }
        },
    )
}

pub(super) fn backward(
    activation: Activation,
    d_out: Matrix<'_, f32>,
    x: Matrix<'_, f32>,
    mut d_x: MatrixMut<'_, f32>,
) {
    widest(
        #[inline(always)]
        || {
            for (row, d_out) in d_out.iter().enumerate() {
                let (x, d_x) = (x.row(row), d_x.row(row));
                match activation {
                    Activation::Swiglu => {
                        let (gate, up) = x.split_at(d_out.len());
                        let (d_gate, d_up) = d_x.split_at_mut(d_out.len());
                        for ((((d_gate, d_up), d_out), gate), up) in
                            d_gate.iter_mut().zip(d_up).zip(d_out).zip(gate).zip(up)
                        {
                            let sigmoid = sigmoid(*gate);
                            *d_gate = d_out * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)));
                            *d_up = d_out * (gate * sigmoid);
                        }
                    }
                    Activation::Gelu => {
                        for ((d_x, d_out), x) in d_x.iter_mut().zip(d_out).zip(x) {
                            let normal = normal(*x);
                            *d_x = d_out * (normal.distribution + x * normal.density);
                        }
                    }
                    Activation::GeluTanh => {
                        for ((d_x, d_out), x) in d_x.iter_mut().zip(d_out).zip(x) {
                            let sigmoid = sigmoid(tanh_argument(*x));
                            let slope = TWO_ROOT_2_OVER_PI * (1.0 + 3.0 * CUBIC * x * x);
                            *d_x = d_out * (sigmoid * (1.0 + x * (1.0 - sigmoid) * slope));
                        }
                    }
                }
            }
        },
    )
}

/// 2 · √(2/π)
const TWO_ROOT_2_OVER_PI: f32 = 1.595_769;
const CUBIC: f32 = 0.044_715;

/// (1 + tanh u) / 2 is the sigmoid of 2u: this is 2u.
#[inline(always)]
fn tanh_argument(x: f32) -> f32 {
    TWO_ROOT_2_OVER_PI * (x + CUBIC * x * x * x)
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}
