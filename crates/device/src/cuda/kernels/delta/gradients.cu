// The gradients of queries, keys and gates, chunk by chunk, given the states, their gradients, N and X. With
//
// F = dO·Nᵀ ⊙ D; E = -X·Nᵀ ⊙ D strictly below the diagonal
// dQ = α·dO·Sᵀ + F·K̂; Z = -α·X·Sᵀ + E·K̂; dK̂ = βZ + ε·N·dS'ᵀ + Fᵀ·Q + Eᵀ·βK̂; dtake = (1 - β)·Σ X ⊙ N
//
// K̂ and Q are rows of keys and queries times factors. These are put on F and E, and what comes out is dQ and dK̂ times the rows' own
// factors, of which the part along the row is taken away at last.

#define THREADS 512
// Columns of values at once.
#define DEPTH 32
#define DEPTH_PITCH (DEPTH + 8)
// A warp has sixteen rows of a product and one part of its columns: so many of K, and so many of C.
#define PARTS (THREADS / 128)
#define SPAN (WIDTH / PARTS)
#define TOKENS (CHUNK / PARTS)

// Sums over the rows of a chunk that all parts of columns have a share of.
enum Share { OF_SINCE, OF_LEFT, ALONG_QUERY, ALONG_KEY, OF_ROW, SHARES };

struct Memory {
    // [C, K]
    u16 *queries, *keys;
    // [C, C]: F, and E with what is turned of it.
    u16 *of_outs, *of_mixing;
    // [PARTS][SHARES, C] and [4][C]: sums of rows by parts, of columns by rows of warps.
    float *shares, *columns;
    // Σ X ⊙ N
    float *products;
    // [2][NUMBERS, C]: all numbers of the rows, for this head and the next.
    float *numbers;
    // dO, X, N and the rest of it [C, DEPTH], S and dS' [DEPTH, K], for each member of the ring.
    u16 *ring;
};

#define RING_ELEMENTS (4 * CHUNK * DEPTH_PITCH + 2 * DEPTH * PITCH)

// As `gradients_bytes` in delta/rule.rs counts it.
__device__ __forceinline__ Memory memory_of() {
    Memory m;
    m.numbers = (float *)memory;
    m.shares = m.numbers + 2 * NUMBERS * CHUNK;
    m.columns = m.shares + PARTS * SHARES * CHUNK;
    m.products = m.columns + 4 * CHUNK;
    m.queries = (u16 *)(m.products + CHUNK);
    m.keys = m.queries + CHUNK * PITCH;
    m.of_outs = m.keys + CHUNK * PITCH;
    m.of_mixing = m.of_outs + CHUNK * SQUARE_PITCH;
    m.ring = m.of_mixing + CHUNK * SQUARE_PITCH;
    return m;
}

// The sums over all columns of values: rows [16, TOKENS] and [16, SPAN].
struct Sums {
    // dO·Nᵀ and X·Nᵀ
    float outs[TOKENS / 8][4], mixing[TOKENS / 8][4];
    // dO·Sᵀ, X·Sᵀ and N·dS'ᵀ
    float queries[SPAN / 8][4], reads[SPAN / 8][4], writes[SPAN / 8][4];
    // This thread's share of ⟨S, dS'⟩
    float states;
};

// Begins to copy what the sums take of a head's columns from `col` on, and with the first ones the numbers of its rows.
__device__ __forceinline__ void fetch_values(const Parameters &p, const Chunk &chunk, int head, int col, u16 *to, float *numbers) {
    i64 item = chunk.slot * p.heads + head;
    i64 tokens = item * CHUNK * p.padded_value + col, states = (item * p.padded_value + col) * WIDTH;
    const u16 *errors = (const u16 *)p.errors + tokens, *news = (const u16 *)p.news + tokens, *rests = (const u16 *)p.rests + tokens;
    const u16 *before = (const u16 *)p.befores + states, *after = (const u16 *)p.afters + states;
    if (col == 0) fetch_numbers(numbers_of(p, item), NUMBERS * CHUNK, numbers);
    fetch_head<DEPTH>(p, p.dout, head, chunk.first, chunk.count, p.value, col, to);
    fetch_rows<CHUNK, DEPTH>(errors, p.padded_value, CHUNK, DEPTH, to + CHUNK * DEPTH_PITCH);
    fetch_rows<CHUNK, DEPTH>(news, p.padded_value, CHUNK, DEPTH, to + 2 * CHUNK * DEPTH_PITCH);
    fetch_rows<CHUNK, DEPTH>(rests, p.padded_value, CHUNK, DEPTH, to + 3 * CHUNK * DEPTH_PITCH);
    u16 *wide = to + 4 * CHUNK * DEPTH_PITCH;
    fetch_rows<DEPTH, WIDTH>(before, WIDTH, DEPTH, WIDTH, wide);
    fetch_rows<DEPTH, WIDTH>(after, WIDTH, DEPTH, WIDTH, wide + DEPTH * PITCH);
}

