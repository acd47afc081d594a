// Tiles of bf16 in shared memory and their products by tensor cores, compiled for a WIDTH that K is rounded up to.
//
// Of a [16, 8] part of a product a lane holds two neighbours in row lane / 4 and two in the eighth row after that, from column
// lane % 4 * 2 on. Rows in shared memory are 16 bytes longer than a whole number of banks, so that eight rows of a matrix lie in
// different ones.

#define PITCH (WIDTH + 8)
#define SQUARE_PITCH (CHUNK + 8)

// Numbers of a chunk's rows, for each value head. The first ones are all that goes through the chunks in turn.
enum Number {
    // β
    TAKE,
    // α / |k|, ε / |k| and α / (|q|·√K)
    READ, WRITE, OUT,
    // α and ε
    SINCE, LEFT,
    // The two parts of G, the sum of g so far, and g.
    HIGH, LOW, FADE,
    // 1 / (|q|·√K) and 1 / |k|
    QUERY, KEY,
    NUMBERS
};
#define NUMBERS_IN_TURN (SINCE + 1)

__device__ __forceinline__ float *numbers_of(const Parameters &p, i64 item) {
    return (float *)p.numbers + item * (NUMBERS * CHUNK);
}

// T, and P behind it.
__device__ __forceinline__ u16 *squares_of(const Parameters &p, i64 item) {
    return (u16 *)p.squares + item * (2 * CHUNK * CHUNK);
}

// Rows of a border: V of a state, then K in whole parts of products.
__device__ __forceinline__ int border_rows(const Parameters &p) { return p.padded_value + (p.key + 15) / 16 * 16; }

// What a stretch does to states: with Sᵀ before it and S'ᵀ behind it,
//
// S'ᵀ = Sᵀ·A + Zᵀ; dSᵀ = dS'ᵀ·Aᵀ + dZᵀ
//
// Zᵀ lies first and A behind it. Sᵀ takes the place of Zᵀ, then dZᵀ that of Sᵀ, and dS'ᵀ that of dZᵀ. Segments of several stretches
// have no more of them than two for each whole stretch.
__device__ __forceinline__ float *border_at(const Parameters &p, int segment, int stretch, int head) {
    i64 number = 2 * (i64)p.offsets[segment] / p.stretch + stretch;
    return (float *)p.borders + (number * p.heads + head) * border_rows(p) * WIDTH;
}

__device__ __forceinline__ int lane_of() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_of() { return threadIdx.x / 32; }

// The lane's row of four 8 × 8 matrices: the second is below the first, or beside it.
__device__ __forceinline__ const u16 *below(const u16 *tile, int pitch, int row, int col) {
    int lane = lane_of();
    return tile + (row + lane % 16) * pitch + col + lane / 16 * 8;
}

__device__ __forceinline__ const u16 *beside(const u16 *tile, int pitch, int row, int col) {
    int lane = lane_of();
    return tile + (row + lane % 8 + lane / 16 * 8) * pitch + col + lane / 8 % 2 * 8;
}

// A left operand: sixteen rows and columns of a tile, or of the tile turned.
__device__ __forceinline__ void load_left(u32 (&to)[4], const u16 *tile, int pitch, int row, int col) {
    load_matrices(to, below(tile, pitch, row, col));
}

__device__ __forceinline__ void load_left_turned(u32 (&to)[4], const u16 *tile, int pitch, int row, int col) {
    load_transposed(to, beside(tile, pitch, col, row));
}

// sums [16, 16] += left [16, 16] · the tile's rows from `row` and columns from `col` on.
__device__ __forceinline__ void add_product(float (&first)[4], float (&second)[4], const u32 (&left)[4], const u16 *tile,
                                            int pitch, int row, int col) {
    u32 right[4];
    load_transposed(right, below(tile, pitch, row, col));
    multiply_add(first, left, right[0], right[1]);
    multiply_add(second, left, right[2], right[3]);
}

