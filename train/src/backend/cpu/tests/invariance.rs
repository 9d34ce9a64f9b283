//! The same bits, whatever rows, leaves and heads the work is cut into.

use super::*;
use std::ops::Range;

/// What `ops` writes into `outputs` when the rows `0..m` are run part by part.
fn run_parts(parts: &[Range<usize>], program: impl Fn(&mut Bench) -> Program) -> Vec<Vec<u8>> {
    let mut bench = Bench::new(CANONICAL);
    let Program { outputs, ops } = program(&mut bench);
    for part in parts {
        ops(part.clone()).into_iter().for_each(|op| bench.run(op));
    }
    outputs.into_iter().map(|output| bench.bytes(output)).collect()
}

struct Program {
    outputs: Vec<View>,
    /// The operations for some of the rows.
    ops: Box<dyn Fn(Range<usize>) -> Vec<Op>>,
}

/// Every operation that works on tokens, with a bench of `m` of them.
fn every_token_operation(bench: &mut Bench, seed: u32, m: usize, leaf: usize) -> Program {
    let heads = Heads { groups: 2, queries_per_group: 2, head_dim: 6 };
    let (h, f, n, vocabulary, rows_of_shard) = (21, 19, 37, 24, 10);
    let mut input = |name: &str, rows: usize, cols: usize| bench.input(&random(seed, name, rows, cols));
    let (x, delta, d_out) = (input("x", m, h), input("delta", m, h), input("d_out", m, h));
    let (gamma, w, table) = (input("gamma", 1, h), input("w", n, h), input("table", rows_of_shard, h));
    let (beta, bias, biased) = (input("beta", 1, h), input("bias", 1, n), input("biased", m, n));
    let (d_n, gate_up, d_f) = (input("d_n", m, n), input("gate_up", m, 2 * f), input("d_f", m, f));
    let (qkv, angles, dropped) =
        (input("qkv", m, heads.qkv_cols()), input("angles", 32, 6), input("dropped", m, h));
    let (logits, weight) = (input("logits", m, vocabulary), input("weight", m, 1));
    let tokens = bench.i32s(&random_below(seed, m, 20));
    let positions = bench.i32s(&random_below(seed, m, 32));
    let samples = bench.i64s(&(0..m as i64).collect::<Vec<_>>());
    let mut output = |rows: usize, cols: usize| bench.output(rows, cols);
    let (sum, rstd, normed, again, d_sum) =
        (output(m, h), output(m, 1), output(m, h), output(m, h), output(m, h));
    let (out, d_x, embedded) = (output(m, n), output(m, h), output(m, h));
    let activated: Vec<(Activation, View, View, View)> = (ACTIVATIONS.iter())
        .map(|activation| {
            let cols = activation.inputs() * f;
            (*activation, gate_up.col_range(0, cols), output(m, f), output(m, cols))
        })
        .collect();
    let (mean, centered, centered_again, d_centered) =
        (output(m, 1), output(m, h), output(m, h), output(m, h));
    let (sum_again, rstd_centered) = (output(m, h), output(m, 1));
    let (kv, max, exp_sum, picked, loss) =
        (output(m, heads.kv_cols()), output(m, 1), output(m, 1), output(m, 1), output(m, 1));
    let (d_gamma, d_w, d_table) = (bench.acc(1, h), bench.acc(n, h), bench.acc(rows_of_shard, h));
    let (total, d_bias, d_gamma_centered) = (bench.acc(1, 1), bench.acc(1, n), bench.acc(1, h));
    let mut outputs = vec![
        sum,
        rstd,
        normed,
        again,
        d_sum,
        mean,
        sum_again,
        rstd_centered,
        centered,
        centered_again,
        d_centered,
        d_gamma_centered,
        out,
        biased,
        d_bias,
        d_x,
        embedded,
        qkv,
        kv,
        dropped,
        logits,
        max,
        exp_sum,
        picked,
        loss,
        d_gamma,
        d_w,
        d_table,
        total,
    ];
    outputs.extend(activated.iter().flat_map(|(_, _, out, d_x)| [*out, *d_x]));
    let ops = move |rows: Range<usize>| {
        let r = |view: View| view.row_range(rows.start, rows.end);
        let (dropout, add) = (Dropout { p: 0.4, seed, layer: 2 }, CANONICAL.add(leaf));
        let activations = activated.iter().flat_map(|(activation, x, out, d_x)| {
            let activation = *activation;
            [
                Op::Activate { activation, x: r(*x), out: r(*out) },
                Op::ActivateBackward { activation, d_out: r(d_f), x: r(*x), d_x: r(*d_x) },
            ]
        });
        let center = Some(Center { mean: r(mean), beta });
        let ops = vec![
            Op::AddNorm {
                x: r(x),
                delta: Some(r(delta)),
                gamma,
                center: None,
                eps: 1e-5,
                sum: r(sum),
                rstd: r(rstd),
                out: r(normed),
            },
            Op::NormApply { sum: r(sum), rstd: r(rstd), gamma, center: None, out: r(again) },
            Op::AddNorm {
                x: r(x),
                delta: None,
                gamma,
                center,
                eps: 1e-5,
                sum: r(sum_again),
                rstd: r(rstd_centered),
                out: r(centered),
            },
            Op::NormApply {
                sum: r(sum_again),
                rstd: r(rstd_centered),
                gamma,
                center,
                out: r(centered_again),
            },
            Op::NormBackward {
                d_out: r(d_out),
                sum: r(sum_again),
                mean: Some(r(mean)),
                rstd: r(rstd_centered),
                gamma,
                d_sum: r(d_centered),
                accumulate: false,
                d_gamma: d_gamma_centered,
                add,
            },
            Op::NormBackward {
                d_out: r(d_out),
                sum: r(sum),
                mean: None,
                rstd: r(rstd),
                gamma,
                d_sum: r(d_sum),
                accumulate: false,
                d_gamma,
                add,
            },
            Op::Linear { x: r(x), w, bias: Some(bias), out: r(out), accumulate: false },
            Op::AddBias { bias, x: r(biased) },
            Op::SumRows { x: r(d_n), acc: d_bias, add },
            Op::LinearDx { d_out: r(d_n), w, d_x: r(d_x), accumulate: false },
            Op::LinearDw { d_out: r(d_n), x: r(x), acc: d_w, add },
            Op::Embed { tokens: r(tokens), table, first_row: 3, out: r(embedded), accumulate: false },
            Op::Embed { tokens: r(tokens), table, first_row: 3, out: r(embedded), accumulate: true },
            Op::EmbedBackward {
                tokens: r(tokens),
                d_out: r(d_out),
                first_row: 3,
                acc: d_table,
                add: CANONICAL.add(1),
            },
            Op::Rope { qkv: r(qkv), positions: r(positions), table: angles, heads, inverse: false },
            Op::PackKv { qkv: r(qkv), kv: r(kv), heads },
            Op::Dropout {
                x: r(dropped),
                samples: r(samples),
                positions: r(positions),
                dropout,
                site: HiddenSite::Embedding,
            },
            Op::CeMax { logits: r(logits), valid: 20, max: r(max) },
            Op::CeSum {
                logits: r(logits),
                max: r(max),
                target: r(tokens),
                first_col: 0,
                valid: 20,
                block: 6,
                sum: r(exp_sum),
                picked: r(picked),
            },
            Op::CeGrad {
                logits: r(logits),
                max: r(max),
                sum: r(exp_sum),
                picked: r(picked),
                target: r(tokens),
                weight: r(weight),
                first_col: 0,
                valid: 20,
                loss: r(loss),
            },
            Op::SumRows { x: r(loss), acc: total, add },
        ];
        ops.into_iter().chain(activations).collect()
    };
    Program { outputs, ops: Box::new(ops) }
}