__device__ __forceinline__ void add_values(Sums &sums, const u16 *tiles) {
    int row = warp_of() % 4 * 16, part = warp_of() / 4;
    const u16 *dout = tiles, *errors = dout + CHUNK * DEPTH_PITCH, *news = errors + CHUNK * DEPTH_PITCH;
    const u16 *state = news + 2 * CHUNK * DEPTH_PITCH, *dstate = state + DEPTH * PITCH;
#pragma unroll
    for (int v = 0; v < DEPTH; v += 16) {
        u32 of_dout[4], of_news[4], of_errors[4];
        load_left(of_dout, dout, DEPTH_PITCH, row, v);
        load_left(of_news, news, DEPTH_PITCH, row, v);
        load_left(of_errors, errors, DEPTH_PITCH, row, v);
#pragma unroll
        for (int j = 0; j < TOKENS / 16; j++) {
            // N, and what its rounding left.
#pragma unroll
            for (int rest = 0; rest < 2; rest++) {
                u32 right[4];
                load_matrices(right, beside(news, DEPTH_PITCH, rest * CHUNK + part * TOKENS + j * 16, v));
                multiply_add(sums.outs[2 * j], of_dout, right[0], right[1]);
                multiply_add(sums.outs[2 * j + 1], of_dout, right[2], right[3]);
                multiply_add(sums.mixing[2 * j], of_errors, right[0], right[1]);
                multiply_add(sums.mixing[2 * j + 1], of_errors, right[2], right[3]);
            }
        }
#pragma unroll
        for (int j = 0; j < SPAN / 16; j++) {
            u32 right[4];
            load_transposed(right, below(state, PITCH, v, part * SPAN + j * 16));
            multiply_add(sums.queries[2 * j], of_dout, right[0], right[1]);
            multiply_add(sums.queries[2 * j + 1], of_dout, right[2], right[3]);
            multiply_add(sums.reads[2 * j], of_errors, right[0], right[1]);
            multiply_add(sums.reads[2 * j + 1], of_errors, right[2], right[3]);
            add_product(sums.writes[2 * j], sums.writes[2 * j + 1], of_news, dstate, PITCH, v, part * SPAN + j * 16);
        }
    }
#pragma unroll
    for (int i = threadIdx.x; i < DEPTH * (WIDTH / 8); i += THREADS) {
        int place = i / (WIDTH / 8) * PITCH + i % (WIDTH / 8) * 8;
        float x[8], y[8];
        load<8>((const bf16 *)state + place, 8, x);
        load<8>((const bf16 *)dstate + place, 8, y);
#pragma unroll
        for (int n = 0; n < 8; n++) sums.states = fmaf(x[n], y[n], sums.states);
    }
}

// A chunk of a key head, by its number among all of a launch.
struct Item {
    int number, key_head;
    Chunk chunk;
};

// Finds the block's next item. Those of empty slots have no share of the sums over tokens.
__device__ __forceinline__ bool next_item(const Parameters &p, Item &item) {
    int slots = slots_of(p), items = slots * (p.heads / p.ratio);
    for (item.number += gridDim.x; item.number < items; item.number += gridDim.x) {
        item.key_head = item.number / slots;
        if (find_chunk(p, item.number % slots, item.chunk)) return true;
        double *sums = (double *)p.sums + 2 * (item.chunk.slot * p.heads + item.key_head * p.ratio);
        for (int i = threadIdx.x; i < 2 * (int)p.ratio; i += THREADS) sums[i] = 0.0;
    }
    return false;
}

