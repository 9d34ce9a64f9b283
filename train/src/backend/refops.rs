//! Every operation again, naive, in f64: what tests compare with.

use super::Heads;
use crate::config::Activation;

/// A row-major matrix.
#[derive(Clone, Debug)]
pub(crate) struct Mat {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) data: Vec<f64>,
}

impl Mat {
    pub(crate) fn zeros(rows: usize, cols: usize) -> Self {
        Mat { rows, cols, data: vec![0.0; rows * cols] }
    }

    pub(crate) fn from_fn(rows: usize, cols: usize, f: impl Fn(usize, usize) -> f64) -> Self {
        let data = (0..rows * cols).map(|at| f(at / cols, at % cols)).collect();
        Mat { rows, cols, data }
    }

    pub(crate) fn transposed(&self) -> Self {
        Mat::from_fn(self.cols, self.rows, |row, col| self[(col, row)])
    }
}

impl std::ops::Index<(usize, usize)> for Mat {
    type Output = f64;

    fn index(&self, (row, col): (usize, usize)) -> &f64 {
        assert!(col < self.cols);
        &self.data[row * self.cols + col]
    }
}

impl std::ops::IndexMut<(usize, usize)> for Mat {
    fn index_mut(&mut self, (row, col): (usize, usize)) -> &mut f64 {
        assert!(col < self.cols);
        &mut self.data[row * self.cols + col]
    }
}

/// `a · b`.
pub(crate) fn matmul(a: &Mat, b: &Mat) -> Mat {
    assert_eq!(a.cols, b.rows);
    Mat::from_fn(a.rows, b.cols, |row, col| (0..a.cols).map(|k| a[(row, k)] * b[(k, col)]).sum())
}

/// `table[token - first_row]`, or zeros.
pub(crate) fn embed(tokens: &[i32], table: &Mat, first_row: i32) -> Mat {
    Mat::from_fn(tokens.len(), table.cols, |t, col| {
        let row = tokens[t] - first_row;
        if (0..table.rows as i32).contains(&row) { table[(row as usize, col)] } else { 0.0 }
    })
}

pub(crate) fn embed_backward(tokens: &[i32], d_out: &Mat, first_row: i32, rows: usize) -> Mat {
    let mut d_table = Mat::zeros(rows, d_out.cols);
    for (t, token) in tokens.iter().enumerate() {
        let row = token - first_row;
        if (0..rows as i32).contains(&row) {
            for col in 0..d_out.cols {
                d_table[(row as usize, col)] += d_out[(t, col)];
            }
        }
    }
    d_table
}

/// `x[t] + bias`.
pub(crate) fn add_bias(x: &Mat, bias: &Mat) -> Mat {
    Mat::from_fn(x.rows, x.cols, |row, col| x[(row, col)] + bias[(0, col)])
}

/// Sums over rows, `[1, cols]`.
pub(crate) fn sum_rows(x: &Mat) -> Mat {
    Mat::from_fn(1, x.cols, |_, col| (0..x.rows).map(|row| x[(row, col)]).sum())
}

/// Mean of each row, `[rows, 1]`.
pub(crate) fn mean(x: &Mat) -> Mat {
    Mat::from_fn(x.rows, 1, |row, _| (0..x.cols).map(|col| x[(row, col)]).sum::<f64>() / x.cols as f64)
}

/// `x` less the mean of its row.
pub(crate) fn center(x: &Mat) -> Mat {
    let mean = mean(x);
    Mat::from_fn(x.rows, x.cols, |row, col| x[(row, col)] - mean[(row, 0)])
}

/// 1 / rms of each row.
pub(crate) fn rstd(x: &Mat, eps: f64) -> Mat {
    Mat::from_fn(x.rows, 1, |row, _| {
        let squares: f64 = (0..x.cols).map(|col| x[(row, col)].powi(2)).sum();
        1.0 / (squares / x.cols as f64 + eps).sqrt()
    })
}

