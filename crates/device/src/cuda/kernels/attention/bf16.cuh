// What attention's bf16 kernels have in common: tiles in shared memory and their products by tensor cores. They are
// compiled for a WIDTH, for DROPS: whether weights are dropped, and for CHANGES: whether scores are changed.
//
// A warp has sixteen rows of a product. Of a [16, 8] part a lane holds two neighbours in row lane / 4 and two in the
// eighth row after that, from column lane % 4 * 2 on.

// Elements from one row in shared memory to the next: 16 bytes more than a whole number of banks, so that eight rows of
// a matrix lie in different ones.
#define PITCH (WIDTH + 8)
#define ROW 16
// The columns of a result that a block computes: the sums of more are too many for its threads' registers. Blocks of the
// other slices compute the same weights.
#define SLICE (WIDTH <= 256 ? WIDTH : 256)
#define SLICE_START (WIDTH <= 256 ? 0 : (int)blockIdx.z * SLICE)

// Begins to copy rows [ROWS, W] of a head to shared memory; rows from `end` on are zero.
template <int ROWS>
__device__ __forceinline__ void fetch_rows(const Parameters &p, const Heads &heads, int head, i64 first, int start,
                                           int end, u16 *to) {
    const u16 *from = (const u16 *)heads.address + head * heads.step;
    if (p.aligned) {
        for (int i = threadIdx.x; i < ROWS * (WIDTH / 8); i += THREADS) {
            int row = i / (WIDTH / 8), column = i % (WIDTH / 8) * 8;
            bool is_there = start + row < end && column < p.dim;
            const u16 *source = is_there ? from + (first + start + row) * heads.stride + column : from;
            copy_async(to + row * PITCH + column, source, is_there);
        }
    } else {
        for (int i = threadIdx.x; i < ROWS * WIDTH; i += THREADS) {
            int row = i / WIDTH, column = i % WIDTH;
            bool is_there = start + row < end && column < p.dim;
            to[row * PITCH + column] = is_there ? from[(first + start + row) * heads.stride + column] : 0;
        }
    }
}

// Where this lane's row of a left operand lies: sixteen rows from `row` on, and sixteen columns.
__device__ __forceinline__ const u16 *left_row(const u16 *tile, int row, int column) {
    int lane = threadIdx.x % LANES;
    return tile + (row + lane % 16) * PITCH + column + lane / 16 * 8;
}

// Right operands of two products whose columns are sixteen rows of the tile, and whose summands are sixteen columns.
__device__ __forceinline__ const u16 *right_row(const u16 *tile, int row, int column) {
    int lane = threadIdx.x % LANES;
    return tile + (row + lane % 8 + lane / 16 * 8) * PITCH + column + lane / 8 % 2 * 8;
}

// Sixteen rows of a tile as a left operand, which are kept in registers where there are enough of these.
template <bool IS_KEPT> struct Left {
    const u16 *tile;
    int row;
    u32 rows[IS_KEPT ? (WIDTH / 16) : 1][4];

    // Once the tile lies in shared memory.
    __device__ __forceinline__ void keep() {
        if constexpr (IS_KEPT) {
#pragma unroll
            for (int step = 0; step < (WIDTH / 16); step++) {
                load_matrices(rows[step], left_row(tile, row, step * 16));
            }
        }
    }

    // Sixteen columns of them.
    __device__ __forceinline__ const u32 (&columns(int step))[4] {
        if constexpr (IS_KEPT) {
            return rows[step];
        } else {
            load_matrices(rows[0], left_row(tile, row, step * 16));
            return rows[0];
        }
    }
};

// sums [16, COLUMNS] = left · rightᵀ, where right has a row for each column.
template <int COLUMNS, bool IS_KEPT>
__device__ __forceinline__ void multiply_transposed(float (&sums)[COLUMNS / 8][4], Left<IS_KEPT> &left,
                                                    const u16 *right) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; i++) {
        sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0;
    }
#pragma unroll
    for (int step = 0; step < (WIDTH / 16); step++) {
        const u32(&rows)[4] = left.columns(step);
#pragma unroll
        for (int i = 0; i < COLUMNS / 16; i++) {
            u32 columns[4];
            load_matrices(columns, right_row(right, i * 16, step * 16));
            multiply_add(sums[2 * i], rows, columns[0], columns[1]);
            multiply_add(sums[2 * i + 1], rows, columns[2], columns[3]);
        }
    }
}

// sums [16, SLICE] += weights [16, SUMMANDS] · the slice of right [SUMMANDS, W]. The weights, as `multiply_transposed` leaves them, are
// rounded to bf16.
template <int SUMMANDS>
__device__ __forceinline__ void add_weighted(float (&sums)[SLICE / 8][4], const float (&weights)[SUMMANDS / 8][4],
                                             const u16 *right) {
#pragma unroll
    for (int i = 0; i < SUMMANDS / 16; i++) {
        const float(&first)[4] = weights[2 * i], (&second)[4] = weights[2 * i + 1];
        u32 rows[4] = {rounded_pair(first[0], first[1]), rounded_pair(first[2], first[3]),
                       rounded_pair(second[0], second[1]), rounded_pair(second[2], second[3])};
#pragma unroll
        for (int step = 0; step < (SLICE / 16); step++) {
            u32 columns[4];
            load_transposed(columns, left_row(right, i * 16, SLICE_START + step * 16));
            multiply_add(sums[2 * step], rows, columns[0], columns[1]);
            multiply_add(sums[2 * step + 1], rows, columns[2], columns[3]);
        }
    }
}

// Of four numbers of a part, the row of each: this lane's, or the eighth after it.
#define ROW_OF(number) ((int)(threadIdx.x % LANES / 4) + (number) / 2 * 8)
#define COLUMN_OF(part, number) ((part) * 8 + (int)(threadIdx.x % 4) * 2 + (number) % 2)

// Stores sums [16, SLICE], each row multiplied by a factor, as rows of a head; rows from `end` on are nobody's.
__device__ __forceinline__ void store_rows(const Parameters &p, const Heads &heads, int head, i64 first, int row,
                                           int end, const float (&sums)[SLICE / 8][4], const float (&factors)[2]) {
    u16 *to = (u16 *)heads.address + head * heads.step;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int at = row + ROW_OF(2 * half);
        if (at >= end) {
            continue;
        }
        u16 *line = to + (first + at) * heads.stride;
#pragma unroll
        for (int part = 0; part < SLICE / 8; part++) {
            int column = SLICE_START + COLUMN_OF(part, 0);
            u32 pair = rounded_pair(sums[part][2 * half] * factors[half], sums[part][2 * half + 1] * factors[half]);
            if (p.aligned) {
                if (column < p.dim) {
                    *(u32 *)(line + column) = pair;
                }
            } else {
                if (column < p.dim) {
                    line[column] = (u16)pair;
                }
                if (column + 1 < p.dim) {
                    line[column + 1] = (u16)(pair >> 16);
                }
            }
        }
    }
}

__device__ __forceinline__ void clear(float (&sums)[SLICE / 8][4]) {
#pragma unroll
    for (int i = 0; i < SLICE / 8; i++) {
        sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0;
    }
}
