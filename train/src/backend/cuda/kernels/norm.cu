// RMSNorm. One block of 256 threads a row, so that a row's bits do not depend on the other rows.

template <typename T, int N>
__device__ void scale_row(const T* x, float rstd, const T* gamma, T* out, long long cols) {
    for_each_col<N>(cols, [&](long long col) {
        auto from = load<N>(x + col);
        auto scale = load<N>(gamma + col);
        Pack<T, N> to;
        for (int i = 0; i < N; i++) to.at[i] = narrow<T>(widen(from.at[i]) * rstd * widen(scale.at[i]));
        store(out + col, to);
    });
}

template <typename T, int N>
__device__ void add_norm(
    Mat<T> x, Mat<T> delta, Mat<T> gamma, float eps, Mat<T> sum, Mat<float> rstd, Mat<T> out) {
    const long long row = blockIdx.x, cols = sum.cols;
    float squares = 0.0f;
    for_each_col<N>(cols, [&](long long col) {
        auto pack = load<N>(x.row(row) + col);
        if (delta.data) {
            auto more = load<N>(delta.row(row) + col);
            for (int i = 0; i < N; i++) pack.at[i] = narrow<T>(widen(pack.at[i]) + widen(more.at[i]));
        }
        for (int i = 0; i < N; i++) squares += widen(pack.at[i]) * widen(pack.at[i]);
        store(sum.row(row) + col, pack);
    });
    float scale = 1.0f / sqrtf(sum_block(squares) / (float)cols + eps);
    if (threadIdx.x == 0) *rstd.row(row) = scale;
    // Each thread reads what it wrote.
    scale_row<T, N>(sum.row(row), scale, gamma.data, out.row(row), cols);
}

/// sum = x + delta (if there is one); rstd = 1 / sqrt(mean(sum^2) + eps); out = sum * rstd * gamma.
extern "C" __global__ void add_norm_f32(
    Mat<float> x, Mat<float> delta, Mat<float> gamma, float eps, Mat<float> sum, Mat<float> rstd, Mat<float> out, int wide) {
    wide ? add_norm<float, 4>(x, delta, gamma, eps, sum, rstd, out)
         : add_norm<float, 1>(x, delta, gamma, eps, sum, rstd, out);
}
extern "C" __global__ void add_norm_bf16(
    Mat<bf16> x, Mat<bf16> delta, Mat<bf16> gamma, float eps, Mat<bf16> sum, Mat<float> rstd, Mat<bf16> out, int wide) {
    wide ? add_norm<bf16, 8>(x, delta, gamma, eps, sum, rstd, out)
         : add_norm<bf16, 1>(x, delta, gamma, eps, sum, rstd, out);
}

/// out = sum * rstd * gamma.
extern "C" __global__ void norm_apply_f32(Mat<float> sum, Mat<float> rstd, Mat<float> gamma, Mat<float> out, int wide) {
    const long long row = blockIdx.x;
    wide ? scale_row<float, 4>(sum.row(row), *rstd.row(row), gamma.data, out.row(row), sum.cols)
         : scale_row<float, 1>(sum.row(row), *rstd.row(row), gamma.data, out.row(row), sum.cols);
}
extern "C" __global__ void norm_apply_bf16(Mat<bf16> sum, Mat<float> rstd, Mat<bf16> gamma, Mat<bf16> out, int wide) {
    const long long row = blockIdx.x;
    wide ? scale_row<bf16, 8>(sum.row(row), *rstd.row(row), gamma.data, out.row(row), sum.cols)
         : scale_row<bf16, 1>(sum.row(row), *rstd.row(row), gamma.data, out.row(row), sum.cols);
}

template <typename T, int N>
__device__ void norm_backward(
    Mat<T> d_out, Mat<T> sum, Mat<float> rstd_of, Mat<T> gamma, Mat<T> d_sum, int accumulate) {
    const long long row = blockIdx.x, cols = sum.cols;
    const float rstd = *rstd_of.row(row);
    float dot = 0.0f;
    for_each_col<N>(cols, [&](long long col) {
        auto d = load<N>(d_out.row(row) + col);
        auto x = load<N>(sum.row(row) + col);
        auto g = load<N>(gamma.data + col);
        for (int i = 0; i < N; i++) dot += widen(d.at[i]) * widen(g.at[i]) * widen(x.at[i]);
    });
    // rstd * x_hat * mean(g * x_hat) = x * this
    const float along_x = rstd * rstd * rstd * (sum_block(dot) / (float)cols);
    for_each_col<N>(cols, [&](long long col) {
        auto d = load<N>(d_out.row(row) + col);
        auto x = load<N>(sum.row(row) + col);
        auto g = load<N>(gamma.data + col);
        Pack<T, N> to = {};
        if (accumulate) to = load<N>(d_sum.row(row) + col);
        for (int i = 0; i < N; i++) {
            float gradient = rstd * (widen(d.at[i]) * widen(g.at[i])) - widen(x.at[i]) * along_x;
            to.at[i] = narrow<T>(accumulate ? widen(to.at[i]) + gradient : gradient);
        }
        store(d_sum.row(row) + col, to);
    });
}

