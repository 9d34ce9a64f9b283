// Causal attention with grouped queries in bf16 on Hopper, forward and backward. Sums are f32. Compile for sm_90a.
//
// Macros: HEAD_DIM, 64 or 128; DROPOUT, defined if attention weights are dropped; KERNEL, what a kernel is called then.
//
// Every product runs on `wgmma`, its right factor (and the left one of scores) in shared memory, where the copy engine puts them.
// A block is one warpgroup that loads and two or three that compute 64 rows each. Which keys a query sees follows from its
// position alone, and it meets them in tiles that start at multiples of the tile, in ascending order, whatever rows lie beside
// it. Backward is two kernels, one for the gradient of queries and one for that of keys and values: each computes the scores
// again, and there are no atomics.
//
// Shapes: B samples; `rows` local queries and `keys` keys a sample; G groups of q query heads; d = HEAD_DIM.
//   qkv, d_qkv  bf16 [B·rows, G·(q+2)·d]   per group q query heads, a key head, a value head
//   kv          bf16 [B·keys, G·2·d]       per group key, value; in position order
//   out, d_out  bf16 [B·rows, G·q·d]
//   lse         f32  [B·rows, G·q]         natural logarithm of Σ exp(scaled scores)
//   stats       f32  [B, G·q, padded, 2]   padded = rows rounded up to 64; of a query lse·log₂e and Σ out·d_out
//   positions   i32  [B·rows]              ascending within a sample, each below `keys`
//   samples     i64  [B·rows]              ordinals, for dropout; the same for all rows of a sample
// Matrices are contiguous and start at multiples of 16 bytes.
//
// Tensor maps (CUtensorMap, passed by value) of qkv, kv and d_out: bf16, dims {columns, rows or keys, B}, box {64, 64, 1},
// 128-byte swizzle, zeros out of bounds.
//
// Launches. `first_head`, the global number of the first local query head, and `Drop` are ignored without DROPOUT. Blocks of all
// but `stats`: as many as multiprocessors, or as shares of the work if those are fewer; a share is a tile of rows (of 64 a
// computing warpgroup) of one head and sample. Threads: 128 and 128 a computing warpgroup. Shared memory: the constants below,
// and nothing else is accepted.
//   attention_forward  computing 3 (d 64) or 2 (d 128); rows are queries; FORWARD_SHARED
//     map qkv, map kv, positions, samples, out, lse, i32 B, i32 rows, i32 G, i32 q, f32 scale, i32 first_head, Drop
//   attention_stats    grid {⌈padded·G·q·d/2048⌉, B}, block 256, shared 0
//     out, d_out, lse, stats, i32 rows, i32 G·q
//   attention_dq       computing 3; rows are queries; DQ_SHARED
//     map qkv, map kv, map d_out, positions, samples, stats, d_qkv, i32 B, i32 rows, i32 G, i32 q, f32 scale, i32 first_head,
//     Drop
//     Writes the query columns of d_qkv.
//   attention_dkv      computing 3 (d 64) or 2 (d 128); rows are keys, heads are groups; DKV_SHARED
//     map qkv, map kv, map d_out, positions, samples, stats, d_kv, i32 B, i32 rows, i32 keys, i32 G, i32 q, f32 scale,
//     i32 row_stride, i32 group_stride, i32 add, i32 first_head, Drop
//     With `add`, adds to f32 d_kv[(sample·keys + key)·row_stride + group·group_stride + {0, d} + i] for key and value; without,
//     overwrites bf16. So partial sums of several ranks go into f32 of kv's own shape, and where rows = keys the gradients go
//     straight into the key and value columns of d_qkv.

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int D = HEAD_DIM;
constexpr int HALF = 64;  // rows of a warpgroup and of a box of the copy engine
constexpr int HALF_BYTES = HALF * D * 2;
constexpr float LOG2E = 1.4426950408889634f;

struct alignas(64) TensorMap {
    u64 words[16];
};

__device__ __forceinline__ u32 dynamic_shared() {
    u32 bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}

// Barriers and the copy engine.

__device__ __forceinline__ u32 shared_address(const void *pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

template <int BYTES>
__device__ __forceinline__ void load_bytes(u32 to, const void *from, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "n"(BYTES), "r"(barrier)
                 : "memory");
}

// `boxes` × 64 rows from `row` of HEAD_DIM columns from `col`: 64-column blocks one after another.
__device__ __forceinline__ void load_tile(u32 to, const TensorMap *map, u32 barrier, int col, int row, int sample,
                                          int boxes) {
    for (int block = 0; block < D / 64; block++) {
        for (int box = 0; box < boxes; box++, to += HALF * 128) {
            asm volatile(
                "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                ::"r"(to), "l"(map), "r"(col + block * 64), "r"(row + box * HALF), "r"(sample),
                "r"(barrier)
                : "memory");
        }
    }
}

