// Causal attention whose bits do not depend on the layout: a query meets the keys in tiles of 32 from position 0 on, and the
// gradients of keys and values are added leaf by leaf. For head sizes up to 256; the quick kernels are elsewhere.
//
// A block of 256 threads has 32 rows (queries, or keys): eight threads, the lanes of a quarter of a warp, share a row.

constexpr int ROWS = 32;
constexpr int LANES = 8;
/// Columns of a head that one thread has.
constexpr int OWN = 256 / LANES;

struct Heads {
    int groups;
    int queries;
    int dim;

    __device__ int query(int head) const { return (head / queries * (queries + 2) + head % queries) * dim; }
    __device__ int key(int group) const { return 2 * group * dim; }
    __device__ int value(int group) const { return (2 * group + 1) * dim; }
};

template <typename T>
struct Attention {
    Mat<T> qkv;
    Mat<T> kv;
    Mat<int> positions;
    Mat<long long> samples;
    Heads heads;
    /// Queries of a sample, and keys of it.
    long long queries;
    long long keys;
    /// Rows whose positions follow one another and whose gradients are added together.
    long long tile;
    float scale;
    int has_dropout;
    Drop drop;
    /// Global number of the first local query head.
    unsigned first_head;

    /// What the weight of a key is multiplied by.
    __device__ float mask(long long row, int head, int key) const {
        if (!has_dropout) return 1.0f;
        Words words = drop.words(key / 4, *positions.row(row), *samples.row(row), (first_head + head) << 14);
        unsigned word = key & 2 ? (key & 1 ? words.at[3] : words.at[2]) : (key & 1 ? words.at[1] : words.at[0]);
        return drop.factor(word);
    }
};

/// 32 rows of `dim` elements in shared memory, padded against bank conflicts.
struct Block {
    float* data;
    int stride;

    __device__ float* row(int index) const { return data + index * stride; }
};

extern __shared__ float shared[];

/// The block of this number; each has 32 rows of dim + 1.
__device__ __forceinline__ Block block(int number, int dim) { return {shared + number * ROWS * (dim + 1), dim + 1}; }

/// Copies up to 32 rows of `dim` columns; rows beyond `count` become zeros.
template <typename T>
__device__ void fetch(Block to, Mat<T> from, long long row, int count, int col, int dim) {
    for (int at = threadIdx.x; at < ROWS * dim; at += 256) {
        int r = at / dim, c = at % dim;
        to.row(r)[c] = r < count ? widen(from.row(row + r)[col + c]) : 0.0f;
    }
}

__device__ __forceinline__ float dot(const float* a, const float* b, int dim) {
    float sum = 0.0f;
    for (int i = 0; i < dim; i++) sum = fmaf(a[i], b[i], sum);
    return sum;
}

/// sums += the first `count` rows, each times its weight, in order; a lane has every eighth column.
__device__ __forceinline__ void add_rows(
    float (&sums)[OWN], const float* weights, Block rows, int count, int lane, int dim) {
#pragma unroll 1
    for (int j = 0; j < count; j++) {
        const float weight = weights[j], *row = rows.row(j);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            if (lane + i * LANES < dim) sums[i] = fmaf(weight, row[lane + i * LANES], sums[i]);
        }
    }
}

/// Over the eight lanes of a row.
template <typename F>
__device__ __forceinline__ float reduce_row(float x, F combine) {
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) x = combine(x, __shfl_xor_sync(0xffffffff, x, lanes));
    return x;
}