// What a block works on, and what comes next, whose first columns are fetched meanwhile.
struct Work {
    Item item, next;
    bool has_next;
    // The member of the ring, and that of the numbers.
    int member, parity;
};

__device__ __forceinline__ void fetch_next(const Parameters &p, const Work &work, int i, int col, const Memory &m) {
    u16 *ring = m.ring + (work.member ^ 1) * RING_ELEMENTS;
    float *numbers = m.numbers + (work.parity ^ 1) * NUMBERS * CHUNK;
    int head = work.item.key_head * p.ratio + i;
    if (col + DEPTH < p.padded_value)
        fetch_values(p, work.item.chunk, head, col + DEPTH, ring, numbers);
    else if (i + 1 < p.ratio)
        fetch_values(p, work.item.chunk, head + 1, 0, ring, numbers);
    else if (work.has_next)
        fetch_values(p, work.next.chunk, work.next.key_head * p.ratio, 0, ring, numbers);
}

// The sums of the i-th value head of the item.
__device__ __forceinline__ void sum_values(const Parameters &p, Work &work, int i, const Memory &m, Sums &sums) {
    clear(sums.outs);
    clear(sums.mixing);
    clear(sums.queries);
    clear(sums.reads);
    clear(sums.writes);
    sums.states = 0.0f;
    for (int col = 0; col < p.padded_value; col += DEPTH) {
        const u16 *ring = m.ring + work.member * RING_ELEMENTS;
        if (p.stages > 1) {
            fetch_next(p, work, i, col, m);
            commit_copies();
            // Queries and keys were fetched last: they are not needed yet if other columns follow.
            if (i == 0 && col == 0 && DEPTH < p.padded_value)
                wait_copies<2>();
            else
                wait_copies<1>();
            work.member ^= 1;
        } else {
            int head = work.item.key_head * p.ratio + i;
            fetch_values(p, work.item.chunk, head, col, m.ring, m.numbers + work.parity * NUMBERS * CHUNK);
            commit_copies();
            wait_copies<0>();
        }
        __syncthreads();
        add_values(sums, ring);
        __syncthreads();
    }
}

// The row of a lane's numbers, of a part's first or second two.
__device__ __forceinline__ int row_of(int half) { return warp_of() % 4 * 16 + lane_of() / 4 + half * 8; }

__device__ __forceinline__ float sum_of_four(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Leaves the dot products of this lane's rows with those of a tile, this part's share of them.
__device__ __forceinline__ void dot_rows(const float (&rows)[SPAN / 8][4], const u16 *tile, float (&dots)[2]) {
    int col = warp_of() / 4 * SPAN + lane_of() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u16 *row = tile + row_of(half) * PITCH + col;
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < SPAN / 8; i++) {
            u32 pair = *(const u32 *)(row + i * 8);
            dot = fmaf(rows[i][2 * half], first_of(pair), dot);
            dot = fmaf(rows[i][2 * half + 1], second_of(pair), dot);
        }
        dots[half] = sum_of_four(dot);
    }
}

__device__ __forceinline__ float &share_at(const Memory &m, int share, int row) {
    return m.shares[(warp_of() / 4 * SHARES + share) * CHUNK + row];
}

__device__ __forceinline__ float all_shares(const Memory &m, int share, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < PARTS; part++) sum += m.shares[(part * SHARES + share) * CHUNK + row];
    return sum;
}

// The gradients of α and of ε, each times itself; then what they are made of becomes this head's share of dQ and dK̂.
__device__ __forceinline__ void differentiate_reads(const Memory &m, Sums &sums) {
    float of_queries[2], of_reads[2], of_writes[2];
    dot_rows(sums.queries, m.queries, of_queries);
    dot_rows(sums.reads, m.keys, of_reads);
    dot_rows(sums.writes, m.keys, of_writes);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = row_of(half);
        float out = m.numbers[OUT * CHUNK + row], write = m.numbers[WRITE * CHUNK + row];
        float read = m.numbers[READ * CHUNK + row] * m.numbers[TAKE * CHUNK + row];
        if (lane_of() % 4 == 0) {
            share_at(m, OF_SINCE, row) = out * of_queries[half] - read * of_reads[half];
            share_at(m, OF_LEFT, row) = write * of_writes[half];
        }
#pragma unroll
        for (int i = 0; i < SPAN / 8; i++) {
#pragma unroll
            for (int n = 2 * half; n < 2 * half + 2; n++) {
                sums.queries[i][n] *= out;
                sums.writes[i][n] = write * sums.writes[i][n] - read * sums.reads[i][n];
            }
        }
    }
}