// The same with the turned tile: its rows, from `row` on, are columns of the product.
__device__ __forceinline__ void add_product_turned(float (&first)[4], float (&second)[4], const u32 (&left)[4],
                                                   const u16 *tile, int pitch, int row, int col) {
    u32 right[4];
    load_matrices(right, beside(tile, pitch, row, col));
    multiply_add(first, left, right[0], right[1]);
    multiply_add(second, left, right[2], right[3]);
}

// Two parts of a product side by side as a left operand.
__device__ __forceinline__ void as_left(u32 (&to)[4], const float (&first)[4], const float (&second)[4]) {
    to[0] = rounded_pair(first[0], first[1]);
    to[1] = rounded_pair(first[2], first[3]);
    to[2] = rounded_pair(second[0], second[1]);
    to[3] = rounded_pair(second[2], second[3]);
}

__device__ __forceinline__ float first_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float second_of(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Rounds two neighbours, and what that takes away.
__device__ __forceinline__ void split(float first, float second, u32 &pair, u32 &rest) {
    pair = rounded_pair(first, second);
    rest = rounded_pair(first - first_of(pair), second - second_of(pair));
}

// Turns an 8 × 8 matrix of bf16, of which each lane has two neighbours.
__device__ __forceinline__ u32 turned(u32 pair) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(result) : "r"(pair));
    return result;
}

template <int PARTS> __device__ __forceinline__ void clear(float (&sums)[PARTS][4]) {
#pragma unroll
    for (int i = 0; i < PARTS; i++) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0f;
}

// Begins to copy rows of COLS columns to the rows of a tile, 16 bytes at a time, by all threads, which are a multiple of a row's. Rows from
// `count` and columns from `dim` on are zero.
template <int ROWS, int COLS>
__device__ __forceinline__ void fetch_rows(const u16 *from, i64 stride, int count, int dim, u16 *to) {
    const int across = COLS / 8;
    int row = threadIdx.x / across, col = threadIdx.x % across * 8, step = blockDim.x / across;
    const u16 *at = from + row * stride + col;
    to += row * (COLS + 8) + col;
    i64 further = step * stride;
    bool has_col = col < dim;
    for (; row < ROWS; row += step) {
        bool is_there = row < count && has_col;
        copy_async(to, is_there ? at : from, is_there);
        at += further;
        to += step * (COLS + 8);
    }
}

// The same of a head's rows from column `col` on.
template <int COLS>
__device__ __forceinline__ void fetch_head(const Parameters &p, const Heads &heads, int head, i64 first, int count, int dim,
                                           int col, u16 *to) {
    const u16 *from = head_at<u16>(heads, first, head) + col;
    if (p.aligned) {
        fetch_rows<CHUNK, COLS>(from, heads.stride, count, dim - col, to);
    } else {
        for (int i = threadIdx.x; i < CHUNK * COLS; i += blockDim.x) {
            int row = i / COLS, column = i % COLS;
            bool is_there = row < count && col + column < dim;
            to[row * (COLS + 8) + column] = is_there ? from[row * heads.stride + column] : (u16)0;
        }
    }
}

__device__ __forceinline__ void fetch_numbers(const float *from, int count, float *to) {
    for (int i = threadIdx.x; i < count / 4; i += blockDim.x) copy_async(to + 4 * i, from + 4 * i, true);
}

// Moves eight elements of a tile to a row of a head, as far as there are so many columns.
__device__ __forceinline__ void store_eight(const Parameters &p, const Heads &heads, int head, i64 token, int col, int dim,
                                            const u16 *from) {
    u16 *to = head_at<u16>(heads, token, head) + col;
    if (p.aligned) {
        if (col < dim) *(uint4 *)to = *(const uint4 *)from;
    } else {
        for (int i = 0; i < 8 && col + i < dim; i++) to[i] = from[i];
    }
}