/// Queries of one head by x (32 of one sample at a time), heads by y.
template <typename T>
__device__ void forward(Attention<T> a, Mat<T> out, Mat<float> lse) {
    const int dim = a.heads.dim, head = blockIdx.y, group = head / a.heads.queries;
    const int r = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const long long blocks = (a.queries + ROWS - 1) / ROWS, sample = blockIdx.x / blocks;
    const long long local = blockIdx.x % blocks * ROWS, first = sample * a.queries + local;
    const int count = a.queries - local < ROWS ? int(a.queries - local) : ROWS;
    const Block q = block(0, dim), k = block(1, dim), v = block(2, dim);
    float* weights = shared + 3 * ROWS * (dim + 1) + r * (ROWS + 1);

    fetch(q, a.qkv, first, count, a.heads.query(head), dim);
    const int position = r < count ? *a.positions.row(first + r) : -1;
    // Positions follow one another inside a tile only: the last key that any row sees.
    __shared__ int seen;
    if (threadIdx.x == 0) seen = 0;
    __syncthreads();
    atomicMax(&seen, position + 1);
    __syncthreads();

    float largest = -INFINITE, total = 0.0f, sums[OWN] = {};
    for (int key = 0; key < seen; key += ROWS) {
        const int keys = a.keys - key < ROWS ? int(a.keys - key) : ROWS;
        fetch(k, a.kv, sample * a.keys + key, keys, a.heads.key(group), dim);
        fetch(v, a.kv, sample * a.keys + key, keys, a.heads.value(group), dim);
        __syncthreads();
        float scores[ROWS / LANES], most = -INFINITE;
#pragma unroll
        for (int j = 0; j < ROWS / LANES; j++) {
            int c = lane + j * LANES;
            scores[j] = key + c <= position ? dot(q.row(r), k.row(c), dim) * a.scale : -INFINITE;
            most = fmaxf(most, scores[j]);
        }
        most = fmaxf(largest, reduce_row(most, [](float x, float y) { return fmaxf(x, y); }));
        // A row that has seen no key yet has nothing to scale.
        const float shrink = largest == -INFINITE ? 0.0f : expf(largest - most);
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < ROWS / LANES; j++) {
            int c = lane + j * LANES;
            float weight = key + c <= position ? expf(scores[j] - most) : 0.0f;
            sum += weight;
            weights[c] = weight > 0.0f ? weight * a.mask(first + r, head, key + c) : 0.0f;
        }
        total = total * shrink + reduce_row(sum, [](float x, float y) { return x + y; });
        largest = most;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < OWN; i++) sums[i] *= shrink;
        add_rows(sums, weights, v, ROWS, lane, dim);
        __syncthreads();
    }
    if (r >= count) return;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int c = lane + i * LANES;
        if (c < dim) out.row(first + r)[head * dim + c] = narrow<T>(sums[i] / total);
    }
    if (lane == 0) lse.row(first + r)[head] = largest + logf(total);
}

/// out, lse: attention of local queries over all keys of their sample.
extern "C" __global__ void __launch_bounds__(256, 1) tiles_forward_f32(Attention<float> a, Mat<float> out, Mat<float> lse) {
    forward(a, out, lse);
}
extern "C" __global__ void __launch_bounds__(256, 1) tiles_forward_bf16(Attention<bf16> a, Mat<bf16> out, Mat<float> lse) {
    forward(a, out, lse);
}

template <typename T>
struct Gradient {
    Mat<T> out;
    Mat<float> lse;
    Mat<T> d_out;
};

/// delta[row][head] = sum of d_out * out. One thread a row and head.
template <typename T>
__device__ void delta(Attention<T> a, Gradient<T> g, Mat<float> delta) {
    const int dim = a.heads.dim;
    for_each_pack<1>(delta.rows, delta.cols, [&](long long row, long long head) {
        const T *x = g.out.row(row) + head * dim, *d = g.d_out.row(row) + head * dim;
        float sum = 0.0f;
        for (int i = 0; i < dim; i++) sum = fmaf(widen(x[i]), widen(d[i]), sum);
        delta.row(row)[head] = sum;
    });
}

extern "C" __global__ void tiles_delta_f32(Attention<float> a, Gradient<float> g, Mat<float> out) { delta(a, g, out); }
extern "C" __global__ void tiles_delta_bf16(Attention<bf16> a, Gradient<bf16> g, Mat<float> out) { delta(a, g, out); }

/// The weight of a key and the gradient of its score.
struct Score {
    float weight;
    float d_score;
};

