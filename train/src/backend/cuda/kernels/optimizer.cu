// The exact global norm, and AdamW.

/// limbs += sum of squares in units of 2^-100, six limbs of 32 bits, not yet carried. What lies below the unit is cut off
/// element by element. Elements from 2^27 on are left out and make the peak infinite.
extern "C" __global__ void square_norm(Mat<float> x, Mat<long long> limbs, unsigned* peak) {
    unsigned long long own[6] = {};
    bool left_out = false;
    auto add = [&](float x) {
        unsigned bits = __float_as_uint(fabsf(x));
        if (bits >= __float_as_uint(134217728.0f)) {
            left_out = true;
            return;
        }
        unsigned exponent = bits >> 23;
        unsigned long long mantissa = bits & 0x7fffffu | 0x800000u;
        // x = mantissa * 2^(exponent - 150), so the square is mantissa^2 * 2^(2 * exponent - 200) units.
        int shift = 2 * (int)exponent - 200;
        unsigned long long square = mantissa * mantissa;
        if (shift < 0) {
            square >>= shift > -63 ? -shift : 63;
            shift = 0;
        }
        unsigned long long low = square << shift % 32;
        unsigned long long high = shift % 32 ? square >> (64 - shift % 32) : 0;
#pragma unroll
        for (int limb = 0; limb < 6; limb++) {
            int piece = limb - shift / 32;
            if (piece == 0) own[limb] += (unsigned)low;
            if (piece == 1) own[limb] += low >> 32;
            if (piece == 2) own[limb] += high;
        }
    };
    for (long long row = 0; row < x.rows; row++) {
        for (long long col = blockIdx.x * blockDim.x + threadIdx.x; col < x.cols; col += gridDim.x * blockDim.x) {
            add(x.row(row)[col]);
        }
    }
#pragma unroll
    for (int limb = 0; limb < 6; limb++) {
        for (int lanes = 16; lanes > 0; lanes /= 2) own[limb] += __shfl_xor_sync(0xffffffff, own[limb], lanes);
        if (threadIdx.x % 32 == 0 && own[limb]) add_fixed(limbs.data + limb, (long long)own[limb]);
    }
    if (__any_sync(0xffffffff, left_out) && threadIdx.x % 32 == 0) atomicMax(peak, __float_as_uint(INFINITE));
}

/// Brings each limb but the last below 2^32. One thread.
extern "C" __global__ void carry_limbs(Mat<long long> limbs) {
    for (int limb = 1; limb < 6; limb++) {
        limbs.data[limb] += limbs.data[limb - 1] >> 32;
        limbs.data[limb - 1] &= 0xffffffff;
    }
}

struct AdamW {
    float grad_scale, lr, beta1, beta2, eps, weight_decay, correction1, correction2;
};

template <int N>
__device__ void adamw(float* w, float* m, float* v, const float* g, long long len, AdamW step) {
    long long at = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * N;
    if (at >= len) return;
    auto weights = load<N>(w + at), first = load<N>(m + at), second = load<N>(v + at), gradients = load<N>(g + at);
    const float keep = 1.0f - step.lr * step.weight_decay;
    for (int i = 0; i < N; i++) {
        float gradient = gradients.at[i] * step.grad_scale;
        first.at[i] = step.beta1 * first.at[i] + (1.0f - step.beta1) * gradient;
        second.at[i] = step.beta2 * second.at[i] + (1.0f - step.beta2) * (gradient * gradient);
        float denominator = sqrtf(second.at[i] / step.correction2) + step.eps;
        weights.at[i] = weights.at[i] * keep - step.lr * (first.at[i] / step.correction1 / denominator);
    }
    store(w + at, weights);
    store(m + at, first);
    store(v + at, second);
}

/// AdamW with gradient g * grad_scale; decoupled weight decay, bias-corrected moments.
extern "C" __global__ void adamw_f32(float* w, float* m, float* v, const float* g, long long len, AdamW step, int wide) {
    wide ? adamw<4>(w, m, v, g, len, step) : adamw<1>(w, m, v, g, len, step);
}
