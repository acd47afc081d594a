// What of a chunk does not depend on its state: the numbers of its rows, T = (I + M)^-1 and P. A block has a chunk of one key head
// and takes its value heads in turn.

#define THREADS 128
#define MIX_PITCH (CHUNK + 4)
#define HALF (CHUNK / 2)

// Rows [16, C] of both scores, up to the diagonal, and of the queries' products with themselves around it.
struct Scores {
    float queries[CHUNK / 8][4], keys[CHUNK / 8][4], squares[2][4];
};

__device__ __forceinline__ void score(Scores &scores, const u16 *queries, const u16 *keys) {
    int warp = warp_of();
    clear(scores.queries);
    clear(scores.keys);
    clear(scores.squares);
#pragma unroll
    for (int k = 0; k < WIDTH; k += 16) {
        u32 of_queries[4], of_keys[4];
        load_left(of_queries, queries, PITCH, warp * 16, k);
        load_left(of_keys, keys, PITCH, warp * 16, k);
        // Turned right operands lie in the lanes as left ones do.
        multiply_add(scores.squares[0], of_queries, of_queries[0], of_queries[2]);
        multiply_add(scores.squares[1], of_queries, of_queries[1], of_queries[3]);
#pragma unroll
        for (int j = 0; j < CHUNK / 16; j++) {
            if (j > warp) continue;
            u32 right[4];
            load_matrices(right, beside(keys, PITCH, j * 16, k));
            multiply_add(scores.queries[2 * j], of_queries, right[0], right[1]);
            multiply_add(scores.queries[2 * j + 1], of_queries, right[2], right[3]);
            multiply_add(scores.keys[2 * j], of_keys, right[0], right[1]);
            multiply_add(scores.keys[2 * j + 1], of_keys, right[2], right[3]);
        }
    }
}

// 1 / √(Σ x² + ε) of the rows of queries and keys: the sums lie on the diagonals.
__device__ __forceinline__ void measure(const Parameters &p, const Scores &scores, float (&numbers)[NUMBERS][CHUNK]) {
    int lane = lane_of(), warp = warp_of(), row = lane / 4;
    if (lane % 4 != row / 2) return;
    float unscaled = 1.0f / sqrtf((float)p.key);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float(&of_queries)[4] = scores.squares[half];
        float query = row % 2 ? of_queries[2 * half + 1] : of_queries[2 * half], key = 0.0f;
#pragma unroll
        for (int j = 0; j < CHUNK / 16; j++) {
            const float(&of_keys)[4] = scores.keys[2 * j + half];
            if (j == warp) key = row % 2 ? of_keys[2 * half + 1] : of_keys[2 * half];
        }
        int at = warp * 16 + half * 8 + row;
        numbers[QUERY][at] = unscaled / sqrtf(query + EPSILON);
        numbers[KEY][at] = 1.0f / sqrtf(key + EPSILON);
    }
}

// A head's gates, by one warp: each lane has two neighbours.
__device__ __forceinline__ void fade(const Parameters &p, const Chunk &chunk, int head, float (&numbers)[NUMBERS][CHUNK]) {
    int lane = lane_of();
    float rate = expf(number_of_head(p.log_rate, head)), bias = number_of_head(p.bias, head);
    float g[2], take[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = 2 * lane + i;
        bool is_there = row < chunk.count;
        i64 token = chunk.first + (is_there ? row : 0);
        g[i] = is_there ? -rate * softplus(widen(*gate_at<bf16>(p.fade, token, head)) + bias) : 0.0f;
        take[i] = is_there ? exact_sigmoid(widen(*gate_at<bf16>(p.take, token, head))) : 0.0f;
    }
    double sum = (double)g[0] + (double)g[1];
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        double other = __shfl_up_sync(0xffffffffu, sum, lanes);
        if (lane >= lanes) sum += other;
    }
    double last = __shfl_sync(0xffffffffu, sum, 31);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = 2 * lane + i;
        double so_far = i == 0 ? sum - (double)g[1] : sum;
        float high = (float)so_far;
        float since = expf(high), left = expf((float)(last - so_far));
        numbers[TAKE][row] = take[i];
        numbers[SINCE][row] = since;
        numbers[LEFT][row] = left;
        numbers[HIGH][row] = high;
        numbers[LOW][row] = (float)(so_far - (double)high);
        numbers[FADE][row] = g[i];
    }
}

// The numbers that depend on the length of rows, too: one thread for each.
__device__ __forceinline__ void combine(float (&numbers)[NUMBERS][CHUNK]) {
    int row = threadIdx.x;
    if (row >= CHUNK) return;
    numbers[READ][row] = numbers[SINCE][row] * numbers[KEY][row];
    numbers[WRITE][row] = numbers[LEFT][row] * numbers[KEY][row];
    numbers[OUT][row] = numbers[SINCE][row] * numbers[QUERY][row];
}

// Writes P, and M to shared memory.
__device__ __forceinline__ void weigh(const Scores &scores, const float (&numbers)[NUMBERS][CHUNK], u16 *weights,
                                      float *mixing) {
    int lane = lane_of(), warp = warp_of();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int i = warp * 16 + lane / 4 + half * 8;
        float high = numbers[HIGH][i], low = numbers[LOW][i];
        float of_query = numbers[QUERY][i], of_key = numbers[TAKE][i] * numbers[KEY][i];
#pragma unroll
        for (int part = 0; part < CHUNK / 8; part++) {
            if (part / 2 > warp) continue;
            float weight[2], mix[2];
            int first = part * 8 + lane % 4 * 2;
            float2 highs = *(const float2 *)&numbers[HIGH][first], lows = *(const float2 *)&numbers[LOW][first];
            float2 keys = *(const float2 *)&numbers[KEY][first];
#pragma unroll
            for (int n = 0; n < 2; n++) {
                int j = first + n;
                float sum = (high - (n ? highs.y : highs.x)) + (low - (n ? lows.y : lows.x));
                float decay = j <= i ? exponential<true>(sum) : 0.0f;
                decay *= n ? keys.y : keys.x;
                weight[n] = scores.queries[part][2 * half + n] * of_query * decay;
                mix[n] = j < i ? scores.keys[part][2 * half + n] * of_key * decay : 0.0f;
            }
            *(u32 *)(weights + i * CHUNK + first) = rounded_pair(weight[0], weight[1]);
            *(float2 *)(mixing + i * MIX_PITCH + first) = make_float2(mix[0], mix[1]);
        }
    }
}

