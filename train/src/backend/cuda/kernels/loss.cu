// Cross-entropy over a vocabulary that may be split, in three phases. One block of 256 threads a token.

template <typename T, int N>
__device__ void ce_max(Mat<T> logits, long long valid, Mat<float> max) {
    const T* row = logits.row(blockIdx.x);
    float largest = -INFINITE;
    for_each_col<N>(valid, [&](long long col) {
        auto pack = load<N>(row + col);
        for (int i = 0; i < N; i++) {
            if (col + i < valid) largest = fmaxf(largest, widen(pack.at[i]));
        }
    });
    largest = reduce_block(largest, [](float a, float b) { return fmaxf(a, b); });
    if (threadIdx.x == 0) *max.row(blockIdx.x) = largest;
}

/// The largest of the first `valid` columns; the logits reach at least to the next multiple of 16 bytes if `wide`.
extern "C" __global__ void ce_max_f32(Mat<float> logits, long long valid, Mat<float> max, int wide) {
    wide ? ce_max<float, 4>(logits, valid, max) : ce_max<float, 1>(logits, valid, max);
}
extern "C" __global__ void ce_max_bf16(Mat<bf16> logits, long long valid, Mat<float> max, int wide) {
    wide ? ce_max<bf16, 8>(logits, valid, max) : ce_max<bf16, 1>(logits, valid, max);
}

/// Adds terms one by one as pairs of neighbours, pairs of pairs and so on; a last odd one is carried up.
struct PairwiseSum {
    float at[32];
    unsigned count = 0;

    __device__ void add(float x) {
        int level = 0;
        for (unsigned carry = count; carry & 1; carry >>= 1) x = at[level++] + x;
        at[level] = x;
        count++;
    }

    __device__ float total() const {
        float sum = 0.0f;
        bool first = true;
        for (int level = 0; level < 32; level++) {
            if (count >> level & 1) {
                sum = first ? at[level] : at[level] + sum;
                first = false;
            }
        }
        return sum;
    }
};

template <typename T, int N>
__device__ void ce_sum(
    Mat<T> logits, Mat<float> max, Mat<int> target, int first_col, long long valid, long long block, Mat<float> sum,
    Mat<float> picked) {
    const T* row = logits.row(blockIdx.x);
    const float largest = *max.row(blockIdx.x);
    PairwiseSum blocks;
    for (long long first = 0; first < logits.cols; first += block) {
        // A block of padding has a sum too, so that the pairs are the same under every split.
        float partial = 0.0f;
        for_each_col<N>(block, [&](long long col) {
            auto pack = load<N>(row + first + col);
            for (int i = 0; i < N; i++) {
                if (first + col + i < valid) partial += expf(widen(pack.at[i]) - largest);
            }
        });
        partial = sum_block(partial);
        if (threadIdx.x == 0) blocks.add(partial);
    }
    if (threadIdx.x == 0) {
        *sum.row(blockIdx.x) = blocks.total();
        long long col = (long long)*target.row(blockIdx.x) - first_col;
        *picked.row(blockIdx.x) = col >= 0 && col < valid ? widen(row[col]) - largest : 0.0f;
    }
}

/// sum = exp(logits - max) over valid columns, block by block, the blocks added pairwise; picked = logits - max at the target.
extern "C" __global__ void ce_sum_f32(
    Mat<float> logits, Mat<float> max, Mat<int> target, int first_col, long long valid, long long block, Mat<float> sum,
    Mat<float> picked, int wide) {
    wide ? ce_sum<float, 4>(logits, max, target, first_col, valid, block, sum, picked)
         : ce_sum<float, 1>(logits, max, target, first_col, valid, block, sum, picked);
}
extern "C" __global__ void ce_sum_bf16(
    Mat<bf16> logits, Mat<float> max, Mat<int> target, int first_col, long long valid, long long block, Mat<float> sum,
    Mat<float> picked, int wide) {
    wide ? ce_sum<bf16, 8>(logits, max, target, first_col, valid, block, sum, picked)
         : ce_sum<bf16, 1>(logits, max, target, first_col, valid, block, sum, picked);
}

template <typename T, int N>
__device__ void ce_grad(
    Mat<T> logits, Mat<float> max, Mat<float> sum, Mat<float> picked, Mat<int> target, Mat<float> weights, int first_col,
    long long valid, Mat<float> loss) {
    T* row = logits.row(blockIdx.x);
    const float weight = *weights.row(blockIdx.x), largest = *max.row(blockIdx.x), total = *sum.row(blockIdx.x);
    const long long hit = (long long)*target.row(blockIdx.x) - first_col;
    if (threadIdx.x == 0) {
        *loss.row(blockIdx.x) = weight == 0.0f ? 0.0f : weight * (logf(total) - *picked.row(blockIdx.x));
    }
    for_each_col<N>(logits.cols, [&](long long col) {
        auto pack = load<N>(row + col);
        for (int i = 0; i < N; i++) {
            float gradient = 0.0f;
            if (weight != 0.0f && col + i < valid) {
                gradient = weight * (expf(widen(pack.at[i]) - largest) / total);
                if (col + i == hit) gradient -= weight;
            }
            pack.at[i] = narrow<T>(gradient);
        }
        store(row + col, pack);
    });
}

/// loss = weight * (ln(sum) - picked); in place logits = weight * (softmax - one_hot). A weight of 0 gives zeros.
extern "C" __global__ void ce_grad_f32(
    Mat<float> logits, Mat<float> max, Mat<float> sum, Mat<float> picked, Mat<int> target, Mat<float> weights,
    int first_col, long long valid, Mat<float> loss, int wide) {
    wide ? ce_grad<float, 4>(logits, max, sum, picked, target, weights, first_col, valid, loss)
         : ce_grad<float, 1>(logits, max, sum, picked, target, weights, first_col, valid, loss);
}
extern "C" __global__ void ce_grad_bf16(
    Mat<bf16> logits, Mat<float> max, Mat<float> sum, Mat<float> picked, Mat<int> target, Mat<float> weights,
    int first_col, long long valid, Mat<float> loss, int wide) {
    wide ? ce_grad<bf16, 8>(logits, max, sum, picked, target, weights, first_col, valid, loss)
         : ce_grad<bf16, 1>(logits, max, sum, picked, target, weights, first_col, valid, loss);
}
