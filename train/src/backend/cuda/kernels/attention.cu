// Causal attention with grouped queries in bf16 on Hopper, forward and backward. Sums are f32. Compile for sm_90a.
//
// Macros: HEAD_DIM, 64 or 128; DROPOUT, defined if attention weights are dropped.
//
// Every product runs on `wgmma` with operands that the copy engine put into shared memory. A block has three warpgroups: one
// loads, two compute 64 rows each. Which keys a query sees follows from its position alone, and keys are visited in ascending
// tiles that start at multiples of the tile: a row's result does not depend on the rows beside it. No atomics.
//
// Shapes: B samples; `rows` local queries and `keys` keys a sample; G groups of q query heads; d = HEAD_DIM.
//   qkv, d_qkv  bf16 [B·rows, G·(q+2)·d]   per group q query heads, a key head, a value head
//   kv          bf16 [B·keys, G·2·d]       per group key, value; in position order
//   out, d_out  bf16 [B·rows, G·q·d]
//   lse         f32  [B·rows, G·q]         natural logarithm of Σ exp(scaled scores)
//   stats       f32  [B, G·q, padded, 2]   padded = rows rounded up to 128; per query lse·log₂e and Σ out·d_out
//   positions   i32  [B·rows]              ascending within a sample, each below `keys`
//   samples     i64  [B·rows]              ordinals, for dropout; the same for all rows of a sample
//
// Tensor maps (CUtensorMap, passed by value) of qkv, kv and d_out: bf16, dims {columns, rows or keys, B}, box {64, 64, 1},
// 128-byte swizzle, zeros out of bounds. Base addresses are multiples of 16 bytes.
//
// Launches; `Drop` is five 32-bit words (below), ignored without DROPOUT:
//   attention_forward  grid {G·q, B, ⌈rows/128⌉}  block 384  shared FORWARD_SHARED
//     map qkv, map kv, positions, samples, out, lse, i32 rows, i32 queries_per_group, f32 scale, Drop
//   attention_stats    grid {⌈padded·G·q/(2048/d)⌉, B}  block 256  shared 0
//     out, d_out, lse, stats, i32 rows, i32 G·q
//   attention_dq       grid {G·q, B, ⌈rows/128⌉}  block 384  shared DQ_SHARED
//     map qkv, map kv, map d_out, positions, samples, stats, d_qkv, i32 rows, i32 queries_per_group, f32 scale, Drop
//     Writes the query columns of d_qkv.
//   attention_dkv      grid {G, B, ⌈keys/128⌉}  block 384  shared DKV_SHARED
//     map qkv, map kv, map d_out, positions, samples, stats, d_k, i32 rows, i32 keys, i32 queries_per_group, f32 scale,
//     i32 row_stride, i32 group_stride, i32 as_f32, Drop
//     Writes d_k[key·row_stride + group·group_stride + {0, d} + i], bf16 or f32, for key and value: kv's own shape in f32
//     where ranks sum it, or the key and value columns of d_qkv at once where rows = keys.

typedef unsigned short bf16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int D = HEAD_DIM;
constexpr int HALF = 64;               // rows of a warpgroup, of a box of the copy engine
constexpr int ROWS = 2 * HALF;         // rows of a block
constexpr int HALF_BYTES = HALF * D * 2;
constexpr int THREADS = 384;
constexpr float LOG2E = 1.4426950408889634f;

struct alignas(64) TensorMap {
    u64 words[16];
};

struct Drop {
    u32 threshold;   // a weight is kept if its random word is at least ⌊p·2³²⌋
    float scale;     // 1 / (1 − p)
    u32 seed;
    u32 layer;
    u32 first_head;  // global number of the first local query head
};

__device__ __forceinline__ u32 dynamic_shared() {
    u32 bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}

// ---- barriers and the copy engine

