// SwiGLU and both forms of GELU.

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <typename T, int N>
__device__ void swiglu(Mat<T> gate_up, Mat<T> out) {
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
extern "C" __global__ void swiglu_f32(Mat<float> gate_up, Mat<float> out, int wide) {
    wide ? swiglu<float, 4>(gate_up, out) : swiglu<float, 1>(gate_up, out);
}
extern "C" __global__ void swiglu_bf16(Mat<bf16> gate_up, Mat<bf16> out, int wide) {
    wide ? swiglu<bf16, 8>(gate_up, out) : swiglu<bf16, 1>(gate_up, out);
}

template <typename T, int N>
__device__ void swiglu_backward(Mat<T> d_out, Mat<T> gate_up, Mat<T> d_gate_up) {
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

extern "C" __global__ void swiglu_backward_f32(Mat<float> d_out, Mat<float> gate_up, Mat<float> d_gate_up, int wide) {
    wide ? swiglu_backward<float, 4>(d_out, gate_up, d_gate_up) : swiglu_backward<float, 1>(d_out, gate_up, d_gate_up);
}
extern "C" __global__ void swiglu_backward_bf16(Mat<bf16> d_out, Mat<bf16> gate_up, Mat<bf16> d_gate_up, int wide) {
    wide ? swiglu_backward<bf16, 8>(d_out, gate_up, d_gate_up) : swiglu_backward<bf16, 1>(d_out, gate_up, d_gate_up);
}

/// GELU and its derivative at x. With the normal distribution F and its density f they are x * F(x) and F(x) + x * f(x).
struct Gelu {
    static __device__ __forceinline__ float distribution(float x) { return 0.5f * erfcf(x * -0.70710678f); }

    static __device__ __forceinline__ float value(float x) { return x * distribution(x); }

    static __device__ __forceinline__ float slope(float x) {
        return distribution(x) + x * (expf(-0.5f * x * x) * 0.39894228f);
    }
};

/// The form with tanh: (1 + tanh u) / 2 is the sigmoid of 2u.
struct GeluTanh {
    static constexpr float TWO_ROOT_2_OVER_PI = 1.5957691f;
    static constexpr float CUBIC = 0.044715f;

    static __device__ __forceinline__ float gate(float x) {
        return sigmoid(TWO_ROOT_2_OVER_PI * (x + CUBIC * x * x * x));
    }

    static __device__ __forceinline__ float value(float x) { return x * gate(x); }

    static __device__ __forceinline__ float slope(float x) {
        float s = gate(x);
        return s * (1.0f + x * (1.0f - s) * (TWO_ROOT_2_OVER_PI * (1.0f + 3.0f * CUBIC * x * x)));
    }
};

template <typename F, typename T, int N>
__device__ void apply(Mat<T> x, Mat<T> out) {
    for_each_pack<N>(out.rows, out.cols, [&](long long row, long long col) {
        auto from = load<N>(x.row(row) + col);
        Pack<T, N> to;
        for (int i = 0; i < N; i++) to.at[i] = narrow<T>(F::value(widen(from.at[i])));
        store(out.row(row) + col, to);
    });
}

template <typename F, typename T, int N>
__device__ void apply_backward(Mat<T> d_out, Mat<T> x, Mat<T> d_x) {
    for_each_pack<N>(d_out.rows, d_out.cols, [&](long long row, long long col) {
        auto d = load<N>(d_out.row(row) + col);
        auto from = load<N>(x.row(row) + col);
        Pack<T, N> to;
        for (int i = 0; i < N; i++) to.at[i] = narrow<T>(widen(d.at[i]) * F::slope(widen(from.at[i])));
        store(d_x.row(row) + col, to);
    });
}

extern "C" __global__ void gelu_f32(Mat<float> x, Mat<float> out, int wide) {
    wide ? apply<Gelu, float, 4>(x, out) : apply<Gelu, float, 1>(x, out);
}
extern "C" __global__ void gelu_bf16(Mat<bf16> x, Mat<bf16> out, int wide) {
    wide ? apply<Gelu, bf16, 8>(x, out) : apply<Gelu, bf16, 1>(x, out);
}
extern "C" __global__ void gelu_backward_f32(Mat<float> d_out, Mat<float> x, Mat<float> d_x, int wide) {
    wide ? apply_backward<Gelu, float, 4>(d_out, x, d_x) : apply_backward<Gelu, float, 1>(d_out, x, d_x);
}
extern "C" __global__ void gelu_backward_bf16(Mat<bf16> d_out, Mat<bf16> x, Mat<bf16> d_x, int wide) {
    wide ? apply_backward<Gelu, bf16, 8>(d_out, x, d_x) : apply_backward<Gelu, bf16, 1>(d_out, x, d_x);
}

extern "C" __global__ void gelu_tanh_f32(Mat<float> x, Mat<float> out, int wide) {
    wide ? apply<GeluTanh, float, 4>(x, out) : apply<GeluTanh, float, 1>(x, out);
}
extern "C" __global__ void gelu_tanh_bf16(Mat<bf16> x, Mat<bf16> out, int wide) {
    wide ? apply<GeluTanh, bf16, 8>(x, out) : apply<GeluTanh, bf16, 1>(x, out);
}
extern "C" __global__ void gelu_tanh_backward_f32(Mat<float> d_out, Mat<float> x, Mat<float> d_x, int wide) {
    wide ? apply_backward<GeluTanh, float, 4>(d_out, x, d_x) : apply_backward<GeluTanh, float, 1>(d_out, x, d_x);
}
extern "C" __global__ void gelu_tanh_backward_bf16(Mat<bf16> d_out, Mat<bf16> x, Mat<bf16> d_x, int wide) {
    wide ? apply_backward<GeluTanh, bf16, 8>(d_out, x, d_x) : apply_backward<GeluTanh, bf16, 1>(d_out, x, d_x);
}