// Tensor cores.

// A tile of `rows` × HEAD_DIM in shared memory as `load_tile` leaves it, 128-byte swizzle. `descriptor` reads 8-row groups
// 1,024 bytes apart; `blocks` is the distance of 64-column blocks, needed where columns are the product's outer dimension.
__device__ __forceinline__ u64 descriptor(u32 tile, u32 blocks) {
    return u64(1) << 62 | u64(1024 >> 4) << 32 | u64(blocks >> 4) << 16 | (tile & 0x3FFFF) >> 4;
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
__device__ __forceinline__ void scores(float (&c)[N / 2], u32 a, u32 b) {
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
__device__ __forceinline__ void weighted(float (&c)[D / 2], const u32 (&a)[K / 4], u32 b) {
    u64 rows = descriptor(b, K * 128);
#pragma unroll
    for (int k = 0; k < K / 16; k++) mma<D>(c, a + 4 * k, rows + ((k * 16 * 128) >> 4));
}

// Numbers.

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

// The random words of a head's attention weights.
struct Mask {
    Drop drop;
    long long sample;
    u32 head;  // global number

    __device__ Words words(int key, int position) const { return drop.words(key / 4, position, sample, head << 14); }

    // Which of a product's elements are kept, a bit each: queries × 64 columns of keys. Lanes 2n and 2n + 1 hold the four keys
    // of a block of words in two rows: each draws for one of them.
    __device__ u32 kept_keys_in_columns(int first_key, const int (&position)[2]) const {
        int lane = threadIdx.x % 32;
        bool odd = lane & 1;
        u32 kept = 0;
#pragma unroll 1
        for (int i = 0; i < 32; i += 4) {
            Words drawn = words(first_key + 2 * i + lane % 4 / 2 * 4, odd ? position[1] : position[0]);
            u32 first = __shfl_xor_sync(~0u, odd ? drawn.at[0] : drawn.at[2], 1);
            u32 second = __shfl_xor_sync(~0u, odd ? drawn.at[1] : drawn.at[3], 1);
            kept |= u32((odd ? first : drawn.at[0]) >= drop.threshold) << i;
            kept |= u32((odd ? second : drawn.at[1]) >= drop.threshold) << (i + 1);
            kept |= u32((odd ? drawn.at[2] : first) >= drop.threshold) << (i + 2);
            kept |= u32((odd ? drawn.at[3] : second) >= drop.threshold) << (i + 3);
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
                    u32 from = __shfl_sync(~0u, drawn.at[w], lane / 16 * 16 + j * 4 + lane % 4);
                    if (w == mine) word = from;
                }
                kept |= u32(word >= drop.threshold) << (i + j);
            }
        }
        return kept;
    }
};

// Work.

// A share of the work: a tile of one head (or group) of one sample. Blocks stay and take share after share, the longest first
// and every other turn in reverse, which evens them out; loads for the next share run beside the end of this one.
struct Share {
    int index, head, sample, tile;

    __device__ Share(int turn, int heads, int batch)
        : index(turn * gridDim.x + (turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x)), head(index % heads),
          sample(index / heads % batch), tile(index / heads / batch) {}
};

// The registers of a thread: of the warpgroup that loads, and of those that compute. A branch of a kernel starts with its own.
template <int WARPGROUPS>
__device__ __forceinline__ void registers_to_load() {
    static_assert(WARPGROUPS == 2 || WARPGROUPS == 3, "as many registers as there are");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(WARPGROUPS == 2 ? 40 : 32));
}
template <int WARPGROUPS>
__device__ __forceinline__ void registers_to_compute() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WARPGROUPS == 2 ? 232 : 160));
}

// What is the same for all lanes, so that the compiler knows and keeps what follows from it in uniform registers.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// What the 64 rows of a warpgroup see, from `first_row` on; `last_row` is the tile's last that is there, `row` a thread's first.
template <int KEYS>
struct Seen {
    int position[2];  // of rows `row` and `row + 8`
    int num_tiles;    // tiles of keys that any row sees; 1 if no row is there
    int num_whole;    // tiles of keys that all rows see whole

    __device__ Seen(const int *positions, int first_row, int last_row, int row)
        : position{positions[min(row, last_row)], positions[min(row + 8, last_row)]},
          num_tiles(first_row > last_row ? 1 : positions[min(first_row + HALF - 1, last_row)] / KEYS + 1),
          num_whole((positions[min(first_row, last_row)] + 1) / KEYS) {}
};

// Forward.

