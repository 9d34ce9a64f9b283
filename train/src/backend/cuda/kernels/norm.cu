// RMSNorm, and LayerNorm: the same about the mean of a row, with a shift. One block of 256 threads a row, so that a row's bits
// do not depend on the other rows.

/// What LayerNorm has beside RMSNorm, where there is `mean`.
template <typename T>
struct Center {
    Mat<float> mean;
    Mat<T> beta;

    __device__ float of(long long row) const { return mean.data ? *mean.row(row) : 0.0f; }
};

template <typename T, int N>
__device__ void scale_row(const T* x, float mean, float rstd, const T* gamma, const T* beta, T* out, long long cols) {
    for_each_col<N>(cols, [&](long long col) {
        auto from = load<N>(x + col);
        auto scale = load<N>(gamma + col);
        Pack<T, N> shift = {}, to;
        if (beta) shift = load<N>(beta + col);
        for (int i = 0; i < N; i++) {
            float y = (widen(from.at[i]) - mean) * rstd * widen(scale.at[i]);
            to.at[i] = narrow<T>(beta ? y + widen(shift.at[i]) : y);
        }
        store(out + col, to);
    });
}

template <typename T, int N>
__device__ void add_norm(
    Mat<T> x, Mat<T> delta, Mat<T> gamma, Center<T> center, float eps, Mat<T> sum, Mat<float> rstd, Mat<T> out) {
    const long long row = blockIdx.x, cols = sum.cols;
    float total = 0.0f, squares = 0.0f;
    for_each_col<N>(cols, [&](long long col) {
        auto pack = load<N>(x.row(row) + col);
        if (delta.data) {
            auto more = load<N>(delta.row(row) + col);
            for (int i = 0; i < N; i++) pack.at[i] = narrow<T>(widen(pack.at[i]) + widen(more.at[i]));
        }
        for (int i = 0; i < N; i++) {
            total += widen(pack.at[i]);
            squares += widen(pack.at[i]) * widen(pack.at[i]);
        }
        store(sum.row(row) + col, pack);
    });
    // From here on each thread reads what it wrote.
    float mean = 0.0f;
    if (center.mean.data) {
        mean = sum_block(total) / (float)cols;
        squares = 0.0f;
        for_each_col<N>(cols, [&](long long col) {
            auto pack = load<N>(sum.row(row) + col);
            for (int i = 0; i < N; i++) squares += (widen(pack.at[i]) - mean) * (widen(pack.at[i]) - mean);
        });
        if (threadIdx.x == 0) *center.mean.row(row) = mean;
    }
    float scale = 1.0f / sqrtf(sum_block(squares) / (float)cols + eps);
    if (threadIdx.x == 0) *rstd.row(row) = scale;
    scale_row<T, N>(sum.row(row), mean, scale, gamma.data, center.beta.data, out.row(row), cols);
}

/// sum = x + delta (if there is one); rstd = 1 / sqrt(mean((sum - mean)^2) + eps); out = (sum - mean) * rstd * gamma + beta.
extern "C" __global__ void add_norm_f32(
    Mat<float> x, Mat<float> delta, Mat<float> gamma, Center<float> center, float eps, Mat<float> sum, Mat<float> rstd,
    Mat<float> out, int wide) {
    wide ? add_norm<float, 4>(x, delta, gamma, center, eps, sum, rstd, out)
         : add_norm<float, 1>(x, delta, gamma, center, eps, sum, rstd, out);
}
extern "C" __global__ void add_norm_bf16(
    Mat<bf16> x, Mat<bf16> delta, Mat<bf16> gamma, Center<bf16> center, float eps, Mat<bf16> sum, Mat<float> rstd,
    Mat<bf16> out, int wide) {
    wide ? add_norm<bf16, 8>(x, delta, gamma, center, eps, sum, rstd, out)
         : add_norm<bf16, 1>(x, delta, gamma, center, eps, sum, rstd, out);
}

