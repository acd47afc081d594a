// The rule token by token: for generation, and in f32, which tensor units would round. A block has 32 columns of a head's state, a lane
// each; its warps share the rows.

#define WARPS 8
#define MOST_KEY 256
#define ROWS (MOST_KEY / WARPS)

// Divides a row by its length, and multiplies it by `scale`: to shared memory.
template <class T>
__device__ __forceinline__ void load_unit(const Parameters &p, const Heads &heads, i64 token, int head, float scale, float *to) {
    int col = threadIdx.x;
    float x = col < p.key ? widen(head_at<T>(heads, token, head)[col]) : 0.0f;
    float squares = sum_of_block(x * x);
    if (col < p.key) to[col] = x * (scale / sqrtf(squares + EPSILON));
}

// The sum over the warps, the same in each.
__device__ __forceinline__ float sum_over_warps(float x, float (&parts)[WARPS][32]) {
    int lane = threadIdx.x % 32;
    parts[threadIdx.x / 32][lane] = x;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) sum += parts[warp][lane];
    return sum;
}

template <class T> __device__ __forceinline__ void go_by_tokens(const Parameters &p) {
    __shared__ float query[MOST_KEY], key[MOST_KEY], reads[WARPS][32], outs[WARPS][32];
    int start = p.offsets[blockIdx.x], end = p.offsets[blockIdx.x + 1], head = blockIdx.y, key_head = head / p.ratio;
    if (start == end || end - start > p.few) return;
    int warp = threadIdx.x / 32, col = blockIdx.z * 32 + threadIdx.x % 32;
    bool is_there = col < p.value;
    i64 first = ((i64)(p.first_segment + blockIdx.x) * p.heads + head) * p.key;
    float *states = (float *)p.states + first * p.states_stride + col;
    float rate = expf(number_of_head(p.log_rate, head)), bias = number_of_head(p.bias, head);
    float scale = 1.0f / sqrtf((float)p.key);
    float state[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int row = i * WARPS + warp;
        state[i] = p.states && is_there && row < p.key ? states[row * p.states_stride] : 0.0f;
    }
    for (i64 token = start; token < end; token++) {
        load_unit<T>(p, p.q, token, key_head, scale, query);
        load_unit<T>(p, p.k, token, key_head, 1.0f, key);
        float decay = expf(-rate * softplus(widen(*gate_at<T>(p.fade, token, head)) + bias));
        float take = exact_sigmoid(widen(*gate_at<T>(p.take, token, head)));
        float value = is_there ? widen(head_at<T>(p.v, token, head)[col]) : 0.0f;
        __syncthreads();
        float read = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int row = i * WARPS + warp;
            if (row >= p.key) continue;
            state[i] *= decay;
            read = fmaf(key[row], state[i], read);
        }
        float delta = take * (value - sum_over_warps(read, reads)), out = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int row = i * WARPS + warp;
            if (row >= p.key) continue;
            state[i] = fmaf(key[row], delta, state[i]);
            out = fmaf(query[row], state[i], out);
        }
        out = sum_over_warps(out, outs);
        if (warp == 0 && is_there) head_at<T>(p.out, token, head)[col] = narrow<T>(out);
        // The next token's sums wait for all threads before anything is overwritten.
    }
    if (!p.states || !is_there) return;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int row = i * WARPS + warp;
        if (row < p.key) states[row * p.states_stride] = state[i];
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) delta_tokens_f32(const __grid_constant__ Parameters p) {
    go_by_tokens<float>(p);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) delta_tokens_bf16(const __grid_constant__ Parameters p) {
    go_by_tokens<bf16>(p);
}

// Adds the shares of a head's numbers in order: a block for each head.
extern "C" __global__ void __launch_bounds__(32 * WARPS) delta_sums(const __grid_constant__ Parameters p) {
    __shared__ double sums[2][32 * WARPS];
    const double *shares = (const double *)p.sums + 2 * blockIdx.x;
    double of_rate = 0.0, of_bias = 0.0;
    for (i64 i = threadIdx.x; i < p.shares; i += blockDim.x) {
        of_rate += shares[2 * i * p.heads];
        of_bias += shares[2 * i * p.heads + 1];
    }
    sums[0][threadIdx.x] = of_rate;
    sums[1][threadIdx.x] = of_bias;
    for (int half = 16 * WARPS; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x >= half) continue;
        sums[0][threadIdx.x] += sums[0][threadIdx.x + half];
        sums[1][threadIdx.x] += sums[1][threadIdx.x + half];
    }
    if (threadIdx.x > 0) return;
    if (p.dlog_rate) ((float *)p.dlog_rate)[blockIdx.x] += (float)sums[0][0];
    if (p.dbias) ((float *)p.dbias)[blockIdx.x] += (float)sums[1][0];
}
