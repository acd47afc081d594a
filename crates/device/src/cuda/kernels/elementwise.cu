// Sums, multiples, copies, fills, scaled columns, and the selection of columns and rows.

#define ADD(N) \
    extern "C" __global__ void add_##N(i64 rows, i64 cols, Mixed a, Mixed b, Mixed out) { \
        each_vector<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            float x[N], y[N]; \
            load<N>(a, row, col, count, x); \
            load<N>(b, row, col, count, y); \
            for (int i = 0; i < N; i++) x[i] += y[i]; \
            store<N>(out, row, col, count, x); \
        }); \
    }
ADD(8)
ADD(4)
ADD(1)

#define SCALE(N) \
    extern "C" __global__ void scale_##N( \
        i64 rows, i64 cols, Mixed x, Mixed out, float factor, const float *by) { \
        if (by) factor *= *by; \
        each_vector<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            float v[N]; \
            load<N>(x, row, col, count, v); \
            for (int i = 0; i < N; i++) v[i] *= factor; \
            store<N>(out, row, col, count, v); \
        }); \
    }
SCALE(8)
SCALE(4)
SCALE(1)

#define SOFT_CAP(N) \
    extern "C" __global__ void soft_cap_##N(i64 rows, i64 cols, Mixed x, Mixed out, float cap) { \
        each_vector<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            float v[N]; \
            load<N>(x, row, col, count, v); \
            for (int i = 0; i < N; i++) v[i] = cap * tanhf(v[i] / cap); \
            store<N>(out, row, col, count, v); \
        }); \
    }
SOFT_CAP(8)
SOFT_CAP(4)
SOFT_CAP(1)

#define COPY(N) \
    extern "C" __global__ void copy_##N(i64 rows, i64 cols, Mixed from, Mixed out) { \
        each_vector<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            float x[N]; \
            load<N>(from, row, col, count, x); \
            store<N>(out, row, col, count, x); \
        }); \
    }
COPY(8)
COPY(4)
COPY(1)

// Several copies, one for each row of blocks.
#define MOST_COPIES 32
struct CopyList {
    i64 rows[MOST_COPIES], cols[MOST_COPIES];
    Mixed from[MOST_COPIES], to[MOST_COPIES];
};

#define COPIES(N) \
    extern "C" __global__ void copies_##N(const __grid_constant__ CopyList list) { \
        int place = blockIdx.y; \
        Mixed from = list.from[place], to = list.to[place]; \
        each_vector<N>(list.rows[place], list.cols[place], [&](i64 row, i64 col, int count) { \
            float x[N]; \
            load<N>(from, row, col, count, x); \
            store<N>(to, row, col, count, x); \
        }); \
    }
COPIES(8)
COPIES(4)
COPIES(1)

#define FILL(T, NAME, N) \
    extern "C" __global__ void fill_##NAME##_##N(i64 rows, i64 cols, Matrix<T> out, float value) { \
        each_vector<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            float x[N]; \
            for (int i = 0; i < N; i++) x[i] = value; \
            store<N>(out.at(row, col), count, x); \
        }); \
    }
FOR_TYPES(FILL)

// Column sums have two stages: blocks of rows are summed to rows of `partials`, which are then added up in order.
// With indices, only rows whose index is `wanted` count.
#define ROW_GROUPS 8
#define COLUMN_SUM(T, NAME, N) \
    extern "C" __global__ void __launch_bounds__(32 * ROW_GROUPS) column_sum_##NAME##_##N( \
        i64 rows, i64 cols, Matrix<T> x, i64 rows_per_block, float *partials, const u32 *indices, u32 wanted) { \
        __shared__ float sums[ROW_GROUPS][32][N]; \
        i64 col = ((i64)blockIdx.x * 32 + threadIdx.x) * N; \
        i64 left = cols - col; \
        int count = left < 0 ? 0 : (int)(left < N ? left : N); \
        i64 start = (i64)blockIdx.y * rows_per_block; \
        i64 end = start + rows_per_block < rows ? start + rows_per_block : rows; \
        float sum[N] = {}; \
        for (i64 row = start + threadIdx.y; row < end; row += ROW_GROUPS) { \
            if (indices && indices[row] != wanted) continue; \
            float v[N]; \
            load<N>(x.at(row, col), count, v); \
            for (int i = 0; i < N; i++) sum[i] += v[i]; \
        } \
        for (int i = 0; i < N; i++) sums[threadIdx.y][threadIdx.x][i] = sum[i]; \
        __syncthreads(); \
        if (threadIdx.y > 0) return; \
        for (int group = 1; group < ROW_GROUPS; group++) \
            for (int i = 0; i < N; i++) sum[i] += sums[group][threadIdx.x][i]; \
        for (int i = 0; i < N; i++) \
            if (i < count) partials[(i64)blockIdx.y * cols + col + i] = sum[i]; \
    }