template <typename T>
__device__ __forceinline__ Score score(
    const Attention<T>& a, long long row, int head, int key, const float* q, const float* k, const float* v, const float* d_out,
    float lse, float delta) {
    const int dim = a.heads.dim;
    float weight = expf(dot(q, k, dim) * a.scale - lse), mask = a.mask(row, head, key);
    return {weight * mask, weight * (dot(d_out, v, dim) * mask - delta) * a.scale};
}

/// Gradients of queries: 32 rows of one sample by x, heads by y.
template <typename T>
__device__ void backward_queries(Attention<T> a, Gradient<T> g, Mat<float> delta, Mat<T> d_qkv) {
    const int dim = a.heads.dim, head = blockIdx.y, group = head / a.heads.queries;
    const int r = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const long long blocks = (a.queries + ROWS - 1) / ROWS, sample = blockIdx.x / blocks;
    const long long local = blockIdx.x % blocks * ROWS, first = sample * a.queries + local;
    const int count = a.queries - local < ROWS ? int(a.queries - local) : ROWS;
    const Block q = block(0, dim), k = block(1, dim), v = block(2, dim), d = block(3, dim);
    float* d_scores = shared + 4 * ROWS * (dim + 1) + r * (ROWS + 1);

    fetch(q, a.qkv, first, count, a.heads.query(head), dim);
    fetch(d, g.d_out, first, count, head * dim, dim);
    const int position = r < count ? *a.positions.row(first + r) : -1;
    const float lse = r < count ? g.lse.row(first + r)[head] : 0.0f;
    const float of_row = r < count ? delta.row(first + r)[head] : 0.0f;
    __shared__ int seen;
    if (threadIdx.x == 0) seen = 0;
    __syncthreads();
    atomicMax(&seen, position + 1);
    __syncthreads();

    float sums[OWN] = {};
    for (int key = 0; key < seen; key += ROWS) {
        const int keys = a.keys - key < ROWS ? int(a.keys - key) : ROWS;
        fetch(k, a.kv, sample * a.keys + key, keys, a.heads.key(group), dim);
        fetch(v, a.kv, sample * a.keys + key, keys, a.heads.value(group), dim);
        __syncthreads();
#pragma unroll
        for (int j = 0; j < ROWS / LANES; j++) {
            int c = lane + j * LANES;
            d_scores[c] = key + c <= position
                ? score(a, first + r, head, key + c, q.row(r), k.row(c), v.row(c), d.row(r), lse, of_row).d_score
                : 0.0f;
        }
        __syncwarp();
        add_rows(sums, d_scores, k, ROWS, lane, dim);
        __syncthreads();
    }
    if (r >= count) return;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int c = lane + i * LANES;
        if (c < dim) d_qkv.row(first + r)[a.heads.query(head) + c] = narrow<T>(sums[i]);
    }
}

extern "C" __global__ void __launch_bounds__(256, 1)
    tiles_queries_f32(Attention<float> a, Gradient<float> g, Mat<float> delta, Mat<float> d_qkv) {
    backward_queries(a, g, delta, d_qkv);
}
extern "C" __global__ void __launch_bounds__(256, 1)
    tiles_queries_bf16(Attention<bf16> a, Gradient<bf16> g, Mat<float> delta, Mat<bf16> d_qkv) {
    backward_queries(a, g, delta, d_qkv);
}

