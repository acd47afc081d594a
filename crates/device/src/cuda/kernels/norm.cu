// RMS and layer norms with the residual sum fused in, and their gradients. A missing weight counts as zeros.
//
// A block has blockDim.x threads for a row and blockDim.y rows at once; several rows only where a warp is enough for one.

// The sums over a block's threads are those over a row's: a block of several rows has one warp for each.

// Rows whose vectors are at most as many as threads: each is read once.
template <class T, int N, bool LAYER>
__device__ __forceinline__ void norm_short(
    i64 rows, i64 cols, Matrix<T> x, Matrix<T> add, Matrix<T> sum, const float *weight, float weight_offset,
    const float *bias, float epsilon, Matrix<T> out, Matrix<float> stats) {
    i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    // A whole warp, or the whole block.
    if (row >= rows) return;
    i64 col = (i64)threadIdx.x * N;
    int count = cols - col < 0 ? 0 : (int)(cols - col < N ? cols - col : N);
    float v[N], w[N] = {}, total = 0.0f;
    load<N>(x.at(row, col), count, v);
    if (add.first) {
        float a[N];
        load<N>(add.at(row, col), count, a);
        // Rounded as it is stored: backward sees only the stored sum.
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = widen(narrow<T>(v[i] + a[i]));
        store<N>(sum.at(row, col), count, v);
    }
    // Needed behind the sums, which it does not wait for.
    if (weight) load<N>(weight + col, count, w);
#pragma unroll
    for (int i = 0; i < N; i++) total += LAYER ? v[i] : v[i] * v[i];
    float mean = 0.0f, variance = sum_of_block(total) / cols;
    if (LAYER) {
        mean = variance;
        total = 0.0f;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < count) total += (v[i] - mean) * (v[i] - mean);
        variance = sum_of_block(total) / cols;
    }
    float scale = 1.0f / sqrtf(variance + epsilon);
    if (threadIdx.x == 0) {
        *stats.at(row, 0) = mean;
        *stats.at(row, 1) = scale;
    }
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = (v[i] - mean) * scale * (weight_offset + w[i]);
    if (bias) {
        load<N>(bias + col, count, w);
#pragma unroll
        for (int i = 0; i < N; i++) v[i] += w[i];
    }
    store<N>(out.at(row, col), count, v);
}

// Longer rows are read again for each sum.
template <class T, int N, bool LAYER>
__device__ __forceinline__ void norm_long(
    i64 cols, Matrix<T> x, Matrix<T> add, Matrix<T> sum, const float *weight, float weight_offset, const float *bias,
    float epsilon, Matrix<T> out, Matrix<float> stats) {
    i64 row = blockIdx.x, first = (i64)threadIdx.x * N, step = (i64)blockDim.x * N;
    Matrix<T> input = add.first ? sum : x;
    float total = 0.0f;
    for (i64 col = first; col < cols; col += step) {
        int count = (int)(cols - col < N ? cols - col : N);
        float v[N], a[N];
        load<N>(x.at(row, col), count, v);
        if (add.first) {
            load<N>(add.at(row, col), count, a);
#pragma unroll
            for (int i = 0; i < N; i++) v[i] = widen(narrow<T>(v[i] + a[i]));
            store<N>(sum.at(row, col), count, v);
        }
#pragma unroll
        for (int i = 0; i < N; i++) total += LAYER ? v[i] : v[i] * v[i];
    }
    float mean = 0.0f, variance = sum_of_block(total) / cols;
    if (LAYER) {
        mean = variance;
        total = 0.0f;
        for (i64 col = first; col < cols; col += step) {
            int count = (int)(cols - col < N ? cols - col : N);
            float v[N];
            load<N>(input.at(row, col), count, v);
#pragma unroll
            for (int i = 0; i < N; i++)
                if (i < count) total += (v[i] - mean) * (v[i] - mean);
        }
        variance = sum_of_block(total) / cols;
    }
    float scale = 1.0f / sqrtf(variance + epsilon);
    if (threadIdx.x == 0) {
        *stats.at(row, 0) = mean;
        *stats.at(row, 1) = scale;
    }
    for (i64 col = first; col < cols; col += step) {
        int count = (int)(cols - col < N ? cols - col : N);
        float v[N], w[N] = {}, b[N] = {};
        load<N>(input.at(row, col), count, v);
        if (weight) load<N>(weight + col, count, w);
        if (bias) load<N>(bias + col, count, b);
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = (v[i] - mean) * scale * (weight_offset + w[i]) + b[i];
        store<N>(out.at(row, col), count, v);
    }
}