FOR_TYPES(COLUMN_SUM)

// Zero where the square is zero.
__device__ __forceinline__ float over_root(float value, float square) {
    return square > 0.0f ? value / sqrtf(square) : 0.0f;
}

// out[t, c] = x[t, c] · scale[c] / √squares[c] + bias[c], or added to what is there. A thread computes its columns' factors once
// for its rows.
#define SCALE_COLUMNS(T, NAME, N) \
    extern "C" __global__ void __launch_bounds__(32 * ROW_GROUPS) scale_columns_##NAME##_##N( \
        i64 rows, i64 cols, Matrix<T> x, const float *scale, const float *squares, const float *bias, Matrix<T> out, \
        i64 rows_per_block, int accumulate) { \
        i64 col = ((i64)blockIdx.x * 32 + threadIdx.x) * N; \
        i64 left = cols - col; \
        if (left <= 0) return; \
        int count = (int)(left < N ? left : N); \
        float factor[N], addend[N]; \
        for (int i = 0; i < N; i++) { \
            factor[i] = i < count ? over_root(scale[col + i], squares[col + i]) : 0.0f; \
            addend[i] = bias && i < count ? bias[col + i] : 0.0f; \
        } \
        i64 start = (i64)blockIdx.y * rows_per_block; \
        i64 end = start + rows_per_block < rows ? start + rows_per_block : rows; \
        for (i64 row = start + threadIdx.y; row < end; row += ROW_GROUPS) { \
            float v[N]; \
            if (accumulate) load<N>(out.at(row, col), count, addend); \
            load<N>(x.at(row, col), count, v); \
            for (int i = 0; i < N; i++) v[i] = fmaf(v[i], factor[i], addend[i]); \
            store<N>(out.at(row, col), count, v); \
        } \
    }
FOR_TYPES(SCALE_COLUMNS)

// Σ_t a[t, c] · b[t, c] / √squares[c] in blocks of rows, as rows of `partials`.
#define COLUMN_DOT(T, NAME, N) \
    extern "C" __global__ void __launch_bounds__(32 * ROW_GROUPS) column_dot_##NAME##_##N( \
        i64 rows, i64 cols, Matrix<T> a, Matrix<T> b, const float *squares, i64 rows_per_block, float *partials) { \
        __shared__ float sums[ROW_GROUPS][32][N]; \
        i64 col = ((i64)blockIdx.x * 32 + threadIdx.x) * N; \
        i64 left = cols - col; \
        int count = left < 0 ? 0 : (int)(left < N ? left : N); \
        i64 start = (i64)blockIdx.y * rows_per_block; \
        i64 end = start + rows_per_block < rows ? start + rows_per_block : rows; \
        float sum[N] = {}; \
        for (i64 row = start + threadIdx.y; row < end; row += ROW_GROUPS) { \
            float v[N], w[N]; \
            load<N>(a.at(row, col), count, v); \
            load<N>(b.at(row, col), count, w); \
            for (int i = 0; i < N; i++) sum[i] = fmaf(v[i], w[i], sum[i]); \
        } \
        for (int i = 0; i < N; i++) sums[threadIdx.y][threadIdx.x][i] = sum[i]; \
        __syncthreads(); \
        if (threadIdx.y > 0) return; \
        for (int group = 1; group < ROW_GROUPS; group++) \
            for (int i = 0; i < N; i++) sum[i] += sums[group][threadIdx.x][i]; \
        for (int i = 0; i < N; i++) \
            if (i < count) partials[(i64)blockIdx.y * cols + col + i] = over_root(sum[i], squares[col + i]); \
    }