/// `x · rstd · gamma`.
pub(crate) fn norm(x: &Mat, gamma: &Mat, eps: f64) -> Mat {
    let rstd = rstd(x, eps);
    Mat::from_fn(x.rows, x.cols, |row, col| x[(row, col)] * rstd[(row, 0)] * gamma[(0, col)])
}

/// LayerNorm.
pub(crate) fn layer_norm(x: &Mat, gamma: &Mat, beta: &Mat, eps: f64) -> Mat {
    add_bias(&norm(&center(x), gamma, eps), beta)
}

/// Gradients of `x` and `gamma`; that of `beta` is `sum_rows` of `d_out`.
pub(crate) fn layer_norm_backward(d_out: &Mat, x: &Mat, gamma: &Mat, eps: f64) -> (Mat, Mat) {
    let (d_centered, d_gamma) = norm_backward(d_out, &center(x), gamma, eps);
    // Centering is its own transpose.
    (center(&d_centered), d_gamma)
}

/// Gradients of `x` and `gamma`.
pub(crate) fn norm_backward(d_out: &Mat, x: &Mat, gamma: &Mat, eps: f64) -> (Mat, Mat) {
    let rstd = rstd(x, eps);
    let x_hat = Mat::from_fn(x.rows, x.cols, |row, col| x[(row, col)] * rstd[(row, 0)]);
    let g = Mat::from_fn(x.rows, x.cols, |row, col| d_out[(row, col)] * gamma[(0, col)]);
    let d_x = Mat::from_fn(x.rows, x.cols, |row, col| {
        let mean = (0..x.cols).map(|k| g[(row, k)] * x_hat[(row, k)]).sum::<f64>() / x.cols as f64;
        rstd[(row, 0)] * (g[(row, col)] - x_hat[(row, col)] * mean)
    });
    let d_gamma =
        Mat::from_fn(1, x.cols, |_, col| (0..x.rows).map(|row| d_out[(row, col)] * x_hat[(row, col)]).sum());
    (d_x, d_gamma)
}

/// Rotates the query and key heads of `qkv`; `angle(row, pair)`.
pub(crate) fn rope(qkv: &Mat, heads: Heads, angle: impl Fn(usize, usize) -> f64) -> Mat {
    let mut out = qkv.clone();
    let half = heads.head_dim / 2;
    for row in 0..qkv.rows {
        for group in 0..heads.groups {
            let queries = (0..heads.queries_per_group).map(|query| heads.query(group, query));
            for head in queries.chain([heads.key(group)]) {
                for pair in 0..half {
                    let (a, b) = (qkv[(row, head + pair)], qkv[(row, head + half + pair)]);
                    let (sin, cos) = angle(row, pair).sin_cos();
                    out[(row, head + pair)] = a * cos - b * sin;
                    out[(row, head + half + pair)] = b * cos + a * sin;
                }
            }
        }
    }
    out
}

/// Attention's inputs beside queries and keys. Row t of the queries belongs to sample t · batch / M.
pub(crate) struct Attention<'a> {
    pub(crate) heads: Heads,
    pub(crate) batch: usize,
    pub(crate) positions: &'a [i32],
    /// Position of the first key that each query row sees.
    pub(crate) first_keys: &'a [i32],
    /// What a weight is multiplied by: (row, local head, key position).
    pub(crate) mask: &'a dyn Fn(usize, usize, usize) -> f64,
}