#define NORM_KIND(T, NAME, N, KIND, LAYER) \
    extern "C" __global__ void __launch_bounds__(1024) norm_short_##KIND##_##NAME##_##N( \
        i64 rows, i64 cols, Matrix<T> x, Matrix<T> add, Matrix<T> sum, const float *weight, float weight_offset, \
        const float *bias, float epsilon, Matrix<T> out, Matrix<float> stats) { \
        norm_short<T, N, LAYER>(rows, cols, x, add, sum, weight, weight_offset, bias, epsilon, out, stats); \
    } \
    extern "C" __global__ void __launch_bounds__(1024) norm_long_##KIND##_##NAME##_##N( \
        i64 rows, i64 cols, Matrix<T> x, Matrix<T> add, Matrix<T> sum, const float *weight, float weight_offset, \
        const float *bias, float epsilon, Matrix<T> out, Matrix<float> stats) { \
        norm_long<T, N, LAYER>(cols, x, add, sum, weight, weight_offset, bias, epsilon, out, stats); \
    }
#define NORM(T, NAME, N) NORM_KIND(T, NAME, N, rms, false) NORM_KIND(T, NAME, N, layer, true)
FOR_TYPES(NORM)

// N elements as they lie in memory: half as many registers hold a bf16 vector so.
template <class T, int N> struct Words {
    static const int COUNT = sizeof(T) * N < 4 ? 1 : sizeof(T) * N / 4;
    u32 at[COUNT];

    // Zeros where there is no element.
    __device__ __forceinline__ void fetch(const T *from, int count) {
        if (count == N) {
            Pack<T, N> pack = *reinterpret_cast<const Pack<T, N> *>(from);
            at[COUNT - 1] = 0;
            memcpy(at, &pack, sizeof(pack));
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; i++) at[i] = 0;
#pragma unroll
            for (int i = 0; i < N; i++)
                if (i < count) at[i * sizeof(T) / 4] |= bits(from[i]) << (sizeof(T) == 2 ? i % 2 * 16 : 0);
        }
    }

    __device__ __forceinline__ static u32 bits(bf16 x) { return x.bits; }
    __device__ __forceinline__ static u32 bits(float x) { return __float_as_uint(x); }

    __device__ __forceinline__ float number(int i) const {
        if (sizeof(T) == 4) return __uint_as_float(at[i]);
        return __uint_as_float(i % 2 ? at[i / 2] & 0xffff0000u : at[i / 2] << 16);
    }

    // Has what was made of them before made again, not kept.
    __device__ __forceinline__ void forget() {
#pragma unroll
        for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(at[i]));
    }
};

// Gradients of rows whose vectors are at most as many as threads. A block walks its rows and keeps its columns' share of
// dweight and dbias, which it writes to rows 2b and 2b + 1 of `partials`. `cols` is below 2^31.
//
// A row's sums need all threads; the next row is on its way meanwhile. Rows held as f32 made that too many registers.
template <class T, int N, bool LAYER>
__device__ __forceinline__ void norm_backward(
    i64 rows, int cols, Matrix<T> x, const float *weight, float weight_offset, Matrix<float> stats, Matrix<T> dout,
    Matrix<T> residual, Matrix<T> dx, i64 rows_per_block, float *partials) {
    int col = threadIdx.x * N;
    int count = cols - col < 0 ? 0 : (cols - col < N ? cols - col : N);
    i64 start = (i64)blockIdx.x * rows_per_block;
    i64 end = start + rows_per_block < rows ? start + rows_per_block : rows;
    float w[N] = {}, dweight[N] = {}, dbias[N] = {};
    if (weight) load<N>(weight + col, count, w);
#pragma unroll
    for (int i = 0; i < N; i++) w[i] += weight_offset;
    i64 row = start + threadIdx.y;
    Words<T, N> next_x, next_d;
    float next_mean = 0.0f, next_scale = 0.0f;
    if (row < end) {
        next_x.fetch(x.at(row, col), count);
        next_d.fetch(dout.at(row, col), count);
        next_mean = *stats.at(row, 0);
        next_scale = *stats.at(row, 1);
    }
    for (; row < end; row += blockDim.y) {
        Words<T, N> this_x = next_x, this_d = next_d, this_r = {};
        float mean = next_mean, scale = next_scale;
        if (residual.first) this_r.fetch(residual.at(row, col), count);
        i64 next = row + blockDim.y;
        if (next < end) {
            next_x.fetch(x.at(next, col), count);
            next_d.fetch(dout.at(next, col), count);
            next_mean = *stats.at(next, 0);
            next_scale = *stats.at(next, 1);
        }
        float sum_g = 0.0f, sum_gx = 0.0f;
#pragma unroll
        for (int i = 0; i < N; i++) {
            // Where there is no element, dout is zero.
            float v = (this_x.number(i) - mean) * scale, d = this_d.number(i);
            dweight[i] += d * v;
            if (LAYER) dbias[i] += d;
            d *= w[i];
            if (LAYER) sum_g += d;
            sum_gx += d * v;
        }
        if (LAYER) {
            sums_of_block(sum_g, sum_gx);
        } else {
            sum_gx = sum_of_block(sum_gx);
        }
        this_x.forget();
        this_d.forget();
        float mean_g = LAYER ? sum_g / cols : 0.0f, mean_gx = sum_gx / cols, r[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            float v = (this_x.number(i) - mean) * scale, d = this_d.number(i) * w[i];
            r[i] = this_r.number(i) + scale * (d - mean_g - v * mean_gx);
        }
        store<N>(dx.at(row, col), count, r);
    }
    // Rows that were walked side by side are added up in order.
    __shared__ float sums[8][2][32 * N];
    if (blockDim.y > 1) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            sums[threadIdx.y][0][col + i] = dweight[i];
            sums[threadIdx.y][1][col + i] = dbias[i];
        }
        __syncthreads();
        if (threadIdx.y > 0) return;
        for (int other = 1; other < blockDim.y; other++) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                dweight[i] += sums[other][0][col + i];
                dbias[i] += sums[other][1][col + i];
            }
        }
    }
    float *to = partials + (i64)blockIdx.x * 2 * cols + col;
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (i >= count) break;
        to[i] = dweight[i];
        if (LAYER) to[cols + i] = dbias[i];
    }
}

