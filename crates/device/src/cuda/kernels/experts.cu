// Mixtures of experts but for their products: choosing, sorting, and rows of pairs. A pair's number is token · k + slot.

// Larger for larger logits, zero for NaN. Both zeros are equal. See `rank` in cpu/experts.rs.
__device__ __forceinline__ u32 rank_of(float logit) {
    if (logit != logit) return 0;
    u32 bits = __float_as_uint(logit + 0.0f);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ u64 largest_of_warp(u64 x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        u64 other = __shfl_xor_sync(0xffffffffu, x, lanes);
        x = other > x ? other : x;
    }
    return x;
}

// The largest logit of a row, and the sum of the exponentials of the differences from it.
struct RowSums {
    float max, exponentials;
};

__device__ __forceinline__ RowSums row_sums(const float *row, int experts) {
    int lane = threadIdx.x % 32;
    float max = -INFINITY_F32, sum = 0.0f;
    for (int i = lane; i < experts; i += 32) max = fmaxf(max, row[i]);
    max = max_of_warp(max);
    for (int i = lane; i < experts; i += 32) sum += expf(row[i] - max);
    return {max, sum_of_warp(sum)};
}

// Gives the experts of the k largest logits to `take`, in descending order. A lane keeps the ranks of so many experts.
template <int KEPT, class Take> __device__ __forceinline__ void choose_kept(const float *row, int experts, int k, Take take) {
    u32 lane = threadIdx.x % 32, ranks[KEPT];
    // Zero is nobody's, also of those that were chosen.
#pragma unroll
    for (int i = 0; i < KEPT; i++) ranks[i] = lane + 32 * i < experts ? rank_of(row[lane + 32 * i]) + 1 : 0;
    for (int slot = 0; slot < k; slot++) {
        u32 best = 0, index = IGNORE;
#pragma unroll
        for (int i = 0; i < KEPT; i++) {
            if (ranks[i] <= best) continue;
            best = ranks[i];
            index = lane + 32 * i;
        }
        u32 best_of_all = __reduce_max_sync(0xffffffffu, best);
        u32 expert = __reduce_min_sync(0xffffffffu, best == best_of_all ? index : IGNORE);
#pragma unroll
        for (int i = 0; i < KEPT; i++)
            if (expert == lane + 32 * i) ranks[i] = 0;
        take(slot, expert);
    }
}

// The same for any number of experts.
template <class Take> __device__ __forceinline__ void choose_any(const float *row, int experts, int k, Take take) {
    u64 last = ~0ull;
    for (int slot = 0; slot < k; slot++) {
        // Of equal ranks, a lower index is larger. Keys are distinct and above zero.
        u64 best = 0;
        for (int i = threadIdx.x % 32; i < experts; i += 32) {
            u64 key = (u64)rank_of(row[i]) << 32 | (u32)~i;
            if (key < last && key > best) best = key;
        }
        last = largest_of_warp(best);
        take(slot, ~(u32)last);
    }
}

// A warp for each token.
extern "C" __global__ void __launch_bounds__(256) route_choose(
    i64 tokens, int experts, int k, Matrix<float> logits, int renormalise, Matrix<float> weights, Matrix<u32> chosen) {
    i64 token = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (token >= tokens) return;
    int lane = threadIdx.x % 32;
    const float *row = logits.at(token, 0);
    RowSums sums = row_sums(row, experts);
    float total = 0.0f;
    auto take = [&](int slot, u32 expert) {
        float share = expf(row[expert] - sums.max) / sums.exponentials;
        total += share;
        if (lane == 0) {
            *chosen.at(token, slot) = expert;
            *weights.at(token, slot) = share;
        }
    };
    if (experts <= 4 * 32)
        choose_kept<4>(row, experts, k, take);
    else if (experts <= 16 * 32)
        choose_kept<16>(row, experts, k, take);
    else
        choose_any(row, experts, k, take);
    if (!renormalise) return;
    __syncwarp();
    for (int slot = lane; slot < k; slot += 32) *weights.at(token, slot) /= total;
}

// The place of an expert among those that come one behind the other.
__device__ __forceinline__ u32 place_of(u32 expert, int first, int experts) {
    return expert < first ? expert + experts - first : expert - first;
}

// counts[block, place]: how many of a block's pairs an expert has. Atomic additions of integers come out the same in any order.
extern "C" __global__ void route_count(
    i64 tokens, int experts, int first, int k, i64 tokens_per_block, Matrix<u32> chosen, u32 *counts) {
    extern __shared__ u32 own[];
    for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) own[expert] = 0;
    __syncthreads();
    i64 start = (i64)blockIdx.x * tokens_per_block;
    i64 count = tokens - start < tokens_per_block ? tokens - start : tokens_per_block;
    for (i64 pair = threadIdx.x; pair < count * k; pair += blockDim.x)
        atomicAdd(own + place_of(*chosen.at(start + pair / k, pair % k), first, experts), 1u);
    __syncthreads();
    for (int expert = threadIdx.x; expert < experts; expert += blockDim.x)
        counts[(i64)blockIdx.x * experts + expert] = own[expert];
}

