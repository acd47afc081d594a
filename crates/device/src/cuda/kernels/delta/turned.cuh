// What goes through the chunks in turn, forward and back: a warp has sixteen columns of a head's state and keeps them turned, as sums
// of products, so that they are left operands of the next ones without leaving the registers.
//
// Shapes in comments: B columns of values to a block, half as many as its threads.

#define TOKENS (CHUNK / 8)

// Of a turned part a lane has the rows lane / 4 and eight after it, and the tokens part * 8 + lane % 4 * 2 and the next.
__device__ __forceinline__ int token_of(int part) { return part * 8 + lane_of() % 4 * 2; }

// A chunk's tiles in shared memory: a member of a ring.
struct Tiles {
    // [C, K]
    u16 *queries, *keys;
    // [C, C]: T and P.
    u16 *inverse, *weights;
    // [C, B]: values, or the gradients of outputs.
    u16 *values;
    // [NUMBERS_IN_TURN, C]
    float *numbers;
};

// As `Turns` in delta/rule.rs counts them.
__device__ __forceinline__ int tiles_bytes(bool is_whole) {
    int wide = (is_whole ? 2 : 1) * CHUNK * PITCH, square = (is_whole ? 2 : 1) * CHUNK * SQUARE_PITCH;
    return (wide + square + CHUNK * ((int)blockDim.x / 2 + 8)) * 2 + NUMBERS_IN_TURN * CHUNK * 4;
}

// Without queries and P if they are not whole.
__device__ __forceinline__ Tiles tiles_at(u8 *at, bool is_whole) {
    Tiles tiles;
    tiles.numbers = (float *)at;
    tiles.keys = (u16 *)(tiles.numbers + NUMBERS_IN_TURN * CHUNK);
    tiles.inverse = tiles.keys + CHUNK * PITCH;
    tiles.values = tiles.inverse + CHUNK * SQUARE_PITCH;
    tiles.queries = tiles.values + CHUNK * (blockDim.x / 2 + 8);
    tiles.weights = is_whole ? tiles.queries + CHUNK * PITCH : nullptr;
    return tiles;
}

// The head of a segment's stretch whose chunks a block goes through.
struct Way {
    int start, end, head, key_head, chunks;
    // The stretch's number among so many of its segment.
    int segment, stretch, stretches;
    // The item of the first chunk in working memory.
    i64 item;
    // The first column of the block, that of the warp, and the columns that there are.
    int block_col, col, columns;
};

__device__ __forceinline__ bool find_way(const Parameters &p, Way &way) {
    i64 slot = first_slot(p, 0, p.stretch) + blockIdx.x;
    way.segment = segment_of(p, slot, p.stretch);
    way.stretch = (int)(slot - first_slot(p, way.segment, p.stretch));
    way.stretches = stretches_of(p, way.segment);
    if (way.stretch >= way.stretches) return false;
    way.start = p.offsets[way.segment] + way.stretch * p.stretch;
    way.end = min(p.offsets[way.segment + 1], way.start + p.stretch);
    way.head = blockIdx.y;
    way.key_head = way.head / p.ratio;
    way.chunks = (way.end - way.start + CHUNK - 1) / CHUNK;
    way.item = (first_slot(p, way.segment) + way.stretch * (p.stretch / CHUNK)) * p.heads + way.head;
    way.block_col = blockIdx.z * (blockDim.x / 2);
    way.col = way.block_col + warp_of() * 16;
    way.columns = p.padded_value;
    return true;
}

// The block's columns of a head: by one of so many widths.
__device__ __forceinline__ void fetch_columns(const Parameters &p, const Heads &heads, const Way &way, int first, int count, u16 *to) {
    switch (blockDim.x / 2) {
    case 128: return fetch_head<128>(p, heads, way.head, first, count, p.value, way.block_col, to);
    case 64: return fetch_head<64>(p, heads, way.head, first, count, p.value, way.block_col, to);
    case 32: return fetch_head<32>(p, heads, way.head, first, count, p.value, way.block_col, to);
    default: return fetch_head<16>(p, heads, way.head, first, count, p.value, way.block_col, to);
    }
}

