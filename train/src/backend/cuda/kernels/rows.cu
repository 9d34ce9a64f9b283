// Operations that move or add whole rows, and elementwise ones.

template <typename Src, typename Dst, int N>
__device__ void cast(Mat<Src> src, Mat<Dst> dst) {
    for_each_pack<N>(dst.rows, dst.cols, [&](long long row, long long col) {
        auto from = load<N>(src.row(row) + col);
        Pack<Dst, N> to;
        for (int i = 0; i < N; i++) to.at[i] = narrow<Dst>(widen(from.at[i]));
        store(dst.row(row) + col, to);
    });
}

/// dst = src, another type. `wide`: everything is aligned for accesses of 16 bytes, here and below.
extern "C" __global__ void cast_f32_bf16(Mat<float> src, Mat<bf16> dst, int wide) {
    wide ? cast<float, bf16, 8>(src, dst) : cast<float, bf16, 1>(src, dst);
}
extern "C" __global__ void cast_bf16_f32(Mat<bf16> src, Mat<float> dst, int wide) {
    wide ? cast<bf16, float, 8>(src, dst) : cast<bf16, float, 1>(src, dst);
}

template <typename T, int N>
__device__ void add(Mat<T> src, Mat<T> dst) {
    for_each_pack<N>(dst.rows, dst.cols, [&](long long row, long long col) {
        auto from = load<N>(src.row(row) + col);
        auto to = load<N>(dst.row(row) + col);
        for (int i = 0; i < N; i++) to.at[i] = narrow<T>(widen(to.at[i]) + widen(from.at[i]));
        store(dst.row(row) + col, to);
    });
}

/// dst += src.
extern "C" __global__ void add_f32(Mat<float> src, Mat<float> dst, int wide) {
    wide ? add<float, 4>(src, dst) : add<float, 1>(src, dst);
}
extern "C" __global__ void add_bf16(Mat<bf16> src, Mat<bf16> dst, int wide) {
    wide ? add<bf16, 8>(src, dst) : add<bf16, 1>(src, dst);
}

template <int N>
__device__ void maximum(Mat<float> src, Mat<float> dst) {
    for_each_pack<N>(dst.rows, dst.cols, [&](long long row, long long col) {
        auto from = load<N>(src.row(row) + col);
        auto to = load<N>(dst.row(row) + col);
        for (int i = 0; i < N; i++) {
            float a = from.at[i], b = to.at[i];
            bool is_above = a > b || (a == b && __float_as_int(b) < 0);
            if (a != a || (b == b && is_above)) to.at[i] = a;
        }
        store(dst.row(row) + col, to);
    });
}

/// dst = the larger one; NaN wins, and +0 is above -0.
extern "C" __global__ void max_f32(Mat<float> src, Mat<float> dst, int wide) {
    wide ? maximum<4>(src, dst) : maximum<1>(src, dst);
}

extern "C" __global__ void add_i64(Mat<long long> src, Mat<long long> dst) {
    for_each_pack<1>(dst.rows, dst.cols, [&](long long row, long long col) {
        dst.row(row)[col] = (long long)((unsigned long long)dst.row(row)[col] + (unsigned long long)src.row(row)[col]);
    });
}

template <typename T, int N>
__device__ void gather(Mat<T> src, Mat<int> index, Mat<T> dst) {
    for_each_pack<N>(dst.rows, dst.cols, [&](long long row, long long col) {
        int from = *index.row(row);
        Pack<T, N> pack = {};
        if (from >= 0) {
            if (from >= src.rows) __trap();
            pack = load<N>(src.row(from) + col);
        }
        store(dst.row(row) + col, pack);
    });
}

/// dst[i] = src[index[i]], bits as they are; a negative index gives zeros.
extern "C" __global__ void gather_16(Mat<unsigned short> src, Mat<int> index, Mat<unsigned short> dst, int wide) {
    wide ? gather<unsigned short, 8>(src, index, dst) : gather<unsigned short, 1>(src, index, dst);
}
extern "C" __global__ void gather_32(Mat<unsigned> src, Mat<int> index, Mat<unsigned> dst, int wide) {
    wide ? gather<unsigned, 4>(src, index, dst) : gather<unsigned, 1>(src, index, dst);
}
extern "C" __global__ void gather_64(Mat<long long> src, Mat<int> index, Mat<long long> dst, int wide) {
    wide ? gather<long long, 2>(src, index, dst) : gather<long long, 1>(src, index, dst);
}

template <typename T, int N>
__device__ void embed(Mat<int> tokens, Mat<T> table, int first_row, Mat<T> out, int accumulate) {
    for_each_pack<N>(out.rows, out.cols, [&](long long row, long long col) {
        long long from = (long long)*tokens.row(row) - first_row;
        bool is_here = from >= 0 && from < table.rows;
        if (accumulate && !is_here) return;
        Pack<T, N> pack = {}, to = {};
        if (is_here) pack = load<N>(table.row(from) + col);
        if (accumulate) to = load<N>(out.row(row) + col);
        // Adding +0 turns -0 into +0, as the sum over vocabulary shards does.
        for (int i = 0; i < N; i++) pack.at[i] = narrow<T>(widen(to.at[i]) + widen(pack.at[i]));
        store(out.row(row) + col, pack);
    });
}