// The products of queries and keys with keys, rows [16, TOKENS].
__device__ __forceinline__ void score(const Memory &m, float (&of_queries)[TOKENS / 8][4], float (&of_keys)[TOKENS / 8][4]) {
    int row = warp_of() % 4 * 16, part = warp_of() / 4;
    clear(of_queries);
    clear(of_keys);
#pragma unroll
    for (int k = 0; k < WIDTH; k += 16) {
        u32 queries[4], keys[4];
        load_left(queries, m.queries, PITCH, row, k);
        load_left(keys, m.keys, PITCH, row, k);
#pragma unroll
        for (int j = 0; j < TOKENS / 16; j++) {
            u32 right[4];
            load_matrices(right, beside(m.keys, PITCH, part * TOKENS + j * 16, k));
            multiply_add(of_queries[2 * j], queries, right[0], right[1]);
            multiply_add(of_queries[2 * j + 1], queries, right[2], right[3]);
            multiply_add(of_keys[2 * j], keys, right[0], right[1]);
            multiply_add(of_keys[2 * j + 1], keys, right[2], right[3]);
        }
    }
}

// Leaves F and E in shared memory, and the gradients of D's rows and columns.
__device__ __forceinline__ void differentiate_scores(const Memory &m, const Sums &sums) {
    float of_queries[TOKENS / 8][4], of_keys[TOKENS / 8][4];
    score(m, of_queries, of_keys);
    const float *numbers = m.numbers;
    int first = warp_of() / 4 * TOKENS + lane_of() % 4 * 2;
    float rows[2] = {}, columns[TOKENS / 8][2] = {};
#pragma unroll
    for (int part = 0; part < TOKENS / 8; part++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = row_of(half), col = first + part * 8;
            float of_outs[2];
#pragma unroll
            for (int n = 0; n < 2; n++) {
                int j = col + n;
                float high = numbers[HIGH * CHUNK + i] - numbers[HIGH * CHUNK + j];
                float low = numbers[LOW * CHUNK + i] - numbers[LOW * CHUNK + j];
                float decay = j <= i ? exponential<true>(high + low) * numbers[KEY * CHUNK + j] : 0.0f;
                float of_out = sums.outs[part][2 * half + n] * decay * numbers[QUERY * CHUNK + i];
                float product = sums.mixing[part][2 * half + n];
                float take = numbers[TAKE * CHUNK + i] * numbers[KEY * CHUNK + i];
                float mixed = j < i ? -product * decay * take : 0.0f;
                float share = of_out * of_queries[part][2 * half + n] + mixed * of_keys[part][2 * half + n];
                rows[half] += share;
                columns[part][n] += share;
                of_outs[n] = of_out;
                if (j == i) m.products[i] = product;
                if (j <= i) {
                    u16 rounded = (u16)rounded_pair(mixed, 0.0f);
                    m.of_mixing[i * SQUARE_PITCH + j] = rounded;
                    m.of_mixing[j * SQUARE_PITCH + i] = rounded;
                }
            }
            *(u32 *)(m.of_outs + i * SQUARE_PITCH + col) = rounded_pair(of_outs[0], of_outs[1]);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = sum_of_four(rows[half]);
        if (lane_of() % 4 == 0) share_at(m, OF_ROW, row_of(half)) = sum;
    }
#pragma unroll
    for (int part = 0; part < TOKENS / 8; part++) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float sum = columns[part][n];
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
            if (lane_of() < 4) m.columns[warp_of() % 4 * CHUNK + first + part * 8 + n] = sum;
        }
    }
}

