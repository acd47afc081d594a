// Updates that treat every element by itself, and the norm that clips gradients: a single pass over memory each. Then what Muon
// does to a matrix beside products, and Adafactor.

// An element's update by a rule: `step(w, g, state)` changes weight and state, `STATES` numbers. What is frozen stays.
template <int N, int STATES, class Step>
__device__ __forceinline__ void update(
    i64 len, float *weight, const float *grad, float *const (&state)[STATES], const Mixed &copy, const float *grad_factor,
    const unsigned *frozen, Step step) {
    float factor = grad_factor ? *grad_factor : 1.0f;
    each_vector<N>(1, len, [&](i64, i64 i, int count) {
        float w[N], g[N], states[STATES][N];
        load<N>(weight + i, count, w);
        load<N>(grad + i, count, g);
        for (int slot = 0; slot < STATES; slot++)
            if (state[slot]) load<N>(state[slot] + i, count, states[slot]);
        // N divides 32, so a vector's bits lie in one word.
        unsigned bits = frozen ? frozen[i / 32] >> (i % 32) : 0;
        for (int k = 0; k < N; k++) {
            if (bits >> k & 1) continue;
            float own[STATES];
            for (int slot = 0; slot < STATES; slot++) own[slot] = states[slot][k];
            step(w[k], g[k] * factor, own);
            for (int slot = 0; slot < STATES; slot++) states[slot][k] = own[slot];
        }
        store<N>(weight + i, count, w);
        for (int slot = 0; slot < STATES; slot++)
            if (state[slot]) store<N>(state[slot] + i, count, states[slot]);
        if (copy.first) store<N>(copy, 0, i, count, w);
    });
}

// What one update of AdamW multiplies by; `AdamWFactors` of cuda/optimizer.rs.
struct AdamWFactors {
    float keep, beta1, beta1_rest, beta2, beta2_rest, rate, deviation, epsilon;
};

#define ADAMW(N) \
    extern "C" __global__ void adamw_##N( \
        i64 len, float *weight, const float *grad, float *mean, float *variance, Mixed copy, const float *grad_factor, \
        const unsigned *frozen, AdamWFactors f) { \
        float *const state[2] = {mean, variance}; \
        update<N, 2>(len, weight, grad, state, copy, grad_factor, frozen, [&](float &w, float g, float (&s)[2]) { \
            s[0] = s[0] * f.beta1 + g * f.beta1_rest; \
            s[1] = s[1] * f.beta2 + g * g * f.beta2_rest; \
            float change = -f.rate * s[0] / (sqrtf(s[1]) * f.deviation + f.epsilon); \
            w = w * f.keep + change; \
        }); \
    }
ADAMW(4)
ADAMW(1)

struct SgdFactors {
    float lr, beta, decay;
    int nesterov;
};

// Without momentum where that is null.
#define SGD(N) \
    extern "C" __global__ void sgd_##N( \
        i64 len, float *weight, const float *grad, float *momentum, Mixed copy, const float *grad_factor, \
        const unsigned *frozen, SgdFactors f) { \
        float *const state[1] = {momentum}; \
        update<N, 1>(len, weight, grad, state, copy, grad_factor, frozen, [&](float &w, float g, float (&s)[1]) { \
            g += w * f.decay; \
            float change = g; \
            if (momentum) { \
                s[0] = s[0] * f.beta + g; \
                change = f.nesterov ? g + s[0] * f.beta : s[0]; \
            } \
            w -= f.lr * change; \
        }); \
    }
SGD(4)
SGD(1)

struct LionFactors {
    float keep, lr, beta1, beta1_rest, beta2, beta2_rest;
};

#define LION(N) \
    extern "C" __global__ void lion_##N( \
        i64 len, float *weight, const float *grad, float *mean, Mixed copy, const float *grad_factor, \
        const unsigned *frozen, LionFactors f) { \
        float *const state[1] = {mean}; \
        update<N, 1>(len, weight, grad, state, copy, grad_factor, frozen, [&](float &w, float g, float (&s)[1]) { \
            float direction = s[0] * f.beta1 + g * f.beta1_rest; \
            float sign = direction > 0.0f ? 1.0f : direction < 0.0f ? -1.0f : 0.0f; \
            w = w * f.keep - f.lr * sign; \
            s[0] = s[0] * f.beta2 + g * f.beta2_rest; \
        }); \
    }
LION(4)
LION(1)