impl Attention<'_> {
    /// Row of `kv` where the keys of query row `row` begin, and how many it sees.
    fn keys(&self, row: usize, queries: &Mat, kv: &Mat) -> (usize, usize) {
        let sample = row * self.batch / queries.rows;
        (sample * kv.rows / self.batch, self.positions[row] as usize + 1)
    }

    /// (group, local head, first query column) of each query head.
    fn query_heads(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let heads = self.heads;
        (0..heads.num_queries()).map(move |head| {
            let (group, query) = (head / heads.queries_per_group, head % heads.queries_per_group);
            (group, head, heads.query(group, query))
        })
    }

    /// Softmax weights of a query over the keys it sees, and the log-sum-exp.
    fn weights(&self, qkv: &Mat, kv: &Mat, row: usize, group: usize, query_col: usize) -> (Vec<f64>, f64) {
        let d = self.heads.head_dim;
        let (first, seen) = self.keys(row, qkv, kv);
        let scores: Vec<f64> = (0..seen)
            .map(|key| {
                let dot: f64 =
                    (0..d).map(|i| qkv[(row, query_col + i)] * kv[(first + key, 2 * group * d + i)]).sum();
                let is_hidden = (key as i32) < self.first_keys[row];
                if is_hidden { f64::NEG_INFINITY } else { dot / (d as f64).sqrt() }
            })
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = max + scores.iter().map(|score| (score - max).exp()).sum::<f64>().ln();
        (scores.iter().map(|score| (score - lse).exp()).collect(), lse)
    }

    /// `out` and `lse`.
    pub(crate) fn forward(&self, qkv: &Mat, kv: &Mat) -> (Mat, Mat) {
        let d = self.heads.head_dim;
        let mut out = Mat::zeros(qkv.rows, self.heads.out_cols());
        let mut lses = Mat::zeros(qkv.rows, self.heads.num_queries());
        for row in 0..qkv.rows {
            for (group, head, query_col) in self.query_heads() {
                let (weights, lse) = self.weights(qkv, kv, row, group, query_col);
                let (first, _) = self.keys(row, qkv, kv);
                lses[(row, head)] = lse;
                for (key, weight) in weights.iter().enumerate() {
                    for i in 0..d {
                        out[(row, head * d + i)] +=
                            weight * (self.mask)(row, head, key) * kv[(first + key, (2 * group + 1) * d + i)];
                    }
                }
            }
        }
        (out, lses)
    }

    /// Gradients of the query columns of `qkv` (other columns zero) and of `kv`.
    pub(crate) fn backward(&self, qkv: &Mat, kv: &Mat, d_out: &Mat) -> (Mat, Mat) {
        let d = self.heads.head_dim;
        let mut d_qkv = Mat::zeros(qkv.rows, qkv.cols);
        let mut d_kv = Mat::zeros(kv.rows, kv.cols);
        for row in 0..qkv.rows {
            for (group, head, query_col) in self.query_heads() {
                let (weights, _) = self.weights(qkv, kv, row, group, query_col);
                let (first, _) = self.keys(row, qkv, kv);
                let (key_col, value_col) = (2 * group * d, (2 * group + 1) * d);
                let d_weights: Vec<f64> = (0..weights.len())
                    .map(|key| {
                        let dot: f64 = (0..d)
                            .map(|i| d_out[(row, head * d + i)] * kv[(first + key, value_col + i)])
                            .sum();
                        dot * (self.mask)(row, head, key)
                    })
                    .collect();
                let delta: f64 =
                    weights.iter().zip(&d_weights).map(|(weight, d_weight)| weight * d_weight).sum();
                for (key, weight) in weights.iter().enumerate() {
                    let d_score = weight * (d_weights[key] - delta) / (d as f64).sqrt();
                    for i in 0..d {
                        d_qkv[(row, query_col + i)] += d_score * kv[(first + key, key_col + i)];
                        d_kv[(first + key, key_col + i)] += d_score * qkv[(row, query_col + i)];
                        d_kv[(first + key, value_col + i)] +=
                            weight * (self.mask)(row, head, key) * d_out[(row, head * d + i)];
                    }
                }
            }
        }
        (d_qkv, d_kv)
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// tanh of what the tanh form of GELU takes it of, and the derivative of that argument.
fn gelu_tanh(x: f64) -> (f64, f64) {
    let scale = (2.0 / std::f64::consts::PI).sqrt();
    ((scale * (x + 0.044_715 * x.powi(3))).tanh(), scale * (1.0 + 3.0 * 0.044_715 * x * x))
}

/// The normal distribution.
fn phi(x: f64) -> f64 {
    0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)
}

