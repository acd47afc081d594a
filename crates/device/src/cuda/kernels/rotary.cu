// Rotary position embedding, in place.

// A row of blocks for each token, and a thread for N pairs of one head. `half` is half the rotated dimension, a multiple of N where
// N is not 1.
#define ROTARY(T, NAME, N) \
    extern "C" __global__ void rotary_##NAME##_##N( \
        i64 tokens, i64 heads, i64 step, i64 half, Matrix<T> x, Matrix<float> table, i64 positions, const u32 *position_of, \
        float sign, u64 *defects) { \
        for (i64 token = blockIdx.y; token < tokens; token += gridDim.y) { \
            u32 position = position_of[token]; \
            if (position >= positions) { \
                report(defects, DEFECT_POSITION, position, positions); \
                continue; \
            } \
            u32 across = (u32)(half + N - 1) / N, place = blockIdx.x * blockDim.x + threadIdx.x; \
            u32 head = place / across; \
            if (head >= heads) return; \
            i64 i = (i64)(place - head * across) * N; \
            int count = (int)(half - i < N ? half - i : N); \
            T *first = x.at(token, (i64)head * step + i), *second = first + half; \
            float cosine[N], sine[N], a[N], b[N], c[N]; \
            load<N>(first, count, a); \
            load<N>(second, count, b); \
            load<N>(table.at(position, i), count, cosine); \
            load<N>(table.at(position, half + i), count, sine); \
            for (int k = 0; k < N; k++) { \
                float s = sine[k] * sign; \
                c[k] = a[k] * cosine[k] - b[k] * s; \
                b[k] = b[k] * cosine[k] + a[k] * s; \
            } \
            store<N>(first, count, c); \
            store<N>(second, count, b); \
        } \
    }
FOR_TYPES(ROTARY)

// The same for element 2i and the one behind it: a thread for each pair.
#define ROTARY_NEIGHBOURS(T, NAME) \
    extern "C" __global__ void rotary_neighbours_##NAME( \
        i64 tokens, i64 heads, i64 step, i64 half, Matrix<T> x, Matrix<float> table, i64 positions, const u32 *position_of, \
        float sign, u64 *defects) { \
        u32 place = blockIdx.x * blockDim.x + threadIdx.x, head = place / (u32)half; \
        i64 i = place - (i64)head * half; \
        for (i64 token = blockIdx.y; token < tokens; token += gridDim.y) { \
            u32 position = position_of[token]; \
            if (position >= positions) { \
                report(defects, DEFECT_POSITION, position, positions); \
                continue; \
            } \
            if (head >= heads) return; \
            T *first = x.at(token, (i64)head * step + 2 * i), *second = first + 1; \
            float cosine = *table.at(position, i), sine = *table.at(position, half + i) * sign; \
            float a = widen(*first), b = widen(*second); \
            *first = narrow<T>(a * cosine - b * sine); \
            *second = narrow<T>(b * cosine + a * sine); \
        } \
    }
ROTARY_NEIGHBOURS(float, f32)
ROTARY_NEIGHBOURS(bf16, bf16)