// The gradients of a head's gates, by one warp: each lane has two neighbours. Everything that the sums are made of is there.
__device__ __forceinline__ void differentiate_gates(const Parameters &p, const Chunk &chunk, int head, const Memory &m, float states) {
    int lane = lane_of();
    double of_since[2], of_left[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = 2 * lane + i;
        const float *columns = m.columns + row;
        double of_column = ((double)columns[0] + columns[CHUNK]) + ((double)columns[2 * CHUNK] + columns[3 * CHUNK]);
        of_left[i] = all_shares(m, OF_LEFT, row);
        of_since[i] = (double)all_shares(m, OF_ROW, row) - of_column + all_shares(m, OF_SINCE, row) - of_left[i];
    }
    double left = of_left[0] + of_left[1], behind = of_since[0] + of_since[1];
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) left += __shfl_xor_sync(0xffffffffu, left, lanes);
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        double other = __shfl_down_sync(0xffffffffu, behind, lanes);
        if (lane + lanes < 32) behind += other;
    }
    behind += left + (double)(m.numbers[SINCE * CHUNK + CHUNK - 1] * states);
    float rate = expf(number_of_head(p.log_rate, head)), bias = number_of_head(p.bias, head);
    double of_rate = 0.0, of_bias = 0.0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = 2 * lane + i;
        if (row >= chunk.count) continue;
        i64 token = chunk.first + row;
        float decay = (float)(i == 0 ? behind : behind - of_since[0]);
        float fade = widen(*gate_at<bf16>(p.fade, token, head));
        float dfade = -decay * rate * exact_sigmoid(fade + bias);
        *gate_at<bf16>(p.dfade, token, head) = narrow<bf16>(dfade);
        *gate_at<bf16>(p.dtake, token, head) = narrow<bf16>((1.0f - m.numbers[TAKE * CHUNK + row]) * m.products[row]);
        of_rate += (double)(decay * m.numbers[FADE * CHUNK + row]);
        of_bias += (double)dfade;
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        of_rate += __shfl_xor_sync(0xffffffffu, of_rate, lanes);
        of_bias += __shfl_xor_sync(0xffffffffu, of_bias, lanes);
    }
    if (lane == 0) {
        double *to = (double *)p.sums + 2 * (chunk.slot * p.heads + head);
        to[0] = of_rate;
        to[1] = of_bias;
    }
}

// Adds the ways through the scores to this head's share of dQ and dK̂.
__device__ __forceinline__ void add_scores(const Memory &m, Sums &sums) {
    int row = warp_of() % 4, part = warp_of() / 4;
#pragma unroll
    for (int i = 0; i < CHUNK / 16; i++) {
        u32 of_outs[4], of_mixing[4], of_outs_turned[4];
        load_left(of_outs, m.of_outs, SQUARE_PITCH, row * 16, i * 16);
        load_left(of_mixing, m.of_mixing, SQUARE_PITCH, row * 16, i * 16);
        load_left_turned(of_outs_turned, m.of_outs, SQUARE_PITCH, row * 16, i * 16);
#pragma unroll
        for (int j = 0; j < SPAN / 16; j++) {
            u32 keys[4];
            load_transposed(keys, below(m.keys, PITCH, i * 16, part * SPAN + j * 16));
            multiply_add(sums.writes[2 * j], of_mixing, keys[0], keys[1]);
            multiply_add(sums.writes[2 * j + 1], of_mixing, keys[2], keys[3]);
            if (i <= row) {
                multiply_add(sums.queries[2 * j], of_outs, keys[0], keys[1]);
                multiply_add(sums.queries[2 * j + 1], of_outs, keys[2], keys[3]);
            }
            if (i >= row)
                add_product(sums.writes[2 * j], sums.writes[2 * j + 1], of_outs_turned, m.queries, PITCH, i * 16,
                            part * SPAN + j * 16);
        }
    }
}

// Takes away what lies along a row, given its dot products with the gradient; puts the gradients in the tile's place.
__device__ __forceinline__ void put_across(const Memory &m, const float (&rows)[SPAN / 8][4], int share, const float *factors,
                                           float unscaled, u16 *tile) {
    int col = warp_of() / 4 * SPAN + lane_of() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int at = row_of(half);
        float factor = factors[at] * unscaled;
        float along = factor * factor * all_shares(m, share, at);
        u16 *row = tile + at * PITCH + col;
#pragma unroll
        for (int i = 0; i < SPAN / 8; i++) {
            u32 pair = *(const u32 *)(row + i * 8);
            *(u32 *)(row + i * 8) = rounded_pair(rows[i][2 * half] - along * first_of(pair),
                                                 rows[i][2 * half + 1] - along * second_of(pair));
        }
    }
}