#define MUON_MOMENTUM(N) \
    extern "C" __global__ void muon_momentum_##N( \
        i64 rows, i64 cols, Matrix<float> grad, Matrix<float> momentum, float beta, float rest, int nesterov, \
        const float *grad_factor) { \
        float factor = grad_factor ? *grad_factor : 1.0f; \
        each_vector<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            float g[N], m[N]; \
            load<N>(grad.at(row, col), count, g); \
            load<N>(momentum.at(row, col), count, m); \
            for (int k = 0; k < N; k++) { \
                g[k] = g[k] * factor * rest; \
                m[k] = m[k] * beta + g[k]; \
                g[k] = nesterov ? m[k] * beta + g[k] : m[k]; \
            } \
            store<N>(grad.at(row, col), count, g); \
            store<N>(momentum.at(row, col), count, m); \
        }); \
    }
MUON_MOMENTUM(4)
MUON_MOMENTUM(1)

#define NORMALIZE(N) \
    extern "C" __global__ void normalize_##N( \
        i64 rows, i64 cols, Mixed x, const float *squared_norm, float least, Mixed out) { \
        float factor = 1.0f / fmaxf(sqrtf(*squared_norm), least); \
        each_vector<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            float v[N]; \
            load<N>(x, row, col, count, v); \
            for (int k = 0; k < N; k++) v[k] *= factor; \
            store<N>(out, row, col, count, v); \
        }); \
    }
NORMALIZE(8)
NORMALIZE(4)
NORMALIZE(1)

#define COMBINE(N) \
    extern "C" __global__ void combine_##N(i64 rows, i64 cols, Mixed a, Mixed b, float alpha, float beta, Mixed out) { \
        each_vector<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            float x[N], y[N]; \
            load<N>(a, row, col, count, x); \
            load<N>(b, row, col, count, y); \
            for (int k = 0; k < N; k++) x[k] = x[k] * alpha + y[k] * beta; \
            store<N>(out, row, col, count, x); \
        }); \
    }
COMBINE(8)
COMBINE(4)
COMBINE(1)

// rows[i] += scale * sum_j (factor * x[i, j])^2: a warp for each row.
extern "C" __global__ void row_squares(
    i64 rows, i64 cols, Matrix<float> x, const float *grad_factor, float scale, float *sums) {
    i64 row = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    float factor = grad_factor ? *grad_factor : 1.0f, sum = 0.0f;
    for (i64 col = threadIdx.x % 32; col < cols; col += 32) {
        float v = *x.at(row, col) * factor;
        sum += v * v;
    }
    sum = sum_of_warp(sum);
    if (threadIdx.x % 32 == 0) sums[row] += scale * sum;
}

// A row of `partials` for each block of rows; `add_partials` adds them up. 32 columns and 8 groups of rows in a block.
extern "C" __global__ void __launch_bounds__(256) column_squares(
    i64 rows, i64 cols, Matrix<float> x, const float *grad_factor, i64 rows_per_block, float *partials) {
    __shared__ float sums[8][32];
    float factor = grad_factor ? *grad_factor : 1.0f, sum = 0.0f;
    i64 col = (i64)blockIdx.x * 32 + threadIdx.x;
    i64 start = (i64)blockIdx.y * rows_per_block;
    i64 end = start + rows_per_block < rows ? start + rows_per_block : rows;
    if (col < cols) {
        for (i64 row = start + threadIdx.y; row < end; row += 8) {
            float v = *x.at(row, col) * factor;
            sum += v * v;
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || col >= cols) return;
    for (int group = 1; group < 8; group++) sum += sums[group][threadIdx.x];
    partials[(i64)blockIdx.y * cols + col] = sum;
}

// What Adafactor divides gradients by; `Divided` of cuda/adafactor.rs. A vector has no `rows`.
struct Divided {
    Matrix<float> grad;
    const float *grad_factor, *rows, *cols, *row_sum;
    float row_count, epsilon;
};

// The updates of a vector of elements.
template <int N>
__device__ __forceinline__ void divide(const Divided &d, i64 row, i64 col, int count, float (&to)[N]) {
    float factor = d.grad_factor ? *d.grad_factor : 1.0f;
    float of_row = d.rows ? d.rows[row] / fmaxf(*d.row_sum / d.row_count, d.epsilon) : 1.0f;
    load<N>(d.grad.at(row, col), count, to);
    for (int k = 0; k < N; k++) {
        float of_col = k < count ? d.cols[col + k] : 0.0f;
        to[k] = to[k] * factor / sqrtf(fmaxf(of_col * of_row, d.epsilon * d.epsilon));
    }
}

#define ADAFACTOR(N) \
    extern "C" __global__ void adafactor_##N( \
        i64 rows, i64 cols, Divided d, Matrix<float> weight, Mixed copy, const float *squared_weight, \
        const float *squared_update, float elements, float rate, float keep, float least_scale, float most_rms) { \
        float scale = fmaxf(least_scale, sqrtf(*squared_weight / elements)); \
        float excess = fmaxf(1.0f, sqrtf(*squared_update / elements) / most_rms); \
        each_vector<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            float w[N], u[N]; \
            divide<N>(d, row, col, count, u); \
            load<N>(weight.at(row, col), count, w); \
            for (int k = 0; k < N; k++) w[k] = w[k] * keep - rate * scale / excess * u[k]; \
            store<N>(weight.at(row, col), count, w); \
            if (copy.first) store<N>(copy, row, col, count, w); \
        }); \
    }
