// Sums over rows: gradients of what is shared by all tokens, and of losses. One thread a column.

/// What is summed: x, or the gradient of a norm's scale, x times what the norm was of.
template <typename T>
struct Summand {
    Mat<T> x;
    /// Where there is one: its mean (where there is one) is subtracted, and it is multiplied by `rstd`.
    Mat<T> normed;
    Mat<float> mean;
    Mat<float> rstd;

    /// The sum over rows `[first, last)` of a column, in order.
    __device__ float sum(long long col, long long first, long long last) const {
        float total = 0.0f;
        for (long long row = first; row < last; row++) {
            float term = widen(x.row(row)[col]);
            if (normed.data) {
                float mean_of = mean.data ? *mean.row(row) : 0.0f;
                term *= (widen(normed.row(row)[col]) - mean_of) * *rstd.row(row);
            }
            total += term;
        }
        return total;
    }
};

template <typename T>
__device__ void sum_columns_fixed(Summand<T> summand, Mat<long long> acc, long long leaf, Fixed fixed) {
    const long long col = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    unsigned largest = 0;
    if (col < acc.cols) {
        unsigned long long total = 0;
        for (long long first = blockIdx.y * leaf; first < summand.x.rows; first += gridDim.y * leaf) {
            total += (unsigned long long)fixed.of(summand.sum(col, first, first + leaf), largest);
        }
        add_fixed(acc.data + col, (long long)total);
    }
    fixed.note(largest);
}

/// acc += the sum, leaf by leaf, in fixed point; leaves are dealt out over y.
extern "C" __global__ void sum_columns_fixed_f32(Summand<float> summand, Mat<long long> acc, long long leaf, Fixed fixed) {
    sum_columns_fixed(summand, acc, leaf, fixed);
}
extern "C" __global__ void sum_columns_fixed_bf16(Summand<bf16> summand, Mat<long long> acc, long long leaf, Fixed fixed) {
    sum_columns_fixed(summand, acc, leaf, fixed);
}

template <typename T>
__device__ void sum_columns_float(Summand<T> summand, Mat<float> partial, long long rows_per_part) {
    const long long col = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (col >= partial.cols) return;
    const long long first = blockIdx.y * rows_per_part, rows = summand.x.rows;
    const long long last = first + rows_per_part < rows ? first + rows_per_part : rows;
    partial.row(blockIdx.y)[col] = summand.sum(col, first, last);
}

/// The sum in f32, first stage: row y of `partial` is that over `rows_per_part` rows.
extern "C" __global__ void sum_columns_float_f32(Summand<float> summand, Mat<float> partial, long long rows_per_part) {
    sum_columns_float(summand, partial, rows_per_part);
}
extern "C" __global__ void sum_columns_float_bf16(Summand<bf16> summand, Mat<float> partial, long long rows_per_part) {
    sum_columns_float(summand, partial, rows_per_part);
}

/// Second stage: acc += the sum of the rows of `partial`.
extern "C" __global__ void add_column_sums(Mat<float> partial, Mat<float> acc) {
    const long long col = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (col >= partial.cols) return;
    float total = 0.0f;
    for (long long row = 0; row < partial.rows; row++) total += partial.row(row)[col];
    acc.data[col] += total;
}