/// The queries of some leaves and some query groups.
struct Part {
    /// Leaves of each sample, by their place in the sequence.
    leaves: Vec<usize>,
    groups: Range<usize>,
}

/// Bits of what attention gives for a part.
struct AttentionBits {
    out: Vec<u32>,
    lse: Vec<u32>,
    d_queries: Vec<u32>,
    d_kv: Vec<i64>,
}

const HEADS: Heads = Heads { groups: 4, queries_per_group: 2, head_dim: 5 };
const LEAVES: usize = 8;

fn attention(
    seed: u32,
    batch: Range<usize>,
    leaf: usize,
    part: &Part,
    with_documents: bool,
) -> AttentionBits {
    let t = LEAVES * leaf;
    let rows: Vec<(usize, usize)> = batch
        .clone()
        .flat_map(|sample| {
            part.leaves.iter().flat_map(move |at| (at * leaf..(at + 1) * leaf).map(move |p| (sample, p)))
        })
        .collect();
    let heads = Heads { groups: part.groups.len(), ..HEADS };
    // A column of the part's heads, in all heads with `width` columns a group.
    let select = |name: &str, rows: &[(usize, usize)], width: usize| {
        let whole = random(seed, name, 2 * t, HEADS.groups * width);
        let first = part.groups.start * width;
        let row = |at: usize| rows[at].0 * t + rows[at].1;
        Mat::from_fn(rows.len(), part.groups.len() * width, |at, col| whole[(row(at), first + col)])
    };
    let keys: Vec<(usize, usize)> =
        batch.clone().flat_map(|sample| (0..t).map(move |p| (sample, p))).collect();
    let query_width = HEADS.queries_per_group * HEADS.head_dim;
    let mut bench = Bench::new(CANONICAL);
    let qkv = bench.input(&select("qkv", &rows, HEADS.query(1, 0)));
    let kv = bench.input(&select("kv", &keys, 2 * HEADS.head_dim));
    let d_out = bench.input(&select("d_out", &rows, query_width));
    let positions = bench.i32s(&rows.iter().map(|(_, position)| *position as i32).collect::<Vec<_>>());
    // Documents of 7 tokens, whose borders lie anywhere in leaves.
    let first_key = |position: usize| (position - position % 7) as i32;
    let first_keys: Vec<i32> = rows.iter().map(|(_, position)| first_key(*position)).collect();
    let first_keys = with_documents.then(|| bench.i32s(&first_keys));
    let samples = bench.i64s(&rows.iter().map(|(sample, _)| *sample as i64).collect::<Vec<_>>());
    let (out, lse) =
        (bench.output(rows.len(), heads.out_cols()), bench.output(rows.len(), heads.num_queries()));
    let d_qkv = bench.output(rows.len(), heads.qkv_cols());
    let d_kv = bench.acc(keys.len(), heads.kv_cols());
    let (batch, first_head) = (batch.len(), (part.groups.start * HEADS.queries_per_group) as u32);
    let dropout = Some(Dropout { p: 0.1, seed, layer: 0 });
    let inputs = AttentionInputs {
        qkv,
        kv,
        positions,
        first_keys,
        samples,
        heads,
        batch,
        tile: leaf,
        dropout,
        first_head,
    };
    bench.run(Op::Attention { inputs, out, lse });
    let add = Accumulate::Fixed { leaf, bits: 40 };
    bench.run(Op::AttentionBackward { inputs, out, lse, d_out, d_qkv, d_kv, add });
    let d_queries = (0..heads.groups)
        .flat_map(|group| {
            let first = heads.query(group, 0);
            bench.bits(d_qkv.col_range(first, first + query_width))
        })
        .collect();
    AttentionBits { out: bench.bits(out), lse: bench.bits(lse), d_queries, d_kv: bench.read(d_kv) }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Row-wise results and fixed-point sums over rows, in parts that run in any order.
    #[test]
    fn any_division_of_the_rows_gives_the_same_bits(
        seed: u32, leaf in 1usize..20, cuts in prop::collection::btree_set(1usize..6, 0..4), backwards: bool,
    ) {
        let m = 6 * leaf;
        let program = |bench: &mut Bench| every_token_operation(bench, seed, m, leaf);
        let ends: Vec<usize> = cuts.iter().copied().chain([6]).collect();
        let mut parts: Vec<Range<usize>> = [0].iter().chain(&cuts).zip(ends).map(|(lo, hi)| lo * leaf..hi * leaf).collect();
        if backwards {
            parts.reverse();
        }
        prop_assert_eq!(run_parts(&parts, program), run_parts(std::slice::from_ref(&(0..m)), program));
    }

    /// Weight gradients of any rows and columns of the weight, as tensor parallel ranks have them.
    #[test]
    fn any_division_of_a_weight_gives_the_same_gradient(
        seed: u32, leaf in 1usize..40, n in 1usize..300, k in 1usize..50, cuts in prop::array::uniform4(any::<prop::sample::Index>()),
    ) {
        let m = 2 * leaf;
        let mut bench = Bench::new(CANONICAL);
        let (d_out, x) = (bench.input(&random(seed, "d", m, n)), bench.input(&random(seed, "x", m, k)));
        let (whole, part) = (bench.acc(n, k), bench.acc(n, k));
        bench.run(Op::LinearDw { d_out, x, acc: whole, add: CANONICAL.add(leaf) });
        let range = |from: usize, len: usize, extent: usize| {
            let lo = cuts[from].index(extent);
            (lo, lo + 1 + cuts[len].index(extent - lo))
        };
        let ((row, row_end), (col, col_end)) = (range(0, 1, n), range(2, 3, k));
        let block = |acc: View| acc.row_range(row, row_end).col_range(col, col_end);
        let (d_out, x) = (d_out.col_range(row, row_end), x.col_range(col, col_end));
        bench.run(Op::LinearDw { d_out, x, acc: block(part), add: CANONICAL.add(leaf) });
        prop_assert_eq!(bench.read::<i64>(block(part)), bench.read::<i64>(block(whole)));
    }

    /// Queries in zigzag chunks over context parallel ranks, heads over tensor parallel ranks, samples over micro-batches.
    #[test]
    fn attention_is_the_same_under_any_division(
        seed: u32, leaf in 1usize..5, log_cp in 0u32..3, log_tp in 0u32..3, micro_batch in 1usize..3, with_documents: bool,
    ) {
        let (cp, tp) = (1usize << log_cp, 1usize << log_tp);
        let whole = attention(seed, 0..2, leaf, &Part { leaves: (0..LEAVES).collect(), groups: 0..HEADS.groups }, with_documents);
        let t = LEAVES * leaf;
        // Elements of the whole results: rows of all tokens.
        let row_of = |bits: &[u32], row: usize, cols: Range<usize>, width: usize| bits[row * width..][cols].to_vec();
        let mut d_kv = vec![0i64; 2 * t * HEADS.kv_cols()];
        for rank in 0..tp {
            let groups = rank * HEADS.groups / tp..(rank + 1) * HEADS.groups / tp;
            let heads = Heads { groups: groups.len(), ..HEADS };
            for cp_rank in 0..cp {
                let chunk = LEAVES / (2 * cp);
                let chunk_of = |index: usize| index * chunk..(index + 1) * chunk;
                let leaves: Vec<usize> = chunk_of(cp_rank).chain(chunk_of(2 * cp - 1 - cp_rank)).collect();
                for batch in (0..2).step_by(micro_batch).map(|first| first..first + micro_batch) {
                    let part = Part { leaves: leaves.clone(), groups: groups.clone() };
                    let found = attention(seed, batch.clone(), leaf, &part, with_documents);
                    let tokens: Vec<usize> = batch
                        .clone()
                        .flat_map(|sample| leaves.iter().flat_map(move |at| (0..leaf).map(move |i| sample * t + at * leaf + i)))
                        .collect();
                    let expected = |bits: &[u32], width: usize| -> Vec<u32> {
                        let cols = groups.start * width..groups.end * width;
                        tokens.iter().flat_map(|row| row_of(bits, *row, cols.clone(), HEADS.groups * width)).collect()
                    };
                    let width = HEADS.queries_per_group * HEADS.head_dim;
                    prop_assert_eq!(&found.out, &expected(&whole.out, width));
                    prop_assert_eq!(&found.lse, &expected(&whole.lse, HEADS.queries_per_group));
                    // Gradients of queries are listed group by group.
                    let expected: Vec<u32> = groups
                        .clone()
                        .flat_map(|group| tokens.iter().map(move |row| group * 2 * t + row))
                        .flat_map(|row| row_of(&whole.d_queries, row, 0..width, width))
                        .collect();
                    prop_assert_eq!(&found.d_queries, &expected);
                    let first_col = groups.start * 2 * HEADS.head_dim;
                    for (row, keys) in found.d_kv.chunks_exact(heads.kv_cols()).enumerate() {
                        let row = batch.start * t + row;
                        let total = &mut d_kv[row * HEADS.kv_cols() + first_col..][..keys.len()];
                        total.iter_mut().zip(keys).for_each(|(total, key)| *total = total.wrapping_add(*key));
                    }
                }
            }
        }
        prop_assert_eq!(d_kv, whole.d_kv);
    }
}