__device__ __forceinline__ u32 sum_up_to_lane(u32 x) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        u32 other = __shfl_up_sync(0xffffffffu, x, lanes);
        if (threadIdx.x % 32 >= lanes) x += other;
    }
    return x;
}

// Counts that a lane reads before it uses the first.
#define COUNTS_AT_ONCE 16

// Makes of each count how many of the expert's pairs are in earlier blocks, and writes where each expert begins. One block.
extern "C" __global__ void __launch_bounds__(1024) route_add_up(int experts, int blocks, u32 *counts, u32 *offsets) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int expert = warp; expert < experts; expert += warps) {
        u32 before = 0;
        for (int first = 0; first < blocks; first += 32 * COUNTS_AT_ONCE) {
            u32 some[COUNTS_AT_ONCE];
#pragma unroll
            for (int i = 0; i < COUNTS_AT_ONCE; i++) {
                int block = first + 32 * i + lane;
                some[i] = block < blocks ? counts[(i64)block * experts + expert] : 0;
            }
#pragma unroll
            for (int i = 0; i < COUNTS_AT_ONCE; i++) {
                int block = first + 32 * i + lane;
                u32 sum = sum_up_to_lane(some[i]);
                if (block < blocks) counts[(i64)block * experts + expert] = before + sum - some[i];
                before += __shfl_sync(0xffffffffu, sum, 31);
            }
        }
        if (lane == 0) offsets[expert] = before;
    }
    __syncthreads();
    if (warp > 0) return;
    u32 before = 0;
    for (int first = 0; first < experts; first += 32) {
        bool is_there = first + lane < experts;
        u32 count = is_there ? offsets[first + lane] : 0, sum = sum_up_to_lane(count);
        if (is_there) offsets[first + lane] = before + sum - count;
        before += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0) offsets[experts] = before;
}

#define SORTED_AT_ONCE 1024

// A thread for each expert looks through all pairs of the block in their order.
extern "C" __global__ void __launch_bounds__(1024) route_place(
    i64 tokens, int experts, int first, int k, i64 tokens_per_block, Matrix<u32> chosen, const u32 *counts,
    const u32 *offsets, u32 *pairs, u32 *places) {
    __shared__ u32 some[SORTED_AT_ONCE];
    i64 start = (i64)blockIdx.x * tokens_per_block;
    i64 tokens_here = tokens - start < tokens_per_block ? tokens - start : tokens_per_block;
    i64 end = (start + tokens_here) * k;
    for (int begin = 0; begin < experts; begin += blockDim.x) {
        u32 place = begin + threadIdx.x;
        bool is_there = place < experts;
        u32 next = is_there ? offsets[place] + counts[(i64)blockIdx.x * experts + place] : 0;
        for (i64 base = start * k; base < end; base += SORTED_AT_ONCE) {
            int count = end - base < SORTED_AT_ONCE ? (int)(end - base) : SORTED_AT_ONCE;
            __syncthreads();
            for (int i = threadIdx.x; i < count; i += blockDim.x)
                some[i] = place_of(*chosen.at((base + i) / k, (base + i) % k), first, experts);
            __syncthreads();
            if (!is_there) continue;
            for (int i = 0; i < count; i++) {
                if (some[i] != place) continue;
                pairs[next] = (u32)(base + i);
                places[base + i] = next++;
            }
        }
    }
}

// A warp for each token.
extern "C" __global__ void __launch_bounds__(256) route_backward(
    i64 tokens, int experts, int k, Matrix<float> logits, Matrix<u32> chosen, Matrix<float> weights, int renormalise,
    Matrix<float> dweights, Mixed dlogits, u64 *defects) {
    i64 token = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (token >= tokens) return;
    int lane = threadIdx.x % 32;
    float dot = 0.0f;
    for (int slot = lane; slot < k; slot += 32) dot += *weights.at(token, slot) * *dweights.at(token, slot);
    dot = sum_of_warp(dot);
    if (renormalise) {
        float zero[1] = {};
        for (int i = lane; i < experts; i += 32) store<1>(dlogits, token, i, 1, zero);
    } else {
        const float *row = logits.at(token, 0);
        RowSums sums = row_sums(row, experts);
        float factor = -dot / sums.exponentials;
        for (int i = lane; i < experts; i += 32) {
            float gradient[1] = {expf(row[i] - sums.max) * factor};
            store<1>(dlogits, token, i, 1, gradient);
        }
    }
    // Other lanes have written where this one writes again.
    __syncwarp();
    for (int slot = lane; slot < k; slot += 32) {
        u32 expert = *chosen.at(token, slot);
        if (expert >= experts) {
            report(defects, DEFECT_COLUMN, expert, experts);
            continue;
        }
        float gradient[1] = {*weights.at(token, slot) * (*dweights.at(token, slot) - dot)};
        store<1>(dlogits, token, expert, 1, gradient);
    }
}

