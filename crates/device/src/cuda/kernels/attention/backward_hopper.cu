// Gradients of attention by warpgroups, in one pass: what backward_bf16.cu computes, with each score computed once.
//
// A block has a key head of a segment, and walks over its tiles of 128 keys, 64 for each of its two warpgroups. Past a tile
// stream tiles of 64 queries of all heads of the group. ScoreChanges and their gradients are computed transposed, keys down, so
// that they are left operands of dv and dk as they are; the gradients also go through shared memory, where both
// warpgroups read them for dq. The sums of dq lie in device memory between tiles of keys. A number of them belongs to one
// thread, which adds to it tile by tile, so the order is fixed.

#define KEYS 128
#define QUERIES 64
#define STAGES 3
#define BLOCK_THREADS (2 * GROUP_THREADS)
#define KEYS_BYTES (KEYS * ROW_BYTES)
#define QUERIES_BYTES (QUERIES * ROW_BYTES)

// A tile of queries, of one head, and the tile of keys that it passes.
struct Step {
    int keys, head, queries;
};

// What comes with the queries of a tile.
struct Stage {
    u64 noise[QUERIES];
    float logsum[QUERIES], delta[QUERIES];
};

// The tiles of keys that the queries from `first` to `last` see begin here, and the last of them.
__device__ __forceinline__ int first_keys(const Parameters &p, int first) {
    return first_seen(p, first) / KEYS * KEYS;
}

