// Weights of rows whose keys come tile by tile. A lane holds parts of two rows, as bf16.cuh says.

struct Softmax {
    // Of this lane's two rows: what is subtracted from scores, and its share of the sum of exponentials, both in powers
    // of two.
    float highest[2], sum[2];
};

// Before the first tile. One of a row's four lanes has the sink's exponential.
__device__ __forceinline__ Softmax begin_softmax(const Parameters &p, int head) {
    if constexpr (CHANGES) {
        float sink = sink_of(p, head) * LOG2_E, highest = fmaxf(sink, LOWEST);
        float sum = threadIdx.x % 4 == 0 ? power_of_two(sink - highest) : 0;
        return {{highest, highest}, {sum, sum}};
    }
    return {{LOWEST, LOWEST}, {0, 0}};
}

__device__ __forceinline__ float over_row(float x, bool adds) {
    for (int distance = 1; distance < 4; distance *= 2) {
        float other = __shfl_xor_sync(0xffffffff, x, distance);
        x = adds ? x + other : fmaxf(x, other);
    }
    return x;
}

// Turns scores into weights; scales what was summed before where a row's highest score has risen.
template <int PARTS, int SUMS>
__device__ __forceinline__ void weigh(float (&scores)[PARTS][4], float (&sums)[SUMS][4], Softmax &softmax, float scale) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float highest = -INFINITY_F32;
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            highest = fmaxf(highest, fmaxf(scores[i][2 * half], scores[i][2 * half + 1]));
        }
        highest = fmaxf(softmax.highest[half], over_row(highest, false) * scale);
        float factor = power_of_two(softmax.highest[half] - highest);
        softmax.highest[half] = highest;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
#pragma unroll
            for (int n = 2 * half; n < 2 * half + 2; n++) {
                scores[i][n] = power_of_two(scores[i][n] * scale - highest);
                sum += scores[i][n];
            }
        }
        softmax.sum[half] = softmax.sum[half] * factor + sum;
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            sums[i][2 * half] *= factor;
            sums[i][2 * half + 1] *= factor;
        }
    }
}