__device__ __forceinline__ void fetch_tiles(const Parameters &p, const Way &way, int number, const Heads &values, bool is_whole,
                                            const Tiles &to) {
    if (number < 0 || number >= way.chunks) return;
    int first = way.start + number * CHUNK, count = min(CHUNK, way.end - first);
    i64 item = way.item + (i64)number * p.heads;
    fetch_numbers(numbers_of(p, item), NUMBERS_IN_TURN * CHUNK, to.numbers);
    fetch_head<WIDTH>(p, p.k, way.key_head, first, count, p.key, 0, to.keys);
    fetch_columns(p, values, way, first, count, to.values);
    fetch_rows<CHUNK, CHUNK>(squares_of(p, item), CHUNK, CHUNK, CHUNK, to.inverse);
    if (is_whole) {
        fetch_head<WIDTH>(p, p.q, way.key_head, first, count, p.key, 0, to.queries);
        fetch_rows<CHUNK, CHUNK>(squares_of(p, item) + CHUNK * CHUNK, CHUNK, CHUNK, CHUNK, to.weights);
    }
}

// sums [16, C] of tokens, each multiplied by its number.
__device__ __forceinline__ void scale_tokens(float (&sums)[TOKENS][4], const float *numbers) {
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
        float2 x = *(const float2 *)(numbers + token_of(i));
        sums[i][0] *= x.x;
        sums[i][1] *= x.y;
        sums[i][2] *= x.x;
        sums[i][3] *= x.y;
    }
}

__device__ __forceinline__ void as_lefts(u32 (&to)[CHUNK / 16][4], const float (&sums)[TOKENS][4]) {
#pragma unroll
    for (int i = 0; i < CHUNK / 16; i++) as_left(to[i], sums[2 * i], sums[2 * i + 1]);
}

// What rounding to left operands took away, rounded itself.
__device__ __forceinline__ void as_rests(u32 (&to)[CHUNK / 16][4], const float (&sums)[TOKENS][4],
                                         const u32 (&lefts)[CHUNK / 16][4]) {
#pragma unroll
    for (int i = 0; i < CHUNK / 16; i++) {
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const float(&of)[4] = sums[2 * i + part / 2];
            u32 rounded = lefts[i][part];
            to[i][part] = rounded_pair(of[part % 2 * 2] - first_of(rounded), of[part % 2 * 2 + 1] - second_of(rounded));
        }
    }
}

// sums [16, C] += left [16, C] · lowerᵀ, where `lower` [C, C] has zeros above its diagonal.
__device__ __forceinline__ void add_lower_turned(float (&sums)[TOKENS][4], const u32 (&left)[CHUNK / 16][4], const u16 *lower) {
#pragma unroll
    for (int i = 0; i < CHUNK / 16; i++)
#pragma unroll
        for (int j = i; j < CHUNK / 16; j++)
            add_product_turned(sums[2 * j], sums[2 * j + 1], left[i], lower, SQUARE_PITCH, j * 16, i * 16);
}

// The same without turning it.
__device__ __forceinline__ void add_lower(float (&sums)[TOKENS][4], const u32 (&left)[CHUNK / 16][4], const u16 *lower) {
#pragma unroll
    for (int i = 0; i < CHUNK / 16; i++)
#pragma unroll
        for (int j = 0; j <= i; j++)
            add_product(sums[2 * j], sums[2 * j + 1], left[i], lower, SQUARE_PITCH, i * 16, j * 16);
}

// sums [16, K] += left [16, C] · tile [C, K].
__device__ __forceinline__ void add_rows(float (&sums)[WIDTH / 8][4], const u32 (&left)[CHUNK / 16][4], const u16 *tile) {
#pragma unroll
    for (int i = 0; i < CHUNK / 16; i++)
#pragma unroll
        for (int j = 0; j < WIDTH / 16; j++)
            add_product(sums[2 * j], sums[2 * j + 1], left[i], tile, PITCH, i * 16, j * 16);
}

// Puts a left operand [16, C] in the warp's columns of a tile [C, B], turned.
__device__ __forceinline__ void put_turned(const u32 (&left)[CHUNK / 16][4], u16 *tile, int pitch) {
    u16 *to = tile + lane_of() / 4 * pitch + warp_of() * 16 + lane_of() % 4 * 2;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CHUNK / 16; i++) {
#pragma unroll
        for (int part = 0; part < 4; part++)
            *(u32 *)(to + (i * 16 + part / 2 * 8) * pitch + part % 2 * 8) = turned(left[i][part]);
    }
    __syncwarp();
}

// Stores the warp's columns of a tile [C, B] as rows of a head.
__device__ __forceinline__ void store_tokens(const Parameters &p, const Heads &heads, const Way &way, int number,
                                             const u16 *tile, int pitch) {
    int first = way.start + number * CHUNK, half = lane_of() % 2 * 8;
#pragma unroll
    for (int row = lane_of() / 2; row < CHUNK; row += 16) {
        if (first + row >= way.end) break;
        store_eight(p, heads, way.head, first + row, way.col + half, p.value, tile + row * pitch + warp_of() * 16 + half);
    }
    __syncwarp();
}