#define NORM_BACKWARD_KIND(T, NAME, N, KIND, LAYER) \
    extern "C" __global__ void __launch_bounds__(1024) norm_backward_##KIND##_##NAME##_##N( \
        i64 rows, int cols, Matrix<T> x, const float *weight, float weight_offset, Matrix<float> stats, Matrix<T> dout, \
        Matrix<T> residual, Matrix<T> dx, i64 rows_per_block, float *partials) { \
        norm_backward<T, N, LAYER>( \
            rows, cols, x, weight, weight_offset, stats, dout, residual, dx, rows_per_block, partials); \
    }
#define NORM_BACKWARD(T, NAME, N) \
    NORM_BACKWARD_KIND(T, NAME, N, rms, false) NORM_BACKWARD_KIND(T, NAME, N, layer, true)
FOR_TYPES(NORM_BACKWARD)

// Longer rows: first the sums down the columns, a thread for each of them, then the rows.
#define NORM_COLUMNS(T, NAME) \
    extern "C" __global__ void norm_backward_columns_##NAME( \
        i64 rows, i64 cols, Matrix<T> x, Matrix<float> stats, Matrix<T> dout, i64 rows_per_block, float *partials) { \
        i64 col = (i64)blockIdx.x * blockDim.x + threadIdx.x; \
        if (col >= cols) return; \
        i64 start = (i64)blockIdx.y * rows_per_block; \
        i64 end = start + rows_per_block < rows ? start + rows_per_block : rows; \
        float dweight = 0.0f, dbias = 0.0f; \
        for (i64 row = start; row < end; row++) { \
            float d = widen(*dout.at(row, col)); \
            dweight += d * ((widen(*x.at(row, col)) - *stats.at(row, 0)) * *stats.at(row, 1)); \
            dbias += d; \
        } \
        partials[(i64)blockIdx.y * 2 * cols + col] = dweight; \
        partials[((i64)blockIdx.y * 2 + 1) * cols + col] = dbias; \
    }
NORM_COLUMNS(float, f32)
NORM_COLUMNS(bf16, bf16)

#define NORM_ROWS(T, NAME) \
    extern "C" __global__ void __launch_bounds__(1024) norm_backward_rows_##NAME( \
        int layer, i64 cols, Matrix<T> x, const float *weight, float weight_offset, Matrix<float> stats, Matrix<T> dout, \
        Matrix<T> residual, Matrix<T> dx) { \
        i64 row = blockIdx.x; \
        float mean = *stats.at(row, 0), scale = *stats.at(row, 1), sum_g = 0.0f, sum_gx = 0.0f; \
        for (i64 col = threadIdx.x; col < cols; col += blockDim.x) { \
            float g = widen(*dout.at(row, col)) * (weight_offset + (weight ? weight[col] : 0.0f)); \
            sum_g += g; \
            sum_gx += g * ((widen(*x.at(row, col)) - mean) * scale); \
        } \
        float mean_g = layer ? sum_of_block(sum_g) / cols : 0.0f; \
        float mean_gx = sum_of_block(sum_gx) / cols; \
        for (i64 col = threadIdx.x; col < cols; col += blockDim.x) { \
            float g = widen(*dout.at(row, col)) * (weight_offset + (weight ? weight[col] : 0.0f)); \
            float normal = (widen(*x.at(row, col)) - mean) * scale; \
            float before = residual.first ? widen(*residual.at(row, col)) : 0.0f; \
            *dx.at(row, col) = narrow<T>(before + scale * (g - mean_g - normal * mean_gx)); \
        } \
    }
NORM_ROWS(float, f32)
NORM_ROWS(bf16, bf16)
