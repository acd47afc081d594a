// Hands states from stretch to stretch, and back their gradients: see `border_at`. A block has sixteen rows of a head's turned states, a warp
// sixteen columns of them. Both factors are split in bf16 and what that rounds away, so that a product is as good as in f32.

#define MOST_THREADS (WIDTH * 2)
// Rows of A whose numbers are under way at once.
#define DEPTH 64

// sums [16, 16] += states [16, K] · A [K, K], or Aᵀ, from column `col` on.
template <bool BACK>
__device__ __forceinline__ void pass(const Parameters &p, const u16 (&states)[2][16 * PITCH], const float *a, int col,
                                     float (&sums)[2][4]) {
    int row = lane_of() % 4 * 2;
    col += lane_of() / 4;
    for (int first = 0; first < p.key; first += DEPTH) {
        float numbers[DEPTH / 16][2][4];
#pragma unroll
        for (int i = 0; i < DEPTH / 16; i++) {
#pragma unroll
            for (int n = 0; n < 8; n++) {
                int inner = first + i * 16 + row + n % 2 + n / 2 % 2 * 8, outer = col + n / 4 * 8;
                bool is_there = first + i * 16 < p.key;
                numbers[i][n / 4][n % 4] = is_there ? a[BACK ? outer * WIDTH + inner : inner * WIDTH + outer] : 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < DEPTH / 16; i++) {
            u32 left[4], rest[4];
            load_left(left, states[0], PITCH, 0, first + i * 16);
            load_left(rest, states[1], PITCH, 0, first + i * 16);
#pragma unroll
            for (int part = 0; part < 2; part++) {
                u32 right[2], lost[2];
#pragma unroll
                for (int n = 0; n < 2; n++) split(numbers[i][part][2 * n], numbers[i][part][2 * n + 1], right[n], lost[n]);
                multiply_add(sums[part], left, right[0], right[1]);
                multiply_add(sums[part], left, lost[0], lost[1]);
                multiply_add(sums[part], rest, right[0], right[1]);
            }
        }
    }
}

template <bool BACK> __device__ __forceinline__ void carry(const Parameters &p) {
    // [16, K] each: rounded, and what that took away.
    __shared__ __align__(16) u16 states[2][16 * PITCH];
    int segment = blockIdx.x, head = blockIdx.y, stretches = stretches_of(p, segment);
    if (stretches < 2) return;
    int row = lane_of() / 4, col = warp_of() * 16, of_lane = lane_of() % 4 * 2;
    float sums[2][4];
    clear(sums);
    if (!BACK && p.states) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
            int k = col + n / 4 * 8 + of_lane + n % 2, v = blockIdx.z * 16 + row + n / 2 % 2 * 8;
            if (k < p.key && v < p.value) sums[n / 4][n % 4] = *state_at(p, segment, head, k, v);
        }
    }
    for (int i = 1;; i++) {
        float *border = border_at(p, segment, BACK ? stretches - i : i - 1, head);
        bool is_end = i == stretches;
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            int down = row + n / 2 % 2 * 8, across = col + n / 4 * 8 + of_lane;
            float2 *at = (float2 *)(border + (blockIdx.z * 16 + down) * WIDTH + across);
            float2 added = is_end ? make_float2(0.0f, 0.0f) : *at;
            float &x = sums[n / 4][n % 4], &y = sums[n / 4][n % 4 + 1];
            *at = make_float2(x, y);
            u32 pair, rest;
            split(x, y, pair, rest);
            *(u32 *)(states[0] + down * PITCH + across) = pair;
            *(u32 *)(states[1] + down * PITCH + across) = rest;
            x = added.x;
            y = added.y;
        }
        if (is_end) return;
        __syncthreads();
        // There is no A where the first state is zero.
        if (col < p.key && (i > 1 || (!BACK && p.states))) pass<BACK>(p, states, border + p.padded_value * WIDTH, col, sums);
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) delta_carry(const __grid_constant__ Parameters p) {
    carry<false>(p);
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) delta_carry_back(const __grid_constant__ Parameters p) {
    carry<true>(p);
}