constexpr int FORWARD_WARPGROUPS = D == 64 ? 3 : 2;
constexpr int FORWARD_STAGES = D == 64 ? 4 : 2;
constexpr int FORWARD_ROWS = FORWARD_WARPGROUPS * HALF;
constexpr int FORWARD_KEYS = 128;
constexpr int FORWARD_KEY_BYTES = FORWARD_KEYS * D * 2;
// Queries; keys and values of each stage; barriers.
constexpr int FORWARD_SHARED = FORWARD_WARPGROUPS * HALF_BYTES + 2 * FORWARD_STAGES * FORWARD_KEY_BYTES + 256;

extern "C" __global__ void __launch_bounds__(128 + FORWARD_WARPGROUPS * 128, 1)
    KERNEL(attention_forward)(
        const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap kv, const int *positions,
        const long long *samples, bf16 *out, float *lse, int batch, int rows, int groups, int queries, float scale,
        int first_head, Drop drop) {
    constexpr int KEYS = FORWARD_KEYS, STAGES = FORWARD_STAGES, ROWS = FORWARD_ROWS;
    extern __shared__ __align__(1024) unsigned char shared[];
    if (dynamic_shared() != FORWARD_SHARED) __trap();
    u32 q = shared_address(shared), k = q + ROWS * D * 2, v = k + STAGES * FORWARD_KEY_BYTES;
    u32 q_full = v + STAGES * FORWARD_KEY_BYTES, q_empty = q_full + 8, k_full = q_empty + 8, v_full = k_full + STAGES * 8;
    u32 k_empty = v_full + STAGES * 8, v_empty = k_empty + STAGES * 8;
    if (threadIdx.x == 0) {
        barrier_init(q_full, 1);
        barrier_init(q_empty, FORWARD_WARPGROUPS);
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(k_full + 8 * stage, 1);
            barrier_init(v_full + 8 * stage, 1);
            barrier_init(k_empty + 8 * stage, FORWARD_WARPGROUPS);
            barrier_init(v_empty + 8 * stage, FORWARD_WARPGROUPS);
        }
        barriers_ready();
    }
    __syncthreads();

    int heads = groups * queries, row_tiles = (rows + ROWS - 1) / ROWS, shares = heads * batch * row_tiles;
    int warpgroup = uniform(threadIdx.x / 128);
    if (warpgroup == 0) {
        registers_to_load<FORWARD_WARPGROUPS>();
        if (threadIdx.x != 0) return;
        u32 count = 0;
        for (int turn = 0;; turn++) {
            Share share(turn, heads, batch);
            if (share.index >= shares) break;
            int first_row = (row_tiles - 1 - share.tile) * ROWS, group = share.head / queries;
            int last_row = min(first_row + ROWS, rows) - 1;
            int num_tiles = positions[share.sample * rows + last_row] / KEYS + 1;
            barrier_wait(q_empty, turn % 2 ^ 1);
            barrier_expect(q_full, ROWS * D * 2);
            load_tile(q, &qkv, q_full, (share.head + 2 * group) * D, first_row, share.sample, FORWARD_WARPGROUPS);
#pragma unroll 1
            for (int tile = 0; tile < num_tiles; tile++, count++) {
                u32 stage = count % STAGES, parity = count / STAGES % 2;
                barrier_wait(k_empty + 8 * stage, parity ^ 1);
                barrier_expect(k_full + 8 * stage, FORWARD_KEY_BYTES);
                load_tile(k + stage * FORWARD_KEY_BYTES, &kv, k_full + 8 * stage, 2 * group * D, tile * KEYS, share.sample, 2);
                barrier_wait(v_empty + 8 * stage, parity ^ 1);
                barrier_expect(v_full + 8 * stage, FORWARD_KEY_BYTES);
                load_tile(v + stage * FORWARD_KEY_BYTES, &kv, v_full + 8 * stage, (2 * group + 1) * D, tile * KEYS,
                          share.sample, 2);
            }
        }
        return;
    }

    registers_to_compute<FORWARD_WARPGROUPS>();
    int lane = threadIdx.x % 32;
    bool leader = threadIdx.x % 128 == 0;
    u32 own_q = q + (warpgroup - 1) * HALF * 128;
    float scale_log2 = scale * LOG2E;
    u32 count = 0;
    for (int turn = 0;; turn++) {
        Share share(turn, heads, batch);
        if (share.index >= shares) break;
        int first_row = (row_tiles - 1 - share.tile) * ROWS, last_row = min(first_row + ROWS, rows) - 1;
        int row = first_row + (warpgroup - 1) * HALF + threadIdx.x % 128 / 32 * 16 + lane / 4;  // and row + 8
        const int *of_sample = positions + share.sample * rows;
        int num_tiles = of_sample[last_row] / KEYS + 1;
        Seen<KEYS> seen(of_sample, first_row + (warpgroup - 1) * HALF, last_row, row);
#ifdef DROPOUT
        Mask mask{drop, samples[share.sample * rows], u32(first_head + share.head)};
#endif
        float maximum[2] = {-INFINITE, -INFINITE}, total[2] = {0, 0}, factor[2];
        float o[D / 2], s[KEYS / 2];
        u32 p[KEYS / 4];
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] = 0;
        pin(o);

        // Turns scores into weights relative to the maximum so far; `factor` leads from the former maximum to it.
        auto softmax = [&](int tile) {
            if (tile >= seen.num_whole) {
#pragma unroll
                for (int i = 0; i < KEYS / 2; i++) {
                    int key = tile * KEYS + i / 4 * 8 + lane % 4 * 2 + i % 2;
                    if (key > seen.position[i / 2 % 2]) s[i] = -INFINITE;
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
                u32 kept = mask.kept_keys_in_columns(tile * KEYS + 2 * from, seen.position);
#pragma unroll
                for (int i = 0; i < 32; i++) {
                    if (!(kept >> i & 1)) s[from + i] = 0;
                }
            }
#endif
        };

        barrier_wait(q_full, turn % 2);
        for (int tile = 0; tile < seen.num_tiles; tile++, count++) {
            u32 stage = count % STAGES, before = (count - 1) % STAGES;
            barrier_wait(k_full + 8 * stage, count / STAGES % 2);
            mma_begin();
            scores<KEYS, ROWS>(s, own_q, k + stage * FORWARD_KEY_BYTES);
            mma_commit();
            if (tile > 0) {
                barrier_wait(v_full + 8 * before, (count - 1) / STAGES % 2);
                pin(o);
                mma_begin();
                weighted<KEYS>(o, p, v + before * FORWARD_KEY_BYTES);
                mma_commit();
                mma_wait<1>();
            } else {
                mma_wait<0>();
            }
            pin(s);
            if (leader) barrier_arrive(k_empty + 8 * stage);
            if (leader && tile == seen.num_tiles - 1) barrier_arrive(q_empty);
            softmax(tile);
            mma_wait<0>();
            pin(o);
            if (leader && tile > 0) barrier_arrive(v_empty + 8 * before);
            pack_all(p, s);
#pragma unroll
            for (int i = 0; i < D / 2; i++) o[i] *= factor[i / 2 % 2];
        }
        u32 last = (count - 1) % STAGES;
        barrier_wait(v_full + 8 * last, (count - 1) / STAGES % 2);
        pin(o);
        mma_begin();
        weighted<KEYS>(o, p, v + last * FORWARD_KEY_BYTES);
        mma_commit();
        mma_wait<0>();
        pin(o);
        if (leader) barrier_arrive(v_empty + 8 * last);
        for (int tile = seen.num_tiles; tile < num_tiles; tile++, count++) {
            u32 stage = count % STAGES;
            barrier_wait(k_full + 8 * stage, count / STAGES % 2);
            if (leader) barrier_arrive(k_empty + 8 * stage);
            barrier_wait(v_full + 8 * stage, count / STAGES % 2);
            if (leader) barrier_arrive(v_empty + 8 * stage);
        }

#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = total[half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (row + 8 * half > last_row) continue;
            long long token = (long long)share.sample * rows + row + 8 * half;
            if (lane % 4 == 0) lse[token * heads + share.head] = maximum[half] * scale + __logf(sum);
            float inverse = 1 / sum;
#ifdef DROPOUT
            inverse *= drop.scale;
#endif
            u32 *to = reinterpret_cast<u32 *>(out + (token * heads + share.head) * D) + lane % 4;
#pragma unroll
            for (int i = 0; i < D / 8; i++) {
                to[4 * i] = pack(o[4 * i + 2 * half] * inverse, o[4 * i + 2 * half + 1] * inverse);
            }
        }
    }
}