__device__ __forceinline__ u32 shared_address(const void *pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(u64 *barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_expect(u64 *barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(u64 *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_wait(u64 *barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// `boxes` × 64 rows from `row` of HEAD_DIM columns from `col`: 64-column blocks one after another.
__device__ __forceinline__ void load_tile(void *to, const TensorMap *map, u64 *barrier, int col, int row, int sample,
                                          int boxes) {
    u32 address = shared_address(to);
    for (int block = 0; block < D / 64; block++) {
        for (int box = 0; box < boxes; box++, address += HALF * 128) {
            asm volatile(
                "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                ::"r"(address), "l"(map), "r"(col + block * 64), "r"(row + box * HALF), "r"(sample),
                "r"(shared_address(barrier))
                : "memory");
        }
    }
}

// ---- tensor cores

// A tile of `rows` × HEAD_DIM in shared memory as `load_tile` leaves it, 128-byte swizzle. `descriptor` reads 8-row groups
// 1,024 bytes apart; `blocks` is the distance of 64-column blocks, needed where columns are the product's outer dimension.
__device__ __forceinline__ u64 descriptor(const void *tile, u32 blocks) {
    return u64(1) << 62 | u64(1024 >> 4) << 32 | u64(blocks >> 4) << 16 | (shared_address(tile) & 0x3FFFF) >> 4;
}

#define R8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define REGISTERS_32                                                                                                  \
    R8(0, 1, 2, 3, 4, 5, 6, 7) "," R8(8, 9, 10, 11, 12, 13, 14, 15) "," R8(16, 17, 18, 19, 20, 21, 22, 23) "," R8(     \
        24, 25, 26, 27, 28, 29, 30, 31)
#define REGISTERS_64                                                                                                  \
    REGISTERS_32 "," R8(32, 33, 34, 35, 36, 37, 38, 39) "," R8(40, 41, 42, 43, 44, 45, 46, 47) "," R8(                 \
        48, 49, 50, 51, 52, 53, 54, 55) "," R8(56, 57, 58, 59, 60, 61, 62, 63)
#define F8(c, x, i)                                                                                                   \
    c(x[i]), c(x[i + 1]), c(x[i + 2]), c(x[i + 3]), c(x[i + 4]), c(x[i + 5]), c(x[i + 6]), c(x[i + 7])
#define FLOATS_32(c, x) F8(c, x, 0), F8(c, x, 8), F8(c, x, 16), F8(c, x, 24)
#define FLOATS_64(c, x) FLOATS_32(c, x), F8(c, x, 32), F8(c, x, 40), F8(c, x, 48), F8(c, x, 56)

// c[64, N] (+)= a[64, 16] · b[N, 16]ᵀ, both from shared memory with their 16 contiguous.
template <int N, bool ACCUMULATE>
__device__ __forceinline__ void mma(float (&c)[N / 2], u64 a, u64 b) {
    static_assert(N == 64 || N == 128, "a product's width");
#define MMA(shape, registers, operands, accumulate, outputs)                                                           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate ", 0;\n"                                               \
                 "wgmma.mma_async.sync.aligned." shape ".f32.bf16.bf16 {" registers "}, " operands ", p, 1, 1, 0, 0;\n}\n" \
                 : outputs                                                                                             \
                 : "l"(a), "l"(b))
    if constexpr (N == 64 && ACCUMULATE) MMA("m64n64k16", REGISTERS_32, "%32, %33", "1", FLOATS_32("+f", c));
    if constexpr (N == 64 && !ACCUMULATE) MMA("m64n64k16", REGISTERS_32, "%32, %33", "0", FLOATS_32("=f", c));
    if constexpr (N == 128 && ACCUMULATE) MMA("m64n128k16", REGISTERS_64, "%64, %65", "1", FLOATS_64("+f", c));
    if constexpr (N == 128 && !ACCUMULATE) MMA("m64n128k16", REGISTERS_64, "%64, %65", "0", FLOATS_64("=f", c));
#undef MMA
}

// c[64, N] += a[64, 16] · b[16, N], a from registers, b from shared memory with its N contiguous.
template <int N>
__device__ __forceinline__ void mma(float (&c)[N / 2], const u32 *a, u64 b) {
    if constexpr (N == 64) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" REGISTERS_32
                     "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;\n"
                     : FLOATS_32("+f", c)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else {
        static_assert(N == 128, "a product's width");
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" REGISTERS_64
                     "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;\n"
                     : FLOATS_64("+f", c)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
}

__device__ __forceinline__ void mma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `PENDING` groups are running. Results must be pinned before they are read.
template <int PENDING>
__device__ __forceinline__ void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving uses of `x` across: products run behind its back.
template <int N>
__device__ __forceinline__ void pin(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

// c[64, N] = a · bᵀ over HEAD_DIM; `a`: 64 rows of a tile of A_ROWS, `b`: a tile of N rows.
template <int N, int A_ROWS>
__device__ __forceinline__ void scores(float (&c)[N / 2], const unsigned char *a, const unsigned char *b) {
    u64 first = descriptor(a, 16), second = descriptor(b, 16);
    mma<N, false>(c, first, second);
#pragma unroll
    for (int k = 1; k < D / 16; k++) {
        int block = k / 4, offset = k % 4 * 32;
        mma<N, true>(c, first + ((block * A_ROWS * 128 + offset) >> 4), second + ((block * N * 128 + offset) >> 4));
    }
}

// c[64, D] += a[64, K] · b[K, D]; `b`: a tile of K rows.
template <int K>
__device__ __forceinline__ void weighted(float (&c)[D / 2], const u32 (&a)[K / 4], const unsigned char *b) {
    u64 rows = descriptor(b, K * 128);
#pragma unroll
    for (int k = 0; k < K / 16; k++) mma<D>(c, a + 4 * k, rows + ((k * 16 * 128) >> 4));
}

template <int TO>
__device__ __forceinline__ void registers_shrink() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(TO)); }
template <int TO>
__device__ __forceinline__ void registers_grow() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(TO)); }

// ---- numbers

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// A product's result becomes the left factor of the next: the register layouts agree.
template <int N>
__device__ __forceinline__ void pack_all(u32 (&to)[N / 2], const float (&from)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) to[i] = pack(from[2 * i], from[2 * i + 1]);
}

struct Words {
    u32 w[4];
};

// Philox4x32-10, as train/src/rng.rs has it.
__device__ __forceinline__ Words philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 a = u64(c0) * 0xD2511F53u, b = u64(c2) * 0xCD9E8D57u;
        c0 = u32(b >> 32) ^ c1 ^ k0;
        c1 = u32(b);
        c2 = u32(a >> 32) ^ c3 ^ k1;
        c3 = u32(a);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// The random words of a head's attention weights.
struct Mask {
    u32 threshold, seed, low, high;

    __device__ Mask(Drop drop, long long ordinal, int head)
        : threshold(drop.threshold), seed(drop.seed), low(u32(ordinal)),
          high(drop.layer << 22 | (drop.first_head + head) << 14 | u32(ordinal >> 32)) {}

    __device__ Words words(int key, int position) const { return philox(key / 4, position, low, high, seed, 3); }

    // Which of a product's elements are kept, a bit each: queries × 64 columns of keys. Lanes 2n and 2n + 1 hold the four keys
    // of a block of words in two rows: each draws for one of them.
    __device__ u32 kept_keys_in_columns(int first_key, const int (&position)[2]) const {
        int lane = threadIdx.x % 32;
        bool odd = lane & 1;
        u32 kept = 0;
#pragma unroll 1
        for (int i = 0; i < 32; i += 4) {
            Words drawn = words(first_key + 2 * i + lane % 4 / 2 * 4, odd ? position[1] : position[0]);
            u32 first = __shfl_xor_sync(~0u, odd ? drawn.w[0] : drawn.w[2], 1);
            u32 second = __shfl_xor_sync(~0u, odd ? drawn.w[1] : drawn.w[3], 1);
            kept |= u32((odd ? first : drawn.w[0]) >= threshold) << i;
            kept |= u32((odd ? second : drawn.w[1]) >= threshold) << (i + 1);
            kept |= u32((odd ? drawn.w[2] : first) >= threshold) << (i + 2);
            kept |= u32((odd ? drawn.w[3] : second) >= threshold) << (i + 3);
        }
        return kept;
    }

    // The same for keys × 64 columns of queries. Four lanes, 4 apart, hold the keys of a block of words in four elements: each
    // draws for one of them.
    __device__ u32 kept_keys_in_rows(int first_key, const int *positions, int first_row, int last_row) const {
        int lane = threadIdx.x % 32, mine = lane / 4 % 4;
        u32 kept = 0;
#pragma unroll 1
        for (int i = 0; i < 32; i += 4) {
            int row = first_row + 2 * i + lane % 4 * 2 + mine % 2;
            int key = first_key + lane / 16 * 4 + mine / 2 * 8;
            Words drawn = words(key, positions[row < last_row ? row : last_row]);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 word = 0;
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    u32 from = __shfl_sync(~0u, drawn.w[w], lane / 16 * 16 + j * 4 + lane % 4);
                    if (w == mine) word = from;
                }
                kept |= u32(word >= threshold) << (i + j);
            }
        }
        return kept;
    }
};