__device__ __forceinline__ int last_keys(const Parameters &p, int last, int keys) {
    return (end_seen(p, last, keys) - 1) / KEYS * KEYS;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    attention_backward(const __grid_constant__ Parameters p) {
    // [KEYS, W] twice each, then [KEYS, QUERIES] twice, then [QUERIES, W] thrice each.
    u32 base = (shared_address(memory) + 1023) / 1024 * 1024;
    u32 keys = base, values = keys + 2 * KEYS_BYTES, gradients = values + 2 * KEYS_BYTES;
    u32 queries = gradients + 2 * KEYS_BYTES, dout = queries + STAGES * QUERIES_BYTES;
    Stage *stages = (Stage *)(memory + (dout + STAGES * QUERIES_BYTES - shared_address(memory)));

    int first_token = p.offsets[blockIdx.x], len = p.offsets[blockIdx.x + 1] - first_token;
    int key_head = p.head_start / p.group + blockIdx.y, first_head = key_head * p.group;
    if (len <= 0) {
        return;
    }
    int group = threadIdx.x / GROUP_THREADS, lane = threadIdx.x % LANES;
    // This warp's rows among the keys of a tile, and among the queries of one.
    int key_row = threadIdx.x / LANES * ROW, query_row = threadIdx.x % GROUP_THREADS / LANES * ROW;

    auto first_queries = [&](int keys) { return first_seeing(p, keys) / QUERIES * QUERIES; };
    auto end_queries = [&](int keys) { return end_seeing(p, min(keys + KEYS, len) - 1, len); };
    auto advance = [&](Step &step) {
        step.queries += QUERIES;
        if (step.queries >= end_queries(step.keys)) {
            step.head++;
            if (step.head == first_head + (int)p.group) {
                step.head = first_head;
                step.keys += KEYS;
            }
            step.queries = first_queries(step.keys);
        }
    };
    auto fetch_queries = [&](const Step &step, int stage) {
        if (step.keys < len) {
            fetch_tile<QUERIES, BLOCK_THREADS>(p, p.q, step.head, first_token, step.queries, len,
                                               queries + stage * QUERIES_BYTES);
            fetch_tile<QUERIES, BLOCK_THREADS>(p, p.dout, step.head, first_token, step.queries, len,
                                               dout + stage * QUERIES_BYTES);
            int query = threadIdx.x % QUERIES, token = first_token + step.queries + query;
            bool is_there = step.queries + query < len;
            // A query that is not there has zeros everywhere, and adds nothing to anything.
            if (threadIdx.x / QUERIES == 0) {
                copy_number(shared_address(&stages[stage].logsum[query]),
                            (const float *)p.logsum + token * p.logsum_stride + step.head, is_there);
            } else if (threadIdx.x / QUERIES == 1) {
                copy_number(shared_address(&stages[stage].delta[query]),
                            (const float *)p.delta + (i64)(step.head - p.head_start) * p.tokens + token, is_there);
            } else if (DROPS && threadIdx.x / QUERIES == 2) {
                stages[stage].noise[query] = noise_of(p, step.head, token);
            }
        }
        commit_copies();
    };
    auto fetch_keys = [&](int start) {
        if (start < len) {
            u32 other = start / KEYS % 2 * KEYS_BYTES;
            fetch_tile<KEYS, BLOCK_THREADS>(p, p.k, key_head, first_token, start, len, keys + other);
            fetch_tile<KEYS, BLOCK_THREADS>(p, p.v, key_head, first_token, start, len, values + other);
        }
        commit_copies();
    };

    Step step = {0, first_head, first_queries(0)}, ahead = step;
    fetch_keys(0);
    fetch_queries(ahead, 0);
    advance(ahead);
    fetch_queries(ahead, 1);

    float scale = CHANGES ? LOG2_E : p.scale * LOG2_E, factor = p.scale * p.kept;
    float dq[4][4], loaded[4][4];
    // The step that `dq` is of; its products may be under way.
    Step last = {-1, 0, 0};
    bool begins = false, ends = false;
    // The sums of a tile of queries, four numbers of each thread behind those of the thread before.
    int all_tiles = (p.offsets[p.segments] - p.offsets[0]) / QUERIES + p.segments;
    int first_tile = (first_token - p.offsets[0]) / QUERIES + blockIdx.x;
    auto sums_of_last = [&]() {
        i64 tile = (i64)(last.head - p.head_start) * all_tiles + first_tile + last.queries / QUERIES;
        return (float *)p.dq_sums + tile * (QUERIES * WIDTH) + threadIdx.x * 4;
    };
    // Before the products are done: what dq is added to.
    auto load_dq = [&](bool is_new) {
        ends = last.keys == last_keys(p, min(last.queries + QUERIES, len) - 1, len);
        begins = last.keys == first_keys(p, last.queries);
        bool loads = is_new && ends && !begins;
        const float *from = sums_of_last();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            loaded[i][0] = loaded[i][1] = loaded[i][2] = loaded[i][3] = 0;
            if (loads) {
                load_four(loaded[i], from + i * 4 * BLOCK_THREADS);
            }
        }
    };
    auto store_dq = [&](bool is_new) {
        if (!is_new) {
            return;
        }
        float *to = sums_of_last();
        if (ends) {
            int column = group * 32 + lane % 4 * 2;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int query = last.queries + query_row + lane / 4 + half * 8;
                u16 *out = (u16 *)p.dq.address + last.head * p.dq.step + (first_token + query) * p.dq.stride + column;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float first = dq[i][2 * half] + loaded[i][2 * half];
                    float second = dq[i][2 * half + 1] + loaded[i][2 * half + 1];
                    if (query < len && column + i * 8 < p.dim) {
                        *(u32 *)(out + i * 8) = rounded_pair(first * factor, second * factor);
                    }
                }
            }
        } else if (begins) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                *(float4 *)(to + i * 4 * BLOCK_THREADS) = make_float4(dq[i][0], dq[i][1], dq[i][2], dq[i][3]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                add_four(to + i * 4 * BLOCK_THREADS, dq[i]);
            }
        }
    };

    float dk[8][4], dv[8][4];
    // Tiles of queries so far, and at the last tile of keys.
    int number = 0, begun = 0;
    do {
        u32 here = step.keys / KEYS % 2 * KEYS_BYTES;
        // Keys come with the second tile of queries after theirs, unless there was none.
        if (number - begun < 2) {
            wait_copies<0>();
            show_to_products();
            __syncthreads();
        }
        begun = number;
        u32 group_keys = keys + here + group * 64 * ROW_BYTES, group_values = values + here + group * 64 * ROW_BYTES;
        clear(dk);
        clear(dv);
        int start = step.keys;
        do {
            int stage = number % STAGES;
            u32 tile_queries = queries + stage * QUERIES_BYTES, tile_dout = dout + stage * QUERIES_BYTES;
            const Stage &numbers = stages[stage];
            float slope = CHANGES ? slope_of(p, step.head) : 0;
            // Transposed: keys down, queries across.
            float weights[8][4], products[8][4];
            begin_products();
            multiply(weights, group_keys, tile_queries);
            multiply(products, group_values, tile_dout);
            commit_products();
            u32 words[8][2];
            if constexpr (DROPS) {
                u32 pair = (start + key_row) / 2 + lane / 4;
#pragma unroll
                for (int i = 0; i < 8; i++) {
#pragma unroll
                    for (int n = 0; n < 2; n++) {
                        words[i][n] = pair_word(numbers.noise[COLUMN_OF(i, n)], pair);
                        // Drawn while the products run.
                        pin(words[i][n]);
                    }
                }
            }
            load_dq(number > begun);
            wait_products<0>();
            settle(dq);
            settle(weights);
            settle(products);
            // Of the first query and this lane's first key.
            int distance = step.queries + lane % 4 * 2 - (start + key_row + lane / 4);
            if (p.causal && !p.window) {
                if (step.queries < start + group * 64 + 63) {
#pragma unroll
                    for (int i = 0; i < 8; i++) {
#pragma unroll
                        for (int n = 0; n < 4; n++) {
                            weights[i][n] = distance < n / 2 * 8 - i * 8 - n % 2 ? -INFINITY_F32 : weights[i][n];
                        }
                    }
                }
            } else if (first_seen(p, step.queries + QUERIES - 1) > start + group * 64 ||
                       start + group * 64 + 64 > end_seen(p, step.queries, len)) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
#pragma unroll
                    for (int n = 0; n < 4; n++) {
                        int query = step.queries + COLUMN_OF(i, n), key = start + key_row + ROW_OF(n);
                        bool sees = key >= first_seen(p, query) && key < end_seen(p, query, len);
                        weights[i][n] = sees ? weights[i][n] : -INFINITY_F32;
                    }
                }
            }
            // A dropped weight is negative from here on.
            u32 left[4][4];
