// Matrix products whose bits depend on the length of the sum alone: an element adds its terms one by one, in order.

constexpr int TILE = 64;
constexpr int DEPTH = 16;
constexpr int THREADS = 256;

/// A factor of a product: element (outer, inner) lies at outer * outer_stride + inner * inner_stride.
template <typename T>
struct Factor {
    const T* data;
    long long outer_stride;
    long long inner_stride;
};

/// Copies the elements of 64 outer and 16 inner indices into `tile[inner][outer]`; zeros beyond the ends.
template <typename T>
__device__ __forceinline__ void fetch(
    float (&tile)[DEPTH][TILE + 4], Factor<T> factor, long long outer, long long outer_end, long long inner, long long inner_end) {
    // Neighbouring threads read neighbouring elements.
    const bool inner_first = factor.inner_stride == 1;
#pragma unroll
    for (int i = 0; i < TILE * DEPTH / THREADS; i++) {
        int at = threadIdx.x + i * THREADS;
        int o = inner_first ? at / DEPTH : at % TILE, k = inner_first ? at % DEPTH : at / TILE;
        bool inside = outer + o < outer_end && inner + k < inner_end;
        tile[k][o] = inside
            ? widen(factor.data[(outer + o) * factor.outer_stride + (inner + k) * factor.inner_stride])
            : 0.0f;
    }
}

/// The terms `[first, last)` of a tile of a * b; a thread has 4 x 4 elements, 16 apart.
template <typename T>
__device__ __forceinline__ void multiply(
    float (&out)[4][4], Factor<T> a, Factor<T> b, long long m, long long n, long long row, long long col, long long first,
    long long last) {
    __shared__ float a_tile[DEPTH][TILE + 4], b_tile[DEPTH][TILE + 4];
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    for (long long k = first; k < last; k += DEPTH) {
        fetch(a_tile, a, row, m, k, last);
        fetch(b_tile, b, col, n, k, last);
        __syncthreads();
        // Terms beyond the end would add +0, which turns a sum of -0 into +0: they are left out.
        int depth = last - k < DEPTH ? int(last - k) : DEPTH;
        for (int step = 0; step < depth; step++) {
            float x[4], y[4];
            for (int i = 0; i < 4; i++) x[i] = a_tile[step][ty + 16 * i];
            for (int j = 0; j < 4; j++) y[j] = b_tile[step][tx + 16 * j];
            for (int i = 0; i < 4; i++) {
                for (int j = 0; j < 4; j++) out[i][j] = fmaf(x[i], y[j], out[i][j]);
            }
        }
        __syncthreads();
    }
}

/// Calls `f(row, col, i, j)` for the elements of this thread that lie in the product.
template <typename F>
__device__ __forceinline__ void for_each_own(long long m, long long n, F f) {
    const long long row = blockIdx.y * (long long)TILE + threadIdx.x / 16, col = blockIdx.x * (long long)TILE + threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (row + 16 * i < m && col + 16 * j < n) f(row + 16 * i, col + 16 * j, i, j);
        }
    }
}

template <typename In, typename Out>
__device__ void gemm(Factor<In> a, Factor<In> b, long long depth, Mat<Out> out, int accumulate) {
    float sums[4][4] = {};
    multiply(sums, a, b, out.rows, out.cols, blockIdx.y * (long long)TILE, blockIdx.x * (long long)TILE, 0, depth);
    for_each_own(out.rows, out.cols, [&](long long row, long long col, int i, int j) {
        Out* at = out.row(row) + col;
        *at = narrow<Out>(accumulate ? widen(*at) + sums[i][j] : sums[i][j]);
    });
}

/// out[m][n] (+)= sum over k of a(m, k) * b(n, k).
extern "C" __global__ void gemm_f32_f32(
    Factor<float> a, Factor<float> b, long long depth, Mat<float> out, int accumulate) {
    gemm(a, b, depth, out, accumulate);
}
extern "C" __global__ void gemm_bf16_bf16(
    Factor<bf16> a, Factor<bf16> b, long long depth, Mat<bf16> out, int accumulate) {
    gemm(a, b, depth, out, accumulate);
}
extern "C" __global__ void gemm_bf16_f32(
    Factor<bf16> a, Factor<bf16> b, long long depth, Mat<float> out, int accumulate) {
    gemm(a, b, depth, out, accumulate);
}

template <typename T>
__device__ void gemm_fixed(
    Factor<T> a, Factor<T> b, long long depth, Mat<long long> acc, long long leaf, Fixed fixed) {
    unsigned long long totals[4][4] = {};
    unsigned largest = 0;
    for (long long first = 0; first < depth; first += leaf) {
        float sums[4][4] = {};
        multiply(
            sums, a, b, acc.rows, acc.cols, blockIdx.y * (long long)TILE, blockIdx.x * (long long)TILE, first, first + leaf);
        for_each_own(acc.rows, acc.cols, [&](long long, long long, int i, int j) {
            totals[i][j] += (unsigned long long)fixed.of(sums[i][j], largest);
        });
    }
    for_each_own(acc.rows, acc.cols, [&](long long row, long long col, int i, int j) {
        long long* at = acc.row(row) + col;
        *at = (long long)((unsigned long long)*at + totals[i][j]);
    });
    fixed.note(largest);
}

/// acc[m][n] += the same, leaf by leaf of the sum, in fixed point.
extern "C" __global__ void gemm_fixed_f32(
    Factor<float> a, Factor<float> b, long long depth, Mat<long long> acc, long long leaf, Fixed fixed) {
    gemm_fixed(a, b, depth, acc, leaf, fixed);
}
extern "C" __global__ void gemm_fixed_bf16(
    Factor<bf16> a, Factor<bf16> b, long long depth, Mat<long long> acc, long long leaf, Fixed fixed) {
    gemm_fixed(a, b, depth, acc, leaf, fixed);
}