/// out[t] (+)= table[tokens[t] - first_row], or nothing.
extern "C" __global__ void embed_f32(
    Mat<int> tokens, Mat<float> table, int first_row, Mat<float> out, int accumulate, int wide) {
    wide ? embed<float, 4>(tokens, table, first_row, out, accumulate)
         : embed<float, 1>(tokens, table, first_row, out, accumulate);
}
extern "C" __global__ void embed_bf16(
    Mat<int> tokens, Mat<bf16> table, int first_row, Mat<bf16> out, int accumulate, int wide) {
    wide ? embed<bf16, 8>(tokens, table, first_row, out, accumulate)
         : embed<bf16, 1>(tokens, table, first_row, out, accumulate);
}

template <typename T, int N>
__device__ void add_bias(Mat<T> bias, Mat<T> x) {
    for_each_pack<N>(x.rows, x.cols, [&](long long row, long long col) {
        auto more = load<N>(bias.data + col);
        auto to = load<N>(x.row(row) + col);
        for (int i = 0; i < N; i++) to.at[i] = narrow<T>(widen(to.at[i]) + widen(more.at[i]));
        store(x.row(row) + col, to);
    });
}

/// x[t] += bias.
extern "C" __global__ void add_bias_f32(Mat<float> bias, Mat<float> x, int wide) {
    wide ? add_bias<float, 4>(bias, x) : add_bias<float, 1>(bias, x);
}
extern "C" __global__ void add_bias_bf16(Mat<bf16> bias, Mat<bf16> x, int wide) {
    wide ? add_bias<bf16, 8>(bias, x) : add_bias<bf16, 1>(bias, x);
}

/// acc[tokens[t] - first_row] += d_out[t], token by token.
template <typename T>
__device__ void embed_backward_fixed(Mat<int> tokens, Mat<T> d_out, int first_row, Mat<long long> acc, Fixed fixed) {
    unsigned largest = 0;
    for_each_pack<1>(d_out.rows, d_out.cols, [&](long long row, long long col) {
        long long to = (long long)*tokens.row(row) - first_row;
        if (to >= 0 && to < acc.rows) {
            add_fixed(acc.row(to) + col, fixed.of(widen(d_out.row(row)[col]), largest));
        }
    });
    fixed.note(largest);
}

extern "C" __global__ void embed_backward_fixed_f32(
    Mat<int> tokens, Mat<float> d_out, int first_row, Mat<long long> acc, Fixed fixed) {
    embed_backward_fixed(tokens, d_out, first_row, acc, fixed);
}
extern "C" __global__ void embed_backward_fixed_bf16(
    Mat<int> tokens, Mat<bf16> d_out, int first_row, Mat<long long> acc, Fixed fixed) {
    embed_backward_fixed(tokens, d_out, first_row, acc, fixed);
}

/// The same in f32 without atomic additions, hence in one order: a block looks for the tokens of its row of `acc`.
template <typename T>
__device__ void embed_backward_float(Mat<int> tokens, Mat<T> d_out, int first_row, Mat<float> acc) {
    __shared__ int hits[256];
    __shared__ int of_warp[8];
    const int warp = threadIdx.x / 32;
    for (long long first = 0; first < tokens.rows; first += 256) {
        long long token = first + threadIdx.x;
        bool hit = token < tokens.rows && (long long)*tokens.row(token) - first_row == blockIdx.x;
        unsigned mask = __ballot_sync(0xffffffff, hit);
        if (!__syncthreads_or(mask)) continue;
        if (threadIdx.x % 32 == 0) of_warp[warp] = __popc(mask);
        __syncthreads();
        int before = 0, total = 0;
        for (int i = 0; i < 8; i++) {
            if (i < warp) before += of_warp[i];
            total += of_warp[i];
        }
        if (hit) hits[before + __popc(mask & ((1u << threadIdx.x % 32) - 1))] = (int)threadIdx.x;
        __syncthreads();
        for (long long col = threadIdx.x; col < acc.cols; col += 256) {
            float sum = 0.0f;
            for (int i = 0; i < total; i++) sum += widen(d_out.row(first + hits[i])[col]);
            acc.row(blockIdx.x)[col] += sum;
        }
        __syncthreads();
    }
}

extern "C" __global__ void embed_backward_float_f32(Mat<int> tokens, Mat<float> d_out, int first_row, Mat<float> acc) {
    embed_backward_float(tokens, d_out, first_row, acc);
}
extern "C" __global__ void embed_backward_float_bf16(Mat<int> tokens, Mat<bf16> d_out, int first_row, Mat<float> acc) {
    embed_backward_float(tokens, d_out, first_row, acc);
}

/// In place; a thread has the four elements of one block of random words.
template <typename T>
__device__ void dropout(Mat<T> x, Mat<long long> samples, Mat<int> positions, Drop drop) {
    for_each_pack<4>(x.rows, x.cols, [&](long long row, long long col) {
        Words words = drop.words((unsigned)(col / 4), *positions.row(row), *samples.row(row));
        T* at = x.row(row) + col;
        for (int i = 0; i < 4 && col + i < x.cols; i++) {
            at[i] = words.at[i] >= drop.threshold ? narrow<T>(widen(at[i]) * drop.scale) : narrow<T>(0.0f);
        }
    });
}

extern "C" __global__ void dropout_f32(Mat<float> x, Mat<long long> samples, Mat<int> positions, Drop drop) {
    dropout(x, samples, positions, drop);
}
extern "C" __global__ void dropout_bf16(Mat<bf16> x, Mat<long long> samples, Mat<int> positions, Drop drop) {
    dropout(x, samples, positions, drop);
}

/// out = acc * unit.
extern "C" __global__ void fx_take(Mat<long long> acc, float unit, Mat<float> out) {
    for_each_pack<1>(out.rows, out.cols, [&](long long row, long long col) {
        out.row(row)[col] = __ll2float_rn(acc.row(row)[col]) * unit;
    });
}