#pragma unroll
            for (int i = 0; i < 8; i++) {
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    float below = numbers.logsum[COLUMN_OF(i, n)] * LOG2_E;
                    if constexpr (CHANGES) {
                        // A query that is not there has no logsum that its changed scores are below.
                        int query = step.queries + COLUMN_OF(i, n), distance = start + key_row + lane / 4 - query;
                        bool is_there = query < len;
                        Changed first = changed(p, is_there ? weights[i][n] : -INFINITY_F32, slope, distance);
                        Changed second = changed(p, is_there ? weights[i][n + 2] : -INFINITY_F32, slope, distance + 8);
                        weights[i][n] = first.score;
                        weights[i][n + 2] = second.score;
                        // What a weight is multiplied by: its own sign tells no more whether it was dropped.
                        float delta = numbers.delta[COLUMN_OF(i, n)];
                        bool drops = DROPS && drops_first(p, words[i][n]);
                        products[i][n] = first.derivative * ((drops ? 0 : products[i][n]) - delta);
                        drops = DROPS && drops_second(p, words[i][n]);
                        products[i][n + 2] = second.derivative * ((drops ? 0 : products[i][n + 2]) - delta);
                    }
                    float first = power_of_two(weights[i][n] * scale - below);
                    float second = power_of_two(weights[i][n + 2] * scale - below);
                    weights[i][n] = DROPS && drops_first(p, words[i][n]) ? -first : first;
                    weights[i][n + 2] = DROPS && drops_second(p, words[i][n]) ? -second : second;
                }
                left[i / 2][i % 2 * 2] = rounded_positive_pair(weights[i][0], weights[i][1]);
                left[i / 2][i % 2 * 2 + 1] = rounded_positive_pair(weights[i][2], weights[i][3]);
            }
            begin_products();
            add_product(dv, left, tile_dout);
            commit_products();
            // Between a wait and a fence, each of which would wait for what it reads or writes.
            store_dq(number > begun);
            u32 right[4][4];
#pragma unroll
            for (int i = 0; i < 8; i++) {
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    float delta = numbers.delta[COLUMN_OF(i, n)], weight = weights[i][n];
                    if constexpr (CHANGES) {
                        products[i][n] *= fabsf(weight);
                        continue;
                    }
                    products[i][n] = DROPS ? fmaf(fmaxf(weight, 0), products[i][n], -fabsf(weight) * delta)
                                           : weight * (products[i][n] - delta);
                }
                right[i / 2][i % 2 * 2] = rounded_pair(products[i][0], products[i][1]);
                right[i / 2][i % 2 * 2 + 1] = rounded_pair(products[i][2], products[i][3]);
            }
            u32 tile_gradients = gradients + number % 2 * KEYS_BYTES;
#pragma unroll
            for (int i = 0; i < QUERIES / 16; i++) {
                store_left(right[i], tile_gradients, key_row, i);
            }
            begin_products();
            add_product(dk, right, tile_queries);
            commit_products();
            // The next tile of queries is there, too. Of the last one, both warpgroups have no use any more.
            wait_copies<0>();
            show_to_products();
            __syncthreads();
            begin_products();
            // Of all keys of the tile; of dq's columns, a half for each warpgroup.
            u64 all_gradients = described(tile_gradients), half_keys = described(keys + here) + group * HALF_COLUMNS;
            multiply_rows<false>(dq, all_gradients, half_keys);
#pragma unroll
            for (int i = 1; i < KEYS / 16; i++) {
                multiply_rows<true>(dq, all_gradients + i * NEXT_ROWS, half_keys + i * NEXT_ROWS);
            }
            commit_products();
            last = step;
            number++;
            advance(step);
            advance(ahead);
            fetch_queries(ahead, (number + 1) % STAGES);
            if (number == begun + 1) {
                fetch_keys(start + KEYS);
            }
        } while (step.keys == start);
        load_dq(true);
        wait_products<0>();
        settle(dq);
        store_dq(true);
        settle(dk);
        settle(dv);
        float key_factors[2] = {factor, factor}, value_factors[2] = {p.kept, p.kept};
        store_rows(p, p.dk, key_head, first_token, start + key_row, len, dk, key_factors);
        store_rows(p, p.dv, key_head, first_token, start + key_row, len, dv, value_factors);
    } while (step.keys < len);
}
#endif