// Backward.

extern "C" __global__ void __launch_bounds__(256)
    KERNEL(attention_stats)(const bf16 *out, const bf16 *d_out, const float *lse, float2 *stats, int rows, int heads) {
    constexpr int LANES = D / 8;  // of a query and head; 8 elements each
    int padded = (rows + HALF - 1) / HALF * HALF;
    long long pair = (long long)blockIdx.x * (256 / LANES) + threadIdx.x / LANES;
    int row = pair / heads, head = pair % heads, sample = blockIdx.y;
    float delta = 0, log_sum = INFINITE;  // weights of rows that are not there become 0
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

constexpr int DQ_WARPGROUPS = 3;
constexpr int DQ_KEYS = 64;
constexpr int DQ_STAGES = 3;
constexpr int DQ_ROWS = DQ_WARPGROUPS * HALF;
constexpr int DQ_KEY_BYTES = DQ_KEYS * D * 2;
// Queries and d_out; keys and values of each stage; barriers.
constexpr int DQ_SHARED = 2 * DQ_WARPGROUPS * HALF_BYTES + DQ_STAGES * 2 * DQ_KEY_BYTES + 256;

extern "C" __global__ void __launch_bounds__(128 + DQ_WARPGROUPS * 128, 1)
    KERNEL(attention_dq)(
        const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap kv,
        const __grid_constant__ TensorMap d_out, const int *positions, const long long *samples, const float2 *stats,
        bf16 *d_qkv, int batch, int rows, int groups, int queries, float scale, int first_head, Drop drop) {
    constexpr int KEYS = DQ_KEYS, STAGES = DQ_STAGES, ROWS = DQ_ROWS;
    extern __shared__ __align__(1024) unsigned char shared[];
    if (dynamic_shared() != DQ_SHARED) __trap();
    u32 q = shared_address(shared), d_o = q + ROWS * D * 2, k_v = d_o + ROWS * D * 2;
    u32 q_full = k_v + STAGES * 2 * DQ_KEY_BYTES, q_empty = q_full + 8, full = q_empty + 8, empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
        barrier_init(q_full, 1);
        barrier_init(q_empty, DQ_WARPGROUPS);
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(full + 8 * stage, 1);
            barrier_init(empty + 8 * stage, DQ_WARPGROUPS);
        }
        barriers_ready();
    }
    __syncthreads();

    int heads = groups * queries, row_tiles = (rows + ROWS - 1) / ROWS, shares = heads * batch * row_tiles;
    int warpgroup = uniform(threadIdx.x / 128);
    if (warpgroup == 0) {
        registers_to_load<DQ_WARPGROUPS>();
        if (threadIdx.x != 0) return;
        u32 count = 0;
        for (int turn = 0;; turn++) {
            Share share(turn, heads, batch);
            if (share.index >= shares) break;
            int first_row = (row_tiles - 1 - share.tile) * ROWS, group = share.head / queries;
            int last_row = min(first_row + ROWS, rows) - 1;
            int num_tiles = positions[share.sample * rows + last_row] / KEYS + 1;
            barrier_wait(q_empty, turn % 2 ^ 1);
            barrier_expect(q_full, 2 * ROWS * D * 2);
            load_tile(q, &qkv, q_full, (share.head + 2 * group) * D, first_row, share.sample, DQ_WARPGROUPS);
            load_tile(d_o, &d_out, q_full, share.head * D, first_row, share.sample, DQ_WARPGROUPS);
#pragma unroll 1
            for (int tile = 0; tile < num_tiles; tile++, count++) {
                u32 stage = count % STAGES;
                u32 to = k_v + stage * 2 * DQ_KEY_BYTES;
                barrier_wait(empty + 8 * stage, count / STAGES % 2 ^ 1);
                barrier_expect(full + 8 * stage, 2 * DQ_KEY_BYTES);
                load_tile(to, &kv, full + 8 * stage, 2 * group * D, tile * KEYS, share.sample, KEYS / 64);
                load_tile(to + DQ_KEY_BYTES, &kv, full + 8 * stage, (2 * group + 1) * D, tile * KEYS, share.sample, KEYS / 64);
            }
        }
        return;
    }

    registers_to_compute<DQ_WARPGROUPS>();
    int lane = threadIdx.x % 32;
    bool leader = threadIdx.x % 128 == 0;
    int padded = (rows + HALF - 1) / HALF * HALF;
    float scale_log2 = scale * LOG2E;
    u32 own_q = q + (warpgroup - 1) * HALF * 128, own_d_o = d_o + (warpgroup - 1) * HALF * 128;
    u32 count = 0;
    for (int turn = 0;; turn++) {
        Share share(turn, heads, batch);
        if (share.index >= shares) break;
        int first_row = (row_tiles - 1 - share.tile) * ROWS, last_row = min(first_row + ROWS, rows) - 1;
        int row = first_row + (warpgroup - 1) * HALF + threadIdx.x % 128 / 32 * 16 + lane / 4;  // and row + 8
        const int *of_sample = positions + share.sample * rows;
        int num_tiles = of_sample[last_row] / KEYS + 1;
        Seen<KEYS> seen(of_sample, first_row + (warpgroup - 1) * HALF, last_row, row);
        const float2 *of_head = stats + ((long long)share.sample * heads + share.head) * padded;
        float2 stat[2] = {of_head[min(row, last_row)], of_head[min(row + 8, last_row)]};
#ifdef DROPOUT
        Mask mask{drop, samples[share.sample * rows], u32(first_head + share.head)};
#endif
        float d_q[D / 2];
#pragma unroll
        for (int i = 0; i < D / 2; i++) d_q[i] = 0;
        pin(d_q);

        barrier_wait(q_full, turn % 2);
        for (int tile = 0; tile < seen.num_tiles; tile++, count++) {
            u32 stage = count % STAGES, k = k_v + stage * 2 * DQ_KEY_BYTES;
            float s[KEYS / 2], d_p[KEYS / 2];
            u32 d_scores[KEYS / 4];
#ifdef DROPOUT
            u32 kept[KEYS / 64];
#pragma unroll
            for (int i = 0; i < KEYS / 64; i++) kept[i] = mask.kept_keys_in_columns(tile * KEYS + 64 * i, seen.position);
#endif
            barrier_wait(full + 8 * stage, count / STAGES % 2);
            mma_begin();
            scores<KEYS, ROWS>(s, own_q, k);
            mma_commit();
            scores<KEYS, ROWS>(d_p, own_d_o, k + DQ_KEY_BYTES);
            mma_commit();
            mma_wait<1>();
            pin(s);
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++) s[i] = exp2_fast(s[i] * scale_log2 - stat[i / 2 % 2].x);
            if (tile >= seen.num_whole) {
#pragma unroll
                for (int i = 0; i < KEYS / 2; i++) {
                    int key = tile * KEYS + i / 4 * 8 + lane % 4 * 2 + i % 2;
                    if (key > seen.position[i / 2 % 2]) s[i] = 0;
                }
            }
            mma_wait<0>();
            pin(d_p);
            if (leader && tile == seen.num_tiles - 1) barrier_arrive(q_empty);
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++) {
#ifdef DROPOUT
                d_p[i] = kept[i / 32] >> i % 32 & 1 ? d_p[i] * drop.scale : 0;
#endif
                s[i] *= d_p[i] - stat[i / 2 % 2].y;
            }
            pack_all(d_scores, s);
            pin(d_q);
            mma_begin();
            weighted<KEYS>(d_q, d_scores, k);
            mma_commit();
            mma_wait<0>();
            pin(d_q);
            if (leader) barrier_arrive(empty + 8 * stage);
        }
        for (int tile = seen.num_tiles; tile < num_tiles; tile++, count++) {
            barrier_wait(full + 8 * (count % STAGES), count / STAGES % 2);
            if (leader) barrier_arrive(empty + 8 * (count % STAGES));
        }

        int cols = groups * (queries + 2) * D;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (row + 8 * half > last_row) continue;
            long long token = (long long)share.sample * rows + row + 8 * half;
            u32 *to = reinterpret_cast<u32 *>(d_qkv + token * cols + (share.head + share.head / queries * 2) * D) + lane % 4;