// Inverts a quarter on the diagonal, by one warp: a lane has a column.
__device__ __forceinline__ void substitute(const float *mixing, float *inverse) {
    int lane = lane_of();
    float column[HALF];
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        float sums[4] = {};
#pragma unroll
        for (int j = 0; j < i; j += 4) {
            float m[4];
            load<4>(mixing + i * MIX_PITCH + j, 4, m);
#pragma unroll
            for (int n = 0; n < 4; n++)
                if (j + n < i) sums[n] = fmaf(m[n], column[j + n], sums[n]);
        }
        column[i] = (i == lane ? 1.0f : 0.0f) - ((sums[0] + sums[1]) + (sums[2] + sums[3]));
        inverse[i * MIX_PITCH + lane] = column[i];
    }
}

// to [C/2, C/2] = factor · left · right, by the block.
__device__ __forceinline__ void multiply_quarters(const float *left, const float *right, float factor, float *to) {
    int row = threadIdx.x / 4, col = threadIdx.x % 4 * 8;
    float sums[8] = {};
#pragma unroll 2
    for (int k = 0; k < HALF; k += 4) {
        float x[4];
        load<4>(left + row * MIX_PITCH + k, 4, x);
#pragma unroll
        for (int m = 0; m < 4; m++) {
            float y[4], z[4];
            load<4>(right + (k + m) * MIX_PITCH + col, 4, y);
            load<4>(right + (k + m) * MIX_PITCH + col + 4, 4, z);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                sums[n] = fmaf(x[m], y[n], sums[n]);
                sums[4 + n] = fmaf(x[m], z[n], sums[4 + n]);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < 8; n++) to[row * MIX_PITCH + col + n] = factor * sums[n];
}

// T = (I + M)^-1: both quarters on the diagonal, and below them -T₂·M₂₁·T₁. The upper right of M is overwritten.
__device__ __forceinline__ void invert(float *mixing, float *inverse) {
    const int diagonal = HALF * MIX_PITCH + HALF, lower = HALF * MIX_PITCH;
    int warp = warp_of();
    if (warp < 2) substitute(mixing + warp * diagonal, inverse + warp * diagonal);
    __syncthreads();
    multiply_quarters(mixing + lower, inverse, 1.0f, mixing + HALF);
    __syncthreads();
    multiply_quarters(inverse + diagonal, mixing + HALF, -1.0f, inverse + lower);
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) delta_prepare(const __grid_constant__ Parameters p) {
    __shared__ __align__(16) float numbers[NUMBERS][CHUNK];
    Chunk chunk;
    if (!find_chunk(p, blockIdx.x, chunk)) return;
    u16 *queries = (u16 *)memory, *keys = queries + CHUNK * PITCH;
    int key_head = blockIdx.y;
    fetch_head<WIDTH>(p, p.q, key_head, chunk.first, chunk.count, p.key, 0, queries);
    fetch_head<WIDTH>(p, p.k, key_head, chunk.first, chunk.count, p.key, 0, keys);
    commit_copies();
    // While the tiles are on their way.
    if (warp_of() == 0) fade(p, chunk, key_head * p.ratio, numbers);
    wait_copies<0>();
    __syncthreads();
    Scores scores;
    score(scores, queries, keys);
    measure(p, scores, numbers);
    // The queries and keys are not needed any more.
    float *mixing = (float *)memory, *inverse = mixing + CHUNK * MIX_PITCH;
    for (int head = key_head * p.ratio; head < (key_head + 1) * p.ratio; head++) {
        i64 item = chunk.slot * p.heads + head;
        u16 *squares = squares_of(p, item);
        __syncthreads();
        if (head > key_head * p.ratio && warp_of() == 0) fade(p, chunk, head, numbers);
        __syncthreads();
        combine(numbers);
        float *to = numbers_of(p, item);
        const float *from = reinterpret_cast<const float *>(numbers);
        weigh(scores, numbers, squares + CHUNK * CHUNK, mixing);
        __syncthreads();
        for (int i = threadIdx.x; i < NUMBERS * CHUNK; i += THREADS) to[i] = from[i];
        invert(mixing, inverse);
#pragma unroll
        for (int i = threadIdx.x; i < CHUNK * CHUNK / 8; i += THREADS) {
            int row = i / 8, col = i % 8 * 8;
            if (col / 16 > row / 16) continue;
            float x[8];
            load<4>(inverse + row * MIX_PITCH + col, 4, reinterpret_cast<float(&)[4]>(x[0]));
            load<4>(inverse + row * MIX_PITCH + col + 4, 4, reinterpret_cast<float(&)[4]>(x[4]));
            const u32 words[4] = {rounded_pair(x[0], x[1]), rounded_pair(x[2], x[3]), rounded_pair(x[4], x[5]), rounded_pair(x[6], x[7])};
            store_four(squares + row * CHUNK + col, words);
        }
    }
}
