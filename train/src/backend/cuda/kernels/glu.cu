// SwiGLU.

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <typename T, int N>
__device__ void glu(Mat<T> gate_up, Mat<T> out) {
    for_each_pack<N>(out.rows, out.cols, [&](long long row, long long col) {
        auto gate = load<N>(gate_up.row(row) + col);
        auto up = load<N>(gate_up.row(row) + out.cols + col);
        Pack<T, N> to;
        for (int i = 0; i < N; i++) {
            float x = widen(gate.at[i]);
            to.at[i] = narrow<T>(x * sigmoid(x) * widen(up.at[i]));
        }
        store(out.row(row) + col, to);
    });
}

/// out = silu(gate) * up.
extern "C" __global__ void glu_f32(Mat<float> gate_up, Mat<float> out, int wide) {
    wide ? glu<float, 4>(gate_up, out) : glu<float, 1>(gate_up, out);
}
extern "C" __global__ void glu_bf16(Mat<bf16> gate_up, Mat<bf16> out, int wide) {
    wide ? glu<bf16, 8>(gate_up, out) : glu<bf16, 1>(gate_up, out);
}

template <typename T, int N>
__device__ void glu_backward(Mat<T> d_out, Mat<T> gate_up, Mat<T> d_gate_up) {
    for_each_pack<N>(d_out.rows, d_out.cols, [&](long long row, long long col) {
        auto d = load<N>(d_out.row(row) + col);
        auto gate = load<N>(gate_up.row(row) + col);
        auto up = load<N>(gate_up.row(row) + d_out.cols + col);
        Pack<T, N> d_gate, d_up;
        for (int i = 0; i < N; i++) {
            float x = widen(gate.at[i]), s = sigmoid(x);
            d_gate.at[i] = narrow<T>(widen(d.at[i]) * widen(up.at[i]) * (s * (1.0f + x * (1.0f - s))));
            d_up.at[i] = narrow<T>(widen(d.at[i]) * (x * s));
        }
        store(d_gate_up.row(row) + col, d_gate);
        store(d_gate_up.row(row) + d_out.cols + col, d_up);
    });
}

extern "C" __global__ void glu_backward_f32(Mat<float> d_out, Mat<float> gate_up, Mat<float> d_gate_up, int wide) {
    wide ? glu_backward<float, 4>(d_out, gate_up, d_gate_up) : glu_backward<float, 1>(d_out, gate_up, d_gate_up);
}
extern "C" __global__ void glu_backward_bf16(Mat<bf16> d_out, Mat<bf16> gate_up, Mat<bf16> d_gate_up, int wide) {
    wide ? glu_backward<bf16, 8>(d_out, gate_up, d_gate_up) : glu_backward<bf16, 1>(d_out, gate_up, d_gate_up);
}