// The same in working memory, [C, V] for each item.
__device__ __forceinline__ void keep_tokens(const Parameters &p, u64 items, const Way &way, int number, const u16 *tile, int pitch) {
    int half = lane_of() % 2 * 8;
    u16 *to = (u16 *)items + (way.item + (i64)number * p.heads) * CHUNK * p.padded_value + way.col + half;
#pragma unroll
    for (int row = lane_of() / 2; row < CHUNK; row += 16)
        *(uint4 *)(to + (i64)row * p.padded_value) = *(const uint4 *)(tile + row * pitch + warp_of() * 16 + half);
    __syncwarp();
}

// Rounds the warp's rows of a turned state [V, K] to bf16 and keeps them in working memory, by way of the warp's shelf [16, K] in shared
// memory.
__device__ __forceinline__ void keep_state(const Parameters &p, u64 items, const Way &way, int number,
                                           const float (&state)[WIDTH / 8][4], u16 *shelf) {
    u16 *to = shelf + lane_of() / 4 * PITCH + lane_of() % 4 * 2;
#pragma unroll
    for (int i = 0; i < WIDTH / 8; i++) {
        *(u32 *)(to + i * 8) = rounded_pair(state[i][0], state[i][1]);
        *(u32 *)(to + 8 * PITCH + i * 8) = rounded_pair(state[i][2], state[i][3]);
    }
    __syncwarp();
    u16 *rows = (u16 *)items + ((way.item + (i64)number * p.heads) * p.padded_value + way.col) * WIDTH;
#pragma unroll
    for (int i = lane_of(); i < 16 * (WIDTH / 8); i += 32) {
        int row = i / (WIDTH / 8), col = i % (WIDTH / 8) * 8;
        *(uint4 *)(rows + row * WIDTH + col) = *(const uint4 *)(shelf + row * PITCH + col);
    }
    __syncwarp();
}

// The lane's first number of the warp's rows of a turned state [V, K] at its stretch's border.
__device__ __forceinline__ float *border_of(const Parameters &p, const Way &way) {
    float *border = border_at(p, way.segment, way.stretch, way.head);
    return border + (way.col + lane_of() / 4) * WIDTH + lane_of() % 4 * 2;
}

// A segment of one stretch begins with no state, others with what `carry` has left.
__device__ __forceinline__ void load_state(const Parameters &p, const Way &way, float (&state)[WIDTH / 8][4]) {
    clear(state);
    if (way.stretches == 1 || way.col >= way.columns) return;
    const float *from = border_of(p, way);
#pragma unroll
    for (int i = 0; i < WIDTH / 8; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float2 x = *(const float2 *)(from + half * 8 * WIDTH + i * 8);
            state[i][2 * half] = x.x;
            state[i][2 * half + 1] = x.y;
        }
    }
}

// Leaves what `carry` takes.
__device__ __forceinline__ void leave_state(const Parameters &p, const Way &way, const float (&state)[WIDTH / 8][4]) {
    if (way.col >= way.columns) return;
    float *to = border_of(p, way);
#pragma unroll
    for (int i = 0; i < WIDTH / 8; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++)
            *(float2 *)(to + half * 8 * WIDTH + i * 8) = make_float2(state[i][2 * half], state[i][2 * half + 1]);
    }
}

// Fetches chunk after chunk, one ahead if the ring has two members, and evaluates `body(number, tiles)` by all threads.
template <class Body>
__device__ __forceinline__ void each_chunk(const Parameters &p, const Way &way, const Heads &values, bool is_whole, bool backwards,
                                           Body body) {
    int bytes = tiles_bytes(is_whole);
    int step = backwards ? -1 : 1, number = backwards ? way.chunks - 1 : 0;
    int member = 0;
    fetch_tiles(p, way, number, values, is_whole, tiles_at(memory, is_whole));
    commit_copies();
    for (int i = 0; i < way.chunks; i++, number += step) {
        Tiles tiles = tiles_at(memory + member * bytes, is_whole);
        if (p.stages > 1) {
            member ^= 1;
            fetch_tiles(p, way, number + step, values, is_whole, tiles_at(memory + member * bytes, is_whole));
            commit_copies();
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        __syncthreads();
        body(number, tiles);
        __syncthreads();
        if (p.stages == 1) {
            fetch_tiles(p, way, number + step, values, is_whole, tiles_at(memory, is_whole));
            commit_copies();
        }
    }
}