// ---- forward

constexpr int FORWARD_STAGES = 2;
constexpr int TILE_BYTES = 2 * HALF_BYTES;
// Queries; keys and values of each stage; barriers.
constexpr int FORWARD_SHARED = TILE_BYTES * (1 + 2 * FORWARD_STAGES) + 128;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_forward(const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap kv, const int *positions,
                      const long long *samples, bf16 *out, float *lse, int rows, int queries, float scale, Drop drop) {
    constexpr int KEYS = 128;
    extern __shared__ __align__(1024) unsigned char shared[];
    if (dynamic_shared() != FORWARD_SHARED) __trap();
    unsigned char *q = shared, *k = q + TILE_BYTES, *v = k + FORWARD_STAGES * TILE_BYTES;
    u64 *q_full = reinterpret_cast<u64 *>(v + FORWARD_STAGES * TILE_BYTES);
    u64 *k_full = q_full + 1, *v_full = k_full + FORWARD_STAGES, *k_empty = v_full + FORWARD_STAGES,
        *v_empty = k_empty + FORWARD_STAGES;

    int head = blockIdx.x, heads = gridDim.x, sample = blockIdx.y, group = head / queries;
    int first_row = (gridDim.z - 1 - blockIdx.z) * ROWS;  // the longest rows first
    positions += sample * rows;
    int last_row = min(first_row + ROWS, rows) - 1;
    int num_tiles = positions[last_row] / KEYS + 1;

    if (threadIdx.x == 0) {
        barrier_init(q_full, 1);
        for (int stage = 0; stage < FORWARD_STAGES; stage++) {
            barrier_init(k_full + stage, 1);
            barrier_init(v_full + stage, 1);
            barrier_init(k_empty + stage, 2);
            barrier_init(v_empty + stage, 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    int warpgroup = threadIdx.x / 128;
    if (warpgroup == 0) {
        registers_shrink<24>();
        if (threadIdx.x == 0) {
            barrier_expect(q_full, TILE_BYTES);
            load_tile(q, &qkv, q_full, (group * (queries + 2) + head % queries) * D, first_row, sample, 2);
            for (int tile = 0; tile < num_tiles; tile++) {
                int stage = tile % FORWARD_STAGES, parity = tile / FORWARD_STAGES % 2;
                barrier_wait(k_empty + stage, parity ^ 1);
                barrier_expect(k_full + stage, TILE_BYTES);
                load_tile(k + stage * TILE_BYTES, &kv, k_full + stage, 2 * group * D, tile * KEYS, sample, 2);
                barrier_wait(v_empty + stage, parity ^ 1);
                barrier_expect(v_full + stage, TILE_BYTES);
                load_tile(v + stage * TILE_BYTES, &kv, v_full + stage, (2 * group + 1) * D, tile * KEYS, sample, 2);
            }
        }
    } else {
        registers_grow<240>();
        int lane = threadIdx.x % 32;
        bool leader = threadIdx.x % 128 == 0;
        int row = first_row + (warpgroup - 1) * HALF + threadIdx.x % 128 / 32 * 16 + lane / 4;  // and row + 8
        int position[2] = {positions[min(row, last_row)], positions[min(row + 8, last_row)]};
        int num_whole = (positions[first_row] + 1) / KEYS;  // tiles that all rows see whole
        const unsigned char *own_q = q + (warpgroup - 1) * HALF * 128;
        float scale_log2 = scale * LOG2E;
        Mask mask(drop, samples[sample * rows], head);

        float o[D / 2], s[KEYS / 2], maximum[2], total[2] = {0, 0}, factor[2];
        u32 p[KEYS / 4];
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] = 0;
        maximum[0] = maximum[1] = -__int_as_float(0x7F800000);

        // Turns scores into weights relative to the maximum so far; `factor` leads from the former maximum to it.
        auto softmax = [&](int tile) {
            if (tile >= num_whole) {
#pragma unroll
                for (int i = 0; i < KEYS / 2; i++) {
                    int key = tile * KEYS + i / 4 * 8 + lane % 4 * 2 + i % 2;
                    if (key > position[i / 2 % 2]) s[i] = -__int_as_float(0x7F800000);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float most = maximum[half];
#pragma unroll
                for (int i = 0; i < KEYS / 2; i += 4) most = fmaxf(most, fmaxf(s[i + 2 * half], s[i + 2 * half + 1]));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                // Key 0 lies in the first tile and every row sees it, so `most` is finite from there on.
                factor[half] = exp2_fast((maximum[half] - most) * scale_log2);
                maximum[half] = most;
                float shift = most * scale_log2, sum = 0;
#pragma unroll
                for (int i = 0; i < KEYS / 2; i += 4) {
                    float &a = s[i + 2 * half], &b = s[i + 2 * half + 1];
                    a = exp2_fast(a * scale_log2 - shift);
                    b = exp2_fast(b * scale_log2 - shift);
                    sum += a + b;
                }
                total[half] = total[half] * factor[half] + sum;
            }
#ifdef DROPOUT
#pragma unroll
            for (int from = 0; from < KEYS / 2; from += 32) {
                u32 kept = mask.kept_keys_in_columns(tile * KEYS + 2 * from, position);
#pragma unroll
                for (int i = 0; i < 32; i++) {
                    if (!(kept >> i & 1)) s[from + i] = 0;
                }
            }
#endif
        };

        barrier_wait(q_full, 0);
        barrier_wait(k_full, 0);
        mma_begin();
        scores<KEYS, ROWS>(s, own_q, k);
        mma_commit();
        mma_wait<0>();
        pin(s);
        if (leader) barrier_arrive(k_empty);
        softmax(0);
        pack_all(p, s);

        for (int tile = 1; tile < num_tiles; tile++) {
            int stage = tile % FORWARD_STAGES, before = (tile - 1) % FORWARD_STAGES;
            barrier_wait(k_full + stage, tile / FORWARD_STAGES % 2);
            mma_begin();
            scores<KEYS, ROWS>(s, own_q, k + stage * TILE_BYTES);
            mma_commit();
            barrier_wait(v_full + before, (tile - 1) / FORWARD_STAGES % 2);
            pin(o);
            mma_begin();
            weighted<KEYS>(o, p, v + before * TILE_BYTES);
            mma_commit();
            mma_wait<1>();
            pin(s);
            if (leader) barrier_arrive(k_empty + stage);
            softmax(tile);
            mma_wait<0>();
            pin(o);
            if (leader) barrier_arrive(v_empty + before);
            pack_all(p, s);
#pragma unroll
            for (int i = 0; i < D / 2; i++) o[i] *= factor[i / 2 % 2];
        }
        int last = num_tiles - 1;
        barrier_wait(v_full + last % FORWARD_STAGES, last / FORWARD_STAGES % 2);
        pin(o);
        mma_begin();
        weighted<KEYS>(o, p, v + last % FORWARD_STAGES * TILE_BYTES);
        mma_commit();
        mma_wait<0>();
        pin(o);

#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = total[half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (row + 8 * half > last_row) continue;
            long long token = (long long)sample * rows + row + 8 * half;
            if (lane % 4 == 0) lse[token * heads + head] = maximum[half] * scale + __logf(sum);
            float inverse = 1 / sum;
#ifdef DROPOUT
            inverse *= drop.scale;
#endif
            u32 *to = reinterpret_cast<u32 *>(out + (token * heads + head) * D) + lane % 4;
#pragma unroll
            for (int i = 0; i < D / 8; i++) {
                to[4 * i] = pack(o[4 * i + 2 * half] * inverse, o[4 * i + 2 * half + 1] * inverse);
            }
        }
    }
}

// ---- backward

extern "C" __global__ void __launch_bounds__(256)
    attention_stats(const bf16 *out, const bf16 *d_out, const float *lse, float2 *stats, int rows, int heads) {
    constexpr int LANES = D / 8;  // of a query and head; 8 elements each
    int padded = (rows + ROWS - 1) / ROWS * ROWS;
    long long pair = (long long)blockIdx.x * (256 / LANES) + threadIdx.x / LANES;
    int row = pair / heads, head = pair % heads, sample = blockIdx.y;
    float delta = 0;
    float log_sum = __int_as_float(0x7F800000);  // weights of rows that are not there become 0
    if (row < rows) {
        long long index = ((long long)sample * rows + row) * heads + head;
        uint4 a = reinterpret_cast<const uint4 *>(out)[index * LANES + threadIdx.x % LANES];
        uint4 b = reinterpret_cast<const uint4 *>(d_out)[index * LANES + threadIdx.x % LANES];
        u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            delta += __uint_as_float(x[i] << 16) * __uint_as_float(y[i] << 16);
            delta += __uint_as_float(x[i] & 0xFFFF0000) * __uint_as_float(y[i] & 0xFFFF0000);
        }
        log_sum = lse[index] * LOG2E;
    }
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) delta += __shfl_xor_sync(~0u, delta, step);
    if (row < padded && threadIdx.x % LANES == 0) {
        stats[((long long)sample * heads + head) * padded + row] = make_float2(log_sum, delta);
    }
}

