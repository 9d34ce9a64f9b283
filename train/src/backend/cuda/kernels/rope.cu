// Rotary positions, and the packing of keys and values.

/// How the columns of qkv are divided: per group, `queries` query heads, then a key head, then a value head.
struct Heads {
    int groups;
    int queries;
    int dim;
};

/// A thread turns one pair (i, i + dim / 2) of one query or key head.
template <typename T>
__device__ void rope(Mat<T> qkv, Mat<int> positions, Mat<float> table, Heads heads, int inverse) {
    const int half = heads.dim / 2, rotated = heads.queries + 1;
    for_each_pack<1>(qkv.rows, (long long)heads.groups * rotated * half, [&](long long row, long long index) {
        int pair = int(index) % half, head = int(index) / half;
        const float* angles = table.row(*positions.row(row));
        float cosine = angles[pair], sine = inverse ? -angles[half + pair] : angles[half + pair];
        T* at = qkv.row(row) + (long long)(head / rotated * (heads.queries + 2) + head % rotated) * heads.dim + pair;
        float a = widen(at[0]), b = widen(at[half]);
        at[0] = narrow<T>(a * cosine - b * sine);
        at[half] = narrow<T>(b * cosine + a * sine);
    });
}

extern "C" __global__ void rope_f32(Mat<float> qkv, Mat<int> positions, Mat<float> table, Heads heads, int inverse) {
    rope(qkv, positions, table, heads, inverse);
}
extern "C" __global__ void rope_bf16(Mat<bf16> qkv, Mat<int> positions, Mat<float> table, Heads heads, int inverse) {
    rope(qkv, positions, table, heads, inverse);
}

/// Column of qkv where column `col` of kv lies.
__device__ __forceinline__ long long column_of(long long col, Heads heads) {
    int width = 2 * heads.dim;
    return ((col / width) * (heads.queries + 2) + heads.queries) * heads.dim + col % width;
}

template <typename T, int N>
__device__ void pack_kv(Mat<T> qkv, Mat<T> kv, Heads heads) {
    for_each_pack<N>(kv.rows, kv.cols, [&](long long row, long long col) {
        store(kv.row(row) + col, load<N>(qkv.row(row) + column_of(col, heads)));
    });
}

/// The key and value heads of qkv.
extern "C" __global__ void pack_kv_f32(Mat<float> qkv, Mat<float> kv, Heads heads, int wide) {
    wide ? pack_kv<float, 4>(qkv, kv, heads) : pack_kv<float, 1>(qkv, kv, heads);
}
extern "C" __global__ void pack_kv_bf16(Mat<bf16> qkv, Mat<bf16> kv, Heads heads, int wide) {
    wide ? pack_kv<bf16, 8>(qkv, kv, heads) : pack_kv<bf16, 1>(qkv, kv, heads);
}

template <typename T, int N>
__device__ void unpack_kv(Mat<float> d_kv, Mat<T> d_qkv, Heads heads) {
    for_each_pack<N>(d_kv.rows, d_kv.cols, [&](long long row, long long col) {
        auto from = load<N>(d_kv.row(row) + col);
        Pack<T, N> to;
        for (int i = 0; i < N; i++) to.at[i] = narrow<T>(from.at[i]);
        store(d_qkv.row(row) + column_of(col, heads), to);
    });
}

/// Puts d_kv into the key and value columns of d_qkv.
extern "C" __global__ void unpack_kv_f32(Mat<float> d_kv, Mat<float> d_qkv, Heads heads, int wide) {
    wide ? unpack_kv<float, 4>(d_kv, d_qkv, heads) : unpack_kv<float, 1>(d_kv, d_qkv, heads);
}
extern "C" __global__ void unpack_kv_bf16(Mat<float> d_kv, Mat<bf16> d_qkv, Heads heads, int wide) {
    wide ? unpack_kv<bf16, 8>(d_kv, d_qkv, heads) : unpack_kv<bf16, 1>(d_kv, d_qkv, heads);
}
