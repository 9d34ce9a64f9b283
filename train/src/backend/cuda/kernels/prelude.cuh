// What all kernels share; put before each source. No headers, so that the run-time compiler alone is enough.

/// A matrix in a planned buffer: `stride` elements from one row to the next.
template <typename T>
struct Mat {
    T* data;
    long long stride;
    long long rows;
    long long cols;

    __device__ T* row(long long index) const { return data + index * stride; }
};

#define INFINITE __int_as_float(0x7f800000)

struct bf16 {
    unsigned short bits;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }

/// To the nearest number of type T, ties to even.
template <typename T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ bf16 narrow<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

/// N elements that are loaded and stored together, in accesses of up to 16 bytes.
template <typename T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
    T at[N];
};

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load(const T* from) {
    return *reinterpret_cast<const Pack<T, N>*>(from);
}

template <typename T, int N>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& pack) {
    *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

/// Elements of 16 bytes.
template <typename T>
constexpr int WIDE = 16 / sizeof(T);

/// Calls `f(row, col)` for the first of every N columns of every row, over the whole grid: columns by x, rows by y.
template <int N, typename F>
__device__ __forceinline__ void for_each_pack(long long rows, long long cols, F f) {
    long long col = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * N;
    if (col >= cols) return;
    for (long long row = blockIdx.y; row < rows; row += gridDim.y) f(row, col);
}

/// The same for one row a block.
template <int N, typename F>
__device__ __forceinline__ void for_each_col(long long cols, F f) {
    for (long long col = (long long)threadIdx.x * N; col < cols; col += (long long)blockDim.x * N) f(col);
}

/// Combines one value of each of the block's 256 threads in an order that never changes; all threads get the result.
template <typename F>
__device__ __forceinline__ float reduce_block(float x, F combine) {
    __shared__ float of_warp[8];
    for (int lanes = 16; lanes > 0; lanes /= 2) x = combine(x, __shfl_xor_sync(0xffffffff, x, lanes));
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = of_warp[0];
    for (int warp = 1; warp < 8; warp++) x = combine(x, of_warp[warp]);
    return x;
}

__device__ __forceinline__ float sum_block(float x) {
    return reduce_block(x, [](float a, float b) { return a + b; });
}

/// Accumulators in fixed point: value * scale, truncated, added with wrap-around, so that no order changes a bit.
struct Fixed {
    float scale;
    /// Turns a value into units of the range, for the peak.
    float unit;
    /// Bits of the largest magnitude so far: magnitudes order like their bits, NaN above infinity above all numbers.
    unsigned* peak;

    __device__ __forceinline__ long long of(float x, unsigned& largest) const {
        unsigned bits = __float_as_uint(fabsf(x));
        largest = largest > bits ? largest : bits;
        return __float2ll_rz(x * scale);
    }

    /// All lanes of a warp call this together.
    __device__ __forceinline__ void note(unsigned largest) const {
        unsigned bits = __float_as_uint(__uint_as_float(largest) * unit) & 0x7fffffff;
        bits = __reduce_max_sync(0xffffffff, bits);
        if (threadIdx.x % 32 == 0 && bits > *(volatile unsigned*)peak) atomicMax(peak, bits);
    }
};

__device__ __forceinline__ void add_fixed(long long* to, long long x) {
    atomicAdd(reinterpret_cast<unsigned long long*>(to), (unsigned long long)x);
}

struct Words {
    unsigned at[4];
};

/// Philox4x32 with ten rounds.
__device__ __forceinline__ Words philox(unsigned c0, unsigned c1, unsigned c2, unsigned c3, unsigned k0, unsigned k1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        unsigned high_a = __umulhi(c0, 0xD2511F53u), low_a = c0 * 0xD2511F53u;
        unsigned high_b = __umulhi(c2, 0xCD9E8D57u), low_b = c2 * 0xCD9E8D57u;
        c0 = high_b ^ c1 ^ k0;
        c1 = low_b;
        c2 = high_a ^ c3 ^ k1;
        c3 = low_a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

/// A dropout: the random words are keyed by the seed and a purpose, and counted by coordinates.
struct Drop {
    unsigned seed;
    unsigned purpose;
    /// The bits of counter word 3 that do not depend on the sample.
    unsigned place;
    /// An element is kept when its word is at least this.
    unsigned threshold;
    /// 1 / (1 - p).
    float scale;

    /// The words of elements `4 * quad ..` of the row of a sample and a position.
    __device__ __forceinline__ Words words(unsigned quad, int position, long long sample, unsigned extra = 0) const {
        return philox(quad, (unsigned)position, (unsigned)sample, place | extra | (unsigned)(sample >> 32), seed, purpose);
    }

    /// What an element with this word is multiplied by.
    __device__ __forceinline__ float factor(unsigned word) const { return word >= threshold ? scale : 0.0f; }
};
