// Softmax cross-entropy: a block for each row of logits.

// A zero instead of minus infinity, whose difference to itself would be NaN.
__device__ __forceinline__ float base_of(float max) { return max == -INFINITY_F32 ? 0.0f : max; }

// Vectors that a thread asks for before it uses the first.
#define AHEAD 4

// A thread's next vectors of a row, from column `col` on and each `step` columns behind the one before, and how many elements
// of each there are.
template <class T, int N>
__device__ __forceinline__ void load_ahead(
    const Matrix<T> &logits, i64 row, i64 col, i64 cols, i64 step, float (&x)[AHEAD][N], int (&counts)[AHEAD]) {
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
        i64 left = cols - (col + a * step);
        counts[a] = left < 0 ? 0 : (int)(left < N ? left : N);
        load<N>(logits.at(row, col + a * step), counts[a], x[a]);
    }
}

template <class T, int N>
__device__ __forceinline__ void loss_stats(
    i64 cols, Matrix<T> logits, const u32 *labels, u32 first, Matrix<float> stats) {
    i64 row = blockIdx.x, step = (i64)blockDim.x * N;
    float max = -INFINITY_F32, sum = 0.0f, total = 0.0f;
    for (i64 col = (i64)threadIdx.x * N; col < cols; col += AHEAD * step) {
        float x[AHEAD][N], new_max = max;
        int counts[AHEAD];
        load_ahead<T, N>(logits, row, col, cols, step, x, counts);
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                total += x[a][i];
                if (i >= counts[a]) x[a][i] = -INFINITY_F32;
                new_max = fmaxf(new_max, x[a][i]);
            }
        }
        float base = base_of(new_max), part = 0.0f;
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
#pragma unroll
            for (int i = 0; i < N; i++) part += exponential<Rounded<T>::value>(x[a][i] - base);
        }
        sum = sum * exponential<Rounded<T>::value>(max - base) + part;
        max = new_max;
    }
    float all_max = max_of_block(max);
    float all_sum = sum_of_block(sum * expf(max - base_of(all_max)));
    float all_total = sum_of_block(total);
    if (threadIdx.x == 0) {
        i64 column = place_of(labels[row], first, cols);
        float *to = stats.at(row, 0);
        to[0] = all_max;
        to[1] = all_sum;
        to[2] = column < 0 ? 0.0f : widen(*logits.at(row, column));
        to[3] = all_total;
    }
}

#define LOSS_STATS(T, NAME, N) \
    extern "C" __global__ void __launch_bounds__(512) loss_stats_##NAME##_##N( \
        i64 cols, Matrix<T> logits, const u32 *labels, u32 first, Matrix<float> stats) { \
        loss_stats<T, N>(cols, logits, labels, first, stats); \
    }
FOR_TYPES(LOSS_STATS)

extern "C" __global__ void loss_merge(i64 tokens, i64 ranks, Matrix<float> parts, Matrix<float> stats) {
    i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= tokens) return;
    float max = -INFINITY_F32;
    for (i64 rank = 0; rank < ranks; rank++) max = fmaxf(max, *parts.at(rank, 4 * row));
    float sum = 0.0f, target = 0.0f, total = 0.0f;
    for (i64 rank = 0; rank < ranks; rank++) {
        const float *part = parts.at(rank, 4 * row);
        // A rank without columns, or with nothing but minus infinities, brings a zero; or NaN, to be kept.
        sum += part[0] != -INFINITY_F32 ? part[1] * expf(part[0] - max) : part[1];
        target += part[2];
        total += part[3];
    }
    float *to = stats.at(row, 0);
    to[0] = max;
    to[1] = sum;
    to[2] = target;
    to[3] = total;
}

// Logits times `share` are those over their cap; 0 without one. `certain` and `rest` are scaled. The label's logit is taken from the statistics, so gradients may overwrite the logits.
template <class T, class D, int N>
__device__ __forceinline__ void loss_backward(
    i64 cols, Matrix<T> logits, const u32 *labels, u32 first, Matrix<float> stats, float *losses, Matrix<D> dlogits,
    float smoothing, float rest, float scale, float share) {
    i64 row = blockIdx.x;
    u32 label = labels[row];
    const float *of_row = stats.at(row, 0);
    float max = of_row[0], sum = of_row[1], target = of_row[2], total = of_row[3];
    if (threadIdx.x == 0) {
        // The sum of logits is infinite where one is masked away; without smoothing it does not count.
        float spread = rest == 0.0f ? 0.0f : rest * total;
        float loss = (max + logf(sum)) - (1.0f - smoothing) * target - spread;
        losses[row] = label == IGNORE ? 0.0f : loss;
    }
    if (!dlogits.first) return;
    float factor = scale / sum, scaled_rest = scale * rest;
    i64 column = place_of(label, first, cols);
    float at_label = factor * expf(target - max) - scale * (1.0f - smoothing + rest);
    at_label *= 1.0f - (target * share) * (target * share);
    i64 step = (i64)blockDim.x * N;
    for (i64 start = (i64)threadIdx.x * N; start < cols; start += AHEAD * step) {
        float x[AHEAD][N];
        int counts[AHEAD];
        load_ahead<T, N>(logits, row, start, cols, step, x, counts);
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            i64 col = start + a * step;
#pragma unroll
            for (int i = 0; i < N; i++) {
                float capped = x[a][i] * share;
                float other = factor * exponential<Rounded<D>::value>(x[a][i] - max) - scaled_rest;
                other *= 1.0f - capped * capped;
                float gradient = col + i == column ? at_label : other;
                x[a][i] = label == IGNORE ? 0.0f : gradient;
            }
            store<N>(dlogits.at(row, col), counts[a], x[a]);
        }
    }
}

#define LOSS_BACKWARD_INTO(T, NAME, D, DNAME, N) \
    extern "C" __global__ void __launch_bounds__(512) loss_backward_##NAME##_##DNAME##_##N( \
        i64 cols, Matrix<T> logits, const u32 *labels, u32 first, Matrix<float> stats, float *losses, Matrix<D> dlogits, \
        float smoothing, float rest, float scale, float share) { \
        loss_backward<T, D, N>(cols, logits, labels, first, stats, losses, dlogits, smoothing, rest, scale, share); \
    }
#define LOSS_BACKWARD(T, NAME, N) \
    LOSS_BACKWARD_INTO(T, NAME, float, f32, N) \
    LOSS_BACKWARD_INTO(T, NAME, bf16, bf16, N)
FOR_TYPES(LOSS_BACKWARD)