// In what follows a bad number of a pair or place is reported, and its row left out. Weights are 1 if there are none.
#define GATHER_PAIRS(T, NAME, N) \
    extern "C" __global__ void gather_pairs_##NAME##_##N( \
        RowCount rows, i64 cols, Matrix<T> x, i64 x_rows, const u32 *pairs, int k, Matrix<float> weights, Matrix<T> out, \
        u64 *defects) { \
        each_vector<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            u32 pair = pairs[row], token = pair / k; \
            if (token >= x_rows) { \
                report(defects, DEFECT_ROW, pair, x_rows * k); \
            } else if (weights.first) { \
                float v[N], weight = *weights.at(token, pair % k); \
                load<N>(x.at(token, col), count, v); \
                for (int i = 0; i < N; i++) v[i] *= weight; \
                store<N>(out.at(row, col), count, v); \
            } else { \
                move<N>(x.at(token, col), out.at(row, col), count); \
            } \
        }); \
    }
FOR_TYPES(GATHER_PAIRS)

#define SCALE_PAIRS(N) \
    extern "C" __global__ void scale_pairs_##N( \
        RowCount rows, i64 cols, Mixed x, const u32 *pairs, i64 tokens, int k, Matrix<float> weights, Mixed out, \
        u64 *defects) { \
        each_vector<N>(rows, cols, [&](i64 row, i64 col, int count) { \
            u32 pair = pairs ? pairs[row] : (u32)row, token = pair / k; \
            if (token >= tokens) { \
                report(defects, DEFECT_ROW, pair, tokens * k); \
                return; \
            } \
            float v[N], weight = *weights.at(token, pair % k); \
            load<N>(x, row, col, count, v); \
            for (int i = 0; i < N; i++) v[i] *= weight; \
            store<N>(out, row, col, count, v); \
        }); \
    }
SCALE_PAIRS(8)
SCALE_PAIRS(4)
SCALE_PAIRS(1)

#define COMBINE_PAIRS(N) \
    extern "C" __global__ void combine_pairs_##N( \
        i64 rows, i64 cols, Mixed x, RowCount x_rows, const u32 *places, int k, Matrix<float> weights, Mixed out, \
        int accumulate, u64 *defects) { \
        i64 there = x_rows; \
        each_vector<N>(rows, cols, [&](i64 token, i64 col, int count) { \
            float sum[N] = {}; \
            if (accumulate) load<N>(out, token, col, count, sum); \
            for (int slot = 0; slot < k; slot++) { \
                u32 place = places[token * k + slot]; \
                if (place >= there) { \
                    if (!x_rows.count) report(defects, DEFECT_ROW, place, there); \
                    continue; \
                } \
                float v[N], weight = weights.first ? *weights.at(token, slot) : 1.0f; \
                load<N>(x, place, col, count, v); \
                for (int i = 0; i < N; i++) sum[i] = fmaf(v[i], weight, sum[i]); \
            } \
            store<N>(out, token, col, count, sum); \
        }); \
    }
COMBINE_PAIRS(8)
COMBINE_PAIRS(4)
COMBINE_PAIRS(1)

// A warp for each row.
#define PAIR_DOTS(N) \
    extern "C" __global__ void __launch_bounds__(256) pair_dots_##N( \
        RowCount rows, i64 cols, Mixed a, Mixed b, const u32 *pairs, i64 tokens, int k, Matrix<float> out, u64 *defects) { \
        i64 row = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; \
        if (row >= rows) return; \
        int lane = threadIdx.x % 32; \
        float sum = 0.0f; \
        for (i64 col = (i64)lane * N; col < cols; col += 32 * N) { \
            int count = cols - col < N ? (int)(cols - col) : N; \
            float x[N], y[N]; \
            load<N>(a, row, col, count, x); \
            load<N>(b, row, col, count, y); \
            for (int i = 0; i < N; i++) sum = fmaf(x[i], y[i], sum); \
        } \
        sum = sum_of_warp(sum); \
        u32 pair = pairs ? pairs[row] : (u32)row, token = pair / k; \
        if (lane > 0) return; \
        if (token >= tokens) \
            report(defects, DEFECT_ROW, pair, tokens * k); \
        else \
            *out.at(token, pair % k) = sum; \
    }
PAIR_DOTS(8)
PAIR_DOTS(4)
PAIR_DOTS(1)