pub(crate) fn activate(activation: Activation, x: &Mat) -> Mat {
    let f = x.cols / activation.inputs();
    Mat::from_fn(x.rows, f, |row, col| {
        let value = x[(row, col)];
        match activation {
            Activation::Swiglu => value * sigmoid(value) * x[(row, f + col)],
            Activation::Gelu => value * phi(value),
            Activation::GeluTanh => value * (1.0 + gelu_tanh(value).0) / 2.0,
        }
    })
}

pub(crate) fn activate_backward(activation: Activation, d_out: &Mat, x: &Mat) -> Mat {
    let f = d_out.cols;
    Mat::from_fn(x.rows, x.cols, |row, col| {
        let value = x[(row, col % f)];
        let factor = match activation {
            Activation::Swiglu if col < f => {
                let s = sigmoid(value);
                x[(row, f + col)] * s * (1.0 + value * (1.0 - s))
            }
            Activation::Swiglu => value * sigmoid(value),
            Activation::Gelu => {
                phi(value) + value * (-0.5 * value * value).exp() / (2.0 * std::f64::consts::PI).sqrt()
            }
            Activation::GeluTanh => {
                let (tanh, slope) = gelu_tanh(value);
                (1.0 + tanh + value * (1.0 - tanh * tanh) * slope) / 2.0
            }
        };
        d_out[(row, col % f)] * factor
    })
}

/// Weighted token losses over the first `valid` columns.
pub(crate) fn cross_entropy(logits: &Mat, valid: usize, targets: &[i32], weights: &[f64]) -> Mat {
    Mat::from_fn(logits.rows, 1, |row, _| {
        let lse = (0..valid).map(|col| logits[(row, col)].exp()).sum::<f64>().ln();
        weights[row] * (lse - logits[(row, targets[row] as usize)])
    })
}

/// Gradient of the sum of losses.
pub(crate) fn cross_entropy_backward(logits: &Mat, valid: usize, targets: &[i32], weights: &[f64]) -> Mat {
    Mat::from_fn(logits.rows, logits.cols, |row, col| {
        if col >= valid {
            return 0.0;
        }
        let sum: f64 = (0..valid).map(|col| logits[(row, col)].exp()).sum();
        let hit = if targets[row] == col as i32 { 1.0 } else { 0.0 };
        weights[row] * (logits[(row, col)].exp() / sum - hit)
    })
}

/// Gradients are what central differences say.
mod tests {
    use super::*;
    use crate::rng;

    fn random(name: &str, rows: usize, cols: usize) -> Mat {
        let mut values = vec![0.0; rows * cols];
        rng::init_normal(1, name, 0..values.len() as u64, 1.0, &mut values);
        Mat { rows, cols, data: values.into_iter().map(f64::from).collect() }
    }

    /// Compares `gradient` with the differences of Σ d_out · f(x) where x moves by ±1e-5 in one element: what is left out is
    /// of the order of 1e-10 (third derivatives) and 1e-11 (rounding).
    #[track_caller]
    fn check(x: &Mat, d_out: &Mat, gradient: &Mat, f: impl Fn(&Mat) -> Mat) {
        assert_eq!((x.rows, x.cols), (gradient.rows, gradient.cols));
        let loss = |at: usize, step: f64| {
            let mut x = x.clone();
            x.data[at] += step;
            let out = f(&x);
            assert_eq!((out.rows, out.cols), (d_out.rows, d_out.cols));
            out.data.iter().zip(&d_out.data).map(|(out, d_out)| out * d_out).sum::<f64>()
        };
        for (at, gradient) in gradient.data.iter().enumerate() {
            let difference = (loss(at, 1e-5) - loss(at, -1e-5)) / 2e-5;
            assert!(
                (difference - gradient).abs() < 1e-7,
                "element {at}: {gradient}, differences say {difference}"
            );
        }
    }