ADAFACTOR(4)
ADAFACTOR(1)

__device__ __forceinline__ double sum_of_block_f64(double x) {
    __shared__ double parts[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    if (lane == 0) parts[warp] = x;
    __syncthreads();
    x = lane < warps ? parts[lane] : 0.0;
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

// Several squared norms, one for each row of blocks. Each is summed by blocks of its own number, so that its bits do not depend on
// the others.
#define MOST_NORMS 64
#define MOST_BLOCKS_OF_NORM 1024
template <class T> struct NormList {
    i64 rows[MOST_NORMS], cols[MOST_NORMS], blocks[MOST_NORMS];
    Matrix<T> x[MOST_NORMS];
    float *out[MOST_NORMS];
    i64 accumulate[MOST_NORMS];
    double *partials;
};

// A partial sum for each block.
#define SQUARED_NORMS(T, NAME, N) \
    extern "C" __global__ void squared_norms_##NAME##_##N(const __grid_constant__ NormList<T> list) { \
        int place = blockIdx.y; \
        i64 blocks = list.blocks[place]; \
        if (blockIdx.x >= blocks) return; \
        Matrix<T> x = list.x[place]; \
        double sum = 0.0; \
        each_vector_of<N>(blocks, list.rows[place], list.cols[place], [&](i64 row, i64 col, int count) { \
            float v[N], part = 0.0f; \
            load<N>(x.at(row, col), count, v); \
            for (int i = 0; i < N; i++) part += v[i] * v[i]; \
            sum += part; \
        }); \
        sum = sum_of_block_f64(sum); \
        if (threadIdx.x == 0) list.partials[place * MOST_BLOCKS_OF_NORM + blockIdx.x] = sum; \
    }
FOR_TYPES(SQUARED_NORMS)

__device__ __forceinline__ void add_up(i64 blocks, const double *partials, float *out, bool accumulate) {
    double sum = 0.0;
    for (i64 i = threadIdx.x; i < blocks; i += blockDim.x) sum += partials[i];
    sum = sum_of_block_f64(sum);
    if (threadIdx.x == 0) *out = (float)((accumulate ? (double)*out : 0.0) + sum);
}

// A block for each.
extern "C" __global__ void squared_norm_totals(const __grid_constant__ NormList<float> list) {
    int place = blockIdx.x;
    const double *partials = list.partials + place * MOST_BLOCKS_OF_NORM;
    add_up(list.blocks[place], partials, list.out[place], list.accumulate[place]);
}

#define ADAFACTOR_NORM(N) \
    extern "C" __global__ void adafactor_norm_##N(i64 rows, i64 cols, Divided d, double *partials) { \
        double sum = 0.0; \
        each_vector<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            float u[N], part = 0.0f; \
            divide<N>(d, row, col, count, u); \
            for (int k = 0; k < N; k++) part += k < count ? u[k] * u[k] : 0.0f; \
            sum += part; \
        }); \
        sum = sum_of_block_f64(sum); \
        if (threadIdx.x == 0) partials[blockIdx.x] = sum; \
    }
ADAFACTOR_NORM(4)
ADAFACTOR_NORM(1)

// One block.
extern "C" __global__ void partial_sums_total(i64 blocks, const double *partials, float *out) {
    add_up(blocks, partials, out, true);
}

extern "C" __global__ void clip_factor(const float *squared_norm, float limit, float *out) {
    float factor = limit / (sqrtf(*squared_norm) + 1e-6f);
    // Not a minimum, which would turn the factor of a NaN into one.
    *out = factor > 1.0f ? 1.0f : factor;
}
