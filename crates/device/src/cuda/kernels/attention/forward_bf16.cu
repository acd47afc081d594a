// out = drop(softmax(scale · q·kᵀ)) · v: a block has a tile of queries of one head, past which tiles of keys stream.

#define QUERIES (WARPS * ROW)
#define KEYS (WIDTH <= 128 ? 64 : WIDTH <= 256 ? 32 : 16)

extern "C" __global__ void __launch_bounds__(THREADS) attention_forward(const __grid_constant__ Parameters p) {
    // [QUERIES, W], then [KEYS, W] twice each.
    u16 *queries = (u16 *)memory, *keys = queries + QUERIES * PITCH, *values = keys + 2 * KEYS * PITCH;
    Tile tile;
    // The last queries of a causal segment see the most keys: they go first.
    if (!find_tile(p, gridDim.x - 1 - blockIdx.x, QUERIES, tile)) {
        return;
    }
    int head = p.head_start + blockIdx.y, key_head = head / p.group;
    int row = threadIdx.x / LANES * ROW;
    int last = min(tile.start + QUERIES, tile.queries) - 1;
    int begin = first_seen(p, tile.before + tile.start) / KEYS * KEYS;
    int end = end_seen(p, tile.before + last, tile.keys);
    // Keys that all queries of the tile see.
    int all_from = first_seen(p, tile.before + last), all_to = end_seen(p, tile.before + tile.start, tile.keys);

    fetch_rows<QUERIES>(p, p.q, head, tile.first_query, tile.start, tile.queries, queries);
    fetch_rows<KEYS>(p, p.k, key_head, tile.first_key, begin, tile.keys, keys);
    fetch_rows<KEYS>(p, p.v, key_head, tile.first_key, begin, tile.keys, values);
    commit_copies();

    int position[2], seen_from[2], seen_to[2];
    u64 noise[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        position[half] = min(tile.start + row + ROW_OF(2 * half), last);
        seen_from[half] = first_seen(p, tile.before + position[half]);
        seen_to[half] = end_seen(p, tile.before + position[half], tile.keys);
        noise[half] = DROPS ? noise_of(p, head, tile.first_query + position[half]) : 0;
    }
    Left<(WIDTH <= 128)> left = {queries, row};
    Softmax softmax = begin_softmax(p, head);
    float slope = CHANGES ? slope_of(p, head) : 0;
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
            left.keep();
        }
        float scores[KEYS / 8][4];
        multiply_transposed<KEYS>(scores, left, keys + stage * KEYS * PITCH);
        if (start < all_from || start + KEYS > all_to) {
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++) {
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    int key = start + COLUMN_OF(i, n);
                    if (key < seen_from[n / 2] || key >= seen_to[n / 2]) {
                        scores[i][n] = -INFINITY_F32;
                    }
                }
            }
        }
        if constexpr (CHANGES) {
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++) {
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    int distance = start + COLUMN_OF(i, n) - (tile.before + position[n / 2]);
                    scores[i][n] = changed(p, scores[i][n], slope, distance).score;
                }
            }
        }
        weigh(scores, sums, softmax, CHANGES ? LOG2_E : p.scale * LOG2_E);
        if constexpr (DROPS) {
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++) {
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    if (is_dropped(p, noise[n / 2], start + COLUMN_OF(i, n))) {
                        scores[i][n] = 0;
                    }
                }
            }
        }
        add_weighted<KEYS>(sums, scores, values + stage * KEYS * PITCH);
        __syncthreads();
    }

    float factors[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = over_row(softmax.sum[half], true);
        factors[half] = p.kept / sum;
        int query = tile.start + row + ROW_OF(2 * half);
        if (p.logsum && SLICE_START == 0 && threadIdx.x % 4 == 0 && query < tile.queries) {
            float logsum = softmax.highest[half] * LN_2 + logf(sum);
            ((float *)p.logsum)[(tile.first_query + query) * p.logsum_stride + head] = logsum;
        }
    }
    store_rows(p, p.out, head, tile.first_query, tile.start + row, tile.queries, sums, factors);
}