constexpr int DQ_STAGES = 3;
// Queries and d_out; keys and values of each stage; barriers.
constexpr int DQ_SHARED = 2 * TILE_BYTES + DQ_STAGES * 2 * HALF_BYTES + 128;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_dq(const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap kv,
                 const __grid_constant__ TensorMap d_out, const int *positions, const long long *samples,
                 const float2 *stats, bf16 *d_qkv, int rows, int queries, float scale, Drop drop) {
    constexpr int KEYS = HALF;
    extern __shared__ __align__(1024) unsigned char shared[];
    if (dynamic_shared() != DQ_SHARED) __trap();
    unsigned char *q = shared, *d_o = q + TILE_BYTES, *k_v = d_o + TILE_BYTES;
    u64 *q_full = reinterpret_cast<u64 *>(k_v + DQ_STAGES * 2 * HALF_BYTES);
    u64 *full = q_full + 1, *empty = full + DQ_STAGES;

    int head = blockIdx.x, heads = gridDim.x, sample = blockIdx.y, group = head / queries;
    int query_col = (group * (queries + 2) + head % queries) * D;
    int first_row = (gridDim.z - 1 - blockIdx.z) * ROWS;
    positions += sample * rows;
    int last_row = min(first_row + ROWS, rows) - 1;
    int num_tiles = positions[last_row] / KEYS + 1;

    if (threadIdx.x == 0) {
        barrier_init(q_full, 1);
        for (int stage = 0; stage < DQ_STAGES; stage++) {
            barrier_init(full + stage, 1);
            barrier_init(empty + stage, 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    int warpgroup = threadIdx.x / 128;
    if (warpgroup == 0) {
        registers_shrink<24>();
        if (threadIdx.x == 0) {
            barrier_expect(q_full, 2 * TILE_BYTES);
            load_tile(q, &qkv, q_full, query_col, first_row, sample, 2);
            load_tile(d_o, &d_out, q_full, head * D, first_row, sample, 2);
            for (int tile = 0; tile < num_tiles; tile++) {
                int stage = tile % DQ_STAGES;
                unsigned char *to = k_v + stage * 2 * HALF_BYTES;
                barrier_wait(empty + stage, tile / DQ_STAGES % 2 ^ 1);
                barrier_expect(full + stage, 2 * HALF_BYTES);
                load_tile(to, &kv, full + stage, 2 * group * D, tile * KEYS, sample, 1);
                load_tile(to + HALF_BYTES, &kv, full + stage, (2 * group + 1) * D, tile * KEYS, sample, 1);
            }
        }
    } else {
        registers_grow<240>();
        int lane = threadIdx.x % 32;
        bool leader = threadIdx.x % 128 == 0;
        int row = first_row + (warpgroup - 1) * HALF + threadIdx.x % 128 / 32 * 16 + lane / 4;  // and row + 8
        int position[2] = {positions[min(row, last_row)], positions[min(row + 8, last_row)]};
        int num_whole = (positions[first_row] + 1) / KEYS;
        int padded = (rows + ROWS - 1) / ROWS * ROWS;
        stats += ((long long)sample * heads + head) * padded + row;
        float2 stat[2] = {stats[0], stats[8]};
        float scale_log2 = scale * LOG2E;
        Mask mask(drop, samples[sample * rows], head);
        const unsigned char *own_q = q + (warpgroup - 1) * HALF * 128, *own_d_o = d_o + (warpgroup - 1) * HALF * 128;

        float d_q[D / 2];
        u32 d_scores[KEYS / 4];
#pragma unroll
        for (int i = 0; i < D / 2; i++) d_q[i] = 0;
        pin(d_q);

        // Issues the scores and the gradients of the weights of a tile.
        auto issue = [&](float (&s)[KEYS / 2], float (&d_p)[KEYS / 2], u32 &kept, int tile) {
#ifdef DROPOUT
            kept = mask.kept_keys_in_columns(tile * KEYS, position);
#endif
            int stage = tile % DQ_STAGES;
            const unsigned char *k = k_v + stage * 2 * HALF_BYTES;
            barrier_wait(full + stage, tile / DQ_STAGES % 2);
            mma_begin();
            scores<KEYS, ROWS>(s, own_q, k);
            scores<KEYS, ROWS>(d_p, own_d_o, k + HALF_BYTES);
            mma_commit();
        };
        // Finishes a tile while the next one's products run.
        auto finish = [&](float (&s)[KEYS / 2], float (&d_p)[KEYS / 2], u32 kept, int tile) {
            pin(s);
            pin(d_p);
            pin(d_q);
            if (leader && tile > 0) barrier_arrive(empty + (tile - 1) % DQ_STAGES);
            // Results of products may not be overwritten while others run, or ptxas makes them wait for each other.
#pragma unroll
            for (int i = 0; i < KEYS / 4; i++) {
                auto d_score = [&](int j) {
                    float d_weight = d_p[j];
#ifdef DROPOUT
                    d_weight = kept >> j & 1 ? d_weight * drop.scale : 0;
#endif
                    return exp2_fast(s[j] * scale_log2 - stat[i % 2].x) * (d_weight - stat[i % 2].y);
                };
                d_scores[i] = pack(d_score(2 * i), d_score(2 * i + 1));
            }
            if (tile >= num_whole) {
#pragma unroll
                for (int i = 0; i < KEYS / 4; i++) {
                    int key = tile * KEYS + i / 2 * 8 + lane % 4 * 2;
                    if (key > position[i % 2]) d_scores[i] = 0;
                    else if (key == position[i % 2]) d_scores[i] &= 0xFFFF;
                }
            }
            mma_begin();
            weighted<KEYS>(d_q, d_scores, k_v + tile % DQ_STAGES * 2 * HALF_BYTES);
            mma_commit();
        };

        float s[2][KEYS / 2], d_p[2][KEYS / 2];
        u32 kept[2];
        barrier_wait(q_full, 0);
        issue(s[0], d_p[0], kept[0], 0);
        for (int tile = 0;; tile += 2) {
            if (tile + 1 == num_tiles) {
                mma_wait<0>();
                finish(s[0], d_p[0], kept[0], tile);
                break;
            }
            issue(s[1], d_p[1], kept[1], tile + 1);
            mma_wait<1>();
            finish(s[0], d_p[0], kept[0], tile);
            if (tile + 2 == num_tiles) {
                mma_wait<0>();
                finish(s[1], d_p[1], kept[1], tile + 1);
                break;
            }
            issue(s[0], d_p[0], kept[0], tile + 2);
            mma_wait<1>();
            finish(s[1], d_p[1], kept[1], tile + 1);
        }
        mma_wait<0>();
        pin(d_q);

        int cols = heads / queries * (queries + 2) * D;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (row + 8 * half > last_row) continue;
            long long token = (long long)sample * rows + row + 8 * half;
            u32 *to = reinterpret_cast<u32 *>(d_qkv + token * cols + query_col) + lane % 4;
#pragma unroll
            for (int i = 0; i < D / 8; i++) {
                to[4 * i] = pack(d_q[4 * i + 2 * half] * scale, d_q[4 * i + 2 * half + 1] * scale);
            }
        }
    }
}

constexpr int DKV_STAGES = 3;
constexpr int STAT_BYTES = HALF * 8;
constexpr int DKV_STAGE_BYTES = 2 * HALF_BYTES + 1024;  // queries, d_out, statistics; a multiple of 1,024
// Keys and values; the stages; barriers.
constexpr int DKV_SHARED = 2 * TILE_BYTES + DKV_STAGES * DKV_STAGE_BYTES + 128;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_dkv(const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap kv,
                  const __grid_constant__ TensorMap d_out, const int *positions, const long long *samples,
                  const float2 *stats, void *d_k, int rows, int keys, int queries, float scale, int row_stride,
                  int group_stride, int as_f32, Drop drop) {
    constexpr int ROWS_A_TILE = HALF;
    extern __shared__ __align__(1024) unsigned char shared[];
    if (dynamic_shared() != DKV_SHARED) __trap();
    unsigned char *k = shared, *v = k + TILE_BYTES, *stages = v + TILE_BYTES;
    u64 *kv_full = reinterpret_cast<u64 *>(stages + DKV_STAGES * DKV_STAGE_BYTES);
    u64 *full = kv_full + 1, *empty = full + DKV_STAGES;

    int group = blockIdx.x, sample = blockIdx.y, first_key = blockIdx.z * ROWS;  // the first keys have most queries
    int heads = gridDim.x * queries, padded = (rows + ROWS - 1) / ROWS * ROWS;
    positions += sample * rows;
    // The first tile of queries whose last row sees the first key.
    int first_tile = 0, num_tiles = (rows + ROWS_A_TILE - 1) / ROWS_A_TILE;
    for (int end = num_tiles; first_tile < end;) {
        int middle = (first_tile + end) / 2;
        if (positions[min((middle + 1) * ROWS_A_TILE, rows) - 1] < first_key) first_tile = middle + 1;
        else end = middle;
    }

    if (threadIdx.x == 0) {
        barrier_init(kv_full, 1);
        for (int stage = 0; stage < DKV_STAGES; stage++) {
            barrier_init(full + stage, 1);
            barrier_init(empty + stage, 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    int warpgroup = threadIdx.x / 128;
    if (warpgroup == 0) {
        registers_shrink<24>();
        if (threadIdx.x == 0) {
            barrier_expect(kv_full, 2 * TILE_BYTES);
            load_tile(k, &kv, kv_full, 2 * group * D, first_key, sample, 2);
            load_tile(v, &kv, kv_full, (2 * group + 1) * D, first_key, sample, 2);
            int count = 0;
            for (int query = 0; query < queries; query++) {
                int head = group * queries + query;
                const float2 *of_head = stats + ((long long)sample * heads + head) * padded;
                for (int tile = first_tile; tile < num_tiles; tile++, count++) {
                    int stage = count % DKV_STAGES, row = tile * ROWS_A_TILE;
                    unsigned char *to = stages + stage * DKV_STAGE_BYTES;
                    barrier_wait(empty + stage, count / DKV_STAGES % 2 ^ 1);
                    barrier_expect(full + stage, 2 * HALF_BYTES + STAT_BYTES);
                    load_tile(to, &qkv, full + stage, (group * (queries + 2) + query) * D, row, sample, 1);
                    load_tile(to + HALF_BYTES, &d_out, full + stage, head * D, row, sample, 1);
                    asm volatile(
                        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                            shared_address(to + 2 * HALF_BYTES)),
                        "l"(of_head + row), "n"(STAT_BYTES), "r"(shared_address(full + stage))
                        : "memory");
                }
            }
        }
    } else {
        registers_grow<240>();
        int lane = threadIdx.x % 32;
        bool leader = threadIdx.x % 128 == 0;
        int key = first_key + (warpgroup - 1) * HALF + threadIdx.x % 128 / 32 * 16 + lane / 4;  // and key + 8
        float scale_log2 = scale * LOG2E;
        const unsigned char *own_k = k + (warpgroup - 1) * HALF * 128, *own_v = v + (warpgroup - 1) * HALF * 128;

        float d_keys[D / 2], d_values[D / 2], s[ROWS_A_TILE / 2], d_p[ROWS_A_TILE / 2];
        u32 p[ROWS_A_TILE / 4], d_scores[ROWS_A_TILE / 4];
#pragma unroll
        for (int i = 0; i < D / 2; i++) d_keys[i] = d_values[i] = 0;

        barrier_wait(kv_full, 0);
        int count = 0;
        for (int query = 0; query < queries; query++) {
            for (int tile = first_tile; tile < num_tiles; tile++, count++) {
                int stage = count % DKV_STAGES, first_row = tile * ROWS_A_TILE;
                const unsigned char *q = stages + stage * DKV_STAGE_BYTES, *d_o = q + HALF_BYTES;
                const float4 *stat = reinterpret_cast<const float4 *>(d_o + HALF_BYTES) + lane % 4;
#ifdef DROPOUT
                Mask mask(drop, samples[sample * rows], group * queries + query);
                u32 kept = mask.kept_keys_in_rows(key - lane / 4, positions, first_row, rows - 1);
#endif
                barrier_wait(full + stage, count / DKV_STAGES % 2);
                mma_begin();
                scores<ROWS_A_TILE, ROWS>(s, own_k, q);
                mma_commit();
                scores<ROWS_A_TILE, ROWS>(d_p, own_v, d_o);
                mma_commit();
                mma_wait<1>();
                pin(s);
#pragma unroll
                for (int i = 0; i < ROWS_A_TILE / 8; i++) {
                    float4 of = stat[4 * i];  // two queries: log-sum, delta, log-sum, delta
                    s[4 * i] = exp2_fast(s[4 * i] * scale_log2 - of.x);
                    s[4 * i + 1] = exp2_fast(s[4 * i + 1] * scale_log2 - of.z);
                    s[4 * i + 2] = exp2_fast(s[4 * i + 2] * scale_log2 - of.x);
                    s[4 * i + 3] = exp2_fast(s[4 * i + 3] * scale_log2 - of.z);
                }
                if (positions[first_row] < first_key + ROWS - 1) {
#pragma unroll
                    for (int i = 0; i < ROWS_A_TILE / 2; i++) {
                        int row = min(first_row + i / 4 * 8 + lane % 4 * 2 + i % 2, rows - 1);
                        if (key + i / 2 % 2 * 8 > positions[row]) s[i] = 0;
                    }
                }
#ifdef DROPOUT
#pragma unroll
                for (int i = 0; i < ROWS_A_TILE / 4; i++) {
                    p[i] = pack(kept >> 2 * i & 1 ? s[2 * i] : 0, kept >> 2 * i & 2 ? s[2 * i + 1] : 0);
                }
#else
                pack_all(p, s);
#endif
                pin(d_values);
                mma_begin();
                weighted<ROWS_A_TILE>(d_values, p, d_o);
                mma_commit();
                mma_wait<1>();
                pin(d_p);
#ifdef DROPOUT
#pragma unroll
                for (int i = 0; i < ROWS_A_TILE / 2; i++) d_p[i] = kept >> i & 1 ? d_p[i] * drop.scale : 0;
#endif
#pragma unroll
                for (int i = 0; i < ROWS_A_TILE / 8; i++) {
                    float4 of = stat[4 * i];
                    s[4 * i] *= d_p[4 * i] - of.y;
                    s[4 * i + 1] *= d_p[4 * i + 1] - of.w;
                    s[4 * i + 2] *= d_p[4 * i + 2] - of.y;
                    s[4 * i + 3] *= d_p[4 * i + 3] - of.w;
                }
                pack_all(d_scores, s);
                pin(d_keys);
                mma_begin();
                weighted<ROWS_A_TILE>(d_keys, d_scores, q);
                mma_commit();
                mma_wait<0>();
                pin(d_values);
                pin(d_keys);
                if (leader) barrier_arrive(empty + stage);
            }
        }

        float value_scale = 1;
#ifdef DROPOUT
        value_scale = drop.scale;
#endif
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (key + 8 * half >= keys) continue;
            long long at = ((long long)sample * keys + key + 8 * half) * row_stride + (long long)group * group_stride;
            at += lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < D / 8; i++) {
                float k0 = d_keys[4 * i + 2 * half] * scale, k1 = d_keys[4 * i + 2 * half + 1] * scale;
                float v0 = d_values[4 * i + 2 * half] * value_scale, v1 = d_values[4 * i + 2 * half + 1] * value_scale;
                if (as_f32) {
                    float *to = static_cast<float *>(d_k) + at + 8 * i;
                    *reinterpret_cast<float2 *>(to) = make_float2(k0, k1);
                    *reinterpret_cast<float2 *>(to + D) = make_float2(v0, v1);
                } else {
                    bf16 *to = static_cast<bf16 *>(d_k) + at + 8 * i;
                    *reinterpret_cast<u32 *>(to) = pack(k0, k1);
                    *reinterpret_cast<u32 *>(to + D) = pack(v0, v1);
                }
            }
        }
    }
}