    #[test]
    fn of_products() {
        let (x, w, d_out) = (random("x", 3, 4), random("w", 5, 4), random("d", 3, 5));
        check(&x, &d_out, &matmul(&d_out, &w), |x| matmul(x, &w.transposed()));
        check(&w, &d_out, &matmul(&d_out.transposed(), &x), |w| matmul(&x, &w.transposed()));
    }

    #[test]
    fn of_the_embedding() {
        let (tokens, table, d_out) = ([4, 2, 9, 2], random("table", 4, 3), random("d", 4, 3));
        check(&table, &d_out, &embed_backward(&tokens, &d_out, 2, 4), |table| embed(&tokens, table, 2));
    }

    #[test]
    fn of_the_norm() {
        let (x, gamma, d_out) = (random("x", 3, 7), random("gamma", 1, 7), random("d", 3, 7));
        let (d_x, d_gamma) = norm_backward(&d_out, &x, &gamma, 1e-5);
        check(&x, &d_out, &d_x, |x| norm(x, &gamma, 1e-5));
        check(&gamma, &d_out, &d_gamma, |gamma| norm(&x, gamma, 1e-5));
    }

    #[test]
    fn of_the_norm_about_the_mean() {
        let [x, d_out] = ["x", "d"].map(|name| random(name, 3, 7));
        let [gamma, beta] = ["gamma", "beta"].map(|name| random(name, 1, 7));
        let (d_x, d_gamma) = layer_norm_backward(&d_out, &x, &gamma, 1e-5);
        check(&x, &d_out, &d_x, |x| layer_norm(x, &gamma, &beta, 1e-5));
        check(&gamma, &d_out, &d_gamma, |gamma| layer_norm(&x, gamma, &beta, 1e-5));
        check(&beta, &d_out, &sum_rows(&d_out), |beta| layer_norm(&x, &gamma, beta, 1e-5));
    }

    #[test]
    fn of_rotary_positions() {
        let heads = Heads { groups: 2, queries_per_group: 2, head_dim: 4 };
        let (qkv, d_out) = (random("qkv", 2, heads.qkv_cols()), random("d", 2, heads.qkv_cols()));
        let angle = |row: usize, pair: usize| (row + 1) as f64 / (pair + 2) as f64;
        let backward = rope(&d_out, heads, |row, pair| -angle(row, pair));
        check(&qkv, &d_out, &backward, |qkv| rope(qkv, heads, angle));
    }

    #[test]
    fn of_attention() {
        let heads = Heads { groups: 2, queries_per_group: 2, head_dim: 3 };
        let mask = |row: usize, head: usize, key: usize| [0.0, 1.5, 1.5][(row + 2 * head + key) % 3];
        let attention =
            Attention { heads, batch: 2, positions: &[1, 3, 0, 2], first_keys: &[0, 2, 0, 1], mask: &mask };
        let (qkv, kv) = (random("qkv", 4, heads.qkv_cols()), random("kv", 8, heads.kv_cols()));
        let d_out = random("d", 4, heads.out_cols());
        let (d_qkv, d_kv) = attention.backward(&qkv, &kv, &d_out);
        check(&qkv, &d_out, &d_qkv, |qkv| attention.forward(qkv, &kv).0);
        check(&kv, &d_out, &d_kv, |kv| attention.forward(&qkv, kv).0);
    }

    #[test]
    fn of_activations() {
        for activation in [Activation::Swiglu, Activation::Gelu, Activation::GeluTanh] {
            let (x, d_out) = (random("x", 2, 3 * activation.inputs()), random("d", 2, 3));
            check(&x, &d_out, &activate_backward(activation, &d_out, &x), |x| activate(activation, x));
        }
    }

    #[test]
    fn of_cross_entropy() {
        let (logits, targets, weights) = (random("logits", 3, 6), [0, 4, 2], [1.0, 0.0, 0.5]);
        let ones = Mat::from_fn(3, 1, |_, _| 1.0);
        let gradient = cross_entropy_backward(&logits, 5, &targets, &weights);
        check(&logits, &ones, &gradient, |logits| cross_entropy(logits, 5, &targets, &weights));
    }
}