/// d_sum (+)= rstd * (d_out * gamma - x_hat * mean(d_out * gamma * x_hat)).
extern "C" __global__ void norm_backward_f32(
    Mat<float> d_out, Mat<float> sum, Mat<float> rstd, Mat<float> gamma, Mat<float> d_sum, int accumulate, int wide) {
    wide ? norm_backward<float, 4>(d_out, sum, rstd, gamma, d_sum, accumulate)
         : norm_backward<float, 1>(d_out, sum, rstd, gamma, d_sum, accumulate);
}
extern "C" __global__ void norm_backward_bf16(
    Mat<bf16> d_out, Mat<bf16> sum, Mat<float> rstd, Mat<bf16> gamma, Mat<bf16> d_sum, int accumulate, int wide) {
    wide ? norm_backward<bf16, 8>(d_out, sum, rstd, gamma, d_sum, accumulate)
         : norm_backward<bf16, 1>(d_out, sum, rstd, gamma, d_sum, accumulate);
}

/// The sum over rows `[first, last)` of one column of d_out * x_hat.
template <typename T>
__device__ float sum_gamma(Mat<T> d_out, Mat<T> sum, Mat<float> rstd, long long col, long long first, long long last) {
    float total = 0.0f;
    for (long long row = first; row < last; row++) {
        total += widen(d_out.row(row)[col]) * (widen(sum.row(row)[col]) * *rstd.row(row));
    }
    return total;
}

/// d_gamma += sum of d_out * x_hat, leaf by leaf. One thread a column; leaves are dealt out over y.
template <typename T>
__device__ void norm_gamma_fixed(
    Mat<T> d_out, Mat<T> sum, Mat<float> rstd, Mat<long long> d_gamma, long long leaf, Fixed fixed) {
    const long long col = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    unsigned largest = 0;
    if (col < sum.cols) {
        unsigned long long total = 0;
        for (long long first = blockIdx.y * leaf; first < sum.rows; first += gridDim.y * leaf) {
            total += (unsigned long long)fixed.of(sum_gamma(d_out, sum, rstd, col, first, first + leaf), largest);
        }
        add_fixed(d_gamma.data + col, (long long)total);
    }
    fixed.note(largest);
}

extern "C" __global__ void norm_gamma_fixed_f32(
    Mat<float> d_out, Mat<float> sum, Mat<float> rstd, Mat<long long> d_gamma, long long leaf, Fixed fixed) {
    norm_gamma_fixed(d_out, sum, rstd, d_gamma, leaf, fixed);
}
extern "C" __global__ void norm_gamma_fixed_bf16(
    Mat<bf16> d_out, Mat<bf16> sum, Mat<float> rstd, Mat<long long> d_gamma, long long leaf, Fixed fixed) {
    norm_gamma_fixed(d_out, sum, rstd, d_gamma, leaf, fixed);
}

/// The same in f32, first stage: row y of `partial` is the sum over `rows_per_part` rows.
template <typename T>
__device__ void norm_gamma_float(
    Mat<T> d_out, Mat<T> sum, Mat<float> rstd, Mat<float> partial, long long rows_per_part) {
    const long long col = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (col >= sum.cols) return;
    const long long first = blockIdx.y * rows_per_part;
    const long long last = first + rows_per_part < sum.rows ? first + rows_per_part : sum.rows;
    partial.row(blockIdx.y)[col] = sum_gamma(d_out, sum, rstd, col, first, last);
}

extern "C" __global__ void norm_gamma_float_f32(
    Mat<float> d_out, Mat<float> sum, Mat<float> rstd, Mat<float> partial, long long rows_per_part) {
    norm_gamma_float(d_out, sum, rstd, partial, rows_per_part);
}
extern "C" __global__ void norm_gamma_float_bf16(
    Mat<bf16> d_out, Mat<bf16> sum, Mat<float> rstd, Mat<float> partial, long long rows_per_part) {
    norm_gamma_float(d_out, sum, rstd, partial, rows_per_part);
}

/// Second stage: acc += the sum of the rows of `partial`.
extern "C" __global__ void add_column_sums(Mat<float> partial, Mat<float> acc) {
    const long long col = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (col >= partial.cols) return;
    float total = 0.0f;
    for (long long row = 0; row < partial.rows; row++) total += partial.row(row)[col];
    acc.data[col] += total;
}
