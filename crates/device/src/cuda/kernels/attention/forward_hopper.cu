// out = drop(softmax(scale · q·kᵀ)) · v by warpgroups: a block has a tile of queries of one head, 64 for each of its
// warpgroups, past which tiles of keys stream, in a ring of three. While a tile's weights are computed, the last one's
// values are being added, and the next but one is on its way.

#define GROUPS 1
#define KEYS 64
#define LEAST_BLOCKS 3
#define STAGES 3
#define QUERIES (64 * GROUPS)
#define BLOCK_THREADS (GROUPS * GROUP_THREADS)

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, LEAST_BLOCKS)
    attention_forward(const __grid_constant__ Parameters p) {
    // [QUERIES, W], then [KEYS, W] thrice each.
    u32 queries = (shared_address(memory) + 1023) / 1024 * 1024, keys = queries + QUERIES * ROW_BYTES;
    u32 values = keys + STAGES * KEYS * ROW_BYTES;
    Tile tile;
    // The last queries of a causal segment see the most keys: they go first.
    if (!find_tile(p, gridDim.x - 1 - blockIdx.x, QUERIES, tile)) {
        return;
    }
    int head = p.head_start + blockIdx.y, key_head = head / p.group;
    int row = threadIdx.x / LANES * ROW;
    int last = min(tile.start + QUERIES, tile.queries) - 1;
    int begin = first_seen(p, tile.start) / KEYS * KEYS, end = end_seen(p, last, tile.keys);
    // Of this warpgroup: its queries, and the keys that all of them see.
    int group = threadIdx.x / GROUP_THREADS;
    u32 group_queries = queries + group * 64 * ROW_BYTES;
    int group_first = min(tile.start + group * 64, last), group_last = min(group_first + 63, last);
    int all_from = first_seen(p, group_last), all_to = end_seen(p, group_first, tile.keys);

    auto fetch = [&](int start) {
        if (start < end) {
            u32 stage = (start - begin) / KEYS % STAGES * (KEYS * ROW_BYTES);
            fetch_tile<KEYS, BLOCK_THREADS>(p, p.k, key_head, tile.first_key, start, tile.keys, keys + stage);
            fetch_tile<KEYS, BLOCK_THREADS>(p, p.v, key_head, tile.first_key, start, tile.keys, values + stage);
        }
        commit_copies();
    };
    fetch_tile<QUERIES, BLOCK_THREADS>(p, p.q, head, tile.first_query, tile.start, tile.queries, queries);
    fetch(begin);
    fetch(begin + KEYS);

    int position[2], seen_from[2], seen_to[2];
    u64 noise[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int query = position[half] = min(tile.start + row + ROW_OF(2 * half), last);
        seen_from[half] = first_seen(p, query);
        seen_to[half] = end_seen(p, query, tile.keys);
        noise[half] = DROPS ? noise_of(p, head, tile.first_query + query) : 0;
    }
    wait_copies<1>();
    show_to_products();
    __syncthreads();
    Softmax softmax = begin_softmax(p, head);
    float slope = CHANGES ? slope_of(p, head) : 0;
    float sums[WIDTH / 8][4];
    clear(sums);
    u32 stage = 0;
    int start = begin;
    // Every query sees a key. Sums that might not be a product's would have to be moved, and products would wait for it.
    do {
        float scores[KEYS / 8][4];
        u32 words[KEYS / 16][2][2];
        begin_products();
#pragma unroll
        for (int part = 0; part < KEYS / 64; part++) {
            float(&some)[8][4] = reinterpret_cast<float(&)[8][4]>(scores[8 * part]);
            multiply(some, group_queries, keys + stage + part * 64 * ROW_BYTES);
        }
        commit_products();
        if constexpr (DROPS) {
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++) {
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    u32 &pair = words[i][n / 2][n % 2];
                    pair = pair_word(noise[n / 2], start / 2 + COLUMN_OF(i, n));
                    // Drawn while the products run.
                    pin(pair);
                }
            }
        }
        // Also of the last tile's values, whose place the next but one takes.
        wait_products<0>();
        settle(sums);
        wait_copies<0>();
        show_to_products();
        __syncthreads();
        fetch(start + 2 * KEYS);
        settle(scores);
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
                    int distance = start + COLUMN_OF(i, n) - position[n / 2];
                    scores[i][n] = changed(p, scores[i][n], slope, distance).score;
                }
            }
        }
        weigh(scores, sums, softmax, CHANGES ? LOG2_E : p.scale * LOG2_E);
        u32 weights[KEYS / 16][4];
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
            float(&first)[4] = scores[2 * i], (&second)[4] = scores[2 * i + 1];
            if constexpr (DROPS) {
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    u32 pair = words[i][n / 2][n % 2];
                    first[n] = drops_first(p, pair) ? 0 : first[n];
                    second[n] = drops_second(p, pair) ? 0 : second[n];
                }
            }
            weights[i][0] = rounded_pair(first[0], first[1]);
            weights[i][1] = rounded_pair(first[2], first[3]);
            weights[i][2] = rounded_pair(second[0], second[1]);
            weights[i][3] = rounded_pair(second[2], second[3]);
        }
        begin_products();
        add_product(sums, weights, values + stage);
        commit_products();
        stage = stage + KEYS * ROW_BYTES == STAGES * KEYS * ROW_BYTES ? 0 : stage + KEYS * ROW_BYTES;
        start += KEYS;
    } while (start < end);
    wait_products<0>();
    settle(sums);

    float factors[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = over_row(softmax.sum[half], true);
        factors[half] = p.kept / sum;
        int query = tile.start + row + ROW_OF(2 * half);
        if (p.logsum && threadIdx.x % 4 == 0 && query < tile.queries) {
            float logsum = softmax.highest[half] * LN_2 + logf(sum);
            ((float *)p.logsum)[(tile.first_query + query) * p.logsum_stride + head] = logsum;
        }
    }
    store_rows(p, p.out, head, tile.first_query, tile.start + row, tile.queries, sums, factors);
}
#endif
