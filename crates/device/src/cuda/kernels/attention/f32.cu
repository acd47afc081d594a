// Attention in f32, by fused multiply-adds. Each warp has some rows of its block's tile; its lanes are the columns of a
// product of two tiles, or every 32nd column of a head. Compiled for a WIDTH, and for CHANGES of scores.

// Wide heads leave room for fewer rows in shared memory.
#define ROWS_EACH (WIDTH <= 256 ? 8 : 4)
#define ROWS (WARPS * ROWS_EACH)
#define COLUMNS LANES
// Floats from one row in shared memory to the next: eight lanes that read four floats of a row each meet all banks.
#define PITCH (WIDTH + 4)
#define PARTS (WIDTH / LANES)

template <int COUNT>
__device__ __forceinline__ void fetch_rows(const Parameters &p, const Heads &heads, int head, i64 first, int start,
                                           int end, float *to) {
    const float *from = (const float *)heads.address + head * heads.step;
    for (int i = threadIdx.x; i < COUNT * WIDTH; i += THREADS) {
        int row = i / WIDTH, column = i % WIDTH;
        bool is_there = start + row < end && column < p.dim;
        to[row * PITCH + column] = is_there ? from[(first + start + row) * heads.stride + column] : 0;
    }
}

// sums[i] = row i of this warp's, of `rows`, times this lane's row of `columns`.
__device__ __forceinline__ void multiply_transposed(float (&sums)[ROWS_EACH], const float *rows, const float *columns) {
    const float *lane_row = columns + threadIdx.x % LANES * PITCH;
    const float *warp_rows = rows + threadIdx.x / LANES * ROWS_EACH * PITCH;
#pragma unroll
    for (int i = 0; i < ROWS_EACH; i++) {
        sums[i] = 0;
    }
#pragma unroll 4
    for (int d = 0; d < WIDTH; d += 4) {
        float4 b = *(const float4 *)(lane_row + d);
#pragma unroll
        for (int i = 0; i < ROWS_EACH; i++) {
            float4 a = *(const float4 *)(warp_rows + i * PITCH + d);
            sums[i] = fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sums[i]))));
        }
    }
}

// sums [ROWS_EACH, W] += this warp's weights [ROWS_EACH, 32] · columns [32, W]
__device__ __forceinline__ void add_weighted(float (&sums)[ROWS_EACH][PARTS], const float *weights,
                                             const float *columns) {
    int lane = threadIdx.x % LANES;
#pragma unroll 2
    for (int key = 0; key < COLUMNS; key += 4) {
        float values[4][PARTS];
#pragma unroll
        for (int k = 0; k < 4; k++) {
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                values[k][part] = columns[(key + k) * PITCH + part * LANES + lane];
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS_EACH; i++) {
            float4 weight = *(const float4 *)(weights + i * COLUMNS + key);
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                float sum = fmaf(weight.y, values[1][part], fmaf(weight.x, values[0][part], sums[i][part]));
                sums[i][part] = fmaf(weight.w, values[3][part], fmaf(weight.z, values[2][part], sum));
            }
        }
    }
}

__device__ __forceinline__ void clear(float (&sums)[ROWS_EACH][PARTS]) {
#pragma unroll
    for (int i = 0; i < ROWS_EACH; i++) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            sums[i][part] = 0;
        }
    }
}

__device__ __forceinline__ void store_row(const Parameters &p, const Heads &heads, int head, i64 row,
                                          const float (&sums)[PARTS], float factor) {
    float *to = (float *)heads.address + row * heads.stride + head * heads.step;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        int column = part * LANES + threadIdx.x % LANES;
        if (column < p.dim) {
            to[column] = sums[part] * factor;
        }
    }
}

__device__ __forceinline__ float over_lanes(float x, bool adds) {
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) {
        float other = __shfl_xor_sync(0xffffffff, x, distance);
        x = adds ? x + other : fmaxf(x, other);
    }
    return x;
}

