// The biases of experts. Offsets of experts' rows are checked here: those that exceed the rows are reported.

// The expert whose row it is, -1 if it is none's.
__device__ __forceinline__ int expert_of(const u32 *offsets, int experts, i64 row) {
    // The experts that begin up to this row, by halving.
    int low = 0, high = experts + 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (offsets[middle] <= row)
            low = middle + 1;
        else
            high = middle;
    }
    return low > experts ? -1 : low - 1;
}

__device__ __forceinline__ bool ends_within(const u32 *offsets, int experts, i64 rows, u64 *defects) {
    u32 end = offsets[experts];
    if (end <= rows) return true;
    report(defects, DEFECT_ROW, end, rows);
    return false;
}

#define ADD_BIASES(N) \
    extern "C" __global__ void add_biases_##N( \
        i64 rows, i64 cols, Mixed x, Matrix<float> biases, const u32 *offsets, int experts, u64 *defects) { \
        if (!ends_within(offsets, experts, rows, defects)) return; \
        each_vector<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            int expert = expert_of(offsets, experts, row); \
            if (expert < 0) return; \
            float v[N], bias[N]; \
            load<N>(x, row, col, count, v); \
            load<N>(biases.at(expert, col), count, bias); \
            for (int i = 0; i < N; i++) v[i] += bias[i]; \
            store<N>(x, row, col, count, v); \
        }); \
    }
ADD_BIASES(4)
ADD_BIASES(1)

#define SUMMED_COLUMNS 32
#define SUMMED_ROWS 8

// A block for each expert and 32 columns: eight threads add up every eighth row of a column each.
extern "C" __global__ void __launch_bounds__(SUMMED_COLUMNS * SUMMED_ROWS) bias_sums(
    i64 rows, i64 cols, Mixed x, const u32 *offsets, int experts, Matrix<float> out, u64 *defects) {
    __shared__ float parts[SUMMED_ROWS][SUMMED_COLUMNS];
    if (!ends_within(offsets, experts, rows, defects)) return;
    int place = threadIdx.x % SUMMED_COLUMNS, part = threadIdx.x / SUMMED_COLUMNS;
    i64 col = (i64)blockIdx.x * SUMMED_COLUMNS + place;
    int expert = blockIdx.y;
    float sum = 0.0f;
    if (col < cols) {
        for (i64 row = (i64)offsets[expert] + part; row < offsets[expert + 1]; row += SUMMED_ROWS) {
            float v[1];
            load<1>(x, row, col, 1, v);
            sum += v[0];
        }
    }
    parts[part][place] = sum;
    __syncthreads();
    if (part > 0 || col >= cols) return;
    for (int other = 1; other < SUMMED_ROWS; other++) sum += parts[other][place];
    *out.at(expert, col) += sum;
}

// A warp for each row.
#define BIAS_DOTS(N) \
    extern "C" __global__ void __launch_bounds__(256) bias_dots_##N( \
        i64 rows, i64 cols, Mixed x, Matrix<float> biases, const u32 *offsets, int experts, const u32 *pairs, \
        i64 tokens, int k, Matrix<float> out, u64 *defects) { \
        i64 row = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; \
        if (row >= rows || !ends_within(offsets, experts, rows, defects)) return; \
        int lane = threadIdx.x % 32, expert = expert_of(offsets, experts, row); \
        if (expert < 0) return; \
        float sum = 0.0f; \
        for (i64 col = (i64)lane * N; col < cols; col += 32 * N) { \
            int count = cols - col < N ? (int)(cols - col) : N; \
            float v[N], bias[N]; \
            load<N>(x, row, col, count, v); \
            load<N>(biases.at(expert, col), count, bias); \
            for (int i = 0; i < N; i++) sum = fmaf(v[i], bias[i], sum); \
        } \
        sum = sum_of_warp(sum); \
        u32 pair = pairs[row], token = pair / k; \
        if (lane > 0) return; \
        if (token >= tokens) \
            report(defects, DEFECT_ROW, pair, tokens * k); \
        else \
            *out.at(token, pair % k) += sum; \
    }
BIAS_DOTS(4)
BIAS_DOTS(1)