template <typename T, int N>
__device__ void norm_apply(Mat<T> sum, Mat<float> rstd, Mat<T> gamma, Center<T> center, Mat<T> out) {
    const long long row = blockIdx.x;
    scale_row<T, N>(
        sum.row(row), center.of(row), *rstd.row(row), gamma.data, center.beta.data, out.row(row), sum.cols);
}

/// out = (sum - mean) * rstd * gamma + beta.
extern "C" __global__ void norm_apply_f32(
    Mat<float> sum, Mat<float> rstd, Mat<float> gamma, Center<float> center, Mat<float> out, int wide) {
    wide ? norm_apply<float, 4>(sum, rstd, gamma, center, out) : norm_apply<float, 1>(sum, rstd, gamma, center, out);
}
extern "C" __global__ void norm_apply_bf16(
    Mat<bf16> sum, Mat<float> rstd, Mat<bf16> gamma, Center<bf16> center, Mat<bf16> out, int wide) {
    wide ? norm_apply<bf16, 8>(sum, rstd, gamma, center, out) : norm_apply<bf16, 1>(sum, rstd, gamma, center, out);
}

template <typename T, int N>
__device__ void norm_backward(
    Mat<T> d_out, Mat<T> sum, Mat<float> mean_of, Mat<float> rstd_of, Mat<T> gamma, Mat<T> d_sum, int accumulate) {
    const long long row = blockIdx.x, cols = sum.cols;
    const float rstd = *rstd_of.row(row), mean = mean_of.data ? *mean_of.row(row) : 0.0f;
    float dot = 0.0f, total = 0.0f;
    for_each_col<N>(cols, [&](long long col) {
        auto d = load<N>(d_out.row(row) + col);
        auto x = load<N>(sum.row(row) + col);
        auto scale = load<N>(gamma.data + col);
        for (int i = 0; i < N; i++) {
            float g = widen(d.at[i]) * widen(scale.at[i]);
            total += g;
            dot += g * (widen(x.at[i]) - mean);
        }
    });
    const float mean_g = mean_of.data ? sum_block(total) / (float)cols : 0.0f;
    // rstd * x_hat * mean(g * x_hat) = (x - mean) * this
    const float along_x = rstd * rstd * rstd * (sum_block(dot) / (float)cols);
    for_each_col<N>(cols, [&](long long col) {
        auto d = load<N>(d_out.row(row) + col);
        auto x = load<N>(sum.row(row) + col);
        auto scale = load<N>(gamma.data + col);
        Pack<T, N> to = {};
        if (accumulate) to = load<N>(d_sum.row(row) + col);
        for (int i = 0; i < N; i++) {
            float g = widen(d.at[i]) * widen(scale.at[i]);
            float gradient = rstd * (g - mean_g) - (widen(x.at[i]) - mean) * along_x;
            to.at[i] = narrow<T>(accumulate ? widen(to.at[i]) + gradient : gradient);
        }
        store(d_sum.row(row) + col, to);
    });
}

/// With g = d_out * gamma: d_sum (+)= rstd * (g - mean(g) - x_hat * mean(g * x_hat)), where RMSNorm has no mean(g).
extern "C" __global__ void norm_backward_f32(
    Mat<float> d_out, Mat<float> sum, Mat<float> mean, Mat<float> rstd, Mat<float> gamma, Mat<float> d_sum, int accumulate,
    int wide) {
    wide ? norm_backward<float, 4>(d_out, sum, mean, rstd, gamma, d_sum, accumulate)
         : norm_backward<float, 1>(d_out, sum, mean, rstd, gamma, d_sum, accumulate);
}
extern "C" __global__ void norm_backward_bf16(
    Mat<bf16> d_out, Mat<bf16> sum, Mat<float> mean, Mat<float> rstd, Mat<bf16> gamma, Mat<bf16> d_sum, int accumulate,
    int wide) {
    wide ? norm_backward<bf16, 8>(d_out, sum, mean, rstd, gamma, d_sum, accumulate)
         : norm_backward<bf16, 1>(d_out, sum, mean, rstd, gamma, d_sum, accumulate);
}