#pragma unroll
            for (int i = 0; i < D / 8; i++) {
                to[4 * i] = pack(d_q[4 * i + 2 * half] * scale, d_q[4 * i + 2 * half + 1] * scale);
            }
        }
    }
}

constexpr int DKV_WARPGROUPS = D == 64 ? 3 : 2;
constexpr int DKV_STAGES = 3;
constexpr int DKV_ROWS = HALF;      // queries of a tile
constexpr int DKV_KEYS = DKV_WARPGROUPS * HALF;
constexpr int STAT_BYTES = DKV_ROWS * 8;
constexpr int DKV_STAGE_BYTES = 2 * HALF_BYTES + 1024;  // queries, d_out, statistics; a multiple of 1,024
// Keys and values; the stages; barriers.
constexpr int DKV_SHARED = 2 * DKV_WARPGROUPS * HALF_BYTES + DKV_STAGES * DKV_STAGE_BYTES + 256;

extern "C" __global__ void __launch_bounds__(128 + DKV_WARPGROUPS * 128, 1)
    KERNEL(attention_dkv)(
        const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap kv,
        const __grid_constant__ TensorMap d_out, const int *positions, const long long *samples, const float2 *stats,
        void *d_kv, int batch, int rows, int keys, int groups, int queries, float scale, int row_stride, int group_stride,
        int add, int first_head, Drop drop) {
    constexpr int ROWS = DKV_ROWS, KEYS = DKV_KEYS, STAGES = DKV_STAGES;
    extern __shared__ __align__(1024) unsigned char shared[];
    if (dynamic_shared() != DKV_SHARED) __trap();
    u32 k = shared_address(shared), v = k + KEYS * D * 2, stages = v + KEYS * D * 2;
    u32 kv_full = stages + STAGES * DKV_STAGE_BYTES, kv_empty = kv_full + 8, full = kv_empty + 8, empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
        barrier_init(kv_full, 1);
        barrier_init(kv_empty, DKV_WARPGROUPS);
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(full + 8 * stage, 1);
            barrier_init(empty + 8 * stage, DKV_WARPGROUPS);
        }
        barriers_ready();
    }
    __syncthreads();

    int heads = groups * queries, padded = (rows + ROWS - 1) / ROWS * ROWS, row_tiles = padded / ROWS;
    int lane = threadIdx.x % 32;
    int shares = groups * batch * ((keys + KEYS - 1) / KEYS);  // the first keys have most queries
    // The first tile of queries that sees a key of the share: the thread that loads tells the others.
    volatile int *first_loaded = reinterpret_cast<int *>(shared + DKV_SHARED - 16);
    // The first tile of which row `row`, or the last there is, sees the key. All lanes of a warp ask.
    auto first_tile_to_see = [&](const int *of_sample, int key, int row) {
        for (int tile = 0; tile < row_tiles; tile += 32) {
            int position = of_sample[min((tile + int(threadIdx.x % 32)) * ROWS + row, rows - 1)];
            u32 seeing = __ballot_sync(~0u, position >= key);
            if (seeing) return min(tile + __ffs(seeing) - 1, row_tiles);
        }
        return row_tiles;
    };

    int warpgroup = uniform(threadIdx.x / 128);
    if (warpgroup == 0) {
        registers_to_load<DKV_WARPGROUPS>();
        if (threadIdx.x != 0) return;
        u32 count = 0;
        for (int turn = 0;; turn++) {
            Share share(turn, groups, batch);
            if (share.index >= shares) break;
            int first_key = share.tile * KEYS;
            const int *of_sample = positions + share.sample * rows;
            int first_tile = 0;
            for (int end = row_tiles; first_tile < end;) {
                int middle = (first_tile + end) / 2;
                if (of_sample[min((middle + 1) * ROWS, rows) - 1] < first_key) first_tile = middle + 1;
                else end = middle;
            }
            barrier_wait(kv_empty, turn % 2 ^ 1);
            *first_loaded = first_tile;
            barrier_expect(kv_full, 2 * KEYS * D * 2);
            load_tile(k, &kv, kv_full, 2 * share.head * D, first_key, share.sample, DKV_WARPGROUPS);
            load_tile(v, &kv, kv_full, (2 * share.head + 1) * D, first_key, share.sample, DKV_WARPGROUPS);
            for (int head = share.head * queries; head < (share.head + 1) * queries; head++) {
#pragma unroll 1
                for (int tile = first_tile; tile < row_tiles; tile++, count++) {
                    u32 stage = count % STAGES, to = stages + stage * DKV_STAGE_BYTES;
                    barrier_wait(empty + 8 * stage, count / STAGES % 2 ^ 1);
                    barrier_expect(full + 8 * stage, 2 * HALF_BYTES + STAT_BYTES);
                    load_tile(to, &qkv, full + 8 * stage, (head + 2 * share.head) * D, tile * ROWS, share.sample, 1);
                    load_tile(to + HALF_BYTES, &d_out, full + 8 * stage, head * D, tile * ROWS, share.sample, 1);
                    load_bytes<STAT_BYTES>(to + 2 * HALF_BYTES,
                                           stats + ((long long)share.sample * heads + head) * padded + tile * ROWS,
                                           full + 8 * stage);
                }
            }
        }
        return;
    }

    registers_to_compute<DKV_WARPGROUPS>();
    bool leader = threadIdx.x % 128 == 0;
    float scale_log2 = scale * LOG2E;
    u32 own_k = k + (warpgroup - 1) * HALF * 128, own_v = v + (warpgroup - 1) * HALF * 128;
    u32 count = 0;
    for (int turn = 0;; turn++) {
        Share share(turn, groups, batch);
        if (share.index >= shares) break;
        const int *of_sample = positions + share.sample * rows;
        int own_key = share.tile * KEYS + (warpgroup - 1) * HALF;
        int key = own_key + threadIdx.x % 128 / 32 * 16 + lane / 4;  // and key + 8
        float d_keys[D / 2], d_values[D / 2];
#pragma unroll
        for (int i = 0; i < D / 2; i++) d_keys[i] = d_values[i] = 0;
        pin(d_keys);
        pin(d_values);

        int first_seeing = uniform(first_tile_to_see(of_sample, own_key, ROWS - 1));
        int first_whole = uniform(first_tile_to_see(of_sample, own_key + HALF - 1, 0));
        barrier_wait(kv_full, turn % 2);
        int first_tile = uniform(*first_loaded);
        for (int head = share.head * queries; head < (share.head + 1) * queries; head++) {
            for (int tile = first_tile; tile < first_seeing; tile++, count++) {
                barrier_wait(full + 8 * (count % STAGES), count / STAGES % 2);
                if (leader) barrier_arrive(empty + 8 * (count % STAGES));
            }
            for (int tile = first_seeing; tile < row_tiles; tile++, count++) {
                u32 stage = count % STAGES, q = stages + stage * DKV_STAGE_BYTES, d_o = q + HALF_BYTES;
                const float4 *stat = reinterpret_cast<const float4 *>(shared + (d_o + HALF_BYTES - k)) + lane % 4;
                float s[ROWS / 2], d_p[ROWS / 2];
                u32 p[ROWS / 4], d_scores[ROWS / 4];
#ifdef DROPOUT
                Mask mask{drop, samples[share.sample * rows], u32(first_head + head)};
                u32 kept = mask.kept_keys_in_rows(key - lane / 4, of_sample, tile * ROWS, rows - 1);
#endif
                barrier_wait(full + 8 * stage, count / STAGES % 2);
                mma_begin();
                scores<ROWS, KEYS>(s, own_k, q);
                mma_commit();
                scores<ROWS, KEYS>(d_p, own_v, d_o);
                mma_commit();
                mma_wait<1>();
                pin(s);
#pragma unroll
                for (int i = 0; i < ROWS / 8; i++) {
                    float4 of = stat[4 * i];  // two queries: log-sum, delta, log-sum, delta
                    s[4 * i] = exp2_fast(s[4 * i] * scale_log2 - of.x);
                    s[4 * i + 1] = exp2_fast(s[4 * i + 1] * scale_log2 - of.z);
                    s[4 * i + 2] = exp2_fast(s[4 * i + 2] * scale_log2 - of.x);
                    s[4 * i + 3] = exp2_fast(s[4 * i + 3] * scale_log2 - of.z);
                }
                if (tile < first_whole) {
                    u32 seeing = 0;  // a bit for each element
#pragma unroll 1
                    for (int i = 0; i < ROWS / 2; i += 4) {
                        int row = tile * ROWS + 2 * i + lane % 4 * 2;
                        int first = of_sample[min(row, rows - 1)] - key, second = of_sample[min(row + 1, rows - 1)] - key;
                        seeing |= (u32(first >= 0) | u32(second >= 0) << 1 | u32(first >= 8) << 2 | u32(second >= 8) << 3) << i;
                    }
#pragma unroll
                    for (int i = 0; i < ROWS / 2; i++) s[i] = seeing >> i & 1 ? s[i] : 0;
                }
                pack_all(p, s);
                pin(d_values);
                mma_begin();
#ifdef DROPOUT
                u32 kept_p[ROWS / 4];
#pragma unroll
                for (int i = 0; i < ROWS / 4; i++) {
                    kept_p[i] = p[i] & ((kept >> 2 * i & 1 ? 0xFFFF : 0) | (kept >> 2 * i & 2 ? 0xFFFF0000 : 0));
                }
                weighted<ROWS>(d_values, kept_p, d_o);
#else
                weighted<ROWS>(d_values, p, d_o);
#endif
                mma_commit();
                mma_wait<1>();
                pin(d_p);
#ifdef DROPOUT
#pragma unroll
                for (int i = 0; i < ROWS / 2; i++) d_p[i] = kept >> i & 1 ? d_p[i] * drop.scale : 0;
#endif
                // From the rounded weights: registers for both forms are not there.
#pragma unroll
                for (int i = 0; i < ROWS / 8; i++) {
                    float4 of = stat[4 * i];
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        u32 weights = p[2 * i + half];
                        float first = __uint_as_float(weights << 16), second = __uint_as_float(weights & 0xFFFF0000);
                        d_scores[2 * i + half] = pack(first * (d_p[4 * i + 2 * half] - of.y),
                                                      second * (d_p[4 * i + 2 * half + 1] - of.w));
                    }
                }
                pin(d_keys);
                mma_begin();
                weighted<ROWS>(d_keys, d_scores, q);
                mma_commit();
                mma_wait<0>();
                pin(d_values);
                pin(d_keys);
                if (leader) barrier_arrive(empty + 8 * stage);
            }
        }
        if (leader) barrier_arrive(kv_empty);

        float value_scale = 1;
