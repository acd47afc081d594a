// Gradients of attention, with P = exp(scale · q·kᵀ - logsum) and δ = Σ dout · out of each query:
// dv = Pᵀ·dout, dS = P ∘ (dout·vᵀ - δ), dq = scale · dS·k, dk = scale · dSᵀ·q. Dropout multiplies P in dv, and dout·vᵀ,
// by 0 or `kept`: what is kept is multiplied at the end, and δ was divided by it. Changed scores are changed again, and a
// cap multiplies dS by its derivative.
//
// Queries' gradients and keys' gradients are computed by kernels of their own, each in a fixed order.

#define QUERIES (WIDTH <= 64 ? 64 : WIDTH <= 256 ? 32 : 16)
#define KEYS (WIDTH <= 128 ? 64 : WIDTH <= 256 ? 32 : 16)
// Narrow heads leave room for three blocks on a multiprocessor, which is faster by some percent; wide ones would spill.
#define LEAST_BLOCKS (WIDTH <= 64 ? 3 : 1)
#define KEPT (WIDTH <= 64)
// Rows of a block.
#define ROWS (WARPS * ROW)

// A block has a tile of queries of one head, past which tiles of keys stream.
extern "C" __global__ void __launch_bounds__(THREADS, LEAST_BLOCKS)
    attention_backward_queries(const __grid_constant__ Parameters p) {
    // [ROWS, W] each, then [KEYS, W] twice each.
    u16 *queries = (u16 *)memory, *dout = queries + ROWS * PITCH;
    u16 *keys = dout + ROWS * PITCH, *values = keys + 2 * KEYS * PITCH;
    Tile tile;
    if (!find_tile(p, gridDim.x - 1 - blockIdx.x, ROWS, tile)) {
        return;
    }
    int head = p.head_start + blockIdx.y, key_head = head / p.group;
    int row = threadIdx.x / LANES * ROW;
    int last = min(tile.start + ROWS, tile.queries) - 1;
    int begin = first_seen(p, tile.start) / KEYS * KEYS, end = end_seen(p, last, tile.keys);
    int all_from = first_seen(p, last), all_to = end_seen(p, tile.start, tile.keys);

    fetch_rows<ROWS>(p, p.q, head, tile.first_query, tile.start, tile.queries, queries);
    fetch_rows<ROWS>(p, p.dout, head, tile.first_query, tile.start, tile.queries, dout);
    fetch_rows<KEYS>(p, p.k, key_head, tile.first_key, begin, tile.keys, keys);
    fetch_rows<KEYS>(p, p.v, key_head, tile.first_key, begin, tile.keys, values);
    commit_copies();

    int position[2], seen_from[2], seen_to[2];
    u64 noise[2];
    float logsum[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int query = min(tile.start + row + ROW_OF(2 * half), last), token = tile.first_query + query;
        position[half] = query;
        seen_from[half] = first_seen(p, query);
        seen_to[half] = end_seen(p, query, tile.keys);
        noise[half] = DROPS ? noise_of(p, head, token) : 0;
        logsum[half] = logsum_of(p, token, head) * LOG2_E;
        delta[half] = delta_of(p, token, head);
    }
    float scale = CHANGES ? LOG2_E : p.scale * LOG2_E, slope = CHANGES ? slope_of(p, head) : 0;
    Left<KEPT> left_queries = {queries, row}, left_dout = {dout, row};
    float sums[SLICE / 8][4];
    clear(sums);
    for (int start = begin, stage = 0; start < end; start += KEYS, stage ^= 1) {
        if (start + KEYS < end) {
            int other = (stage ^ 1) * KEYS * PITCH;
            fetch_rows<KEYS>(p, p.k, key_head, tile.first_key, start + KEYS, tile.keys, keys + other);
            fetch_rows<KEYS>(p, p.v, key_head, tile.first_key, start + KEYS, tile.keys, values + other);
        }
        commit_copies();
        wait_copies<1>();
        __syncthreads();
        if (start == begin) {
            left_queries.keep();
            left_dout.keep();
        }
        float weights[KEYS / 8][4], gradients[KEYS / 8][4];
        multiply_transposed<KEYS>(weights, left_queries, keys + stage * KEYS * PITCH);
        if (start < all_from || start + KEYS > all_to) {
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++) {
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    int key = start + COLUMN_OF(i, n);
                    if (key < seen_from[n / 2] || key >= seen_to[n / 2]) {
                        weights[i][n] = -INFINITY_F32;
                    }
                }
            }
        }
        multiply_transposed<KEYS>(gradients, left_dout, values + stage * KEYS * PITCH);
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++) {
#pragma unroll
            for (int n = 0; n < 4; n++) {
                float score = weights[i][n], derivative = 1;
                if constexpr (CHANGES) {
                    Changed now = changed(p, score, slope, start + COLUMN_OF(i, n) - position[n / 2]);
                    score = now.score;
                    derivative = now.derivative;
                }
                float weight = power_of_two(score * scale - logsum[n / 2]);
                bool drops = DROPS && is_dropped(p, noise[n / 2], start + COLUMN_OF(i, n));
                gradients[i][n] = weight * ((drops ? 0 : gradients[i][n]) - delta[n / 2]);
                if constexpr (CHANGES) {
                    gradients[i][n] *= derivative;
                }
            }
        }
        add_weighted<KEYS>(sums, gradients, keys + stage * KEYS * PITCH);
        __syncthreads();
    }
    float factors[2] = {p.scale * p.kept, p.scale * p.kept};
    store_rows(p, p.dq, head, tile.first_query, tile.start + row, tile.queries, sums, factors);
}