__device__ __forceinline__ void add(float (&to)[SPAN / 8][4], const float (&other)[SPAN / 8][4]) {
#pragma unroll
    for (int i = 0; i < SPAN / 8; i++)
#pragma unroll
        for (int n = 0; n < 4; n++) to[i][n] += other[i][n];
}

// Gradients of an item's queries and keys before their norms, given those of rows divided by their lengths; stores them.
__device__ __forceinline__ void finish(const Parameters &p, const Item &item, const Memory &m, const float (&dq)[SPAN / 8][4],
                                       const float (&dk)[SPAN / 8][4]) {
    float along_query[2], along_key[2];
    dot_rows(dq, m.queries, along_query);
    dot_rows(dk, m.keys, along_key);
    if (lane_of() % 4 == 0) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            share_at(m, ALONG_QUERY, row_of(half)) = along_query[half];
            share_at(m, ALONG_KEY, row_of(half)) = along_key[half];
        }
    }
    // Nobody multiplies by the tiles any more.
    __syncthreads();
    put_across(m, dq, ALONG_QUERY, m.numbers + QUERY * CHUNK, sqrtf((float)p.key), m.queries);
    put_across(m, dk, ALONG_KEY, m.numbers + KEY * CHUNK, 1.0f, m.keys);
    __syncthreads();
    for (int i = threadIdx.x; i < CHUNK * (WIDTH / 8); i += THREADS) {
        int row = i / (WIDTH / 8), col = i % (WIDTH / 8) * 8;
        if (row >= item.chunk.count) break;
        store_eight(p, p.dq, item.key_head, item.chunk.first + row, col, p.key, m.queries + row * PITCH + col);
        store_eight(p, p.dk, item.key_head, item.chunk.first + row, col, p.key, m.keys + row * PITCH + col);
    }
    __syncthreads();
}

// A block goes through items. With GROUPED, key heads have several value heads, whose gradients are added up.
template <bool GROUPED> __device__ __forceinline__ void differentiate(const Parameters &p) {
    Memory m = memory_of();
    Work work;
    work.member = work.parity = 0;
    work.next.number = (int)blockIdx.x - (int)gridDim.x;
    work.has_next = next_item(p, work.next);
    if (work.has_next && p.stages > 1)
        fetch_values(p, work.next.chunk, work.next.key_head * p.ratio, 0, m.ring, m.numbers);
    commit_copies();
    while (work.has_next) {
        const Item item = work.item = work.next;
        work.has_next = next_item(p, work.next);
        fetch_head<WIDTH>(p, p.q, item.key_head, item.chunk.first, item.chunk.count, p.key, 0, m.queries);
        fetch_head<WIDTH>(p, p.k, item.key_head, item.chunk.first, item.chunk.count, p.key, 0, m.keys);
        commit_copies();
        Sums sums;
        float of_queries[GROUPED ? SPAN / 8 : 1][4], of_keys[GROUPED ? SPAN / 8 : 1][4];
        clear(of_queries);
        clear(of_keys);
        Memory now = m;
        for (int i = 0; i < (GROUPED ? (int)p.ratio : 1); i++) {
            now.numbers = m.numbers + work.parity * NUMBERS * CHUNK;
            sum_values(p, work, i, m, sums);
            differentiate_reads(now, sums);
            differentiate_scores(now, sums);
            // The sum waits for all threads.
            float states = sum_of_block(sums.states);
            if (warp_of() == 0) differentiate_gates(p, item.chunk, item.key_head * p.ratio + i, now, states);
            add_scores(now, sums);
            if constexpr (GROUPED) {
                add(of_queries, sums.queries);
                add(of_keys, sums.writes);
                __syncthreads();
            }
            work.parity ^= 1;
        }
        if constexpr (GROUPED)
            finish(p, item, now, of_queries, of_keys);
        else
            finish(p, item, now, sums.queries, sums.writes);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) delta_gradients(const __grid_constant__ Parameters p) {
    differentiate<false>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) delta_grouped_gradients(const __grid_constant__ Parameters p) {
    differentiate<true>(p);
}