__device__ __forceinline__ bool sees(const Parameters &p, int position, int key, int keys) {
    return key >= first_seen(p, position) && key < end_seen(p, position, keys);
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_forward(const __grid_constant__ Parameters p) {
    // [ROWS, W], [32, W] twice; this warp's [ROWS_EACH, 32]
    float *queries = (float *)memory, *keys = queries + ROWS * PITCH, *values = keys + COLUMNS * PITCH;
    float *weights = values + COLUMNS * PITCH + threadIdx.x / LANES * ROWS_EACH * COLUMNS;
    Tile tile;
    if (!find_tile(p, gridDim.x - 1 - blockIdx.x, ROWS, tile)) {
        return;
    }
    int head = p.head_start + blockIdx.y, key_head = head / p.group, lane = threadIdx.x % LANES;
    int first = tile.start + threadIdx.x / LANES * ROWS_EACH, last = min(tile.start + ROWS, tile.queries) - 1;
    int begin = first_seen(p, tile.before + tile.start) / COLUMNS * COLUMNS;
    int end = end_seen(p, tile.before + last, tile.keys);
    fetch_rows<ROWS>(p, p.q, head, tile.first_query, tile.start, tile.queries, queries);
    float highest[ROWS_EACH], total[ROWS_EACH], sums[ROWS_EACH][PARTS];
    clear(sums);
    float sink = CHANGES ? sink_of(p, head) : -INFINITY_F32, slope = CHANGES ? slope_of(p, head) : 0;
#pragma unroll
    for (int i = 0; i < ROWS_EACH; i++) {
        highest[i] = fmaxf(sink, LOWEST);
        // Lanes' totals are added up.
        total[i] = CHANGES && lane == 0 ? expf(sink - highest[i]) : 0;
    }
    for (int start = begin; start < end; start += COLUMNS) {
        __syncthreads();
        fetch_rows<COLUMNS>(p, p.k, key_head, tile.first_key, start, tile.keys, keys);
        fetch_rows<COLUMNS>(p, p.v, key_head, tile.first_key, start, tile.keys, values);
        __syncthreads();
        float scores[ROWS_EACH];
        multiply_transposed(scores, queries, keys);
#pragma unroll
        for (int i = 0; i < ROWS_EACH; i++) {
            int query = min(first + i, last), key = start + lane;
            float score = -INFINITY_F32;
            if (sees(p, tile.before + query, key, tile.keys)) {
                if constexpr (CHANGES) {
                    score = changed(p, scores[i], slope, key - (tile.before + query)).score;
                } else {
                    score = scores[i] * p.scale;
                }
            }
            float risen = fmaxf(highest[i], over_lanes(score, false)), factor = expf(highest[i] - risen);
            float weight = expf(score - risen);
            highest[i] = risen;
            total[i] = total[i] * factor + weight;
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                sums[i][part] *= factor;
            }
            if (p.dropped_below > 0 && is_dropped(p, noise_of(p, head, tile.first_query + query), key)) {
                weight = 0;
            }
            weights[i * COLUMNS + lane] = weight;
        }
        __syncwarp();
        add_weighted(sums, weights, values);
        __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < ROWS_EACH; i++) {
        float sum = over_lanes(total[i], true);
        if (first + i < tile.queries) {
            int token = tile.first_query + first + i;
            store_row(p, p.out, head, token, sums[i], p.kept / sum);
            if (p.logsum && lane == 0) {
                ((float *)p.logsum)[token * p.logsum_stride + head] = highest[i] + logf(sum);
            }
        }
    }
}

