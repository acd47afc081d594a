// AdamW and the norm that clips its gradients: a single pass over memory each.

// What one update multiplies by; `Factors` of cuda/optimizer.rs.
struct Factors {
    float keep, beta1, beta1_rest, beta2, beta2_rest, rate, deviation, epsilon;
};

#define ADAMW(N) \
    extern "C" __global__ void adamw_##N( \
        i64 len, float *weight, const float *grad, float *mean, float *variance, Mixed copy, const float *grad_factor, \
        const unsigned *frozen, Factors f) { \
        float factor = grad_factor ? *grad_factor : 1.0f; \
        each_vector<N>(1, len, [&](i64, i64 i, int count) { \
            float w[N], g[N], m[N], v[N]; \
            load<N>(weight + i, count, w); \
            load<N>(grad + i, count, g); \
            load<N>(mean + i, count, m); \
            load<N>(variance + i, count, v); \
            /* N divides 32, so a vector's bits lie in one word. */ \
            unsigned bits = frozen ? frozen[i / 32] >> (i % 32) : 0; \
            for (int k = 0; k < N; k++) { \
                if (bits >> k & 1) continue; \
                g[k] *= factor; \
                m[k] = m[k] * f.beta1 + g[k] * f.beta1_rest; \
                v[k] = v[k] * f.beta2 + g[k] * g[k] * f.beta2_rest; \
                float change = -f.rate * m[k] / (sqrtf(v[k]) * f.deviation + f.epsilon); \
                w[k] = w[k] * f.keep + change; \
            } \
            store<N>(weight + i, count, w); \
            store<N>(mean + i, count, m); \
            store<N>(variance + i, count, v); \
            if (copy.first) store<N>(copy, 0, i, count, w); \
        }); \
    }
ADAMW(4)
ADAMW(1)

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

// A partial sum for each block.
#define SQUARED_NORM(T, NAME, N) \
    extern "C" __global__ void squared_norm_##NAME##_##N(i64 rows, i64 cols, Matrix<T> x, double *partials) { \
        double sum = 0.0; \
        each_vector<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            float v[N], part = 0.0f; \
            load<N>(x.at(row, col), count, v); \
            for (int i = 0; i < N; i++) part += v[i] * v[i]; \
            sum += part; \
        }); \
        sum = sum_of_block_f64(sum); \
        if (threadIdx.x == 0) partials[blockIdx.x] = sum; \
    }
FOR_TYPES(SQUARED_NORM)

// One block.
extern "C" __global__ void squared_norm_total(i64 blocks, const double *partials, float *out, int accumulate) {
    double sum = 0.0;
    for (i64 i = threadIdx.x; i < blocks; i += blockDim.x) sum += partials[i];
    sum = sum_of_block_f64(sum);
    if (threadIdx.x == 0) *out = (float)((accumulate ? (double)*out : 0.0) + sum);
}

extern "C" __global__ void clip_factor(const float *squared_norm, float limit, float *out) {
    float factor = limit / (sqrtf(*squared_norm) + 1e-6f);
    // Not a minimum, which would turn the factor of a NaN into one.
    *out = factor > 1.0f ? 1.0f : factor;
}
