// Rotary position embedding, in place.

// A thread for N pairs of one head of one token. `half` is half the rotated dimension; where N is not 1 it is a multiple.
#define ROTARY(T, NAME, N) \
    extern "C" __global__ void rotary_##NAME##_##N( \
        i64 tokens, i64 heads, i64 step, i64 half, Matrix<T> x, Matrix<float> table, i64 positions, const u32 *position_of, \
        float sign, u64 *defects) { \
        each_vector<N>(tokens * heads, half, [&](i64 place, i64 i, int count) { \
            u32 token = (u32)place / (u32)heads, head = (u32)place - token * (u32)heads; \
            u32 position = position_of[token]; \
            if (position >= positions) { \
                report(defects, DEFECT_POSITION, position, positions); \
                return; \
            } \
            T *first = x.at(token, (i64)head * step + i), *second = first + half; \
            float cosine[N], sine[N], a[N], b[N], c[N]; \
            load<N>(table.at(position, i), count, cosine); \
            load<N>(table.at(position, half + i), count, sine); \
            load<N>(first, count, a); \
            load<N>(second, count, b); \
            for (int k = 0; k < N; k++) { \
                float s = sine[k] * sign; \
                c[k] = a[k] * cosine[k] - b[k] * s; \
                b[k] = b[k] * cosine[k] + a[k] * s; \
            } \
            store<N>(first, count, c); \
            store<N>(second, count, b); \
        }); \
    }
FOR_TYPES(ROTARY)