FOR_TYPES(COLUMN_DOT)

// out[c] += scale · Σ_blocks partials[block, c]; a block's row begins `step` elements after the one before. Rows y and
// y + 1 of the grid add up neighbouring stretches of `cols` columns, for two vectors.
//
// Threads of a column share its rows and are added up in order. One thread for all of 512 rows took about 30 us.
extern "C" __global__ void __launch_bounds__(1024) add_partials(
    i64 cols, i64 blocks, i64 step, const float *partials, float *first_out, float *second_out, float scale) {
    __shared__ float sums[32][33];
    i64 col = (i64)blockIdx.x * 32 + threadIdx.x;
    const float *from = partials + blockIdx.y * cols + col;
    float sum = 0.0f;
    if (col < cols) {
#pragma unroll 4
        for (i64 block = threadIdx.y; block < blocks; block += 32) sum += from[block * step];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    // Each warp adds up one column.
    sum = sum_of_warp(sums[threadIdx.x][threadIdx.y]);
    col = (i64)blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x > 0 || col >= cols) return;
    float *out = blockIdx.y == 0 ? first_out : second_out;
    if (out) out[col] += scale * sum;
}

// A bad column number is reported, and its column left out.
#define GATHER_COLUMNS(T, NAME) \
    extern "C" __global__ void gather_columns_##NAME( \
        i64 rows, i64 cols, Matrix<T> x, i64 x_cols, const u32 *columns, Matrix<T> out, u64 *defects) { \
        each_vector<1>(rows, cols, [&](i64 row, i64 i, int) { \
            u32 column = columns[i]; \
            if (column >= x_cols) \
                report(defects, DEFECT_COLUMN, column, x_cols); \
            else \
                *out.at(row, i) = *x.at(row, column); \
        }); \
    }
GATHER_COLUMNS(float, f32)
GATHER_COLUMNS(bf16, bf16)

#define SCATTER_COLUMNS(T, NAME) \
    extern "C" __global__ void scatter_columns_##NAME( \
        i64 rows, i64 cols, Matrix<T> x, const u32 *columns, Matrix<T> out, i64 out_cols, int accumulate, u64 *defects) { \
        each_vector<1>(rows, cols, [&](i64 row, i64 i, int) { \
            u32 column = columns[i]; \
            if (column >= out_cols) { \
                report(defects, DEFECT_COLUMN, column, out_cols); \
                return; \
            } \
            T *to = out.at(row, column); \
            float value = widen(*x.at(row, i)); \
            *to = narrow<T>(accumulate ? widen(*to) + value : value); \
        }); \
    }
SCATTER_COLUMNS(float, f32)
SCATTER_COLUMNS(bf16, bf16)

// A bad row number is reported, and its row left out.
#define GATHER_ROWS(T, NAME, N) \
    extern "C" __global__ void gather_rows_##NAME##_##N( \
        i64 rows, i64 cols, Matrix<T> x, i64 x_rows, const u32 *selected, Matrix<T> out, u64 *defects) { \
        each_vector<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            u32 from = selected[row]; \
            if (from >= x_rows) \
                report(defects, DEFECT_ROW, from, x_rows); \
            else \
                move<N>(x.at(from, col), out.at(row, col), count); \
        }); \
    }
FOR_TYPES(GATHER_ROWS)

#define SCATTER_ROWS(T, NAME, N) \
    extern "C" __global__ void scatter_rows_##NAME##_##N( \
        i64 rows, i64 cols, Matrix<T> x, const u32 *selected, Matrix<T> out, i64 out_rows, int accumulate, \
        u64 *defects) { \
        each_vector<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            u32 to = selected[row]; \
            if (to >= out_rows) { \
                report(defects, DEFECT_ROW, to, out_rows); \
            } else if (accumulate) { \
                float v[N], before[N]; \
                load<N>(x.at(row, col), count, v); \
                load<N>(out.at(to, col), count, before); \
                for (int i = 0; i < N; i++) before[i] += v[i]; \
                store<N>(out.at(to, col), count, before); \
            } else { \
                move<N>(x.at(row, col), out.at(to, col), count); \
            } \
        }); \
    }
FOR_TYPES(SCATTER_ROWS)
