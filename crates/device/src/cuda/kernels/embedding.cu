// Rows of a table by index, and the gradient of that.

#define EMBED(N) \
    extern "C" __global__ void embed_##N( \
        i64 rows, i64 cols, Mixed table, i64 table_rows, const u32 *indices, u32 first, float scale, Mixed out, \
        int accumulate) { \
        each_vector<N>(rows, cols, [&](i64 token, i64 col, int count) { \
            i64 row = place_of(indices[token], first, table_rows); \
            if (row < 0 && accumulate) return; \
            float x[N] = {}; \
            if (row >= 0) { \
                load<N>(table, row, col, count, x); \
                for (int i = 0; i < N; i++) x[i] *= scale; \
            } \
            if (accumulate) { \
                float y[N]; \
                load<N>(out, token, col, count, y); \
                for (int i = 0; i < N; i++) x[i] += y[i]; \
            } \
            store<N>(out, token, col, count, x); \
        }); \
    }
EMBED(8)
EMBED(4)
EMBED(1)

// The first and the last token of each row of the table. `firsts` begins with all bits set, `lasts` with zeros.
extern "C" __global__ void token_ranges(
    i64 tokens, const u32 *indices, u32 first, i64 table_rows, u32 *firsts, u32 *lasts) {
    i64 token = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= tokens) return;
    i64 row = place_of(indices[token], first, table_rows);
    if (row < 0) return;
    atomicMin(firsts + row, (u32)token);
    atomicMax(lasts + row, (u32)token);
}

// A block for each token. The block of a row's first token adds up all tokens of that row, in their order; the others end.
#define EMBED_BACKWARD(T, NAME, N) \
    extern "C" __global__ void __launch_bounds__(256) embed_backward_##NAME##_##N( \
        i64 cols, const u32 *indices, u32 first, i64 table_rows, const u32 *firsts, const u32 *lasts, Matrix<T> dout, \
        Matrix<float> dtable, float scale) { \
        __shared__ u32 found[8]; \
        i64 token = blockIdx.x; \
        u32 index = indices[token]; \
        i64 row = place_of(index, first, table_rows); \
        if (row < 0 || firsts[row] != token) return; \
        i64 last = lasts[row]; \
        int warps = blockDim.x / 32; \
        for (i64 start = 0; start < cols; start += (i64)blockDim.x * N) { \
            i64 col = start + (i64)threadIdx.x * N; \
            i64 left = cols - col; \
            int count = left < 0 ? 0 : (int)(left < N ? left : N); \
            float sum[N] = {}; \
            for (i64 base = token; base <= last; base += blockDim.x) { \
                i64 other = base + threadIdx.x; \
                u32 equal = __ballot_sync(0xffffffffu, other <= last && indices[other] == index); \
                if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = equal; \
                __syncthreads(); \
                for (int warp = 0; warp < warps; warp++) { \
                    for (u32 rest = found[warp]; rest; rest &= rest - 1) { \
                        i64 next = base + warp * 32 + __ffs(rest) - 1; \
                        float v[N]; \
                        load<N>(dout.at(next, col), count, v); \
                        for (int i = 0; i < N; i++) sum[i] += v[i]; \
                    } \
                } \
                __syncthreads(); \
            } \
            float before[N]; \
            load<N>(dtable.at(row, col), count, before); \
            for (int i = 0; i < N; i++) before[i] += scale * sum[i]; \
            store<N>(dtable.at(row, col), count, before); \
        } \
    }
FOR_TYPES(EMBED_BACKWARD)