// A block has a tile of keys of one key head, past which tiles of queries of all heads of its group stream. The sums of
// both gradients are too many for a thread's registers where heads are wide: it is then launched for each.
template <bool DK, bool DV> __device__ __forceinline__ void backward_keys(const Parameters &p) {
    // [ROWS, W] each, then [QUERIES, W] twice each, then [QUERIES] twice each.
    u16 *keys = (u16 *)memory, *values = keys + ROWS * PITCH;
    u16 *queries = values + ROWS * PITCH, *dout = queries + 2 * QUERIES * PITCH;
    u64 *noise = (u64 *)(dout + 2 * QUERIES * PITCH);
    float *logsum = (float *)(noise + 2 * QUERIES), *delta = logsum + 2 * QUERIES;
    Tile tile;
    // The first keys of a causal segment are seen by the most queries: they go first.
    if (!find_tile(p, blockIdx.x, ROWS, tile)) {
        return;
    }
    int key_head = p.head_start / p.group + blockIdx.y;
    int row = threadIdx.x / LANES * ROW;
    int last = min(tile.start + ROWS, tile.keys) - 1;
    int begin = first_seeing(p, tile.start) / QUERIES * QUERIES, end = end_seeing(p, last, tile.queries);
    int tiles = (end - begin + QUERIES - 1) / QUERIES, count = tiles * p.group;

    auto fetch = [&](int number) {
        int stage = number % 2, head = key_head * p.group + number / tiles;
        int start = begin + number % tiles * QUERIES;
        fetch_rows<QUERIES>(p, p.q, head, tile.first_query, start, tile.queries, queries + stage * QUERIES * PITCH);
        fetch_rows<QUERIES>(p, p.dout, head, tile.first_query, start, tile.queries, dout + stage * QUERIES * PITCH);
        for (int i = threadIdx.x; i < QUERIES; i += THREADS) {
            int token = tile.first_query + min(start + i, tile.queries - 1), at = stage * QUERIES + i;
            logsum[at] = logsum_of(p, token, head) * LOG2_E;
            delta[at] = delta_of(p, token, head);
            noise[at] = DROPS ? noise_of(p, head, token) : 0;
        }
    };
    fetch_rows<ROWS>(p, p.k, key_head, tile.first_key, tile.start, tile.keys, keys);
    fetch_rows<ROWS>(p, p.v, key_head, tile.first_key, tile.start, tile.keys, values);
    fetch(0);
    commit_copies();

    float scale = CHANGES ? LOG2_E : p.scale * LOG2_E;
    Left<KEPT> left_keys = {keys, row}, left_values = {values, row};
    float key_sums[DK ? SLICE / 8 : 1][4], value_sums[DV ? SLICE / 8 : 1][4];
    if constexpr (DK) {
        clear(key_sums);
    }
    if constexpr (DV) {
        clear(value_sums);
    }
    for (int number = 0; number < count; number++) {
        if (number + 1 < count) {
            fetch(number + 1);
        }
        commit_copies();
        wait_copies<1>();
        __syncthreads();
        int stage = number % 2 * QUERIES, start = begin + number % tiles * QUERIES;
        float slope = CHANGES ? slope_of(p, key_head * p.group + number / tiles) : 0;
        if (number == 0) {
            left_keys.keep();
            left_values.keep();
        }
        // Transposed: keys down, queries across.
        float weights[QUERIES / 8][4], gradients[QUERIES / 8][4];
        multiply_transposed<QUERIES>(weights, left_keys, queries + stage * PITCH);
        int last_query = start + QUERIES - 1;
        bool sees_all = last_query < tile.queries && first_seen(p, last_query) <= tile.start &&
                        tile.start + ROWS <= end_seen(p, start, tile.keys);
        if (!sees_all) {
#pragma unroll
            for (int i = 0; i < QUERIES / 8; i++) {
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    int query = start + COLUMN_OF(i, n), key = tile.start + row + ROW_OF(n);
                    bool sees = key >= first_seen(p, query) && key < end_seen(p, query, tile.keys);
                    if (query >= tile.queries || !sees) {
                        weights[i][n] = -INFINITY_F32;
                    }
                }
            }
        }
        if constexpr (DK) {
            multiply_transposed<QUERIES>(gradients, left_values, dout + stage * PITCH);
        }
#pragma unroll
        for (int i = 0; i < QUERIES / 8; i++) {
#pragma unroll
            for (int n = 0; n < 4; n++) {
                int column = COLUMN_OF(i, n), key = tile.start + row + ROW_OF(n);
                float score = weights[i][n], derivative = 1;
                if constexpr (CHANGES) {
                    Changed now = changed(p, score, slope, key - (start + column));
                    score = now.score;
                    derivative = now.derivative;
                }
                float weight = power_of_two(score * scale - logsum[stage + column]);
                bool drops = DROPS && is_dropped(p, noise[stage + column], key);
                weights[i][n] = drops ? 0 : weight;
                if constexpr (DK) {
                    gradients[i][n] = weight * ((drops ? 0 : gradients[i][n]) - delta[stage + column]);
                    if constexpr (CHANGES) {
                        gradients[i][n] *= derivative;
                    }
                }
            }
        }
        if constexpr (DV) {
            add_weighted<QUERIES>(value_sums, weights, dout + stage * PITCH);
        }
        if constexpr (DK) {
            add_weighted<QUERIES>(key_sums, gradients, queries + stage * PITCH);
        }
        __syncthreads();
    }
    if constexpr (DK) {
        float factors[2] = {p.scale * p.kept, p.scale * p.kept};
        store_rows(p, p.dk, key_head, tile.first_key, tile.start + row, tile.keys, key_sums, factors);
    }
    if constexpr (DV) {
        float factors[2] = {p.kept, p.kept};
        store_rows(p, p.dv, key_head, tile.first_key, tile.start + row, tile.keys, value_sums, factors);
    }
}

#if WIDTH <= 128
extern "C" __global__ void __launch_bounds__(THREADS, LEAST_BLOCKS)
    attention_backward_keys_and_values(const __grid_constant__ Parameters p) {
    backward_keys<true, true>(p);
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, LEAST_BLOCKS)
    attention_backward_keys(const __grid_constant__ Parameters p) {
    backward_keys<true, false>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, LEAST_BLOCKS)
    attention_backward_values(const __grid_constant__ Parameters p) {
    backward_keys<false, true>(p);
}
#endif