#ifdef DROPOUT
        value_scale = drop.scale;
#endif
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (key + 8 * half >= keys) continue;
            long long at = ((long long)share.sample * keys + key + 8 * half) * row_stride +
                           (long long)share.head * group_stride + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < D / 8; i++) {
                float k0 = d_keys[4 * i + 2 * half] * scale, k1 = d_keys[4 * i + 2 * half + 1] * scale;
                float v0 = d_values[4 * i + 2 * half] * value_scale, v1 = d_values[4 * i + 2 * half + 1] * value_scale;
                if (add) {
                    float *to = static_cast<float *>(d_kv) + at + 8 * i;
                    float2 before_k = *reinterpret_cast<float2 *>(to), before_v = *reinterpret_cast<float2 *>(to + D);
                    *reinterpret_cast<float2 *>(to) = make_float2(before_k.x + k0, before_k.y + k1);
                    *reinterpret_cast<float2 *>(to + D) = make_float2(before_v.x + v0, before_v.y + v1);
                } else {
                    bf16 *to = static_cast<bf16 *>(d_kv) + at + 8 * i;
                    *reinterpret_cast<u32 *>(to) = pack(k0, k1);
                    *reinterpret_cast<u32 *>(to + D) = pack(v0, v1);
                }
            }
        }
    }
}