/// Gradients of keys and values: 32 keys of one sample by x, groups by y. `add(row, col, sum)` takes the sum over one tile of
/// queries; no other block has the same rows and columns.
template <typename T, typename Add>
__device__ void backward_keys(Attention<T> a, Gradient<T> g, Mat<float> delta, Add add) {
    const int dim = a.heads.dim, group = blockIdx.y;
    const int r = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const long long blocks = (a.keys + ROWS - 1) / ROWS, sample = blockIdx.x / blocks;
    const int key = int(blockIdx.x % blocks) * ROWS;
    const int keys = a.keys - key < ROWS ? int(a.keys - key) : ROWS;
    const Block q = block(0, dim), k = block(1, dim), v = block(2, dim), d = block(3, dim);
    float* weights = shared + 4 * ROWS * (dim + 1) + r * (ROWS + 1);
    float* d_scores = weights + ROWS * (ROWS + 1);

    fetch(k, a.kv, sample * a.keys + key, keys, a.heads.key(group), dim);
    fetch(v, a.kv, sample * a.keys + key, keys, a.heads.value(group), dim);
    for (long long tile = 0; tile < a.queries; tile += a.tile) {
        const long long first = sample * a.queries + tile;
        const int position = *a.positions.row(first);
        if (position + a.tile <= key) continue;
        for (int head = group * a.heads.queries; head < (group + 1) * a.heads.queries; head++) {
            float d_keys[OWN] = {}, d_values[OWN] = {};
            for (long long part = 0; part < a.tile; part += ROWS) {
                const int count = a.tile - part < ROWS ? int(a.tile - part) : ROWS;
                const long long row = first + part;
                __syncthreads();
                fetch(q, a.qkv, row, count, a.heads.query(head), dim);
                fetch(d, g.d_out, row, count, head * dim, dim);
                __syncthreads();
#pragma unroll
                for (int j = 0; j < ROWS / LANES; j++) {
                    int c = lane + j * LANES;
                    Score of = {0.0f, 0.0f};
                    if (c < count && r < keys && key + r <= position + part + c) {
                        of = score(
                            a, row + c, head, key + r, q.row(c), k.row(r), v.row(r), d.row(c), g.lse.row(row + c)[head],
                            delta.row(row + c)[head]);
                    }
                    weights[c] = of.weight;
                    d_scores[c] = of.d_score;
                }
                __syncwarp();
                add_rows(d_keys, d_scores, q, count, lane, dim);
                add_rows(d_values, weights, d, count, lane, dim);
            }
            if (r < keys) {
#pragma unroll
                for (int i = 0; i < OWN; i++) {
                    int c = lane + i * LANES;
                    if (c < dim) {
                        add(sample * a.keys + key + r, a.heads.key(group) + c, d_keys[i]);
                        add(sample * a.keys + key + r, a.heads.value(group) + c, d_values[i]);
                    }
                }
            }
        }
    }
}

template <typename T>
__device__ void backward_keys_fixed(Attention<T> a, Gradient<T> g, Mat<float> delta, Mat<long long> d_kv, Fixed fixed) {
    unsigned largest = 0;
    backward_keys(a, g, delta, [&](long long row, int col, float sum) {
        long long* at = d_kv.row(row) + col;
        *at = (long long)((unsigned long long)*at + (unsigned long long)fixed.of(sum, largest));
    });
    fixed.note(largest);
}

extern "C" __global__ void __launch_bounds__(256, 1) tiles_keys_fixed_f32(
    Attention<float> a, Gradient<float> g, Mat<float> delta, Mat<long long> d_kv, Fixed fixed) {
    backward_keys_fixed(a, g, delta, d_kv, fixed);
}
extern "C" __global__ void __launch_bounds__(256, 1) tiles_keys_fixed_bf16(
    Attention<bf16> a, Gradient<bf16> g, Mat<float> delta, Mat<long long> d_kv, Fixed fixed) {
    backward_keys_fixed(a, g, delta, d_kv, fixed);
}

template <typename T>
__device__ void backward_keys_float(Attention<T> a, Gradient<T> g, Mat<float> delta, Mat<float> d_kv) {
    backward_keys(a, g, delta, [&](long long row, int col, float sum) { d_kv.row(row)[col] += sum; });
}

extern "C" __global__ void __launch_bounds__(256, 1)
    tiles_keys_float_f32(Attention<float> a, Gradient<float> g, Mat<float> delta, Mat<float> d_kv) {
    backward_keys_float(a, g, delta, d_kv);
}
extern "C" __global__ void __launch_bounds__(256, 1)
    tiles_keys_float_bf16(Attention<bf16> a, Gradient<bf16> g, Mat<float> delta, Mat<float> d_kv) {
    backward_keys_float(a, g, delta, d_kv);
}