// See backward_bf16.cu for the formulas.
extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_queries(const __grid_constant__ Parameters p) {
    float *queries = (float *)memory, *dout = queries + ROWS * PITCH, *keys = dout + ROWS * PITCH;
    float *values = keys + COLUMNS * PITCH;
    float *weights = values + COLUMNS * PITCH + threadIdx.x / LANES * ROWS_EACH * COLUMNS;
    Tile tile;
    if (!find_tile(p, gridDim.x - 1 - blockIdx.x, ROWS, tile)) {
        return;
    }
    int head = p.head_start + blockIdx.y, key_head = head / p.group, lane = threadIdx.x % LANES;
    int first = tile.start + threadIdx.x / LANES * ROWS_EACH, last = min(tile.start + ROWS, tile.queries) - 1;
    int begin = first_seen(p, tile.start) / COLUMNS * COLUMNS, end = end_seen(p, last, tile.keys);
    fetch_rows<ROWS>(p, p.q, head, tile.first_query, tile.start, tile.queries, queries);
    fetch_rows<ROWS>(p, p.dout, head, tile.first_query, tile.start, tile.queries, dout);
    float slope = CHANGES ? slope_of(p, head) : 0;
    float sums[ROWS_EACH][PARTS];
    clear(sums);
    for (int start = begin; start < end; start += COLUMNS) {
        __syncthreads();
        fetch_rows<COLUMNS>(p, p.k, key_head, tile.first_key, start, tile.keys, keys);
        fetch_rows<COLUMNS>(p, p.v, key_head, tile.first_key, start, tile.keys, values);
        __syncthreads();
        float scores[ROWS_EACH], gradients[ROWS_EACH];
        multiply_transposed(scores, queries, keys);
        multiply_transposed(gradients, dout, values);
#pragma unroll
        for (int i = 0; i < ROWS_EACH; i++) {
            int query = min(first + i, last), token = tile.first_query + query, key = start + lane;
            float weight = 0, derivative = 1;
            if (sees(p, query, key, tile.keys)) {
                if constexpr (CHANGES) {
                    Changed now = changed(p, scores[i], slope, key - query);
                    weight = expf(now.score - logsum_of(p, token, head));
                    derivative = now.derivative;
                } else {
                    weight = expf(scores[i] * p.scale - logsum_of(p, token, head));
                }
            }
            if (p.dropped_below > 0 && is_dropped(p, noise_of(p, head, token), key)) {
                gradients[i] = 0;
            }
            float gradient = weight * (gradients[i] - delta_of(p, token, head));
            weights[i * COLUMNS + lane] = CHANGES ? gradient * derivative : gradient;
        }
        __syncwarp();
        add_weighted(sums, weights, keys);
        __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < ROWS_EACH; i++) {
        if (first + i < tile.queries) {
            store_row(p, p.dq, head, tile.first_query + first + i, sums[i], p.scale * p.kept);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_keys_and_values(const __grid_constant__ Parameters p) {
    float *keys = (float *)memory, *values = keys + ROWS * PITCH, *queries = values + ROWS * PITCH;
    float *dout = queries + COLUMNS * PITCH;
    float *weights = dout + COLUMNS * PITCH + threadIdx.x / LANES * ROWS_EACH * COLUMNS;
    float *gradients = weights + ROWS * COLUMNS;
    Tile tile;
    if (!find_tile(p, blockIdx.x, ROWS, tile)) {
        return;
    }
    int key_head = p.head_start / p.group + blockIdx.y, lane = threadIdx.x % LANES;
    int first = tile.start + threadIdx.x / LANES * ROWS_EACH, last = min(tile.start + ROWS, tile.keys) - 1;
    int begin = first_seeing(p, tile.start), end = end_seeing(p, last, tile.queries);
    fetch_rows<ROWS>(p, p.k, key_head, tile.first_key, tile.start, tile.keys, keys);
    fetch_rows<ROWS>(p, p.v, key_head, tile.first_key, tile.start, tile.keys, values);
    float key_sums[ROWS_EACH][PARTS], value_sums[ROWS_EACH][PARTS];
    clear(key_sums);
    clear(value_sums);
    for (u32 member = 0; member < p.group; member++) {
        int head = key_head * p.group + member;
        float slope = CHANGES ? slope_of(p, head) : 0;
        for (int start = begin; start < end; start += COLUMNS) {
            __syncthreads();
            fetch_rows<COLUMNS>(p, p.q, head, tile.first_query, start, tile.queries, queries);
            fetch_rows<COLUMNS>(p, p.dout, head, tile.first_query, start, tile.queries, dout);
            __syncthreads();
            float scores[ROWS_EACH], products[ROWS_EACH];
            multiply_transposed(scores, keys, queries);
            multiply_transposed(products, values, dout);
            int query = min(start + lane, tile.queries - 1), token = tile.first_query + query;
            float logsum = logsum_of(p, token, head), delta = delta_of(p, token, head);
            u64 noise = p.dropped_below > 0 ? noise_of(p, head, token) : 0;
#pragma unroll
            for (int i = 0; i < ROWS_EACH; i++) {
                int key = first + i;
                float weight = 0, derivative = 1;
                if (start + lane < tile.queries && sees(p, query, key, tile.keys)) {
                    if constexpr (CHANGES) {
                        Changed now = changed(p, scores[i], slope, key - query);
                        weight = expf(now.score - logsum);
                        derivative = now.derivative;
                    } else {
                        weight = expf(scores[i] * p.scale - logsum);
                    }
                }
                bool drops = p.dropped_below > 0 && is_dropped(p, noise, key);
                weights[i * COLUMNS + lane] = drops ? 0 : weight;
                float gradient = weight * ((drops ? 0 : products[i]) - delta);
                gradients[i * COLUMNS + lane] = CHANGES ? gradient * derivative : gradient;
            }
            __syncwarp();
            add_weighted(value_sums, weights, dout);
            add_weighted(key_sums, gradients, queries);
            __syncwarp();
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS_EACH; i++) {
        if (first + i < tile.keys) {
            i64 row = tile.first_key + first + i;
            store_row(p, p.dk, key_head, row, key_sums[i], p.scale * p.kept);
            store_row(p, p.dv, key_head, row, value_sums[i], p.kept);
        }
    }
}
